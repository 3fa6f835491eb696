"""A language model: what it reads, what it says, what it keeps of rows."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import TypeVar

from outrider.row_params import copy_rows, first_rows, gather_rows, put_rows, scatter_rows

# What a model's own processor makes of images or sound in a prompt, beside its token ids.

#: What each token sees of images, of models with cross attention to them: [1, L, images, tiles] or
#: [1, L, images].
SEEN = frozenset({"cross_attention_mask", "image_attention_mask"})
_PLACES = "image_embeds_position_mask"  #: [1, L]: 1 where an image stands (Kosmos)
_TYPES = "token_type_ids"  #: [1, L]: 0 for tokens that see each other (PaliGemma)
#: Names of tensors [1, L, ...] that have a place for each token of the prompt.
PER_TOKEN = frozenset({"attention_mask", *SEEN, _PLACES, "mm_token_type_ids", _TYPES})


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


class Nodes(NamedTuple):
    """One model call: Q tokens of every row. Made by `outrider.models.prefill`."""

    tokens_BQ: Tensor
    positions_BQ: Tensor
    slots_BQ: Tensor  #: cache slot that each node is written to
    visible_BQW: Tensor  #: cache slots that each node sees, its own included
    settled_B: Tensor  #: slots below it hold text for good: no later call writes there

    def last(self, count: int) -> "Nodes":
        """The last so many of each row."""
        tokens, positions, slots, visible = (table[:, -count:] for table in self[:4])
        return Nodes(tokens, positions, slots, visible, self.settled_B)


class Output(NamedTuple):
    """What a model says of the nodes that it was asked for."""

    known_BQK: Tensor  #: logits of the tokens that its output layer knows
    hidden: tuple[Tensor, ...] = ()  #: states [B, Q, E], one per aux layer that was asked for
    ids_K: Tensor | None = None  #: which tokens these are; None: all, in their order
    vocab_size: int = 0  #: how many there are besides, if it knows some alone

    @property
    def logits_BQV(self) -> Tensor:
        """Logits of the whole vocabulary, made when they are read: unknown tokens have no chance.

        >>> Output(torch.tensor([[[1.0, 2.0]]]), (), torch.tensor([0, 2]), 3).logits_BQV.tolist()
        [[[1.0, -inf, 2.0]]]
        """
        if self.ids_K is None:
            return self.known_BQK
        wide = self.known_BQK.new_full((*self.known_BQK.shape[:-1], self.vocab_size), -torch.inf)
        return wide.index_copy_(-1, self.ids_K, self.known_BQK)


class Encoded(NamedTuple):
    """What an encoder made of rows' inputs, padded to the longest. A `RowStore`."""

    states_BTE: Tensor
    mask_BT: Tensor  #: bool: which states are there

    def take(self, rows: Sequence[int]) -> "Encoded":
        return Encoded(*(copy_rows(table, rows) for table in self))

    def put(self, into: Sequence[int], other: "Encoded") -> "Encoded":
        """The rows of `other` at these rows: the shorter ones are padded and masked."""
        return Encoded(*(scatter_rows(m, into, t) for m, t in zip(self, other, strict=True)))

    def narrow(self, rows: int) -> "Encoded":
        return Encoded(*(table[:rows] for table in self))


class Inputs(NamedTuple):
    """What rows read besides their own text. Models of text alone have none. A `RowStore`.

    `features` are what the model's encoder takes: log-mel frames [B, S, F], samples [B, S], pixels
    [B, C, H, W]. With `encoded` no encoder runs: the states are there already.
    """

    ids_BS: Tensor | None  #: source text, right-padded
    features: Tensor | None
    mask_BS: Tensor  #: bool: what of the source is there
    encoded: Encoded | None = None  #: by the target's encoder
    draft: "Inputs | None" = None  #: for a draft model whose encoder reads something else

    def take(self, rows: Sequence[int]) -> "Inputs":
        return Inputs(*(gather_rows(part, rows) for part in self))

    def put(self, into: Sequence[int], other: "Inputs") -> "Inputs":
        """The rows of `other` at these rows: the shorter sources are padded and masked.

        What only one side has is in the result no more; both must be encoded, or neither.
        """
        both = (self.encoded is None) == (other.encoded is None)
        assert both, "rows that are encoded beside rows that are not"
        return Inputs(*(put_rows(m, into, t) for m, t in zip(self, other, strict=True)))

    def narrow(self, rows: int) -> "Inputs":
        return Inputs(*(first_rows(part, rows) for part in self))


