"""A decoder driven over trees: what is common to every way of running its layers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.models.batch_invariance import BatchInvariance
from outrider.models.cache import SlotCache
from outrider.models.config import found, read
from outrider.models.recurrent.states import RecurrentStates
from outrider.types import (
    Encoded,
    Inputs,
    MultiModalInputs,
    Nodes,
    Output,
    Reads,
    RowStore,
    TargetStates,
)
from outrider.types.models import ImageAhead

if TYPE_CHECKING:
    from outrider.models.encoder_cache import EncoderCache
    from outrider.models.lora import LoraBank


class EncoderAdapter(Protocol):
    """What a runner has that reads more than text: an encoder, or the target's encoder states."""

    @property
    def shares(self) -> bool:
        """Whether it has no encoder of its own and takes the target's states."""

    def examine(self, inputs: Inputs) -> None:
        """Refuse inputs that cannot be read: ConfigurationError."""

    def encode(self, inputs: Inputs) -> Encoded:
        """The encoder's states of these inputs."""

    def keep(self, encoded: Encoded) -> RowStore:
        """What is kept of the states, row by row; runners find it as `cache.inputs`."""

    def probe(self, rows: int) -> Inputs:
        """Some inputs for checks and measurements, the same at every call."""


@runtime_checkable
class MediaRunner(Protocol):
    """What a runner has besides whose model reads images or sound in its prompts."""

    placeholders: frozenset[int]  #: token ids that stand for images and sound
    closers: frozenset[int]  #: token ids that belong to an image they stand directly behind
    ahead: ImageAhead | None  #: what the model's processor leaves to be put ahead of a prompt
    known: set[frozenset[str]]  #: names of inputs that `load_checks.media` has been through

    def examine_media(self, prompt: Sequence[int], inputs: MultiModalInputs) -> None:
        """Refuse inputs that the model cannot read: ConfigurationError or PromptError."""

    def read_media(
        self,
        cache: SlotCache,
        prompt: Sequence[int],
        inputs: MultiModalInputs,
        aux_layers: tuple[int, ...] = (),
        known: "EncoderCache | None" = None,
    ) -> tuple[int, tuple[Tensor, ...]]:
        """Read a prompt up to its last placeholder into the cache of this row alone.

        Images whose states are `known` are not read again.
        How many tokens were read, and their states at the aux layers.
        """

    def plain_media(self, tokens_1Q: Tensor, inputs: MultiModalInputs) -> Tensor:
        """Logits of a whole text that begins with the prompt, by the model's own means."""

    def opened_media(self, rows: int) -> RowStore:
        """What a cache keeps of rows' images before any was read."""


class ModelRunner(Protocol):
    """Runs the layers of one decoder: writes the cache, returns logits."""

    name: str  #: what the model is called in messages
    vocab_size: int
    context: int  #: most positions it can address
    layers: int
    means: str  #: how it runs, in words, for `--verbose`
    trees: bool  #: whether nodes may branch
    packed: bool  #: whether its weights are laid out for this processor
    recurrent: bool  #: whether some of its layers keep a state
    limit: tuple[float, float]  #: what these cut the steps of their recurrences to
    rounding: BatchInvariance  #: which calls of it round alike

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""

    @property
    def reader(self) -> EncoderAdapter | None:
        """What reads the rows' inputs; None for a model of text alone."""

    def __call__(
        self, cache: SlotCache, nodes: Nodes, last: int | None, aux_layers: tuple[int, ...]
    ) -> Output:
        """Logits [B, Q or last, V'] of the given nodes, and their states at the aux layers.

        The slots are set already (`SlotCache.begin`).
        """

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor | None:
        """Logits of a whole sequence by the model's own means, without a cache or masks of ours.

        None for a runner that has no such means.
        """

    def short_windows(self, size: int) -> AbstractContextManager[None]:
        """Windows and chunks of `size` for a check, so that a short text reaches past them."""


class LeanRunner:
    """What a runner of weights alone goes without: the model's own forward, states, windows."""

    trees = True
    recurrent = False
    limit = (0.0, float("inf"))

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor | None:
        """None: it has the weights alone, not the model's own forward."""
        return None

    def short_windows(self, size: int) -> AbstractContextManager[None]:
        """It has no windows to narrow."""
        return nullcontext()


