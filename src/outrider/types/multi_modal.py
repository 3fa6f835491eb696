"""What a model's own processor makes of images or sound in a prompt, beside its token ids."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: What each token sees of images, of models with cross attention to them: [1, L, images, tiles] or
#: [1, L, images].
SEEN = frozenset({"cross_attention_mask", "image_attention_mask"})
_PLACES = "image_embeds_position_mask"  #: [1, L]: 1 where an image stands (Kosmos)
_TYPES = "token_type_ids"  #: [1, L]: 0 for tokens that see each other (PaliGemma)
#: Names of tensors [1, L, ...] that have a place for each token of the prompt.
PER_TOKEN = frozenset(
    {
        "attention_mask",
        *SEEN,
        _PLACES,
        "mm_token_type_ids",
        _TYPES,
    }
)


@dataclass(frozen=True)
class ImageAhead:
    """An image's places ahead of a prompt whose processor has no token for them: GIT's.

    token  that stands there
    each   places of an image, or of a frame
    end    what the processor ends a text with: it is to go on

    >>> ImageAhead(0, 2, 9).of([5, 6, 9], torch.zeros(1, 3, 4, 4))
    [0, 0, 5, 6]
    """

    token: int
    each: int
    end: int

    def of(self, ids: list[int], pixels: object) -> list[int]:
        """The prompt: of the processor's ids, and pixels [1, C, H, W] or frames [1, F, C, H, W]."""
        if not isinstance(pixels, Tensor):
            return ids
        frames = pixels.shape[1] if pixels.dim() == 5 else 1
        ended = len(ids) > 1 and ids[-1] == self.end
        return [self.token] * (frames * self.each) + (ids[:-1] if ended else ids)


@dataclass(frozen=True, eq=False)
class MultiModalInputs:
    """Images or sound of one prompt, as the model's own processor made them. One row's.

    kwargs        what the model's forward is given beside the ids, by name: pixel_values,
                  image_grid_thw, input_features...; tensors, or lists of them
    placeholders  token ids that stand for them in a prompt
    closers       token ids that belong to an image they stand directly behind: MiniCPM-V 4.7 counts
                  positions by such marks

    >>> inputs = MultiModalInputs({"pixel_values": torch.zeros(1, 3, 2, 2)}, frozenset({9}))
    >>> inputs.end((5, 9, 9, 6)), inputs.key((5, 9, 6))[0], inputs.key((5, 9, 6))[1] < 0
    (3, 5, True)
    """

    kwargs: Mapping[str, object]
    placeholders: frozenset[int]
    closers: frozenset[int] = frozenset()

    def places(self, prompt: Sequence[int]) -> list[bool]:
        """Which of the prompt's tokens stand for images or sound."""
        named = self.kwargs.get(_PLACES)
        if isinstance(named, Tensor):
            return [bool(place) for place in named.flatten().tolist()]
        return [token in self.placeholders for token in prompt]

    def last(self, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt go up to its last placeholder; 0 if it has none."""
        places = self.places(prompt)
        return next((at for at in range(len(places), 0, -1) if places[at - 1]), 0)

    @cached_property
    def block(self) -> int:
        """How many tokens begin the prompt and see each other, text behind an image included.

        0 where text behind an image does not see what is behind itself. Who types an image's
        tokens with 0, the type of text, has the whole of such a prompt typed so (PaliGemma).
        """
        types = self.kwargs.get(_TYPES)
        if not isinstance(types, Tensor) or bool(types.any(-1).all()):
            return 0
        return types.shape[-1]

    def end(self, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt are read in one call; 0 if it has no placeholder."""
        last = self.last(prompt)
        while last and last < len(prompt) and prompt[last] in self.closers:
            last += 1
        return max(last, self.block) if last else 0

    @cached_property
    def digest(self) -> int:
        """A number below zero that stands for the contents: what is read of them is theirs."""
        found = hashlib.sha256()
        for name in sorted(self.kwargs):
            value = self.kwargs[name]
            if name in SEEN and isinstance(value, Tensor):
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
        digest = self.digest
        places = zip(prompt, self.places(prompt), strict=True)
        key = [digest if place else token for token, place in places]
        if key and (SEEN & set(self.kwargs) or self.block):
            # text ahead of an image reads otherwise beside it, and in a longer block
            key[0] = digest - (1 + prompt[0] + (self.block << 64) << 128)
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