#: What a model reads besides its text: nothing; inputs, by an encoder of its own; or the states
#: that the target's encoder made.
Reads = Literal["text", "source", "states"]


class RowStore(Protocol):
    """Anything that is kept per row: caches, drafters' memories, sampling rows, batches.

    Rows stand first in the buffers, without holes. Which are meant is known on the host, so that
    nothing waits for a device: plain integers, never tensors. Row 2 leaves:

        store = store.put([2], store.take([last])).narrow(last)
    """

    def take(self, rows: Sequence[int]) -> Self:
        """A copy of these rows, in this order."""

    def put(self, into: Sequence[int], other: Self) -> Self:
        """Write the rows of `other` into these rows; numbers behind the last row add rows.

        Large buffers are written in place, each row's used slots alone: use the result, not `self`.
        """

    def narrow(self, rows: int) -> Self:
        """The first `rows` rows, without a copy: use the result, not `self`."""


class Cache(RowStore, Protocol):
    """What a model keeps of the rows that it has read."""

    @property
    def capacity(self) -> int:
        """Slots of a row."""


C = TypeVar("C", default=Any)  #: what a model keeps of rows: a `Cache`


class TargetStates(NamedTuple):
    """A target's states of the tokens in some slots, for a draft model that reads them."""

    slots_BQ: Tensor
    positions_BQ: Tensor  #: of these tokens, in the text
    wide: int  #: the slots lie below it
    hidden: tuple[Tensor, ...]  #: [B, Q, E] at each of the draft model's aux layers
    known_B: Tensor  #: slots below it hold committed tokens, all of which have been told by now


class LanguageModel(Protocol[C]):
    """One decoder driven over trees: target and draft model alike."""

    vocab_size: int  #: width of the logits it returns, cut to the tokenizer
    context: int  #: most positions it can address
    aux_layers: tuple[int, ...]  #: states of another model that it reads, as a head does; (): none
    follows: bool  #: whether it keeps entries of the text: heads on states alone do not

    @property
    def device(self) -> torch.device:
        """Where its inputs must lie."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""

    @property
    def trees(self) -> bool:
        """Whether drafts may branch."""

    @property
    def trees_alike(self) -> bool:
        """Whether a tree's node is rounded as the same text is in a row, or finely enough."""

    @property
    def reads(self) -> Reads:
        """What it reads besides its text."""

    def width(self, slots: int) -> int:
        """The least visible width of so many slots: calls of these widths round alike."""

    def examine(self, inputs: Inputs) -> None:
        """Refuse inputs that the model cannot read: ConfigurationError."""

    def encode(self, inputs: Inputs) -> Inputs:
        """The inputs with `encoded`: the encoder runs, unless its states are there already."""

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> C:
        """An empty cache, which owns what the model has read of the inputs."""

    def forward(
        self, cache: C, nodes: Nodes, *, last: int | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Output:
        """Write Q entries and return the logits [B, Q, V] of (the last `last` of) them.

        Their states [B, Q, E] at each of the aux layers come along: k is the state after k layers
        (0: the embeddings), -1 the state that the logits are computed from, behind the last norm.
        """

    def keep(self, cache: C, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the entries of accepted paths (node numbers, -1 padded) next to slot `first_B`."""

    def learn(self, cache: C, target: TargetStates) -> None:
        """Be told the target's states of some tokens."""

    def probe(self, rows: int) -> Inputs | None:
        """Some inputs, for checks, calibration and certification; None for models of text alone."""


@runtime_checkable
class Tokenizer(Protocol):
    """What is needed of a tokenizer; chats and special tokens are those of transformers' own."""

    def __call__(self, text: str) -> Mapping[str, list[int]]:
        """`input_ids` of a text."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """The text of token ids."""

    def get_vocab(self) -> dict[str, int]:
        """Ids by token."""
