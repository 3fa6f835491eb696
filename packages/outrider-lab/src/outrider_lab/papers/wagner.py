"""The protocol of Wagner et al. 2024 on any pair: what a verification method costs in use.

Assisted generation of transformers runs with each method in the place of its own function, and what
happens inside that function is summed over all decoding steps. The number of drafted tokens follows
transformers' heuristic, as in the paper: +2 after a full acceptance, else -1. What is swept is the
number that it starts from.

Time is counted twice. By the clock, for the share of a whole generation: on a CPU the thread's CPU
time, on CUDA calls are bracketed by synchronisation, which costs every method the same. And by the
profiler (`lab.profiling`), as in the paper's tables. A drafted token counts as accepted if it is in
the text. `wagner_tables` says which of the paper's tables and figures these make.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import utils as _utils

from outrider_lab import profiling
from outrider_lab.baselines import Paper
from outrider_lab.baselines.assisted_generation import (
    NAME,
    asked,
    checked,
    ended,
    speculative_sampling,
    theirs,
)
from outrider_lab.bench import intervals, measure
from outrider_lab.bench.intervals import Interval
from outrider_lab.papers.record import Row
from outrider_lab.papers.wagner_pairs import WagnerPair

START = 5  #: drafted tokens of a text's first step, where nothing else is asked
Verify = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class WagnerCalls:
    """What happened inside the verification function during one text."""

    seconds: list[float] = field(default_factory=list)  #: by the clock
    profiled: list[float] = field(default_factory=list)  #: seconds by the profiler, if it ran
    gammas: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)  #: mean accept probability per token
    vocab: int = 0


@dataclass(frozen=True)
class WagnerText:
    """One generation: its calls, seconds of the whole, tokens, text and most memory in use."""

    calls: WagnerCalls
    wall: float
    tokens: int
    text: str
    peak_mb: float | None


@dataclass(frozen=True)
class WagnerArm:
    """One method over all prompts, in their order."""

    name: str
    exact: bool
    gamma: int
    texts: list[WagnerText]
    worth: Interval | None  #: the texts' score; None without references

    def total(self, part: str) -> list[float]:
        """Of each prompt the sum of one of the fields of `WagnerCalls`."""
        return [float(sum(vars(text.calls)[part])) for text in self.texts]

    @property
    def counts(self) -> list[float]:
        """Calls of each prompt."""
        return [float(len(text.calls.seconds)) for text in self.texts]

    @property
    def walls(self) -> list[float]:
        """Seconds of each prompt."""
        return [text.wall for text in self.texts]

    def step_ms(self, by: str = "seconds") -> Interval:
        """Milliseconds a call, by "seconds" (the clock) or "profiled"."""
        found = [1e3 * seconds for seconds in self.total(by)]
        return intervals.quotient(found, self.counts, intervals.LOG)

    def acceptance(self) -> Interval:
        """Accepted over drafted tokens."""
        drafted = self.total("gammas")
        return intervals.quotient(self.total("accepted"), drafted, intervals.SHARE)

    @property
    def gigabytes_a_second(self) -> float:
        """Bytes of logits to be read (2 gamma + 1 rows of float32) over the clock's time."""
        calls = [text.calls for text in self.texts]
        read = sum(4 * one.vocab * (2 * gamma + 1) for one in calls for gamma in one.gammas)
        return read / max(sum(self.total("seconds")), 1e-12) / 1e9

    @property
    def label(self) -> str:
        """The name; a method that changes the law says so."""
        return self.name if self.exact else f"{self.name} (lossy)"

    def row(self, base: "WagnerArm", score: str, by: str = "seconds") -> Row:
        """The paper's columns: against `base`, paired by prompt, times by the clock or profiled."""
        each = [1e3 * seconds for text in self.texts for seconds in vars(text.calls)[by]]
        step, accepted = self.step_ms(by), self.acceptance()
        predicted = [value for text in self.texts for value in text.calls.predicted]
        found: Row = {
            "method": self.label,
            "prompts": len(self.texts),
            "calls": len(each),
            "sum ms": sum(each),
            "step ms": step.value,
            "step ms 95 %": step.text(),
            "deviation ms": statistics.pstdev(each) if each else 0.0,
        }
        if base is not self:
            found |= less("sum", intervals.quotient(self.total(by), base.total(by), intervals.LOG))
            found |= less("step", _of_steps(self, base, by))
        if by == "seconds":
            if base is not self:
                found |= less("wall", intervals.quotient(self.walls, base.walls, intervals.LOG))
            found["share of wall %"] = 100 * sum(self.total(by)) / max(sum(self.walls), 1e-9)
            found["GB/s"] = self.gigabytes_a_second
        found |= {
            "accepted %": 100 * accepted.value,
            "accepted 95 %": percent(accepted),
            "formula %": 100 * statistics.fmean(predicted) if predicted else None,
            "tokens": sum(text.tokens for text in self.texts),
        }
        if self.worth is None:
            return found
        return found | {score: self.worth.value, f"{score} 95 %": self.worth.text()}


def less(what: str, ratio: Interval) -> Row:
    """Percent less of something than the baseline takes, from the ratio to it.

    >>> less("sum", Interval(0.8, 0.7, 0.9, 20))
    {'sum less %': 20.0, 'sum less 95 %': '[10.0, 30.0]'}
    """
    share = Interval(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.prompts)
    return {
        f"{what} less %": round(100 * share.value, 9),
        f"{what} less 95 %": percent(share),
    }


