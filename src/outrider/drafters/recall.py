"""Recall: what the text says follows and what the target said would follow, in one tree.

Below every node hang the token behind the longest suffix that the text holds (`suffix`) and the
tokens that the target held likely there before (`token_recycling`). The two complement each other:
copies are long and sure where text repeats, recycled tokens are there where nothing is to be
copied. Where the pending token is new, so that neither knows it, there is what the target held
likely behind a token that was drafted in its place and refused: another word often goes on alike,
as guesses of parallel decoding do (Santilli et al. 2023).

The tree grows node by node, the likeliest first. A node survives if its parent does and its token
is the right one. Of that, `AcceptanceStats` tell by the length of the match, by the place of a
token among the recycled ones, and by whether these name the copied token as well. So the first n
nodes are the best tree of n nodes, and their survivals summed up are the tokens that it is expected
to add.

Every committed token corrects the odds of all that was known of it, scored or not: nothing has to
be tried to be learnt. All of it belongs to the row (docs/rules.md: rows may share a seed).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple, TypeAlias

import torch

from outrider import arguments, ops
from outrider.drafters import deterministic_tree, recipes, suffix
from outrider.drafters.automaton import WIDTH, Automaton, RequestHistory, Successors, Watched
from outrider.drafters.deterministic_tree import HostTree
from outrider.drafters.memory import RowMemories
from outrider.errors import ConfigurationError
from outrider.stats import BUCKETS, STRENGTH, AcceptanceStats, bucket
from outrider.types import Context, Draft, DraftShape, DrawKind, LanguageModel, Scores, Verdict

MOST = 16  #: nodes that a planner may choose
SIZES = (28, 24, 20, *range(16, 0, -1))  #: and smaller numbers of them
CHILDREN = WIDTH + 1  #: of a node, at most: what was likely there, and a copy
FLOOR = 0.02  #: a node that survives more rarely is worth no model's time
UNREAD = 16  #: steps without a draft that are read at once, at most
GAP = 5.0  #: of a token's logit to the best one: what is kept of what the target held likely
_ALONE = BUCKETS  #: recycled tokens without a copy beside them: a bucket of its own
_INSTEAD = BUCKETS + 1  #: and what was likely behind another token in the pending one's place


def _copied_prior() -> list[float]:
    """By the match's length, and by where the copied token stands among the recycled ones."""
    agree = [1.0, 0.8, 0.8] + [0.65] * (WIDTH - 2)
    sure = [1.0] + [0.9] * WIDTH
    return [
        chance * (agree if size < 5 else sure)[place]
        for size, chance in enumerate(suffix.PRIOR)
        for place in range(WIDTH + 1)
    ]


def _recycled_prior() -> list[float]:
    """By the length of the match beside them, and by place; `_ALONE` and `_INSTEAD` behind."""
    alone = (0.30, 0.12, 0.07, 0.05, 0.03, 0.025, 0.02, 0.015)
    beside = (0.20, 0.13, 0.06, 0.045, 0.03, 0.025, 0.02, 0.012)
    known = [(1 - chance) * part for chance in suffix.PRIOR for part in beside]
    instead = (0.12, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02, 0.015)
    return [*known, *alone, *instead]


COPIED, RECYCLED = _copied_prior(), _recycled_prior()
KEEP = 0.998  #: what a look counts for beside the next one: recycled tokens are looked at often


#: A child that a node may have: its chance, its token, and whether it is copied.
Guess: TypeAlias = tuple[float, int, bool]
#: What the target held likely in a step, by row and node.
Likely: TypeAlias = Callable[[int], list[list[int]]]
_RECYCLED = (False,) * WIDTH


