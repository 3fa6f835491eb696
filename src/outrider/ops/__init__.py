"""Numerical operations behind one set of names; the PyTorch reference is the specification.

Which implementation runs an operation (PyTorch reference, fast CPU code, Triton kernels) is chosen
once per device type: CUDA takes triton, a CPU takes cpu, anything else the reference, which also
runs what a backend has no code for. The environment variable OUTRIDER_OPS or `use` overrides it. An
explicit choice is never replaced: if the backend cannot run here, or cannot take these inputs,
`BackendUnavailable` says why; the automatic choice may leave such inputs to the reference. Nothing
outside this package asks which one runs.

Draws, one stream of `outrider.noise` per key. Greedy rows take the most probable tokens instead, in
descending order:

    streams(seed_B, position_B, purpose, count)     keys [B, count]
    sample(law, keys_BR)                            tokens_BR, law
    several(law, keys_BR, count, placed=())         tokens_BRK, there_BRK or None (all), law
    independent(law, rows_Bc, keys_Bc)              tokens_Bc, there_Bc, law
    survivors(law, keys_BR, phi_BR, psi_BR, width)  Survivors (parent, token, phi, psi, each [B, w])
    merit(law, keys_BR)                             perturbed scores [B, R, V], the largest wins
    perturbed(law, race_BRV)                        the same with exponential noise that is given
    largest(scores_BRV, count)                      the tokens with the best scores, there_BRK
    greedily(law, tokens_BRK, there_BRK)            the best tokens in greedy rows, these in others
    stack(laws)                                     the laws of several levels as one

    top_tokens(law, count, gap)                     a row's most probable tokens, as lists, by row
    cache_top_tokens(law)                           the law, which keeps those that are looked for

The law that a draw returns is the one to declare in the draft. It carries what the draw has
computed already (`Laws.lse_BR`, `Laws.host`), and lacks the tokens that were `placed`.

Verifying: `fused(op, draft, scores, draws)` is the verdict of a backend's kernel, or None where the
rule's own formula is to run (`engine.step.run_kernel`). `commit_tokens` cuts a step's block at stop
tokens, limits and faults. `warp` makes laws of logits; `floors` turns top-k, top-p and min-p into
thresholds.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from outrider.errors import BackendUnavailable, UnknownName
from outrider.ops.reference import draws, walking
from outrider.ops.reference.draws import (
    Survivors as Survivors,
    greedily as greedily,
    largest as largest,
    merit as merit,
    perturbed as perturbed,
)
from outrider.ops.reference.probs import (
    draw as draw,
    floors as reference_floors,
    probs as probs,
    residual as residual,
    scaled as scaled,
    select as select,
    stack as stack,
)
from outrider.ops.reference.walking import follow as follow
from outrider.row_params import SamplingRows
from outrider.types import Draft, DrawKind, Draws, Laws, Scores, Verdict

P = ParamSpec("P")
R = TypeVar("R")
VerifyKernel = Literal["chain", "block", "match", "tree", "traversal", "kseq"]
Operation = Callable[..., Any]


class Backend(NamedTuple):
    """One implementation: operations by name, those of `outrider.ops` and `verify:<kernel>`."""

    name: str
    ops: Mapping[str, Operation]
    unsupported_reason: Callable[[torch.device], str | None]  #: why it cannot run on a device
    declines: Mapping[str, Callable[..., str | None]]  #: and why not for these inputs, by operation


_MODULES = {"cpu": "outrider.ops.cpu", "triton": "outrider.ops.triton"}
NAMES = ("reference", *_MODULES)
_ENVIRONMENT = os.environ.get("OUTRIDER_OPS") or None
_override: ContextVar[str | None] = ContextVar("outrider_ops", default=None)


@cache
def load_backend(name: str) -> Backend:
    """The backend of that name; `BackendUnavailable` if it cannot be imported here."""
    if name not in NAMES:
        raise UnknownName("ops backend", name, NAMES)
    try:
        backend: Backend = import_module(_MODULES[name]).BACKEND
    except ImportError as error:
        raise BackendUnavailable(
            f"ops backend {name!r} cannot be imported: {error}; install triton, or choose "
            "OUTRIDER_OPS=cpu or OUTRIDER_OPS=reference"
        ) from error
    return backend


def explicit() -> str | None:
    """The backend that was asked for by name, if any."""
    name = _override.get() or _ENVIRONMENT
    if name is not None and name not in NAMES:
        raise UnknownName("ops backend", name, NAMES)
    return name


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Ask for a backend inside a block; None leaves it to OUTRIDER_OPS or the device.

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
            load_backend(name)
        except BackendUnavailable:
            return "reference"
    return name


def chosen(device: torch.device) -> str:
    """Name of the backend that runs on a device."""
    return explicit() or _automatic(device.type)


def find(op: str, *inputs: Any, insist: bool = True) -> Operation | None:
    """The code of the backend in charge for these inputs, or None where the reference runs.

    The first input, or the first tensor of it, says on which device. `insist`: an explicit choice
    that cannot take the inputs is an error.
    """
    first = inputs[0]
    device = (first if isinstance(first, Tensor) else first[0]).device
    asked = _override.get() or _ENVIRONMENT
    name = asked or _automatic(device.type)
    if name == "reference":
        return None
    backend = load_backend(name)
    run = backend.ops.get(op)
    if run is None:
        return None
    reason, declines = backend.unsupported_reason(device), backend.declines.get(op)
    if reason is None and declines is not None:
        reason = declines(*inputs)
    if reason is None:
        return run
    if insist and asked is not None:
        raise _refusal(name, op, reason)
    return None


def _refusal(name: str, op: str, reason: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"ops backend {name!r} cannot run {op!r}: {reason}; choose another backend or leave "
        "OUTRIDER_OPS unset"
    )


def dispatched(reference: Callable[P, R]) -> Callable[P, R]:
    """The public name of an operation: runs where `find` says, or as the reference has it."""
    name = reference.__name__

    @wraps(reference)
    def run(*inputs: P.args, **options: P.kwargs) -> R:
        own = find(name, *inputs)
        if own is None:
            return reference(*inputs, **options)
        result: R = own(*inputs, **options)
        return result

    return run


def fused(
    kernel: VerifyKernel, draft: Draft, scores: Scores, draws: Draws, *, optional: bool = False
) -> Verdict | None:
    """The verdict of a backend's kernel, or None where the rule's own formula is to run.

    `optional`: a kernel that takes only some drafts; an explicit choice does not insist on it.
    """
    verify = find(f"verify:{kernel}", draft, scores, draws, insist=not optional)
    if verify is None:
        return None
    reason = None
    if kernel != "match" and DrawKind.COUPLED in draft.kinds:
        reason = "coupled children are verified by a matching rule"
    elif kernel in ("chain", "block") and not draft.tree.is_chain:
        reason = "the draft branches"
    if reason is not None:
        asked = explicit()
        if asked is None or optional:
            return None
        raise _refusal(asked, f"verify:{kernel}", reason)
    verdict: Verdict = verify(draft, scores, draws)
    return verdict


assisted = dispatched(walking.assisted)
floors = dispatched(reference_floors)
cache_top_tokens = dispatched(draws.cache_top_tokens)
independent = dispatched(draws.independent)
top_tokens = dispatched(draws.top_tokens)
sample = dispatched(draws.sample)
commit_tokens = dispatched(walking.commit_tokens)
several = dispatched(draws.several)
streams = dispatched(draws.streams)
survivors = dispatched(draws.survivors)


def warp(logits_BRV: Tensor, sampling: SamplingRows) -> Laws:
    """Laws of raw logits under each row's sampling parameters: one place, run once per side."""
    return Laws(
        logits_BRV,
        sampling.inverse_temperature_B,
        floors(logits_BRV, sampling) if sampling.greedy != "all" and sampling.any_filter else None,
        greedy=sampling.greedy,
    )
