"""What models have read of prompts, kept for others that begin alike: copied, not computed again.

An entry of the cache depends on the tokens up to its own and on the row's adapter alone, so a
prompt that begins as another one did needs no more than a copy of that beginning. Placeholders of
images and sounds are told apart by contents (`MultiModalInputs.key`). Kept are entries
that were written while a prompt was read, the last by its first step, all of which round alike
(`models.batch_invariance`); what answers and drafts have written is not: in half precision a node
of a tree may round otherwise.

Keys and values may be cut anywhere, a state cannot: a prompt of a model with states goes on from a
checkpoint, a copy of the states behind a multiple of `LINE` tokens. One is kept at the last such
line of a prompt that was read, and where others that are known then go on otherwise.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from outrider.models.cache import SlotCache
from outrider.models.encoder_cache import EncoderCache
from outrider.models.recurrent.call import PIECE, has_states
from outrider.models.recurrent.states import RecurrentStates
from outrider.types import Cache, LanguageModel

LEAST = 16  #: tokens in common from which on a part of a prompt is copied; a whole one always is
WORTH = 64  #: tokens that a prompt waits for, so that another one that begins alike is read first
LINE = PIECE  #: tokens between places at which states may be kept
ENCODED = 4  #: one byte for so many of prompts is kept of images, besides
CHECKPOINTS = 4  #: of a prompt, at most: those of the last use

#: A model, an adapter of it, and tokens.
_Name: TypeAlias = tuple[LanguageModel, str | None, tuple[int, ...]]


class KeptPrompt(NamedTuple):
    """What is kept of a prompt: its keys and values as one row, and states behind some of it."""

    cache: SlotCache
    checkpoints: dict[int, RecurrentStates] | None  #: by tokens; None: its model has no states

    @property
    def bytes(self) -> int:
        """What it takes."""
        stacks = sum(stack.numel() * stack.element_size() for stack in self.cache.stacks)
        return stacks + sum(states.bytes for states in (self.checkpoints or {}).values())

    def usable(self, common: int) -> int:
        """How much of so many tokens in common another prompt can take."""
        if self.checkpoints is None:
            return common
        return max((line for line in self.checkpoints if line <= common), default=0)

    def cut(self, count: int) -> SlotCache:
        """Its cache, with the states behind so many tokens, which count as used."""
        if self.checkpoints is not None:
            states = self.checkpoints.pop(count)
            self.checkpoints[count] = self.cache.recurrent = states
        return self.cache

    def add(self, checkpoints: dict[int, RecurrentStates]) -> None:
        """Keep these, too, and the last ones of all."""
        assert self.checkpoints is not None
        self.checkpoints.update(checkpoints)
        for line in [*self.checkpoints][:-CHECKPOINTS]:
            del self.checkpoints[line]


class PrefixCache:
    """Prompts' entries of some models, those of the last use, in at most `most_bytes`.

    One belongs to one thread. Models are those whose caches are slots, and that read text alone.

    >>> kept = PrefixCache(1 << 20)
    >>> kept.bytes, kept.common((1, 2, 3), (1, 2, 4))
    (0, 2)
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.encoded = EncoderCache(most_bytes // ENCODED)  #: images and sound of any prompt
        self._kept: OrderedDict[_Name, KeptPrompt] = OrderedDict()

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
        states = has_states(model)
        for at, prompt in enumerate(prompts):
            need = len(prompt) - 1
            if self.known(model, prompt, names[at]) != first:
                continue
            if first < need:  # something is left to be read
                alike = [prompts[other] for other in some if names[other] == names[at]]
                shared = max((self.common(prompt[:-1], one) for one in alike), default=0)
                shared -= shared % LINE if states else 0
                if shared == need or shared - first >= WORTH:
                    continue
            some.append(at)
        return some

    def of(
        self,
        prompts: Sequence[Sequence[int]],
        waiting: Sequence[Sequence[int]] = (),
        least: int = 0,
    ) -> "PrefixHits":
        """These prompts as rows of a cache, in their order; others wait to be read behind them.

        `least` is that of `PrefixHits`.
        """
        rows, others = (tuple(map(tuple, some)) for some in (prompts, waiting))
        return PrefixHits(self, rows, others, {}, least)

    def keep(
        self,
        model: LanguageModel,
        read: tuple[int, ...],
        cache: SlotCache,
        row: int,
        checkpoints: dict[int, RecurrentStates] | None = None,
    ) -> None:
        """Keep a row that begins with these tokens, in place of others that it goes on from.

        `checkpoints` are its states behind some of them, if the model has states.
        """
        adapter = _adapter(cache, row)
        alike = [name for name in self._kept if name[0] is model and name[1] == adapter]
        whole = next((name for name in alike if name[2][: len(read)] == read), None)
        if not read or (cache.recurrent is not None and not checkpoints):
            return
        if whole is not None:
            if checkpoints:
                kept = self._kept[whole]
                self.bytes -= kept.bytes
                kept.add(checkpoints)
                self.bytes += kept.bytes
                self._shrink()
            return
        earlier = [self._drop(name) for name in alike if name[2] == read[: len(name[2])]]
        states, cache.recurrent = cache.recurrent, None  # checkpoints stand for them
        one = KeptPrompt(cache.take([row], len(read)), None if states is None else {})
        cache.recurrent = states
        if checkpoints:
            for other in earlier:
                one.add(other.checkpoints or {})
            one.add(checkpoints)
        self._kept[model, adapter, read] = one
        self.bytes += one.bytes
        self._shrink()

    def find(
        self, model: LanguageModel, prompt: Sequence[int], adapter: str | None = None
    ) -> SlotCache | None:
        """The cache of one row that has most of the prompt's beginning. It counts as used."""
        most, name = self._longest(model, prompt, adapter)
        if name is None:
            return None
        self._kept.move_to_end(name)
        return self._kept[name].cut(most)

    def lines(self, model: LanguageModel, prompt: Sequence[int], adapter: str | None) -> set[int]:
        """Behind how many of a prompt's tokens states are kept: 0 as well."""
        found = {0}
        for name, kept in self._kept.items():
            if name[0] is model and name[1] == adapter:
                common = self.common(prompt, name[2])
                found |= {line for line in kept.checkpoints or () if line <= common}
        return found

    def forks(self, model: LanguageModel, prompt: Sequence[int], adapter: str | None = None) -> int:
        """How many tokens it has in common with what is kept, up to a line, states or not."""
        alike = [name[2] for name in self._kept if name[0] is model and name[1] == adapter]
        return max((self.common(prompt, one) for one in alike), default=0) // LINE * LINE

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()
        self.encoded.clear()
        self.bytes = 0

    def _drop(self, name: _Name) -> KeptPrompt:
        kept = self._kept.pop(name)
        self.bytes -= kept.bytes
        return kept

    def _shrink(self) -> None:
        """Drop what was not used for longest until the rest fits."""
        while self.bytes > self.most_bytes:
            self._drop(next(iter(self._kept)))

    def _longest(
        self, model: LanguageModel, read: Sequence[int], adapter: str | None
    ) -> tuple[int, _Name | None]:
        """Of what is kept: most of these tokens, and where; 0 if it is not worth a copy."""
        most, best = 0, None
        for name, kept in self._kept.items():
            if name[0] is not model or name[1] != adapter:
                continue
            if (common := kept.usable(self.common(read, name[2]))) > most:
                most, best = common, name
        return (most, best) if most >= min(LEAST, len(read)) else (0, None)


class PrefixHits(NamedTuple):
    """Prompts being read side by side, and what is kept of others. A `RowHints`."""

    prefixes: PrefixCache
    prompts: tuple[tuple[int, ...], ...]
    waiting: tuple[tuple[int, ...], ...]  #: prompts that are read later, of which some begin alike
    checkpoints: dict[tuple[LanguageModel, int], dict[int, RecurrentStates]]  #: of each row
    #: so many tokens, up to the end of an image, are copied together or not at all; 0: none are
    least: int = 0

    def begin(self, model: LanguageModel, cache: Cache) -> int:
        """Copy the beginning that is kept of every prompt; how many tokens of each that are."""
        if not isinstance(cache, SlotCache):
            return 0
        each = self._rows(cache)
        if cache.recurrent is None:
            count = min(self.prefixes.known(model, prompt, name) for prompt, name in each)
        else:
            lines = [self.prefixes.lines(model, prompt[:-1], name) for prompt, name in each]
            count = max(set.intersection(*lines))
        if count < self.least:
            return 0
        for row, (prompt, name) in enumerate(each if count else ()):
            most = -1 if cache.recurrent is None else count
            source = self.prefixes.find(model, prompt[:most], name)
            assert source is not None
            cache.put([row], source, count)
        if count and not self.least and cache.inputs is not None:  # positions ahead of any image
            cache.inputs = model.open(cache.rows, 1).inputs
        return count

    def stops(self, model: LanguageModel, cache: Cache, start: int) -> dict[int, list[int]]:
        """Behind how many tokens reading has to stop for a checkpoint, and of which rows."""
        found: dict[int, list[int]] = {}
        if not isinstance(cache, SlotCache) or cache.recurrent is None:
            return found
        for row, (prompt, name) in enumerate(self._rows(cache)):
            common = [self.prefixes.common(prompt[:-1], other) for other in self.waiting]
            common.append(self.prefixes.forks(model, prompt[:-1], name))
            lines = {shared // LINE * LINE for shared in (len(prompt) - 1, *common)}
            for line in sorted(lines)[-CHECKPOINTS:]:
                if line > start:
                    found.setdefault(line, []).append(row)
        return found

    def mark(self, model: LanguageModel, cache: Cache, rows: Sequence[int], line: int) -> None:
        assert isinstance(cache, SlotCache)
        assert cache.recurrent is not None
        for row in rows:
            mine = self.checkpoints.setdefault((model, row), {})
            mine[line] = cache.recurrent.checkpoint(row)

    def keep(self, model: LanguageModel, cache: Cache) -> None:
        """Keep the entries of the prompts, which have been read but for their last tokens."""
        if isinstance(cache, SlotCache):
            for row, prompt in enumerate(self.prompts):
                states = self.checkpoints.pop((model, row), None)
                self.prefixes.keep(model, prompt[:-1], cache, row, states)

    def _rows(self, cache: SlotCache) -> list[tuple[tuple[int, ...], str | None]]:
        """Each row's prompt and adapter."""
        return [(prompt, _adapter(cache, row)) for row, prompt in enumerate(self.prompts)]


def _adapter(cache: SlotCache, row: int) -> str | None:
    """A row's."""
    return cache.adapters[row] if cache.adapters else None
