"""A batch of rows under way, and how rows come into it: read in groups of like length, by chunks.

Rows are values: `take` copies some, `put` writes them into rows of another batch, `narrow` drops
the last ones. Row 2 leaves a batch of 8:

    batch = batch.put([2], batch.take([7])).narrow(7)

What is large (caches, tokens) is written in place, each row's used slots alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from outrider.engine.request import Request, assign_adapters, source_ids
from outrider.models.cache import SlotCache
from outrider.models.decoder import media_of
from outrider.models.prefill import CHUNK, behind, causal, inference, ingest, width
from outrider.models.prefix_cache import LINE, PrefixCache
from outrider.models.recurrent.call import has_states
from outrider.row_params import Shaping, copy_rows, first_rows, gather_rows, scatter_rows
from outrider.sampling import logits_processors, sampling_params
from outrider.types import Context, Drafter, Inputs, LanguageModel, Nodes, RowStore

_PADDING = 0.125  #: of what a group's rows are read for, at most so much may be padding,
STOPS = 4  #: a row has room for a multiple of so many stop tokens
_FREE = 64  #: or so many tokens: about what another call costs


class Batch(NamedTuple):
    """What the next step needs, one row for each text under way. A `RowStore`."""

    context: Context
    cache: Any  #: the target's
    memory: RowStore  #: the drafter's
    limit_B: Tensor  #: committed length at which a row ends
    limit_reason_B: Tensor
    stop_BS: Tensor  #: stop token ids, -1 padded
    reason_B: Tensor  #: RUNNING, or why the row has ended
    tokens_SL: Tensor  #: tokens of all rows; the first rows of it are `context.tokens_BL`
    ended: bool = False  #: host constant: whether a row may have ended

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.context.length_B.shape[0]

    @inference
    def take(self, rows: Sequence[int], cache: Any = None) -> "Batch":
        """Copies of these rows, in this order; with this cache, where one is given, in place of a
        copy of theirs.
        """
        context = self.context
        tokens = copy_rows(context.tokens_BL, rows)
        return Batch(
            context._replace(
                known=None,  # which names rows by their places
                tokens_BL=tokens,
                length_B=copy_rows(context.length_B, rows),
                sampling=context.sampling.take(rows),
                inputs=gather_rows(context.inputs, rows),
                reference_BS=gather_rows(context.reference_BS, rows),
            ),
            self.cache.take(rows) if cache is None else cache,
            self.memory.take(rows),
            copy_rows(self.limit_B, rows),
            copy_rows(self.limit_reason_B, rows),
            copy_rows(self.stop_BS, rows),
            copy_rows(self.reason_B, rows),
            tokens,
            self.ended,
        )

    @inference
    def put(self, into: Sequence[int], other: "Batch") -> "Batch":
        """The rows of `other` at these rows; numbers behind the last row add rows.

        Both have rows of one capacity, which have read as much of their prompts (`prompt_rest`) if
        `self` has any. Use the result, neither `self` nor `other`.
        """
        mine, theirs, slab = self.context, other.context, self.tokens_SL
        rows = max(self.rows, 1 + max(into, default=-1))
        if rows > slab.shape[0]:
            slab = pad(slab, (0, 0, 0, max(rows, 2 * slab.shape[0]) - slab.shape[0]))
        for row, at in enumerate(into):
            slab[at, : theirs.bound] = theirs.tokens_BL[row, : theirs.bound]
        inputs = theirs.inputs
        if mine.inputs is not None and theirs.inputs is not None and self.rows:
            inputs = mine.inputs.put(into, theirs.inputs)
        context = Context(
            slab[:rows],
            scatter_rows(mine.length_B, into, theirs.length_B),
            max(mine.bound, theirs.bound),
            mine.sampling.put(into, theirs.sampling),
            inputs,
            _references(mine, into, theirs),
            unread=max(mine.unread if self.rows else 0, theirs.unread),
            known=None if self.rows else theirs.known,
            prompt_rest=theirs.prompt_rest,
        )
        whole = Batch(
            context,
            self.cache,
            self.memory.put(into, other.memory),
            scatter_rows(self.limit_B, into, other.limit_B),
            scatter_rows(self.limit_reason_B, into, other.limit_reason_B),
            scatter_rows(self.stop_BS, into, other.stop_BS, -1),
            scatter_rows(self.reason_B, into, other.reason_B),
            slab,
            self.ended or other.ended,
        )
        if type(other.cache) is SlotCache:  # last of all: what fails on the way is tried again
            other.cache.leaving = True
        return whole._replace(cache=self.cache.put(into, other.cache))

    @inference
    def narrow(self, rows: int) -> "Batch":
        """The first rows; those behind them are free for `put`."""
        context = self.context
        return Batch(
            context._replace(
                known=None,
                tokens_BL=self.tokens_SL[:rows],
                length_B=context.length_B[:rows],
                sampling=context.sampling.narrow(rows),
                inputs=first_rows(context.inputs, rows),
                reference_BS=first_rows(context.reference_BS, rows),
            ),
            self.cache.narrow(rows),
            self.memory.narrow(rows),
            self.limit_B[:rows],
            self.limit_reason_B[:rows],
            self.stop_BS[:rows],
            self.reason_B[:rows],
            self.tokens_SL,
            self.ended,
        )


class Prefill:
    """Rows on their way into a batch of their own: their prompts are read, a part at a time.

    Rows are padded to the longest of them: see `groups`. The drafter reads in one go at the end;
    `later`: a draft model reads when it is asked for its first draft. `at_once`: the first step
    reads the last chunk, which saves a call for the pending tokens alone.
    With `prefixes` the beginning that each has in common with a prompt read before is copied;
    prompts that are `waiting` may go on from what these have read.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        requests: Sequence[Request],
        capacity: int,
        prefixes: PrefixCache | None = None,
        later: bool = False,
        waiting: Sequence[Sequence[int]] = (),
        at_once: bool = False,
    ) -> None:
        self.target, self.drafter, self.requests = target, drafter, requests
        self.capacity = capacity
        device = torch.device(target.device)
        tokens_BL = torch.zeros(len(requests), capacity, dtype=torch.int64, device="cpu")
        settings, lengths, sources, copied, shapes, watched = [], [], [], [], False, False
        for row, request in enumerate(requests):
            size = len(request.prompt)
            tokens_BL[row, :size] = torch.tensor(request.prompt, device="cpu")
            settings.append(request.sampling)
            lengths.append(size)
            copied.append(request.reference)
            shapes = shapes or request.sampling.shapes
            watched = watched or request.watched is not None
            if request.source is not None:
                sources.append(request.source)
        self._need = max(lengths) - 1
        self._unread = self._need if later else 0
        rows = sampling_params.rows(settings, device)
        if shapes:
            rows = rows._replace(shaping=_shaping(target, requests))
        length_B = torch.tensor(lengths, device=device)
        inputs = encoded(target, sources) if sources else None
        reference_BS = None
        if inputs is not None or any(copied):
            reference_BS = references(copied, inputs, target.vocab_size, device)
        self.context = Context(
            tokens_BL.to(device), length_B, self._need + 1, rows, inputs, reference_BS
        )
        self.cache = target.open(len(requests), capacity, inputs)
        assign_adapters(self.cache, requests)
        self._media = requests[0].media  # rows with images are read one by one
        self._reader = None if self._media is None else media_of(target)
        least = 0 if self._media is None else self._media.end(requests[0].asked)
        self._known = None
        if prefixes is not None:
            keys = [request.key for request in requests]
            self._known = prefixes.of(keys, waiting, least)
        #: tokens of every prompt that were read before and are copied
        self.copied = 0 if self._known is None else self._known.begin(target, self.cache)
        #: how many tokens of each prompt are in the cache, padded to the longest
        self.read = self.copied
        #: how many of each prompt the first step reads
        self._rest = 0
        slots = type(self.cache) is SlotCache and self.cache.recurrent is None
        if at_once and slots and not (watched or drafter.aux_layers or self._media):
            left = self._need - self.copied
            self._rest = min((left - 1) % CHUNK + 1, left, min(lengths) - 1)
        self._hidden: list[tuple[Tensor, ...]] = []
        #: logits behind each row's watched place, or last token, once all is read; if any watches
        self.watched_BV: Tensor | None = None

    @inference
    def step(self, tokens: int | None = None) -> Batch | None:
        """Read about so many more tokens of the rows together, or all of them.

        The batch once they are read: caches are full but for each row's pending token, and with
        `at_once` for what the first step reads.
        """
        context, rows = self.context, len(self.requests)
        if self._media is not None and not self.read:
            assert self._reader is not None
            read, states = self._reader.read_media(
                self.cache,
                self.requests[0].asked,
                self._media,
                self.drafter.aux_layers,
                None if self._known is None else self._known.prefixes.encoded,
            )
            self.read = min(read, self._need)
            self._hidden += [tuple(state[:, : self.read] for state in states)] if states else []
        stop = self._need - self._rest
        if tokens is not None:
            part = self.read + max(tokens // rows, 1)
            if has_states(self.target):  # their pieces end on lines, wherever a prompt is cut
                part = -(-part // LINE) * LINE
            stop = min(stop, part)
        if stop > self.read:
            self._hidden += ingest(
                self.target,
                self.cache,
                context.tokens_BL,
                stop,
                settled_B=context.length_B - 1,
                start=self.read,
                aux_layers=self.drafter.aux_layers,
                known=self._known,
            )
        self.read = stop
        if stop < self._need - self._rest:
            return None
        sizes, watched, limits, reasons, stops = [], [], [], [], []
        for request in self.requests:
            sizes.append(len(request.prompt))
            watched.append(request.watched)
            limit, reason = request.end(self.target.context)
            limits.append(limit)
            reasons.append(reason)
            stops.append(torch.tensor(request.limits.stop_ids, dtype=torch.int64, device="cpu"))
        if watched.count(None) < rows:
            self.watched_BV = behind(
                self.target, self.cache, self.context.tokens_BL, sizes, watched
            )
        if self._known is not None and not self._rest:
            self._known.keep(self.target, self.cache)
        hidden: tuple[Tensor, ...] = ()
        if self._hidden:
            hidden = tuple(torch.cat(chunks, 1) for chunks in zip(*self._hidden, strict=True))
        known = self._known if self._rest else None
        context = context._replace(unread=self._unread, prompt_rest=self._rest, known=known)
        opening = context._replace(hidden=hidden, known=self._known)
        memory = self.drafter.open(opening, self.capacity)
        device = context.length_B.device
        stop_BS = pad_sequence(stops, batch_first=True, padding_value=-1)
        # of few widths, as steps are captured for each
        more = STOPS if not stop_BS.shape[1] else -stop_BS.shape[1] % STOPS
        stop_BS = pad(stop_BS, (0, more), value=-1)
        return Batch(
            context,
            self.cache,
            memory,
            torch.tensor(limits, device=device),
            torch.tensor(reasons, device=device),
            stop_BS.to(device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            context.tokens_BL,
        )


@inference
def read_rest(target: LanguageModel, batch: Batch) -> Batch:
    """The batch once its prompts are read, for a step that drafts and rows that join."""
    context = batch.context
    if not context.prompt_rest:
        return batch
    wide = width(target, context.bound, 0, batch.cache.capacity)
    target.forward(batch.cache, rest_of_prompts(context, wide, 0), last=1)
    if context.known is not None:
        context.known.keep(target, batch.cache)
    return batch._replace(context=context._replace(known=None, prompt_rest=0))


def rest_of_prompts(context: Context, wide: int, pending: int = 1) -> Nodes:
    """What the target has not read of each row, with the pending token or (0) without."""
    pending_B, rest = context.length_B - 1, context.prompt_rest
    at_BQ = (pending_B - rest)[:, None] + torch.arange(rest + pending, device=pending_B.device)
    return causal(context.tokens_BL.gather(1, at_BQ), at_BQ, wide, pending_B)


def begin(
    target: LanguageModel, drafter: Drafter, requests: Sequence[Request], capacity: int
) -> Batch:
    """A batch of these requests, in their order, with rows of `capacity` slots.

    Caches are full but for each row's pending token. All rows are read to the longest.
    """
    alone = any(request.media is not None for request in requests)
    parts = [[request] for request in requests] if alone else [requests]
    batches = [Prefill(target, drafter, part, capacity).step() for part in parts]
    batch = batches[0]
    assert batch is not None
    for row, other in enumerate(batches[1:], start=1):
        assert other is not None
        batch = batch.put([row], other)
    return batch


def slab(target: LanguageModel, drafter: Drafter, max_num_seqs: int, capacity: int) -> Batch:
    """A batch of no rows, with room for so many."""
    # none of torch's own draws goes to it
    nobody = Request((0,), sampling_params.SamplingParams(seed=0))
    return begin(target, drafter, [nobody] * max_num_seqs, capacity).narrow(0)


def groups(lengths: Sequence[int]) -> list[list[int]]:
    """Rows that are read together, the longest first: little of what is read is padding.

    >>> groups([10, 400, 12, 11])
    [[1], [2, 3, 0]]
    """
    together: list[list[int]] = []
    padding = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if together:
            rows = together[-1]
            longest = lengths[rows[0]]
            padding += longest - lengths[row]
            if padding <= max(_FREE, _PADDING * longest * (len(rows) + 1)):
                rows.append(row)
                continue
        together.append([row])
        padding = 0
    return together


def _shaping(target: LanguageModel, requests: Sequence[Request]) -> Shaping | None:
    """What shapes the rows' logits."""
    return logits_processors.build(
        [request.sampling for request in requests],
        [request.asked for request in requests],
        [request.limits.stop_ids for request in requests],
        target.vocab_size,
        torch.device(target.device),
        ends=[request.end(target.context)[0] for request in requests],
        sources=[source_ids(request.source) for request in requests],
    )


@inference
def encoded(target: LanguageModel, each: Sequence[Inputs]) -> Inputs | None:
    """The inputs of several rows as one, padded to the longest and read by the target's encoder.

    Rows whose states are there already are not read again, and those that read the same object are
    read once.
    """
    if not each:
        return None
    first = {id(inputs): inputs for inputs in each}
    places = {number: place for place, number in enumerate(first)}
    unique = list(first.values())
    if len({inputs.encoded is None for inputs in unique}) > 1:
        unique = [target.encode(inputs) for inputs in unique]
    merged = unique[0]
    for row, inputs in enumerate(unique[1:], start=1):
        merged = merged.put([row], inputs)
    merged = target.encode(merged)
    if len(unique) == len(each):
        return merged
    return merged.take([places[id(inputs)] for inputs in each])


def references(
    given: Sequence[Sequence[int]], inputs: Inputs | None, vocab: int, device: torch.device
) -> Tensor | None:
    """Tokens to copy from [B, S], -1 padded: a row's own reference, or else its source's ids.

    Sources may be read in a larger vocabulary than `vocab`: what is beyond cannot be copied.
    """
    source_BS = None
    if inputs is not None and inputs.ids_BS is not None:
        known = inputs.mask_BS & (inputs.ids_BS < vocab)
        source_BS = inputs.ids_BS.masked_fill(~known, -1)
    if not any(given):
        return source_BS
    longest = max(map(len, given))
    own_BS = torch.tensor([[*ids, *[-1] * (longest - len(ids))] for ids in given], device=device)
    if source_BS is None:
        return own_BS
    without = [row for row, ids in enumerate(given) if not ids]
    return scatter_rows(own_BS, without, copy_rows(source_BS, without), -1)


def _references(mine: Context, into: Sequence[int], theirs: Context) -> Tensor | None:
    """Both contexts' references; rows without one have -1 alone."""
    if mine.reference_BS is None and theirs.reference_BS is None:
        return None
    sides = [
        context.length_B.new_full((context.length_B.shape[0], 1), -1)
        if context.reference_BS is None
        else context.reference_BS
        for context in (mine, theirs)
    ]
    return scatter_rows(sides[0], into, sides[1], -1)
