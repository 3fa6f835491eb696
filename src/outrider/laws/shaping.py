"""Penalties, biases, bans and processors: what changes logits before temperature and filters.

They read the text so far, so at a tree node they read that node's own prefix: the committed tokens
and the path down to the node. The native ones are tensors over [B, R, V]; processors in the manner
of transformers are called once per depth with rows of equal length. Rows that ask for nothing keep
`SamplingRows.shaping` None and pay nothing.

    bias -> repetition -> frequency and presence -> n-gram ban -> minimum length -> processors
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.laws import replay
from outrider.laws.sampling import Sampling
from outrider.rows import Processor, Shaping
from outrider.types import Context, Tree


class ProcessorError(Exception):
    """A row's own processor raised its cause while a batch was scored or drafted."""

    def __init__(self, row: int) -> None:
        super().__init__(f"a processor of row {row} failed")
        self.row = row


def admit(
    settings: Sequence[Sampling],
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[Sequence[int]],
    vocab: int,
    device: torch.device | str,
    first: int = 0,
    others: Sequence[Sampling] = (),
) -> list[Sampling]:
    """The settings with processors as they can be called at tree nodes; each is tried out here.

    The requests are numbered from `first`; `others` run beside them. Raises ConfigurationError for
    a processor that cannot be replayed and for a bias outside the vocabulary.
    """
    tried: dict[tuple[int, ...], tuple[Processor, ...]] = {}  # rows with the same ones share them
    uses = Counter(id(p) for s in (*settings, *others) for p in s.processors)
    admitted = []
    for row, (s, prompt) in enumerate(zip(settings, prompts, strict=True)):
        outside = [t for t in s.logit_bias or () if not 0 <= t < vocab]
        if outside:
            raise ConfigurationError(
                f"logit_bias names token {outside[0]}, outside the vocabulary of {vocab}; use "
                "the target's token ids"
            )
        same = tuple(map(id, s.processors))
        if same and same not in tried:
            tried[same] = replay.replayable(
                s.processors,
                [*s.padding, *prompt],
                vocab,
                device,
                stop_ids[row],
                [uses[id(p)] for p in s.processors],
            )
        if same:
            s = replace(s, processors=replay.of_row(tried[same], first + row))
        admitted.append(s)
    return admitted


def build(
    settings: Sequence[Sampling],
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[Sequence[int]],
    vocab: int,
    device: torch.device | str,
) -> Shaping | None:
    """The batch's shaping, or None if no row asks for any. `admit` has looked at the settings."""
    if not any(s.shapes for s in settings):
        return None

    def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
        values = [getattr(s, name) for s in settings]
        if all(v == off for v in values):
            return None
        return torch.tensor(values, dtype=dtype, device=device)

    bias = stops = None
    if any(s.logit_bias for s in settings):
        bias = torch.zeros(len(settings), vocab)
        for row, s in enumerate(settings):
            for token, value in (s.logit_bias or {}).items():
                bias[row, token] = value
        bias = bias.to(device)
    least = column("min_new_tokens", 0, torch.int64)
    if least is not None:
        stops = torch.zeros(len(settings), vocab, dtype=torch.bool)
        for row, ids in enumerate(stop_ids):
            if settings[row].min_new_tokens:
                stops[row, [token for token in ids if 0 <= token < vocab]] = True
        stops = stops.to(device)
    sizes = {s.no_repeat_ngram_size for s in settings} - {0}
    return Shaping(
        torch.tensor([len(p) for p in prompts], device=device),
        bias,
        column("repetition_penalty", 1.0),
        column("frequency_penalty", 0.0),
        column("presence_penalty", 0.0),
        column("no_repeat_ngram_size", 0, torch.int64),
        least,
        stops,
        tuple(sorted(sizes)),
        tuple(s.processors for s in settings),
        tuple(tuple(s.padding) for s in settings),
        tuple(frozenset(ids) for ids in stop_ids),
        # a finite bias leaves every token possible, and so do stop tokens unless they are all
        any(s.processors for s in settings)
        or bool(sizes)
        or (bias is not None and bool((bias == -torch.inf).any()))
        or (stops is not None and bool(stops.all(-1).any())),
    )


