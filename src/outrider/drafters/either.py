"""Either: a row drafts by copies or with its draft model, whichever has brought it more of late.

Copies (`recall`) are long and cost nothing where a text repeats; a draft model, or a head, is right
more often where it does not, and has to be called for every token. Which of them a row takes is
decided by what was kept in that row alone:

    copies     tokens of the tree that copies would have hung below the pending token, or did, that
               the text then went on with, less what its nodes cost: a mean that forgets, one for
               each number of tokens (`bucket`) that they have just had right in a row
    the model  how often its first, second, ... token was kept, as a chain of the best length is
               expected to add, less what its calls cost

So copies are verified in every step, and the model in those in which it drafts; no score of either
is looked at. What the model has not read because copies drafted it reads when its turn comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch.nn.functional import pad

from outrider.drafters import deterministic_tree, recall, recipes
from outrider.drafters.deterministic_tree import HostTree
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.memory import RowMemories
from outrider.drafters.recall import Recall
from outrider.row_params import RowTable
from outrider.stats import AcceptanceStats, bucket
from outrider.types import (
    Cache,
    Context,
    Draft,
    DraftShape,
    DrawKind,
    LanguageModel,
    Scores,
    Verdict,
)

CALL = 0.1  #: of a plain step's tokens: a call of the draft model
NODE = 0.05  #: and a node behind the first `FREE`, which take no time
FREE = 2
WORTH = 0.06  #: how often a node of copies must survive to be counted
DEPTH = 4  #: tokens of the model's chain, at most
#: What copies bring by how many tokens they have had right in a row, before a row has shown it.
COPIES = (0.2, 0.2, 0.9, 1.1, 1.3, 1.5, 1.8, 2.1, 2.4, 2.7, 3.0, 3.3)
MODEL = (0.6, 0.55, 0.5, 0.45)  #: and how often the model's tokens are kept
LOOKS = 4.0  #: that these are worth
KEEP = 0.95  #: what a look counts for beside the next one


class SourceStats:
    """What copies and the model have brought one row.

    streak   tokens in a row that copies have had right
    unread   committed tokens that the model has not read
    drafted  whether the last draft was the model's
    dropped  whether the model is asked no more
    """

    __slots__ = ("chances", "drafted", "dropped", "streak", "unread", "worth")

    def __init__(self, worth: AcceptanceStats, chances: AcceptanceStats, unread: int) -> None:
        self.worth, self.chances = worth, chances
        self.streak, self.unread = 0, unread
        self.drafted = self.dropped = False

    @classmethod
    def new(cls, unread: int) -> "SourceStats":
        """Of a row that has shown nothing."""
        return cls(
            AcceptanceStats(COPIES, LOOKS, KEEP), AcceptanceStats(MODEL, LOOKS, KEEP), unread
        )

    def copy(self) -> "SourceStats":
        other = SourceStats(self.worth.copy(), self.chances.copy(), self.unread)
        other.streak = self.streak
        other.drafted, other.dropped = self.drafted, self.dropped
        return other

    def gains(self, depth: int) -> list[float]:
        """Tokens that the model's chain of n adds, as is expected, less those its calls cost."""
        survives, found = 1.0, [0.0]
        for at in range(depth):
            survives *= self.chances.chance(at)
            found.append(found[-1] + survives - CALL)
        return found

    def copies(self, depth: int) -> bool:
        """Whether copies are to draft."""
        if self.dropped:
            return True
        nodes = (max(n - FREE, 0) * NODE for n in range(depth + 1))
        best = max(gain - cost for gain, cost in zip(self.gains(depth), nodes, strict=True))
        return self.worth.chance(bucket(self.streak + 1)) >= best

    def observe_copies(self, tree: HostTree, tokens: Sequence[int]) -> None:
        """The text went on with these tokens, whoever drafted them."""
        kept, whole = followed(tree, tokens)
        cost = max(len(tree.tokens) - 1 - FREE, 0) * NODE
        self.worth.observe(bucket(self.streak + 1), kept - cost)
        self.streak = self.streak + kept if whole and kept else 0

    def observe_model(self, depth: int, kept: int) -> None:
        """The model drafted so many tokens."""
        for at in range(min(kept + 1, depth)):
            self.chances.observe(at, at < kept)


def followed(tree: HostTree, tokens: Sequence[int]) -> tuple[int, bool]:
    """How many tokens of a text stand along one path of a tree, and whether nothing else was there.

    >>> followed(HostTree([5, 6, 7, 8], [-1, 0, 0, 2]), [7, 8, 9])
    (2, True)
    >>> followed(HostTree([5, 6, 7, 8], [-1, 0, 0, 2]), [7, 9])
    (1, False)
    """
    node = kept = 0
    for token in tokens:
        below = [n for n, above in enumerate(tree.parents) if above == node]
        hit = next((n for n in below if tree.tokens[n] == token), None)
        if hit is None:
            return kept, not below
        node, kept = hit, kept + 1
    return kept, True


@dataclass(frozen=True)
class EitherState(RowTable):
    """What copies know of each row, what both have brought it, and the model's cache."""

    text: RowMemories[recall.RecallRow]
    sides: RowMemories[SourceStats]
    cache: Cache


