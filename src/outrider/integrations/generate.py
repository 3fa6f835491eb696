"""Speculative decoding behind `model.generate`: its own configuration, processors and criteria.

    from outrider.integrations.generate import speculative

    model.generate(**inputs, custom_generate=speculative, draft_model=small)
    model.generate(**inputs, custom_generate=speculative, prompt_lookup_num_tokens=8)
    model.generate(**inputs, custom_generate=Speculative(draft_model=small, branching=(3, 2, 1)))

The result is what `generate` would return: at temperature 0 the same sequences, scores, logits and
finish positions, above it a draw from the same law. Stopping criteria see every token. `generate`
keeps `assistant_model=` and `streamer=` to itself when a custom function runs, so they have names
of our own here: `draft_model=` and `out_streamer=`; `generate` below takes either name.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import generation as hf
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.blocks import HostBlock
from outrider.drafters.ngram_table import Table
from outrider.engine import Engine, Run
from outrider.errors import ConfigurationError
from outrider.integrations.driven import engine_for, named
from outrider.keywords import KNOWN, load_arguments
from outrider.request import Limits
from outrider.sampling import Sampling
from outrider.stats import Stats
from outrider.step import Block
from outrider.types import Draft, Scores, Verdict

_UNDERSTOOD = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}


class Speculative:
    """A callable for `custom_generate`; keyword arguments fix settings for all its calls.

    `stats` holds the last call's statistics.
    """

    def __init__(self, **settings: Any) -> None:
        load_arguments(settings)  # refuses unknown and contradictory names at once
        self.settings = settings
        self.stats: Stats | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        draft_model: Any = None,
        num_speculative_tokens: int | None = None,
        branching: Sequence[int] | None = None,
        coupled: bool | None = None,
        rule: str | None = None,
        drafter: str | None = None,
        ngram: tuple[int, int] | None = None,
        table: str | Path | Table | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        out_streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by `generate` once everything is prepared."""
        own = {
            "draft_model": draft_model,
            "num_speculative_tokens": num_speculative_tokens,
            "branching": branching,
            "coupled": coupled,
            "rule": rule,
            "drafter": drafter,
            "ngram": ngram,
            "table": table,
        }
        configured = named(generation_config)
        asked = dict(self.settings)
        for more in (speculative_config or {}, configured, own):
            asked.update({k: v for k, v in more.items() if v is not None})
        engine = engine_for(model, load_arguments(asked))
        call = _Call(
            engine,
            input_ids,
            list(logits_processor or ()),
            list(stopping_criteria or ()),
            generation_config,
            model_kwargs,
            out_streamer,
        )
        result = call.result()
        self.stats = call.run.stats
        return result


#: The same with nothing fixed in advance.
speculative = Speculative()


def generate(model: Any, inputs: Any = None, /, **keywords: Any) -> Any:
    """`model.generate` with speculation; `assistant_model=` and `streamer=` keep their names."""
    for name, ours in (("assistant_model", "draft_model"), ("streamer", "out_streamer")):
        if name in keywords:
            if keywords.get(ours) is not None:
                raise ConfigurationError(f"{name}= and {ours}= mean the same; give one of them")
            keywords[ours] = keywords.pop(name)
    if inputs is not None:
        keywords["inputs"] = inputs
    strings, tokenizer = keywords.pop("stop_strings", None), keywords.pop("tokenizer", None)
    if strings:
        if tokenizer is None:
            raise ConfigurationError("stop_strings need tokenizer=...; pass the model's tokenizer")
        criteria = hf.StoppingCriteriaList(keywords.get("stopping_criteria") or ())
        criteria.append(hf.StopStringCriteria(tokenizer, strings))
        keywords["stopping_criteria"] = criteria
    return model.generate(custom_generate=Speculative(), **keywords)


