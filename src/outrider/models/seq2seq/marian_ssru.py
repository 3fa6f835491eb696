"""Marian's small translators: a Transformer's encoder, and a decoder of SSRU cells.

The students that browsers translate with (Bergamot, Mozilla) have no self-attention in the decoder
but a recurrence, the Simpler Simple Recurrent Unit (Kim et al. 2019):

    f = sigmoid(Wf x + bf);    c <- f c + (1 - f) W x;    out = relu(c)

transformers has no such model. This one is its Marian with that cell in place of the attention;
`marian_file` makes it of Marian's own files. Importing this file registers the class with
transformers' AutoConfig and AutoModelForSeq2SeqLM.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from outrider.models.recurrent.hooks import handle_of
from outrider.models.recurrent.rg_lru import GatedLinearRecurrence
from outrider.models.seq2seq.runner import Seq2SeqRunner


class MarianSsruConfig(MarianConfig):  # type: ignore[misc]
    """Marian's configuration under a name of its own."""

    model_type = "marian-ssru"


_RULE = GatedLinearRecurrence()


class SsruCell(torch.nn.Module):
    """The recurrence in the place, and with the arguments, of a decoder layer's self-attention."""

    def __init__(self, width: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.input = torch.nn.Linear(width, width, bias=False)
        self.forget = torch.nn.Linear(width, width)

    def forward(
        self, hidden_states: Tensor, past_key_values: Cache | None = None, **more: object
    ) -> tuple[Tensor, None]:
        """Outputs [B, Q, W]; transformers' own caches keep decays and inputs as keys and values."""
        keep = torch.sigmoid(self.forget(hidden_states)).float()
        added = (1 - keep) * self.input(hidden_states).float()
        past: Any = past_key_values
        if isinstance(past, EncoderDecoderCache):
            past = past.self_attention_cache
        handle = handle_of(past, self)
        if handle is not None:
            states = handle.recur(_RULE, keep, added)
        else:
            queries = keep.shape[1]
            if past is not None:
                kept = past.update(keep[:, None], added[:, None], self.layer_idx)
                keep, added = (table[:, 0] for table in kept)
            state, each = torch.zeros_like(keep[:, 0]), []
            for entry in zip(keep.unbind(1), added.unbind(1), strict=True):
                state = _RULE.advance(state, entry, None)
                each.append(state)
            states = torch.stack(each[-queries:], 1)
        return torch.relu(states).to(hidden_states.dtype), None


class MarianSinusoids(MarianSinusoidalPositionalEmbedding):  # type: ignore[misc]
    """Marian's own table: of n wave lengths the last is 10000, where transformers' n + 1st is."""

    def create_weight(self) -> Tensor:
        """Sines [P, E/2] beside cosines."""
        positions, width = self.weight.shape
        steps = torch.arange(width // 2, dtype=torch.float64, device="cpu") / max(width // 2 - 1, 1)
        at = torch.arange(positions, dtype=torch.float64, device="cpu")[:, None]
        angles = at * torch.exp(-math.log(10000) * steps)
        return torch.cat([angles.sin(), angles.cos()], 1).to(self.weight.dtype)


class MarianSsruModel(MarianMTModel):  # type: ignore[misc]
    """Marian's encoder-decoder with SSRU cells in the decoder.

    >>> small = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 8, "pad_token_id": 0}
    >>> heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    >>> model = MarianSsruModel(MarianSsruConfig(vocab_size=16, **small, **heads))
    >>> type(model.get_decoder().layers[0].self_attn).__name__
    'SsruCell'
    """

    config_class = MarianSsruConfig

    def __init__(self, config: MarianSsruConfig) -> None:
        super().__init__(config)
        for part in (self.get_encoder(), self.get_decoder()):
            part.embed_positions = MarianSinusoids(config.max_position_embeddings, config.d_model)
        for number, layer in enumerate(self.get_decoder().layers):
            layer.self_attn = SsruCell(config.d_model, number)
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-9  # Marian's
        self.post_init()


class MarianSsruRunner(Seq2SeqRunner):
    """Runs it over trees: its cells find the handles of their states in the cache."""

    recurrent = True


AutoConfig.register(MarianSsruConfig.model_type, MarianSsruConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(MarianSsruConfig, MarianSsruModel, exist_ok=True)
