"""How prompts enter a cache, and how wide a cache a call sees: shared by the step and drafters."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.recurrent.call import has_states
from outrider.tree import numbers, visible
from outrider.types import Cache, LanguageModel, Nodes, RowHints, Tree

# Which nodes one model call reads: their tokens, positions, cache slots and what each may see.
#
# A row's text lies in its cache slots in order, so the slot of a committed token is its position.
# Below the pending token a draft's nodes stand in slots of their own: siblings share a position,
# never a slot.


def causal(tokens_BQ: Tensor, at_BQ: Tensor, wide: int, settled_B: Tensor | None = None) -> Nodes:
    """Tokens at positions `at_BQ`, each of which sees everything before it. `wide` slots are seen.

    `settled_B`: how far a row's text is known for good; None: up to the first of these tokens.

    >>> import torch
    >>> at = torch.arange(2)[None]
    >>> causal(at, at, 3).visible_BQW.tolist()
    [[[True, False, False], [True, True, False]]]
    """
    seen = numbers(wide, at_BQ.device) <= at_BQ[..., None]
    return Nodes(tokens_BQ, at_BQ, at_BQ, seen, at_BQ[:, 0] if settled_B is None else settled_B)


def of_tree(tokens_BN: Tensor, tree: Tree, first_B: Tensor, wide: int) -> Nodes:
    """The nodes of a whole draft whose pending token is at position and slot `first_B`."""
    slots_BN = first_B[:, None]
    if tree.nodes > 1:
        slots_BN = slots_BN + numbers(tree.nodes, first_B.device)
    if tree.is_chain:  # depth is the node's number, and a node sees all that stands before it
        return causal(tokens_BN, slots_BN, wide, first_B)
    positions_BN = first_B[:, None] + tree.depth_BN
    seen = visible(tree.ancestors_BNN, first_B, 0, tree.nodes, wide)
    return Nodes(tokens_BN, positions_BN, slots_BN, seen, first_B)


P = ParamSpec("P")
R = TypeVar("R")

#: Prompt tokens per prefill call, which bounds the mask's size.
CHUNK = 512
READ = 64  #: tokens of a text that are read where it is skimmed

_skims: ContextVar[bool] = ContextVar("_skims", default=False)


def width(model: LanguageModel, bound: int, nodes: int, capacity: int) -> int:
    """Visible cache width for rows of at most `bound` tokens and a tree of `nodes`."""
    return min(model.width(bound + nodes), capacity)


def inference(verb: Callable[P, R]) -> Callable[P, R]:
    """Run in inference mode; the engine is in it already, and entering it anew for every verb
    takes longer than some verbs' work."""

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return verb(*args, **kwargs)
        with torch.inference_mode():
            return verb(*args, **kwargs)

    return run


@contextmanager
def skimming() -> Iterator[None]:
    """In here the first tokens of a long text are read and its last; copies of their entries stand
    for the rest, behind which a step takes as long as behind a text that was read."""
    before = _skims.set(True)
    try:
        yield
    finally:
        _skims.reset(before)


def skimmable(cache: object) -> TypeGuard[SlotCache]:
    """Whether entries may stand for others in this cache: there are no states in it."""
    return type(cache) is SlotCache and cache.recurrent is None


