"""Tiny random models of types whose prompts hold images, and prompts with images for them."""

from dataclasses import dataclass

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider.models.auto_classes import auto_class

VOCAB, IMAGE, VIDEO, FIRST, LAST = 128, 100, 101, 102, 103

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_GRID = {
    "depth": 2,
    "num_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "patch_size": 4,
    "out_hidden_size": 32,
}
_TURNS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_IDS = {"image_token_id": IMAGE}
_INDEX = {"image_token_index": IMAGE}
_BOTH = {"video_token_id": VIDEO, "vision_start_token_id": FIRST, "vision_end_token_id": LAST}


def _text(kind, **more):
    return {**_TEXT, "model_type": kind, **more}


def _vision(kind, **more):
    return {**_VISION, "model_type": kind, **more}


def _llava(kind, **more):
    parts = {"text_config": _text("llama"), "vision_config": _vision("clip_vision_model")}
    return CONFIG_MAPPING[kind](**parts, **_INDEX, **more)


def _turned(kind, vision, text, **more):
    return CONFIG_MAPPING[kind](
        text_config=_TEXT | {"rope_parameters": _TURNS} | text,
        vision_config=_GRID | vision,
        **_IDS,
        **more,
    )


def _pixels(random, *shape):
    return torch.randn(*shape, generator=random)


def _one(random, size):
    """One picture of one size."""
    return {"pixel_values": _pixels(random, 1, 3, 8, 8)}


def _several(random, size):
    """A picture of the type's own axis of pictures."""
    return {"pixel_values": _pixels(random, 1, 1 + size, 3, 8, 8)}


def _tiles(random, size):
    """A picture in tiles, and the whole of it."""
    wide = 8 * (1 + size)
    return {
        "pixel_values": _pixels(random, 1, 2 + size, 3, 8, 8),
        "image_sizes": torch.tensor([[8, wide]]),
    }


def _patches(random, size, channels=3 * 2 * 4 * 4):
    """Patches of a picture of any size, merged by two and two."""
    high, wide = 4, 4 + 2 * size
    grid = torch.tensor([[1, high, wide]])
    return {"pixel_values": _pixels(random, high * wide, channels), "image_grid_thw": grid}


def _sized(random, size):
    """A picture of its own size."""
    wide = 16 + 8 * size
    return {
        "pixel_values": _pixels(random, 1, 3, 16, wide),
        "image_sizes": torch.tensor([[16, wide]]),
    }


@dataclass(frozen=True)
class ImageType:
    """How a tiny model of a type is made, and the pictures that it reads."""

    config: object  #: makes the configuration
    picture: object = _one  #: makes the arguments of one picture: random numbers, a size
    typed: str | None = None  #: the argument that says which tokens are pictures, if one does
    count: object = None  #: how many tokens a recording of a size takes, where no part says so


