"""What a model's own processor makes of images or sound in a prompt, beside its token ids."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: Names of tensors [1, L, ...] that have a place for each token of the prompt.
PER_TOKEN = frozenset(
    {
        "attention_mask",
        "cross_attention_mask",
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
            if name not in PER_TOKEN:
                found.update(name.encode())
                _update(found, self.kwargs[name])
        return -1 - int.from_bytes(found.digest()[:16], "big")

    def key(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The prompt, each placeholder replaced by what it stands for: equal keys read alike."""
        stands, digest = self.placeholders, self.digest
        return tuple(digest if token in stands else token for token in prompt)

    def beginning(self, count: int) -> dict[str, object]:
        """The arguments for the first `count` tokens; tensors by token are cut to them."""
        return {
            name: value[:, :count] if name in PER_TOKEN and isinstance(value, Tensor) else value
            for name, value in self.kwargs.items()
        }


def _update(found: "hashlib._Hash", value: object) -> None:
    """Add a tensor's shape and numbers, or those of several."""
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous()
        found.update(f"{numbers.dtype}{tuple(numbers.shape)}".encode())
        found.update(numbers.view(torch.uint8).numpy().tobytes() if numbers.numel() else b"")
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)} of".encode())
        for one in value:
            _update(found, one)
    else:
        found.update(repr(value).encode())
