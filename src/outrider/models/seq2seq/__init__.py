"""Encoder-decoders: one runner for all, and a small class for each family that needs more."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from transformers import PretrainedConfig, PreTrainedModel

from outrider import lazy
from outrider.models.config import decoder_of, read

if TYPE_CHECKING:
    from outrider.models.seq2seq.families import StatesRunner
    from outrider.models.seq2seq.runner import Seq2SeqRunner

#: Families checked by tests/models/test_seq2seq.py, by transformers' model_type.
SUPPORTED = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "canary",
        "cohere_asr",
        "encoder-decoder",
        "florence2",
        "led",
        "longt5",
        "m2m_100",
        "marian",
        "marian-ssru",
        "mbart",
        "moonshine",
        "moonshine_streaming",
        "mt5",
        "mvp",
        "pegasus",
        "pegasus_x",
        "pix2struct",
        "plbart",
        "pp_formulanet",
        "seamless_m4t",
        "seamless_m4t_v2",
        "speech_to_text",
        "t5",
        "t5gemma",
        "umt5",
        "vision-encoder-decoder",
        "whisper",
    }
)

#: Files with models that transformers has not: importing one registers its classes there.
OWN: Mapping[str, str] = {"marian-ssru": "outrider.models.seq2seq.marian_ssru"}

#: Decoders that a composite of two models may have.
DECODERS = frozenset(
    {"bart", "bert", "bert-generation", "gpt2", "mbart", "roberta", "trocr", "xlm-roberta"}
)
_COMPOSITES = frozenset({"encoder-decoder", "vision-encoder-decoder"})

#: Families, and decoders of composites, that need more than slots, sources and positions.
EXCEPTIONS: Mapping[str, "type[Seq2SeqRunner]"] = lazy.Registry(
    {
        "bigbird_pegasus": "outrider.models.seq2seq.families:BigBirdPegasusRunner",
        "canary_decoder": "outrider.models.seq2seq.families:MaskedStatesRunner",
        "cohere_asr": "outrider.models.seq2seq.families:MaskedStatesRunner",
        "moonshine": "outrider.models.seq2seq.families:MaskedStatesRunner",
        "moonshine_streaming": "outrider.models.seq2seq.families:MoonshineStreamingRunner",
        "florence2": "outrider.models.seq2seq.families:Florence2Runner",
        "marian-ssru": "outrider.models.seq2seq.marian_ssru:MarianSsruRunner",
        "pp_formulanet": "outrider.models.seq2seq.families:PPFormulaNetRunner",
        "roberta": "outrider.models.seq2seq.families:RobertaRunner",
        "seamless_m4t": "outrider.models.seq2seq.families:SeamlessRunner",
        "seamless_m4t_v2": "outrider.models.seq2seq.families:SeamlessRunner",
        "speech_to_text": "outrider.models.seq2seq.families:SpeechToTextRunner",
        "xlm-roberta": "outrider.models.seq2seq.families:RobertaRunner",
    }
)


def composed(config: PretrainedConfig) -> bool:
    """Whether encoder and decoder are models of their own kinds."""
    return config.model_type in _COMPOSITES


def runner_of(model: PreTrainedModel) -> "type[Seq2SeqRunner]":
    """The class that runs this encoder-decoder, or decoder with cross attention."""
    from outrider.models.seq2seq.families import StatesRunner
    from outrider.models.seq2seq.runner import Seq2SeqRunner

    if not read(model.config, "is_encoder_decoder", bool):
        return StatesRunner
    whole = EXCEPTIONS.get(model.config.model_type)
    return whole or EXCEPTIONS.get(decoder_of(model.config).model_type, Seq2SeqRunner)


__all__ = [
    "DECODERS",
    "EXCEPTIONS",
    "OWN",
    "SUPPORTED",
    "Seq2SeqRunner",
    "StatesRunner",
    "composed",
    "runner_of",
]

_HOMES = {
    "Seq2SeqRunner": "outrider.models.seq2seq.runner",
    "StatesRunner": "outrider.models.seq2seq.families",
}
__getattr__, __dir__ = lazy.exports(__name__, _HOMES)