_SIGLIP = "siglip_vision_model"
TYPES = {
    "llava": ImageType(lambda: _llava("llava")),
    "vipllava": ImageType(lambda: _llava("vipllava", vision_feature_layers=[-1, -2])),
    "llava_next": ImageType(
        lambda: _llava("llava_next", image_grid_pinpoints=[[8, 8], [8, 16]]), _tiles
    ),
    "llava_onevision": ImageType(
        lambda: CONFIG_MAPPING["llava_onevision"](
            text_config=_text("qwen2"),
            vision_config=_vision(_SIGLIP, vision_use_head=False),
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=[[8, 8], [8, 16]],
        ),
        _tiles,
    ),
    "aya_vision": ImageType(
        lambda: CONFIG_MAPPING["aya_vision"](
            text_config=_text("cohere2", sliding_window=16),
            vision_config=_vision(_SIGLIP, vision_use_head=False),
            downsample_factor=2,
            adapter_layer_norm_eps=1e-6,
            **_INDEX,
        )
    ),
    "cohere2_vision": ImageType(
        lambda: CONFIG_MAPPING["cohere2_vision"](
            text_config=_text("cohere2", sliding_window=16),
            vision_config=_vision(_SIGLIP, vision_use_head=False),
            downsample_factor=2,
            alignment_intermediate_size=32,
            **_IDS,
        )
    ),
    "internvl": ImageType(
        lambda: CONFIG_MAPPING["internvl"](
            text_config=_text("qwen2"),
            vision_config=_vision("internvl_vision", image_size=[8, 8], patch_size=[4, 4]),
            downsample_ratio=0.5,
            **_IDS,
        )
    ),
    "gemma3": ImageType(
        lambda: CONFIG_MAPPING["gemma3"](
            text_config=_text("gemma3_text", sliding_window=8)
            | {"layer_types": ["sliding_attention", "full_attention"]},
            vision_config=_vision(_SIGLIP, vision_use_head=False),
            mm_tokens_per_image=4,
            boi_token_index=FIRST,
            eoi_token_index=LAST,
            tie_word_embeddings=False,
            **_INDEX,
        ),
        typed="token_type_ids",
    ),
    "idefics2": ImageType(
        lambda: CONFIG_MAPPING["idefics2"](
            text_config=_text("mistral", sliding_window=None),
            vision_config=_VISION,
            perceiver_config={
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
            **_IDS,
        ),
        _several,
    ),
    "idefics3": ImageType(
        lambda: CONFIG_MAPPING["idefics3"](
            text_config=_text("llama"), vision_config=_VISION, scale_factor=2, **_IDS
        ),
        _several,
    ),
    "smolvlm": ImageType(
        lambda: CONFIG_MAPPING["smolvlm"](
            text_config=_text("llama"), vision_config=_VISION, scale_factor=2, **_IDS
        ),
        _several,
    ),
    "mistral3": ImageType(
        lambda: CONFIG_MAPPING["mistral3"](
            text_config=_text("mistral", sliding_window=None),
            vision_config=_vision("pixtral", image_size=32, head_dim=8),
            spatial_merge_size=2,
            **_INDEX,
        ),
        _sized,
    ),
    "lighton_ocr": ImageType(
        lambda: CONFIG_MAPPING["lighton_ocr"](
            text_config=_text("qwen3"),
            vision_config=_vision("pixtral", image_size=32, head_dim=8),
            spatial_merge_size=2,
            **_IDS,
        ),
        _sized,
    ),
    "qwen2_vl": ImageType(
        lambda: _turned("qwen2_vl", {"embed_dim": 32, "mlp_ratio": 2}, {}, **_BOTH),
        _patches,
        "mm_token_type_ids",
    ),
    "qwen2_5_vl": ImageType(
        lambda: _turned(
            "qwen2_5_vl", {"fullatt_block_indexes": [1], "window_size": 16}, {}, **_BOTH
        ),
        _patches,
        "mm_token_type_ids",
    ),
    "qwen3_vl": ImageType(
        lambda: _turned(
            "qwen3_vl",
            {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            {},
            **_BOTH,
        ),
        _patches,
        "mm_token_type_ids",
    ),
    "qwen3_vl_moe": ImageType(
        lambda: _turned(
            "qwen3_vl_moe",
            {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **_BOTH,
        ),
        _patches,
        "mm_token_type_ids",
    ),
    "glm4v": ImageType(
        lambda: _turned("glm4v", {"image_size": 16}, {"partial_rotary_factor": 1.0}),
        _patches,
        "mm_token_type_ids",
    ),
    "glm46v": ImageType(
        lambda: CONFIG_MAPPING["glm46v"](
            text_config=_text("glm4v_text", rope_parameters=_TURNS),
            vision_config={**_GRID, "model_type": "glm4v_vision", "image_size": 16},
            **_IDS,
        ),
        _patches,
        "mm_token_type_ids",
    ),
    "got_ocr2": ImageType(
        lambda: CONFIG_MAPPING["got_ocr2"](
            text_config=_text("qwen2"),
            vision_config={
                "hidden_size": 32,
                "output_channels": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 32,
                "patch_size": 4,
                "mlp_dim": 48,
                "global_attn_indexes": [1],
                "window_size": 2,
            },
            **_INDEX,
        ),
        lambda random, size: {"pixel_values": _pixels(random, 1, 3, 32, 32)},
    ),
    "janus": ImageType(
        lambda: CONFIG_MAPPING["janus"](
            text_config=_text("llama"),
            vision_config=_vision("janus_vision_model", projection_dim=32, num_image_tokens=4),
            vq_config={"base_channels": 32, "num_embeddings": 16, "channel_multiplier": [1, 1]}
            | {"projection_dim": 32, "image_token_embed_dim": 32, "embed_dim": 4},
            **_IDS,
        )
    ),
    "ovis2": ImageType(
        lambda: CONFIG_MAPPING["ovis2"](
            text_config=_text("qwen2"),
            vision_config=_vision(
                "ovis2_vision_model", vocab_size=32, num_visual_indicator_tokens=5
            ),
            visual_indicator_token_ids=[110, 111, 112, 113, 114],
            vocab_size=VOCAB,
            hidden_size=32,
            **_IDS,
        )
    ),
    "llama4": ImageType(
        lambda: CONFIG_MAPPING["llama4"](
            text_config=_TEXT
            | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16}
            | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
            vision_config=_VISION
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
            | {"pixel_shuffle_ratio": 0.5, "rope_theta": 10000, "intermediate_size": 128},
            image_token_index=IMAGE,
        )
    ),
    "aria": ImageType(
        lambda: CONFIG_MAPPING["aria"](
            text_config=_text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
            vision_config=_vision("idefics3_vision"),
            projector_patch_to_query_dict={4: 2},
            image_token_index=IMAGE,
        ),
        lambda random, size: {"pixel_values": _pixels(random, 1, 3, 8, 8)},
    ),
    "deepseek_vl": ImageType(
        lambda: CONFIG_MAPPING["deepseek_vl"](
            text_config=_text("llama"),
            vision_config=_vision(_SIGLIP, vision_use_head=False),
            **_IDS,
        )
    ),
    "video_llama_3": ImageType(
        lambda: CONFIG_MAPPING["video_llama_3"](
            text_config=_text("qwen2"),
            vision_config=_vision("video_llama_3_vision"),
            **_IDS,
            video_token_id=VIDEO,
        ),
        lambda random, size: _patches(random, size, 48) | {"image_merge_sizes": torch.tensor([2])},
    ),
    "paddleocr_vl": ImageType(
        lambda: CONFIG_MAPPING["paddleocr_vl"](
            text_config=_TEXT | {"rope_parameters": _TURNS},
            vision_config=_VISION,
            **_IDS,
            **_BOTH,
        ),
        lambda random, size: (
            _patches(random, size) | {"pixel_values": _pixels(random, 4 * (4 + 2 * size), 3, 4, 4)}
        ),
        "mm_token_type_ids",
    ),
}

_SOUND = {
    "num_mel_bins": 8,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 16,
}
_HEARS = {"num_mel_bins": 8, "max_source_positions": 16, **_VISION}


def _hears(kind, audio, text, **more):
    return CONFIG_MAPPING[kind](audio_config=audio, text_config=text, **more)


def _mels(random, size, frames=32):
    """Frames of a recording, and which of them are sound."""
    seen = torch.ones(1, frames, dtype=torch.int64)
    seen[:, frames - 8 * size :] = 0
    return {
        "input_features": _pixels(random, 1, 8, frames) * seen[:, None],
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
AUDIO = {
    "qwen2_audio": ImageType(
        lambda: _hears("qwen2_audio", _SOUND, _text("qwen2"), audio_token_index=IMAGE),
        lambda random, size: _named("feature_attention_mask", random, size),
        count=lambda size: 8 - 2 * size,
    ),
    "voxtral": ImageType(
        lambda: _hears(
            "voxtral",
            {"model_type": "voxtral_encoder", **_HEARS, "intermediate_size": 128},
            _text("llama"),
            audio_token_id=IMAGE,
            hidden_size=32,
        ),
        lambda random, size: {"input_features": _pixels(random, 1, 8, 32)},
    ),
    "granite_speech": ImageType(
        lambda: CONFIG_MAPPING["granite_speech"](
            text_config=_text("granite"),
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
            projector_config=_VISION
            | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32, "vocab_size": 8},
            audio_token_index=IMAGE,
            has_lora_adapter=False,
            downsample_rate=2,
            window_size=4,
        ),
        lambda random, size: {"input_features": _pixels(random, 1, 16 + 8 * size, 8)},
    ),
    "granite_speech_plus": ImageType(
        lambda: CONFIG_MAPPING["granite_speech_plus"](
            text_config=_text("granite"),
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
            projector_config=_VISION
            | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32, "vocab_size": 8},
            audio_token_index=IMAGE,
            has_lora_adapter=False,
            downsample_rate=2,
            window_size=4,
        ),
        lambda random, size: {"input_features": _pixels(random, 1, 16 + 8 * size, 8)},
    ),
    "fun_asr_nano": ImageType(
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
            _text("qwen3"),
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
            "input_features": _pixels(random, 1, 16 + 8 * size, 16),
            "input_features_mask": torch.ones(1, 16 + 8 * size, dtype=torch.int64),
        },
    ),
    "glmasr": ImageType(
        lambda: _hears(
            "glmasr",
            {**_HEARS, "max_position_embeddings": 16, "num_key_value_heads": 4}
            | {"intermediate_size": 128},
            _text("llama"),
            audio_token_id=IMAGE,
        ),
        _mels,
    ),
    "audioflamingo3": ImageType(
        lambda: _hears("audioflamingo3", _HEARS, _text("qwen2"), audio_token_id=IMAGE),
        _mels,
    ),
    "moss_transcribe_diarize": ImageType(
        lambda: _hears(
            "moss_transcribe_diarize",
            {**_HEARS, "intermediate_size": 48},
            _text("qwen3"),
            audio_token_id=IMAGE,
            audio_chunk_size=5120,
        ),
        lambda random, size: (
            _mels(random, size) | {"padding_mask": torch.ones(1, 5120, dtype=torch.bool)}
        ),
        count=lambda size: 4 - size,
    ),
    "phi4_multimodal": ImageType(
        lambda: CONFIG_MAPPING["phi4_multimodal"](
            **_TEXT,
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
            "audio_input_features": _pixels(random, 1, 32 + 16 * size, 8),
            "audio_embed_sizes": torch.tensor([4 + 2 * size]),
        },
        count=lambda size: 4 + 2 * size,
    ),
    "qwen3_asr": ImageType(
        lambda: _hears(
            "qwen3_asr",
            _SOUND
            | {"output_dim": 32, "downsample_hidden_size": 8, "n_window": 50}
            | {"n_window_infer": 800},
            _text("qwen3"),
            audio_token_id=IMAGE,
        ),
        lambda random, size: _mels(random, size, 100),
    ),
}
EVERY = {**TYPES, **AUDIO}
#: Types whose encoders draw noise at every call: such prompts are refused.
NOISY = {
    "vibevoice_asr": ImageType(
        lambda: CONFIG_MAPPING["vibevoice_asr"](
            text_config=_text("qwen2"),
            acoustic_tokenizer_encoder_config=_CODEC | {"hidden_size": 16},
            semantic_tokenizer_encoder_config=_CODEC | {"hidden_size": 24},
            audio_token_id=IMAGE,
            audio_bos_token_id=FIRST,
            audio_eos_token_id=LAST,
            acoustic_tokenizer_chunk_size=64,
        ),
        lambda random, size: {
            "input_values": _pixels(random, 1, 1, 32 + 16 * size),
            "padding_mask": torch.ones(1, 32 + 16 * size, dtype=torch.bool),
        },
        count=lambda size: 8 + 4 * size,
    ),
}