def shape(
    logits_BRV: Tensor,
    shaping: Shaping,
    context: Context,
    nodes_BM: Tensor,
    tree: Tree,
    start: int = 0,
    alive_BR: Tensor | None = None,
) -> Tensor:
    """Logits of nodes start..M of a tree as their prefixes change them, float32 [B, R, V].

    `nodes_BM` are the tokens of nodes 0..M, the pending token first. `alive_BR` marks nodes that
    can be reached (None: all): processors are spared the others, whose text may have gaps. With
    `start` 0, where parents are at hand, neither do they see what a parent's logits forbid.
    """
    rows, count = logits_BRV.shape[:2]
    most = start + count
    logits = logits_BRV.float()
    ancestors = tree.ancestors_BNN[:, start:most, :most].expand(rows, -1, -1)
    depth = tree.depth_BN[:, start:most]
    if shaping.bias_BV is not None:
        logits = logits + shaping.bias_BV[:, None]
    if shaping.repetition_B is not None:
        seen = _counts(logits, context, nodes_BM[:, :most], ancestors, None) > 0
        factor = shaping.repetition_B[:, None, None]
        logits = torch.where(seen, _penalised(logits, factor), logits)
    if shaping.frequency_B is not None or shaping.presence_B is not None:
        times = _counts(logits, context, nodes_BM[:, :most], ancestors, shaping.prompt_B)
        if shaping.frequency_B is not None:
            logits = logits - shaping.frequency_B[:, None, None] * times
        if shaping.presence_B is not None:
            logits = logits - shaping.presence_B[:, None, None] * (times > 0)
    if shaping.ngram_B is not None:
        prefix, length = _prefixes(context, nodes_BM[:, :most], ancestors, depth)
        for size in shaping.ngrams:
            banned = _repeats(prefix, length, size, logits.shape[-1])
            banned &= (shaping.ngram_B == size)[:, None, None]
            logits = logits.masked_fill(banned, -torch.inf)
    if shaping.least_B is not None and shaping.stops_BV is not None:
        made = (context.length_B - shaping.prompt_B)[:, None] + depth
        early = made < shaping.least_B[:, None]
        logits = logits.masked_fill(early[..., None] & shaping.stops_BV[:, None], -torch.inf)
    if shaping.processed:
        logits = _process(logits, shaping, context, nodes_BM, tree, start, alive_BR)
    return logits


def _penalised(logits: Tensor, factor: Tensor) -> Tensor:
    return torch.where(logits < 0, logits * factor, logits / factor)


def _counts(
    logits: Tensor, context: Context, nodes_BM: Tensor, ancestors: Tensor, since_B: Tensor | None
) -> Tensor:
    """How often each token stands in each node's prefix (from position `since_B` on), [B, R, V]."""
    rows, count, vocab = logits.shape
    tokens = context.tokens_BL[:, : context.bound].clamp(0, vocab - 1)
    at = torch.arange(tokens.shape[1], device=tokens.device)
    last = context.length_B[:, None] - 1  # the pending token is node 0
    inside = at < last
    mine = ancestors.float()
    if since_B is not None:
        inside = inside & (at >= since_B[:, None])
        drafted = torch.ones_like(mine[:, :, 0])
        drafted = torch.where((last >= since_B[:, None]), drafted, 0.0)
        mine = torch.cat([mine[:, :, :1] * drafted[..., None], mine[:, :, 1:]], 2)
    base = logits.new_zeros(rows, vocab).scatter_add_(1, tokens, inside.float())
    index = nodes_BM[:, None].expand(-1, count, -1)
    return base[:, None].repeat(1, count, 1).scatter_add_(2, index, mine)


def _prefixes(
    context: Context, nodes_BM: Tensor, ancestors: Tensor, depth: Tensor
) -> tuple[Tensor, Tensor]:
    """Every node's whole text, [B, R, L], and its length [B, R]; beyond it there is -1."""
    rows, count, _ = ancestors.shape
    first = context.length_B - 1
    deepest = nodes_BM.shape[1]
    committed = context.tokens_BL[:, : context.bound]
    at = torch.arange(context.bound + deepest, device=committed.device)
    text = torch.nn.functional.pad(committed, (0, deepest), value=-1)
    text = torch.where(at < first[:, None], text, -1)[:, None].repeat(1, count, 1)
    # path node j stands at slot first + (its rank among the node's ancestors)
    rank = ancestors.long().cumsum(2) - 1
    slot = torch.where(ancestors, first[:, None, None] + rank, at.shape[0])
    text = torch.nn.functional.pad(text, (0, 1), value=-1)
    text = text.scatter(2, slot, nodes_BM[:, None].expand(-1, count, -1))[..., :-1]
    return text, (first[:, None] + depth + 1).expand(rows, count)


def _repeats(text_BRL: Tensor, length_BR: Tensor, size: int, vocab: int) -> Tensor:
    """Tokens that would complete an n-gram that the text already contains, bool [B, R, V]."""
    rows, count, wide = text_BRL.shape
    banned = torch.zeros(rows, count, vocab + 1, dtype=torch.bool, device=text_BRL.device)
    if wide < size:
        return banned[..., :-1]
    windows = wide - size + 1
    at = torch.arange(windows, device=text_BRL.device)
    same = (at + size <= length_BR[..., None]) & (length_BR[..., None] + 1 >= size)
    for k in range(size - 1):
        want = (length_BR - size + 1 + k).clamp(min=0)
        same = same & (text_BRL[..., k : k + windows] == text_BRL.gather(2, want[..., None]))
    ends = text_BRL[..., size - 1 :]
    return banned.scatter_(2, torch.where(same & (ends >= 0), ends, vocab), True)[..., :-1]


def _process(
    logits: Tensor,
    shaping: Shaping,
    context: Context,
    nodes_BM: Tensor,
    tree: Tree,
    start: int,
    alive_BR: Tensor | None,
) -> Tensor:
    """Run every row's processors on its nodes, depth by depth. Reads the device: they are Python.

    A node whose path cannot be emitted, or whose text has ended with a stop token, keeps its
    logits: a grammar has nothing to say about a text it forbids, and nothing can be emitted there.
    """
    logits = logits.clone()
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
    return logits


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