class RecallRow:
    """A row's text, what was likely in it, and how often either has been right.

    instead  what was likely behind a token that was refused in the pending one's place
    unread   what steps without a draft have added, and what was likely there: read by several at
             once, which takes a third of the time that each by itself takes between two steps
    """

    __slots__ = ("after", "copied", "grown", "instead", "recycled", "text", "unread", "watched")

    def __init__(
        self,
        text: Automaton,
        after: Successors,
        copied: AcceptanceStats,
        own: AcceptanceStats,
        watched: Watched | None = None,
    ) -> None:
        self.text, self.after, self.watched = text, after, watched
        self.copied, self.recycled = copied, own
        self.instead: Sequence[int] = ()
        self.unread: list[tuple[int, int, Likely]] = []
        self.grown: GrowingTree | None = None

    def copy(self) -> "RecallRow":
        """The same, to be continued apart; later requests learn from the copy."""
        self.settle()
        after = self.after if self.after.shared else self.after.copy()
        odds = self.copied.copy(), self.recycled.copy()
        other = RecallRow(self.text.copy(), after, *odds, self.watched)
        other.instead = self.instead
        if other.watched is not None:
            other.watched.follow(other.text)
        return other

    def foresee(self, most: "Most") -> "GrowingTree":
        """The best tree within these limits, and what its first n nodes are expected to add."""
        self.settle()
        grown = self.grown
        if grown is None or grown.length != len(self.text.tokens) or grown.most != most:
            self.grown = grown = GrowingTree(self, most)
        return grown

    def guesses(
        self, before: int, token: int, copy: int | None, match: int, pending: bool
    ) -> list[Guess]:
        """What may follow two tokens, the likeliest first.

        copy, match  what a copy goes on with there, and how long its match is
        """
        row, chances = self.after.row(before, token), self.recycled.chances
        if copy is None:
            size = _ALONE
            if pending and not row:
                row, size = self.instead, _INSTEAD
            first = size * WIDTH
            return list(zip(chances[first : first + WIDTH], row, _RECYCLED, strict=False))
        size = bucket(match)
        first = size * WIDTH
        found = list(zip(chances[first : first + WIDTH], row, _RECYCLED, strict=False))
        place = WIDTH
        if copy in row:
            place = row.index(copy)
            del found[place]
        found.append((self.copied.chances[size * (WIDTH + 1) + place], copy, True))
        found.sort(reverse=True)
        return found

    def follows(self, token: int, at: int, likely: Likely) -> None:
        """A step without a draft added a token; the row's place in that step is `at`."""
        self.unread.append((token, at, likely))
        if len(self.unread) >= UNREAD or self.watched is not None:  # others read a watched text
            self.settle()

    def settle(self) -> None:
        """Read what is unread."""
        text = self.text.tokens
        for following, at, likely in self.unread:
            before, token = text[-2] if len(text) > 1 else -1, text[-1]
            self.read((following,))
            self.after.keep(before, token, likely(at)[0])
        self.unread.clear()

    def read(self, tokens: Sequence[int]) -> None:
        """The row goes on with these tokens."""
        text = self.text
        for token in tokens:
            self._learn(text, token)
            text.push(token)
            self.instead = ()

    def _learn(self, text: Automaton, token: int) -> None:
        """What was known of this token was right or wrong."""
        tokens = text.tokens
        row = self.after.row(tokens[-2] if len(tokens) > 1 else -1, tokens[-1])
        first, place = _ALONE * WIDTH, -1
        if text.match and tokens[text.place] >= 0:
            copy, size = tokens[text.place], bucket(text.match)
            place = row.index(copy) if copy in row else WIDTH
            first = size * WIDTH
            self.copied.observe(size * (WIDTH + 1) + place, copy == token)
        elif not row:
            row, first = self.instead, _INSTEAD * WIDTH
        for k, likely in enumerate(row):
            if k != place:
                self.recycled.observe(first + k, likely == token)


class Most(NamedTuple):
    """How far a tree may grow."""

    nodes: int
    depth: int
    chain: bool  #: one child at every node


class _Node(NamedTuple):
    """A node of a growing tree, with what its children are to be guessed from."""

    token: int
    before: int
    place: int  #: where its copy goes on in the text, -1: it is none
    match: int
    survives: float
    depth: int
    guesses: list[Guess]


