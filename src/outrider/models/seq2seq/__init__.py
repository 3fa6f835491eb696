"""Encoder-decoders: one runner for all, and a small file for each family that needs more."""

from transformers import PreTrainedModel

from outrider.models.config import read
from outrider.models.seq2seq.moonshine import MoonshineRunner
from outrider.models.seq2seq.runner import Seq2SeqRunner
from outrider.models.seq2seq.speech_to_text import SpeechToTextRunner
from outrider.models.seq2seq.states import StatesRunner

#: Families checked by tests/models/test_seq2seq.py, by transformers' model_type.
SUPPORTED = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "encoder-decoder",
        "led",
        "longt5",
        "m2m_100",
        "marian",
        "mbart",
        "moonshine",
        "mt5",
        "mvp",
        "pegasus",
        "pegasus_x",
        "plbart",
        "speech_to_text",
        "t5",
        "t5gemma",
        "umt5",
        "vision-encoder-decoder",
        "whisper",
    }
)

#: Families that need more than slots, sources and positions.
EXCEPTIONS: dict[str, type[Seq2SeqRunner]] = {
    "moonshine": MoonshineRunner,
    "speech_to_text": SpeechToTextRunner,
}


def runner_of(model: PreTrainedModel) -> type[Seq2SeqRunner]:
    """The class that runs this encoder-decoder, or decoder with cross attention."""
    if not read(model.config, "is_encoder_decoder", bool):
        return StatesRunner
    return EXCEPTIONS.get(model.config.model_type, Seq2SeqRunner)


__all__ = ["EXCEPTIONS", "SUPPORTED", "Seq2SeqRunner", "StatesRunner", "runner_of"]
