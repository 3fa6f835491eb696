"""Exact, fast verification inside transformers' assisted generation, with one line.

    from outrider_lab.baselines import assisted_generation as fast

    with fast.patched() as calls:
        model.generate(**inputs, assistant_model=assistant, do_sample=True)
    print(calls.count)

Assisted generation looks up the module-level function `_speculative_sampling` whenever it samples;
it is replaced by one with the same signature and return value. The law of the text is unchanged.
On a CPU nothing is copied and positions behind a rejection are never read; on CUDA the kernels read
the logits in place and one host read remains, because the caller needs a tensor of n + 1 tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation import utils as _utils

from outrider import ops
from outrider.errors import BackendUnavailable
from outrider.tree import chain, children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores, Tree

NAME = "_speculative_sampling"
PARAMETERS = ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits")
#: What stands behind them: versions have these or not, and in an order of their own.
LATER = ("is_done_candidate", "assistant_ensemble_weight")

Sampler = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class PatchedCalls:
    """How often the replacement ran, and what it accepted."""

    count: int = 0
    drafted: int = 0
    accepted: int = 0


_original: Sampler | None = None
_calls = PatchedCalls()


def patch() -> PatchedCalls:
    """Replace transformers' function until `unpatch`. Returns live counts of the calls."""
    global _original, _calls
    if _original is None:
        _original = checked()
        _calls = PatchedCalls()
        setattr(_utils, NAME, speculative_sampling)
    return _calls


def unpatch() -> None:
    """Put transformers' own function back."""
    global _original
    if _original is not None:
        setattr(_utils, NAME, _original)
        _original = None


@contextmanager
def patched() -> Iterator[PatchedCalls]:
    """Replace transformers' function inside a block."""
    outer = _original is not None
    calls = patch()
    try:
        yield calls
    finally:
        if not outer:
            unpatch()


def checked() -> Sampler:
    """transformers' function, if it is one that we know how to replace."""
    function: Sampler | None = vars(_utils).get(NAME)
    version = transformers.__version__
    if function is None:
        raise BackendUnavailable(
            f"transformers {version} has no {NAME} to replace; use a version from 5.17 up to 5.x, "
            "or outrider's own engine"
        )
    names = tuple(inspect.signature(function).parameters)
    first = len(PARAMETERS)
    if names[:first] != PARAMETERS or not set(names[first:]) <= set(LATER):
        raise BackendUnavailable(
            f"transformers {version} defines {NAME}({', '.join(names)}), not the function that "
            f"this replacement stands for, ({', '.join(PARAMETERS + LATER)}); use outrider's own "
            "engine or a version of transformers from 5.17"
        )
    return function


def theirs() -> Sampler:
    """transformers' own function for texts that the drafted tokens do not end.

    It takes the four parameters that every version has, and an `assistant_ensemble_weight`.
    """
    own = checked() if _original is None else _original
    if "is_done_candidate" not in _behind(own):
        return own
    return partial(own, is_done_candidate=False)


@lru_cache(maxsize=8)
def _behind(function: Sampler) -> tuple[str, ...]:
    """Names of a function's parameters behind the first four."""
    return tuple(inspect.signature(function).parameters)[len(PARAMETERS) :]


def asked(
    function: Sampler | None, later: Sequence[Any], named: Mapping[str, Any]
) -> tuple[bool, float | None]:
    """Whether the drafted tokens end the text, and the ensemble weight, of a call that gives these
    behind the first four parameters, by position and by name.

    function  the one of transformers that is called so; None: unknown, as `LATER` says
    """
    if function is None or function is speculative_sampling:
        names: tuple[str, ...] = LATER
    else:
        names = _behind(function)
    given = {**named, **dict(zip(names, later, strict=False))}
    return bool(given.get("is_done_candidate")), given.get("assistant_ensemble_weight")


