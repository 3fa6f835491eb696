"""A draft for Whisper: some layers of the target's decoder, everything else the target's own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper.modeling_whisper import WhisperDecoder


class Draft(nn.Module):
    """Layers `layers` of the target's decoder and a norm; head restricted to `ids_K`.

    The parameters are those of the layers and of the last norm. Token embedding, positions and the
    head's rows are the target's and stay as they are, so they are buffers here.
    """

    def __init__(
        self, target: WhisperForConditionalGeneration, layers: list[int], ids_K: Tensor
    ) -> None:
        super().__init__()
        whole = target.model.decoder
        config = copy.deepcopy(whole.config)
        config.decoder_layers = len(layers)
        config.decoder_layerdrop = 0.0
        config._attn_implementation = "eager"  # a third faster than "sdpa" in bf16 on a CPU
        self.layers = layers
        self.decoder = WhisperDecoder(config)
        for own, layer in zip(self.decoder.layers, layers, strict=True):
            own.load_state_dict(whole.layers[layer].state_dict())
        self.decoder.layer_norm.load_state_dict(whole.layer_norm.state_dict())
        for part in ("embed_tokens", "embed_positions"):
            weight = getattr(whole, part).weight.detach().float()
            frozen = getattr(self.decoder, part)
            del frozen.weight
            frozen.register_buffer("weight", weight, persistent=False)
        self.register_buffer("ids_K", ids_K, persistent=False)
        self.register_buffer(
            "head_KD", target.get_output_embeddings().weight.detach().float()[ids_K]
        )
        self.float()

    def forward(
        self, tokens_N: Tensor, position_N: Tensor, row_N: Tensor, states_SD: Tensor
    ) -> Tensor:
        """States `[N, D]` of packed transcripts of a window: each sees its own earlier tokens."""
        at = torch.arange(len(tokens_N))
        sees_NN = (row_N[:, None] == row_N) & (at[:, None] >= at)
        lowest = torch.finfo(torch.float32).min
        mask = torch.zeros(sees_NN.shape).masked_fill(~sees_NN, lowest)
        return self.decoder(
            input_ids=tokens_N[None],
            position_ids=position_N[None],
            attention_mask=mask[None, None],
            encoder_hidden_states=states_SD[None].float(),
            use_cache=False,
        ).last_hidden_state[0]

    def logits(self, states_ND: Tensor) -> Tensor:
        """Logits `[N, K]` over `ids_K`."""
        return states_ND @ self.head_KD.to(states_ND.dtype).T


def save(draft: Draft, of: str, notes: dict[str, Any], folder: Path) -> int:
    """Write `draft.json` and `draft.safetensors` (bf16); the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name.removeprefix("decoder."): part.detach().bfloat16().contiguous()
        for name, part in draft.named_parameters()
    }
    save_file({**weights, "ids": draft.ids_K}, folder / "draft.safetensors")
    description = {"of": of, "layers": draft.layers, "draft_dtype": "int8", **notes}
    (folder / "draft.json").write_text(json.dumps(description, indent=2) + "\n")
    return (folder / "draft.safetensors").stat().st_size


def load(target: WhisperForConditionalGeneration, folder: Path) -> Draft:
    """A draft that `save` wrote."""
    layers = json.loads((folder / "draft.json").read_text())["layers"]
    draft = Draft(target, layers, load_file(folder / "draft.safetensors")["ids"])
    load_weights(draft, folder)
    return draft


def load_weights(draft: Draft, folder: Path) -> None:
    """Give a draft the layers and the norm of one that `save` wrote, not its ids."""
    parts = load_file(folder / "draft.safetensors")
    del parts["ids"]
    own = dict(draft.named_parameters())
    with torch.no_grad():
        for name, part in parts.items():
            own[f"decoder.{name}"].copy_(part)
