"""Exact enumeration: every draft that can be drawn, times the exact outcome of verifying it.

A `World` holds context-dependent laws of target and draft over a tiny vocabulary, for several cases
at once. A `Forest` holds every draft of one drafting scheme, one per row, with its probability.
`emitted` multiplies out: probability of the draft x probability of stopping at each node x law of
the next token there, continued by the target to a common length. A lossless rule gives `truth`.
Schemes that grow another tree with every draft are in `own_trees`.

A prefix is a number: the root is 0 and the prefix c followed by token v is V c + 1 + v.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from outrider.tree import branching, children
from outrider.types import Draft, DrawKind, Laws, Scores, Tree, Verifier

CASES = ("random", "zeros", "equal", "disjoint", "hot target", "hot draft")
CHUNK = 1 << 14


def prefixes(vocab: int, depth: int) -> int:
    """How many prefixes have at most `depth` tokens; also the number of the first longer one."""
    return sum(vocab**d for d in range(depth + 1))


class World:
    """Laws [C, prefixes, V] of both sides at every prefix of up to `depth` tokens, for C cases.

    With `thin`, full-support cases lose one draft token, so that big trees stay few.
    """

    def __init__(
        self, vocab: int, depth: int, seed: int, cases: tuple[str, ...] = CASES, thin: bool = False
    ) -> None:
        self.vocab, self.depth, self.cases = vocab, depth, cases
        rng = np.random.default_rng([seed, vocab, depth])
        count = prefixes(vocab, depth)
        target = rng.dirichlet(np.full(vocab, 0.7), (len(cases), count))
        draft = rng.dirichlet(np.full(vocab, 0.7), (len(cases), count))
        eye, row = np.eye(vocab), np.arange(count)
        for c, case in enumerate(cases):
            if case == "zeros" or (thin and case in ("equal", "hot target")):
                draft[c, row, rng.integers(vocab, size=count)] = 0
            if case == "zeros":
                target[c, row, rng.integers(vocab, size=count)] = 0
            elif case == "equal":
                target[c] = draft[c]
            elif case == "disjoint":
                target[c, :, : vocab // 2] = 0
                draft[c, :, vocab // 2 :] = 0
            elif case == "hot target":
                target[c] = eye[rng.integers(vocab, size=count)]
            elif case == "hot draft":
                draft[c] = eye[rng.integers(vocab, size=count)]
        self.target = target / target.sum(-1, keepdims=True)
        self.draft = draft / draft.sum(-1, keepdims=True)

    def level(self, depth: int) -> slice:
        """The prefixes of exactly `depth` tokens."""
        return slice(prefixes(self.vocab, depth - 1), prefixes(self.vocab, depth))


@dataclass
class Forest:
    """Every draft of a scheme: one per row, with its case and probability."""

    world: World
    tree: Tree
    kinds: frozenset[DrawKind]
    case_R: np.ndarray
    weight_R: np.ndarray
    token_RN: np.ndarray
    code_RN: np.ndarray  #: prefix at each node, -1 where there is no node
    draws_RNK: np.ndarray
    kind_RNK: np.ndarray
    law_RNV: np.ndarray | None = field(default=None)  #: declared law per node; default: the draft's

    def __post_init__(self) -> None:
        self.kind_RNK = np.broadcast_to(self.kind_RNK, self.draws_RNK.shape)

    def __len__(self) -> int:
        return len(self.weight_R)

    def __getitem__(self, part: slice) -> "Forest":
        tree = self.tree
        if tree.parent_BN.shape[0] > 1:
            tree = tree._replace(
                parent_BN=tree.parent_BN[part],
                depth_BN=tree.depth_BN[part],
                ancestors_BNN=tree.ancestors_BNN[part],
            )
        return Forest(
            self.world,
            tree,
            self.kinds,
            self.case_R[part],
            self.weight_R[part],
            self.token_RN[part],
            self.code_RN[part],
            self.draws_RNK[part],
            self.kind_RNK[part],
            None if self.law_RNV is None else self.law_RNV[part],
        )

    def draft(self) -> Draft:
        """The drafts as a batch, in float64."""
        draws = torch.from_numpy(self.draws_RNK)
        kind = torch.from_numpy(self.kind_RNK.copy())
        node = torch.arange(draws.shape[1])[None, :, None]
        drawn = (draws >= 0) & (kind != DrawKind.FIXED)
        law = self.law_RNV
        if law is None:
            law = self.world.draft[self.case_R[:, None], self.code_RN.clip(0)]
        placed = self.kinds == {DrawKind.FIXED}
        return Draft(
            torch.from_numpy(self.token_RN),
            self.tree,
            draws,
            kind,
            torch.where(drawn, node, -1),
            None if placed else _laws(law),
            self.kinds,
        )

    def scores(self) -> Scores:
        """The target's laws at the same nodes."""
        return Scores(_laws(self.world.target[self.case_R[:, None], self.code_RN.clip(0)]))