class TreeDecoder:
    """A `LanguageModel` over a runner: slots, calls that round alike, vocabulary cut."""

    aux_layers: tuple[int, ...] = ()  # it reads no other model's states
    follows = True  # it keeps entries of the text that it reads

    def __init__(
        self, runner: ModelRunner, vocab_size: int | None = None, bank: "LoraBank | None" = None
    ) -> None:
        self.runner, self.bank = runner, bank
        self.of: tuple[int, ...] | None = None  #: layers of a larger model, whose cache it runs on
        self.ids_K: Tensor | None = None  #: tokens that its output layer knows, if not all
        self.vocab_size = vocab_size or runner.vocab_size
        self._known = runner.vocab_size
        self.context = runner.context
        self.rounding = runner.rounding  #: which calls of it round alike
        #: whether some of its layers keep a state, which stands for a text as a whole
        self.recurrent = runner.recurrent
        #: what reads images or sound in its prompts; None for a model that reads none there
        self.media = runner if isinstance(runner, MediaRunner) else None
        reader = runner.reader
        #: what it reads besides its text
        self.reads: Reads = "text" if reader is None else "states" if reader.shares else "source"

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.runner.dtype

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that rows may have."""
        return () if self.bank is None else self.bank.names

    @property
    def trees(self) -> bool:
        return self.runner.trees

    @property
    def trees_alike(self) -> bool:
        tried = self.dtype.itemsize < 4 or self.rounding.skipped is not None
        return not tried or self.rounding.trees

    @property
    def capturable(self) -> bool:
        """Whether a device can replay its calls: states are advanced as far as the host says."""
        return not self.recurrent

    def width(self, slots: int) -> int:
        return self.rounding.width(slots)

    def examine(self, inputs: Inputs) -> None:
        if self.runner.reader is None:
            raise ConfigurationError(
                "this model reads text alone; got inputs of another kind; leave inputs out, or "
                "load an encoder-decoder"
            )
        if inputs.encoded is None and self.runner.reader.shares:
            raise ConfigurationError(
                f"{self.runner.name} has no encoder of its own; got inputs that are not encoded; "
                "draft with it for a target whose encoder it shares"
            )
        if inputs.encoded is None and inputs.ids_BS is None and inputs.features is None:
            raise ConfigurationError(
                f"{self.runner.name} reads with an encoder of its own; got another encoder's "
                "states alone; give its inputs, or a draft model that shares the encoder"
            )
        self.runner.reader.examine(inputs)

    def encode(self, inputs: Inputs) -> Inputs:
        """The inputs with `encoded`: the encoder runs, unless its states are there already.

        Raises ConfigurationError for a model of text alone, and for one without an encoder.
        """
        if inputs.encoded is not None and self.runner.reader is not None:
            return inputs
        self.examine(inputs)
        assert self.runner.reader is not None
        return inputs._replace(encoded=self.runner.reader.encode(inputs))

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> SlotCache:
        """An empty cache for `rows` rows, which owns what is read of the inputs.

        A slab of free rows, for rows that come by `put`: `open(into, capacity).narrow(0)`.
        """
        cache = SlotCache(self.runner.layers, rows, capacity)
        if self.recurrent:
            cache.recurrent = RecurrentStates(rows, self.device, self.runner.limit)
        if inputs is not None:
            encoded, reader = self.encode(inputs).encoded, self.runner.reader
            assert reader is not None
            assert encoded is not None
            cache.inputs = reader.keep(encoded)
        elif self.media is not None:
            cache.inputs = self.media.opened_media(rows)
        return cache

    def forward(
        self,
        cache: SlotCache,
        nodes: Nodes,
        *,
        last: int | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Output:
        """Write Q entries and return the logits [B, Q, V] of (the last `last` of) them.

        Their states [B, Q, E] at each of the aux layers come along: k is the state after k layers
        (0: the embeddings), -1 the state that the logits are computed from. Raises
        ConfigurationError for a layer that the model does not have.
        """
        if aux_layers and not all(-1 <= layer < self.runner.layers for layer in aux_layers):
            raise ConfigurationError(
                f"aux_layers are numbers of layers of {self.runner.name}, from 0 (the embeddings) "
                f"to {self.runner.layers - 1}, or -1 for the state before the output layer; got "
                f"{aux_layers}; take a head that was made for this target"
            )
        if self.of is not None:
            cache = cache.part(self.of)
        tokens_BQ, positions_BQ, slots_BQ, visible_BQW, settled_B = nodes
        queries = tokens_BQ.shape[1]
        wanted = queries if last is None else min(last, queries)
        if self._known < self.vocab_size:  # an id it has never seen reads as its last one
            tokens_BQ = tokens_BQ.clamp(max=self._known - 1)
        if visible_BQW.shape[-1] > self.context:  # beyond it nothing is ever emitted
            positions_BQ = positions_BQ.clamp(max=self.context - 1)
        read = Nodes(tokens_BQ, positions_BQ, slots_BQ, visible_BQW, settled_B)
        alike = self.rounding.rows
        more = 0 if alike is None else alike.padded(queries) - queries
        if more:  # dummies are the last node once more: they write what it writes, where it does
            ids, at, slots, seen = (_repeat_last(table, more) for table in read[:4])
            read = Nodes(ids, at, slots, seen, settled_B)
            last = None if last is None else last + more
        if cache.recurrent is not None:
            read = cache.recurrent.begin(read)
        cache.begin(read.slots_BQ, visible_BQW.shape[-1], 0)
        if self.bank is None or not cache.adapters:
            output = self.runner(cache, read, last, aux_layers)
        else:
            with self.bank.of(cache.adapters, read.tokens_BQ.shape[1], self.device):
                output = self.runner(cache, read, last, aux_layers)
        logits, states = output.known_BQK, output.hidden
        if more:
            logits = logits[:, -more - wanted : -more]
            states = tuple(state[:, -more - wanted : -more] for state in states)
        return fitted(logits, states, self.ids_K, self.vocab_size)

    def keep(self, cache: SlotCache, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the accepted paths' entries next to their roots."""
        cache.keep(first_B, path_BD)

    def learn(self, cache: SlotCache, target: TargetStates) -> None:
        """There is nothing to be told: it reads no other model's states."""

    def probe(self, rows: int) -> Inputs | None:
        """Some inputs, for checks and measurements; None for a model of text alone."""
        reader = self.runner.reader
        return None if reader is None else reader.probe(rows)


