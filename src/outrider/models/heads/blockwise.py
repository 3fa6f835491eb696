"""Blockwise heads (Stern et al. 2018): each guesses one token further from the target's last state.

The target's state at position p is what it draws token p + 1 from. Head k guesses token p + 1 + k
from the same state, without looking at the tokens between:

    y_k = x + down_k(silu(up_k(x))),    law_k = softmax(output_layer(y_k))

so the law of a draft is a product over its positions, and a tree below it has one law per level.
The output layer is the target's. One call drafts nothing but the products of these small layers.

    config.json        {"blockwise_heads": 3, "hidden_size": 576, "intermediate_size": 1152,
                       "vocab_size": 49152}
    model.safetensors  heads.0.up.weight, heads.0.down.weight, ...; `ids` [K]: the tokens that it
                       guesses, if not all
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.models import tensor_file, unsupported
from outrider.models.calibrate import Setting
from outrider.models.config import decoder_of, folder_fields, vocabulary_of
from outrider.models.draft_source import TargetBoundSource
from outrider.models.heads import formats
from outrider.models.heads.autoregressive_head import HeadCache
from outrider.models.heads.model import HeadModel, read_states, write_states
from outrider.models.sources import ModelSource
from outrider.models.weight_only import states_dtype
from outrider.types import Nodes, TargetStates

_FIELDS = ("blockwise_heads", "hidden_size", "intermediate_size", "vocab_size")


class _Further(nn.Module):
    """One head's layer."""

    def __init__(self, wide: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(wide, inner), nn.Linear(inner, wide)

    def forward(self, x: Tensor) -> Tensor:
        """The state that the output layer reads in place of `x`."""
        made: Tensor = x + self.down(F.silu(self.up(x)))
        return made


class Blockwise(nn.Module):
    """`count` heads of width `wide`, each with a layer of `inner` units; `output_KE` is lent.

    >>> heads = Blockwise(3, 576, 1152, target.get_output_embeddings().weight)  # doctest: +SKIP
    >>> heads.logits(heads(states))                      # [B, T, 3, V]        # doctest: +SKIP
    """

    def __init__(
        self, count: int, wide: int, inner: int, output_KE: Tensor, ids_K: Tensor | None = None
    ) -> None:
        super().__init__()
        self.count, self.wide, self.inner = count, wide, inner
        self.heads = nn.ModuleList(_Further(wide, inner) for _ in range(count))
        self._read, self.ids_K = output_KE.detach(), ids_K

    def forward(self, states_BTE: Tensor) -> Tensor:
        """What the output layer reads, [B, T, heads, E], of the target's last states."""
        return torch.stack([head(states_BTE) for head in self.heads], -2)

    def logits(self, made: Tensor) -> Tensor:
        """[..., K], over the tokens that they guess."""
        return F.linear(made, self._read)


class ParallelHead:
    """A `HeadRunner` over blockwise heads: a node's law follows from its depth alone.

    Deeper than there are heads no token is possible, so no draft goes there.
    """

    follows = False
    aux_layers: tuple[int, ...] = (-1,)

    def __init__(self, heads: Blockwise) -> None:
        self.heads, self.ids_K = heads, heads.ids_K
        weight = next(heads.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    def open(self, rows: int, capacity: int) -> HeadCache:
        """An empty cache of what it is told alone: no layer writes entries."""
        return HeadCache.of(0, rows, capacity, self.device)

    def learn(self, cache: HeadCache, target: TargetStates) -> None:
        if target.hidden:
            write_states(cache.told, target.slots_BQ, target.wide, target.hidden[0])
        cache.known_B.copy_(target.known_B)

    def keep(self, cache: HeadCache, first_B: Tensor, path_BD: Tensor) -> None:
        cache.told.keep(first_B, path_BD)

    def logits(self, cache: HeadCache, nodes: Nodes, last: int | None) -> Tensor:
        """[B, Q or last, K]; nothing is written: the law of a depth is known without a token."""
        at_BQ = nodes.positions_BQ if last is None else nodes.positions_BQ[:, -last:]
        known_B1, count, wide = cache.known_B[:, None], self.heads.count, self.heads.wide
        state = read_states(cache.told, (known_B1 - 1).clamp(min=0), wide, self.dtype)
        made = self.heads(state.masked_fill(known_B1[..., None] == 0, 0.0))[:, 0]  # [B, heads, E]
        which = at_BQ - known_B1
        pick = which.clamp(0, count - 1)[..., None].expand(-1, -1, wide)
        logits = self.heads.logits(made.gather(1, pick))
        return logits.masked_fill((which >= count)[..., None], -torch.inf)


def save(heads: Blockwise, folder: str | Path, vocab_size: int) -> None:
    """Write heads for a target of `vocab_size` tokens.

    >>> save(heads, "heads", 49152)                                     # doctest: +SKIP
    """
    values = (heads.count, heads.wide, heads.inner, vocab_size)
    ids = {} if heads.ids_K is None else {"ids": heads.ids_K}
    fields = dict(zip(_FIELDS, values, strict=True))
    tensor_file.write_folder(folder, fields, heads.state_dict() | ids)


class BlockwiseSource(TargetBoundSource):
    """Blockwise heads of a target by their folder; the output layer is lent.

    Raises ConfigurationError for a folder that cannot be read or does not fit, VocabularyMismatch
    for tokens that the target does not know.
    """

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this names a folder with blockwise heads."""
        return "blockwise_heads" in folder_fields(given)

    def __init__(self, target: ModelSource, given: str | Path) -> None:
        super().__init__(target, Path(given))
        self.config: PretrainedConfig = target.config
        fields = folder_fields(given)
        do = "give what outrider.models.heads.blockwise.save has written"
        formats.refuse(self.given, fields, {*_FIELDS})
        sizes = [arguments.whole(name, fields.get(name), do, least=1) for name in _FIELDS]
        self._count, self._wide, self._inner, known = sizes
        wide, vocab = int(decoder_of(target.config).hidden_size), vocabulary_of(target.config)
        formats.same_vocabulary(str(self), known, target, vocab)
        if self._wide != wide:
            given = f"states of width {self._wide}, for a target of width {wide}"
            raise formats.bad_head(self.given, given, "use it with the target that it was made for")

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> HeadModel:
        model = self.target.model(setting.dtype, device)
        output = model.get_output_embeddings()
        try:
            weights = load_file(self.given / "model.safetensors")
            unsupported.check_numbers(weights, f"the heads {self}")
            ids = weights.pop("ids", None)
            weight = output.weight.detach()
            if ids is not None:
                ids = ids.to(device)
                weight = weight[ids]
            heads = Blockwise(self._count, self._wide, self._inner, weight, ids)
            heads.load_state_dict(weights)
        except (OSError, RuntimeError, IndexError, SafetensorError) as error:
            raise ConfigurationError(
                f"the weights of the heads {self} are not those that their config.json asks for; "
                f"got {type(error).__name__}: {str(error)[:200]}; give a whole folder"
            ) from error
        heads.to(device, states_dtype(setting.dtype, device)).eval().requires_grad_(False)
        return HeadModel(ParallelHead(heads), vocab)
