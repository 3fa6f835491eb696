"""What `generate` asks of a custom function, decoded and given back in its own form."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel
from transformers import generation as hf
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from outrider.integrations import (
    attentions,
    beam_generate,
    encoder_inputs,
    no_speech,
    references,
)
from outrider.integrations.generate_call import CallRows, GenerateCall, GenerateResult
from outrider.integrations.generate_setup import generate_setup
from outrider.integrations.inputs import refuse
from outrider.integrations.padding import left_padding
from outrider.models.config import read
from outrider.stats import Stats

Result: TypeAlias = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput | beam_generate.Result


class GenerateInputs(NamedTuple):
    """The arguments of a custom function."""

    input_ids: Tensor  #: the prompt, of an encoder-decoder the decoder's
    processors: list[hf.LogitsProcessor]
    criteria: list[hf.StoppingCriteria]
    config: hf.GenerationConfig
    model_kwargs: Mapping[str, object]
    given: encoder_inputs.EncoderSources
    reference: references.Ids | None
    streamer: hf.BaseStreamer | None


def decoded(
    model: PreTrainedModel, settings: Mapping[str, Any], asked: GenerateInputs
) -> tuple[Result, Stats]:
    """Sequences, or what `return_dict_in_generate` asks for, and the statistics of the run."""
    refuse(model, asked.config, asked.model_kwargs)
    beams = beam_generate.beams_of(asked.config)
    if beams > 1:
        pair = bool(model.config.is_encoder_decoder)
        wanted = beam_generate.BeamGenerate(asked.processors, asked.criteria, asked.config, pair)
        streamed, windows = asked.streamer is not None, asked.given.windows is not None
        beam_generate.check(asked.config, wanted, streamed, windows)
        ids, beside = beam_generate.one_row_each(asked.input_ids, asked.model_kwargs, beams)
        asked = asked._replace(input_ids=ids, model_kwargs=beside)
    pads = left_padding(model, asked.input_ids, asked.model_kwargs)
    engine, encoder = generate_setup(model, settings, asked.reference is not None)
    count, inputs = len(asked.input_ids), None
    if model.config.is_encoder_decoder:
        inputs = encoder_inputs.read_sources(model, encoder, asked.model_kwargs, asked.given, count)
    else:
        encoder_inputs.refuse(model, asked.given)
    copied = references.references(asked.reference, count, asked.given.windows)
    references.check(engine.drafter, settings.get("drafter"), inputs, copied)
    processors = no_speech.listened(
        model, asked.processors, asked.input_ids, asked.model_kwargs, beams
    )
    rows = CallRows(asked.input_ids, pads, inputs, copied)
    if beams > 1:
        width, more = asked.input_ids.shape[1], asked.model_kwargs
        wanted = wanted._replace(processors=processors)
        return beam_generate.searched(
            engine, rows, wanted, lambda texts: attentions.of_text(model, texts, width, more)
        )
    call = GenerateCall(
        engine,
        rows,
        processors,
        asked.criteria,
        asked.config,
        asked.streamer,
    )
    return _output(model, asked, call.result()), call.run.stats


def _output(model: PreTrainedModel, asked: GenerateInputs, made: GenerateResult) -> Result:
    """As `generate` returns it."""
    if not asked.config.return_dict_in_generate:
        return made.sequences
    if not model.config.is_encoder_decoder:
        return GenerateDecoderOnlyOutput(**made._asdict())
    weights: dict[str, object] = {}
    if asked.config.output_attentions:
        width = asked.input_ids.shape[1]
        weights = attentions.of_text(model, made.sequences, width, asked.model_kwargs)._asdict()
        encoded = asked.model_kwargs["encoder_outputs"]
        weights["encoder_attentions"] = read(encoded, "attentions", tuple)
    return GenerateEncoderDecoderOutput(**made._asdict(), **weights)