@dataclass(frozen=True)
class Either:
    """`copies`, or a chain of `model`, row by row.

    >>> Either(Recall(8), DraftModel(head, (1, 1, 1))).shapes[0].max_nodes   # doctest: +SKIP
    9
    """

    copies: Recall
    drafted: DraftModel
    name: ClassVar[str] = "either"
    capturable: ClassVar[bool] = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.drafted.aux_layers

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return self.copies.kinds | self.drafted.kinds

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Those of copies; a chain takes as many nodes as it needs."""
        return self.copies.shapes

    @property
    def _depth(self) -> int:
        return self.drafted.shapes[0].max_depth

    @property
    def asked(self) -> LanguageModel:
        return self.drafted.model

    def by_model(self, memory: EitherState) -> Sequence[bool]:
        return [sides.drafted for sides in memory.sides.rows]

    def reads(self, memory: EitherState) -> int:
        """What the model has not read, where it is to draft in any row: it reads all rows."""
        rows = memory.sides.rows
        if all(sides.copies(self._depth) for sides in rows):
            return 0
        return max(sides.unread for sides in rows)

    def drop(self, memory: EitherState, rows: Sequence[int]) -> None:
        """Copies alone from here on."""
        for row in rows:
            memory.sides.rows[row].dropped = True

    def open(self, context: Context, capacity: int) -> EitherState:
        """The model reads the prompts; nothing is known yet of what pays."""
        text = self.copies.open(context, capacity)
        sides = RowMemories(tuple(SourceStats.new(context.unread) for _ in text.rows))
        return EitherState(text, sides, self.drafted.open(context, capacity))

    def foresee(self, memory: EitherState, context: Context) -> Sequence[Sequence[float]]:
        """What the side that drafts is expected to add."""
        told = self.copies.foresee(memory.text, context)
        return [
            gains if sides.copies(self._depth) else sides.gains(self._depth)
            for gains, sides in zip(told, memory.sides.rows, strict=True)
        ]

    def propose(self, memory: EitherState, context: Context, shape: DraftShape) -> Draft:
        """Trees of copies in some rows, chains of the model in the others."""
        draft = self._draft(memory, context, shape)
        return draft if self.copies.chain else draft._replace(fan=recall.CHILDREN)

    def _draft(self, memory: EitherState, context: Context, shape: DraftShape) -> Draft:
        copied = [sides.copies(self._depth) for sides in memory.sides.rows]
        if all(copied):
            return self.copies.propose(memory.text, context, shape)
        depth = min(shape.max_nodes - 1, self._depth)
        chain = next(own for own in self.drafted.shapes if own.max_depth == depth)
        unread = max(sides.unread for sides in memory.sides.rows)
        drafted = self.drafted.propose(memory.cache, context._replace(unread=unread), chain)
        if not any(copied):
            return drafted
        trees = self.copies.trees(memory.text, shape)
        each = zip(trees, _chains(drafted), copied, strict=True)
        grown = [tree if by_copies else chain for tree, chain, by_copies in each]
        return _both(deterministic_tree.trees(grown, self.copies.kind), drafted, copied)

    def commit(
        self, memory: EitherState, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """What the model brought, and copies brought or would have; then both learn."""
        copied = [sides.copies(self._depth) for sides in memory.sides.rows]
        read = draft.tree.max_depth > 0 and not all(copied)
        added = deterministic_tree.committed(draft, verdict)
        nodes = [len(own) - 1 for own in deterministic_tree.bigrams(draft)]
        each = zip(memory.text.rows, memory.sides.rows, copied, added, nodes, strict=True)
        for row, sides, by_copies, tokens, drafted in each:
            grown = self.copies.foreseen(row)
            sides.observe_copies(grown.first(_worthy(grown)), tokens)
            sides.drafted = not by_copies and drafted > 0
            if not by_copies:
                sides.observe_model(drafted, len(tokens) - 1)
            # what was read is the model's own draft: of a copy only the pending token is known
            ahead = len(tokens) - 1 if by_copies else 0
            sides.unread = ahead if read else sides.unread + len(tokens)
        self.copies.commit(memory.text, context, draft, verdict, scores)
        self.drafted.commit(memory.cache, context, draft, verdict, scores)


def _worthy(gains: Sequence[float]) -> int:
    """How many of a tree's nodes survive often enough to be scored."""
    return sum(b - a >= WORTH for a, b in pairwise(gains))


def _chains(draft: Draft) -> list[HostTree]:
    """The chains of a draft model, as far as they are there."""
    tokens, draws = draft.tokens_BN.tolist(), (draft.draws_BNK >= 0).sum((1, 2)).tolist()
    draws *= len(tokens) // len(draws)  # what is there may be shared
    return [
        HostTree(own[: 1 + count], list(range(-1, count)))
        for own, count in zip(tokens, draws, strict=True)
    ]


def _both(grown: Draft, drafted: Draft, copied: Sequence[bool]) -> Draft:
    """The rows' trees, those that are not copied with the kinds and laws of the model's draft."""
    if drafted.laws is None:
        return grown
    nodes, most = grown.draws_BNK.shape[1:]
    more = (0, most - 1, 0, nodes - drafted.kind_BNK.shape[1])  # where nothing is drawn
    own = ~torch.tensor(copied, device="cpu")[:, None, None] & (grown.draws_BNK >= 0)
    return grown._replace(
        kind_BNK=torch.where(own, pad(drafted.kind_BNK, more), grown.kind_BNK),
        row_BNK=torch.where(own, pad(drafted.row_BNK, more), grown.row_BNK),
        laws=drafted.laws,
        kinds=grown.kinds | drafted.kinds,
    )


def _made(
    target: LanguageModel,
    model: LanguageModel,
    total_tokens: int | None = None,
    num_speculative_tokens: int | None = None,
    shared_noise: bool = False,
) -> Either:
    copies = recall.made(target, total_tokens, num_speculative_tokens)
    depth = min(DEPTH, copies.shapes[0].max_depth)
    return Either(copies, DraftModel(model, (1,) * depth, shared_noise))


RECIPE = recipes.Recipe(
    _made,
    ("target", "model"),
    ("total_tokens", "num_speculative_tokens", "shared_noise"),
    depth=Recall.total_tokens,
    deepest=recall.MOST,
)
