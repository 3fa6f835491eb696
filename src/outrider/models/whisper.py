"""A lean Whisper for the CPU: BART's decoder (`models.bart`) behind an encoder of sound."""

from transformers import PretrainedConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder as Module

from outrider.models.bart import BartRunner, Encoder
from outrider.models.bart_families import Family
from outrider.models.seq2seq.input_modality import InputModality, WindowInput
from outrider.models.whisper_encoder import WhisperEncoder


class WhisperRunner(BartRunner):
    """Runs a Whisper's weights on one CPU device; `shares` leaves an encoder that it has unused."""

    def _encoder(self, module: Module, family: Family, packed: bool) -> Encoder:
        return WhisperEncoder(module, packed)

    def _kind(self, config: PretrainedConfig) -> InputModality:
        return WindowInput(config)
