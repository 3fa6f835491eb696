"""Domino heads (arXiv 2605.29707): a DFlash block whose guesses are corrected along the draft.

The backbone guesses a block at once, as a DFlash head's does, the pending token's own state first.
A recurrent unit goes along the tokens that are drafted, and what it has come to corrects the scores
of each place behind the first `pure_draft_prefix_len`:

    s_i = gru(embedding(token_i), s_{i-1}),   logits_i += W2 silu(W1 [x_i; s_i])

So a drafted token's law depends on the tokens above it, and a tree's nodes have each their own. The
speculators layout calls it a DFlash head of `projector_type` "domino".
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.config import folder_fields
from outrider.models.heads import formats
from outrider.models.heads.autoregressive_head import HeadCache, parents
from outrider.models.heads.dflash import DFlash, DFlashConfig, DFlashSource, MaskedBlockHead
from outrider.models.heads.model import read_states, write_states
from outrider.models.sources import ModelSource
from outrider.types import Nodes


class DominoCorrection(nn.Module):
    """What corrects scores [B, Q, V] by the tokens above, through `rank` numbers."""

    def __init__(self, wide: int, states: int, rank: int, vocab: int) -> None:
        super().__init__()
        self.states = states
        self.prefix_gru = nn.GRU(wide, states, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(wide + states, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, vocab, bias=False),
        )

    def advanced(self, embedded_BQE: Tensor, state_BQS: Tensor) -> Tensor:
        """The states [B, Q, S] behind tokens, each from a state of its own."""
        weights = dict(self.prefix_gru.named_parameters())
        made = torch.gru_cell(
            embedded_BQE.flatten(0, 1),
            state_BQS.flatten(0, 1),
            weights["weight_ih_l0"],
            weights["weight_hh_l0"],
        )
        return made.view_as(state_BQS)

    def forward(self, read_BQE: Tensor, state_BQS: Tensor) -> Tensor:
        """[B, Q, V], to be added to the scores."""
        correction: Tensor = self.embed_proj(torch.cat([read_BQE, state_BQS], -1))
        return correction


class Domino(DFlash):
    """A DFlash head with a correction; the first `pure` places of a block have none.

    `sizes` are those of the recurrent unit's states and of what its scores go through.
    """

    def __init__(
        self, config: DFlashConfig, sizes: tuple[int, int], pure: int, **lent: Tensor | None
    ) -> None:
        super().__init__(config, **lent)
        self.pure = pure
        states, rank = sizes
        self.domino_head = DominoCorrection(self.width, states, rank, self.vocab)


class DominoHead(MaskedBlockHead):
    """A `HeadRunner` over a Domino head: a node's law follows from its depth and the tokens above.

    >>> HeadModel(DominoHead(head), vocab_size=151936)                  # doctest: +SKIP
    """

    head: Domino
    ahead = 0  # the pending token's state guesses first

    def block_logits(self, cache: HeadCache, nodes: Nodes, read_BQE: Tensor) -> Tensor:
        """[B, Q, V]: what the block and the tokens say behind (the last Q of) the nodes."""
        queries, correct = read_BQE.shape[1], self.head.domino_head
        nodes = nodes.last(queries)
        depth_BQ1 = (nodes.positions_BQ - cache.known_B[:, None])[..., None]
        above = read_states(cache.told, parents(nodes).clamp(min=0), correct.states, self.dtype)
        above = above.masked_fill(depth_BQ1 <= 0, 0.0)
        state = correct.advanced(self.head.embedded(nodes.tokens_BQ).to(self.dtype), above)
        write_states(cache.told, nodes.slots_BQ, nodes.visible_BQW.shape[-1], state)
        correction = correct(read_BQE, state).masked_fill(depth_BQ1 < self.head.pure, 0.0)
        corrected: Tensor = self.head.logits(read_BQE) + correction
        return corrected


class DominoSource(DFlashSource):
    """A Domino head of a target by its folder, in the speculators layout.

    Raises ConfigurationError for a folder that cannot be read and for what is not computed here,
    VocabularyMismatch for tokens that the target does not know.
    """

    projector, runner = "domino", DominoHead
    fields = frozenset({"shift_label"})

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this names a folder with such a head."""
        fields = folder_fields(given)
        named = fields.get("speculators_model_type") == cls.kind
        return named and fields.get("projector_type") == cls.projector

    def __init__(self, target: ModelSource, given: str | Path) -> None:
        super().__init__(target, given)
        fields = folder_fields(given)
        sizes: Any = [fields.get("gru_hidden_dim", 1024), fields.get("emb_dim", 256)]
        sizes.append(fields.get("pure_draft_prefix_len", 1))
        own = f"gru_hidden_dim, emb_dim, pure_draft_prefix_len={sizes}"
        if not all(isinstance(size, int) and size >= 0 for size in sizes) or sizes[0] % 2:
            do = "give whole numbers, the first of them even"
            raise formats.bad_head(self.given, own, do)
        if fields.get("shift_label") is False or self._asked.draft_vocab_size != self._vocab:
            size = f"draft_vocab_size={self._asked.draft_vocab_size} of {self._vocab}"
            given_as = f"shift_label={fields.get('shift_label')!r}, {size}"
            do = "give a Domino head, which guesses from the pending token on, over all tokens"
            raise formats.bad_head(self.given, given_as, do)
        self._sizes: tuple[int, int] = (sizes[0], sizes[1])
        self._pure: int = sizes[2]

    @property
    def _vocab(self) -> int:
        return int(self.config.vocab_size)

    def module(self, **lent: Tensor | None) -> DFlash:
        return Domino(self._asked, self._sizes, self._pure, **lent)
