"""Speculative decoding behind `model.generate`: its own configuration, processors and criteria.

    from outrider.integrations.generate import speculative

    model.generate(**inputs, custom_generate=speculative, draft_model=small)
    model.generate(**inputs, custom_generate=speculative, prompt_lookup_num_tokens=8)
    model.generate(**inputs, custom_generate=speculative, draft_model=small, branching=(3, 2, 1))

The result is what `generate` would return: at temperature 0 the same sequences, scores, logits and
finish positions, above it a draw from the same law. Stopping criteria see every token. `generate`
keeps `assistant_model=` and `streamer=` to itself when a custom function runs, so they have names
of our own here: `draft_model=` and `out_streamer=`; `generate` below takes either name.
"""

import copy
import inspect
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import generation as hf
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.drafters import models
from outrider.engine.blocks import HostBlock
from outrider.engine.engine import Engine, Run
from outrider.engine.request import Limits
from outrider.errors import ConfigurationError
from outrider.integrations.criteria import Criteria, Judge
from outrider.integrations.driven import engine_for, named
from outrider.integrations.inputs import left_padding, refuse, refuse_kept_back
from outrider.integrations.processors import ids_of, of_row, settings
from outrider.keywords import KNOWN, OURS, load_arguments
from outrider.laws.sampling import Sampling
from outrider.models.config import read
from outrider.models.guard import evaluating
from outrider.stats import Stats
from outrider.types import Block, Draft, Scores, Verdict

Result: TypeAlias = Tensor | GenerateDecoderOnlyOutput
#: Settings that are keywords of `model.generate` itself.
SETTINGS = ("draft_model", *(name for name in OURS if name != "draft"))


class Speculative:
    """A callable for `custom_generate`; keyword arguments fix settings for all its calls.

    `stats` holds the last call's statistics.
    """

    def __init__(self, **settings: object) -> None:
        load_arguments(settings)  # refuses unknown and contradictory names at once
        self.settings = settings
        self.stats: Stats | None = None
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
        **keywords: object,
    ) -> Result:
        """Called by `generate` once everything is prepared."""
        refuse_kept_back(sys._getframe(1))
        own = {name: keywords.pop(name, None) for name in SETTINGS}
        configured = named(generation_config)
        asked = dict(self.settings)
        for more in (speculative_config or {}, configured, own):
            asked.update({k: v for k, v in more.items() if v is not None})
        found = load_arguments(asked)
        with ExitStack() as modes:  # dropout would make every pass another law
            for one in (model, *models(found.get("draft"))):
                if isinstance(one, torch.nn.Module):
                    modes.enter_context(evaluating(one))
            call = _Call(
                engine_for(model, found),
                input_ids,
                list(logits_processor or ()),
                list(stopping_criteria or ()),
                generation_config,
                keywords,
                out_streamer,
            )
            result = call.result()
        self.stats = call.run.stats
        return result


def _signature() -> inspect.Signature:
    """`Speculative.__call__` with every setting spelt out.

    transformers' `generate` hands a custom function those keywords that its signature names.
    """
    parameters = list(inspect.signature(Speculative.__call__).parameters.values())
    ahead, rest = parameters[1:-1], parameters[-1]  # without self
    by_name = inspect.Parameter.KEYWORD_ONLY
    spelt = [inspect.Parameter(name, by_name, default=None) for name in SETTINGS]
    return inspect.Signature([*ahead, *spelt, rest])


#: The same with nothing fixed in advance.
speculative = Speculative()


def generate(model: PreTrainedModel, inputs: Tensor | None = None, /, **keywords: Any) -> Result:
    """`model.generate` with speculation; `assistant_model=` and `streamer=` keep their names."""
    for name, ours in (("assistant_model", "draft_model"), ("streamer", "out_streamer")):
        if name in keywords:
            if keywords.get(ours) is not None:
                raise ConfigurationError(f"{name}= and {ours}= mean the same; give one of them")
            keywords[ours] = keywords.pop(name)
    if inputs is not None:
        keywords["inputs"] = inputs
    if keywords.pop("assistant_tokenizer", None) is not None:
        raise ConfigurationError(
            "assistant_tokenizer= is not supported by outrider's generate: target and draft model "
            "must share one vocabulary; leave it out"
        )
    strings, tokenizer = _stop_strings(model, keywords), keywords.pop("tokenizer", None)
    if strings:
        if tokenizer is None:
            raise ConfigurationError("stop_strings need tokenizer=...; pass the model's tokenizer")
        criteria = hf.StoppingCriteriaList(keywords.get("stopping_criteria") or ())
        criteria.append(hf.StopStringCriteria(tokenizer, strings))
        keywords["stopping_criteria"] = criteria
    result: Result = model.generate(custom_generate=Speculative(), **keywords)
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


