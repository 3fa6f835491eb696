"""Names to objects: models, tokenizer, drafter and rule. The registries meet here."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from outrider import arguments, calibrate, check, verifiers
from outrider.calibrate import Calibration, Setting
from outrider.drafters import DRAFTERS, Root, asked
from outrider.drafters.make import WITH_MODEL, prompt_lookup, with_model
from outrider.drafters.ngram_file import read
from outrider.drafters.ngram_table import NgramTable, Table
from outrider.engine import Engine
from outrider.errors import ConfigurationError, UnknownName, UnsupportedModel, VocabularyMismatch
from outrider.models import CausalModel
from outrider.models.linear import can_pack
from outrider.sources import DTYPES, Source, read_tokenizer, usable
from outrider.speculator import Speculator
from outrider.types import Drafter, Verifier

SHARED = (None, "match", "coupled")  #: rules whose text depends on the seed alone


def shipped(part: str) -> Path:
    """What the package brings: part is "target" or "draft" (folders), or "ngram.safetensors"."""
    return Path(str(files("outrider") / "pair" / part))


def parameters(which: str) -> int:
    """How many parameters a shipped model ("target" or "draft") has, read from its weights' header.

    >>> parameters("target")
    20328704
    """
    with safe_open(shipped(which) / "model.safetensors", "pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())


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
                    path. None: the length of `branching`, 5 levels of "dynamic_tree", 8 tokens
                    of "prompt_lookup", which cost nothing to draft, else 4
    branching       children per level, e.g. (3, 2, 1): a tree instead of a chain
    width           paths of "beam" and "paths"; of "dynamic_tree" the nodes expanded per level and
                    the children of each (EAGLE-2's top_k)
    total_tokens    drafted tokens of "dynamic_tree", the best of all candidates; or of the shape
                    that `acceptance` asks for
    acceptance      chance that a node's k-th child is kept, k = 1, 2, ...: "static_tree",
                    "sampled_tree" and "hub_tree" take the shape of `total_tokens` nodes with the
                    most expected tokens (Sequoia), e.g. acceptance=(0.6, 0.15, 0.05)
    ngram           shortest and longest n-gram of prompt lookup; None: (1, 4)
    table           counts for "ngram_table": a file (`ngram_file.write`) or a `Table`; None: the
                    shipped pair's
    coupled         draw with shared noise: the same seed gives the same text for any drafter
    rule            name of a verification rule; None takes the default for the drafter
    dtype           "auto" (CPU: the faster of float32 and bfloat16, elsewhere the checkpoint's), or
                    "float32", "bfloat16", "float16"
    threads, packed "auto" measures once per machine and remembers; a number and a bool override
    tokenizer       a tokenizer of transformers, or its path; None: the one beside the target

    Raises ConfigurationError and its kin before any prompt is read.

    >>> import outrider
    >>> speculator = outrider.load(num_speculative_tokens=3)   # doctest: +SKIP
    """
    pair_default = target is None
    if drafter is not None:
        asked.name(drafter)
    if not isinstance(coupled, bool):
        arguments.refuse("coupled", "True or False", coupled, "leave it out for False")
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
    gamma = asked.shape(
        num_speculative_tokens=num_speculative_tokens,
        branching=branching,
        width=width,
        total_tokens=total_tokens,
        acceptance=acceptance,
    )["num_speculative_tokens"]
    lookup = prompt_lookup(gamma, ngram)
    verifier = verifiers.named(rule)
    if coupled:
        verifier = verifier or verifiers.get("match")
    sources = {"target": Source(target, "target"), "draft": Source(draft, "draft")}
    others = [Source(given, "draft") for given in more]
    place = usable(
        device
        if device is not None
        else sources["target"].loaded_device() or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    for name, source in (*sources.items(), *(("draft", other) for other in others)):
        home = source.loaded_device()
        if home is not None and (home.type, home.index or 0) != (place.type, place.index or 0):
            raise ConfigurationError(
                "target and draft model must share a device; got a "
                f"{name} model on {home} and {place} for the rest; move one of them"
            )

    if tokenizer is None:
        tokenizer = sources["target"].tokenizer()
    else:
        tokenizer = read_tokenizer(tokenizer)
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

    ahead = lookup.num_speculative_tokens if drafter == "prompt_lookup" else gamma or 4
    setting, calibration = _settle(sources, build, place, dtype, threads, packed, ahead)
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
            num_speculative_tokens=gamma,
            branching=branching,
            width=width,
            total_tokens=total_tokens,
            acceptance=acceptance,
            coupled=coupled,
            more=rest,
        )
        if not all(one.trees for one in drafts) and not made.shapes[0].is_chain:
            raise UnsupportedModel(
                f"the draft model {sources['draft']} scores chains but not trees; got drafter "
                f"{drafter!r} with branching={branching}; use drafter='draft_model' without it"
            )
    elif drafter == "prompt_lookup":
        made = lookup
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


def _settle(
    sources: dict[str, Source],
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
    if threads != "auto":
        threads = arguments.whole("threads", threads, "use 1, or 'auto' to measure", least=1)
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
    identity += f"-{(gamma + 4) // 4}"  # processors read rows by fours: near lengths share a result
    known = calibrate.recall(identity)
    if known is None:
        known = calibrate.choose(
            build, threads=counts, dtypes=names, packings=packings, num_speculative_tokens=gamma
        )
        calibrate.remember(identity, known)
    return known.setting, known
