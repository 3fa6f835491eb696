"""Reference lookup: copy from a text that the answer is likely to resemble, given with a request.

The reference is what the request names (captions, another recogniser's transcript, a document, the
previous version of a file), or else the source that an encoder-decoder reads. Its drafts are copies
of it, of what followed the longest suffix of the text so far, or of the row's own text. They are
point masses: no draft law exists and none is needed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import arguments
from outrider.drafters import prompt_lookup, recipes
from outrider.drafters.tree_drafting import shapes
from outrider.row_params import RowTable
from outrider.tree import numbers
from outrider.types import Context, Draft, DraftShape, DrawKind, Scores, Verdict

#: A match no further than this from where the copying has come to counts as one token longer:
#: corrected text goes on close by, and single tokens stand in many places.
NEAR = 8


@dataclass(frozen=True)
class Place(RowTable):
    """Where each row has come to in its reference. A `RowStore`; written in place."""

    next_B: Tensor  #: the token of the reference that is copied next
    start_Bw: Tensor  #: where each chain of the last draft began in it; -1: elsewhere, or no chain


@dataclass(frozen=True)
class ReferenceLookup:
    """Copies from the request's reference, then from the row's own text.

    The longest suffix of the text, of `most_ngram` down to `least_ngram` tokens, that stands in the
    reference or in the text says where to copy from; among equals the place nearest ahead of where
    the copying has come to. Where none does the copying goes on there: at the reference's start, or
    behind a token that the model wrote instead of the reference's. `width` above 1 drafts so many
    copies side by side, each with another first token.

    >>> ReferenceLookup(4).shapes[0].max_nodes
    5
    """

    num_speculative_tokens: int = 8
    most_ngram: int = 4
    least_ngram: int = 1
    width: int = 1
    name: ClassVar[str] = "reference_lookup"
    aux_layers: ClassVar[tuple[int, ...]] = ()
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED})

    def __post_init__(self) -> None:
        prompt_lookup.check(self)
        arguments.wholes(self, "leave it out for one chain", width=1)

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Copies of each length."""
        return shapes.of_levels(self.width, self.num_speculative_tokens)

    def open(self, context: Context, capacity: int) -> Place:
        """Every row begins at the start of its reference."""
        start = torch.zeros_like(context.length_B)
        return Place(start, torch.full_like(start, -1)[:, None].repeat(1, self.width))

    def propose(self, memory: Place, context: Context, shape: DraftShape) -> Draft:
        """What follows the best matches; without one, the reference from where it has come to."""
        count = shape.max_depth
        text, reference = prompt_lookup.text(context), context.reference_BS
        if reference is None:
            reference = text[:, :0]
        corpus = torch.nn.functional.pad(reference, (0, 1), value=-1)
        size = corpus.shape[1]
        corpus = torch.cat([corpus, text], 1)
        rank = self._rank(memory, context, corpus, size)
        starts = []
        for _ in range(self.width):
            best, where = rank.max(1)
            starts.append(torch.where(best >= 0, where, -1))
            first = corpus.gather(1, where[:, None])
            rank = rank.masked_fill(corpus == first, -1)  # siblings are different tokens
        start_Bw = torch.stack(starts, 1)
        memory.start_Bw.copy_(torch.where(start_Bw < size, start_Bw, -1))
        return prompt_lookup.copied(corpus, start_Bw, context, count)

    def _rank(self, memory: Place, context: Context, corpus_BC: Tensor, size: int) -> Tensor:
        """How good each place is to copy from, -1 for no place at all.

        The first `size` places are the reference's: among equal matches the nearest ahead of where
        the copying has come to goes before those behind it, and those before the text's own, of
        which the last is the best.
        """
        wide = corpus_BC.shape[1]
        at, next_B1 = numbers(wide, corpus_BC.device), memory.next_B[:, None]
        inside = at < size
        run = prompt_lookup.runs(corpus_BC, context, self.most_ngram)
        run = torch.nn.functional.pad(run[:, :-1], (1, 0))  # of the tokens ahead of each place
        close = inside & ((at - next_B1).abs() <= NEAR)
        ahead = torch.where(at >= next_B1, 2 * wide - at + next_B1, at)
        order = torch.where(inside, wide + ahead, at)
        rank = torch.where(run >= self.least_ngram, (run + close) * 4 * wide + order, -1)
        goes_on = (at == next_B1) & inside & (corpus_BC >= 0)
        # at first its start goes before a single token that stands somewhere in it
        least = torch.where(next_B1 == 0, 8 * wide - 1, 0)
        return torch.where(goes_on & (rank < least), least, rank)

    def commit(
        self, memory: Place, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """See `follow`."""
        self.follow(memory, verdict)

    def follow(self, memory: Place, verdict: Verdict) -> None:
        """The copying has come to behind what was kept of it, and the token after that."""
        self.pass_by(memory, verdict.path_BD, verdict.count_B, verdict.count_B + 1)

    def pass_by(self, memory: Place, path_BD: Tensor, kept_B: Tensor, passed_B: Tensor) -> None:
        """The copying has come to `passed_B` tokens behind where the last draft was made.

        The first `kept_B` of them are nodes of that draft: `path_BD`.
        """
        chain = torch.nn.functional.pad(path_BD, (0, 1), value=-1)[:, :1] - 1
        start = memory.start_Bw.gather(1, chain.clamp(min=0))[:, 0]
        copied = (kept_B > 0) & (start >= 0)
        memory.next_B.copy_(torch.where(copied, start, memory.next_B) + passed_B)


def _made(
    num_speculative_tokens: int = ReferenceLookup.num_speculative_tokens,
    ngram: tuple[int, int] = (ReferenceLookup.least_ngram, ReferenceLookup.most_ngram),
    width: int = ReferenceLookup.width,
) -> ReferenceLookup:
    return ReferenceLookup(num_speculative_tokens, ngram[1], ngram[0], width)


RECIPE = recipes.Recipe(
    _made,
    takes=("num_speculative_tokens", "ngram", "width"),
    depth=ReferenceLookup.num_speculative_tokens,
    deepest=16,
    copies=True,
)
