"""transformers' logits processors as settings of our own, or replayed as they are."""

import copy
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor
from transformers import generation as hf

MASKED = -float("inf")  #: the score of a token that a filter takes out


class Fields(TypedDict, total=False):
    """The fields of `Sampling` that processors of transformers stand for."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    min_new_tokens: int
    processors: tuple[hf.LogitsProcessor, ...]


def settings(
    processors: Sequence[hf.LogitsProcessor],
    do_sample: bool,
    width: int,
    eos: Sequence[int],
    padded: bool,
) -> Fields:
    """Fields of `Sampling` that do what a list of transformers' processors does, in its order.

    Temperature and filters at its end become our own; so do penalties and bans if there is nothing
    else. Anything else is replayed at every node as it is.
    """
    rest = list(processors)
    fields: Fields = {"temperature": 1.0 if do_sample else 0.0}
    if do_sample:
        if rest and type(rest[-1]) is hf.MinPLogitsWarper and _keeps_one(rest[-1]):
            fields["min_p"] = rest.pop().min_p
        if rest and type(rest[-1]) is hf.TopPLogitsWarper and _keeps_one(rest[-1]):
            fields["top_p"] = rest.pop().top_p
        if rest and type(rest[-1]) is hf.TopKLogitsWarper and rest[-1].filter_value == MASKED:
            fields["top_k"] = rest.pop().top_k
        if rest and type(rest[-1]) is hf.TemperatureLogitsWarper:
            fields["temperature"] = rest.pop().temperature
    named = _native(rest, width, eos) if not padded else None
    if named is None:
        return {**fields, "processors": tuple(rest)}
    return {**fields, **named}


def of_row(fields: Fields, row: int, rows: int) -> Fields:
    """Fields for one row: processors that hold something for each of `rows` are told their own."""

    def own(processor: hf.LogitsProcessor) -> hf.LogitsProcessor:
        kind = type(processor)
        if kind is hf.RepetitionPenaltyLogitsProcessor:
            skipped = processor.prompt_ignore_length
            if isinstance(skipped, Tensor):
                return kind(processor.penalty, prompt_ignore_length=int(skipped[row]))
        elif kind is hf.EncoderRepetitionPenaltyLogitsProcessor and rows > 1:
            mine = copy.copy(processor)
            at = row * len(processor.encoder_input_ids) // rows  # several sequences per prompt
            mine.encoder_input_ids = processor.encoder_input_ids[at : at + 1]
            return mine
        elif kind is hf.EncoderNoRepeatNGramLogitsProcessor and rows > 1:
            mine = copy.copy(processor)
            at = row * processor.batch_size // rows
            mine.generated_ngrams, mine.batch_size = processor.generated_ngrams[at : at + 1], 1
            return mine
        return processor

    given = fields.get("processors", ())
    mine = tuple(own(processor) for processor in given)
    changed = any(a is not b for a, b in zip(mine, given, strict=True))
    return {**fields, "processors": mine} if changed else fields


def _keeps_one(warper: hf.TopPLogitsWarper | hf.MinPLogitsWarper) -> bool:
    """Whether a filter masks with -inf and keeps no more than one token by force."""
    return bool(warper.filter_value == MASKED and warper.min_tokens_to_keep == 1)


def _native(rest: Sequence[hf.LogitsProcessor], width: int, eos: Sequence[int]) -> Fields | None:
    """Penalties and bans as our own parameters, or None if one of them is not."""
    fields: Fields = {}
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
            if sorted(ids_of(processor.eos_token_id)) != sorted(eos):
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


def ids_of(tensor: Tensor | int | Sequence[int] | None) -> list[int]:
    """Token ids in whatever form transformers keeps them."""
    if tensor is None:
        return []
    return [int(token) for token in torch.as_tensor(tensor).reshape(-1).tolist()]
