"""How an encoder-decoder's answers begin and which tokens they may hold, by its own configuration.

transformers' `generate` applies what a generation configuration says of tokens to every answer, and
models are published to be used so: Marian bans its padding, mBART begins with a language. The same
is applied here, in sight: `Speculator.rules` has it, and `generate(..., rules=...)` replaces it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.row_params import Processor
from outrider.sampling.sampling_params import SamplingParams

#: Fields of `SamplingParams` that say which tokens may come where. The others are the user's alone.
RULES = tuple(
    """
    logit_bias repetition_penalty frequency_penalty presence_penalty no_repeat_ngram_size
    min_new_tokens encoder_no_repeat_ngram_size begin_suppress_tokens timestamps
    forced_bos_token_id forced_eos_token_id processors
    """.split()
)
FORCED = ("forced_bos_token_id", "forced_eos_token_id")
#: Settings of a generation configuration that are not applied, and the values that mean nothing.
UNKNOWN: dict[str, tuple[object, ...]] = {
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
}


#: Settings of how a text is drawn for which a caller says nothing.
WARPERS = ("temperature", "top_k", "top_p", "min_p")
#: More that a model which goes on from its prompt may be told, and that is not followed.
UNFOLLOWED: dict[str, tuple[object, ...]] = {
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0.0),
    "stop_strings": (None, []),
    "token_healing": (None, False),
    "renormalize_logits": (None, False),
    "remove_invalid_values": (None, False),
    "max_time": (None,),
}


class DecoderPrompt(NamedTuple):
    """What stands ahead of an answer, and the rules for its tokens."""

    start: int  #: the token that every answer begins behind
    usual: SamplingParams = SamplingParams()  #: its rules; nothing else of it counts
    min_length: int = 0  #: no end before this many tokens, those that the answer is given included
    left_out: tuple[str, ...] = ()  #: settings that would change the law and are not applied

    @classmethod
    def of(cls, settings: Mapping[str, Any], eos: Sequence[int], name: str) -> "DecoderPrompt":
        """From a generation configuration as a mapping; `name` is the model's in messages.

        Settings of the search (beams, temperature, filters) and of the length are the caller's.
        Raises ConfigurationError if it does not say what answers begin with.

        >>> opening = DecoderPrompt.of({"decoder_start_token_id": 0, "suppress_tokens": [7]}, [1],
        ...     "T5")
        >>> opening.start, opening.rules().logit_bias
        (0, {7: -inf})
        """
        start = settings.get("decoder_start_token_id")
        start = settings.get("bos_token_id") if start is None else start
        if not isinstance(start, int) or start < 0:
            raise ConfigurationError(
                f"{name} does not say what its answers begin with; got decoder_start_token_id="
                f"{start!r}; set it in its generation_config"
            )
        rules, left_out = _rules(settings, eos)
        return cls(start, rules, settings.get("min_length") or 0, left_out)

    def rules(self, begun: int = 1) -> SamplingParams:
        """The rules for an answer of which so many tokens are given, the start included."""
        least = max(self.usual.min_new_tokens, self.min_length - begun)
        return replace(self.usual, min_new_tokens=least)


class ModelDefaults(NamedTuple):
    """What the generation configuration of a model that goes on from its prompt says.

    rules       for its tokens: they hold for every text that says nothing else
    sampling    temperature and filters of a text for which none are given
    min_length  no end before this many tokens, those of the prompt included
    left_out    settings that are not followed, each with its value
    """

    rules: SamplingParams = SamplingParams()
    sampling: Mapping[str, Any] = MappingProxyType({})
    min_length: int = 0
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any], eos: Sequence[int]) -> "ModelDefaults":
        """From a generation configuration as a mapping. How long texts are is the caller's.

        A configuration that says do_sample=False has no temperature and no filters, as in
        transformers. Raises ConfigurationError for values that nothing can follow.

        >>> ModelDefaults.of({"temperature": 0.7, "top_k": 20, "typical_p": 0.9}, [1]).left_out
        ('typical_p=0.9',)
        """
        draws = settings.get("do_sample") is not False
        said = {name: settings.get(name) for name in WARPERS if draws}
        sampling = {name: value for name, value in said.items() if value is not None}
        SamplingParams(**sampling)
        rules, unknown = _rules(settings, eos)
        unknown += tuple(
            name for name, nothing in UNFOLLOWED.items() if settings.get(name) not in nothing
        )
        left_out = tuple(f"{name}={settings.get(name)!r}" for name in unknown)
        least = settings.get("min_length") or 0
        return cls(rules, MappingProxyType(sampling), least, left_out)

    def __reduce__(self) -> tuple[object, ...]:
        """As it goes to another process."""
        parts = self.rules, dict(self.sampling), self.min_length, self.left_out
        return ModelDefaults, parts

    @property
    def followed(self) -> tuple[str, ...]:
        """What is followed, each with its value."""
        usual = {field.name: field.default for field in fields(SamplingParams)}
        said = arguments.fields_of(self.rules, RULES)
        found = [f"{name}={value!r}" for name, value in said.items() if value != usual[name]]
        found += [f"{name}={value!r}" for name, value in self.sampling.items()]
        return (*found, *([f"min_length={self.min_length}"] if self.min_length else []))

    def over(
        self, given: Mapping[str, Any], usual: Mapping[str, Any], draws: bool = True
    ) -> tuple[SamplingParams, SamplingParams]:
        """How a text is sampled for which these fields are given, and the rules that hold for it.

        What is not given is as the model says, or else as is `usual`. `draws` is False for a
        search, which has a temperature only if one is given.
        """
        own = self.sampling if draws else {}
        rules = self.rules_without(0, [name for name in given if name in RULES])
        return SamplingParams(**{**usual, **own, **given}), rules

    def rules_without(self, begun: int, given: Iterable[str] = ()) -> SamplingParams:
        """The rules for a text behind a prompt of so many tokens, without fields that are given."""
        usual: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
        least = max(self.rules.min_new_tokens, self.min_length - begun)
        rules = replace(self.rules, min_new_tokens=least)
        return replace(rules, **{name: usual[name] for name in given if name != "logit_bias"})


def _rules(
    settings: Mapping[str, Any], eos: Sequence[int]
) -> tuple[SamplingParams, tuple[str, ...]]:
    """What a generation configuration says of tokens, and the settings that are not applied."""
    bias, processors = _biases(settings, eos)
    several = {name: _ids(settings.get(name)) for name in FORCED}
    forced = {name: ids[0] if len(ids) == 1 else None for name, ids in several.items()}
    rules = SamplingParams(
        logit_bias=bias or None,
        repetition_penalty=settings.get("repetition_penalty") or 1.0,
        no_repeat_ngram_size=settings.get("no_repeat_ngram_size") or 0,
        encoder_no_repeat_ngram_size=settings.get("encoder_no_repeat_ngram_size") or 0,
        min_new_tokens=settings.get("min_new_tokens") or 0,
        begin_suppress_tokens=tuple(settings.get("begin_suppress_tokens") or ()),
        processors=processors,
        forced_bos_token_id=forced["forced_bos_token_id"],
        forced_eos_token_id=forced["forced_eos_token_id"],
    )
    left_out = [k for k, nothing in UNKNOWN.items() if settings.get(k) not in nothing]
    left_out += [name for name, ids in several.items() if len(ids) > 1]
    return rules, tuple(left_out)


def _ids(given: int | Sequence[int] | None) -> list[int]:
    """The tokens of which one is forced."""
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def _biases(
    settings: Mapping[str, Any], eos: Sequence[int]
) -> tuple[dict[int, float], tuple[Processor, ...]]:
    """Bans and biases of single tokens, and processors for those of several in a row."""
    bias = dict.fromkeys(settings.get("suppress_tokens") or (), -float("inf"))
    weighted = settings.get("sequence_bias") or []
    if isinstance(weighted, Mapping):
        weighted = [[list(ids), value] for ids, value in weighted.items()]
    words = [list(ids) for ids in settings.get("bad_words_ids") or []]
    words = [ids for ids in words if ids not in [[token] for token in eos]]  # as transformers does
    for ids in words:
        if len(ids) == 1:
            bias[ids[0]] = -float("inf")
    for ids, value in weighted:
        if len(ids) == 1:
            bias[ids[0]] = bias.get(ids[0], 0.0) + value
    from transformers import generation

    processors: list[Processor] = []
    longer = [[ids, value] for ids, value in weighted if len(ids) > 1]
    if longer:
        processors.append(generation.SequenceBiasLogitsProcessor(longer))
    phrases = [ids for ids in words if len(ids) > 1]
    if phrases:
        processors.append(generation.NoBadWordsLogitsProcessor(phrases))
    return bias, tuple(processors)


#: Of a model that says nothing.
SILENT = ModelDefaults()


def ruled(own: SamplingParams, rules: SamplingParams) -> SamplingParams:
    """A row's sampling with these rules where it has none of its own.

    Biases and processors are joined: the row's bias of a token goes first, its processors come
    last.

    >>> ruled(SamplingParams(0, forced_bos_token_id=5), SamplingParams(
    ...     forced_bos_token_id=3)).temperature
    0
    >>> ruled(SamplingParams(logit_bias={1: 2.0}), SamplingParams(logit_bias={0: 1.0})).logit_bias
    {0: 1.0, 1: 2.0}
    """
    usual = {field.name: field.default for field in fields(SamplingParams)}
    given = arguments.fields_of(own, RULES)
    changed = {
        name: value
        for name, value in arguments.fields_of(rules, RULES).items()
        if given[name] == usual[name] != value
    }
    if rules.logit_bias and own.logit_bias:
        changed["logit_bias"] = {**rules.logit_bias, **own.logit_bias}
    if rules.processors and own.processors:
        changed["processors"] = (*rules.processors, *own.processors)
    return replace(own, **changed) if changed else own
