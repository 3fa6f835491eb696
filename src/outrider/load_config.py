"""Everything `outrider.load` can be told: one field, one option, one row of the guide's table.

The command line's options of models and drafting (`cli/options.py`) and what `model.generate` takes
(`integrations/generate_setup.py`) are made of these fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from outrider.errors import UnknownName

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from outrider.costs import Costs
    from outrider.drafters.ngram_table import Table
    from outrider.engine.speculation_policy import Planner
    from outrider.types import Verifier

    #: A model by local path, hub name, or as transformers loaded it.
    Model: TypeAlias = str | Path | PreTrainedModel
    Tokenizers: TypeAlias = str | Path | PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadConfig:
    """What is loaded, what drafts, what verifies, and how models run. For `outrider.load(config)`.

    A field that is left out has a default that is measured, remembered or taken from the models.
    The fields are read when they are loaded: values are refused there. Raises UnknownName for a
    field that there is not, with the nearest that there is.

    >>> LoadConfig(num_speculative_tokens=3).planner is None
    True
    """

    target: "Model | None" = None
    """The model whose text is generated: a local path, a hub name, or a loaded transformers model.
    None: the shipped Python-code pair. Shipped besides: "corrector", for damaged Python."""

    draft: "Model | Sequence[Model] | None" = None
    """The model that drafts, as `target`; for drafter="paths" a list, which share its paths evenly
    (SpecInfer); a folder of trained layers (docs/shallow-drafts.md) or of a head (docs/heads.md)
    for this target, or a model with another tokenizer (docs/other-tokenizers.md). Shipped:
    "whisper-base-draft" of Whisper base, "smollm2-head" of SmolLM2-135M-Instruct."""

    drafter: str | None = None
    """A name in `drafters.DRAFTERS`, which says what each takes; None: "draft_model" for a draft
    ("translated" for another tokenizer's, "either" for the shipped head), else "recall" ("suffix"
    on a GPU), "reference_lookup" with an encoder."""

    num_speculative_tokens: int | None = None
    """The depth (gamma) of a chain or tree. None: the length of `branching`, what the planner
    chooses, or what the drafter usually drafts."""

    branching: Sequence[int] | None = None
    """Children per level, e.g. (3, 2, 1): a tree instead of a chain."""

    width: int | None = None
    """Paths of "beam" and "paths"; copies of "reference_lookup"; of "dynamic_tree" the nodes
    expanded per level and the children of each (EAGLE-2's top_k)."""

    total_tokens: int | None = None
    """Drafted tokens of "dynamic_tree", the best of all candidates; or of the shape that
    `tree_acceptance` asks for."""

    tree_acceptance: Sequence[float] | None = None
    """Chance that a node's k-th child is kept, such as (0.6, 0.15, 0.05): the best fixed shape of
    `total_tokens` nodes (Sequoia)."""

    ngram: Sequence[int] | None = None
    """Shortest and longest n-gram that a lookup looks for; None: (1, 4)."""

    table: "str | Path | Table | None" = None
    """Counts for "ngram_table" and "ngram_tree": a file (`ngram_table.write`) or a `Table`; None:
    the shipped pair's."""

    shared_noise: bool = False
    """Draw with shared noise: the same seed gives the same text for any drafter."""

    drafter_options: Mapping[str, object] | None = None
    """Options that one drafter has for itself, by name."""

    draft_layers: Sequence[int] | None = None
    """Decoder layers of the target itself as the draft model, such as (0, 5)."""

    planner: "str | Planner[Any] | None" = None
    """What each step drafts. "adaptive": the draft that is worth most by acceptance so far and
    measured costs, or none; "fixed": the usual one. None: "adaptive" if no number says how much to
    draft (docs/planner.md)."""

    step_costs: "str | Path | Costs | None" = None
    """What whole steps cost, by `Costs` or its file; None: measured once, and remembered."""

    rule: "str | Verifier | None" = None
    """Name of a verification rule; None takes the default for the drafter."""

    rule_options: Mapping[str, object] | None = None
    """The rule's own options by name, such as {"lenience": 0.3}."""

    dtype: "str | torch.dtype" = "auto"
    """What weights are kept in: "float32", "bfloat16", "float16", "int8", "int4" (on a CPU), or
    "auto": a GGUF file's own blocks; else on a CPU the faster of float32 and bfloat16, elsewhere
    the checkpoint's (docs/processors.md)."""

    draft_dtype: str | None = None
    """What weights of draft models are kept in. "int8": what they read in 8 bits, on a CPU
    (docs/drafters.md); "target": in the target's dtype; None: as a draft folder says, else the
    target's."""

    device: "str | torch.device | None" = None
    """Where all models are: "cpu", "cuda" or "cuda:1"; None: a GPU if there is one."""

    threads: int | str = "auto"
    """CPU threads; "auto" measures once per machine and remembers. torch has one number of threads
    for the process: the last load sets it for all."""

    pack_weights: bool | str = "auto"
    """Whether weights are laid out for products on a CPU; "auto" measures once per machine."""

    tokenizer: "Tokenizers | None" = None
    """A tokenizer of transformers, or its path; None: the one beside the target. A processor is
    one, too, and reads images and sound of prompts as well."""

    draft_tokenizer: "Tokenizers | None" = None
    """The draft model's tokenizer, or its path; None: the one beside the draft model."""

    chat_template: str | Path | None = None
    """A chat template for conversations, in Jinja: a file, or the text itself; None: the
    tokenizer's, or the processor's."""

    lora_modules: "Mapping[str, str | Path] | None" = None
    """LoRA adapters of the target by name, folders of peft: each request may have one
    (docs/adapters.md)."""

    share_encoder: bool | Literal["auto"] = "auto"
    """Whether a draft attends to the target's encoder; "auto": if the two are equal."""

    tensor_parallel: int | None = None
    """Cut the target for so many processes of torchrun: docs/scale.md."""

    trust_remote_code: bool = False
    """Run Python files that model folders bring; False refuses (docs/security.md)."""

    generation_config: str = "auto"
    """Whether the model's own holds. "auto": what it says of tokens and sampling, where a call
    says nothing; "none": it does not (docs/sampling.md)."""

    def __new__(cls, *given: object, **options: object) -> Self:
        """Refuse a name that is no field, before the fields are read."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownName("option of load", name, known)
        return super().__new__(cls)


#: Names of all options, in the order of the fields.
OPTIONS = tuple(field.name for field in fields(LoadConfig))
#: Those that may be paths.
PATHS = tuple(
    "target draft table step_costs tokenizer draft_tokenizer chat_template lora_modules".split()
)
#: Those that say which target runs, and how: what a loaded model's `generate` cannot be told.
RUNTIME = (
    "target",
    "chat_template",
    "lora_modules",
    "dtype",
    "draft_dtype",
    "device",
    "threads",
    "pack_weights",
    "tensor_parallel",
    "trust_remote_code",
    "generation_config",
)
