"""What a model's encoder has made of images and sound, kept by contents: none is read twice.

A prompt's images come as stacked tensors. They are told apart again (`split`), each is read alone
and kept under a digest of what the encoder was given, and the call goes on with all of them side by
side, as the family's own function returns them. So an image is known wherever it stands: in a
second question, as one of several, beside others that are new. Recordings are kept as a prompt has
them.
"""

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from outrider.models.config import found, read
from outrider.models.model_lock import alone, instead
from outrider.types.models import update_digest

IMAGES, SOUND = "get_image_features", "get_audio_features"  #: functions of transformers' models
_GRIDS = ("image_grid_thw", "video_grid_thw", "image_grid_hw")
_FLAT = ("pixel_values", "pixel_values_videos")  #: patches of all images in one axis, by grids
_OF_ONE_PROMPT = {"pixel_values", "pixel_attention_mask"}  #: behind an axis of prompts: Idefics
_LEFT_OUT = ("hidden_states", "attentions")


class EncoderCache:
    """What encoders have made of images or sound, of the last use, in at most `most_bytes`.

    One belongs to one thread.

    >>> EncoderCache(1 << 20).bytes
    0
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        #: by model and digest, with its bytes
        self._kept: OrderedDict[tuple[torch.nn.Module, bytes], tuple[object, int]] = OrderedDict()

    @contextmanager
    def standing_in(self, model: torch.nn.Module) -> Iterator[None]:
        """Answer for the model's own functions for the time of a call of this thread."""
        part = read(model, "model", torch.nn.Module) or model  # the outer class asks it
        with ExitStack() as stack:
            for name in (IMAGES, SOUND):
                own = found(part, name)
                if own is not None:
                    ours = self._reader(part, name, own)
                    stack.enter_context(instead(alone(model), part, name, ours))
            yield

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()
        self.bytes = 0

    def _reader(
        self, part: torch.nn.Module, name: str, own: Callable[..., object]
    ) -> Callable[..., object]:
        """A function like a model's own, which runs it for what is not known alone."""
        takes = inspect.signature(own)

        def read(*args: object, **kwargs: object) -> object:
            given = dict(takes.bind(*args, **kwargs).arguments)
            given |= given.pop("kwargs", {})
            each = split(given) if name == IMAGES else [given]
            return merged([self._one(part, name, own, one) for one in each])

        return read

    def _one(
        self,
        part: torch.nn.Module,
        name: str,
        own: Callable[..., object],
        given: Mapping[str, object],
    ) -> object:
        """What the encoder makes of one image, or of a prompt's sound."""
        found = hashlib.sha256(name.encode())
        for argument in sorted(given):
            found.update(argument.encode())
            update_digest(found, given[argument])
        key = part, found.digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        made = _slim(own(**given))
        size = _bytes(made)
        self._kept[key] = made, size
        self.bytes += size
        while self.bytes > self.most_bytes:
            self.bytes -= self._kept.popitem(last=False)[1][1]
        return made


def split(given: Mapping[str, object]) -> list[dict[str, object]]:
    """The arguments for each image alone; all of them as one where they cannot be told apart.

    >>> [one["pixel_values"].shape for one in split({"pixel_values": torch.zeros(2, 3, 4, 4)})]
    [torch.Size([1, 3, 4, 4]), torch.Size([1, 3, 4, 4])]
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    pixels = tensors.get("pixel_values")
    if pixels is not None and pixels.dim() == 5 and pixels.shape[0] == 1:
        if set(tensors) <= _OF_ONE_PROMPT:  # images of zeros are padding, which nobody reads
            some = pixels[0].flatten(1).any(1).nonzero()[:, 0].tolist()
            parts = [
                {name: value[:, at : at + 1] for name, value in tensors.items()} for at in some
            ]
            return [{**given, **part} for part in parts] or [dict(given)]
    if "image_token_pooling" in tensors:  # which counts patches of all crops
        return [dict(given)]
    grids = next((tensors[name] for name in _GRIDS if name in tensors), None)
    sizes: dict[str, list[int]] = {}
    for name in _FLAT if grids is not None else ():
        if name in tensors:
            assert grids is not None
            sizes[name] = grids.long().prod(-1).tolist()
            if sum(sizes[name]) != len(tensors[name]):
                return [dict(given)]
    counts = {
        len(sizes[name]) if name in sizes else value.shape[0] if value.dim() else 1
        for name, value in tensors.items()
    }
    if len(counts) != 1 or (grids is None and pixels is not None and pixels.dim() < 3):
        return [dict(given)]
    pieces = {name: torch.split(value, sizes.get(name, 1)) for name, value in tensors.items()}
    return [
        {**given, **{name: parts[at] for name, parts in pieces.items()}} for at in range(*counts)
    ]


def merged(each: Sequence[Any]) -> Any:
    """What an encoder returns of several images, of what it returns of each."""
    first = each[0]
    if len(each) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(tuple(each))
    if isinstance(first, ModelOutput):
        fields = {name: [one[name] for one in each] for name in first.keys()}
        return type(first)(
            **{
                name: _by_layer(values) if name == "deepstack_features" else merged(values)
                for name, values in fields.items()
            }
        )
    assert isinstance(first, (list, tuple))
    return type(first)(part for one in each for part in one)


def _by_layer(each: Sequence[Sequence[Any]]) -> list[Any]:
    """States of several layers, of all images together; behind a layer's number, if it has one."""
    return [
        (layer[0][0], merged([states for _, states in layer]))
        if isinstance(layer[0], tuple) and type(layer[0][0]) is int
        else merged(layer)
        for layer in zip(*each, strict=True)
    ]


def _slim(made: object) -> object:
    """What is used of an encoder's output: neither all layers' states, nor those ahead of the last
    step."""
    if not isinstance(made, ModelOutput):
        return made
    pooled = vars(made).get("pooler_output")
    if pooled is not None and "pooler_output" not in made.keys():  # Idefics 3, transformers 5.17
        return BaseModelOutputWithPooling(pooler_output=pooled)
    left = {*_LEFT_OUT, *(("last_hidden_state",) if made.get("pooler_output") is not None else ())}
    return type(made)(**{name: value for name, value in made.items() if name not in left})


def _bytes(made: object) -> int:
    """How much memory tensors take."""
    if isinstance(made, Tensor):
        return made.numel() * made.element_size()
    if isinstance(made, Mapping):
        return sum(map(_bytes, made.values()))
    return sum(map(_bytes, made)) if isinstance(made, (list, tuple)) else 0
