"""Processors in the manner of transformers, called at tree nodes on each node's own text."""

import torch
from torch import Tensor

from outrider.row_params import Shaping
from outrider.types import Context, Tree


class ProcessorError(Exception):
    """A row's own processor raised its cause while a batch was scored or drafted."""

    def __init__(self, row: int) -> None:
        super().__init__(f"a processor of row {row} failed")
        self.row = row


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
