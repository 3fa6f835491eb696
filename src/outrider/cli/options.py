"""Options that several commands share, and the speculator that they ask for."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from outrider import arguments, drafters, verifiers
from outrider.cli import typed_values
from outrider.cli.console import LOADING, err, working
from outrider.cli.gathered import Command, Target as Target, Threads as Threads, gathered
from outrider.errors import ConfigurationError, first_line
from outrider.load_config import PATHS, RUNTIME, LoadConfig
from outrider.models.cpu_kernels import build

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.text.speculator import Speculator

Draft = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Draft model: path, hub name or draft folder. Default: shipped, if the target is.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="A chat template in Jinja, by its file or its text. Default: the tokenizer's."
    ),
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-modules",
        metavar="NAME=FOLDER",
        help="A LoRA adapter of the target that requests may name; may be repeated "
        "(docs/adapters.md).",
    ),
]
DraftLayers = Annotated[
    str | None,
    typer.Option(help="Decoder layers of the target itself as the draft model, e.g. 0,5."),
]
Planned = Annotated[
    str | None,
    typer.Option(
        "--planner",
        help="What to draft in each step: adaptive (what is worth most, or nothing; the default if "
        "no number says how much), or fixed. Greedy and coupled texts stay the same.",
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--step-costs", help="What steps cost: a file of Costs.write. Default: measured once."
    ),
]
NumBeams = Annotated[
    int, typer.Option(min=1, help="Beams of a search in place of one text; 1 is off.")
]
LengthPenalty = Annotated[float, typer.Option(help="Of beams: above 0 long ones win more often.")]
_KNOWN = f"Known: {', '.join(drafters.names())}."
DrafterName = Annotated[
    str | None,
    typer.Option(
        help="What drafts. Default: draft_model; without one recall (on a GPU suffix), or "
        f"reference_lookup for an encoder-decoder. {_KNOWN}"
    ),
]
SpeechDrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="What drafts. Default: draft_model; without one reference_lookup where there is a "
        f"--reference, else nothing. {_KNOWN}",
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        max=1024,
        help="Drafted tokens in a row: length of a chain, depth of a tree. Default: as "
        "--branching has it, 5 for dynamic_tree, 8 for lookups, else 4.",
    ),
]
Branching = Annotated[str | None, typer.Option(help="Children per level, e.g. 3,2,1.")]
Width = Annotated[
    int | None,
    typer.Option(
        max=1024,
        help="Paths of beam and paths; nodes per level of dynamic_tree; copies of "
        "reference_lookup.",
    ),
]
TotalTokens = Annotated[
    int | None,
    typer.Option(max=4096, help="Drafted tokens of dynamic_tree, or with --tree-acceptance."),
]
Acceptance = Annotated[
    str | None,
    typer.Option(help="Best static shape for these chances by child, e.g. 0.6,0.15,0.05."),
]
Ngram = Annotated[
    str | None, typer.Option(help="Shortest and longest n-gram of lookups, e.g. 2,4. Default: 1,4.")
]
Table = Annotated[
    str | None,
    typer.Option(
        help="File of counts for ngram_table and ngram_tree. Default: the shipped pair's, with it."
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(
        help="What accepts drafted tokens. Default: an exact rule that fits the drafter. Known: "
        f"{', '.join(verifiers.names())}."
    ),
]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter-option",
        metavar="NAME=VALUE",
        help="An option that one drafter has for itself; may be repeated.",
    ),
]
RuleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rule-option",
        metavar="NAME=VALUE",
        help="An option of the rule, e.g. lenience=0.3 of lenience; may be repeated.",
    ),
]
Coupled = Annotated[
    bool, typer.Option("--shared-noise", help="Same seed, same text, whatever the drafter.")
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 is off.")]
TopP = Annotated[
    float, typer.Option(help="Keep the fewest tokens that reach this probability; 1 is off.")
]
MinP = Annotated[
    float, typer.Option(help="Keep tokens with this share of the best one's probability; 0 is off.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU if there is one.")
]
Dtype = Annotated[
    str,
    typer.Option(
        help="What weights are kept in: float32, bfloat16, float16, int8 or int4; auto: a GGUF "
        "file's own blocks, else measured on a CPU, elsewhere the checkpoint's."
    ),
]
DraftDtype = Annotated[
    str | None,
    typer.Option(
        help="int8 keeps what draft models read in 8 bits, on a CPU: half the bytes and other "
        "drafts; the text keeps its distribution. target: in the target's dtype. Default: as a "
        "draft folder says (whisper-base-draft: int8), else the target's."
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(min=2, help="Cut the target for so many processes of torchrun (docs/scale.md)."),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="auto: what the model's generation_config.json says holds where no option says else "
        "(temperature, filters, penalties, bans); none: it does not."
    ),
]
TemperatureGiven = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", help="0 is greedy. Default: the model's own, if it has one, else 0."
    ),
]
TopKGiven = Annotated[
    int | None, typer.Option(help="Keep the k most probable tokens; 0 is off, the usual default.")
]
TopPGiven = Annotated[
    float | None,
    typer.Option(help="Keep the fewest tokens that reach this probability; 1 is off, as usual."),
]
MinPGiven = Annotated[
    float | None,
    typer.Option(help="Keep tokens with this share of the best one's probability; 0 is off."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python files that a model folder brings, if it does: read them first. "
        "Without this such a model is refused (docs/security.md).",
    ),
]
SourceText = Annotated[
    str | None,
    typer.Option(
        "--source",
        metavar="TEXT|FILE|-",
        help="What an encoder-decoder reads: a file, - for standard input, or the text. The "
        "prompt is then what its answer begins with, and may be left out.",
    ),
]
ImageFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        help="An image file that the prompt is about, for image-text models; may be repeated. The "
        "prompt is asked as one message of a chat (docs/images.md).",
    ),
]
AudioFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--audio",
        help="A recording that the prompt is about, for audio language models; may be repeated.",
    ),
]
ReferenceFile = Annotated[
    Path | None,
    typer.Option(
        "--reference",
        help="A file to copy from, by the drafter reference_lookup, which is the default then. "
        "An encoder-decoder copies from its source without one.",
    ),
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="A line a step: what became of drafted tokens: accepted, [-rejected-], {+corrected+} "
        "and {*bonus*}; on a terminal in colours.",
    ),
]
Timeline = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        help="Draw when the models were called, and standard decoding below it, to a .png or "
        ".svg; decoded again, twice each.",
    ),
]
AsChat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="The prompt is what a user says, in the model's chat template; what comes back is the "
        "answer.",
    ),
]
System = Annotated[
    str | None, typer.Option(help="With --chat: what the model is told before the user speaks.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Say how the models run, what drafts and what verifies."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@dataclass
class TypedSampling:
    """Options of sampling; what is left out is the model's own."""

    temperature: TemperatureGiven = None
    top_k: TopKGiven = None
    top_p: TopPGiven = None
    min_p: MinPGiven = None

    def said(self, **more: object) -> dict[str, Any]:
        """What was typed, by the names of `SamplingParams`, and what was typed besides."""
        return {name: one for name, one in {**vars(self), **more}.items() if one is not None}


