"""Pictures as processors make them for a model, guessed from its configuration.

Families give their forward a picture in one of a dozen forms: whole, in tiles, in patches with a
grid... Each is tried until one is read by the model's own class. Types for which none is right are
made by hand in `media_models.py`.
"""

import inspect

import media_models
import torch
from tiny_configurations import config_for, randomise
from transformers import AutoModelForImageTextToText

#: Arguments that say which tokens of a prompt are pictures.
TYPED = ("mm_token_type_ids", "token_type_ids")


def _named(config, *names):
    """The first of these fields of a configuration or of its vision part; None if it has none."""
    parts = (config, getattr(config, "vision_config", None))
    found = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in found if value), None)


class PictureForms:
    """What a picture may look like to a model: `size` 0 or 1, with numbers of its own."""

    def __init__(self, config):
        size = _named(config, "image_size") or 32
        self.high, self.wide = size if isinstance(size, (list, tuple)) else (size, size)
        patch = _named(config, "model_patch_size", "patch_size", "spatial_patch_size") or 4
        self.patch = patch[-1] if isinstance(patch, (list, tuple)) else patch
        self.channels = _named(config, "in_channels", "num_channels", "in_chans") or 3
        self.frames = _named(config, "temporal_patch_size", "patch_temporal") or 1
        self.merge = _named(config, "spatial_merge_size", "merge_size") or 2
        fine = getattr(config, "high_res_vision_config", None)
        self.fine = getattr(fine, "image_size", 32)
        self.random = torch.Generator()

    def _pixels(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def _sides(self, size):
        return 2 * self.merge, (2 + size) * self.merge

    def _grid(self, size):
        return {"image_grid_thw": torch.tensor([[1, *self._sides(size)]])}

    def patches_in_a_grid(self, size):
        """Flat patches, merged by squares: Qwen-VL and its kin."""
        high, wide = self._sides(size)
        flat = self.channels * self.frames * self.patch**2
        return {"pixel_values": self._pixels(high * wide, flat)} | self._grid(size)

    def square_patches_in_a_grid(self, size):
        """The same, patches not flattened: Kimi."""
        high, wide = self._sides(size)
        shape = high * wide, self.channels, self.patch, self.patch
        return {"pixel_values": self._pixels(*shape)} | self._grid(size)

    def whole(self, size):
        """One picture of one size: LLaVA."""
        return {"pixel_values": self._pixels(1, self.channels, self.high, self.wide)}

    def several(self, size):
        """One picture, or two of one place: Idefics."""
        return {"pixel_values": self._pixels(1, 1 + size, self.channels, self.high, self.wide)}

    def eight_high(self, size):
        """A small picture of its own width: models whose vocabulary has pictures."""
        sizes = torch.tensor([[8, 8 + 4 * size]])
        return {"pixel_values": self._pixels(1, 3, 8, 8 + 4 * size), "image_sizes": sizes}

    def of_its_own_size(self, size):
        """Pixtral."""
        high, wide = (self.patch * side for side in self._sides(size))
        sizes = torch.tensor([[high, wide]])
        return {"pixel_values": self._pixels(1, self.channels, high, wide), "image_sizes": sizes}

    def shaped_patches(self, size):
        """Flat patches with a shape and a mask: SigLIP 2."""
        high, wide = 4, 4 + 2 * size
        return {
            "pixel_values": self._pixels(1, high * wide, self.channels * self.patch**2),
            "spatial_shapes": torch.tensor([[high, wide]]),
            "pixel_attention_mask": torch.ones(1, high * wide, dtype=torch.int64),
        }

    def coarse_and_fine(self, size):
        """The picture at two resolutions: DeepSeek-VL's hybrid."""
        return self.whole(size) | {
            "high_res_pixel_values": self._pixels(1, 3, self.fine, self.fine)
        }

    def tiles(self, size):
        """Tiles of a picture behind the whole of it: LLaVA-NeXT."""
        return {
            "pixel_values": self._pixels(1, 2 + size, self.channels, self.high, self.wide),
            "image_sizes": torch.tensor([[self.high, self.wide * (1 + size)]]),
        }

    def placed_patches(self, size):
        """Flat patches with their places: Gemma 4."""
        high, wide = self._sides(size)
        places = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1)[None]
        flat = self.channels * self.patch**2
        return {"pixel_values": self._pixels(1, high * wide, flat), "image_position_ids": places}

    def masked_tiles(self, size):
        """One tile, or two, and that none is padding: Granite Docling."""
        there = torch.ones(1, 1 + size, dtype=torch.bool)
        return self.several(size) | {"pixel_attention_mask": there}

    def patches_in_a_flat_grid(self, size):
        """Flat patches of one moment: Nemotron's."""
        high, wide = self._sides(size)
        flat = self._pixels(high * wide, self.channels * self.patch**2)
        return {"pixel_values": flat, "image_grid_hw": torch.tensor([[high, wide]])}

    def pooled_crops(self, size):
        """One crop, or two, in patches, of which each token of the prompt pools two: Molmo."""
        count = (self.high // self.patch) * (self.wide // self.patch)
        pools = torch.arange((1 + size) * count).reshape(-1, 2)
        rows = count // 2
        return {
            "pixel_values": self._pixels(1 + size, count, self.channels * self.patch**2),
            "image_token_pooling": pools,
            "image_grids": torch.tensor([[rows, 1, rows * size, size]]),
        }

    def every(self):
        """All of them."""
        return (
            self.patches_in_a_grid,
            self.whole,
            self.eight_high,
            self.several,
            self.of_its_own_size,
            self.square_patches_in_a_grid,
            self.shaped_patches,
            self.coarse_and_fine,
            self.tiles,
            self.placed_patches,
            self.masked_tiles,
            self.patches_in_a_flat_grid,
            self.pooled_crops,
        )


def built(kind):
    """A tiny random model of this type, as images are read by it."""
    torch.manual_seed(0)
    return randomise(AutoModelForImageTextToText.from_config(config_for(kind)))


def prompts(model, reads, first=0):
    """Three prompts with unequal pictures, in the first form with which `reads` has no error.

    Raises ValueError with what each form was answered.
    """
    forms, said = PictureForms(model.config), []
    takes = inspect.signature(model.forward).parameters
    for form in forms.every():
        try:
            made = []
            for number in range(3):
                forms.random.manual_seed(first + number)
                picture = {name: v for name, v in form(number % 2).items() if name in takes}
                made.append(_prompt(model, picture, first + number, 2 + 3 * number, takes))
                reads(*made[-1])
            return made
        except Exception as error:  # of whatever part of the model it does not fit
            said.append(f"{form.__name__}: {type(error).__name__}: {str(error)[:80]}")
    raise ValueError("; ".join(said))


@torch.inference_mode()
def _prompt(model, picture, seed, ahead, takes):
    image = _named(model.config, "image_token_id", "image_token_index", "im_patch_id")
    image = media_models.IMAGE if image is None else image
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(6, 90, (ahead + 5,), generator=random).tolist()
    words = [word if word != image else word + 1 for word in words]
    ids = [*words[:ahead], *[image] * media_models.features(model, picture), *words[ahead:]]
    typed = torch.tensor([[int(token == image) for token in ids]])
    return ids, picture | {name: typed for name in TYPED if name in takes}
