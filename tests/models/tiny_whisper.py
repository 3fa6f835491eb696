"""A tiny random Whisper for tests, and something for it to hear."""

from functools import lru_cache

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from outrider.types import Inputs

VOCAB, FRAMES, MELS = 48, 40, 8
SHAPES = {
    "plain": {},
    "scaled embeddings": {"scale_embedding": True},
    "relu": {"activation_function": "relu"},
    "three layers": {"decoder_layers": 3},
    "deeper than the encoder": {"decoder_layers": 3, "encoder_layers": 1},
}


@lru_cache
def whisper(shape="plain", kind=WhisperForConditionalGeneration):
    """Weights three times as large as usual, so that mistakes show."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=MELS,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=FRAMES // 2,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        **{"encoder_layers": 2, "decoder_layers": 2} | SHAPES[shape],
    )
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn_like(parameter))
    return model


def audio(rows, seed=1):
    """Frames of noise."""
    random = torch.Generator().manual_seed(seed)
    frames = torch.randn(rows, FRAMES, MELS, generator=random)
    return Inputs(None, frames, torch.ones(rows, FRAMES, dtype=torch.bool))
