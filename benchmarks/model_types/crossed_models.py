"""Tiny random models some of whose layers attend to images beside the text."""

import torch
from tiny_media import TEXT, VOCAB, MediaType, pixels
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def _crossed(random, size):
    """A picture in as many tiles as its shape asks for, of two."""
    tiles = torch.tensor([[[1, size]]])
    return {
        "pixel_values": pixels(random, 1, 1, 2, 3, 8, 8) * tiles[..., None, None, None],
        "aspect_ratio_ids": torch.tensor([[1 + size]]),
        "aspect_ratio_mask": tiles,
    }


def _seen(ids, kwargs):
    """Tokens from a picture's on see its tiles."""
    seen = torch.tensor(ids).eq(VOCAB).cumsum(0)[None, :, None, None]
    return {"cross_attention_mask": seen * kwargs["aspect_ratio_mask"]}


def _pictures(random, size):
    """One picture, or two."""
    return {"pixel_values": pixels(random, 1, 1 + size, 3, 8, 8)}


def _latest(ids, kwargs):
    """Tokens see the last picture ahead of them."""
    images = kwargs["pixel_values"].shape[1]
    behind = torch.tensor(ids).eq(VOCAB - 1).cumsum(0)[None, :, None]
    return {"image_attention_mask": (behind == torch.arange(images) + 1).long()}


def _idefics(interval, **more):
    return MediaType(
        lambda: CONFIG_MAPPING["idefics"](
            vocab_size=VOCAB - 2,
            additional_vocab_size=2,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=256,
            alpha_initializer="ones",
            alpha_type="vector",
            cross_layer_interval=interval,
            vision_config={
                "embed_dim": 24,
                "image_size": 8,
                "patch_size": 4,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
            **more,
        ),
        _pictures,
        count=lambda size: 1 + size,
        beside=_latest,
        image=VOCAB - 1,
    )


TYPES = {
    "idefics": _idefics(
        2,
        qk_layer_norms=True,
        use_resampler=True,
        perceiver_config={
            "use_resampler": True,
            "resampler_n_latents": 3,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
        },
    ),
    "mllama": MediaType(
        lambda: CONFIG_MAPPING["mllama"](
            text_config=TEXT
            | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": 8,
                "patch_size": 4,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
            image_token_index=VOCAB,  # behind what the output layer knows
        ),
        _crossed,
        count=lambda size: 1,
        beside=_seen,
        image=VOCAB,
    ),
}
