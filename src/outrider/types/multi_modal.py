"""What a model's own processor makes of images or sound in a prompt, beside its token ids."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_CROSSED = "cross_attention_mask"  #: [1, L, images, tiles], of models with cross attention
#: Names of tensors [1, L, ...] that have a place for each token of the prompt.
PER_TOKEN = frozenset(
    {
        "attention_mask",
        _CROSSED,
        "image_embeds_position_mask",
        "mm_token_type_ids",
        "token_type_ids",
    }
)


@dataclass(frozen=True, eq=False)
class MultiModalInputs:
    """Images or sound of one prompt, as the model's own processor made them. One row's.

    kwargs        what the model's forward is given beside the ids, by name: pixel_values,
                  image_grid_thw, input_features...; tensors, or lists of them
    placeholders  token ids that stand for them in a prompt

    >>> inputs = MultiModalInputs({"pixel_values": torch.zeros(1, 3, 2, 2)}, frozenset({9}))
    >>> inputs.end((5, 9, 9, 6)), inputs.key((5, 9, 6))[0], inputs.key((5, 9, 6))[1] < 0
    (3, 5, True)
    """

    kwargs: Mapping[str, object]
    placeholders: frozenset[int]

    def end(self, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt go up to its last placeholder; 0 if it has none."""
        places = (at for at in range(len(prompt), 0, -1) if prompt[at - 1] in self.placeholders)
        return next(places, 0)

    @cached_property
    def digest(self) -> int:
        """A number below zero that stands for the contents: what is read of them is theirs."""
        found = hashlib.sha256()
        for name in sorted(self.kwargs):
            value = self.kwargs[name]
            if name == _CROSSED and isinstance(value, Tensor):
                value = torch.unique_consecutive(
                    value, dim=1
                )  # what is seen, not by how many tokens
            elif name in PER_TOKEN:
                continue
            found.update(name.encode())
            update_digest(found, value)
        return -1 - int.from_bytes(found.digest()[:16], "big")

    def key(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The prompt, each placeholder replaced by what it stands for: equal keys read alike."""
        stands, digest = self.placeholders, self.digest
        key = [digest if token in stands else token for token in prompt]
        if _CROSSED in self.kwargs and key:  # text ahead of an image reads otherwise beside it
            key[0] = digest - (1 + prompt[0] << 128)
        return tuple(key)

    def beginning(self, count: int) -> dict[str, object]:
        """The arguments for the first `count` tokens; tensors by token are cut to them."""
        return {
            name: value[:, :count] if name in PER_TOKEN and isinstance(value, Tensor) else value
            for name, value in self.kwargs.items()
        }


def update_digest(found: "hashlib._Hash", value: object) -> None:
    """Add to a digest: a tensor's shape and numbers, or those of several."""
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous()
        found.update(f"{numbers.dtype}{tuple(numbers.shape)}".encode())
        found.update(numbers.view(torch.uint8).numpy().tobytes() if numbers.numel() else b"")
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)} of".encode())
        for one in value:
            update_digest(found, one)
    else:
        found.update(repr(value).encode())
