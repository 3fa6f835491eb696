"""What `generate` asks of a custom function, decoded and given back in its own form."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import generation as hf
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from outrider.integrations import beam_generate, encoder_inputs, generate_call, references
from outrider.integrations.generate_call import CallRows, GenerateCall, GenerateResult
from outrider.integrations.generate_setup import generate_setup
from outrider.integrations.inputs import left_padding, refuse
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
    processors = listened(model, asked.processors, asked.input_ids, asked.model_kwargs, beams)
    rows = CallRows(asked.input_ids, pads, inputs, copied)
    if beams > 1:
        width, more = asked.input_ids.shape[1], asked.model_kwargs
        wanted = wanted._replace(processors=processors)
        return beam_generate.searched(
            engine, rows, wanted, lambda texts: generate_call.of_text(model, texts, width, more)
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
        weights = generate_call.of_text(model, made.sequences, width, asked.model_kwargs)._asdict()
        encoded = asked.model_kwargs["encoder_outputs"]
        weights["encoder_attentions"] = read(encoded, "attentions", tuple)
    return GenerateEncoderDecoderOutput(**made._asdict(), **weights)


def listened(
    model: PreTrainedModel,
    processors: Sequence[hf.LogitsProcessor],
    input_ids: Tensor,
    model_kwargs: Mapping[str, object],
    beams: int = 1,
) -> list[hf.LogitsProcessor]:
    """The processors without Whisper's test for silence, which has its answer.

    `WhisperNoSpeechDetection` changes no score. At the first token it notes how probable it is that
    nobody speaks, for the thresholds of Whisper's `generate`. It is asked once, about the prompts,
    and takes no part in decoding.

    `input_ids` have one row for each prompt, whatever the `beams`.
    """
    others = [p for p in processors if not isinstance(p, WhisperNoSpeechDetection)]
    for at, processor in enumerate(processors):
        if isinstance(processor, WhisperNoSpeechDetection):
            with torch.no_grad():
                _ask_for_silence(processor, model, processors[:at], input_ids, model_kwargs, beams)
    return others


def _ask_for_silence(
    processor: WhisperNoSpeechDetection,
    model: PreTrainedModel,
    ahead: Sequence[hf.LogitsProcessor],
    input_ids: Tensor,
    model_kwargs: Mapping[str, object],
    beams: int,
) -> None:
    """Call it as plain decoding does at its first token, on states that are there already."""
    encoded, inputs = model_kwargs["encoder_outputs"], processor.inputs
    if processor.start_of_trans_offset > 1 and inputs is not None:  # it runs the model itself
        scores = torch.zeros(len(input_ids), model.config.vocab_size)
        if len(inputs["decoder_input_ids"]) == len(input_ids):
            processor.inputs = {
                **{name: inputs[name] for name in inputs if name.startswith("decoder_")},
                "encoder_outputs": encoded,
            }
        try:
            processor(input_ids, scores)
        finally:
            processor.inputs = inputs
        return
    asked = model.prepare_inputs_for_generation(
        input_ids,
        decoder_attention_mask=model_kwargs.get("decoder_attention_mask"),
        encoder_outputs=encoded,
    )
    scores = model(**asked).logits[:, -1].float()
    if beams > 1:  # a beam search shows it log-probabilities, and a row for each beam
        scores = torch.log_softmax(scores, -1).repeat_interleave(beams, 0)
        input_ids = input_ids.repeat_interleave(beams, 0)
    for earlier in ahead:
        scores = earlier(input_ids, scores)
    processor(input_ids, scores)
