"""What steps of the running engine take, by rows, nodes and context."""

import time
from collections.abc import Callable, Sequence
from statistics import median

from outrider import SamplingParams, StopConditions
from outrider.drafters import Random
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.engine.speculation_policy import PlanReport
from outrider.engine.speculation_policy.protocol import BatchView, StepReport
from outrider.errors import ConfigurationError
from outrider.models import TreeDecoder
from outrider.models.prefix_cache import PrefixCache
from outrider.types import DraftShape

_FIRST = 2  #: steps that read the prompts and warm up
_PREFIXES = 1 << 30  #: bytes of kept prompts: rows of one prompt are read once


def timed(run: Callable[[], object]) -> float:
    """Seconds of this thread."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


class _Told:
    """A planner that takes the chain it is told to."""

    def __init__(self) -> None:
        self.nodes = 1

    def open(self, shapes: Sequence[DraftShape], costs: object) -> dict[int, DraftShape]:
        """Shapes by nodes."""
        return {shape.max_nodes: shape for shape in shapes}

    def plan(self, state: dict[int, DraftShape], view: BatchView) -> DraftShape:
        """The one of so many nodes."""
        return state[self.nodes]

    def learn(self, state: dict[int, DraftShape], step: StepReport) -> dict[int, DraftShape]:
        """Nothing."""
        return state

    def report(self, state: object) -> PlanReport:
        """Nothing."""
        return PlanReport()


class Steps:
    """Steps with chains of so many nodes over as many rows: one of each in a round.

    Drafts are random tokens, so a step adds a token to each row; `context` is what rows have in
    the middle of so many `rounds`. `ahead` of each step is not counted, nor is the first step of a
    round, which finds what else was run in the processor's caches.
    """

    def __init__(
        self,
        target: TreeDecoder,
        rows: int,
        nodes: tuple[int, ...],
        context: int,
        rounds: int,
        ahead: Callable[[], object] = lambda: None,
    ) -> None:
        self.took: dict[int, list[float]] = {n: [] for n in nodes}
        self._ahead, self._told = ahead, _Told()
        count, most = rounds * (len(nodes) + 1) + _FIRST, max(*nodes, 2)
        first = context - count // 2
        if first < 1:
            raise ConfigurationError(
                f"{rounds} rounds of {len(nodes)} numbers of nodes begin {count // 2} tokens ahead "
                f"of their middle; got a context of {context}; take fewer, or more context"
            )
        engine = Engine(target, Random(target.vocab_size, most - 1), planner=self._told)
        room = count * most
        self._run = EngineRun(engine, rows, first + room + most, prefixes=PrefixCache(_PREFIXES))
        prompt = [5 + (7 * at) % 90 for at in range(first)]
        for row in range(rows):
            self._run.submit(Request(prompt, SamplingParams(1.0, seed=row), StopConditions(room)))
        while self._run.stats.engine_steps < _FIRST:
            self._run.step()

    def round(self) -> None:
        """A step of each number of nodes."""
        self._told.nodes = next(iter(self.took))
        self._run.step()
        for nodes, took in self.took.items():
            self._told.nodes = nodes
            self._ahead()
            took.append(timed(self._run.step))

    def seconds(self) -> dict[int, float]:
        """The median step by nodes."""
        return {nodes: median(took) for nodes, took in self.took.items()}