#: How each field of `LoadConfig` is typed.
TYPED: dict[str, Any] = {
    "target": Target,
    "chat_template": ChatTemplate,
    "lora_modules": LoraModules,
    "draft": Draft,
    "draft_layers": DraftLayers,
    "drafter": DrafterName,
    "num_speculative_tokens": Gamma,
    "branching": Branching,
    "width": Width,
    "total_tokens": TotalTokens,
    "tree_acceptance": Acceptance,
    "ngram": Ngram,
    "table": Table,
    "drafter_options": DrafterOption,
    "rule": Rule,
    "rule_options": RuleOption,
    "shared_noise": Coupled,
    "planner": Planned,
    "step_costs": CostsFile,
    "draft_dtype": DraftDtype,
    "device": Device,
    "threads": Threads,
    "tensor_parallel": TensorParallel,
    "trust_remote_code": TrustRemoteCode,
    "generation_config": GenerationConfig,
}
#: Fields that are not among these options, and why.
NOT_TYPED = {
    "dtype": "each command has its own --dtype: certify keeps float32, the others what is fastest",
    "pack_weights": "measured once per machine; set to compare, from Python",
    "tokenizer": "read beside the model",
    "draft_tokenizer": "read beside the draft model",
    "share_encoder": "found out by comparing weights",
}


def config_of(typed: Mapping[str, Any]) -> LoadConfig:
    """What was typed, by the names of fields; None and empty lists are left out."""
    read: dict[str, Any] = {
        name: _READ[name](value) if name in _READ else value
        for name, value in typed.items()
        if value is not None and value != []
    }
    paths = {name: arguments.at_home(value) for name, value in read.items() if name in PATHS}
    return LoadConfig(**read | paths)


