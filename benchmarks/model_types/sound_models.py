"""Tiny random models of types whose prompts hold sound."""

import torch
from tiny_media import FIRST, IMAGE, LAST, TEXT, VIDEO, VISION, MediaType, pixels, text
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_SOUND = {
    "num_mel_bins": 8,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 16,
}
_HEARS = {"num_mel_bins": 8, "max_source_positions": 16, **VISION}


def _hears(kind, audio, text, **more):
    return CONFIG_MAPPING[kind](audio_config=audio, text_config=text, **more)


def _mels(random, size, frames=32):
    """Frames of a recording, and which of them are sound."""
    seen = torch.ones(1, frames, dtype=torch.int64)
    seen[:, frames - 8 * size :] = 0
    return {
        "input_features": pixels(random, 1, 8, frames) * seen[:, None],
        "input_features_mask": seen,
    }


def _named(name, random, size):
    made = _mels(random, size)
    return {"input_features": made["input_features"], name: made["input_features_mask"]}


_CODEC = {
    "model_type": "vibevoice_acoustic_tokenizer_encoder",
    "num_filters": 8,
    "downsampling_ratios": [2, 2],
    "depths": [1, 1, 1],
    "kernel_size": 3,
}


def _granite(kind):
    return MediaType(
        lambda: CONFIG_MAPPING[kind](
            text_config=text("granite"),
            encoder_config={
                "input_dim": 8,
                "num_layers": 2,
                "hidden_dim": 32,
                "num_heads": 4,
                "dim_head": 8,
                "output_dim": 8,
                "context_size": 8,
                "max_pos_emb": 16,
                "conv_kernel_size": 3,
                "dropout": 0.0,
            },
            projector_config=VISION
            | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32, "vocab_size": 8},
            audio_token_index=IMAGE,
            has_lora_adapter=False,
            downsample_rate=2,
            window_size=4,
        ),
        lambda random, size: {"input_features": pixels(random, 1, 16 + 8 * size, 8)},
    )


AUDIO = {
    "qwen2_audio": MediaType(
        lambda: _hears("qwen2_audio", _SOUND, text("qwen2"), audio_token_index=IMAGE),
        lambda random, size: _named("feature_attention_mask", random, size),
        count=lambda size: 8 - 2 * size,
    ),
    "voxtral": MediaType(
        lambda: _hears(
            "voxtral",
            {"model_type": "voxtral_encoder", **_HEARS, "intermediate_size": 128},
            text("llama"),
            audio_token_id=IMAGE,
            hidden_size=32,
        ),
        lambda random, size: {"input_features": pixels(random, 1, 8, 32)},
    ),
    "granite_speech": _granite("granite_speech"),
    "granite_speech_plus": _granite("granite_speech_plus"),
    "fun_asr_nano": MediaType(
        lambda: _hears(
            "fun_asr_nano",
            {
                "num_mel_bins": 8,
                "num_stacked_frames": 2,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_timestamp_prediction_layers": 1,
                "fsmn_kernel_size": 3,
                "max_position_embeddings": 64,
            },
            text("qwen3"),
            adaptor_config={
                "hidden_size": 32,
                "num_attention_heads": 4,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "projector_hidden_size": 48,
            },
            audio_token_id=IMAGE,
        ),
        lambda random, size: {
            "input_features": pixels(random, 1, 16 + 8 * size, 16),
            "input_features_mask": torch.ones(1, 16 + 8 * size, dtype=torch.int64),
        },
    ),
    "glmasr": MediaType(
        lambda: _hears(
            "glmasr",
            {**_HEARS, "max_position_embeddings": 16, "num_key_value_heads": 4}
            | {"intermediate_size": 128},
            text("llama"),
            audio_token_id=IMAGE,
        ),
        _mels,
    ),
    "audioflamingo3": MediaType(
        lambda: _hears("audioflamingo3", _HEARS, text("qwen2"), audio_token_id=IMAGE),
        _mels,
    ),
    "moss_transcribe_diarize": MediaType(
        lambda: _hears(
            "moss_transcribe_diarize",
            {**_HEARS, "intermediate_size": 48},
            text("qwen3"),
            audio_token_id=IMAGE,
            audio_chunk_size=5120,
        ),
        lambda random, size: (
            _mels(random, size) | {"padding_mask": torch.ones(1, 5120, dtype=torch.bool)}
        ),
        count=lambda size: 4 - size,
    ),
    "phi4_multimodal": MediaType(
        lambda: CONFIG_MAPPING["phi4_multimodal"](
            **TEXT,
            original_max_position_embeddings=256,
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 28,
                "crop_size": 28,
                "patch_size": 14,
                "image_token_id": VIDEO,
                "feature_layer": -1,
            },
            audio_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_blocks": 2,
                "num_attention_heads": 4,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "input_size": 8,
                "nemo_conv_channels": 8,
                "audio_token_id": IMAGE,
                "feature_layer": -1,
            },
        ),
        lambda random, size: {
            "audio_input_features": pixels(random, 1, 32 + 16 * size, 8),
            "audio_embed_sizes": torch.tensor([4 + 2 * size]),
        },
        count=lambda size: 4 + 2 * size,
    ),
    "qwen3_asr": MediaType(
        lambda: _hears(
            "qwen3_asr",
            _SOUND
            | {"output_dim": 32, "downsample_hidden_size": 8, "n_window": 50}
            | {"n_window_infer": 800},
            text("qwen3"),
            audio_token_id=IMAGE,
        ),
        lambda random, size: _mels(random, size, 100),
    ),
}
#: Types whose encoders draw noise at every call: such prompts are refused.
NOISY = {
    "vibevoice_asr": MediaType(
        lambda: CONFIG_MAPPING["vibevoice_asr"](
            text_config=text("qwen2"),
            acoustic_tokenizer_encoder_config=_CODEC | {"hidden_size": 16},
            semantic_tokenizer_encoder_config=_CODEC | {"hidden_size": 24},
            audio_token_id=IMAGE,
            audio_bos_token_id=FIRST,
            audio_eos_token_id=LAST,
            acoustic_tokenizer_chunk_size=64,
        ),
        lambda random, size: {
            "input_values": pixels(random, 1, 1, 32 + 16 * size),
            "padding_mask": torch.ones(1, 32 + 16 * size, dtype=torch.bool),
        },
        count=lambda size: 8 + 4 * size,
    ),
}
