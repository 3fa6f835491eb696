"""A text in the tokens of another vocabulary, told anew only where it changes.

    translation = VocabularyMap(TokenBytes(tokenizer), TokenBytes(other))
    retold = RetokenizedText(translation, limit=2048)
    retold.follow([5, 9, 2], since=0)       # the text in the first vocabulary; unchanged before
    retold.ids                              # the same text in the other one

The other tokenizer reads bytes, so it merges across the borders of the first one's tokens; what it
reads is begun anew at the last place where both agree on a border that no further text can move.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Self

from outrider.models.token_bytes import TokenBytes
from outrider.types import Tokenizer

_SPACE = b" \n\t\r"
_FAR = 64  #: tokens to look back for a good border before any common one will do


class VocabularyMap:
    """Two vocabularies: the target's and the draft's, and the tokens that they share.

    shared    (target id, draft id) of tokens that spell the same bytes, and of the ends of texts
    special   what the draft reads for special tokens of the target: those of the same name, else of
              the same role; others are left out
    """

    def __init__(self, target: TokenBytes, draft: TokenBytes) -> None:
        self.target, self.draft = target, draft
        both = [(n, draft.ids[text]) for text, n in target.ids.items() if text in draft.ids]
        self.common = len(both)  #: tokens that spell the same
        self.ends: dict[int, int] = {}  #: the target's end of a text by the draft's
        if "eos" in target.roles and "eos" in draft.roles:
            self.ends[draft.roles["eos"]] = target.roles["eos"]
        self.shared = tuple(sorted([*both, *((end, own) for own, end in self.ends.items())]))
        named = {content: number for number, content in draft.special.items()}
        self.special = {n: draft.roles[r] for r, n in target.roles.items() if r in draft.roles}
        self.special |= {n: named[name] for n, name in target.special.items() if name in named}

    @property
    def overlap(self) -> float:
        """The share of the target's vocabulary that the draft has, too."""
        return self.common / max(len(self.target.ids), 1)

    def __str__(self) -> str:
        return (
            f"{self.common:,} of the {len(self.target.ids):,} tokens of {self.target.name} are in "
            f"the {len(self.draft.ids):,} of {self.draft.name} ({self.overlap:.1%})"
        )

    def back(self, ids: list[int]) -> list[int]:
        """What follows a text, in the target's tokens: up to its end, if the draft says so."""
        spelled, end = ids, []
        for at, number in enumerate(ids):
            if number in self.draft.special:
                spelled, end = ids[:at], [self.ends[number]] if number in self.ends else []
                break
        return [*self.target.encode(self.draft.spelled(spelled)), *end]


def vocabulary_map(target: Tokenizer, draft: Tokenizer) -> VocabularyMap | None:
    """The translation from one vocabulary to another; None if they are equal."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return None
    return _between(target, draft, len(ours), len(theirs))  # type: ignore[arg-type]  # hashable


@lru_cache(maxsize=8)
def _between(target: Tokenizer, draft: Tokenizer, ours: int, theirs: int) -> VocabularyMap:
    """Made once, and again where a vocabulary has grown."""
    return VocabularyMap(TokenBytes(target), TokenBytes(draft))


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    least, most = 0, min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    while most - least > 1:  # the first `least` are equal, the first `most` are not
        middle = (least + most) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle
    return least


class _Piece(NamedTuple):
    """Tokens of the draft, and how many of them each of the target's tokens ends behind."""

    ids: tuple[int, ...]
    told: list[int]  #: -1 where a token of the draft goes across the border


