"""Made-up sources for checks and measurements: small, and the same at every call."""

import torch
from transformers import PretrainedConfig

from outrider.models.config import read
from outrider.types import Encoded, Inputs

_SEED = 20
_STATES = 24  #: states of an encoder of which the number is not known beforehand
_SAMPLES = 4000  #: a quarter of a second of audio


def mels(config: PretrainedConfig) -> int | None:
    """Mel channels of an encoder that reads windows of one length in columns (Whisper)."""
    return read(config, "num_mel_bins", int)


def frames(config: PretrainedConfig) -> int:
    """Frames of such a window: its first convolutions halve them."""
    return 2 * int(config.max_source_positions)


def channels(config: PretrainedConfig) -> int:
    """Features of a frame of an encoder that reads frames in rows (Speech2Text)."""
    return int(config.input_feat_per_channel) * int(config.input_channels)


def image(config: PretrainedConfig) -> tuple[int, int, int]:
    """Channels, height and width of what a vision encoder reads."""
    size = config.image_size
    high, wide = size if isinstance(size, (list, tuple)) else (size, size)
    return int(read(config, "num_channels", int) or 3), int(high), int(wide)


def sources(config: PretrainedConfig, takes: str, rows: int) -> Inputs:
    """Sources of `rows` rows for an encoder that takes what transformers calls `takes`."""
    random = torch.Generator().manual_seed(_SEED)
    if takes == "pixel_values":
        features = torch.randn(rows, *image(config), generator=random)
        return Inputs(None, features, torch.ones(rows, 1, dtype=torch.bool))
    if takes == "input_ids":
        lengths = [7 + 2 * (row % 3) for row in range(rows)]
        steps = torch.arange(max(lengths)) * 5 + torch.arange(rows)[:, None] * 11 + 3
        mask = _there(lengths)
        return Inputs(steps % config.vocab_size * mask, None, mask)
    if mels(config):
        lengths = [frames(config)] * rows
        shape: tuple[int, ...] = (rows, lengths[0], mels(config) or 0)
    elif takes == "input_values":
        lengths = [_SAMPLES + 1000 * (row % 3) for row in range(rows)]
        shape = (rows, max(lengths))
    else:
        lengths = [40 + 8 * (row % 3) for row in range(rows)]
        shape = (rows, max(lengths), channels(config))
    features = 0.5 * torch.randn(shape, generator=random)
    return Inputs(None, features, _there(lengths))


def states(config: PretrainedConfig, mask_BS: torch.Tensor, takes: str, wide: int) -> Encoded:
    """States [B, T, wide] that stand for the encoder's of such sources."""
    lengths = mask_BS.sum(1).tolist()
    if mels(config):
        lengths = [frames(config) // 2] * len(lengths)
    elif takes != "input_ids":
        lengths = [_STATES] * len(lengths)
    random = torch.Generator().manual_seed(_SEED + 1)
    return Encoded(torch.randn(len(lengths), max(lengths), wide, generator=random), _there(lengths))


def moved(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """The inputs where a model can read them."""
    ids, features, mask, encoded, _ = inputs
    return Inputs(
        None if ids is None else ids.to(device),
        None if features is None else features.to(device, dtype),
        mask.to(device),
        None
        if encoded is None
        else Encoded(encoded.states_BTE.to(device, dtype), encoded.mask_BT.to(device)),
    )


def _there(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
