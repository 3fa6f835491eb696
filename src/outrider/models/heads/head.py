"""What modules of heads have in common: tokens that they know, layers that the target lends."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
            self.register_buffer("d2t", ids_K - torch.arange(len(ids_K)))
            every = torch.zeros(self.vocab, dtype=torch.bool)
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
