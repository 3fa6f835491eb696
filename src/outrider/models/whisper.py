"""A lean Whisper for the CPU: BART's decoder (`models.bart`) behind an encoder of sound.

The encoder is convolutions, and the layers of `bart_encoder`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder as Module

from outrider.models.bart import BartRunner, Encoder
from outrider.models.bart_encoder import FAMILIES, EncoderLayers, Family
from outrider.models.seq2seq.input_modality import InputModality, WindowInput
from outrider.types import Inputs

# A lean Whisper encoder for the CPU: convolutions, and the layers of `bart_encoder`.


class WhisperEncoder:
    """Runs the encoder's weights: log-mel frames [B, F, mels] to states [B, F / 2, E]."""

    def __init__(self, module: Module, packed: bool) -> None:
        self._first, self._second = module.conv1, module.conv2
        self._places = module.embed_positions.weight.detach()
        self.layers = EncoderLayers(module, FAMILIES["whisper"], packed)

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        """The states [1, F / 2, E] of each row."""
        assert inputs.features is not None
        # one row at a time: nothing is won by more, and scores of one fit into the cache
        return [self._row(row[None]) for row in inputs.features]

    def _row(self, features_1FM: Tensor) -> Tensor:
        x = features_1FM.transpose(1, 2).to(self._places.dtype)
        with torch.no_grad():
            x = F.gelu(self._second(F.gelu(self._first(x)))).transpose(1, 2)
        return self.layers(x + self._places)


class WhisperRunner(BartRunner):
    """Runs a Whisper's weights on one CPU device; `shares` leaves an encoder that it has unused."""

    def _encoder(self, module: Module, family: Family, packed: bool) -> Encoder:
        return WhisperEncoder(module, packed)

    def _kind(self, config: PretrainedConfig) -> InputModality:
        return WindowInput(config)
