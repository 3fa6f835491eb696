"""transformers' logits processors that are settings of our own, in an order that is ours.

    bias -> repetition -> n-grams -> n-grams of the source -> least length -> timestamps -> forced

Bans of single tokens commute with all ahead of the timestamps, which compare what is left, and with
forced tokens, which overrule them. A list is read from its front for as long as its order says the
same; what follows is replayed at every node behind the settings.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from transformers import generation as hf
from transformers.generation.logits_process import LogitsProcessor

from outrider.laws.timestamps import Timestamps

MASKED = -float("inf")  #: the score of a token that is taken out
BIAS, REPETITION, NGRAMS, SOURCE, LEAST, TIMES, FIRST, LAST = range(8)  #: our order


class Fields(TypedDict, total=False):
    """The fields of `Sampling` that processors of transformers stand for."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logit_bias: dict[int, float]
    repetition_penalty: float
    no_repeat_ngram_size: int
    encoder_no_repeat_ngram_size: int
    min_new_tokens: int
    begin_suppress_tokens: tuple[int, ...]
    timestamps: Timestamps
    forced_bos_token_id: int
    forced_eos_token_id: int
    processors: tuple[LogitsProcessor, ...]


class Setting(NamedTuple):
    """What processors were made for."""

    width: int  #: tokens of a prompt, padding included
    eos: Sequence[int]
    padded: bool  #: whether processors see padding ahead of a prompt
    longest: int  #: the length at which rows end; 0 if the model's context is shorter
    source: bool  #: whether the rows' source ids are all that processors know of the source


