"""Processors in the manner of transformers, called at tree nodes on each node's own text."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.row_params import Processor, Shaping
from outrider.types import Context, Tree

# Processors in the manner of transformers at tree nodes: called again, and for nodes in one stack.
#
# That is right for a function of (input_ids, scores) that treats its rows alike. Each is tried out
# on the prompt before any work is done: what is no function of its arguments is refused; what looks
# at its row's number or at the other rows is asked about one text at a time, or refused if it is
# meant for several requests.

_STACK = 8  #: most rows of the stack that a processor is tried on

#: Processors of transformers that cannot be replayed at a tree node, with the reason.
REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs a model with a cache of its own",
    "ClassifierFreeGuidanceLogitsProcessor": "it needs a doubled batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it needs a doubled batch",
    "DiaEOSDelayPatternLogitsProcessor": "it keeps state between calls",
    "SynthIDTextWatermarkLogitsProcessor": "it keeps state between calls",
    "HammingDiversityLogitsProcessor": "it needs the beams of one step",
    "WhisperNoSpeechDetection": "it runs a model with a cache of its own",
    "AlternatingCodebooksLogitsProcessor": "it counts calls",
}
#: What to do about one of them, where there is something better than the usual advice.
INSTEAD = {
    "WhisperNoSpeechDetection": (
        "leave it out (no_speech_threshold=None): it changes no score, and transcribing reads the "
        "probability of silence from the first call"
    )
}


class UnbatchedProcessor:
    """A processor that minds where a text stands in the batch, asked about one text at a time."""

    def __init__(self, inner: Processor) -> None:
        self.inner = inner

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [n, V] of n texts."""
        pairs = zip(input_ids, scores, strict=True)
        return torch.cat([self.inner(text[None], line[None]) for text, line in pairs])


@runtime_checkable
class _Declared(Protocol):
    """A processor that says itself whether it can be replayed."""

    replayable: bool


@runtime_checkable
class _Constrained(Protocol):
    """transformers' prefix-constrained processor, which counts rows to know its own."""

    _prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]]


class _AllowedByReplay:
    """transformers' prefix-constrained processor with its batch row kept."""

    def __init__(self, inner: _Constrained, row: int) -> None:
        self.allowed, self.row = inner._prefix_allowed_tokens_fn, row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mask = torch.full_like(scores, -torch.inf)
        for line, text in enumerate(input_ids):
            tokens = list(self.allowed(self.row, text))
            if not tokens:
                raise ConfigurationError(
                    f"prefix_allowed_tokens_fn allows no token for request {self.row} after "
                    f"{len(text)} tokens; return at least one"
                )
            mask[line, tokens] = 0
        return scores + mask


def of_row(processors: tuple[Processor, ...], row: int) -> tuple[Processor, ...]:
    """The row's own list: what derives its row from the batch is told which row it is."""
    mine = tuple(_told(p, row) for p in processors)
    changed = any(a is not b for a, b in zip(mine, processors, strict=True))
    return mine if changed else processors


def _told(processor: Processor, row: int) -> Processor:
    inner = processor.inner if isinstance(processor, UnbatchedProcessor) else processor
    if not isinstance(inner, _Constrained):
        return processor
    allowed = _AllowedByReplay(inner, row)
    return UnbatchedProcessor(allowed) if isinstance(processor, UnbatchedProcessor) else allowed


def replayable(
    processors: Sequence[Processor],
    prompt: Sequence[int],
    vocab: int,
    device: torch.device | str,
    stop_ids: Sequence[int] = (),
    uses: Sequence[int] | None = None,
) -> tuple[Processor, ...]:
    """The processors as they can be called at tree nodes; ConfigurationError names what cannot be.

    The same prefix must give the same scores again: each processor sees the prompt, two
    continuations of it, the first ones again, and both continuations in one stack. `uses` are the
    requests that share each of them.
    """
    found = []
    for number, processor in enumerate(processors):
        name, shared = type(processor).__name__, 1 if uses is None else uses[number]
        reason, stacks = REFUSED.get(name), True
        if reason is None and isinstance(processor, _Declared) and processor.replayable is False:
            reason = "it says so itself (replayable = False)"
        if reason is None:
            own = of_row((processor,), 0)[0]
            reason, stacks = _tried(own, prompt, vocab, device, stop_ids, shared)
        if reason is None and not stacks and shared > 1:
            reason = (
                f"the scores of a row change with its place among the {shared} requests or with "
                "the other rows (one request at a time would work)"
            )
        if reason is not None:
            usual = "make it a function of (input_ids, scores) alone, or decode without speculation"
            raise ConfigurationError(
                f"logits processor {name} cannot be replayed at tree nodes: {reason}; "
                f"{INSTEAD.get(name, usual)}"
            )
        found.append(processor if stacks else UnbatchedProcessor(processor))
    return tuple(found)


