"""How models run on this machine: dtype, threads and packing; what is "auto" is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from outrider import arguments
from outrider.errors import ConfigurationError, UnknownName
from outrider.models import TreeDecoder, calibrate, isa, weight_only
from outrider.models.calibrate import Calibration, Setting
from outrider.models.cpu_kernels import int8
from outrider.models.draft_source import DraftSource
from outrider.models.linear import can_pack, supports_unpacked
from outrider.models.sources import DTYPES, ModelSource
from outrider.models.weight_only import QUANTISED
from outrider.types import LanguageModel

INT8 = "int8"  #: what a draft may be kept in beside a target of another type
TARGET = "target"  #: or the target's, whatever a draft says of itself
#: What weights can be kept in; "auto" is as fast as it gets, or as a GGUF file has them.
WEIGHTS = (*DTYPES, *QUANTISED)

#: Target and draft model under a setting.
Build = Callable[[Setting], tuple[TreeDecoder, LanguageModel | None]]


@dataclass(frozen=True)
class RuntimeOptions:
    """What a user asks of the way models run; "auto" leaves it to a measurement."""

    dtype: str | torch.dtype = "auto"
    threads: int | str = "auto"
    pack_weights: bool | str = "auto"
    draft_dtype: str | None = None  #: of what draft models read; None: what they say, or the dtype

    def __post_init__(self) -> None:
        name = str(self.dtype).removeprefix("torch.")
        if name not in (*WEIGHTS, "auto"):
            raise UnknownName("dtype", name, [*WEIGHTS, "auto"])
        object.__setattr__(self, "dtype", name)
        if self.threads != "auto":
            do = "use 1, or 'auto' to measure"
            object.__setattr__(
                self, "threads", arguments.whole("threads", self.threads, do, least=1)
            )
        if self.pack_weights != "auto" and not isinstance(self.pack_weights, bool):
            arguments.refuse(
                "pack_weights", "'auto', True or False", self.pack_weights, "use 'auto'"
            )
        if self.draft_dtype not in (None, INT8, TARGET):
            what, do = f"{INT8!r}, {TARGET!r} or None", "leave it out for what the draft says"
            arguments.refuse("draft_dtype", what, self.draft_dtype, do)


def resolve_runtime(
    wish: RuntimeOptions,
    target: ModelSource,
    drafts: Sequence[DraftSource],
    build: Build,
    place: torch.device,
    ahead: int,
) -> tuple[Setting, Calibration | None]:
    """The setting wished for; of several, the one that decodes `ahead` tokens a step fastest.

    `build` makes the target and the first of its draft models. Raises ConfigurationError for what
    cannot be had.
    """
    kept = _kept(wish, drafts, place)
    if place.type != "cpu" or target.group is not None:
        return _elsewhere(wish, target, place), None
    dtypes = _dtypes(wish, target, place)
    packings = _packings(wish, dtypes, target, place)
    threads = [wish.threads] if isinstance(wish.threads, int) else sorted({1, calibrate.cores()})
    if len(dtypes) * len(threads) * len(packings) == 1:
        return Setting(threads[0], dtypes[0], packings[0], kept), None
    measured = (target, *drafts[:1])
    stored = [source.stored_types for source in measured]
    about = (repr(kept) if kept else "") + "".join(stored)
    identity = calibrate.key(*(source.config for source in measured), about=about)
    for choices in (dtypes, threads, packings):
        identity += f"-{'-'.join(map(str, choices))}"
    identity += f"-{(ahead + 4) // 4}"  # processors read rows by fours: near lengths share a result

    def made(setting: Setting) -> tuple[TreeDecoder, LanguageModel | None]:
        return build(replace(setting, draft_dtype=kept))

    known = calibrate.recall(identity)
    doubted = known is None or not known.agreed
    if known is None:
        known = calibrate.choose(
            made,
            threads=threads,
            dtypes=dtypes,
            packings=packings,
            num_speculative_tokens=ahead,
        )
    elif known.doubted:
        known = calibrate.choose_again(known, made, threads=threads, num_speculative_tokens=ahead)
    if doubted:
        calibrate.remember(identity, known)
    return replace(known.setting, draft_dtype=kept), known


def needs_kernels(wish: RuntimeOptions, target: ModelSource) -> bool:
    """Whether a CPU has these weights by compiled kernels alone, or several times as large."""
    return target.in_blocks or _asked(wish, target) in QUANTISED


def _asked(wish: RuntimeOptions, target: ModelSource) -> str:
    return target.loaded_dtype() or "auto" if wish.dtype == "auto" else str(wish.dtype)


def _dtypes(wish: RuntimeOptions, target: ModelSource, place: torch.device) -> list[str]:
    """What weights may be kept in on this CPU: what is asked for, or what there is to choose from.

    Raises ConfigurationError for a type that is not to be had.
    """
    dtype = _asked(wish, target)
    why = weight_only.unsupported_reason(place)
    if dtype in QUANTISED and why:
        raise ConfigurationError(
            f"dtype={dtype!r} is not to be had here: {why}; use {', '.join(DTYPES)} or 'auto'"
        )
    if dtype != "auto":
        return [dtype]
    if target.quantised_by is not None:  # its layers want states as they were saved with
        return [target.checkpoint_dtype()]
    if target.in_blocks and not why:
        return [weight_only.STORED]
    if isa.has_bf16_products():
        return ["bfloat16", "float32"]
    if why:  # what torch has for bfloat16 takes longer with every row
        return ["float32"]
    return ["bfloat16"] if target.checkpoint_dtype() == "bfloat16" else ["bfloat16", "float32"]


def _packings(
    wish: RuntimeOptions, dtypes: list[str], target: ModelSource, place: torch.device
) -> list[bool]:
    """Whether to lay weights out for products. Those of a type of their own always are."""
    plain = [name for name in dtypes if not target.keeps(name, place)]
    if len(plain) < len(dtypes):
        return [wish.pack_weights] if plain and isinstance(wish.pack_weights, bool) else [True]
    able = all(can_pack(DTYPES[name]) for name in dtypes)
    if wish.pack_weights is True and not able:
        raise ConfigurationError(
            f"weights cannot be packed in {' or '.join(dtypes)} on this processor; got "
            "pack_weights=True; use pack_weights='auto' or another dtype"
        )
    if isinstance(wish.pack_weights, bool):
        return [wish.pack_weights]
    if all(supports_unpacked(DTYPES[name]) for name in dtypes):
        return [True]  # layers of type Linear take no more memory, and nothing is faster
    return [True, False] if able else [False]


def _kept(wish: RuntimeOptions, drafts: Sequence[DraftSource], place: torch.device) -> str | None:
    """What draft models are kept in: as is asked, or as they say where it can be had."""
    if wish.draft_dtype == INT8:
        _check_int8(drafts, place)
        return INT8
    usual = wish.draft_dtype is None and _say_int8(drafts) and not int8.unsupported_reason(place)
    return INT8 if usual else None


def _say_int8(drafts: Sequence[DraftSource]) -> bool:
    """Whether all drafts say of themselves that they are best kept in 8 bits."""
    said = [draft.draft_dtype == INT8 for draft in drafts]
    return bool(said) and all(said)


def describe_draft_dtype(
    wish: RuntimeOptions, drafts: Sequence[DraftSource], setting: Setting, place: torch.device
) -> str | None:
    """What draft models read is kept in, in words; None: in the target's dtype, as is usual."""
    if setting.draft_dtype is None and wish.draft_dtype is None and _say_int8(drafts):
        return f"{setting.dtype} (int8 is not to be had: {int8.unsupported_reason(place)})"
    return setting.draft_dtype


