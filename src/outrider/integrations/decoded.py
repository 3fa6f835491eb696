"""What `generate` asks of a custom function, decoded and given back in its own form."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel
from transformers import generation as hf
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from outrider.integrations import attentions, beamed, references, silence, sources
from outrider.integrations.arranged import arranged
from outrider.integrations.call import Call, Made, Rows
from outrider.integrations.inputs import refuse
from outrider.integrations.padding import left_padding
from outrider.models.config import read
from outrider.stats import Stats

Result: TypeAlias = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput | beamed.Result


class Asked(NamedTuple):
    """The arguments of a custom function."""

    input_ids: Tensor  #: the prompt, of an encoder-decoder the decoder's
    processors: list[hf.LogitsProcessor]
    criteria: list[hf.StoppingCriteria]
    config: hf.GenerationConfig
    model_kwargs: Mapping[str, object]
    given: sources.Given
    reference: references.Ids | None
    streamer: hf.BaseStreamer | None


def decoded(
    model: PreTrainedModel, settings: Mapping[str, Any], asked: Asked
) -> tuple[Result, Stats]:
    """Sequences, or what `return_dict_in_generate` asks for, and the statistics of the run."""
    refuse(model, asked.config, asked.model_kwargs)
    beams = beamed.beams_of(asked.config)
    if beams > 1:
        pair = bool(model.config.is_encoder_decoder)
        wanted = beamed.Search(asked.processors, asked.criteria, asked.config, pair)
        streamed, windows = asked.streamer is not None, asked.given.windows is not None
        beamed.check(asked.config, wanted, streamed, windows)
        ids, beside = beamed.one_row_each(asked.input_ids, asked.model_kwargs, beams)
        asked = asked._replace(input_ids=ids, model_kwargs=beside)
    pads = left_padding(model, asked.input_ids, asked.model_kwargs)
    engine, encoder = arranged(model, settings, asked.reference is not None)
    count, inputs = len(asked.input_ids), None
    if model.config.is_encoder_decoder:
        inputs = sources.read_sources(model, encoder, asked.model_kwargs, asked.given, count)
    else:
        sources.refuse(model, asked.given)
    copied = references.references(asked.reference, count, asked.given.windows)
    references.check(engine.drafter, settings.get("drafter"), inputs, copied)
    processors = silence.listened(
        model, asked.processors, asked.input_ids, asked.model_kwargs, beams
    )
    rows = Rows(asked.input_ids, pads, inputs, copied)
    if beams > 1:
        width, more = asked.input_ids.shape[1], asked.model_kwargs
        wanted = wanted._replace(processors=processors)
        return beamed.searched(
            engine, rows, wanted, lambda texts: attentions.of_text(model, texts, width, more)
        )
    call = Call(
        engine,
        rows,
        processors,
        asked.criteria,
        asked.config,
        asked.streamer,
    )
    return _output(model, asked, call.result()), call.run.stats


def _output(model: PreTrainedModel, asked: Asked, made: Made) -> Result:
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