class _Call:
    """One call of generate: prompts in, sequences out, criteria judged token by token."""

    def __init__(
        self,
        engine: Engine,
        input_ids: Tensor,
        processors: list[Any],
        criteria: list[Any],
        config: Any,
        model_kwargs: dict[str, Any],
        streamer: Any,
    ) -> None:
        self.config, self.streamer = config, streamer
        self.rows, self.width = input_ids.shape
        self.input_ids = input_ids
        _refuse(config, model_kwargs)
        if streamer is not None and self.rows > 1:
            raise ConfigurationError(
                f"a streamer takes one sequence; got a batch of {self.rows}; stream one at a time"
            )
        pads = _left_padding(input_ids, model_kwargs)
        prompts = [input_ids[row, pad:].tolist() for row, pad in enumerate(pads)]
        self.eos = _ids(getattr(config, "_eos_token_tensor", None))
        native = (hf.MaxLengthCriteria, hf.EosTokenCriteria)
        self.criteria = [c for c in criteria if type(c) not in native]
        how = settings(processors, bool(config.do_sample), self.width, self.eos, any(pads))
        each = [
            Sampling(**_of_row(how, row), padding=tuple(input_ids[row, :pad].tolist()))
            for row, pad in enumerate(pads)
        ]
        self.collected: list[list[tuple[Tensor | None, Tensor | None]]] = [[] for _ in prompts]
        wanted = bool(config.return_dict_in_generate)
        self.scores = wanted and bool(config.output_scores)
        self.logits = wanted and bool(config.output_logits)
        most = int(config.max_length) - self.width
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.ends: list[int | None] = [None] * self.rows
        self.run: Run = engine.run(
            prompts,
            each,
            Limits(most, tuple(self.eos)),
            observe=self._collect if self.scores or self.logits else None,
        )

    def result(self) -> Any:
        """Decode to the end and assemble what generate returns."""
        if self.streamer is not None:
            self.streamer.put(self.input_ids.cpu())
        for block in self.run:
            self._take(block)
            if self._complete():
                break
        if self.streamer is not None:
            self.streamer.end()
        longest = max(
            end if end is not None else len(self.tokens[row]) for row, end in self._ended()
        )
        pad = _ids(getattr(self.config, "_pad_token_tensor", None))
        made = torch.full((self.rows, longest), pad[0] if pad else 0, dtype=torch.int64)
        for row, end in self._ended():
            kept = self.tokens[row][: end if end is not None and self.eos else longest]
            made[row, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
        sequences = torch.cat([self.input_ids, made.to(self.input_ids.device)], 1)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._stacked(0, longest) if self.scores else None,
            logits=self._stacked(1, longest) if self.logits else None,
        )

    def _ended(self) -> list[tuple[int, int | None]]:
        return list(enumerate(self.ends))

    def _complete(self) -> bool:
        """Without an end token a finished row goes on until all have finished, as in generate."""
        ends = [end for end in self.ends if end is not None]
        if len(ends) < self.rows:
            return False
        return bool(self.eos) or min(map(len, self.tokens)) >= max(ends)

    def _take(self, block: HostBlock) -> None:
        row = block.row
        for token in block.token_ids:
            self.tokens[row].append(token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if self.ends[row] is None and self.criteria and self._judged(row):
                self.ends[row] = len(self.tokens[row])
                if self.eos or self.rows == 1:
                    self.run.halt(row)
                    return
        if block.finish_reason is not None and self.ends[row] is None:
            self.ends[row] = len(self.tokens[row])

    def _judged(self, row: int) -> bool:
        tail = torch.tensor([self.tokens[row]], device=self.input_ids.device)
        text = torch.cat([self.input_ids[row : row + 1], tail], 1)
        scores = None
        if self.scores:
            count = len(self.tokens[row])
            scores = tuple(s[None] for s, _ in self.collected[row][:count] if s is not None)
        return any(bool(torch.as_tensor(c(text, scores)).any()) for c in self.criteria)

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
            ends = [end if end is not None and self.eos else longest for end in self.ends]
            lines = [
                row[at][which] if at < min(len(row), end) else None
                for row, end in zip(self.collected, ends, strict=True)
            ]
            some = next(line for line in lines if line is not None)
            ended = torch.zeros_like(some)
            steps.append(torch.stack([ended if line is None else line for line in lines]).clone())
        return tuple(steps)


def settings(
    processors: Sequence[Any], do_sample: bool, width: int, eos: Sequence[int], padded: bool
) -> dict[str, Any]:
    """Fields of `Sampling` that do what a list of transformers' processors does, in its order.

    Temperature and filters at its end become our own; so do penalties and bans if there is nothing
    else. Anything else is replayed at every node as it is.
    """
    rest, fields = list(processors), {"temperature": 0.0}
    if do_sample:
        fields = {"temperature": 1.0}
        order: tuple[tuple[type, str, str], ...] = (
            (hf.MinPLogitsWarper, "min_p", "min_p"),
            (hf.TopPLogitsWarper, "top_p", "top_p"),
            (hf.TopKLogitsWarper, "top_k", "top_k"),
            (hf.TemperatureLogitsWarper, "temperature", "temperature"),
        )
        for kind, name, attribute in order:
            if rest and type(rest[-1]) is kind and _standard(rest[-1]):
                fields[name] = getattr(rest.pop(), attribute)
    named = _native(rest, width, eos) if not padded else None
    if named is None:
        return {**fields, "processors": tuple(rest)}
    return {**fields, **named}


def _of_row(fields: dict[str, Any], row: int) -> dict[str, Any]:
    """Fields for one row: a repetition penalty that knows every row's padding is told its own."""

    def own(processor: Any) -> Any:
        skipped = getattr(processor, "prompt_ignore_length", None)
        if type(processor) is not hf.RepetitionPenaltyLogitsProcessor or skipped is None:
            return processor
        skip = int(skipped[row]) if isinstance(skipped, Tensor) else int(skipped)
        return hf.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=skip)

    given = fields.get("processors", ())
    mine = tuple(own(processor) for processor in given)
    changed = any(a is not b for a, b in zip(mine, given, strict=True))
    return {**fields, "processors": mine} if changed else fields