def _check_int8(drafts: Sequence[DraftSource], place: torch.device) -> None:
    """Refuse 8 bits where nothing is there to be kept so, or nothing to compute with it."""
    if not drafts:
        raise ConfigurationError(
            "draft_dtype is for a draft model; got draft_dtype='int8' and none; give draft=..., or "
            "leave it out"
        )
    for draft in drafts:
        if not draft.takes_int8:
            raise ConfigurationError(
                "draft_dtype='int8' is for draft models, layers of the target and EAGLE-3 heads; "
                f"got the head {draft}; leave it out"
            )
    unfit = int8.unsupported_reason(place)
    if unfit:
        raise ConfigurationError(
            f"draft_dtype='int8' is not to be had here: {unfit}; got a draft {drafts[0]}; leave it "
            "out"
        )


def _elsewhere(wish: RuntimeOptions, target: ModelSource, place: torch.device) -> Setting:
    """On a GPU nothing is measured, nor where several processes must choose alike."""
    dtype = target.loaded_dtype() or "auto" if wish.dtype == "auto" else str(wish.dtype)
    if dtype in QUANTISED:
        raise ConfigurationError(
            f"dtype={dtype!r} is for one process on a CPU; got {target.shards} process(es) on "
            f"{place}; use {', '.join(DTYPES)} or 'auto'"
        )
    if wish.pack_weights is True:
        raise ConfigurationError(
            f"whole weights are packed, on a CPU; got pack_weights=True for {target.shards} "
            f"process(es) "
            f"on {place}; leave it out"
        )
    name = target.checkpoint_dtype() if dtype == "auto" else dtype
    threads = wish.threads if isinstance(wish.threads, int) else torch.get_num_threads()
    return Setting(threads, name, False, wish.draft_dtype)