def ended(valid: Tensor, n: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The same answer for a text that its `length` drafted tokens end.

    Nothing follows them if all are accepted, and n is one less than their number.
    """
    return (valid[:, :-1], n - 1) if valid.shape[1] == length + 1 else (valid, n)


def speculative_sampling(
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    *later: Any,
    is_done_candidate: bool = False,
    assistant_ensemble_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Accepted tokens and one more, [1, n + 1], and n. Logits are processed and filtered already.

    `later` are the parameters that the installed version of transformers has behind the first four
    (`LATER`), in its order. With `is_done_candidate` the text ends with the drafted tokens: if all
    are accepted they are returned alone, and n is one less than their number, as in transformers.

    The accept tests use the uniforms that transformers would draw (`torch.rand`, one per drafted
    token), so the same seed accepts the same prefix. An ensemble weight w verifies against the law
    w target + (1 - w) draft, as transformers does: the same tests and the same residual.
    """
    named = {
        "is_done_candidate": is_done_candidate,
        "assistant_ensemble_weight": assistant_ensemble_weight,
    }
    done, weight = asked(_original or vars(_utils).get(NAME), later, named)
    gamma = int(candidate_logits.shape[1])
    if candidate_input_ids.shape[0] != 1:
        raise ValueError(
            "assisted generation verifies one sequence at a time; got a batch of "
            f"{candidate_input_ids.shape[0]}; use outrider's own engine for batches"
        )
    if candidate_logits.is_cuda:
        valid, n = _on_device(candidate_input_ids, candidate_logits, new_logits, gamma, weight)
    else:
        ids = candidate_input_ids[0, -candidate_length:]
        uniforms = torch.rand(gamma + 2, device="cpu")
        valid, n = ops.assisted(ids, candidate_logits, new_logits, uniforms, weight)
    if done:
        valid, n = ended(valid, n, candidate_length)
    _calls.count += 1
    _calls.drafted += gamma
    _calls.accepted += valid.shape[1] - 1
    return valid, n


def _on_device(
    ids: Tensor, candidate_logits: Tensor, new_logits: Tensor, gamma: int, weight: float | None
) -> tuple[Tensor, Tensor]:
    device = new_logits.device
    uniform = torch.rand(gamma, device=device)
    if weight is not None:
        length = ids[:, -gamma:].shape[1]
        return theirs()(ids, candidate_logits, length, new_logits, assistant_ensemble_weight=weight)
    draft, scores = _as_draft(ids, candidate_logits, new_logits, gamma)
    seed = torch.randint(-(2**62), 2**62, (1,), device=device)
    draws = Draws(seed, torch.zeros_like(seed), uniform_BNK=_pad(uniform, gamma + 1))
    verdict = ops.load_backend("triton").ops["verify:chain"](draft, scores, draws)
    n = int(verdict.count_B)  # the one host read: the caller needs n + 1 tokens
    drafted = ids[:, ids.shape[1] - gamma : ids.shape[1] - gamma + n]
    return torch.cat([drafted, verdict.next_B[:, None]], 1), verdict.count_B[0]


def _pad(uniform: Tensor, nodes: int) -> Tensor:
    return torch.nn.functional.pad(uniform, (0, nodes - uniform.shape[0])).view(1, nodes, 1)


def _as_draft(
    ids: Tensor, candidate_logits: Tensor, new_logits: Tensor, gamma: int
) -> tuple[Draft, Scores]:
    device = new_logits.device
    tree, draws, kinds, rows, plain = _tables(gamma, device)
    laws = Laws(candidate_logits, plain, greedy="none")
    tokens = ids[:, -(gamma + 1) :]
    draft = Draft(tokens, tree, draws, kinds, rows, laws, frozenset({DrawKind.WITH}))
    return draft, Scores(Laws(new_logits, plain, greedy="none"))


@lru_cache(maxsize=64)
def _tables(gamma: int, device: torch.device) -> tuple[Tree, Tensor, Tensor, Tensor, Tensor]:
    counts = (1,) * gamma
    tree, draws = chain(gamma, device), children(counts, device)
    node = torch.arange(gamma + 1, device=device)[None, :, None]
    rows = torch.where(draws >= 0, node, -1)
    return (
        tree,
        draws,
        torch.full_like(draws, int(DrawKind.WITH)),
        rows,
        torch.ones(1, device=device),
    )
