"""How models run on this machine: dtype, threads and packing; what is "auto" is measured."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider import arguments
from outrider.errors import ConfigurationError, UnknownName
from outrider.models import CausalModel, calibrate
from outrider.models.beside import Draft
from outrider.models.calibrate import Calibration, Setting
from outrider.models.heads import HeadModel
from outrider.models.linear import can_pack
from outrider.models.sources import DTYPES, Source

#: Target and draft model under a setting.
Build = Callable[[Setting], tuple[CausalModel, CausalModel | HeadModel | None]]


@dataclass(frozen=True)
class Wish:
    """What a user asks of the way models run; "auto" leaves it to a measurement."""

    dtype: str | torch.dtype = "auto"
    threads: int | str = "auto"
    packed: bool | str = "auto"

    def __post_init__(self) -> None:
        name = str(self.dtype).removeprefix("torch.")
        if name not in (*DTYPES, "auto"):
            raise UnknownName("dtype", name, [*DTYPES, "auto"])
        object.__setattr__(self, "dtype", name)
        if self.threads != "auto":
            do = "use 1, or 'auto' to measure"
            object.__setattr__(
                self, "threads", arguments.whole("threads", self.threads, do, least=1)
            )
        if self.packed != "auto" and not isinstance(self.packed, bool):
            arguments.refuse("packed", "'auto', True or False", self.packed, "use 'auto'")


def settle(
    wish: Wish,
    target: Source,
    drafts: Sequence[Draft],
    build: Build,
    place: torch.device,
    ahead: int,
) -> tuple[Setting, Calibration | None]:
    """The setting wished for; of several, the one that decodes `ahead` tokens a step fastest.

    `build` makes the target and the first of its draft models.
    """
    dtype = str(wish.dtype)
    if dtype == "auto":
        dtype = target.loaded_dtype() or "auto"
    if place.type != "cpu" or target.group is not None:
        return _elsewhere(wish, dtype, target, place), None
    dtypes = [dtype] if dtype != "auto" else ["bfloat16", "float32"]
    able = all(can_pack(DTYPES[name]) for name in dtypes)
    if wish.packed is True and not able:
        raise ConfigurationError(
            f"weights cannot be packed in {' or '.join(dtypes)} on this processor; got "
            "packed=True; use packed='auto' or another dtype"
        )
    packings = (
        [wish.packed] if isinstance(wish.packed, bool) else [True, False] if able else [False]
    )
    threads = [wish.threads] if isinstance(wish.threads, int) else sorted({1, os.cpu_count() or 1})
    if len(dtypes) * len(threads) * len(packings) == 1:
        return Setting(threads[0], dtypes[0], packings[0]), None
    identity = calibrate.key(target.config, *(draft.config for draft in drafts[:1]))
    for choices in (dtypes, threads, packings):
        identity += f"-{'-'.join(map(str, choices))}"
    identity += f"-{(ahead + 4) // 4}"  # processors read rows by fours: near lengths share a result
    known = calibrate.recall(identity)
    if known is None:
        known = calibrate.choose(
            build, threads=threads, dtypes=dtypes, packings=packings, num_speculative_tokens=ahead
        )
        calibrate.remember(identity, known)
    return known.setting, known


def _elsewhere(wish: Wish, dtype: str, target: Source, place: torch.device) -> Setting:
    """On a GPU nothing is measured, nor where several processes must choose alike."""
    if wish.packed is True:
        raise ConfigurationError(
            f"whole weights are packed, on a CPU; got packed=True for {target.shards} process(es) "
            f"on {place}; leave it out"
        )
    name = target.checkpoint_dtype() if dtype == "auto" else dtype
    threads = wish.threads if isinstance(wish.threads, int) else torch.get_num_threads()
    return Setting(threads, name, False)