def _laws(law: np.ndarray) -> Laws:
    logits = torch.from_numpy(np.ascontiguousarray(law)).log()
    return Laws(logits, torch.ones(len(law), dtype=torch.float64), greedy="none")


class Grower:
    """Builds a forest draw by draw: each step splits every row by what may be drawn next."""

    def __init__(self, world: World, tree: Tree, table: np.ndarray) -> None:
        self.world, self.tree, self.table = world, tree, table
        cases = len(world.cases)
        self.case = np.arange(cases)
        self.weight = np.ones(cases)
        self.token = np.zeros((cases, tree.nodes), dtype=np.int64)
        self.code = np.full((cases, tree.nodes), -1, dtype=np.int64)
        self.code[:, 0] = 0
        self.gone = np.zeros((cases, tree.nodes, world.vocab), dtype=bool)

    def laws(self, node: int) -> np.ndarray:
        """The draft's law [R, V] at a node, without the tokens that `exclude` removed there."""
        law = self.world.draft[self.case, self.code[:, node].clip(0)]
        law = np.where(self.gone[:, node], 0, law)
        total = law.sum(-1, keepdims=True)
        return law / np.where(total > 0, total, 1)

    def exclude(self, node: int, token_R: np.ndarray) -> None:
        """Later laws at the node leave these tokens out."""
        self.gone[np.arange(len(token_R)), node, token_R] = True

    def split(self, node: int, kid: int, law: np.ndarray) -> np.ndarray:
        """Give `kid` every token of positive probability; no node where nothing can be drawn."""
        absent = (self.code[:, node] < 0) | (law.sum(-1) == 0)
        law = np.where(absent[:, None], 0, law)
        row, token = np.nonzero(np.concatenate([law, absent[:, None]], 1))
        drawn = token < self.world.vocab
        share = np.concatenate([law, absent[:, None]], 1)[row, token]
        self.case, self.weight = self.case[row], self.weight[row] * share
        self.token, self.code, self.gone = self.token[row], self.code[row], self.gone[row]
        token = np.where(drawn, token, 0)
        self.token[:, kid] = token
        self.code[:, kid] = np.where(drawn, self.world.vocab * self.code[:, node] + 1 + token, -1)
        return token

    def forest(self, kind: DrawKind | np.ndarray, law_RNV: np.ndarray | None = None) -> Forest:
        """What has grown. Children that could not be drawn leave the draw table."""
        kinds = np.full(self.table.shape, int(kind)) if isinstance(kind, DrawKind) else kind
        there = np.take_along_axis(
            self.code >= 0, self.table.clip(0).reshape(1, -1).repeat(len(self.case), 0), 1
        ).reshape(-1, *self.table.shape[1:])
        draws = np.where((self.table >= 0) & there, self.table, -1)
        used = frozenset(DrawKind(int(k)) for k in np.unique(kinds[self.table >= 0]))
        return Forest(
            self.world, self.tree, used, self.case, self.weight, self.token, self.code, draws,
            kinds, law_RNV,
        )  # fmt: skip


def grower(world: World, counts: tuple[int, ...]) -> tuple[Grower, list[tuple[int, list[int]]]]:
    """Where a forest of `counts` begins, and its inner nodes with their children."""
    table = children(counts).numpy()
    nodes = [(n, [int(k) for k in table[0, n] if k >= 0]) for n in range(table.shape[1])]
    return Grower(world, branching(counts), table), [(n, kids) for n, kids in nodes if kids]


def without(world: World, counts: tuple[int, ...]) -> Forest:
    """Children drawn without replacement: RSD-C, and every sampled chain."""
    grow, nodes = grower(world, counts)
    for node, kids in nodes:
        for kid in kids:
            grow.exclude(node, grow.split(node, kid, grow.laws(node)))
    return grow.forest(DrawKind.WITHOUT)


def separate(world: World, counts: tuple[int, ...]) -> Forest:
    """Children drawn independently, each its own node even when tokens repeat."""
    grow, nodes = grower(world, counts)
    for node, kids in nodes:
        for kid in kids:
            grow.split(node, kid, grow.laws(node))
    return grow.forest(DrawKind.WITH)


def placed(world: World, counts: tuple[int, ...]) -> Forest:
    """The draft's most probable tokens: one tree per case."""
    grow, nodes = grower(world, counts)
    for node, kids in nodes:
        for kid in kids:
            grow.exclude(node, _place(grow, node, kid))
    return grow.forest(DrawKind.FIXED)


def _place(grow: Grower, node: int, kid: int) -> np.ndarray:
    law = grow.laws(node)
    top = np.eye(law.shape[1])[law.argmax(-1)] * (law.sum(-1, keepdims=True) > 0)
    return grow.split(node, kid, top)


