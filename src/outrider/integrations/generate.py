"""Speculative decoding behind `model.generate`: its own configuration, processors and criteria.

    from outrider.integrations.generate import speculative

    model.generate(**inputs, custom_generate=speculative, draft_model=small)
    model.generate(**inputs, custom_generate=speculative, prompt_lookup_num_tokens=8)
    model.generate(**inputs, custom_generate=speculative, draft_model=small,
                   tokenizer=ours, assistant_tokenizer=theirs)
    model.generate(**inputs, custom_generate=speculative, draft_model=small, branching=(3, 2, 1))

The result is what `generate` would return: at temperature 0 the same sequences, scores, logits and
finish positions, above it a draw from the same law. Stopping criteria see every token. `generate`
keeps `assistant_model=` and `streamer=` to itself when a custom function runs, so they have names
of our own here: `draft_model=` and `out_streamer=`; `generate` below takes either name.
"""

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, generation as hf
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from outrider.drafters import models
from outrider.errors import ConfigurationError
from outrider.integrations import beam_generate, encoder_inputs, generate_call
from outrider.integrations.encoder_inputs import EncoderInputs, EncoderSources, Ids, windows_of
from outrider.integrations.generate_call import CallRows, GenerateCall, GenerateResult
from outrider.integrations.generate_setup import KNOWN, OURS, generate_setup, load_arguments, named
from outrider.integrations.inputs import kept_back, left_padding, refuse
from outrider.models.config import read
from outrider.models.model_lock import evaluating
from outrider.stats import Stats

# What `generate` asks of a custom function, decoded and given back in its own form.

Result: TypeAlias = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput | beam_generate.Result


class GenerateInputs(NamedTuple):
    """The arguments of a custom function."""

    input_ids: Tensor  #: the prompt, of an encoder-decoder the decoder's
    processors: list[hf.LogitsProcessor]
    criteria: list[hf.StoppingCriteria]
    config: hf.GenerationConfig
    model_kwargs: Mapping[str, object]
    given: encoder_inputs.EncoderSources
    reference: encoder_inputs.Ids | None
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
    copied = encoder_inputs.references(asked.reference, count, asked.given.windows)
    encoder_inputs.check(engine.drafter, settings.get("drafter"), inputs, copied)
    processors = listened(model, asked.processors, asked.input_ids, asked.model_kwargs, beams)
    rows = CallRows(asked.input_ids, pads, inputs, copied)
    if beams > 1:
        width, more = asked.input_ids.shape[1], asked.model_kwargs
        wanted = wanted._replace(processors=processors)
        return beam_generate.searched(
            engine, rows, wanted, lambda texts: generate_call.of_text(model, texts, width, more)
        )
    call = GenerateCall(engine, rows, processors, asked.criteria, asked.config, asked.streamer)
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
        size = len(input_ids), model.config.vocab_size
        scores = torch.zeros(size, dtype=torch.float32, device="cpu")
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


#: Settings that are keywords of `model.generate` itself.
SETTINGS = ("draft_model", *(name for name in OURS if name != "draft"))