class Reading:
    """A list of processors being read."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.fields: Fields = {}
        self.place = BIAS  #: how far down our order it has come

    def come(self, place: int, again: bool = False) -> bool:
        """Go down to a place of our order, if it lies further down (or may be taken again)."""
        if place < self.place or (place == self.place and place != BIAS and not again):
            return False
        self.place = place
        return True

    def ban(self, ids: Sequence[int], bias: float = MASKED) -> bool:
        """Add to the logits of tokens."""
        if bias != MASKED and not self.come(BIAS):
            return False
        if self.place == TIMES or not set(ids).isdisjoint(self.forced):
            return False
        mine = self.fields.setdefault("logit_bias", {})
        for token in ids:
            mine[token] = mine.get(token, 0.0) + bias
        return True

    @property
    def forced(self) -> set[int]:
        """Tokens that are forced already."""
        first = self.fields.get("forced_bos_token_id")
        last = self.fields.get("forced_eos_token_id")
        return {token for token in (first, last) if token is not None}


def native(
    processors: Sequence[LogitsProcessor], setting: Setting
) -> tuple[Fields, tuple[LogitsProcessor, ...]]:
    """Settings that do what the first of these processors do, and the others.

    >>> setting = Setting(4, [2], padded=False, longest=9, source=False)
    >>> native([hf.NoRepeatNGramLogitsProcessor(3)], setting)
    ({'no_repeat_ngram_size': 3}, ())
    """
    reading = Reading(setting)
    for at, processor in enumerate(processors):
        reader = _READERS.get(type(processor))
        if reader is None or not reader(processor, reading):
            return reading.fields, tuple(processors[at:])
    return reading.fields, ()


def _repetition(p: hf.RepetitionPenaltyLogitsProcessor, to: Reading) -> bool:
    if p.prompt_ignore_length is not None or to.setting.padded or not to.come(REPETITION):
        return False
    to.fields["repetition_penalty"] = float(p.penalty)
    return True


def _ngrams(p: hf.NoRepeatNGramLogitsProcessor, to: Reading) -> bool:
    if to.setting.padded or not to.come(NGRAMS):
        return False
    to.fields["no_repeat_ngram_size"] = int(p.ngram_size)
    return True


def _source(p: hf.EncoderNoRepeatNGramLogitsProcessor, to: Reading) -> bool:
    if to.setting.padded or not to.setting.source or not to.come(SOURCE):
        return False
    to.fields["encoder_no_repeat_ngram_size"] = int(p.ngram_size)
    return True


def _least(
    p: hf.MinLengthLogitsProcessor | hf.MinNewTokensLengthLogitsProcessor, to: Reading
) -> bool:
    if sorted(ids_of(p.eos_token_id)) != sorted(to.setting.eos) or not to.come(LEAST, again=True):
        return False
    if isinstance(p, hf.MinLengthLogitsProcessor):
        least = p.min_length - to.setting.width
    else:
        least = p.min_new_tokens
    to.fields["min_new_tokens"] = max(int(least), 0, to.fields.get("min_new_tokens", 0))
    return True


def _suppress(p: hf.SuppressTokensLogitsProcessor, to: Reading) -> bool:
    return to.ban(ids_of(p.suppress_tokens))


def _begin(p: hf.SuppressTokensAtBeginLogitsProcessor, to: Reading) -> bool:
    ids, first = ids_of(p.begin_suppress_tokens), to.fields.get("forced_bos_token_id")
    late = first is not None  # the text begins behind a forced first token
    if p.begin_index != to.setting.width + late or to.place == TIMES:
        return False
    if not set(ids).isdisjoint(to.forced - {first}):
        return False
    to.fields["begin_suppress_tokens"] = (*to.fields.get("begin_suppress_tokens", ()), *ids)
    return True


def _bad_words(p: hf.NoBadWordsLogitsProcessor, to: Reading) -> bool:
    words = list(p.sequence_bias)
    return all(len(word) == 1 for word in words) and to.ban([word[0] for word in words])


def _bias(p: hf.SequenceBiasLogitsProcessor, to: Reading) -> bool:
    words = dict(p.sequence_bias)
    if any(len(word) > 1 for word in words) or not to.come(BIAS):
        return False
    return all(to.ban([word[0]], float(bias)) for word, bias in words.items())


def _timestamps(p: hf.WhisperTimeStampLogitsProcessor, to: Reading) -> bool:
    if p.begin_index != to.setting.width or not p._detect_timestamp_from_logprob:
        return False
    end, before = ids_of(p.eos_token_id), p.no_timestamps_token_id
    if len(end) != 1 or end[0] >= before or not to.come(TIMES):
        return False
    to.fields["timestamps"] = Timestamps(before, end[0], p.max_initial_timestamp_index)
    return True


def _first(p: hf.ForcedBOSTokenLogitsProcessor, to: Reading) -> bool:
    if to.setting.width > 1:
        return True  # it acts on a text of one token alone
    if "begin_suppress_tokens" in to.fields or not to.come(FIRST):
        return False
    to.fields["forced_bos_token_id"] = int(p.bos_token_id)
    return True


def _last(p: hf.ForcedEOSTokenLogitsProcessor, to: Reading) -> bool:
    end = ids_of(p.eos_token_id)
    if p.max_length != to.setting.longest or len(end) != 1 or not to.come(LAST):
        return False
    to.fields["forced_eos_token_id"] = end[0]
    return True


_READERS: dict[type[LogitsProcessor], Callable[..., bool]] = {
    hf.SequenceBiasLogitsProcessor: _bias,
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    hf.NoRepeatNGramLogitsProcessor: _ngrams,
    hf.EncoderNoRepeatNGramLogitsProcessor: _source,
    hf.NoBadWordsLogitsProcessor: _bad_words,
    hf.MinLengthLogitsProcessor: _least,
    hf.MinNewTokensLengthLogitsProcessor: _least,
    hf.SuppressTokensLogitsProcessor: _suppress,
    hf.SuppressTokensAtBeginLogitsProcessor: _begin,
    hf.WhisperTimeStampLogitsProcessor: _timestamps,
    hf.ForcedBOSTokenLogitsProcessor: _first,
    hf.ForcedEOSTokenLogitsProcessor: _last,
}


def ids_of(tensor: Tensor | int | Sequence[int] | None) -> list[int]:
    """Token ids in whatever form transformers keeps them."""
    if tensor is None:
        return []
    return [int(token) for token in torch.as_tensor(tensor).reshape(-1).tolist()]