def _tried(
    processor: Processor,
    prompt: Sequence[int],
    vocab: int,
    device: torch.device | str,
    stop_ids: Sequence[int],
    shared: int,
) -> tuple[str | None, bool]:
    """Why it cannot be replayed, if so, and whether texts may stand in one stack."""
    base = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    spread = torch.arange(vocab, dtype=torch.float32, device=device)
    logits = ((spread * 0.61803398875) % 1.0 * 4 - 2)[None]

    def at(more: list[int]) -> Tensor:
        tail = torch.tensor([more], dtype=torch.int64, device=device)
        ids = torch.cat([base, tail], 1)
        scores = processor(ids, logits.clone())
        if not isinstance(scores, Tensor) or scores.shape != logits.shape:
            shape = scores.shape if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"returned {shape}")
        return scores.clone()

    try:
        root = at([])
        going = root[0].clone()
        going[[token for token in stop_ids if 0 <= token < vocab]] = -torch.inf  # the text ends
        ways = going.topk(min(2, vocab)).indices.tolist()
        ways = [token for token in ways if going[token] > -torch.inf]
        first = [at([token]) for token in ways]
        again = [at([]), *(at([token]) for token in ways)]
    except Exception as error:
        return f"{type(error).__name__} when tried on the prompt: {str(error)[:120]}", True
    for before, after in zip([root, *first], again, strict=True):
        if not torch.equal(before, after):
            return "the same prefix gave different scores when seen again", True
    if not ways:
        return None, True  # the text can only end here: nothing is asked behind it
    order = [i % len(ways) for i in range(max(2, min(shared, _STACK)))]
    tails = torch.tensor([[ways[i]] for i in order], device=device)
    try:
        stack = processor(
            torch.cat([base.expand(len(order), -1), tails], 1), logits.repeat(len(order), 1)
        )
        alone = torch.cat([first[i] for i in order])
        # sums over a stack may round otherwise than over one row
        stacks = torch.allclose(stack, alone, rtol=1e-4, atol=1e-4, equal_nan=True)
        return None, stacks and stack.shape == alone.shape
    except Exception:
        return None, False


class ProcessorError(Exception):
    """A row's own processor raised its cause while a batch was scored or drafted."""

    def __init__(self, row: int) -> None:
        super().__init__(f"a processor of row {row} failed")
        self.row = row


def process_drafted(shaping: Shaping, most_B: Tensor) -> Shaping:
    """The same without the processors of rows for which nothing is drafted. Reads `most_B`."""
    each = zip(shaping.processors, most_B.tolist(), strict=True)
    return shaping._replace(processors=tuple(own if most else () for own, most in each))


def process(
    logits: Tensor,
    shaping: Shaping,
    context: Context,
    nodes_BM: Tensor,
    tree: Tree,
    start: int,
    alive_BR: Tensor | None,
) -> None:
    """Run every row's processors on its nodes, depth by depth. Written in place.

    Reads the device: they are Python. A node whose path cannot be emitted, or whose text has ended
    with a stop token, keeps its logits: a grammar has nothing to say about a text it forbids, and
    nothing can be emitted there.
    """
    rows, count = logits.shape[:2]
    lengths: list[int] = context.length_B.tolist()
    prompts: list[int] = shaping.prompt_B.tolist()
    tokens: list[list[int]] = nodes_BM.tolist()
    parents, depths = tree.parent_BN.tolist(), tree.depth_BN.tolist()
    paths = [_paths(parents[0 if len(parents) == 1 else b], start + count) for b in range(rows)]
    alive = [[True] * count for _ in range(rows)]
    if alive_BR is not None:
        alive = alive_BR.tolist()
    levels = sorted({d for line in depths for d in line[start : start + count]})
    for level in levels:
        groups: dict[tuple[tuple[int, ...], int], list[tuple[int, int]]] = {}
        for b in range(rows):
            for r in range(count):
                node = start + r
                if depths[0 if len(depths) == 1 else b][node] != level or not shaping.processors[b]:
                    continue
                if start == 0 and node and alive[b][r]:
                    parent = parents[0 if len(parents) == 1 else b][node]
                    alive[b][r] = alive[b][parent] and bool(
                        logits[b, parent, nodes_BM[b, node]] > -torch.inf
                    )
                text = paths[b][node]
                if lengths[b] == prompts[b]:
                    text = text[1:]  # a prompt may end with a stop token
                if alive[b][r] and not any(tokens[b][n] in shaping.ends[b] for n in text):
                    size = len(shaping.padding[b]) + lengths[b] + level
                    same = tuple(map(id, shaping.processors[b]))
                    groups.setdefault((same, size), []).append((b, r))
        for members in groups.values():
            texts = [
                torch.cat(
                    [
                        torch.tensor(shaping.padding[b], dtype=torch.int64, device=logits.device),
                        context.tokens_BL[b, : lengths[b] - 1],
                        nodes_BM[b, paths[b][start + r]],
                    ]
                )
                for b, r in members
            ]
            b_index = torch.tensor([b for b, _ in members], device=logits.device)
            r_index = torch.tensor([r for _, r in members], device=logits.device)
            scores = _called(shaping, members, torch.stack(texts), logits[b_index, r_index])
            logits[b_index, r_index] = scores.float()


def _called(
    shaping: Shaping, members: list[tuple[int, int]], texts: Tensor, scores: Tensor
) -> Tensor:
    """The scores of one stack of texts. ProcessorError names the row whose own text fails."""
    rows = [b for b, _ in members]
    try:
        for processor in shaping.processors[rows[0]]:
            scores = processor(texts, scores)
    except Exception as error:
        for row in dict.fromkeys(rows) if len(set(rows)) > 1 else ():
            mine = [at for at, (b, _) in enumerate(members) if b == row]
            _called(shaping, [members[at] for at in mine], texts[mine], scores[mine])
        raise ProcessorError(rows[0]) from error
    return scores


def _paths(parents: list[int], count: int) -> list[list[int]]:
    """Nodes from the root down to each node."""
    paths: list[list[int]] = []
    for node in range(count):
        above = paths[parents[node]] if parents[node] >= 0 else []
        paths.append([*above, node])
    return paths
