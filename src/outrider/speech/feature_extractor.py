"""Samples as what Whisper's encoder reads: log-mel frames, and windows of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.speech.audio import Samples


@dataclass(frozen=True)
class Frames:
    """The log-mel frames of a recording.

    features_FS  all of them; a recording shorter than a window is padded to one by silence
    count        how many of them are sound: the rest is padding
    """

    features_FS: Tensor
    count: int

    def window(self, first: int, size: int) -> Tensor:
        """`size` frames from `first` on, [F, size]; behind the end of the recording there are
        zeros, as in the recipes that Whisper is used by."""
        if first == 0 and self.features_FS.shape[1] == size:
            return self.features_FS
        cut = self.features_FS[:, first : min(first + size, self.count)]
        return pad(cut, (0, size - cut.shape[1]))


def frames(extractor: Any, samples: Samples) -> Frames:
    """The frames of a whole recording, by the model's own extractor of transformers.

    Loudness is relative to the loudest frame of the recording, so windows are cut from these frames
    and not from the samples.
    """
    rate, hop = extractor.sampling_rate, extractor.hop_length
    long = len(samples) > extractor.n_samples
    features = extractor(
        samples,
        sampling_rate=rate,
        return_tensors="pt",
        truncation=False,
        padding="longest" if long else "max_length",
    )
    made: Tensor = features["input_features"][0]
    return Frames(made.to(torch.float32), max(1, len(samples) // hop))
