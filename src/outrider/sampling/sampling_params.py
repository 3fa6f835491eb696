"""Sampling parameters of a request, as tensors of a batch, and applied: temperature and filters.

docs/adding-a-sampling-parameter.md lists what a new one touches.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider import arguments
from outrider.row_params import Processor, SamplingRows
from outrider.sampling.timestamps import Timestamps

#: The largest number that logits may be changed by: they are in float32.
MOST = torch.finfo(torch.float32).max
_LEAST = torch.finfo(torch.float32).tiny
#: Logits over a smaller temperature may leave float32, which would change the law.
LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    temperature  0 is greedy (argmax, lowest id on ties); 1, the default, leaves the model's law
                 alone. (`outrider generate` has 0.)
    top_k        keep the k largest logits (0: off). Ties at the threshold stay in.
    top_p        keep the smallest set whose probability reaches top_p (1: off). Ties stay in.
    min_p        keep tokens with at least min_p times the largest probability (0: off).
    seed         the same seed, prompt and settings give the same text. None draws a fresh seed
                 from torch's global generator. Where drafts are drawn, temperature is above 0 and
                 a planner sizes them, the costs it goes by and the `max_num_seqs` are settings,
                 too (docs/planner.md); coupled, placed and greedy texts need the seed alone.

    Before these, in this order, at every tree node with the node's own prefix (docs/sampling.md):

    logit_bias            {token id: number}, added to their logits; -inf bans a token
    repetition_penalty    divides positive and multiplies negative logits of tokens in prompt or
                          output (1: off; transformers' convention)
    frequency_penalty, presence_penalty
                          taken off per occurrence, and once, of tokens in the output (0: off;
                          OpenAI's convention)
    no_repeat_ngram_size  no n-gram occurs twice in prompt and output (0: off)
    encoder_no_repeat_ngram_size
                          no n-gram of the source comes again (0: off); needs a source of token ids
    min_new_tokens        no stop token before this many tokens
    begin_suppress_tokens must not come first; what must never come is a logit_bias of -inf
    timestamps            Whisper's rules for them, as `Timestamps`
    forced_bos_token_id   the first token, whatever is banned; the text begins behind it
    forced_eos_token_id   the last token if the row comes to its budget or the end of the context
    processors            further functions of (input_ids, scores), as transformers' LogitsProcessor
    padding               ids that processors see ahead of the prompt (left-padded batches)

    Filters act in the order temperature, top-k, top-p, min-p, as in transformers.

    Raises ConfigurationError for a value of another kind or outside its range. Scalars of NumPy and
    torch are numbers.

    >>> SamplingParams(temperature=0.7, top_p=0.9).top_k
    0
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    encoder_no_repeat_ngram_size: int = 0
    begin_suppress_tokens: tuple[int, ...] = ()
    timestamps: Timestamps | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    processors: tuple[Processor, ...] = ()
    padding: tuple[int, ...] = ()

    @property
    def shapes(self) -> bool:
        """Whether anything acts on the logits before temperature and filters."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.no_repeat_ngram_size
            or self.encoder_no_repeat_ngram_size
            or self.min_new_tokens
            or self.begin_suppress_tokens
            or self.timestamps is not None
            or self.forced_bos_token_id is not None
            or self.forced_eos_token_id is not None
            or self.processors
        )

    def __post_init__(self) -> None:
        for name, (what, do, off, least, most) in _NUMBERS.items():
            given = vars(self)[name]
            value = arguments.number(name, given, what, do)
            if value != off and not least <= value <= most:
                arguments.refuse(name, what, given, do)
            object.__setattr__(self, name, value)
        sizes = dict.fromkeys(("top_k", *_SIZES), 0)
        arguments.wholes(self, "use 0 to switch it off", **sizes)
        if self.seed is not None:
            do = "use an integer of 64 bits, or None for a fresh one"
            seed = arguments.whole("seed", self.seed, do, most=2**64 - 1)
            object.__setattr__(self, "seed", seed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            token = vars(self)[name]
            if token is not None:
                do = "give a token id, or None for any token"
                object.__setattr__(self, name, arguments.whole(name, token, do, least=0))
        if not isinstance(self.timestamps, Timestamps | None):
            do = "write timestamps=Timestamps(no_timestamps_id=50363, end_id=50257)"
            arguments.refuse("timestamps", "Timestamps or None", self.timestamps, do)
        banned = arguments.several(
            "begin_suppress_tokens",
            self.begin_suppress_tokens,
            "a tuple of token ids",
            "write begin_suppress_tokens=(220, 50257)",
            arguments.is_whole,
            ordered=False,
        )
        object.__setattr__(self, "begin_suppress_tokens", banned)
        what, do = "a tuple of functions of (input_ids, scores)", "write processors=(my_processor,)"
        if callable(self.processors):
            arguments.refuse("processors", what, self.processors, do)
        processors = arguments.several("processors", self.processors, what, do, callable)
        object.__setattr__(self, "processors", processors)
        padding = arguments.several(
            "padding", self.padding, "a tuple of token ids", "leave it out", arguments.is_whole
        )
        object.__setattr__(self, "padding", padding)


#: Whole numbers beside `top_k` that 0 switches off.
_SIZES = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_new_tokens")
_ABOVE_0 = math.ulp(0.0)  #: the least number above 0
_PENALTY = ("a finite number that float32 holds", "use 0 to switch it off", 0, -MOST, MOST)
#: What each number must be, what to do about another one, the value that is off and always fits,
#: and the least and the largest of the others.
_NUMBERS: dict[str, tuple[str, str, float, float, float]] = {
    "temperature": (
        f"0, or a finite number of at least {LEAST_TEMPERATURE:g}",
        "use 0 for greedy decoding",
        0,
        LEAST_TEMPERATURE,
        sys.float_info.max,
    ),
    "top_p": ("a number in (0, 1]", "use 1 to switch it off", 1, _ABOVE_0, 1),
    "min_p": ("a number in [0, 1]", "use 0 to switch it off", 0, 0, 1),
    "repetition_penalty": (
        "a positive number that float32 holds",
        "use 1 to switch it off",
        1,
        _LEAST,
        MOST,
    ),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
}


def _biases(given: Any) -> dict[int, float]:
    """`logit_bias` as it was given, checked: token ids and what is added to their logits."""
    what = "a mapping of token ids to numbers"
    do = 'write logit_bias={token_id: 2.0}, with -float("inf") for a token that must not come'
    if not isinstance(given, Mapping):
        arguments.refuse("logit_bias", what, given, do)
    biases: dict[int, float] = {}
    for token, bias in given.items():
        if type(token) is int and type(bias) is float and _adds(bias):
            biases[token] = bias  # what nearly all are; bans are given by the thousand
            continue
        id_ = arguments.plain(token)
        value = arguments.number(f"logit_bias of token {token!r}", bias, "a number", do)
        if not arguments.is_whole(id_):
            arguments.refuse("logit_bias", what, given, do)
        if not _adds(value):
            what = f"finite in float32 (at most {MOST:.1e} either way), or -inf"
            arguments.refuse(f"logit_bias of token {token!r}", what, bias, do)
        biases[int(id_)] = value
    return biases


def _adds(bias: float) -> bool:
    """Whether it bans, or is finite where it is added."""
    return bias == -math.inf or abs(bias) <= MOST


def rows(settings: Sequence[SamplingParams], device: torch.device | str = "cpu") -> SamplingRows:
    """Tensors [B] from one `SamplingParams` per row. Greedy rows have no filters."""
    inverse, top_k, top_p, min_p, seeds = [], [], [], [], []
    hot, all_top_k = 0, True
    for s in settings:
        greedy = s.temperature == 0
        hot += greedy
        all_top_k = all_top_k and (greedy or s.top_k > 0)
        inverse.append(math.inf if greedy else 1.0 / s.temperature)
        top_k.append(0 if greedy else s.top_k)
        top_p.append(1.0 if greedy else s.top_p)
        min_p.append(0.0 if greedy else s.min_p)
        seed = fresh_seed() if s.seed is None else s.seed
        seeds.append(seed - (1 << 64) if seed >= 1 << 63 else seed)  # signed
    return SamplingRows(
        torch.tensor(inverse, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int64, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
        torch.tensor(seeds, dtype=torch.int64, device=device),
        greedy="all" if hot == len(settings) else "some" if hot else "none",
        most_top_k=max(top_k, default=0),
        all_top_k=all_top_k,
        any_top_p=min(top_p, default=1.0) < 1,
        any_min_p=max(min_p, default=0.0) > 0,
    )


def fresh_seed() -> int:
    """A seed from torch's global generator, for a request that has none."""
    return int(torch.randint(-(2**62), 2**62, (), device="cpu").item()) % 2**64
