"""What models have read of prompts, kept for others that begin alike: copied, not computed again.

An entry of the cache depends on the tokens up to its own and on the row's adapter alone, so a
prompt that begins as another one did needs no more than a copy of that beginning. Placeholders of
images and sounds are told apart by contents (`MultiModalInputs.key`). Kept are entries
that were written while a prompt was read, all of which round alike (`models.batch_invariance`);
what answers and drafts have written is not: in half precision a node of a tree may round otherwise.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from outrider.models.cache import SlotCache
from outrider.types import LanguageModel

LEAST = 16  #: tokens in common from which on a part of a prompt is copied; a whole one always is
WORTH = 64  #: tokens that a prompt waits for, so that another one that begins alike is read first

#: A model, an adapter of it, and tokens.
_Name: TypeAlias = tuple[LanguageModel, str | None, tuple[int, ...]]


class PrefixCache:
    """Prompts' entries of some models, those of the last use, in at most `most_bytes`.

    One belongs to one thread. Models are those whose caches are slots, and that read text alone.

    >>> kept = PrefixCache(1 << 20)
    >>> kept.bytes, kept.common((1, 2, 3), (1, 2, 4))
    (0, 2)
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._kept: OrderedDict[_Name, SlotCache] = OrderedDict()

    def __len__(self) -> int:
        """How many prompts are kept, once for each model."""
        return len(self._kept)

    @staticmethod
    def common(one: Sequence[int], other: Sequence[int]) -> int:
        """How many tokens both begin with."""
        pairs = zip(one, other, strict=False)
        most = min(len(one), len(other))
        return next((at for at, (a, b) in enumerate(pairs) if a != b), most)

    def known(self, model: LanguageModel, prompt: Sequence[int], adapter: str | None = None) -> int:
        """How many of the prompt's tokens, the last one left out, can be copied."""
        return self._longest(model, prompt[:-1], adapter)[0]

    def together(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[str | None] = (),
    ) -> list[int]:
        """Which of the prompts are read with the first: known as far as it is, and unlike it.

        Who begins as another one of them does is left for later, to copy from that one, if both
        have one adapter.

        >>> PrefixCache(0).together(None, [[1, 2, 3], [1, 2, 3], [4, 5]])
        [0, 2]
        """
        names = adapters or [None] * len(prompts)
        first = self.known(model, prompts[0], names[0])
        some: list[int] = []
        for at, prompt in enumerate(prompts):
            need = len(prompt) - 1
            if self.known(model, prompt, names[at]) != first:
                continue
            if first < need:  # something is left to be read
                alike = [prompts[other] for other in some if names[other] == names[at]]
                shared = max((self.common(prompt[:-1], one) for one in alike), default=0)
                if shared == need or shared - first >= WORTH:
                    continue
            some.append(at)
        return some

    def of(self, prompts: Sequence[Sequence[int]], least: int = 0) -> "PrefixHits":
        """These prompts as rows of a cache, in their order; `least`: that of `PrefixHits`."""
        return PrefixHits(self, tuple(tuple(prompt) for prompt in prompts), least)

    def keep(self, model: LanguageModel, read: tuple[int, ...], cache: SlotCache, row: int) -> None:
        """Keep a row that begins with these tokens, in place of others that it goes on from."""
        adapter = _adapter(cache, row)
        longest, _ = self._longest(model, read, adapter)
        if not read or longest == len(read):
            return
        for name in [*self._kept]:
            if name[0] is model and name[1] == adapter and name[2] == read[: len(name[2])]:
                self._drop(name)
        one = cache.take([row])
        self._kept[model, adapter, read] = one
        self.bytes += _bytes(one)
        while self.bytes > self.most_bytes:
            self._drop(next(iter(self._kept)))

    def find(
        self, model: LanguageModel, prompt: Sequence[int], adapter: str | None = None
    ) -> SlotCache | None:
        """The cache of one row that has most of the prompt's beginning. It counts as used."""
        _, name = self._longest(model, prompt, adapter)
        if name is None:
            return None
        self._kept.move_to_end(name)
        return self._kept[name]

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()
        self.bytes = 0

    def _drop(self, name: _Name) -> None:
        self.bytes -= _bytes(self._kept.pop(name))

    def _longest(
        self, model: LanguageModel, read: Sequence[int], adapter: str | None
    ) -> tuple[int, _Name | None]:
        """Of what is kept: most of these tokens, and where; 0 if it is not worth a copy."""
        most, best = 0, None
        for name in self._kept:
            if name[0] is not model or name[1] != adapter:
                continue
            if (common := self.common(read, name[2])) > most:
                most, best = common, name
        return (most, best) if most >= min(LEAST, len(read)) else (0, None)


class PrefixHits(NamedTuple):
    """Prompts being read side by side, and what is kept of others. A `RowHints`."""

    prefixes: PrefixCache
    prompts: tuple[tuple[int, ...], ...]
    #: so many tokens, up to the end of an image, are copied together or not at all; 0: none are
    least: int = 0

    def begin(self, model: LanguageModel, cache: Any) -> int:
        """Copy the beginning that is kept of every prompt; how many tokens of each that are."""
        if not isinstance(cache, SlotCache) or cache.recurrent is not None:
            return 0  # a state stands for the whole of its text: there is no beginning to copy
        names = [_adapter(cache, row) for row in range(len(self.prompts))]
        each = [*zip(self.prompts, names, strict=True)]
        count = min(self.prefixes.known(model, prompt, name) for prompt, name in each)
        if count < self.least:
            return 0
        for row, (prompt, name) in enumerate(each if count else ()):
            source = self.prefixes.find(model, prompt[:-1], name)
            assert source is not None
            cache.put([row], source, count)
        if count and not self.least and cache.inputs is not None:  # positions ahead of any image
            cache.inputs = model.open(cache.rows, 1).inputs
        return count

    def keep(self, model: LanguageModel, cache: Any) -> None:
        """Keep the entries of the prompts, which have been read but for their last tokens."""
        if isinstance(cache, SlotCache) and cache.recurrent is None:
            for row, prompt in enumerate(self.prompts):
                self.prefixes.keep(model, prompt[:-1], cache, row)


def _adapter(cache: SlotCache, row: int) -> str | None:
    """A row's."""
    return cache.adapters[row] if cache.adapters else None


def _bytes(cache: SlotCache) -> int:
    return sum(stack.numel() * stack.element_size() for stack in cache.stacks)
