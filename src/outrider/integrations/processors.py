"""transformers' logits processors as settings of our own, or replayed as they are."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import generation as hf


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


def of_row(fields: dict[str, Any], row: int, rows: int) -> dict[str, Any]:
    """Fields for one row: processors that hold something for each of `rows` are told their own."""

    def own(processor: Any) -> Any:
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


def ids_of(tensor: Any) -> list[int]:
    if tensor is None:
        return []
    return [int(token) for token in torch.as_tensor(tensor).reshape(-1).tolist()]
