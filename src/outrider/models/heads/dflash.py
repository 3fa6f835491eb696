"""DFlash heads: one call guesses a whole block from masks, beside the target's states.

The layers' keys and values of committed tokens are projections of the target's states at their
positions, fused into one (`context`). A block stands behind them: the pending token and masks,
which see the context and each other in both directions. Behind the layers the i-th mask says which
token stands in its place:

    context_p = norm(fc(states_p)),   x = layers([embedding(pending), mask, mask, ...])
    law of the i-th token behind the pending one = softmax(output_layer(norm(x_i)))

The masks see no drafted token, so the law of a draft is a product over its positions: a tree below
the pending token has one law per level. Embedding and output layer are the target's, unless the
head brings them.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from outrider.models.batch_invariance import BatchInvariance
from outrider.models.decoder import additive
from outrider.models.heads import states
from outrider.models.heads.autoregressive_head import HeadCache
from outrider.models.heads.eagle3 import KINDS
from outrider.models.heads.head import DraftHead
from outrider.tree import numbers
from outrider.types import Nodes


@dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash head computes.

    layer             transformers' configuration of its layers, a Qwen3's or a Llama's
    taps              the target's states that it reads, as `LanguageModel.forward` counts them
    block             the pending token and the masks behind it
    mask              token whose embedding stands for a mask
    draft_vocab_size  how many tokens it can propose
    """

    layer: PretrainedConfig
    taps: tuple[int, ...]
    block: int
    mask: int
    draft_vocab_size: int


class DFlash(DraftHead):
    """A DFlash head; `embedding_VE` and `output_KE` are lent where it has none of its own.

    >>> head.remember(head.fuse(hidden), positions, cache)              # doctest: +SKIP
    >>> head.logits(head(blocks, positions, mask, cache))               # doctest: +SKIP
    """

    def __init__(
        self,
        config: DFlashConfig,
        *,
        embedding_VE: Tensor | None = None,
        output_KE: Tensor | None = None,
        ids_K: Tensor | None = None,
    ) -> None:
        inner, kind = copy.deepcopy(config.layer), KINDS[config.layer.model_type]
        inner._attn_implementation = "sdpa"
        wide, eps = int(inner.hidden_size), inner.rms_norm_eps
        super().__init__(inner.vocab_size, wide, embedding_VE, output_KE)
        self.config = config
        self.fc = nn.Linear(len(config.taps) * wide, wide, bias=False)
        self.hidden_norm = kind.norm(wide, eps=eps)
        self.layers = nn.ModuleList(
            kind.layer(inner, number) for number in range(inner.num_hidden_layers)
        )
        self.norm = kind.norm(wide, eps=eps)
        self.speak(config.draft_vocab_size, ids_K)
        self.turned_by(kind.rotary(inner))
        self._size = int(inner.head_dim or wide // inner.num_attention_heads)

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """The context [B, Q, E] of the target's states [B, Q, E] at the taps."""
        fused: Tensor = self.hidden_norm(self.fc(torch.cat(list(hidden), -1)))
        return fused

    def remember(self, context_BQE: Tensor, positions_BQ: Tensor, cache: Cache) -> None:
        """Write the layers' keys and values of committed tokens."""
        cos, sin = self.rotary(context_BQE, positions_BQ)
        for number, layer in enumerate(self.layers):
            attention = layer.get_submodule("self_attn")
            parts = dict(attention.named_children())
            k, v = (
                parts[name](context_BQE).unflatten(-1, (-1, self._size))
                for name in ("k_proj", "v_proj")
            )
            k = parts["k_norm"](k) if "k_norm" in parts else k
            k, _ = apply_rotary_pos_emb(k.transpose(1, 2), k.transpose(1, 2), cos, sin)
            cache.update(k, v.transpose(1, 2), number)

    def forward(
        self, tokens_BQ: Tensor, positions_BQ: Tensor, mask_B1QW: Tensor | None, cache: Cache
    ) -> Tensor:
        """What the output layer reads of a block behind the context, [B, Q, E]."""
        x = self.embedded(tokens_BQ)
        turned = self.rotary(x, positions_BQ)
        for layer in self.layers:
            x = layer(
                x, attention_mask=mask_B1QW, position_embeddings=turned, past_key_values=cache
            )
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, read_BQE: Tensor) -> Tensor:
        """[B, Q, K]: over the tokens that it can propose."""
        return F.linear(read_BQE, self.output)


class MaskedBlockHead:
    """A `HeadRunner` over a DFlash head: a node's law follows from its depth alone.

    Behind its block no token is possible, so no draft goes there.
    """

    follows = False

    def __init__(self, head: DFlash) -> None:
        self.head, self.taps, self.ids_K = head, head.config.taps, head.ids_K
        self.device, self.dtype = head.fc.weight.device, head.fc.weight.dtype

    def open(self, rows: int, capacity: int) -> HeadCache:
        """An empty cache, with room for a block behind the last token."""
        return HeadCache.of(len(self.head.layers), rows, capacity + self._room, self.device)

    @property
    def _room(self) -> int:
        return BatchInvariance().width(self.head.config.block)

    def learn(
        self,
        cache: HeadCache,
        slots_BQ: Tensor,
        positions_BQ: Tensor,
        wide: int,
        hidden: tuple[Tensor, ...],
        known_B: Tensor,
    ) -> None:
        """Remember the context of the tokens in these slots; `known_B` of them are committed."""
        if hidden:
            cache.entries.begin(slots_BQ, wide, 0)
            context = self.head.fuse([state.to(self.dtype) for state in hidden])
            self.head.remember(context, positions_BQ, cache.entries)
        cache.known_B.copy_(known_B)

    def keep(self, cache: HeadCache, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the context of accepted paths next to their roots."""
        cache.entries.keep(first_B, path_BD)

    def logits(self, cache: HeadCache, nodes: Nodes, last: int | None) -> Tensor:
        """[B, Q or last, K]; the root's call, for the last node alone, runs the block."""
        known_B1, block = cache.known_B[:, None], self.head.config.block
        at_BQ = nodes.positions_BQ
        if last is not None:
            at_BQ = at_BQ[:, -last:]
            self._guess(cache, nodes.tokens_BQ[:, -1:], nodes.visible_BQW.shape[-1] + self._room)
        place_BQ = at_BQ + 1  # a mask says which token stands in its place
        there = place_BQ < known_B1 + block
        at_BQ = torch.minimum(place_BQ, known_B1 + block - 1)
        read = states.read(cache.own, at_BQ, self.head.width, self.dtype)
        return self.head.logits(read).masked_fill(~there[..., None], -torch.inf)

    def _guess(self, cache: HeadCache, pending_B1: Tensor, wide: int) -> None:
        """Run the block behind each row's context, and keep what its output layer would read."""
        config, known_B1 = self.head.config, cache.known_B[:, None]
        masks = torch.full_like(pending_B1, config.mask).expand(-1, config.block - 1)
        slots_BQ = known_B1 + numbers(config.block, pending_B1.device)
        seen = numbers(wide, pending_B1.device) < known_B1 + config.block
        mask = additive(seen[:, None].expand(-1, config.block, -1), self.dtype)
        cache.entries.begin(slots_BQ, wide, 0)
        tokens = torch.cat([pending_B1, masks], 1)
        made = self.head(tokens, slots_BQ, mask, cache.entries)
        states.write(cache.own, slots_BQ, wide, made)
