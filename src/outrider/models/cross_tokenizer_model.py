"""A draft model with another tokenizer than the target's, over the target's token ids.

Its law is the draft's over the tokens that both vocabularies have, renormalised (token-level
intersection, Timor et al. 2025): what is drawn from it carries it, so every rule stays exact. What
it reads is the committed text as its own tokenizer cuts it.

Texts are read on the host: on a card every call waits for the device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.errors import ConfigurationError, UnsupportedModel, VocabularyMismatch
from outrider.models.config import read
from outrider.models.model_wrapper import ModelWrapper
from outrider.models.prefill import CHUNK, causal, width
from outrider.models.token_remap import RetokenizedText, VocabularyMap, common_prefix_length
from outrider.tree import numbers
from outrider.types import Cache, Inputs, LanguageModel, Nodes, Output

#: Most tokens of a row that one call reads with the logits behind each of them.
_FEW = 8
#: Most tokens of the draft that one of the target is expected to take; longer texts are cut.
_EACH = 8


class _TranslatedRow:
    """One row: its text in both vocabularies, and what the draft model has read of it."""

    def __init__(self, retold: RetokenizedText) -> None:
        self.retold = retold
        self.text: list[int] = []  #: in the target's tokens, by slot
        self.read: list[int] = []  #: in the draft's: entries of its cache
        self.nodes: dict[int, int] = {}  #: tokens of a tree below the text, by slot

    def copy(self) -> "_TranslatedRow":
        """The same row again."""
        twin = _TranslatedRow(self.retold.copy())
        twin.text, twin.read, twin.nodes = [*self.text], [*self.read], dict(self.nodes)
        return twin

    def write(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Put tokens at these slots: the text goes on from there."""
        for slot, token in zip(slots, tokens, strict=True):
            assert slot <= len(self.text), f"token {slot} of a text of {len(self.text)}"
            self.text[slot:] = [token]
        self.retold.follow(self.text, min(slots))

    def rewrite(self, text: Sequence[int]) -> None:
        """Put a whole text in place of what stands there."""
        same = common_prefix_length(self.text, text)
        self.text = [*text]
        self.retold.follow(self.text, same)


class TranslatedCache:
    """A draft model's cache and the texts that its rows are about. A `RowStore`."""

    def __init__(self, own: Cache, rows: list[_TranslatedRow], capacity: int) -> None:
        self.own, self.rows, self.capacity = own, rows, capacity

    def take(self, rows: Sequence[int]) -> "TranslatedCache":
        texts = [self.rows[row].copy() for row in rows]
        return TranslatedCache(self.own.take(rows), texts, self.capacity)

    def put(self, into: Sequence[int], other: "TranslatedCache") -> "TranslatedCache":
        both = dict(enumerate(self.rows))
        both |= {at: row.copy() for at, row in zip(into, other.rows, strict=True)}
        own = self.own.put(into, other.own)
        capacity = max(self.capacity, other.capacity)
        return TranslatedCache(own, [both[row] for row in range(len(both))], capacity)

    def narrow(self, rows: int) -> "TranslatedCache":
        return TranslatedCache(self.own.narrow(rows), self.rows[:rows], self.capacity)