class GrowingTree(Sequence[float]):
    """The likeliest nodes below the pending token; [n]: the survivals of the first n summed up.

    It grows as far as somebody looks: where the first node is not worth its time, no other one is
    looked for.
    """

    __slots__ = ("_expanded", "_gains", "_nodes", "_parents", "_row", "_waiting", "length", "most")

    def __init__(self, row: RecallRow, most: Most) -> None:
        text = row.text
        tokens, length = text.tokens, len(text.tokens)
        before = tokens[-2] if length > 1 else -1
        root = _Node(tokens[-1], before, text.place if text.match else -1, text.match, 1.0, 0, [])
        self.length, self.most, self._row = length, most, row
        self._nodes, self._parents, self._gains = [root], [-1], [0.0]
        #: The best child of a node that is not there yet.
        self._waiting: list[tuple[float, int, int]] = []
        self._expanded = 0  #: nodes whose children wait

    def __getitem__(self, nodes: int) -> float:  # type: ignore[override]
        """Tokens that so many nodes are expected to add; IndexError where there are fewer."""
        self._grow(nodes)
        return self._gains[nodes]

    def __len__(self) -> int:
        self._grow(self.most.nodes)
        return len(self._gains)

    def first(self, nodes: int) -> HostTree:
        """The tree of the first so many nodes, or of all there are."""
        self._grow(nodes)
        tokens = [node.token for node in self._nodes[: nodes + 1]]
        return HostTree(tokens, self._parents[: nodes + 1])

    def _grow(self, until: int) -> None:
        """Up to so many nodes."""
        nodes, waiting, until = self._nodes, self._waiting, min(until, self.most.nodes)
        while len(nodes) <= until:
            if self._expanded < len(nodes):
                self._expand(self._expanded)
                self._expanded += 1
            if not waiting or -waiting[0][0] < FLOOR:
                return
            value, number, rank = heappop(waiting)
            node = nodes[number]
            _, token, copies = node.guesses[rank]
            if rank + 1 < len(node.guesses) and not self.most.chain:
                more = -node.survives * node.guesses[rank + 1][0]
                heappush(waiting, (more, number, rank + 1))
            place, match = (node.place + 1, node.match + 1) if copies else (-1, 0)
            nodes.append(_Node(token, node.token, place, match, -value, node.depth + 1, []))
            self._parents.append(number)
            self._gains.append(self._gains[-1] - value)

    def _expand(self, number: int) -> None:
        """What may follow a node: its best child waits."""
        node, tokens = self._nodes[number], self._row.text.tokens
        copy = None
        if node.depth == self.most.depth:
            return
        if node.place >= 0:
            # behind the end of the text a copy goes on with itself
            at = node.place
            copy = tokens[at] if at < self.length else self._above(number, at - self.length)
        copy = None if copy is not None and copy < 0 else copy
        guesses = self._row.guesses(node.before, node.token, copy, node.match, number == 0)
        node.guesses.extend(guesses)
        if guesses:
            heappush(self._waiting, (-node.survives * guesses[0][0], number, 0))

    def _above(self, number: int, depth: int) -> int:
        """The token at depth `depth` + 1 of the path to a node."""
        path = []
        while number:
            path.append(self._nodes[number].token)
            number = self._parents[number]
        return path[-1 - depth]