def percent(share: Interval) -> str:
    """The ends of an interval of shares in percent; nothing if there is no interval.

    >>> percent(Interval(0.5, 0.25, 0.75, 20))
    '[25.0, 75.0]'
    """
    value, low, high = (100 * end for end in (share.value, share.low, share.high))
    return Interval(value, low, high, share.prompts).text(1)


def _of_steps(ours: WagnerArm, theirs: WagnerArm, by: str) -> Interval:
    own = intervals.over(ours.total(by), ours.counts)
    base = intervals.over(theirs.total(by), theirs.counts)
    return intervals.interval(
        lambda units: own(units) / base(units), len(ours.texts), intervals.LOG
    )


def methods(bound: float = 1e4) -> dict[str, tuple[Verify, bool]]:
    """Name -> (function, exact). transformers' own comes first: the baseline."""
    sigmoid = Paper(True, -bound, bound)
    return {
        "transformers": (theirs(), True),
        "paper exact": (Paper(), True),
        "paper sigmoid": (sigmoid, False),
        "outrider": (speculative_sampling, True),
    }


@contextmanager
def measured(
    verify: Verify, calls: WagnerCalls, *, predict: Paper | None = None, profile: bool = False
) -> Iterator[None]:
    """transformers calls `verify` inside this block and `calls` fills up."""
    original = checked()

    def timed(
        ids: Tensor, draft: Tensor, length: int, target: Tensor, *later: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        done, weight = asked(original, later, named)

        def call() -> tuple[Tensor, Tensor]:
            return verify(ids, draft, length, target, assistant_ensemble_weight=weight)

        start = _clock(target)
        if profile:
            (valid, n), seconds = profiling.profiled(call, target.device)
            calls.profiled.append(seconds)
        else:
            valid, n = call()
        calls.seconds.append(_clock(target) - start)
        calls.gammas.append(draft.shape[1])
        if done:
            valid, n = ended(valid, n, length)
        calls.accepted.append(valid.shape[1] - 1)
        calls.vocab = target.shape[-1]
        if predict is not None:
            tau, *_ = predict.tables(draft, target)
            tokens = ids[:, -length:, None]
            calls.predicted.append(float(tau.gather(2, tokens).mean()))
        return valid, n

    setattr(_utils, NAME, timed)
    try:
        yield
    finally:
        setattr(_utils, NAME, original)


def _clock(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
        return time.perf_counter()
    return time.thread_time()


def compare(
    pair: WagnerPair, arms: dict[str, tuple[Verify, bool]], *, tokens: int, gamma: int, seed: int,
    prompts: int, predict: Paper | None = None, profile: bool = False,
) -> list[WagnerArm]:  # fmt: skip
    """Every method on every prompt, in turn, the first one rotating; gamma starts from `gamma`."""
    names = list(arms)
    for name in names:  # warm-up
        with measured(arms[name][0], WagnerCalls(), profile=profile):
            generate(pair, 0, 6, gamma, seed, heuristic=True)
    clock = time.perf_counter if pair.device.type == "cuda" else time.thread_time
    count = min(prompts, len(pair.prompts))
    texts: dict[str, list[WagnerText]] = {name: [] for name in names}
    for _, number, name in measure.turns(names, count):
        verify, exact = arms[name]
        calls, peak, start = WagnerCalls(), profiling.Peak(pair.device), clock()
        with measured(verify, calls, predict=None if exact else predict, profile=profile):
            ids = generate(pair, number, tokens, gamma, seed + number, heuristic=True)
        wall = clock() - start
        texts[name].append(WagnerText(calls, wall, len(ids), pair.decode(ids), peak.megabytes()))
    return [WagnerArm(name, arms[name][1], gamma, texts[name], _worth(pair, texts[name]))
            for name in names]  # fmt: skip


def _worth(pair: WagnerPair, texts: Sequence[WagnerText]) -> Interval | None:
    references = [prompt.reference for prompt in pair.prompts[: len(texts)]]
    if not any(references):
        return None
    return pair.score.interval([text.text for text in texts], references)


def generate(
    pair: WagnerPair, number: int, tokens: int, gamma: int, seed: int, temperature: float = 1.0,
    *, heuristic: bool = False,
) -> list[int]:  # fmt: skip
    """New tokens of one prompt by assisted generation, no filters.

    gamma tokens are drafted a step, or as many in the first and then by transformers' heuristic.
    """
    settings = pair.draft.generation_config
    settings.num_assistant_tokens = gamma
    settings.num_assistant_tokens_schedule = "heuristic" if heuristic else "constant"
    settings.assistant_confidence_threshold = 0.0
    torch.manual_seed(seed)
    prompt = pair.prompts[number]
    text = GenerationMixin.generate(  # models have their own, with windows and fallbacks
        pair.target,
        **prompt.arguments,
        assistant_model=pair.draft,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
    )
    found: list[int] = text[0, prompt.length :].tolist()
    return found


def allocated(verify: Verify, gamma: int, vocab: int, device: str = "cpu") -> float:
    """Megabytes that one call allocates.

    On a CPU PyTorch's allocations plus NumPy's peak, on CUDA the peak above what was in use.
    """
    target = torch.randn(1, gamma + 1, vocab, device=device)
    draft = target[:, :gamma] + torch.randn(1, gamma, vocab, device=device)
    ids = torch.zeros(1, gamma, dtype=torch.int64, device=device)
    verify(ids, draft, gamma, target)
    if target.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        verify(ids, draft, gamma, target)
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before) / 1e6
    return profiling.allocated(lambda: verify(ids, draft, gamma, target))
