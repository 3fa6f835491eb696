"""Suffix lookup: copy what followed the longest suffix of the text that stands in it before.

SAM-Decoding (Hu et al. 2024) and SuffixDecoding (Oliaro et al. 2024) find it in constant time per
token, however long match and text are; prompt lookup compares n-grams of at most four. How far a
copy is worth scoring follows from the match's length: the longer, the surer, and every token that
is copied makes it one longer. So one table of odds by length foresees a whole chain, and every
committed token corrects it, whether its copy was scored or not.

On a host every row keeps an automaton of its text. On a device, where nothing may wait for a row's
tokens, suffixes of at most `LONGEST` tokens are found by comparing the text with itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

from outrider import arguments
from outrider.drafters import deterministic_tree, prompt_lookup, recipes
from outrider.drafters.automaton import Automaton, RequestHistory, Watched
from outrider.drafters.memory import NoMemory, RowMemories
from outrider.drafters.tree_drafting import shapes
from outrider.errors import ConfigurationError
from outrider.stats import STRENGTH, AcceptanceStats, bucket, gains
from outrider.types import Context, Draft, DraftShape, DrawKind, Scores, Verdict

LONGEST = 16  #: tokens of a suffix that are compared on a device
#: Chances that a copy's next token is right, by the bucket of its match's length.
PRIOR = (0.2, 0.3, 0.5, 0.68, 0.76, 0.8, 0.9, 0.91, 0.93, 0.98, 0.98, 0.99)
KEEP = 0.995


class SuffixRow:
    """A row's text, and how far its copies have been right."""

    __slots__ = ("odds", "text", "watched")

    def __init__(
        self, text: Automaton, odds: AcceptanceStats, watched: Watched | None = None
    ) -> None:
        self.text, self.odds, self.watched = text, odds, watched

    def copy(self) -> "SuffixRow":
        """The same, to be continued apart; later requests learn from the copy."""
        other = SuffixRow(self.text.copy(), self.odds.copy(), self.watched)
        if other.watched is not None:
            other.watched.follow(other.text)
        return other

    def gains(self, most: int) -> list[float]:
        """Tokens that a chain of n copies is expected to add, n = 0, 1, ..., `most`."""
        match = self.text.match
        return gains(self.odds.chances, match, most) if match else [0.0]

    def read(self, tokens: Sequence[int]) -> None:
        """The row goes on with these tokens."""
        text, odds = self.text, self.odds
        for token in tokens:
            if text.match:
                odds.observe(bucket(text.match), text.tokens[text.place] == token)
            text.push(token)


@dataclass(frozen=True)
class Suffix(shapes.Chains):
    """Copies behind the longest suffix that the row's text holds already.

    With `earlier` texts of at most about so many tokens of earlier requests can be copied as well.
    They change how fast a text comes and never the text, for which only a matching rule is taken.

    >>> [shape.max_depth for shape in Suffix(3).shapes]
    [3, 2, 1]
    """

    num_speculative_tokens: int = 8
    earlier: int = 0
    name: ClassVar[str] = "suffix"
    aux_layers: ClassVar[tuple[int, ...]] = ()
    _earlier: RequestHistory | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        arguments.wholes(self, recipes.PLAIN, num_speculative_tokens=1)
        object.__setattr__(self, "_earlier", remembering(self.earlier))

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Placed; copies of earlier texts may have seen the noise."""
        return frozenset({self.kind})

    @property
    def kind(self) -> DrawKind:
        return DrawKind.COUPLED if self.earlier else DrawKind.FIXED

    def open(self, context: Context, capacity: int) -> RowMemories[SuffixRow] | NoMemory:
        """An automaton of each row's text; nothing on a device."""
        device = context.length_B.device
        if device.type != "cpu":
            if self.earlier:
                raise ConfigurationError(
                    f"earlier texts are kept on the host; got earlier={self.earlier} for a model "
                    f"on {device}; leave earlier out"
                )
            return NoMemory()
        texts = automata(context, self._earlier)
        each = zip(texts, watching(self._earlier, texts), strict=True)
        return RowMemories(
            tuple(SuffixRow(text, AcceptanceStats(PRIOR, STRENGTH, KEEP), of) for text, of in each)
        )

    def foresee(
        self, memory: RowMemories[SuffixRow], context: Context
    ) -> Sequence[Sequence[float]]:
        """What a copy of each length is expected to add."""
        return [row.gains(self.num_speculative_tokens) for row in memory.rows]

    def propose(
        self, memory: RowMemories[SuffixRow] | NoMemory, context: Context, shape: DraftShape
    ) -> Draft:
        """The chain behind each row's longest match; rows without one propose nothing."""
        count = shape.max_depth
        if isinstance(memory, NoMemory):
            corpus = prompt_lookup.text(context)
            start_B1 = prompt_lookup.latest(corpus, context, LONGEST, 1)
            return prompt_lookup.copied(corpus, start_B1, context, count)
        texts = [row.text for row in memory.rows]
        return deterministic_tree.chains(
            [[text.tokens[-1], *takewhile(_is_token, text.ahead(count))] for text in texts],
            self.kind,
        )

    def commit(
        self,
        memory: RowMemories[SuffixRow] | NoMemory,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        scores: Scores,
    ) -> None:
        if isinstance(memory, NoMemory):
            return
        for row, tokens in zip(
            memory.rows, deterministic_tree.committed(draft, verdict), strict=True
        ):
            row.read(tokens)


def _is_token(token: int) -> bool:
    """Rather than what stands between two texts."""
    return token >= 0


def remembering(earlier: int) -> RequestHistory | None:
    """Where earlier texts are kept, if any are."""
    most = arguments.whole("earlier", earlier, "leave it out to keep no earlier texts", least=0)
    return RequestHistory(most) if most else None


def automata(context: Context, earlier: RequestHistory | None) -> list[Automaton]:
    """An automaton of each row's text, behind the earlier ones."""
    texts = []
    for row, length in zip(context.tokens_BL, context.length_B.tolist(), strict=True):
        text = Automaton() if earlier is None else earlier.begun()
        for token in row[:length].tolist():
            text.push(token)
        texts.append(text)
    return texts


def watching(earlier: RequestHistory | None, texts: Sequence[Automaton]) -> list[Watched | None]:
    """What will be learnt of each of these texts."""
    return [None if earlier is None else earlier.watch(text) for text in texts]


RECIPE = recipes.Recipe(
    Suffix,
    takes=("num_speculative_tokens", "earlier"),
    depth=Suffix.num_speculative_tokens,
    deepest=16,
)
