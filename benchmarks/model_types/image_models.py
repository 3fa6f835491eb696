"""Tiny random models of types whose prompts hold images."""

import crossed_models
import torch
from tiny_configurations import config_for
from tiny_media import (
    FIRST,
    IMAGE,
    LAST,
    TEXT,
    VIDEO,
    VISION,
    VOCAB,
    MediaType,
    flat_patches,
    one_picture,
    packed_patches,
    patches,
    pixels,
    several_pictures,
    sized_picture,
    text,
    tiles,
    vision,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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


def _llava(kind, **more):
    parts = {"text_config": text("llama"), "vision_config": vision("clip_vision_model")}
    return CONFIG_MAPPING[kind](**parts, **_INDEX, **more)


def _turned(kind, vision, text, **more):
    return CONFIG_MAPPING[kind](
        text_config=TEXT | {"rope_parameters": _TURNS} | text,
        vision_config=_GRID | vision,
        **_IDS,
        **more,
    )


def _queried(kind, text, qformer, picture, count=lambda size: 4, **more):
    """A Q-Former compresses a picture for a language model of its own class."""
    parts = {
        "vision_config": {**_SMALL, "image_size": 8, "patch_size": 4},
        "qformer_config": {**_SMALL, "encoder_hidden_size": 32, "vocab_size": 64, **qformer},
    }
    return MediaType(
        lambda: CONFIG_MAPPING[kind](text_config=text, num_query_tokens=4, **parts, **more),
        picture,
        count=count,
    )


def _asked(random, shape):
    """A picture with the question that its Q-Former is asked."""
    ids = torch.randint(3, 60, (1, 4), generator=random)
    return {
        "pixel_values": pixels(random, *shape),
        "qformer_input_ids": ids,
        "qformer_attention_mask": torch.ones_like(ids),
    }


def _placed(ids, kwargs):
    """A mask of the picture's places, for which a prompt has no token of its own: Kosmos."""
    return {"image_embeds_position_mask": torch.tensor(ids)[None] == IMAGE}


def _kosmos(kind, vision, picture):
    parts = {
        "text_config": {
            "vocab_size": VOCAB,
            "embed_dim": 32,
            "ffn_dim": 48,
            "layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 256,
            "scale_embedding": False,
            "tie_word_embeddings": False,
        },
        "vision_config": {**_SMALL, **vision},
    }
    return MediaType(
        lambda: CONFIG_MAPPING[kind](**parts, latent_query_num=4, tie_word_embeddings=False),
        picture,
        count=lambda size: 4,
        beside=_placed,
    )


def _block(ids, kwargs):
    """Types of a prompt whose tokens see each other."""
    return {"token_type_ids": torch.zeros(1, len(ids), dtype=torch.int64)}


def _named(kind, **more):
    """The configuration that the sweep guesses, told what stands for pictures."""
    config = config_for(kind)
    for name, value in {**_IDS, **more}.items():
        setattr(config, name, value)
    return config


_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_OPT = {"model_type": "opt", **_SMALL, "vocab_size": VOCAB, "ffn_dim": 48}
_OPT |= {"word_embed_proj_dim": 32, "max_position_embeddings": 256}
_SIGLIP = "siglip_vision_model"
TYPES = {
    **crossed_models.TYPES,
    "llava": MediaType(lambda: _llava("llava")),
    "vipllava": MediaType(lambda: _llava("vipllava", vision_feature_layers=[-1, -2])),
    "llava_next": MediaType(
        lambda: _llava("llava_next", image_grid_pinpoints=[[8, 8], [8, 16]]), tiles
    ),
    "llava_onevision": MediaType(
        lambda: CONFIG_MAPPING["llava_onevision"](
            text_config=text("qwen2"),
            vision_config=vision(_SIGLIP, vision_use_head=False),
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=[[8, 8], [8, 16]],
        ),
        tiles,
    ),
    "aya_vision": MediaType(
        lambda: CONFIG_MAPPING["aya_vision"](
            text_config=text("cohere2", sliding_window=16),
            vision_config=vision(_SIGLIP, vision_use_head=False),
            downsample_factor=2,
            adapter_layer_norm_eps=1e-6,
            **_INDEX,
        )
    ),
    "cohere2_vision": MediaType(
        lambda: CONFIG_MAPPING["cohere2_vision"](
            text_config=text("cohere2", sliding_window=16),
            vision_config=vision(_SIGLIP, vision_use_head=False),
            downsample_factor=2,
            alignment_intermediate_size=32,
            **_IDS,
        )
    ),
    "internvl": MediaType(
        lambda: CONFIG_MAPPING["internvl"](
            text_config=text("qwen2"),
            vision_config=vision("internvl_vision", image_size=[8, 8], patch_size=[4, 4]),
            downsample_ratio=0.5,
            **_IDS,
        )
    ),
    "gemma3": MediaType(
        lambda: CONFIG_MAPPING["gemma3"](
            text_config=text("gemma3_text", sliding_window=8)
            | {"layer_types": ["sliding_attention", "full_attention"]},
            vision_config=vision(_SIGLIP, vision_use_head=False),
            mm_tokens_per_image=4,
            boi_token_index=FIRST,
            eoi_token_index=LAST,
            tie_word_embeddings=False,
            **_INDEX,
        ),
        typed="token_type_ids",
    ),
    "idefics2": MediaType(
        lambda: CONFIG_MAPPING["idefics2"](
            text_config=text("mistral", sliding_window=None),
            vision_config=VISION,
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
        several_pictures,
    ),
    "idefics3": MediaType(
        lambda: CONFIG_MAPPING["idefics3"](
            text_config=text("llama"), vision_config=VISION, scale_factor=2, **_IDS
        ),
        several_pictures,
    ),
    "smolvlm": MediaType(
        lambda: CONFIG_MAPPING["smolvlm"](
            text_config=text("llama"), vision_config=VISION, scale_factor=2, **_IDS
        ),
        several_pictures,
    ),
    "mistral3": MediaType(
        lambda: CONFIG_MAPPING["mistral3"](
            text_config=text("mistral", sliding_window=None),
            vision_config=vision("pixtral", image_size=32, head_dim=8),
            spatial_merge_size=2,
            **_INDEX,
        ),
        sized_picture,
    ),
    "lighton_ocr": MediaType(
        lambda: CONFIG_MAPPING["lighton_ocr"](
            text_config=text("qwen3"),
            vision_config=vision("pixtral", image_size=32, head_dim=8),
            spatial_merge_size=2,
            **_IDS,
        ),
        sized_picture,
    ),
    "qwen2_vl": MediaType(
        lambda: _turned("qwen2_vl", {"embed_dim": 32, "mlp_ratio": 2}, {}, **_BOTH),
        patches,
        "mm_token_type_ids",
    ),
    "qwen2_5_vl": MediaType(
        lambda: _turned(
            "qwen2_5_vl", {"fullatt_block_indexes": [1], "window_size": 16}, {}, **_BOTH
        ),
        patches,
        "mm_token_type_ids",
    ),
    "qwen3_vl": MediaType(
        lambda: _turned(
            "qwen3_vl",
            {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            {},
            **_BOTH,
        ),
        patches,
        "mm_token_type_ids",
    ),
    "qwen3_vl_moe": MediaType(
        lambda: _turned(
            "qwen3_vl_moe",
            {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **_BOTH,
        ),
        patches,
        "mm_token_type_ids",
    ),
    "glm4v": MediaType(
        lambda: _turned("glm4v", {"image_size": 16}, {"partial_rotary_factor": 1.0}),
        patches,
        "mm_token_type_ids",
    ),
    "glm46v": MediaType(
        lambda: CONFIG_MAPPING["glm46v"](
            text_config=text("glm4v_text", rope_parameters=_TURNS),
            vision_config={**_GRID, "model_type": "glm4v_vision", "image_size": 16},
            **_IDS,
        ),
        patches,
        "mm_token_type_ids",
    ),
    "got_ocr2": MediaType(
        lambda: CONFIG_MAPPING["got_ocr2"](
            text_config=text("qwen2"),
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
        lambda random, size: {"pixel_values": pixels(random, 1, 3, 32, 32)},
    ),
    "janus": MediaType(
        lambda: CONFIG_MAPPING["janus"](
            text_config=text("llama"),
            vision_config=vision("janus_vision_model", projection_dim=32, num_image_tokens=4),
            vq_config={"base_channels": 32, "num_embeddings": 16, "channel_multiplier": [1, 1]}
            | {"projection_dim": 32, "image_token_embed_dim": 32, "embed_dim": 4},
            **_IDS,
        )
    ),
    "ovis2": MediaType(
        lambda: CONFIG_MAPPING["ovis2"](
            text_config=text("qwen2"),
            vision_config=vision(
                "ovis2_vision_model", vocab_size=32, num_visual_indicator_tokens=5
            ),
            visual_indicator_token_ids=[110, 111, 112, 113, 114],
            vocab_size=VOCAB,
            hidden_size=32,
            **_IDS,
        )
    ),
    "llama4": MediaType(
        lambda: CONFIG_MAPPING["llama4"](
            text_config=TEXT
            | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16}
            | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
            vision_config=VISION
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
            | {"pixel_shuffle_ratio": 0.5, "rope_theta": 10000, "intermediate_size": 128},
            image_token_index=IMAGE,
        )
    ),
    "aria": MediaType(
        lambda: CONFIG_MAPPING["aria"](
            text_config=text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
            vision_config=vision("idefics3_vision"),
            projector_patch_to_query_dict={4: 2},
            image_token_index=IMAGE,
        ),
        lambda random, size: {"pixel_values": pixels(random, 1, 3, 8, 8)},
    ),
    "deepseek_vl": MediaType(
        lambda: CONFIG_MAPPING["deepseek_vl"](
            text_config=text("llama"),
            vision_config=vision(_SIGLIP, vision_use_head=False),
            **_IDS,
        )
    ),
    "video_llama_3": MediaType(
        lambda: CONFIG_MAPPING["video_llama_3"](
            text_config=text("qwen2"),
            vision_config=vision("video_llama_3_vision"),
            **_IDS,
            video_token_id=VIDEO,
        ),
        lambda random, size: patches(random, size, 48) | {"image_merge_sizes": torch.tensor([2])},
    ),
    "blip-2": _queried("blip-2", _OPT, {}, one_picture, **_INDEX),
    "instructblip": _queried(
        "instructblip",
        text("llama"),
        {},
        lambda random, size: _asked(random, (1, 3, 8, 8)),
        **_INDEX,
    ),
    "instructblipvideo": _queried(
        "instructblipvideo",
        text("llama"),
        {},
        lambda random, size: _asked(random, (1, 4, 3, 8, 8)),
        count=lambda size: 16,
        video_token_index=IMAGE,
    ),
    "kosmos-2": _kosmos("kosmos-2", {"image_size": 8, "patch_size": 4}, one_picture),
    "kosmos-2.5": _kosmos(
        "kosmos-2.5",
        {"patch_embed_hidden_size": 3 * 4 * 4, "head_dim": 8, "max_num_patches": 64},
        flat_patches,
    ),
    "paligemma": MediaType(
        lambda: CONFIG_MAPPING["paligemma"](
            text_config=text("gemma"),
            vision_config=vision(_SIGLIP, vision_use_head=False, projection_dim=32),
            projection_dim=32,
            vocab_size=VOCAB,
            tie_word_embeddings=False,
            **_INDEX,
        ),
        beside=_block,
    ),
    "git": MediaType(
        lambda: CONFIG_MAPPING["git"](
            **_SMALL,
            vocab_size=VOCAB,
            max_position_embeddings=256,
            vision_config={**_SMALL, "image_size": 8, "patch_size": 4},
        ),
        count=lambda size: 5,
        image=0,
        first=True,
    ),
    **{
        kind: MediaType(lambda kind=kind: _named(kind), packed_patches)
        for kind in ("minicpm_ocr", "minicpmv4_6")
    },
    "minicpmv4_7": MediaType(
        lambda: _named("minicpmv4_7", image_start_id=FIRST, image_end_id=LAST, newline_id=10),
        packed_patches,
        "mm_token_type_ids",
    ),
    "paddleocr_vl": MediaType(
        lambda: CONFIG_MAPPING["paddleocr_vl"](
            text_config=TEXT | {"rope_parameters": _TURNS},
            vision_config=VISION,
            **_IDS,
            **_BOTH,
        ),
        lambda random, size: (
            patches(random, size) | {"pixel_values": pixels(random, 4 * (4 + 2 * size), 3, 4, 4)}
        ),
        "mm_token_type_ids",
    ),
}