class SpeculativeGenerate:
    """A callable for `custom_generate`; keyword arguments fix settings for all its calls.

    `stats` holds the last call's statistics, `total` those of all calls: Whisper's `generate` calls
    once for every window of a recording and for every temperature that it falls back to.
    """

    def __init__(self, **settings: object) -> None:
        load_arguments(settings)  # refuses unknown and contradictory names at once
        self.settings = settings
        self.stats: Stats | None = None
        self.total = Stats()
        self.__signature__ = _signature()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: hf.LogitsProcessorList | None = None,
        stopping_criteria: hf.StoppingCriteriaList | None = None,
        generation_config: hf.GenerationConfig | None = None,
        speculative_config: Mapping[str, object] | None = None,
        out_streamer: hf.BaseStreamer | None = None,
        inputs_tensor: Tensor | None = None,
        source_ids: Ids | None = None,
        draft_inputs: EncoderInputs | None = None,
        reference: Ids | None = None,
        **keywords: object,
    ) -> Result:
        """Called by `generate` once everything is prepared.

        `inputs_tensor` is what the encoder of an encoder-decoder has read; `generate` fills it in.
        """
        caller = sys._getframe(1)
        with ExitStack() as after:
            if out_streamer is not None:  # whatever happens: somebody may wait for it
                after.callback(out_streamer.end)
            tokenizers = kept_back(caller)
            own = {name: keywords.pop(name, None) for name in SETTINGS}
            configured = named(generation_config)
            asked = dict(self.settings)
            for more in (tokenizers, speculative_config or {}, configured, own):
                asked.update({k: v for k, v in more.items() if v is not None})
            found = load_arguments(asked)
            for one in (model, *models(found.get("draft"))):
                if isinstance(one, torch.nn.Module):  # dropout would make every pass another law
                    after.enter_context(evaluating(one))
            call = GenerateInputs(
                input_ids,
                list(logits_processor or ()),
                list(stopping_criteria or ()),
                generation_config,
                keywords,
                EncoderSources(inputs_tensor, source_ids, draft_inputs, windows_of(caller)),
                reference,
                out_streamer,
            )
            result, self.stats = decoded(model, found, call)
        self.total.follow(self.stats)
        return result


def _signature() -> inspect.Signature:
    """`SpeculativeGenerate.__call__` with every setting spelt out.

    transformers' `generate` hands a custom function those keywords that its signature names.
    """
    parameters = list(inspect.signature(SpeculativeGenerate.__call__).parameters.values())
    ahead, rest = parameters[1:-1], parameters[-1]  # without self
    by_name = inspect.Parameter.KEYWORD_ONLY
    spelt = [inspect.Parameter(name, by_name, default=None) for name in SETTINGS]
    return inspect.Signature([*ahead, *spelt, rest])


#: The same with nothing fixed in advance.
speculative = SpeculativeGenerate()


def generate(model: PreTrainedModel, inputs: Tensor | None = None, /, **keywords: Any) -> Result:
    """`model.generate` with speculation; `assistant_model=` and `streamer=` keep their names.

    So do `tokenizer=` and `assistant_tokenizer=`, where the draft model's is another.
    """
    for name, ours in (("assistant_model", "draft_model"), ("streamer", "out_streamer")):
        if name in keywords:
            if keywords.get(ours) is not None:
                raise ConfigurationError(f"{name}= and {ours}= mean the same; give one of them")
            keywords[ours] = keywords.pop(name)
    if inputs is not None:
        keywords["inputs"] = inputs
    strings, tokenizer = _stop_strings(model, keywords), keywords.pop("tokenizer", None)
    names = ("assistant_tokenizer", "draft_tokenizer")
    own = {name: keywords.pop(name) for name in names if keywords.get(name) is not None}
    if own:  # alone the target's is for stop strings
        own["tokenizer"] = tokenizer
    if strings:
        if tokenizer is None:
            raise ConfigurationError("stop_strings need tokenizer=...; pass the model's tokenizer")
        criteria = hf.StoppingCriteriaList(keywords.get("stopping_criteria") or ())
        criteria.append(hf.StopStringCriteria(tokenizer, strings))
        keywords["stopping_criteria"] = criteria
    result: Result = model.generate(custom_generate=SpeculativeGenerate(**own), **keywords)
    return result


def _stop_strings(model: PreTrainedModel, keywords: dict[str, Any]) -> str | list[str] | None:
    """Stop strings from keywords or a configuration, taken out: without the tokenizer, which does
    not reach a custom function, `generate` could not use them."""
    strings: str | list[str] | None = keywords.pop("stop_strings", None)
    given: hf.GenerationConfig | None = keywords.get("generation_config")
    if given is not None and given.stop_strings is not None:
        strings = given.stop_strings if strings is None else strings
        keywords["generation_config"] = given = copy.deepcopy(given)
        given.stop_strings = None
    if model.generation_config.stop_strings is not None:
        strings = model.generation_config.stop_strings if strings is None else strings
        keywords["stop_strings"] = None
    return strings


__all__ = ["KNOWN", "SpeculativeGenerate", "generate", "speculative"]
