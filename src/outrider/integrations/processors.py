"""transformers' logits processors as settings of our own, or replayed as they are."""

import copy
from collections.abc import Sequence

from torch import Tensor
from transformers import generation as hf

from outrider.integrations.logits_processor_mapping import (
    MASKED,
    Fields,
    Prompts,
    native,
)


def settings(processors: Sequence[hf.LogitsProcessor], do_sample: bool, prompts: Prompts) -> Fields:
    """Fields of `SamplingParams` that do what a list of transformers' processors does, in its
    order.

    Temperature and filters at its end become our own, and so do penalties, bans and rules at its
    beginning. What is between them is replayed at every node as it is.
    """
    rest = list(processors)
    fields: Fields = {"temperature": 1.0 if do_sample else 0.0}
    if do_sample:
        if rest and type(rest[-1]) is hf.MinPLogitsWarper and _keeps_one(rest[-1]):
            fields["min_p"] = rest.pop().min_p
        if rest and type(rest[-1]) is hf.TopPLogitsWarper and _keeps_one(rest[-1]):
            if rest[-1].top_p > 0:  # 0 keeps a token there, and is none of our settings
                fields["top_p"] = rest.pop().top_p
        if rest and type(rest[-1]) is hf.TopKLogitsWarper and rest[-1].filter_value == MASKED:
            fields["top_k"] = rest.pop().top_k
        if rest and type(rest[-1]) is hf.TemperatureLogitsWarper:
            fields["temperature"] = rest.pop().temperature
    named, rest = native(rest, prompts)
    fields |= named
    if rest:
        fields["processors"] = tuple(rest)
    return fields


def of_row(fields: Fields, row: int, rows: int) -> Fields:
    """Fields for one row: processors that hold something for each of `rows` are told their own."""

    def own(processor: hf.LogitsProcessor) -> hf.LogitsProcessor:
        kind = type(processor)
        if kind is hf.RepetitionPenaltyLogitsProcessor:
            skipped = processor.prompt_ignore_length
            if isinstance(skipped, Tensor):
                at = row * len(skipped) // rows  # several beams or sequences per prompt
                return kind(processor.penalty, prompt_ignore_length=int(skipped[at]))
        elif kind is hf.EncoderRepetitionPenaltyLogitsProcessor and rows > 1:
            mine = copy.copy(processor)
            at = row * len(processor.encoder_input_ids) // rows
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