class TranslatedModel(ModelWrapper[LanguageModel]):
    """A `LanguageModel` over the target's `vocab_size` ids, behind which another vocabulary lies.

    A call whose nodes stand one behind another is text: the draft reads it as its own tokenizer
    cuts it. The nodes of a tree that branches follow the text one to one, in the draft's tokens of
    the same bytes.

    Raises VocabularyMismatch if no token is shared, UnsupportedModel for layers with states.
    """

    def __init__(self, model: LanguageModel, translation: VocabularyMap, vocab_size: int) -> None:
        target, draft = translation.target, translation.draft
        if read(model, "recurrent", bool):
            raise UnsupportedModel(
                "a draft model with another tokenizer reads parts of its text again, which a "
                f"state cannot; got {draft.name}, whose layers keep states; use a draft model "
                "whose layers are all attention, or drafter='recall'"
            )
        super().__init__(model)
        self.translation, self.vocab_size = translation, vocab_size
        self.context = 1 << 30  # of a text that is too long for the draft it reads the last part
        shared = [(t, d) for t, d in translation.shared if t < vocab_size and d < model.vocab_size]
        if not translation.common or not shared:
            raise VocabularyMismatch(
                f"target and draft model share no token: {target.name} has {len(target.ids)}, "
                f"{draft.name} {len(draft.ids)}; use another draft model, or a drafter without one"
            )
        ids_2K = torch.tensor(shared, device=model.device).T
        self._target_K, self._draft_K = ids_2K
        self._draft_V = torch.zeros(vocab_size, dtype=torch.int64, device=model.device)
        self._draft_V[self._target_K] = self._draft_K

    @property
    def capturable(self) -> bool:
        """No: texts are told in the draft's tokens on the host."""
        return False

    def encode(self, inputs: Inputs) -> Inputs:
        """The inputs with `encoded`; a source's ids are told in the draft's tokens first."""
        return self.model.encode(inputs if inputs.encoded is not None else self._source(inputs))

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> TranslatedCache:
        """An empty cache; `capacity` counts the target's tokens."""
        read = None if inputs is None else self.encode(inputs)
        limit = min(self.model.context, _EACH * capacity)
        room = self.width(2 * limit + capacity + _FEW)  # rows are read side by side
        texts = [_TranslatedRow(RetokenizedText(self.translation, limit)) for _ in range(rows)]
        return TranslatedCache(self.model.open(rows, room, read), texts, capacity)

    def forward(
        self,
        cache: TranslatedCache,
        nodes: Nodes,
        *,
        last: int | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Output:
        """Logits [B, Q, V] of (the last `last` of) Q nodes, -inf for tokens the draft has not."""
        if aux_layers:
            raise ConfigurationError(
                "a draft model with another tokenizer tells no states, as its tokens are others; "
                f"got aux_layers={aux_layers}; leave them out"
            )
        slots, tokens = nodes.slots_BQ.tolist(), nodes.tokens_BQ.tolist()
        queries = len(slots[0])
        wanted = queries if last is None else min(last, queries)
        if torch.equal(nodes.slots_BQ, nodes.positions_BQ):
            logits = self._text(cache, slots, tokens, wanted)
        else:
            logits = self._tree(cache, nodes, slots, tokens)[:, queries - wanted :]
        all_V = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        return Output(all_V.index_copy_(-1, self._target_K, logits[..., self._draft_K]))

    def keep(self, cache: TranslatedCache, first_B: Tensor, path_BD: Tensor) -> None:
        """The accepted paths' tokens become text, which is read with what follows them."""
        for row, first, path in zip(cache.rows, first_B.tolist(), path_BD.tolist(), strict=True):
            chained = dict(enumerate(row.text[first + 1 :], start=first + 1))
            there, row.nodes = chained | row.nodes, {}
            del row.text[first + 1 :]
            for node in path:
                if first + node not in there:  # behind the path, or a leaf that was never read
                    break
                row.text.append(there[first + node])
            row.retold.follow(row.text, first)

    def listen(self, cache: TranslatedCache, texts: Sequence[Sequence[int]]) -> None:
        """Read these texts, in the target's tokens."""
        for row, text in zip(cache.rows, texts, strict=True):
            row.rewrite(text)
        if any(texts):
            self._ahead(cache, [row.retold.ids for row in cache.rows])

    def continued(
        self, cache: TranslatedCache, texts: Sequence[Sequence[int]], count: int
    ) -> list[list[int]]:
        """What the draft says after each text, at most `count` tokens of the target's.

        Its most probable tokens one after another, until they spell about so many of the target's.
        """
        rows, ends = cache.rows, self.translation.draft.special
        for row, text in zip(rows, texts, strict=True):
            row.rewrite(text)
        most = [max(1, math.ceil(count * row.retold.ratio)) for row in rows]
        said: list[list[int]] = [[] for _ in rows]
        for _ in range(max(most)):
            known = [row.retold.ids + more for row, more in zip(rows, said, strict=True)]
            best: list[int] = self._ahead(cache, known).argmax(-1).tolist()
            for more, token, enough in zip(said, best, most, strict=True):
                if len(more) < enough and (not more or more[-1] not in ends):
                    more.append(token)
        return [self.translation.back(more)[:count] for more in said]

    def _source(self, inputs: Inputs) -> Inputs:
        """The same source in the draft's tokens."""
        if inputs.ids_BS is None:
            return inputs
        told = []
        for ids, there in zip(inputs.ids_BS.tolist(), inputs.mask_BS.tolist(), strict=True):
            source = RetokenizedText(self.translation, self.model.context)
            source.follow([token for token, here in zip(ids, there, strict=True) if here], 0)
            told.append(torch.tensor(source.ids or [0], device=self.model.device))
        ones = [torch.ones_like(ids, dtype=torch.bool) for ids in told]
        ids_BS, mask_BS = (pad_sequence(each, batch_first=True) for each in (told, ones))
        return inputs._replace(ids_BS=ids_BS, mask_BS=mask_BS)

    def _text(
        self, cache: TranslatedCache, slots: list[list[int]], tokens: list[list[int]], wanted: int
    ) -> Tensor:
        """The draft's logits behind the last nodes of texts, [B, wanted, its vocabulary]."""
        found, start = [], 0
        for stop in range(len(slots[0]) - wanted + 1, len(slots[0]) + 1):
            for row, places, ids in zip(cache.rows, slots, tokens, strict=True):
                row.write(places[start:stop], ids[start:stop])
            found.append(self._ahead(cache, [row.retold.ids for row in cache.rows]))
            start = stop
        return torch.stack(found, 1)

    def _ahead(self, cache: TranslatedCache, texts: Sequence[list[int]]) -> Tensor:
        """Read what is new of these texts, in the draft's tokens; logits behind them [B, V']."""
        device = torch.device(self.model.device)
        texts = [text or [0] for text in texts]  # nothing of it can be told
        ends = [len(text) for text in texts]
        known = [
            min(common_prefix_length(row.read, text), end - 1)
            for row, text, end in zip(cache.rows, texts, ends, strict=True)
        ]
        most = max(end - first for end, first in zip(ends, known, strict=True))
        if most > _FEW:
            for start in range(0, most - 1, CHUNK):
                stop = min(start + CHUNK, most - 1)
                self._feed(cache, texts, [first + start for first in known], stop - start, 1)
            known, most = [end - 1 for end in ends], 1
        logits = self._feed(cache, texts, known, most, None)
        for row, text in zip(cache.rows, texts, strict=True):
            row.read = [*text]
        at = [end - 1 - first for end, first in zip(ends, known, strict=True)]
        return logits[torch.arange(len(at), device=device), torch.tensor(at, device=device)]

    def _feed(
        self,
        cache: TranslatedCache,
        texts: Sequence[list[int]],
        first: Sequence[int],
        count: int,
        last: int | None,
    ) -> Tensor:
        """One call: `count` tokens of every text from place `first` on; what is behind it is 0."""
        device = torch.device(self.model.device)
        some = [
            (text[start : start + count] + [0] * count)[:count]
            for text, start in zip(texts, first, strict=True)
        ]
        at_BQ = torch.tensor(first, device=device)[:, None] + numbers(count, device)
        wide = width(self.model, max(first) + count, 0, cache.own.capacity)
        nodes = causal(torch.tensor(some, device=device), at_BQ, wide)
        return self.model.forward(cache.own, nodes, last=last).logits_BQV

    def _tree(
        self, cache: TranslatedCache, nodes: Nodes, slots: list[list[int]], tokens: list[list[int]]
    ) -> Tensor:
        """The draft's logits [B, Q, V'] at the nodes of a tree below the texts."""
        device = torch.device(self.model.device)
        for row, places, ids in zip(cache.rows, slots, tokens, strict=True):
            row.nodes |= dict(zip(places, ids, strict=True))
        ends, texts = [len(row.read) for row in cache.rows], [len(row.text) for row in cache.rows]
        shift = [end - length for end, length in zip(ends, texts, strict=True)]
        end_B1, shift_B1 = (torch.tensor(each, device=device)[:, None] for each in (ends, shift))
        seen_BQW, old = nodes.visible_BQW, nodes.visible_BQW.shape[-1]
        place = numbers(width(self.model, old + max(*shift, 0), 0, cache.own.capacity), device)
        at_BW = place - shift_B1  # the target's slot of each of the draft's
        inside = (at_BW >= 0) & (at_BW < old)
        at_BW = at_BW.clamp(0, old - 1)[:, None].expand(-1, seen_BQW.shape[1], -1)
        seen_BQW = seen_BQW.gather(2, at_BW) & inside[:, None] | (place < end_B1)[:, None]
        own = Nodes(
            self._draft_V[nodes.tokens_BQ],
            nodes.positions_BQ + shift_B1,
            nodes.slots_BQ + shift_B1,
            seen_BQW,
            nodes.settled_B + shift_B1[:, 0],
        )
        return self.model.forward(cache.own, own).logits_BQV
