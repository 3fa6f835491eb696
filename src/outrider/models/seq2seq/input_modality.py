"""Kinds of sources that encoders read: what is one, how transformers is asked, made-up ones."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from outrider.errors import ConfigurationError
from outrider.models.config import encoder_of, read
from outrider.types import Inputs

_SEED = 20  #: of made-up sources
#: fields of a configuration that say how many positions an encoder of text has
_REACHES = ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings")


class InputModality(ABC):
    """What an encoder reads."""

    @abstractmethod
    def examine(self, inputs: Inputs) -> None:
        """Refuse what it cannot read: ConfigurationError."""

    def groups(self, inputs: Inputs) -> Sequence[Sequence[int]]:
        """Rows that can be read together: all of them."""
        return [range(len(inputs.mask_BS))]

    @abstractmethod
    def asked(self, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """What transformers is called with for such a group."""

    @abstractmethod
    def made_up(self, rows: int) -> tuple[Inputs, list[int]]:
        """Small sources, the same at every call, and how many states each is to have."""


class TextInput(InputModality):
    """Token ids [B, S], read as one padded batch."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.vocab_size: int = config.vocab_size
        sizes = (read(config, name, int) for name in _REACHES)
        self.most = next((size for size in sizes if size), None)

    def examine(self, inputs: Inputs) -> None:
        """Token ids of the encoder's vocabulary, at least one and no more than it has positions."""
        ids, mask = inputs.ids_BS, inputs.mask_BS
        if ids is None:
            _refuse("source text", "features", "give token ids")
        if not mask.any(1).all():
            _refuse("source text", "a source without tokens", "end it with the EOS token")
        worst = int(ids[mask].max())
        if worst >= self.vocab_size or int(ids[mask].min()) < 0:
            _refuse(
                f"token ids below {self.vocab_size}",
                f"a source with token id {worst}",
                "encode it with the target's tokenizer",
            )
        long = int(mask.sum(1).max())
        if self.most is not None and long > self.most:
            _refuse(
                f"at most {self.most} tokens",
                f"a source of {long}",
                "shorten it, or split it into parts",
            )

    def asked(self, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """Ids and mask, as wide as the longest."""
        assert inputs.ids_BS is not None
        there = slice(0, int(inputs.mask_BS.sum(1).max()))
        mask = inputs.mask_BS[:, there].long()
        return {"input_ids": inputs.ids_BS[:, there], "attention_mask": mask}

    def made_up(self, rows: int) -> tuple[Inputs, list[int]]:
        """Ids that are no padding in families that have it in front."""
        lengths = [7 + 2 * (row % 3) for row in range(rows)]
        line, column = (torch.arange(many, device="cpu") for many in (rows, max(lengths)))
        ids = column * 5 + line[:, None] * 11 + 3
        mask = there(lengths)
        return Inputs(ids % self.vocab_size * mask, None, mask), lengths


class WindowInput(InputModality):
    """Log-mel frames [B, S, mels] of windows of one length (Whisper), what is silent included."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.states: int = config.max_source_positions
        self.frames = 2 * self.states  # its second convolution leaves every second one
        self.mels: int = config.num_mel_bins

    def examine(self, inputs: Inputs) -> None:
        """A whole window of the right number of channels."""
        shape = f"log-mel frames [B, {self.frames}, {self.mels}]"
        given = _shape_of(inputs, shape, "the feature extractor makes of audio")
        if len(given) != 3 or given[2] != self.mels:
            do = "take the features with this model's own extractor"
            _refuse(shape, f"features {given}", f"{do} (a draft's go into Inputs.draft)")
        if given[1] != self.frames:
            do = "cut longer audio into windows, and pad shorter audio before taking the features"
            _refuse(shape, f"features {given}", do)

    def asked(self, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """Frames in columns."""
        assert inputs.features is not None
        return {"input_features": inputs.features.to(dtype).transpose(1, 2)}

    def made_up(self, rows: int) -> tuple[Inputs, list[int]]:
        lengths = [self.frames] * rows
        features = _noise(rows, self.frames, self.mels)
        return Inputs(None, features, there(lengths)), [self.states] * rows


class RecordingInput(InputModality):
    """Frames [B, S, channels] or samples [B, S] of any length.

    Rows are read in groups of one length: convolutions and norms over time would let padding
    through, and a text would depend on its neighbours in the batch.
    """

    def __init__(self, name: str, least: int, channels: int | None, step: int = 1) -> None:
        """`least` is the shortest that makes a state; samples have no `channels`.

        Of samples that are read in frames of `step` an incomplete last one is left out.
        """
        self.name, self.least, self.channels, self.step = name, least, channels, step

    def examine(self, inputs: Inputs) -> None:
        """Long enough, of the right number of channels."""
        shape = "samples [B, S]" if self.channels is None else f"frames [B, S, {self.channels}]"
        given = _shape_of(inputs, shape, "the feature extractor makes of audio")
        if given[2:] != ([] if self.channels is None else [self.channels]):
            _refuse(shape, f"features {given}", "take the features with this model's own extractor")
        short = int(inputs.mask_BS.sum(1).min())
        if short < self.least:
            _refuse(f"at least {self.least} of {shape}", f"{short}", "give longer audio")

    def groups(self, inputs: Inputs) -> Sequence[Sequence[int]]:
        """Rows of one length."""
        return by_length(inputs)

    def asked(self, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """What is there, which is all of one length."""
        assert inputs.features is not None
        count = int(inputs.mask_BS[0].sum()) // self.step * self.step
        return {self.name: inputs.features[:, :count].to(dtype)}

    def made_up(self, rows: int) -> tuple[Inputs, list[int]]:
        lengths = [self.least + 39 + (20 + 2 * self.least) * (row % 3) for row in range(rows)]
        shape = [rows, max(lengths)] + ([] if self.channels is None else [self.channels])
        return Inputs(None, _noise(*shape), there(lengths)), [24 - row % 3 for row in range(rows)]


class PixelInput(InputModality):
    """Images [B, C, H, W] of one size."""

    def __init__(self, config: PretrainedConfig) -> None:
        size = config.image_size
        high, wide = size if isinstance(size, (list, tuple)) else (size, size)
        self.shape = (read(config, "num_channels", int) or 3, int(high), int(wide))

    def examine(self, inputs: Inputs) -> None:
        """Images of the size that the encoder has positions for."""
        shape = f"pixels [B, {', '.join(map(str, self.shape))}]"
        given = _shape_of(inputs, shape, "the image processor makes")
        if given[1:] != [*self.shape]:
            _refuse(shape, f"features {given}", "resize them with the model's image processor")

    def asked(self, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """The pixels."""
        assert inputs.features is not None
        return {"pixel_values": inputs.features.to(dtype)}

    def made_up(self, rows: int) -> tuple[Inputs, list[int]]:
        return Inputs(None, _noise(rows, *self.shape), there([1] * rows)), [24] * rows


class FlatPatchInput(InputModality):
    """Patches [B, P, 2 + C h w] of images of any size, each behind its row and column: Pix2Struct.

    Images of as many patches are read together, so that none is padded.
    """

    name = "flattened_patches"

    def __init__(self, config: PretrainedConfig) -> None:
        self.wide: int = config.patch_embed_hidden_size + 2
        self.most: int = config.seq_len  #: rows, and columns

    def examine(self, inputs: Inputs) -> None:
        """At least one patch of the right width."""
        shape = f"patches [B, P, {self.wide}]"
        given = _shape_of(inputs, shape, "the image processor makes")
        if given[2:] != [self.wide] or not inputs.mask_BS.any(1).all():
            _refuse(shape, f"features {given}", "take them with this model's own processor")

    def groups(self, inputs: Inputs) -> Sequence[Sequence[int]]:
        """Images of as many patches."""
        return by_length(inputs)

    def asked(self, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """The patches, all of which are there."""
        assert inputs.features is not None
        count = int(inputs.mask_BS[0].sum())
        return {self.name: inputs.features[:, :count].to(dtype)}

    def made_up(self, rows: int) -> tuple[Inputs, list[int]]:
        """Noise in two rows of patches."""
        lengths = [6 + 2 * (row % 3) for row in range(rows)]
        patches = _noise(rows, max(lengths), self.wide)
        at = torch.arange(max(lengths), device="cpu") % self.most
        patches[..., 0], patches[..., 1] = at % 2, at // 2
        return Inputs(None, patches, there(lengths)), lengths


class TextAndPixelInput(TextInput):
    """Token ids with an image's places among them, and its pixels [B, C, H, W]."""

    def __init__(
        self,
        config: PretrainedConfig,
        token: int,
        shape: tuple[int, int, int],
        places: int,
        text_alone: bool = False,
    ) -> None:
        """`token` stands for an image; made-up ones have this shape and take so many places.

        `text_alone` says whether a text may have none.
        """
        super().__init__(config)
        self.token, self.shape, self.places, self.text_alone = token, shape, places, text_alone

    def examine(self, inputs: Inputs) -> None:
        """Both, with a place for the image in every row; or a text that has none."""
        super().examine(inputs)
        assert inputs.ids_BS is not None
        places = (inputs.ids_BS == self.token).any(1)
        if self.text_alone and inputs.features is None and not bool(places.any()):
            return
        if inputs.features is None or inputs.features.dim() != 4 or not bool(places.all()):
            given = "no pixels" if inputs.features is None else "a text without a place for them"
            _refuse("an image and a text", given, "give what the model's own processor makes")

    def asked(self, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """Ids, mask and pixels."""
        text = super().asked(inputs, dtype)
        if inputs.features is None:
            return text
        return text | {"pixel_values": inputs.features.to(dtype)}

    def made_up(self, rows: int) -> tuple[Inputs, list[int]]:
        """Noise ahead of ids."""
        made, lengths = super().made_up(rows)
        assert made.ids_BS is not None
        places = torch.full((rows, self.places), self.token, device="cpu")
        ids = torch.cat([places, made.ids_BS.masked_fill(made.ids_BS == self.token, 3)], 1)
        lengths = [length + self.places for length in lengths]
        return Inputs(ids, _noise(rows, *self.shape), there(lengths)), lengths


def modality_of(model: PreTrainedModel) -> InputModality:
    """What the encoder of this model reads."""
    config, name = encoder_of(model.config), model.main_input_name
    if name == "inputs":  # of a composite: whatever its encoder reads
        name = model.get_encoder().main_input_name
    if name == FlatPatchInput.name:
        return FlatPatchInput(config)
    if name == "pixel_values":
        return PixelInput(config)
    if name == "input_values":
        frame = read(config, "frame_ms", float)
        if frame:  # Moonshine's streaming form: frames, and two convolutions, 5 every 2
            samples = round(frame * config.sample_rate / 1000)
            return RecordingInput(name, 4 * samples, None, samples)
        if read(config, "conv_kernel", (list, tuple)):
            return RecordingInput(name, convolved(config, 1), None)
        # Moonshine's convolutions, 127 every 64, 7 every 3 and 3 every 2
        return RecordingInput(name, 64 * (3 * (3 - 1) + 7 - 1) + 127, None)
    if name == "input_ids":
        return TextInput(config)
    mels = read(config, "num_mel_bins", int)
    if mels and read(config, "max_source_positions", int):
        return WindowInput(config)
    wide = read(config, "feature_projection_input_dim", int)
    if wide:  # SeamlessM4T's
        return RecordingInput(name, int(config.adaptor_kernel_size), wide)
    if mels:  # Parakeet's encoder
        return RecordingInput(name, int(config.subsampling_factor), mels)
    return RecordingInput(name, 1, config.input_feat_per_channel * config.input_channels)


Count = TypeVar("Count", int, Tensor)


def convolved(config: PretrainedConfig, states: Count) -> Count:
    """The least number of samples of which the convolutions of wav2vec 2.0 make so many states.

    >>> from transformers import Wav2Vec2Config
    >>> convolved(Wav2Vec2Config(), 1)
    400
    """
    strides = list(zip(config.conv_kernel, config.conv_stride, strict=True))
    if read(config, "add_adapter", bool):
        strides += [(1, config.adapter_stride)] * config.num_adapter_layers
    for kernel, stride in reversed(strides):
        states = (states - 1) * stride + kernel
    return states


def by_length(inputs: Inputs) -> list[list[int]]:
    """Groups of rows that need no padding together."""
    lengths: list[int] = inputs.mask_BS.sum(1).tolist()
    rows = range(len(lengths))
    return [[row for row in rows if lengths[row] == n] for n in dict.fromkeys(lengths)]


def there(lengths: Sequence[int]) -> Tensor:
    """[B, S]: the first `lengths` of each row.

    >>> there([1, 2]).tolist()
    [[True, False], [True, True]]
    """
    return torch.arange(max(lengths), device="cpu") < torch.tensor(lengths, device="cpu")[:, None]


def _noise(*shape: int) -> Tensor:
    random = torch.Generator().manual_seed(_SEED)
    return 0.5 * torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")


def _shape_of(inputs: Inputs, reads: str, made: str) -> list[int]:
    """The shape of the features; refused where there are none."""
    if inputs.features is None:
        _refuse(reads, "source text", f"give what {made}")
    return list(inputs.features.shape)


def _refuse(reads: str, given: str, do: str) -> NoReturn:
    raise ConfigurationError(f"the model's encoder reads {reads}; got {given}; {do}")