def media_of(model: object) -> MediaRunner | None:
    """What reads images or sound in a model's prompts; None: it reads none there."""
    media = found(model, "media")  # of models in one process
    return media if isinstance(media, MediaRunner) else None


def orders_slots(model: object) -> bool:
    """Whether its attention chooses among blocks of neighbouring slots, in which a text has to lie
    in order: Qwen4-Exp's indexer does."""
    config = found(found(model, "runner"), "config")  # of models in one process
    return read(config, "indexer_compress_ratio", int) is not None


def adapters_of(model: object) -> tuple[str, ...]:
    """The adapters that rows of a model may have."""
    return read(model, "adapters", tuple) or ()


def fitted(
    logits_BQK: Tensor, hidden: tuple[Tensor, ...], ids_K: Tensor | None, vocab_size: int
) -> Output:
    """Logits of a target's vocabulary; a token that has none here has no chance.

    `ids_K` are the tokens that they are of; None: the first ones. On a CPU they are widened to
    float32: the host reads them there, law by law, and widens them once.
    """
    if logits_BQK.dtype in (torch.bfloat16, torch.float16) and logits_BQK.device.type == "cpu":
        logits_BQK = logits_BQK.float()
    if ids_K is not None:
        return Output(logits_BQK, hidden, ids_K, vocab_size)
    short = vocab_size - logits_BQK.shape[-1]
    if short > 0:
        logits_BQK = torch.nn.functional.pad(logits_BQK, (0, short), value=-torch.inf)
    elif short < 0:
        logits_BQK = logits_BQK[..., :vocab_size]
    return Output(logits_BQK, hidden)


def _repeat_last(x: Tensor, times: int) -> Tensor:
    return torch.cat([x, x[:, -1:].expand(-1, times, *x.shape[2:])], 1)


def additive(visible_BQW: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask [B, 1, Q, W] that is right for eager and sdpa attention alike: 0 or finfo.min."""
    seen, blocked = _levels(dtype, visible_BQW.device)
    return torch.where(visible_BQW, seen, blocked)[:, None]


@lru_cache(maxsize=16)
def _levels(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    lowest = torch.finfo(dtype).min
    return (
        torch.zeros((), dtype=dtype, device=device),
        torch.full((), lowest, dtype=dtype, device=device),
    )
