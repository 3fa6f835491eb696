"""Names to objects: models, tokenizer, drafter and rule. The registries meet here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from outrider import calibrate, check, verifiers
from outrider.calibrate import Calibration, Setting
from outrider.drafters import DRAFTERS, PromptLookup, Root
from outrider.drafters.make import WITH_MODEL, with_model
from outrider.drafters.ngram_file import read
from outrider.drafters.ngram_table import NgramTable, Table
from outrider.engine import Engine
from outrider.errors import ConfigurationError, UnknownName, UnsupportedModel, VocabularyMismatch
from outrider.models import SUPPORTED, CausalModel, adapt, refusals
from outrider.models.linear import can_pack
from outrider.speculator import Speculator
from outrider.types import Drafter, Verifier

SHARED = (None, "match", "coupled")  #: rules whose text depends on the seed alone
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def shipped(part: str) -> Path:
    """What the package brings: part is "target" or "draft" (folders), or "ngram.safetensors"."""
    return Path(str(files("outrider") / "pair" / part))


@dataclass(frozen=True)
class Notes:
    """How a speculator was loaded; printed by `--verbose`."""

    target: str
    draft: str | None
    device: str
    dtype: str
    threads: int
    packed: bool
    vocab_size: int
    tree_check: float
    calibration: Calibration | None


def load(
    target: str | Path | Any | None = None,
    draft: str | Path | Any | None = None,
    *,
    drafter: str | None = None,
    num_speculative_tokens: int | None = None,
    branching: Sequence[int] | None = None,
    width: int | None = None,
    total_tokens: int | None = None,
    acceptance: Sequence[float] | None = None,
    ngram: tuple[int, int] | None = None,
    table: str | Path | Table | None = None,
    coupled: bool = False,
    rule: str | Verifier | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    threads: int | str = "auto",
    packed: bool | str = "auto",
    tokenizer: Any = None,
) -> Speculator:
    """Load a target with a drafter. With no arguments: the shipped Python-code pair.

    target, draft   local paths, hub names, or loaded transformers models; drafter="paths" takes a
                    list of draft models, which share its paths evenly (SpecInfer)
    drafter         "draft_model" (default when there is a draft), "sampled_tree", "hub_tree",
                    "static_tree", "dynamic_tree", "beam", "paths", "ngram_table", "prompt_lookup"
                    or "root"
    num_speculative_tokens  the depth (gamma): tokens of a chain, of a path, or of a tree's longest
                    path. None: the length of `branching`, 5 levels of "dynamic_tree", else 4
    branching       children per level, e.g. (3, 2, 1): a tree instead of a chain
    width           paths of "beam" and "paths"; of "dynamic_tree" the nodes expanded per level and
                    the children of each (EAGLE-2's top_k)
    total_tokens    drafted tokens of "dynamic_tree", the best of all candidates; or of the shape
                    that `acceptance` asks for
    acceptance      chance that a node's k-th child is kept, k = 1, 2, ...: "static_tree",
                    "sampled_tree" and "hub_tree" take the shape of `total_tokens` nodes with the
                    most expected tokens (Sequoia), e.g. acceptance=(0.6, 0.15, 0.05)
    ngram           shortest and longest n-gram of prompt lookup, e.g. (1, 4)
    table           counts for "ngram_table": a file (`ngram_file.write`) or a `Table`; None: the
                    shipped pair's
    coupled         draw with shared noise: the same seed gives the same text for any drafter
    rule            name of a verification rule; None takes the default for the drafter
    dtype           "auto" (CPU: the faster of float32 and bfloat16, elsewhere the checkpoint's), or
                    "float32", "bfloat16", "float16"
    threads, packed "auto" measures once per machine and remembers; a number and a bool override

    Raises ConfigurationError and its kin before any prompt is read.

    >>> import outrider
    >>> speculator = outrider.load(num_speculative_tokens=3)   # doctest: +SKIP
    """
    pair_default = target is None
    if drafter is not None and drafter not in DRAFTERS:
        raise UnknownName("drafter", drafter, DRAFTERS)
    if draft is not None and drafter is not None and drafter not in WITH_MODEL:
        given = repr(draft) if isinstance(draft, (str, Path)) else f"a {type(draft).__name__}"
        raise ConfigurationError(
            f"drafter {drafter!r} has no use for a draft model; got {given}; leave it out or "
            "choose another drafter"
        )
    if pair_default:
        target = shipped("target")
        draft = shipped("draft") if draft is None and drafter in (None, *WITH_MODEL) else draft
    assert target is not None
    drafter = drafter or ("draft_model" if draft is not None else "prompt_lookup")
    if drafter in WITH_MODEL and draft is None:
        raise ConfigurationError(
            f"drafter {drafter!r} needs a draft model; got draft=None; pass draft=..., or use "
            "drafter='prompt_lookup'"
        )
    more: list[Any] = []
    if isinstance(draft, (list, tuple)):
        if not draft:
            raise ConfigurationError("no draft model; got an empty list; give at least one")
        if drafter != "paths":
            raise ConfigurationError(
                f"drafter {drafter!r} takes one draft model; got {len(draft)} in a list; use "
                "drafter='paths' for several"
            )
        draft, *more = draft
    if drafter == "ngram_table" and table is None:
        if not pair_default:
            raise ConfigurationError(
                "drafter 'ngram_table' needs a table; got table=None; give a file or a Table: "
                "drafters.ngram_table.count counts a text, drafters.ngram_file.write keeps it"
            )
        table = shipped("ngram.safetensors")
    unused = {
        "branching": branching is not None and drafter not in WITH_MODEL,
        "width": width is not None and drafter not in WITH_MODEL,
        "total_tokens": total_tokens is not None and drafter not in WITH_MODEL,
        "acceptance": acceptance is not None and drafter not in WITH_MODEL,
        "num_speculative_tokens": num_speculative_tokens is not None and drafter == "root",
        "ngram": ngram is not None and drafter != "prompt_lookup",
        "table": table is not None and drafter != "ngram_table",
        "coupled": coupled
        and drafter not in WITH_MODEL
        and getattr(rule, "name", rule) not in SHARED,
    }
    if any(unused.values()):
        name = next(name for name, given in unused.items() if given)
        raise ConfigurationError(
            f"drafter {drafter!r} has no use for {name}; got {name}={locals()[name]!r}; leave it "
            "out or choose another drafter"
        )
    gamma = num_speculative_tokens
    check.depth(gamma)
    if branching is not None and (
        isinstance(branching, str) or not all(type(n) is int and n > 0 for n in branching)
    ):
        raise ConfigurationError(
            f"branching must be positive whole numbers, one per level; got {branching!r}; "
            "write branching=(3, 2, 1)"
        )
    verifier = verifiers.get(rule) if isinstance(rule, str) else rule
    if coupled:
        verifier = verifier or verifiers.get("match")
    sources = {"target": _Source(target, "target"), "draft": _Source(draft, "draft")}
    others = [_Source(given, "draft") for given in more]
    place = _place(
        device
        or sources["target"].loaded_device()
        or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    for name, source in (*sources.items(), *(("draft", other) for other in others)):
        home = source.loaded_device()
        if home is not None and (home.type, home.index or 0) != (place.type, place.index or 0):
            raise ConfigurationError(
                "target and draft model must share a device; got a "
                f"{name} model on {home} and {place} for the rest; move one of them"
            )

    tokenizer = tokenizer or sources["target"].tokenizer()
    sizes = {k: s.config.get_text_config(decoder=True).vocab_size for k, s in sources.items() if s}
    vocab = check.vocabulary(tokenizer, sources["draft"].tokenizer(), sizes)

    named = None if table is None else "a Table" if isinstance(table, Table) else str(table)
    counted = table if table is None or isinstance(table, Table) else read(table)
    for other in others:
        theirs = other.config.get_text_config(decoder=True).vocab_size
        each = {"target": sizes["target"], "draft": theirs}
        check.vocabulary(tokenizer, other.tokenizer(), each)

    def build(setting: Setting) -> tuple[CausalModel, CausalModel | None]:
        made = [s.driven(setting, place, vocab) if s else None for s in sources.values()]
        assert made[0] is not None
        return made[0], made[1]

    setting, calibration = _settle(
        sources, build, place, dtype, threads, packed, num_speculative_tokens or 4
    )
    if place.type == "cpu":
        torch.set_num_threads(setting.threads)
    model, small = build(setting)
    rest = [other.driven(setting, place, vocab) for other in others]
    if packed is True and not getattr(model.runner, "packed", False):
        raise ConfigurationError(
            f"packed=True needs the lean runner, which runs Llama models; {sources['target']} runs "
            "through its own forward; leave it out"
        )
    drafts = [*([small] if small is not None else []), *rest]
    for one in drafts:  # a draft need not round alike in every block: fewer dummy rows
        one.min_queries = min(one.min_queries, 2)
    worst = check.trees(model, "target") if model.trees else 0.0
    for one in drafts:
        if one.trees:
            check.trees(one, "draft")
    made: Drafter
    if small is not None:
        made = with_model(
            drafter,
            small,
            num_speculative_tokens=num_speculative_tokens,
            branching=branching,
            width=width,
            total_tokens=total_tokens,
            acceptance=acceptance,
            coupled=coupled,
            more=rest,
        )
        if not all(one.trees for one in drafts) and not made.is_chain:
            raise UnsupportedModel(
                f"the draft model {sources['draft']} scores chains but not trees; got drafter "
                f"{drafter!r} with branching={branching}; use drafter='draft_model' without it"
            )
    elif drafter == "prompt_lookup":
        least, most = ngram or (1, 4)
        made = PromptLookup(gamma or 4, most_ngram=most, least_ngram=least)
    elif counted is not None:
        if counted.vocab_size != vocab:
            raise VocabularyMismatch(
                f"the n-gram table knows {counted.vocab_size} tokens, the target's tokenizer "
                f"{vocab}; count one with that tokenizer and vocab_size={vocab}"
            )
        made = NgramTable(counted, gamma or 4)
    else:
        assert drafter == "root"
        made = Root()
    if coupled and verifier is None:
        verifier = verifiers.get("match")
    notes = Notes(
        str(sources["target"]),
        ", ".join(map(str, (sources["draft"], *others))) if sources["draft"] else named,
        str(place),
        setting.dtype,
        setting.threads,
        bool(getattr(model.runner, "packed", False)),
        vocab,
        worst,
        calibration,
    )
    eos = sources["target"].eos_ids()
    return Speculator(Engine(model, made, verifier), tokenizer, eos, notes)


def _place(given: str | torch.device) -> torch.device:
    try:
        place = torch.device(given)
    except RuntimeError as error:
        raise ConfigurationError(
            f"unknown device; got {given!r}; use 'cpu', 'cuda' or 'cuda:1'"
        ) from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"torch sees {torch.cuda.device_count()} CUDA devices; got device={str(given)!r}; use "
            "device='cpu', or a build of torch for your GPU"
        )
    return place


def _settle(
    sources: dict[str, "_Source"],
    build: Any,
    place: torch.device,
    dtype: str | torch.dtype,
    threads: int | str,
    packed: bool | str,
    gamma: int,
) -> tuple[Setting, Calibration | None]:
    """The setting asked for, with what is "auto" filled in by measurement."""
    name = str(dtype).removeprefix("torch.")
    if name not in (*DTYPES, "auto"):
        raise UnknownName("dtype", name, [*DTYPES, "auto"])
    loaded = sources["target"].loaded_dtype()
    if name == "auto" and loaded is not None:
        name = loaded
    if threads != "auto" and (not isinstance(threads, int) or threads < 1):
        raise ConfigurationError(f"threads must be 'auto' or at least 1; got {threads!r}; use 1")
    if packed != "auto" and not isinstance(packed, bool):
        raise ConfigurationError(
            f"packed must be 'auto', True or False; got {packed!r}; use 'auto'"
        )
    if place.type != "cpu":
        if packed is True:
            raise ConfigurationError(
                f"weights are packed on a CPU only; got packed=True on {place}; leave it out"
            )
        name = sources["target"].checkpoint_dtype() if name == "auto" else name
        return Setting(torch.get_num_threads(), name, False), None
    names = [name] if name != "auto" else ["bfloat16", "float32"]
    able = all(can_pack(DTYPES[n]) for n in names)
    if packed is True and not able:
        raise ConfigurationError(
            f"weights cannot be packed in {' or '.join(names)} on this processor; got packed=True; "
            "use packed='auto' or another dtype"
        )
    packings = [packed] if isinstance(packed, bool) else [True, False] if able else [False]
    counts = [threads] if isinstance(threads, int) else sorted({1, os.cpu_count() or 1})
    if len(names) * len(counts) * len(packings) == 1:
        return Setting(counts[0], names[0], packings[0]), None
    identity = calibrate.key(*(s.config for s in sources.values() if s))
    identity += f"-{'-'.join(names)}-{'-'.join(map(str, counts))}-{'-'.join(map(str, packings))}"
    known = calibrate.recall(identity)
    if known is None:
        known = calibrate.choose(
            build, threads=counts, dtypes=names, packings=packings, num_speculative_tokens=gamma
        )
        calibrate.remember(identity, known)
    return known.setting, known


class _Source:
    """A model by path, hub name or object: config first, weights when they are needed."""

    def __init__(self, given: Any, role: str) -> None:
        self.given, self.role = given, role
        self._models: dict[str, Any] = {}
        self._chain_only: bool | None = None  # unknown until the first check
        self.config: Any = None
        if given is None:
            return
        if not isinstance(given, (str, Path)):
            self.config = given.config
            return
        from transformers import AutoConfig

        try:
            self.config = AutoConfig.from_pretrained(str(given))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"cannot load the {role} model; got {str(given)!r}, which is no local folder with "
                f"a config.json and no hub name that can be reached ({_first_line(error)}); check "
                "the path or download the model first"
            ) from error

    def __bool__(self) -> bool:
        return self.given is not None

    def driven(self, setting: Setting, device: torch.device, vocab: int) -> CausalModel:
        """The model behind its runner, checked once against its own forward.

        An architecture that is not listed and does not score trees falls back to chains.
        """
        refusals.check_config(self.config)
        loaded = self.model(setting.dtype, device)

        def made(chain_only: bool) -> CausalModel:
            return adapt(loaded, packed=setting.packed, vocab_size=vocab, chain_only=chain_only)

        if self._chain_only is None:
            model, self._chain_only = made(False), False
            try:
                check.paths(model, self.role)
            except UnsupportedModel:
                if self.config.model_type in SUPPORTED or not model.trees:
                    raise
                model, self._chain_only = made(True), True
                check.paths(model, self.role)
            return model
        return made(self._chain_only)

    def __str__(self) -> str:
        return str(self.given) if isinstance(self.given, (str, Path)) else type(self.given).__name__

    def loaded_dtype(self) -> str | None:
        """The dtype of a model object that was passed in."""
        if isinstance(self.given, (str, Path)) or self.given is None:
            return None
        return str(self.given.dtype).removeprefix("torch.")

    def loaded_device(self) -> torch.device | None:
        """The device of a model object that was passed in."""
        if isinstance(self.given, (str, Path)) or self.given is None:
            return None
        return torch.device(self.given.device)

    def checkpoint_dtype(self) -> str:
        """The dtype the checkpoint was saved in."""
        saved = getattr(self.config, "dtype", None)
        return str(saved).removeprefix("torch.") if saved is not None else "float32"

    def model(self, dtype: str, device: torch.device) -> Any:
        """The transformers model in this dtype."""
        if not isinstance(self.given, (str, Path)):
            if str(self.given.dtype).removeprefix("torch.") != dtype:
                raise ConfigurationError(
                    f"the {self.role} model was passed as an object in {self.given.dtype}; got "
                    f"dtype={dtype!r}; convert it yourself or pass its path"
                )
            return self.given
        if dtype not in self._models:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()
            self._models[dtype] = AutoModelForCausalLM.from_pretrained(
                str(self.given), dtype=DTYPES[dtype]
            ).to(device)
        return self._models[dtype]

    def tokenizer(self) -> Any:
        """The tokenizer beside the weights, or None."""
        if not isinstance(self.given, (str, Path)):
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.given))
        except (OSError, ValueError):
            return None

    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation config."""
        settings: Any = None
        if isinstance(self.given, (str, Path)):
            from transformers import GenerationConfig

            try:
                settings = GenerationConfig.from_pretrained(str(self.given))
            except OSError:
                settings = self.config
        elif self.given is not None:
            settings = getattr(self.given, "generation_config", None) or self.config
        found = getattr(settings, "eos_token_id", None)
        if found is None:
            return ()
        return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
