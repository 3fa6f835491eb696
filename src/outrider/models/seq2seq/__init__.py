"""Encoder-decoders: one runner for all, and a small class for each family that needs more."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from transformers import PretrainedConfig, PreTrainedModel

from outrider import lazy
from outrider.models.config import decoder_of, pairs, read

if TYPE_CHECKING:
    from outrider.models.seq2seq.runner import Seq2SeqRunner

#: Families checked by tests/models/test_seq2seq.py, by transformers' model_type.
SUPPORTED = frozenset(
    """
    bart bigbird_pegasus blenderbot blenderbot-small blip canary cohere_asr encoder-decoder
    florence2 kyutai_speech_to_text led longt5 m2m_100 marian marian-ssru mbart moonshine
    moonshine_streaming mt5 mvp pegasus pegasus_x pix2struct plbart pp_formulanet seamless_m4t
    seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5 t5 t5gemma t5gemma2 umt5
    vision-encoder-decoder voxtral_realtime whisper
    """.split()
)

#: Of the families whose encoder reads an image in its text, those that read a text without any.
TEXT_ALONE = frozenset({"t5gemma2"})

#: Families that read a moment of sound with each token -> what the length of one is called.
TIMED: Mapping[str, str] = {
    "kyutai_speech_to_text": "frame_size",
    "voxtral_realtime": "audio_length_per_tok",
}

#: Files with models that transformers has not: importing one registers its classes there.
OWN: Mapping[str, str] = {"marian-ssru": "outrider.models.seq2seq.marian_ssru"}

#: Decoders that a composite of two models may have.
DECODERS = frozenset(
    {"bart", "bert", "bert-generation", "gpt2", "mbart", "roberta", "trocr", "xlm-roberta"}
)
#: Encoders of sound that one may have.
HEARING = frozenset({"hubert", "unispeech", "unispeech-sat", "wav2vec2", "wavlm"})
_COMPOSITES = frozenset({"encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"})

#: Families, and decoders of composites, that need more than slots, sources and positions.
EXCEPTIONS: Mapping[str, "type[Seq2SeqRunner]"] = lazy.Registry(
    {
        "bigbird_pegasus": "outrider.models.seq2seq.families:BigBirdPegasusRunner",
        "blip": "outrider.models.seq2seq.families:BlipRunner",
        "canary_decoder": "outrider.models.seq2seq.families:MaskedStatesRunner",
        "cohere_asr": "outrider.models.seq2seq.families:MaskedStatesRunner",
        "moonshine": "outrider.models.seq2seq.families:MaskedStatesRunner",
        "moonshine_streaming": "outrider.models.seq2seq.families:MoonshineStreamingRunner",
        "florence2": "outrider.models.seq2seq.families:Florence2Runner",
        "marian-ssru": "outrider.models.seq2seq.marian_ssru:MarianSsruRunner",
        "kyutai_speech_to_text": "outrider.models.seq2seq.timed:KyutaiRunner",
        "pp_formulanet": "outrider.models.seq2seq.families:PPFormulaNetRunner",
        "seamless_m4t": "outrider.models.seq2seq.families:SeamlessRunner",
        "seamless_m4t_v2": "outrider.models.seq2seq.families:SeamlessRunner",
        **dict.fromkeys(
            ("speech-encoder-decoder", "speecht5"),
            "outrider.models.seq2seq.families:ConvolvedRunner",
        ),
        "speech_to_text": "outrider.models.seq2seq.families:SpeechToTextRunner",
        "voxtral_realtime": "outrider.models.seq2seq.timed:VoxtralRealtimeRunner",
        "t5gemma2": "outrider.models.seq2seq.families:T5Gemma2Runner",
    }
)


def composed(config: PretrainedConfig) -> bool:
    """Whether encoder and decoder are models of their own kinds."""
    return config.model_type in _COMPOSITES


def moment(config: PretrainedConfig) -> int:
    """How many samples or frames of a recording one token is read with; 0 if with all of them.

    >>> from transformers import VoxtralRealtimeConfig, WhisperConfig
    >>> moment(VoxtralRealtimeConfig()), moment(WhisperConfig())
    (8, 0)
    """
    return read(config, TIMED.get(config.model_type, ""), int) or 0


def runner_of(model: PreTrainedModel) -> "type[Seq2SeqRunner]":
    """The class that runs this encoder-decoder, or decoder with cross attention."""
    from outrider.models.seq2seq.families import StatesRunner
    from outrider.models.seq2seq.runner import Seq2SeqRunner

    if not pairs(model.config):
        return StatesRunner
    whole = EXCEPTIONS.get(model.config.model_type)
    return whole or EXCEPTIONS.get(decoder_of(model.config).model_type, Seq2SeqRunner)