@inference
def ingest(
    model: LanguageModel,
    cache: Cache,
    tokens_BL: Tensor,
    count: int,
    *,
    settled_B: Tensor,
    start: int = 0,
    aux_layers: tuple[int, ...] = (),
    known: RowHints | None = None,
) -> list[tuple[Tensor, ...]]:
    """Write tokens `start` to `count` of every row, right-padded rows included, in chunks.

    Entries beyond a row's own length are never visible to it and are overwritten later; its first
    `settled_B` tokens are its text for good, in this call and later ones.
    The model's states of these tokens at the aux layers are returned, [B, n, E] for each chunk.
    `known` is shown what recurrent states are where it asks for them.
    """
    device = tokens_BL.device
    rows = tokens_BL.shape[0]
    if _skims.get() and count - start > READ + 1 and known is None and skimmable(cache):
        return _skimmed(model, cache, tokens_BL, count, settled_B, start, aux_layers)
    states: list[tuple[Tensor, ...]] = []
    lines = {} if known is None else known.stops(model, cache, start)
    first = start
    for stop in sorted({*range(start + CHUNK, count, CHUNK), *lines, count}):
        if not first < stop <= count:
            break
        at = torch.arange(first, stop, device=device)[None].expand(rows, -1)
        wide = width(model, stop, 0, cache.capacity)
        nodes = causal(tokens_BL[:, first:stop], at, wide, settled_B)
        if aux_layers:
            states.append(model.forward(cache, nodes, aux_layers=aux_layers).hidden)
        else:
            model.forward(cache, nodes, last=1)
        if known is not None and stop in lines:
            known.mark(model, cache, lines[stop], stop)
        first = stop
    return states


def _skimmed(
    model: LanguageModel,
    cache: SlotCache,
    tokens_BL: Tensor,
    count: int,
    settled_B: Tensor,
    start: int,
    aux_layers: tuple[int, ...],
) -> list[tuple[Tensor, ...]]:
    """`ingest` of a text that is skimmed; states are the last token's, again and again."""
    ingest(model, cache, tokens_BL, READ, settled_B=settled_B, start=start)
    last = ingest(
        model, cache, tokens_BL, count, settled_B=settled_B, start=count - 1, aux_layers=aux_layers
    )
    for stack in cache.stacks:
        for at in range(max(start, READ), count - 1, READ):
            stop = min(at + READ, count - 1)
            stack[:, :, :, at:stop] = stack[:, :, :, : stop - at]
    return [tuple(state.repeat(1, count - start, 1) for state in states) for states in last]


@inference
def behind(
    model: LanguageModel,
    cache: Cache,
    tokens_BL: Tensor,
    sizes: Sequence[int],
    places: Sequence[int | None],
) -> Tensor:
    """What the model says behind one place of each row's prompt, [B, V]; None: its last token.

    The rows, of these sizes, are in the cache but for their last tokens. They are read from those
    places on once more, and entries are written again as they are: behind a row's end nobody looks.
    A model with states cannot read on from inside a text: a row that asks is read anew up to there.
    """
    first = [size - 1 if at is None else at for size, at in zip(sizes, places, strict=True)]
    if has_states(model) and any(at is not None for at in places):
        assert isinstance(cache, SlotCache)
        return torch.cat(
            [
                _anew(model, cache.adapters[row : row + 1], tokens_BL[row : row + 1, : at + 1])
                for row, at in enumerate(first)
            ]
        )
    rest = max(size - at for size, at in zip(sizes, first, strict=True))
    wide = width(model, max(first) + rest, 0, cache.capacity)
    at_BQ = torch.tensor([[*range(at, at + rest)] for at in first], device="cpu")
    at_BQ = at_BQ.clamp(max=min(wide, tokens_BL.shape[1]) - 1).to(tokens_BL.device)
    nodes = causal(tokens_BL.gather(1, at_BQ), at_BQ, wide)
    return model.forward(cache, nodes).logits_BQV[:, 0]


def _anew(model: LanguageModel, adapters: tuple[str | None, ...], tokens_1L: Tensor) -> Tensor:
    """The logits [1, V] behind a text, read in a cache of its own."""
    count = tokens_1L.shape[1]
    cache = model.open(1, width(model, count, 0, model.context))
    cache.adapters = adapters
    settled_B = torch.tensor([count - 1], device=tokens_1L.device)
    ingest(model, cache, tokens_1L, count - 1, settled_B=settled_B)
    at = torch.tensor([[count - 1]], device=tokens_1L.device)
    nodes = causal(tokens_1L[:, -1:], at, cache.capacity)
    return model.forward(cache, nodes, last=1).logits_BQV[:, 0]