def choices(config: LoadConfig) -> list[str]:
    """Names of options that choose a drafter or a rule."""
    models = {*RUNTIME, "draft", "draft_layers", "step_costs"}
    usual = arguments.fields_of(LoadConfig(), TYPED)
    given = arguments.fields_of(config, TYPED)
    return [flag(name) for name in TYPED if name not in models and given[name] != usual[name]]


def flag(field: str) -> str:
    """What a field of `LoadConfig` is called in a shell.

    >>> flag("rule_options"), flag("target"), flag("width")
    ('--rule-option', '--model', '--width')
    """
    option = get_args(TYPED[field])[1]
    said = (option.default, *(option.param_decls or ()))  # typer keeps the first as a default
    return next((one for one in said if str(one).startswith("--")), f"--{field.replace('_', '-')}")


def target_name(config: LoadConfig) -> str | None:
    """The target as it was typed; None: the shipped one."""
    return None if config.target is None else str(config.target)


def load_speculator(config: LoadConfig, dtype: str) -> "Speculator":
    """`outrider.load` with this dtype, while the terminal says so.

    Raises ConfigurationError for a folder without a tokenizer before its weights are read.
    """
    from outrider.loading import load
    from outrider.models.config import folder_fields
    from outrider.models.pretrained import tokenizer_files

    folder = Path(str(config.target or ""))
    fields = folder_fields(folder) if config.target is not None else {}
    # what names code of its own is refused for that, or brings its tokenizer with it
    if fields and "auto_map" not in fields and not tokenizer_files(folder):
        raise ConfigurationError(
            f"no tokenizer was found with the model; got {folder}; put its tokenizer.json, or what "
            "its family has in place of one, beside its weights"
        )
    with working(LOADING):
        return load(replace(config, dtype=dtype))


def refuse_adapters(config: LoadConfig) -> None:
    """Of commands whose prompts name no model."""
    if config.lora_modules:
        raise ConfigurationError(
            "--lora-modules are for requests that name one (serve, batch); got "
            f"{', '.join(config.lora_modules)}; give its folder as --model: it is merged"
        )


def measure(engine: "Engine") -> None:
    """What steps cost, when the text is whole; not where kernels are still being compiled.

    Whatever goes wrong here, the text is there.
    """
    try:
        if not engine.budget.over():
            engine.priced(1, again=True)
    except KeyboardInterrupt:
        return
    except (MemoryError, RuntimeError) as error:
        err.print("what steps cost was not measured:", first_line(error), markup=False)


def compile_ahead(device: object) -> None:
    """Begin to compile kernels, where there are none yet, before torch is imported.

    Without a device named, a machine with a card of NVIDIA's runs models there.
    """
    if device == "cpu" or (device is None and not Path("/dev/nvidiactl").exists()):
        build.start()


def with_setup(command: Command) -> Command:
    """A command whose parameter `setup` is a `LoadConfig`, typed as one option per field."""

    @functools.wraps(command)
    def run(setup: Any, **typed: object) -> None:
        config = config_of(vars(setup))
        compile_ahead(config.device)
        command(setup=config, **typed)

    return gathered("setup", _AsTyped, "Model and drafting")(run)


def _default(field: str) -> object:
    """As `LoadConfig` has it; None where an option may be left out."""
    able = type(None) in get_args(get_args(TYPED[field])[0])
    return None if able else getattr(LoadConfig(), field)


#: One field per option, as it is typed.
_AsTyped = make_dataclass("_AsTyped", [(name, TYPED[name], _default(name)) for name in TYPED])


#: Fields whose options are typed as text.
_READ: dict[str, Callable[[Any], object]] = {
    # read here: another process has no /dev/fd/63, another machine not the file
    "chat_template": arguments.template,
    "branching": typed_values.branching,
    "tree_acceptance": lambda given: typed_values.numbers(
        "--tree-acceptance", given, float, "0.6,0.15,0.05"
    ),
    "ngram": lambda given: typed_values.numbers("--ngram", given, int, "1,4"),
    "draft_layers": lambda given: typed_values.numbers("--draft-layers", given, int, "0,5"),
    "drafter_options": lambda given: typed_values.by_name("--drafter-option", given, "count=3"),
    "rule_options": lambda given: typed_values.by_name("--rule-option", given, "lenience=0.3"),
    "lora_modules": lambda given: typed_values.folders("--lora-modules", given),
}