def hub(world: World, counts: tuple[int, ...], *, last: bool = False) -> Forest:
    """Hub nodes: all children but one are the draft's top tokens; one is drawn from the rest.

    The drawn child stands first in the draw table, or last with `last`.
    """
    grow, nodes = grower(world, counts)
    kind = np.full(grow.table.shape, int(DrawKind.FIXED))
    for node, kids in nodes:
        drawn, tops = (kids[-1], kids[:-1]) if last else (kids[0], kids[1:])
        kind[0, node, len(kids) - 1 if last else 0] = DrawKind.WITHOUT
        for kid in tops:
            grow.exclude(node, _place(grow, node, kid))
        grow.split(node, drawn, grow.laws(node))
    law = np.stack([grow.laws(node) for node in range(grow.tree.nodes)], 1)
    return grow.forest(kind, law)


def mixed(world: World, counts: tuple[int, ...]) -> Forest:
    """One placed child (the last token of the vocabulary), then children drawn without replacement.

    The drawn ones do not exclude the placed one: a retrieval token beside a sampled draft.
    """
    grow, nodes = grower(world, counts)
    kind = np.full(grow.table.shape, int(DrawKind.WITHOUT))
    for node, kids in nodes:
        kind[0, node, 0] = DrawKind.FIXED
        top = np.zeros((len(grow.case), world.vocab))
        top[:, -1] = 1
        grow.split(node, kids[0], top)
        for kid in kids[1:]:
            grow.exclude(node, grow.split(node, kid, grow.laws(node)))
    return grow.forest(kind)


def stopped(world: World, depth: int, threshold: float = 0.3, *, drop: bool = False) -> Forest:
    """A chain that ends with the first token below a draft probability, that token included.

    With `drop` the unlikely token itself is left out, which is biased.
    """
    grow, nodes = grower(world, (1,) * depth)
    for node, (kid,) in nodes:
        last = grow.token[:, node], grow.code[:, node]
        law = grow.laws(node)
        if node and not drop:
            before = grow.world.draft[grow.case, (last[1].clip(1) - 1) // world.vocab]
            sure = before[np.arange(len(before)), last[0]] >= threshold
            law = np.where(sure[:, None], law, 0)
        token = grow.split(node, kid, law)
        if drop:
            before = grow.world.draft[grow.case, grow.code[:, node].clip(0)]
            weak = before[np.arange(len(before)), token] < threshold
            grow.code[weak, kid] = -1
    return grow.forest(DrawKind.WITHOUT)


# The law of what is emitted


def emitted(rule: Verifier, forest: Forest) -> tuple[np.ndarray, np.ndarray]:
    """Law [C, V^(D + 1)] of the first D + 1 tokens, and mean tokens per step [C]."""
    world, depth = forest.world, forest.tree.max_depth
    vocab, cases = world.vocab, len(world.cases)
    size = prefixes(vocab, depth)
    mass = np.zeros(cases * size * vocab)
    tokens = np.zeros(cases)
    levels = forest.tree.levels
    length = np.concatenate(
        [np.full(end - start, d + 1) for d, (start, end) in enumerate(pairwise(levels))]
    )
    for start in range(0, len(forest), CHUNK):
        part = forest[start : start + CHUNK]
        outcome = rule.outcome(part.draft(), part.scores())
        stop = part.weight_R[:, None] * outcome.stop_BN.numpy()
        assert not stop[part.code_RN < 0].any(), "stopped where there is no node"
        share = stop[..., None] * outcome.next_BNV.numpy()
        cell = (part.case_R[:, None] * size + part.code_RN.clip(0))[..., None] * vocab
        cell = cell + np.arange(vocab)
        mass += np.bincount(cell.ravel(), share.ravel(), len(mass))
        tokens += np.bincount(part.case_R, (stop * length).sum(1), cases)
    return _continued(world, mass.reshape(cases, size, vocab), depth), tokens


def truth(world: World, depth: int) -> np.ndarray:
    """The target's own law [C, V^(D + 1)]."""
    mass = np.zeros((len(world.cases), prefixes(world.vocab, depth), world.vocab))
    mass[:, 0] = world.target[:, 0]
    return _continued(world, mass, depth)


def _continued(world: World, mass: np.ndarray, depth: int) -> np.ndarray:
    """Continue every emitted block with the target to depth + 1 tokens."""
    whole = mass[:, 0]
    for d in range(1, depth + 1):
        at = world.level(d)
        whole = (whole[..., None] * world.target[:, at] + mass[:, at]).reshape(len(whole), -1)
    return whole


def errors(rule: Verifier, forest: Forest) -> np.ndarray:
    """Largest error of the emitted law in each case [C]."""
    law, _ = emitted(rule, forest)
    return np.abs(law - truth(forest.world, forest.tree.max_depth)).max(-1)


@lru_cache(maxsize=4)
def world(
    vocab: int, depth: int, seed: int = 0, cases: tuple[str, ...] = CASES, thin: bool = False
) -> World:
    """A cached world."""
    return World(vocab, depth, seed, cases, thin)
