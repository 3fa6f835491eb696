"""What configurations of tiny random models with images or sound are made of."""

import inspect
from dataclasses import dataclass

import torch

VOCAB, IMAGE, VIDEO, FIRST, LAST = 128, 100, 101, 102, 103

TEXT = {
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
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}


def text(kind, **more):
    return {**TEXT, "model_type": kind, **more}


def vision(kind, **more):
    return {**VISION, "model_type": kind, **more}


def pixels(random, *shape):
    return torch.randn(*shape, generator=random)


def of_text(model):
    """What reads a text alone: the language model inside of a class that wants pictures."""
    if model.config.model_type.startswith("kosmos"):
        return model.text_model
    wants = inspect.signature(model.generate).parameters.get("pixel_values")
    return model if wants is None or wants.default is not wants.empty else model.language_model


def given_to(model, ids, kwargs):
    """The tokens, and what stands beside them, as transformers is given a prompt.

    GIT has no tokens for its picture, padding here; PaliGemma's class takes a text alone for a
    block whose tokens see each other, or not, by its attention, where nobody says which it is;
    Idefics' one beside an image that nobody sees.
    """
    kind = model.config.model_type
    if kind == "git" and kwargs:
        return [token for token in ids if token], kwargs
    if kind == "idefics" and not kwargs:
        none = torch.zeros(1, 1, 3, 8, 8)
        return ids, {"pixel_values": none, "image_attention_mask": none.new_zeros(1, len(ids), 1)}
    if kind == "paligemma" and not kwargs:
        return ids, {"token_type_ids": torch.ones(1, len(ids), dtype=torch.int64)}
    return ids, kwargs


def one_picture(random, size):
    """One picture of one size."""
    return {"pixel_values": pixels(random, 1, 3, 8, 8)}


@dataclass(frozen=True)
class MediaType:
    """How a tiny model of a type is made, and the pictures or the sound that it reads."""

    config: object  #: makes the configuration
    picture: object = one_picture  #: makes the arguments of one picture: random numbers, a size
    typed: str | None = None  #: the argument that says which tokens are pictures, if one does
    count: object = None  #: how many tokens a recording of a size takes, where no part says so
    #: makes arguments that have a place for each token: ids, the arguments of the picture
    beside: object = None
    image: int = IMAGE  #: the token that stands for it
    first: bool = False  #: whether it stands ahead of all words


def several_pictures(random, size):
    """A picture of the type's own axis of pictures."""
    return {"pixel_values": pixels(random, 1, 1 + size, 3, 8, 8)}


def tiles(random, size):
    """A picture in tiles, and the whole of it."""
    wide = 8 * (1 + size)
    return {
        "pixel_values": pixels(random, 1, 2 + size, 3, 8, 8),
        "image_sizes": torch.tensor([[8, wide]]),
    }


def patches(random, size, channels=3 * 2 * 4 * 4):
    """Patches of a picture of any size, merged by two and two."""
    high, wide = 4, 4 + 2 * size
    grid = torch.tensor([[1, high, wide]])
    return {"pixel_values": pixels(random, high * wide, channels), "image_grid_thw": grid}


def sized_picture(random, size):
    """A picture of its own size."""
    wide = 16 + 8 * size
    return {
        "pixel_values": pixels(random, 1, 3, 16, wide),
        "image_sizes": torch.tensor([[16, wide]]),
    }


def flat_patches(random, size):
    """Flat patches behind their rows and columns, some of which are padding: Kosmos-2.5."""
    flat = pixels(random, 1, 8, 2 + 3 * 4 * 4)
    at = torch.arange(8)
    flat[0, :, 0], flat[0, :, 1] = 1 + at // 4, 1 + at % 4
    there = (at < 6 + 2 * size).long()[None]
    return {"flattened_patches": flat * there[..., None]}


def packed_patches(random, size):
    """Patches of a picture of any size in one row: MiniCPM."""
    high, wide = 4, 4 + 4 * size
    return {
        "pixel_values": pixels(random, 1, 3, 16, high * wide * 16),
        "target_sizes": torch.tensor([[high, wide]]),
    }
