"""Which implementation runs an operation: PyTorch reference, fast CPU code or Triton kernels.

Chosen once per device type: CUDA takes triton, a CPU takes cpu, anything else the reference. The
environment variable OUTRIDER_OPS or `use` overrides it. A backend is one record of operations; what
it lacks runs in the reference. An explicit choice is never replaced otherwise: if the backend
cannot run here, or cannot take these inputs, `BackendUnavailable` says why. The automatic choice
may leave such inputs to the reference, which is the specification.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch

from outrider.errors import BackendUnavailable, UnknownName
from outrider.types import Draft, DrawKind, Draws, Scores, Verdict

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
def load(name: str) -> Backend:
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
            load(name)
        except BackendUnavailable:
            return "reference"
    return name


def chosen(device: torch.device) -> str:
    """Name of the backend that runs on a device."""
    return explicit() or _automatic(device.type)


def find(op: str, *inputs: Any, insist: bool = True) -> Operation | None:
    """The code of the backend in charge for these inputs, or None where the reference runs.

    The first input says on which device. `insist`: an explicit choice that cannot take the inputs
    is an error.
    """
    device = inputs[0].device
    asked = _override.get() or _ENVIRONMENT
    name = asked or _automatic(device.type)
    if name == "reference":
        return None
    backend = load(name)
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