def made(kind, seed=0):
    """A tiny random model of this type."""
    torch.manual_seed(seed)
    config = {**EVERY, **NOISY}[kind].config()
    model = auto_class(config).from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and weight.is_floating_point():
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.3)
            elif not bool(weight.isfinite().all()) or "norm" not in name:
                weight.fill_(0.01)
        if kind == "phi4_multimodal":  # where it writes a placeholder transformers' own fails
            model.get_output_embeddings().weight[IMAGE] = 0
    return model.float().eval()


@torch.inference_mode()
def prompt(kind, model, seed, ahead=3, behind=5, size=0):
    """Token ids [L] of a prompt with a picture in it, and what stands beside them."""
    random, made_of = torch.Generator().manual_seed(seed), {**EVERY, **NOISY}[kind]
    kwargs = made_of.picture(random, size)
    told = made_of.count
    count = features(model, kwargs) if told is None else told(size)
    words = torch.randint(6, 90, (ahead + behind,), generator=random).tolist()
    ids = [*words[:ahead], FIRST, *[IMAGE] * count, LAST, *words[ahead:]]
    typed = made_of.typed
    if typed is not None:
        kwargs[typed] = torch.tensor([[int(token == IMAGE) for token in ids]])
    return ids, kwargs


def features(model, kwargs):
    """How many tokens a picture takes."""
    names = ("get_image_features", "get_audio_features")
    parts = [
        part
        for part in (model, getattr(model, "model", model))
        if any(hasattr(part, n) for n in names)
    ]
    reads = next(getattr(parts[0], name) for name in names if hasattr(parts[0], name))
    found = reads(**kwargs)
    pooled = getattr(found, "pooler_output", found)
    found = found.last_hidden_state if pooled is None else pooled
    if isinstance(found, (tuple, list)):
        return sum(one.shape[0] for one in found)
    return found.shape[:-1].numel()
