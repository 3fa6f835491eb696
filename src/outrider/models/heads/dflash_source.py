"""DFlash checkpoints, in the authors' layout and the speculators one; a target lends the rest.

authors       config.json of a Qwen3 with `block_size` and `dflash_config`, whose
              `target_layer_ids` count layers from 0: state k + 1 is read for layer k
speculators   `speculators_model_type: "dflash"`; `aux_hidden_state_layer_ids` count states
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from outrider.models.calibrate import Setting
from outrider.models.config import decoder_of, vocabulary_of
from outrider.models.draft_source import TargetBoundSource
from outrider.models.heads import formats
from outrider.models.heads.dflash import DFlash, DFlashConfig, MaskedBlockHead
from outrider.models.heads.model import HeadModel
from outrider.models.sources import ModelSource
from outrider.models.weight_only import states_dtype

_SPECULATORS = frozenset(
    {
        "aux_hidden_state_layer_ids",
        "block_size",
        "draft_vocab_size",
        "mask_token_id",
        "target_hidden_size",
        "transformer_layer_config",
    }
)
#: Of the speculators layout: what its other forms of head are made of, and how they were trained.
_OTHER_FORMS = frozenset(
    {
        "auf",
        "emb_dim",
        "gru_hidden_dim",
        "lambda_base_decay_ratio",
        "lambda_base_start",
        "pure_draft_prefix_len",
    }
)
_OWN = frozenset({"block_size", "dflash_config", "num_target_layers"})


def spread(target: int, draft: int) -> tuple[int, ...]:
    """Layers, counted from 0, that are read where a checkpoint of the authors' names none.

    >>> spread(36, 5)
    (1, 9, 17, 25, 33)
    """
    if draft == 1:
        return (target // 2,)
    return tuple(round(1 + i * (target - 4) / (draft - 1)) for i in range(draft))


class DFlashSource(TargetBoundSource):
    """A DFlash head of a target by its folder.

    Raises ConfigurationError for a folder that cannot be read and for what is not computed here,
    VocabularyMismatch for tokens that the target does not know.
    """

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this names a folder with a DFlash head."""
        if not isinstance(given, (str, Path)):
            return False
        fields = formats.said(given)
        return fields.get("speculators_model_type") == "dflash" or "dflash_config" in fields

    def __init__(self, target: ModelSource, given: str | Path) -> None:
        super().__init__(target, Path(given))
        fields, decoder = formats.said(given), decoder_of(target.config)
        layers, wide = int(decoder.num_hidden_layers), int(decoder.hidden_size)
        known = vocabulary_of(target.config)
        asked = self._speculators if "speculators_model_type" in fields else self._authors
        layer, taps, mask = asked(fields, layers)
        self.config: PretrainedConfig = layer
        formats.fits(self.given, taps, layers)
        if layer.hidden_size != wide:
            given_width = f"width {layer.hidden_size}, for a target of width {wide}"
            raise formats.unfit(self.given, given_width, "use it with the target of that width")
        formats.same_vocabulary(str(self), layer.vocab_size, target, known)
        block, size = fields.get("block_size"), fields.get("draft_vocab_size") or known
        if not isinstance(block, int) or block < 2 or not isinstance(mask, int):
            do = "give a whole checkpoint"
            raise formats.unfit(self.given, f"block_size={block!r}, mask_token_id={mask!r}", do)
        self._asked = DFlashConfig(layer, taps, block, mask, int(size))

    def _speculators(
        self, fields: Mapping[str, Any], layers: int
    ) -> tuple[PretrainedConfig, tuple[int, ...], object]:
        if fields.get("projector_type", "dflash") != "dflash":
            kind = f"projector_type={fields['projector_type']!r}, which is not computed here"
            raise formats.unfit(self.given, kind, "give a DFlash head without a projector")
        inert = formats.INERT | _OTHER_FORMS | {"projector_type"}
        formats.refuse(self.given, fields, inert | _SPECULATORS)
        layer = formats.layers_as(self.given, fields.get("transformer_layer_config"))
        return layer, tuple(fields.get("aux_hidden_state_layer_ids") or ()), fields["mask_token_id"]

    def _authors(
        self, fields: Mapping[str, Any], layers: int
    ) -> tuple[PretrainedConfig, tuple[int, ...], object]:
        own = fields["dflash_config"] or {}
        formats.refuse(self.given, own, {"mask_token_id", "target_layer_ids", "target_hidden_size"})
        inner = {name: value for name, value in fields.items() if name not in _OWN}
        layer = formats.layers_as(self.given, inner)
        ids = own.get("target_layer_ids") or spread(layers, int(layer.num_hidden_layers))
        return layer, tuple(number + 1 for number in ids), own.get("mask_token_id")

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> HeadModel:
        """The head as a draft model. Raises ConfigurationError for weights that do not fit."""
        model = self.target.model(setting.dtype, device)
        weights = formats.weights_of(self.given)
        ids = formats.known_ids(
            self.given, weights, self._asked.draft_vocab_size, int(self.config.vocab_size)
        )
        embedding: Tensor | None = model.get_input_embeddings().weight
        output: Tensor | None = model.get_output_embeddings().weight.detach()
        if output is not None and ids is not None:
            output = output[ids.to(output.device)]
        if "embed_tokens.weight" in weights:
            embedding = None
        if "lm_head.weight" in weights:
            output = None
        head = DFlash(self._asked, embedding_VE=embedding, output_KE=output, ids_K=ids)
        formats.fill(head, weights, str(self))
        head.to(device, states_dtype(setting.dtype, device)).eval().requires_grad_(False)
        return HeadModel(MaskedBlockHead(head), vocab)
