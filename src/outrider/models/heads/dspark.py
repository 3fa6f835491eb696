"""DSpark heads: a DFlash head whose guesses know the token before them.

The backbone guesses a block at once, as a DFlash head's does. A sequential head then adds to the
scores of each place a bias by the token that stands before it, of low rank:

    vanilla   bias = W2 e                          e = W1[token before]
    gated     bias = W2 (sigmoid(G [x; e]) * e)    x = the backbone's state of the place
    rnn       bias = W2 tanh(o),  s' = g s + (1 - g) tanh(c)    (g, c, o) = J [s; e; x], g a sigmoid

So a drafted token's law depends on the tokens above it, and a tree's nodes have each their own. The
pending token's own state is the first that guesses (`sample_from_anchor`), or the first mask's is.
Names and sizes are those of the speculators library; its confidence head says how far to draft,
which is the planner's business here: it is not read.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.models.config import folder_fields
from outrider.models.heads import formats
from outrider.models.heads.autoregressive_head import HeadCache, parents
from outrider.models.heads.dflash import DFlash, DFlashConfig, DFlashSource, MaskedBlockHead
from outrider.models.heads.model import read_states, write_states
from outrider.models.sources import ModelSource
from outrider.types import Nodes

MARKOV = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """A bias over K tokens by the token before, one of V, through `rank` numbers."""

    def __init__(self, kind: str, vocab: int, known: int, rank: int, wide: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, known, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(wide + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + wide, 3 * rank)

    def forward(
        self, tokens_BQ: Tensor, read_BQE: Tensor, state_BQR: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Biases [B, Q, K], and states behind the tokens where the head keeps some."""
        before = self.markov_w1(tokens_BQ)
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([read_BQE, before], -1)))
            before = gate * before
        if self.kind != "rnn":
            return self.markov_w2(before), None
        assert state_BQR is not None
        joint = self.joint_proj(torch.cat([state_BQR, before, read_BQE], -1))
        gate, candidate, out = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        state = gate * state_BQR + (1.0 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(out)), state


class DSpark(DFlash):
    """A DFlash head with a sequential head; `anchored`: the pending token's state guesses first."""

    def __init__(
        self,
        config: DFlashConfig,
        markov: str | None,
        rank: int,
        anchored: bool,
        **lent: Tensor | None,
    ) -> None:
        super().__init__(config, **lent)
        self.anchored = anchored
        self.markov_head: MarkovHead | None = None
        if markov is not None:
            vocab, known = self.vocab, config.draft_vocab_size
            self.markov_head = MarkovHead(markov, vocab, known, rank, self.width)


class DSparkHead(MaskedBlockHead):
    """A `HeadRunner` over a DSpark head: a node's law follows from its depth and the tokens above.

    >>> HeadModel(DSparkHead(head), vocab_size=151936)                  # doctest: +SKIP
    """

    head: DSpark

    def __init__(self, head: DSpark) -> None:
        super().__init__(head)
        self.ahead = 0 if head.anchored else 1

    def block_logits(self, cache: HeadCache, nodes: Nodes, read_BQE: Tensor) -> Tensor:
        """[B, Q, K]: what the block and the tokens say behind (the last Q of) the nodes."""
        markov, queries = self.head.markov_head, read_BQE.shape[1]
        logits = self.head.logits(read_BQE)
        if markov is None:
            return logits
        nodes = nodes.last(queries)
        state = self._states(cache, nodes) if markov.kind == "rnn" else None
        bias, behind = markov(nodes.tokens_BQ, read_BQE, state)
        if behind is not None:
            write_states(cache.told, nodes.slots_BQ, nodes.visible_BQW.shape[-1], behind)
        biased: Tensor = logits + bias
        return biased

    def _states(self, cache: HeadCache, nodes: Nodes) -> Tensor:
        """The sequential head's states [B, Q, R] before the nodes; zeros before a block."""
        markov, known_B1 = self.head.markov_head, cache.known_B[:, None]
        assert markov is not None
        parent_BQ = parents(nodes).clamp(min=0)
        found = read_states(cache.told, parent_BQ, markov.rank, self.dtype)
        first = torch.zeros_like(found)
        if not self.head.anchored:  # the pending token's own place is gone through, too
            at_BQ = known_B1.expand_as(parent_BQ)
            read = read_states(cache.own, at_BQ, self.head.width, self.dtype)
            _, behind = markov(nodes.tokens_BQ, read, first)
            assert behind is not None
            first = behind
        drafted = (nodes.positions_BQ > known_B1)[..., None]
        return torch.where(drafted, found, first)


class DSparkSource(DFlashSource):
    """A DSpark head of a target by its folder, in the speculators layout.

    Raises ConfigurationError for a folder that cannot be read and for what is not computed here,
    VocabularyMismatch for tokens that the target does not know.
    """

    kind, runner = "dspark", DSparkHead
    fields = frozenset(
        """
        ce_loss_alpha confidence_head_alpha confidence_head_with_markov enable_confidence_head
        l1_loss_alpha loss_decay_gamma markov_head_type markov_rank num_anchors
        sample_from_anchor
        """.split()
    )

    def __init__(self, target: ModelSource, given: str | Path) -> None:
        super().__init__(target, given)
        fields = folder_fields(given)
        self._anchored = bool(fields.get("sample_from_anchor", True))
        self._markov, self._rank = _sequential(self.given, fields)

    def module(self, **lent: Tensor | None) -> DFlash:
        return DSpark(self._asked, self._markov, self._rank, self._anchored, **lent)


def _sequential(folder: Path, fields: Mapping[str, object]) -> tuple[str | None, int]:
    """The form of a checkpoint's sequential head, None for none, and its rank."""
    rank, kind = fields.get("markov_rank", 256), fields.get("markov_head_type", "vanilla")
    if rank == 0:
        return None, 0
    if kind not in MARKOV or not isinstance(rank, int) or rank < 0 or rank % 2:
        given = f"markov_head_type={kind!r}, markov_rank={rank!r}"
        raise formats.bad_head(folder, given, f"give one of {', '.join(MARKOV)}, of even rank")
    return kind, rank
