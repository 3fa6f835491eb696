"""A head as a draft model: what all of them have in common, over what each does with states."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import TypeVar

from outrider.errors import ConfigurationError
from outrider.models.batch_invariance import BatchInvariance
from outrider.models.cache import SlotCache
from outrider.models.decoder import fitted
from outrider.types import Inputs, Nodes, Output, Reads, TargetStates

C = TypeVar("C", default=Any)  #: what a head keeps of rows

# What modules of heads have in common: tokens that they know, layers that the target lends.


class DraftHead(nn.Module):
    """A head over a target's `vocab` tokens, of width `wide`; `speak` gives it its output layer.

    `embedding_VE` and `output_KE` are lent by the target where a head has none of its own; they are
    neither parameters of it nor in its state dict.
    """

    d2t: Tensor
    _rotary: tuple[nn.Module, ...] = ()

    def __init__(
        self, vocab: int, wide: int, embedding_VE: Tensor | None, output_KE: Tensor | None
    ) -> None:
        super().__init__()
        self.vocab, self.width = vocab, wide
        self._lent = None if embedding_VE is None else embedding_VE.detach()
        self._read = None if output_KE is None else output_KE.detach()
        if self._lent is None:
            self.embed_tokens = nn.Embedding(vocab, wide)

    def speak(self, known: int, ids_K: Tensor | None) -> None:
        """It proposes `known` tokens, those of `ids_K`; None: all of the target's."""
        if self._read is None:
            self.lm_head = nn.Linear(self.width, known, bias=False)
        if ids_K is not None:
            self.register_buffer("d2t", ids_K - torch.arange(len(ids_K), device=ids_K.device))
            every = ids_K.new_zeros(self.vocab, dtype=torch.bool)
            self.register_buffer("t2d", every.index_fill(0, ids_K, True))

    def turned_by(self, rotary: nn.Module) -> None:
        """Its cosines and sines of positions.

        They are no part of it, as half precision would round their frequencies; but they go along
        to the device of its weights.
        """
        self._rotary = (rotary,)

    @property
    def rotary(self) -> nn.Module:
        """Cosines and sines of positions."""
        return self._rotary[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        where = next((weight.device for weight in self.parameters()), None)
        for rotary in self._rotary:
            rotary.to(where)
        return self

    @property
    def ids_K(self) -> Tensor | None:
        """The tokens of the target's vocabulary that it can propose; None: all."""
        if "d2t" not in self._buffers:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def output(self) -> Tensor:
        """Weights [K, E] of the output layer."""
        return self.lm_head.weight if self._read is None else self._read

    @property
    def table(self) -> Tensor:
        """Weights [V, E] of the embedding."""
        return self.embed_tokens.weight if self._lent is None else self._lent

    def embedded(self, tokens_BQ: Tensor) -> Tensor:
        """[B, Q, E], by its own table or the target's."""
        return F.embedding(tokens_BQ, self.table)


# States by slot: what a head is given of the tokens before it, kept like a model's entries.


def open_states(rows: int, capacity: int, kinds: int = 1) -> SlotCache:
    """Room for a state of each kind per slot, of whatever width is written first."""
    return SlotCache(kinds, rows, capacity)


def write_states(
    states: SlotCache, slots_BQ: Tensor, wide: int, state_BQE: Tensor, kind: int = 0
) -> None:
    """Put states [B, Q, E] of an even width into slots below `wide`."""
    states.begin(slots_BQ, wide, 0)
    first, second = state_BQE[:, None].chunk(2, -1)
    states.update(first, second, kind)


def read_states(
    states: SlotCache, slots_BQ: Tensor, width: int, dtype: torch.dtype, kind: int = 0
) -> Tensor:
    """The states [B, Q, width] of these slots; some other's, or zeros, where none was written."""
    rows, queries = slots_BQ.shape
    layer = states.layers[kind]
    if not layer.is_initialized:
        return torch.zeros(rows, queries, width, dtype=dtype, device=slots_BQ.device)
    there = slots_BQ.clamp(max=layer.keys.shape[2] - 1)  # slots are made as they are written
    at = there[:, None, :, None].expand(-1, 1, -1, width // 2)
    halves = [plane[:rows].gather(2, at)[:, 0] for plane in (layer.keys, layer.values)]
    return torch.cat(halves, -1).to(dtype)


class HeadRunner(Protocol[C]):
    """Keeps what a head is told, and makes laws of it."""

    aux_layers: tuple[int, ...]  #: the target's states that it reads
    follows: bool  #: whether it keeps entries of the text, too
    ids_K: Tensor | None  #: the tokens that it can propose; None: all
    device: torch.device  #: where its weights lie
    dtype: torch.dtype

    def open(self, rows: int, capacity: int) -> C:
        """An empty cache."""

    def learn(self, cache: C, target: TargetStates) -> None:
        """Be told the target's states of some tokens."""

    def keep(self, cache: C, first_B: Tensor, path_BD: Tensor) -> None:
        """Move what it was told of accepted paths next to their roots."""

    def logits(self, cache: C, nodes: Nodes, last: int | None) -> Tensor:
        """[B, Q or last, K], over the tokens that it can propose; -inf where none is possible."""


class HeadModel(Generic[C]):
    """A `LanguageModel` over a head. Its law of a token that it cannot propose is 0.

    >>> HeadModel(AutoregressiveHead(head), vocab_size=49152).aux_layers  # doctest: +SKIP
    (2, 15, 27)
    """

    trees = True
    trees_alike = False  #: nobody has tried
    reads: Reads = "text"

    def __init__(self, runner: HeadRunner[C], vocab_size: int, context: int = 1 << 30) -> None:
        self.runner, self.vocab_size, self.context = runner, vocab_size, context
        self.aux_layers, self.follows = runner.aux_layers, runner.follows
        self.device, self.dtype = runner.device, runner.dtype
        self.learn, self.keep = runner.learn, runner.keep

    def width(self, slots: int) -> int:
        """The least visible width of so many slots: what a draft is rounded to is of no account."""
        return BatchInvariance().width(slots)

    def examine(self, inputs: Inputs) -> None:
        """Refused: it reads states."""
        self.encode(inputs)

    def encode(self, inputs: Inputs) -> Inputs:
        """Refused: it reads states."""
        raise ConfigurationError(
            "a head reads its target's states alone; got inputs; leave them out"
        )

    def probe(self, rows: int) -> None:
        """It needs no inputs."""

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> C:
        if inputs is not None:
            self.examine(inputs)
        return self.runner.open(rows, capacity)

    def forward(
        self, cache: C, nodes: Nodes, *, last: int | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Output:
        """The logits [B, Q, V] of (the last `last` of) Q nodes."""
        if aux_layers:
            raise ConfigurationError(
                f"a head has no layers to read states of; got aux_layers={aux_layers}; read "
                "the target's"
            )
        logits = self.runner.logits(cache, nodes, last)
        return fitted(logits, (), self.runner.ids_K, self.vocab_size)
