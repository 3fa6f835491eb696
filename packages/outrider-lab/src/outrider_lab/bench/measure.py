"""Timed comparisons: arms interleaved in one process, paired ratios with an interval."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.sampling.sampling_params import SamplingParams
from outrider.text.output_text import Generation, Stop
from outrider.text.speculator import Speculator
from outrider_lab.bench import intervals

Arm = TypeVar("Arm")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Trial(Generic[Result]):
    """One completion of one prompt by one arm, with whatever the arm returned."""

    arm: str
    prompt: int
    repeat: int
    seconds: float
    tokens: int
    result: Result

    @property
    def ms_per_token(self) -> float:
        """Time per emitted token; what is timed is the arm's to say."""
        return 1e3 * self.seconds / max(self.tokens, 1)


def turns(arms: Sequence[Arm], prompts: int, repeats: int = 1) -> Iterator[tuple[int, int, Arm]]:
    """(repeat, prompt, arm): every arm on every prompt, arms in turn, the starting arm rotating.

    >>> [arm for _, prompt, arm in turns("abc", 2)]
    ['a', 'b', 'c', 'b', 'c', 'a']
    """
    for repeat in range(repeats):
        for prompt in range(prompts):
            for place in range(len(arms)):
                yield repeat, prompt, arms[(repeat + prompt + place) % len(arms)]


def interleave(
    arms: dict[str, Speculator],
    prompts: Sequence[str],
    sampling: Callable[[int], SamplingParams],
    stop: Stop,
    repeats: int = 1,
    progress: Callable[[], None] | None = None,
) -> list[Trial[Generation]]:
    """Every arm on every prompt in `turns`, after one warm-up each; times are without prefill.

    `sampling(i)` gives prompt i's settings, the same for all arms.
    """
    for arm in arms.values():
        arm.generate(prompts[0], sampling(0), Stop(8, token_ids=()))
    trials = []
    for repeat, number, name in turns(list(arms), len(prompts), repeats):
        result = arms[name].generate(prompts[number], sampling(number), stop)
        stats = result.stats
        trials.append(Trial(name, number, repeat, stats.seconds, stats.new_tokens, result))
        if progress is not None:
            progress()
    return trials


def ratio(trials: Sequence[Trial[object]], fast: str, slow: str) -> intervals.Interval:
    """How many times faster `fast` is: time per token of `slow` over that of `fast`.

    Paired by prompt and repeat; the geometric mean over a prompt's repeats, then over prompts.
    """
    by_arm = {
        arm: {(t.prompt, t.repeat): t.ms_per_token for t in trials if t.arm == arm}
        for arm in (fast, slow)
    }
    logs: dict[int, list[float]] = {}
    for (prompt, repeat), ms in by_arm[fast].items():
        if (prompt, repeat) in by_arm[slow]:
            logs.setdefault(prompt, []).append(math.log(by_arm[slow][prompt, repeat] / ms))
    return intervals.typical([math.exp(statistics.fmean(each)) for each in logs.values()])


@dataclass(frozen=True)
class SpeedCeiling:
    """What the measured costs and acceptance allow, and how much of it the engine reaches.

    ceiling = tokens per step * t(1) / (t(n) + gamma t_draft), all from the run itself: t(1) is the
    plain arm's time to score a step, t(n) and gamma t_draft the speculative arm's to score and to
    propose one.
    """

    tokens_per_step: float
    score_one_ms: float
    score_block_ms: float
    propose_ms: float
    ceiling: float
    reached: float  #: measured ratio of total times over the ceiling


def ceiling(trials: Sequence[Trial[Generation]], fast: str, slow: str) -> SpeedCeiling:
    """Ceiling and efficiency of the speculative arm `fast` against the plain arm `slow`."""

    def total(arm: str, name: str) -> float:
        return float(sum(vars(t.result.stats)[name] for t in trials if t.arm == arm))

    steps, plain_steps = total(fast, "engine_steps"), total(slow, "engine_steps")
    tokens = total(fast, "new_tokens") / steps
    one = total(slow, "score_ms") / plain_steps
    block, draft = total(fast, "score_ms") / steps, total(fast, "propose_ms") / steps
    best = tokens * one / (block + draft)
    slow_rate = total(slow, "seconds") / total(slow, "new_tokens")
    fast_rate = total(fast, "seconds") / total(fast, "new_tokens")
    reached = slow_rate / fast_rate / best
    return SpeedCeiling(tokens, one, block, draft, best, reached)