class _Call:
    """One call of generate: prompts in, sequences out, criteria judged token by token."""

    def __init__(
        self,
        engine: Engine,
        input_ids: Tensor,
        processors: list[hf.LogitsProcessor],
        criteria: list[hf.StoppingCriteria],
        config: hf.GenerationConfig,
        model_kwargs: Mapping[str, object],
        streamer: hf.BaseStreamer | None,
    ) -> None:
        self.config, self.streamer = config, streamer
        self.rows, self.width = input_ids.shape
        self.input_ids, self.context = input_ids, engine.target.context
        refuse(config, model_kwargs)
        if streamer is not None and self.rows > 1:
            raise ConfigurationError(
                f"a streamer takes one sequence; got a batch of {self.rows}; stream one at a time"
            )
        pads = left_padding(input_ids, model_kwargs)
        prompts = [input_ids[row, pad:].tolist() for row, pad in enumerate(pads)]
        self.criteria = Criteria(criteria, config, self.rows)
        eos = self.criteria.eos
        how = settings(processors, bool(config.do_sample), self.width, eos, any(pads))
        each = [
            Sampling(**of_row(how, row, self.rows), padding=tuple(input_ids[row, :pad].tolist()))
            for row, pad in enumerate(pads)
        ]
        self.collected: list[list[tuple[Tensor | None, Tensor | None]]] = [[] for _ in prompts]
        wanted = bool(config.return_dict_in_generate)
        self.scores = wanted and bool(config.output_scores)
        self.logits = wanted and bool(config.output_logits)
        self._ended: set[int] = set()
        pad = ids_of(read(config, "_pad_token_tensor", Tensor))
        self.judge = Judge(
            self.criteria, input_ids, pad[0] if pad else 0, self._scored if self.scores else None
        )
        self.run: Run = engine.run(
            prompts,
            each,
            Limits(max(self.criteria.longest - self.width, 1), tuple(eos)),
            observe=self._collect if self.scores or self.logits else None,
        )

    def result(self) -> Result:
        """Decode to the end and assemble what generate returns."""
        judge = self.judge
        if self.streamer is not None:
            self.streamer.put(self.input_ids.cpu())
        for block in self.run:
            self._take(block)
            if judge.complete:
                break
        if self.streamer is not None:
            self.streamer.end()
        self._warn()
        longest = judge.longest
        made = torch.full((self.rows, longest), judge.pad, dtype=torch.int64)
        for row, tokens in enumerate(judge.tokens):
            kept = tokens[: judge.ends[row] if self.criteria.padded else longest]
            made[row, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
        sequences = torch.cat([self.input_ids, made.to(self.input_ids.device)], 1)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._stacked(0, longest) if self.scores else None,
            logits=self._stacked(1, longest) if self.logits else None,
        )

    def _take(self, block: HostBlock) -> None:
        row, judge = block.row, self.judge
        for token in block.token_ids:
            ended = judge.add(row, token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if ended and (self.criteria.padded or self.rows == 1):
                for one in ended:
                    self._end(one)
                if row in ended:
                    return
        if block.finish_reason is not None and judge.close(row) and self.criteria.padded:
            for one, end in enumerate(judge.ends):
                if end is not None:
                    self._end(one)

    def _end(self, row: int) -> None:
        """Nothing more of this row is wanted; why it ended by itself, if it did, stays."""
        if row not in self._ended:
            self._ended.add(row)
            self.run.end(row, self.run.reasons[row] or "stop")

    def _warn(self) -> None:
        """Say it if the model's context ended a row, where plain generate would go on."""
        short = [
            row
            for row, reason in enumerate(self.run.reasons)
            if reason == "context" and self.judge.ends[row] == len(self.judge.tokens[row])
        ]
        if short:
            warnings.warn(
                f"row {', '.join(map(str, short))} ended at the model's context of {self.context} "
                f"tokens, before max_length={self.criteria.longest}; outrider stops there, plain "
                "generate goes on to positions that the model was not made for; lower "
                "max_new_tokens or shorten the prompt",
                stacklevel=2,
            )

    def _scored(self, row: int, at: int) -> Tensor:
        scores = self.collected[row][at][0]
        assert scores is not None
        return scores

    def _collect(
        self, draft: Draft, scores: Scores, verdict: Verdict, block: Block, rows: list[int]
    ) -> None:
        laws = scores.laws
        raw = scores.raw_BNV if scores.raw_BNV is not None else laws.logits_BRV
        emitted = block.emitted_B.tolist()
        path = verdict.path_BD.tolist()
        for at, request in enumerate(rows):
            for node in [0, *path[at]][: emitted[at]]:
                processed = None
                if self.scores:
                    processed = laws.logits_BRV[at, node].float().clone()
                    if laws.floor_BR is not None:
                        processed[processed < laws.floor_BR[at, node]] = -torch.inf
                    if laws.greedy == "none":
                        processed *= laws.inverse_temperature_B[at]
                kept = raw[at, node].float().clone() if self.logits else None
                self.collected[request].append((processed, kept))

    def _stacked(self, which: int, longest: int) -> tuple[Tensor, ...]:
        steps = []
        for at in range(longest):
            lines = [
                None if at >= len(row) or self.judge.over(number, at) else row[at][which]
                for number, row in enumerate(self.collected)
            ]
            some = next(line for line in lines if line is not None)
            ended = torch.zeros_like(some)
            steps.append(torch.stack([ended if line is None else line for line in lines]))
        return tuple(steps)


__all__ = ["KNOWN", "Speculative", "generate", "speculative"]
