"""Which implementation judges drafts: PyTorch reference, fast CPU code or Triton kernels.

Chosen once per device type: CUDA takes triton, a CPU takes cpu, anything else the reference. The
environment variable OUTRIDER_OPS or `use` overrides it. An explicit choice is never replaced: if it
cannot run here, or cannot judge a draft, `BackendUnavailable` says why. The automatic choice may
leave a draft to the rule's own PyTorch code, which is the specification.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outrider import noise
from outrider.errors import BackendUnavailable, UnknownName
from outrider.types import Draft, Draws, Laws, Scores, Verdict

Op = Literal["chain", "block", "match", "tree", "traversal", "kseq"]
Judge = Callable[[Draft, Scores, Draws], Verdict]
Sampler = Callable[[Laws, Tensor], tuple[Tensor, Tensor]]
Floors = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]


class Backend(NamedTuple):
    """One implementation of the fused operations."""

    name: str
    judges: Mapping[str, Judge]
    sample: Sampler
    unfit: Callable[[torch.device], str | None]  #: why it cannot run on a device
    declines: Callable[[str, Draft, Scores], str | None]  #: why it cannot judge a draft
    floors: Floors | None = None  #: top-k, top-p and min-p as thresholds


_MODULES = {"cpu": "outrider.ops.cpu", "triton": "outrider.ops.triton"}
NAMES = ("reference", *_MODULES)
_FEW_ROWS = 16  #: up to this many rows integers of Python are faster than tensors
_ENVIRONMENT = os.environ.get("OUTRIDER_OPS") or None
_override: ContextVar[str | None] = ContextVar("outrider_ops", default=None)


@cache
def load(name: str) -> Backend:
    """The backend of that name; `BackendUnavailable` if it cannot be imported here."""
    if name not in NAMES:
        raise UnknownName("ops backend", name, NAMES)
    try:
        found: Backend = import_module(_MODULES[name]).BACKEND
    except ImportError as error:
        raise BackendUnavailable(
            f"ops backend {name!r} cannot be imported: {error}; install triton, or choose "
            "OUTRIDER_OPS=cpu or OUTRIDER_OPS=reference"
        ) from error
    return found


def explicit() -> str | None:
    """The backend that was asked for by name, if any."""
    name = _override.get() or _ENVIRONMENT
    if name is not None and name not in NAMES:
        raise UnknownName("ops backend", name, NAMES)
    return name


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Ask for a backend inside a block; None goes back to the automatic choice.

    >>> with use("reference"):
    ...     chosen(torch.device("cpu"))
    'reference'
    """
    if name is not None and name not in NAMES:
        raise UnknownName("ops backend", name, NAMES)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


@cache
def _automatic(kind: str) -> str:
    name = {"cuda": "triton", "cpu": "cpu"}.get(kind, "reference")
    if name == "triton":
        try:
            load(name)
        except BackendUnavailable:
            return "reference"
    return name


def chosen(device: torch.device) -> str:
    """Name of the backend that runs on a device."""
    return explicit() or _automatic(device.type)


def fused(
    op: Op, draft: Draft, scores: Scores, draws: Draws, *, optional: bool = False
) -> Verdict | None:
    """The backend's verdict, or None where the rule's own PyTorch code is to run.

    `optional`: an operation that not every backend has; an explicit choice does not insist on it.
    """
    device = scores.laws.logits_BRV.device
    name = chosen(device)
    if name == "reference":
        return None
    backend = load(name)
    judge = backend.judges.get(op)
    reason = "it has no such operation" if judge is None else backend.unfit(device)
    reason = reason or backend.declines(op, draft, scores)
    if judge is not None and reason is None:
        return judge(draft, scores, draws)
    if explicit() is not None and not optional:
        raise BackendUnavailable(
            f"ops backend {name!r} cannot run {op!r}: {reason}; choose another backend or leave "
            "OUTRIDER_OPS unset"
        )
    return None


def on_host(device: torch.device) -> bool:
    """Whether the CPU code is in charge and may read values."""
    return device.type == "cpu" and chosen(device) == "cpu"


def streams(seed_B: Tensor, position_B: Tensor, purpose: noise.Purpose, count: int) -> Tensor:
    """`count` keys [B, count] of each row: `noise.split` of `noise.stream`."""
    if seed_B.shape[0] <= _FEW_ROWS and on_host(seed_B.device):
        from outrider.ops.cpu.keys import split

        return split(seed_B, position_B, purpose, count)
    return noise.split(noise.stream(seed_B, position_B, purpose), count)


def several(
    laws: Laws, keys_BR: Tensor, count: int, placed: Sequence[int] = ()
) -> tuple[Tensor, Tensor] | None:
    """Draws without replacement, `outrider.ops.cpu.sample.several`, or None for the plain way."""
    if not on_host(laws.logits_BRV.device):
        return None
    from outrider.ops.cpu.sample import several as on_cpu

    return on_cpu(laws, keys_BR, count, placed)


def independent(laws: Laws, rows_Bc: Tensor, keys_Bc: Tensor) -> tuple[Tensor, Tensor] | None:
    """One draw each from chosen law rows, `outrider.ops.cpu.sample.independent`, or None."""
    if not on_host(laws.logits_BRV.device):
        return None
    from outrider.ops.cpu.sample import independent as on_cpu

    return on_cpu(laws, rows_Bc, keys_Bc)


def nucleus(
    logits_BRV: Tensor, inverse_B: Tensor, top_k_B: Tensor | None, top_p_B: Tensor
) -> Tensor | None:
    """Top-k and top-p as floors [B, R] without sorting whole rows, or None for the plain way."""
    if not on_host(logits_BRV.device):
        return None
    from outrider.ops.cpu.nucleus import nucleus as on_cpu

    return on_cpu(logits_BRV, inverse_B, top_k_B, top_p_B)


def floors(
    logits_BRV: Tensor,
    inverse_B: Tensor,
    top_k_B: Tensor | None,
    top_p_B: Tensor | None,
    min_p_B: Tensor | None,
) -> Tensor | None:
    """All filters as floors [B, R] by the backend's own selection, or None for the plain way.

    k = 0, p = 1 and min_p = 0 switch a filter off in a row; None switches it off in all rows.
    """
    device = logits_BRV.device
    name = chosen(device)
    if name == "reference" or load(name).floors is None:
        return None
    backend = load(name)
    reason = backend.unfit(device)
    if reason is None and logits_BRV.dtype is torch.float64:
        reason = "kernels compute in float32; got float64 logits"
    if reason is None and logits_BRV.shape[0] > 65_535:
        reason = "a grid has at most 65535 rows; split the batch"
    if reason is None and backend.floors is not None:
        return backend.floors(logits_BRV, inverse_B, top_k_B, top_p_B, min_p_B)
    if explicit() is not None:
        raise BackendUnavailable(f"ops backend {name!r} cannot filter: {reason}")
    return None


def sampler(device: torch.device) -> Sampler | None:
    """The backend's draft-step sampler, or None for the reference."""
    name = chosen(device)
    if name == "reference":
        return None
    backend = load(name)
    reason = backend.unfit(device)
    if reason is None:
        return backend.sample
    if explicit() is not None:
        raise BackendUnavailable(f"ops backend {name!r} cannot sample: {reason}")
    return None