@dataclass(frozen=True)
class Recall:
    """The likeliest `total_tokens` nodes of copies and recycled successors, or fewer.

    depth    tokens of the longest path; None: as many as nodes
    chain    the likeliest path alone, for targets that do not score trees
    earlier  if not 0: successors, and texts of at most about so many tokens, of earlier requests
             are used as well. They change how fast a text comes and never the text, for which only
             a matching rule is taken

    >>> [shape.key for shape in Recall(5).shapes]
    [5, 4, 3, 2, 1]
    """

    total_tokens: int = 8
    depth: int | None = None
    chain: bool = False
    earlier: int = 0
    name: ClassVar[str] = "recall"
    capturable: ClassVar[bool] = False
    aux_layers: ClassVar[tuple[int, ...]] = ()
    _earlier: RequestHistory | None = field(init=False, repr=False, compare=False, default=None)
    _after: Successors | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        total = arguments.whole("total_tokens", self.total_tokens, recipes.PLAIN, least=1)
        if self.depth is not None:
            depth = arguments.whole("depth", self.depth, recipes.PLAIN, least=1)
            object.__setattr__(self, "depth", depth)
        if not isinstance(self.chain, bool):
            arguments.refuse("chain", "True or False", self.chain, "leave it out for a tree")
        object.__setattr__(self, "total_tokens", total)
        object.__setattr__(self, "_earlier", suffix.remembering(self.earlier))
        object.__setattr__(self, "_after", Successors(shared=True) if self.earlier else None)

    @property
    def kind(self) -> DrawKind:
        """Of all its children: earlier texts may have seen the noise."""
        return DrawKind.COUPLED if self.earlier else DrawKind.FIXED

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return frozenset({self.kind})

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """The best trees of some sizes."""
        return _shapes(self.total_tokens, self.depth or self.total_tokens, self.chain)

    def open(self, context: Context, capacity: int) -> RowMemories[RecallRow]:
        """Each row's text; nothing is known yet of what is likely in it."""
        _on_host(context.length_B.device)
        texts = suffix.automata(context, self._earlier)
        watched = suffix.watching(self._earlier, texts)
        return RowMemories(
            tuple(
                RecallRow(
                    text,
                    self._after or Successors(),
                    AcceptanceStats(COPIED, STRENGTH, suffix.KEEP),
                    AcceptanceStats(RECYCLED, STRENGTH, KEEP),
                    of,
                )
                for text, of in zip(texts, watched, strict=True)
            )
        )

    def foresee(
        self, memory: RowMemories[RecallRow], context: Context
    ) -> Sequence[Sequence[float]]:
        """What the best tree of each size is expected to add."""
        return [self.foreseen(row) for row in memory.rows]

    def propose(self, memory: RowMemories[RecallRow], context: Context, shape: DraftShape) -> Draft:
        """The best tree of each row, of so many nodes; rows that know nothing propose nothing."""
        draft = deterministic_tree.trees(self.trees(memory, shape), self.kind)
        return draft if self.chain else draft._replace(fan=CHILDREN)

    def trees(self, memory: RowMemories[RecallRow], shape: DraftShape) -> list[HostTree]:
        """The best tree of each row, of as many nodes as the shape says of it."""
        nodes = shape.max_nodes - 1
        sizes = shape.sizes or (nodes,) * len(memory.rows)
        each = zip(memory.rows, sizes, strict=True)
        return [self.foreseen(row).first(min(size, nodes)) for row, size in each]

    def foreseen(self, row: RecallRow) -> GrowingTree:
        """The best tree of a row, and what its first n nodes are expected to add."""
        return row.foresee(Most(self.total_tokens, self.depth or self.total_tokens, self.chain))

    def commit(
        self,
        memory: RowMemories[RecallRow],
        context: Context,
        draft: Draft,
        verdict: Verdict,
        scores: Scores,
    ) -> None:
        """Read what was kept, and keep what the target holds likely at every node."""
        best = ops.top_tokens(scores.laws, WIDTH, GAP)
        added = deterministic_tree.committed(draft, verdict)
        if draft.tree.nodes == 1:
            for at, (row, tokens) in enumerate(zip(memory.rows, added, strict=True)):
                row.follows(tokens[0], at, best)  # no tensor of the step is held until it is read
            return
        bigrams = deterministic_tree.bigrams(draft)
        refused = deterministic_tree.refused(draft, verdict, [len(nodes) for nodes in bigrams])
        each = zip(memory.rows, added, bigrams, refused, strict=True)
        for at, (row, tokens, nodes, first) in enumerate(each):
            found = best(at)
            row.settle()
            text = row.text.tokens
            before = text[-2] if len(text) > 1 else -1
            row.read(tokens)
            for (parent, token), some in zip(nodes, found, strict=False):
                row.after.keep(before if parent is None else parent, token, some)
            if first:
                row.instead = found[first]


@lru_cache(maxsize=64)
def _shapes(total: int, deepest: int, chain: bool) -> tuple[DraftShape, ...]:
    sizes = (total, *(size for size in SIZES if size < total))
    return tuple(DraftShape(size, size + 1, min(size, deepest), chain) for size in sizes)


def _on_host(device: torch.device) -> None:
    """Refuse any other device: a row's tokens would have to be waited for in every step."""
    if device.type != "cpu":
        raise ConfigurationError(
            f"drafter 'recall' works where the target is on a CPU; got a target on {device}; use "
            "drafter='suffix'"
        )


def made(
    target: LanguageModel,
    total_tokens: int | None = None,
    num_speculative_tokens: int | None = None,
    chain: bool | None = None,
    earlier: int = Recall.earlier,
) -> Recall:
    """Who asks for a depth alone gets so many nodes.

    Where a node of a tree may round otherwise than the same text does in a row, and nobody asks for
    a tree, there is none: greedy texts stay plain decoding's.
    """
    _on_host(target.device)
    total = total_tokens or num_speculative_tokens or Recall.total_tokens
    if chain is None:
        chain = not (target.trees and target.trees_alike)
    return Recall(total, num_speculative_tokens, chain, earlier)


RECIPE = recipes.Recipe(
    made,
    ("target",),
    ("total_tokens", "num_speculative_tokens", "chain", "earlier"),
    depth=Recall.total_tokens,
    deepest=MOST,
)
