"""transformers' logits processors that are settings of our own.

Processors act in the order of their list, ours in one of their own (docs/sampling.md). So the list
is taken from its beginning as long as that comes to the same: bans commute with each other and with
penalties, but the rules for timestamps weigh what earlier ones leave, and what is forced is left
alone by those behind it only if they do not ban it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from transformers import generation as hf

from outrider import Timestamps

MASKED = -float("inf")  #: the score of a token that may not come


class Fields(TypedDict, total=False):
    """The fields of `SamplingParams` that processors of transformers stand for."""

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
    processors: tuple[hf.LogitsProcessor, ...]


class Prompts(NamedTuple):
    """The batch that processors were made for."""

    width: int  #: tokens of each prompt, left padding included
    padded: bool  #: whether any is
    eos: Sequence[int]
    vocab: int
    end: int  #: length, left padding included, at which every row ends at the latest
    sources: Sequence[Sequence[int]] = ()  #: ids that the encoder has read, of each row, if known


def native(
    processors: Sequence[hf.LogitsProcessor], prompts: Prompts
) -> tuple[Fields, list[hf.LogitsProcessor]]:
    """Fields for as many processors from the first on as there are settings for, and the rest."""
    found = _Settings(prompts)
    for at, processor in enumerate(processors):
        if not found.take(processor):
            return found.fields, list(processors[at:])
    return found.fields, []


def ids_of(tensor: Tensor | int | Sequence[int] | None) -> list[int]:
    """Token ids in whatever form transformers keeps them."""
    if tensor is None:
        return []
    return [int(token) for token in torch.as_tensor(tensor, device="cpu").reshape(-1).tolist()]


class _Settings:
    """Settings so far, and what may still join them."""

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.fields: Fields = {}

    def take(self, processor: hf.LogitsProcessor) -> bool:
        """Whether it has become part of the settings."""
        taker = _TAKERS.get(type(processor))
        return taker is not None and taker(self, processor)

    @property
    def _forced(self) -> set[int]:
        fields = self.fields
        return {
            token
            for token in (fields.get("forced_bos_token_id"), fields.get("forced_eos_token_id"))
            if token is not None
        }

    @property
    def _open(self) -> bool:
        """Whether nothing has been weighed or forced: bans and penalties may still join."""
        return "timestamps" not in self.fields and not self._forced

    def _bannable(self, ids: Sequence[int]) -> bool:
        """Whether a ban of these may join: behind a forced token that bans another, too."""
        return "timestamps" not in self.fields and not self._forced.intersection(ids)

    def _within(self, ids: Tensor | Sequence[int]) -> list[int]:
        return [token for token in ids_of(ids) if 0 <= token < self.prompts.vocab]

    def repetition(self, processor: hf.RepetitionPenaltyLogitsProcessor) -> bool:
        """Padding counts there as tokens do."""
        known = "repetition_penalty" in self.fields or self.prompts.padded
        if known or not self._open or processor.prompt_ignore_length is not None:
            return False
        self.fields["repetition_penalty"] = float(processor.penalty)
        return True

    def ngrams(self, processor: hf.NoRepeatNGramLogitsProcessor) -> bool:
        """Padding counts there as tokens do."""
        if "no_repeat_ngram_size" in self.fields or self.prompts.padded or not self._open:
            return False
        self.fields["no_repeat_ngram_size"] = int(processor.ngram_size)
        return True

    def source_ngrams(self, processor: hf.EncoderNoRepeatNGramLogitsProcessor) -> bool:
        """It keeps the n-grams of its sources: they must be those of the rows' own."""
        sources, size = self.prompts.sources, int(processor.ngram_size)
        known = "encoder_no_repeat_ngram_size" in self.fields or self.prompts.padded
        if known or not self._open or not sources or not all(sources):
            return False
        for row, ids in enumerate(sources):
            kept = processor.generated_ngrams[row * processor.batch_size // len(sources)]
            if {(*ahead, last) for ahead in kept for last in kept[ahead]} != set(
                _ngrams(ids, size)
            ):
                return False
        self.fields["encoder_no_repeat_ngram_size"] = size
        return True

    def biases(self, processor: hf.SequenceBiasLogitsProcessor) -> bool:
        """Of single tokens. They are added before anything else, unless they ban."""
        biases = {ids: float(bias) for ids, bias in processor.sequence_bias.items()}
        if not self._open or any(len(ids) != 1 for ids in biases):
            return False
        first = all(name == "logit_bias" for name in self.fields)
        if any(bias != MASKED for bias in biases.values()) and not first:
            return False
        if any(not 0 <= ids[0] < self.prompts.vocab for ids in biases):
            return False  # it says so itself
        self._add({int(ids[0]): bias for ids, bias in biases.items()})
        return True

    def _add(self, biases: dict[int, float]) -> None:
        bias = self.fields.setdefault("logit_bias", {})
        for token, value in biases.items():
            bias[token] = bias.get(token, 0.0) + value

    def least(
        self, processor: hf.MinLengthLogitsProcessor | hf.MinNewTokensLengthLogitsProcessor
    ) -> bool:
        """Only of the tokens that end the text."""
        if not self._open or sorted(ids_of(processor.eos_token_id)) != sorted(self.prompts.eos):
            return False
        if isinstance(processor, hf.MinLengthLogitsProcessor):
            least = processor.min_length - self.prompts.width
        else:
            least = processor.min_new_tokens
        self.fields["min_new_tokens"] = max(int(least), 0, self.fields.get("min_new_tokens", 0))
        return True

    def suppress(self, processor: hf.SuppressTokensLogitsProcessor) -> bool:
        """What is outside the vocabulary is nothing there."""
        ids = self._within(processor.suppress_tokens)
        if not self._bannable(ids):
            return False
        self._add(dict.fromkeys(ids, MASKED))
        return True

    def begin(self, processor: hf.SuppressTokensAtBeginLogitsProcessor) -> bool:
        """At the first place that is not forced."""
        ids, place = self._within(processor.begin_suppress_tokens), self._place(processor)
        if place < 0 or not ids:
            return True  # that place is behind us
        if place != int("forced_bos_token_id" in self.fields) or not self._bannable(ids):
            return False
        before = self.fields.get("begin_suppress_tokens", ())
        self.fields["begin_suppress_tokens"] = tuple(dict.fromkeys([*before, *ids]))
        return True

    def _place(
        self,
        processor: hf.SuppressTokensAtBeginLogitsProcessor | hf.WhisperTimeStampLogitsProcessor,
    ) -> int:
        return int(processor.begin_index) - self.prompts.width

    def timestamps(self, processor: hf.WhisperTimeStampLogitsProcessor) -> bool:
        """Made for these prompts and for a vocabulary laid out as Whisper's."""
        mark, end = processor.no_timestamps_token_id, processor.eos_token_id
        fits = isinstance(end, int) and 0 <= end < mark and mark + 1 < self.prompts.vocab
        whole = processor._detect_timestamp_from_logprob and processor.timestamp_begin == mark + 1
        if not (self._open and fits and whole and self._place(processor) == 0):
            return False
        most = processor.max_initial_timestamp_index
        self.fields["timestamps"] = Timestamps(mark, end, most)
        return True

    def first(self, processor: hf.ForcedBOSTokenLogitsProcessor) -> bool:
        """It acts on prompts of one token, and nowhere else."""
        if self.prompts.width != 1:
            return True
        if "begin_suppress_tokens" in self.fields or self._forced:
            return False
        return self._force("forced_bos_token_id", [processor.bos_token_id])

    def last(self, processor: hf.ForcedEOSTokenLogitsProcessor) -> bool:
        """One token, where the rows end."""
        if processor.max_length != self.prompts.end or "forced_eos_token_id" in self.fields:
            return False
        return self._force("forced_eos_token_id", ids_of(processor.eos_token_id))

    def _force(self, name: str, ids: Sequence[int]) -> bool:
        if len(ids) != 1 or not 0 <= ids[0] < self.prompts.vocab:
            return False
        if name == "forced_bos_token_id":
            self.fields["forced_bos_token_id"] = ids[0]
        else:
            self.fields["forced_eos_token_id"] = ids[0]
        return True


def _ngrams(ids: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[at : at + size]) for at in range(len(ids) - size + 1))


_TAKERS: dict[type[hf.LogitsProcessor], Callable[[_Settings, hf.LogitsProcessor], bool]] = {
    hf.SequenceBiasLogitsProcessor: _Settings.biases,
    hf.NoBadWordsLogitsProcessor: _Settings.biases,
    hf.RepetitionPenaltyLogitsProcessor: _Settings.repetition,
    hf.NoRepeatNGramLogitsProcessor: _Settings.ngrams,
    hf.EncoderNoRepeatNGramLogitsProcessor: _Settings.source_ngrams,
    hf.MinLengthLogitsProcessor: _Settings.least,
    hf.MinNewTokensLengthLogitsProcessor: _Settings.least,
    hf.SuppressTokensLogitsProcessor: _Settings.suppress,
    hf.SuppressTokensAtBeginLogitsProcessor: _Settings.begin,
    hf.WhisperTimeStampLogitsProcessor: _Settings.timestamps,
    hf.ForcedBOSTokenLogitsProcessor: _Settings.first,
    hf.ForcedEOSTokenLogitsProcessor: _Settings.last,
}


# transformers' logits processors as settings of our own, or replayed as they are.


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