def _standard(warper: Any) -> bool:
    """Whether a filter masks with -inf and keeps no more than one token by force."""
    return (
        getattr(warper, "filter_value", -float("inf")) == -float("inf")
        and getattr(warper, "min_tokens_to_keep", 1) == 1
    )


def _native(rest: Sequence[Any], width: int, eos: Sequence[int]) -> dict[str, Any] | None:
    """Penalties and bans as our own parameters, or None if one of them is not."""
    fields: dict[str, Any] = {}
    rank = 0
    for processor in rest:
        kind = type(processor)
        if kind is hf.RepetitionPenaltyLogitsProcessor and rank < 1:
            if processor.prompt_ignore_length is not None:
                return None
            fields["repetition_penalty"], rank = float(processor.penalty), 1
        elif kind is hf.NoRepeatNGramLogitsProcessor and rank < 2:
            fields["no_repeat_ngram_size"], rank = int(processor.ngram_size), 2
        elif kind in (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor):
            if sorted(_ids(processor.eos_token_id)) != sorted(eos):
                return None
            least = (
                processor.min_length - width
                if kind is hf.MinLengthLogitsProcessor
                else processor.min_new_tokens
            )
            fields["min_new_tokens"] = max(int(least), 0, fields.get("min_new_tokens", 0))
            rank = 3
        else:
            return None
    return fields


def _ids(tensor: Any) -> list[int]:
    if tensor is None:
        return []
    return [int(token) for token in torch.as_tensor(tensor).reshape(-1).tolist()]


def _left_padding(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """How many pad tokens stand ahead of each row's prompt."""
    rows, width = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        return [0] * rows
    pads = [int(n) for n in (width - mask.long().sum(1)).tolist()]
    for row, pad in enumerate(pads):
        if not bool(mask[row, pad:].all()) or pad >= width:
            raise ConfigurationError(
                f"prompt {row} is not left-padded: its attention mask has holes or nothing in it; "
                "use tokenizer.padding_side = 'left'"
            )
    return pads


def _refuse(config: Any, model_kwargs: dict[str, Any]) -> None:
    """What speculation cannot give is refused by name."""

    def refuse(what: str, do: str) -> None:
        raise ConfigurationError(f"{what} is not supported by outrider's generate; {do}")

    if (getattr(config, "num_beams", 1) or 1) > 1:
        refuse(f"num_beams={config.num_beams}", "use num_beams=1")
    for name in ("penalty_alpha", "dola_layers", "assistant_early_exit", "constraints"):
        if getattr(config, name, None):
            refuse(f"{name}={getattr(config, name)!r}", "leave it out")
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name, None):
                refuse(name, "leave it out")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        refuse("a filled past_key_values", "pass the whole prompt instead")
    others = {k for k, v in model_kwargs.items() if k not in _UNDERSTOOD and v is not None}
    if others:
        refuse(f"model input {', '.join(sorted(others))}", "pass input_ids and attention_mask only")


__all__ = ["KNOWN", "Speculative", "generate", "settings", "speculative"]