class RetokenizedText:
    """One text, which grows and is cut back.

    limit   most tokens of the draft: a longer text is read from a later place on
    """

    def __init__(self, translation: VocabularyMap, limit: int) -> None:
        self.translation, self.limit = translation, limit
        self.ids: list[int] = []  #: in the draft's vocabulary
        self._text: list[int] = []  # in the target's, from `_skipped` on
        self._told: list[int] = []  # for each: how many of `ids` tell the text up to its end, or -1
        self._skipped = 0

    @property
    def ratio(self) -> float:
        """Tokens of the draft for one of the target's."""
        return len(self.ids) / max(len(self._text), 1)

    def copy(self) -> Self:
        """Another text that begins the same way."""
        twin = type(self)(self.translation, self.limit)
        twin.ids, twin._text, twin._told = [*self.ids], [*self._text], [*self._told]
        twin._skipped = self._skipped
        return twin

    def follow(self, text: list[int], since: int) -> None:
        """Read a text that is the same as before up to token `since`."""
        if since < self._skipped:
            self._skipped, since = 0, 0
            self._cut(0)
        text, same = text[self._skipped :], min(since - self._skipped, len(self._text))
        while same < min(len(text), len(self._text)) and text[same] == self._text[same]:
            same += 1
        if same == len(text) == len(self._text):
            return
        start = self._border(text, same)
        self._cut(start)
        self._read(text[start:])
        if len(self.ids) > self.limit:
            self._forget(text)

    def _border(self, text: list[int], last: int) -> int:
        """The last place, at most `last`, where reading can begin anew."""
        for place in range(last, 0, -1):
            if self._told[place - 1] >= 0 and (
                last - place > _FAR or self._is_firm(text[place - 1 : place + 1])
            ):
                return place
        return 0

    def _is_firm(self, tokens: list[int]) -> bool:
        """Whether no token can go across the border of two: a special one, or a word's end."""
        spelled = [self.translation.target.bytes_V[number] for number in tokens]
        if spelled[0] is None:
            return True
        if len(spelled) < 2 or not spelled[1]:
            return len(spelled) == 2
        return spelled[1][0] in _SPACE and spelled[0][-1] not in _SPACE

    def _cut(self, length: int) -> None:
        del self.ids[self._told[length - 1] if length else 0 :]
        del self._text[length:], self._told[length:]

    def _read(self, more: list[int]) -> None:
        spelling, start = self.translation.target.bytes_V, 0
        for at, number in enumerate([*more, None]):
            if number is None or spelling[number] is None:
                self._add(more[start:at])
                start = at + 1
                if number is not None:
                    self._special(number)

    def _add(self, tokens: list[int]) -> None:
        if tokens:
            opens = not self.ids
            if opens:
                self.ids += self.translation.draft.opening
            base = len(self.ids)
            piece = self._piece(tokens, opens)
            self.ids += piece.ids
            self._text += tokens
            self._told += [count if count < 0 else base + count for count in piece.told]

    def _special(self, number: int) -> None:
        own = self.translation.special.get(number)
        if self.ids or not self.translation.draft.opening:  # else its own opening comes
            self.ids += () if own is None else (own,)
        self._text.append(number)
        self._told.append(len(self.ids))

    def _piece(self, tokens: list[int], opens: bool) -> _Piece:
        target, draft = self.translation.target.bytes_V, self.translation.draft
        spelled = [target[number] or b"" for number in tokens]
        data = b"".join(spelled)
        ids = draft.encode(data, opens=opens)
        ends, at = {0: 0}, len(data) - len(draft.spelled(ids))  # a prefix space stands ahead
        for count, number in enumerate(ids, start=1):
            at += len(draft.bytes_V[number] or b"")
            ends[at] = count
        told, at = [], 0
        for one in spelled:
            at += len(one)
            told.append(ends.get(at, -1))
        told[-1] = len(ids)
        return _Piece(ids, told)

    def _forget(self, text: list[int]) -> None:
        """Read the last part alone, half as long as it may be."""
        excess = len(self.ids) - self.limit // 2
        start = next(at for at, told in enumerate(self._told, start=1) if told >= excess)
        start = min(start, len(text) - 1)
        self._skipped += start
        self._cut(0)
        self._read(text[start:])
