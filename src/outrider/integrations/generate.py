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
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import generation as hf

from outrider.drafters import models
from outrider.errors import ConfigurationError
from outrider.integrations.encoder_inputs import EncoderInputs, EncoderSources
from outrider.integrations.generate_setup import KNOWN, OURS, load_arguments, named
from outrider.integrations.inputs import kept_back
from outrider.integrations.references import Ids, windows_of
from outrider.integrations.run_generate import GenerateInputs, Result, decoded
from outrider.models.model_lock import evaluating
from outrider.stats import Stats

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
