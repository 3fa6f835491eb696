"""What `theory.capacity` wants to know of this machine, measured without decoding with the model.

    products   all products of the model over so many nodes: reading weights and computing overlap
               as they do, which no two numbers say
    a call     of one node, of some in one row and of some rows, less their products: what else is
               in a call, in a row of it, and of a node
    the cache  calls behind many tokens and behind few: a slot is read once, and seen by every node
    the host   steps of a model of one tiny layer with the same vocabulary, less its calls

A machine's pace changes from one second to the next. So everything is timed once a round, what is
less another by both of the same round, and rates are medians of the rounds. Who compares them with
something else times that between the rounds.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from outrider import SamplingParams, StopConditions
from outrider.costs import Curve, Sizes
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.engine.speculation_policy import PlanReport
from outrider.engine.speculation_policy.protocol import BatchView, StepReport
from outrider.errors import ConfigurationError
from outrider.models import LlamaRunner, TreeDecoder
from outrider.models.hf import TransformersRunner
from outrider.models.prefill import causal
from outrider.models.prefix_cache import PrefixCache
from outrider.testing import llama
from outrider.types import DraftShape
from outrider_lab.drafters.random import Random
from outrider_lab.theory.capacity import UNIT, Machine

# What steps of the running engine take, by rows, nodes and context.

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


NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 144)  #: of products
NEAR, FAR = 64, 1024  #: tokens behind which calls are
CALLS = ((1, 1), (1, 16), (16, 1))  #: rows and nodes of calls behind few tokens
ROWS, SEEING = 8, (1, 8)  #: rows of calls behind few and many, and their nodes
ENGINE = ((1, 1), (8, 1), (8, 2), (8, 6))  #: rows and nodes of the tiny model's steps


def line(at: Mapping[int, float]) -> tuple[float, float]:
    """Intercept and slope of the straight line through two points.

    >>> line({1: 5.0, 3: 9.0})
    (3.0, 2.0)
    """
    (a, first), (b, second) = sorted(at.items())
    slope = (second - first) / (b - a)
    return first - a * slope, slope


def less(one: Sequence[float], other: Sequence[float]) -> float:
    """The median of what one takes more than the other in the same round.

    >>> less([5.0, 9.0, 6.0], [3.0, 7.5, 4.0])
    2.0
    """
    return median(a - b for a, b in zip(one, other, strict=True))


class Rates:
    """The machine as it runs this model, on the threads that torch has, by so many rounds."""

    @torch.inference_mode()
    def __init__(self, target: TreeDecoder, sizes: Sizes, rounds: int) -> None:
        self._sizes, self._far = sizes, min(FAR, target.context - max(SEEING))
        self._products = {nodes: _products(target, nodes) for nodes in NODES}
        kinds = {(rows, nodes, NEAR) for rows, nodes in CALLS}
        kinds |= {(ROWS, nodes, behind) for nodes in SEEING for behind in (NEAR, self._far)}
        self._calls = {kind: _call(target, *kind) for kind in sorted(kinds)}
        self._engine = _Around(target.vocab_size, rounds)
        self._took: dict[Hashable, list[float]] = {n: [] for n in (*NODES, *self._calls)}

    @torch.inference_mode()
    def round(self) -> None:
        """Time everything once, behind what leaves in the processor's caches what a step leaves."""
        self._products[NODES[-1]]()
        for nodes, run in self._products.items():
            self._took[nodes].append(timed(run))
        for kind, run in self._calls.items():
            run()
            self._took[kind].append(timed(run))
        self._engine.round()

    def machine(self) -> Machine:
        """What the rounds so far say."""
        sizes, took = self._sizes, self._took
        products = {nodes: median(took[nodes]) for nodes in NODES}
        read = {n: less(took[ROWS, n, self._far], took[ROWS, n, NEAR]) for n in SEEING}
        tokens = ROWS * (self._far - NEAR)
        cached, seen = line({nodes: each / tokens for nodes, each in read.items()})
        alone, piece, many = (
            less(took[rows, nodes, NEAR], took[rows * nodes])
            - rows * NEAR * (cached + nodes * seen)
            for rows, nodes in CALLS
        )
        (_, few), (_, more), (rows, _) = CALLS
        _, node = line({few: alone, more: piece})
        call, row = line({1: alone, rows: many})
        host = self._engine.host()
        fewer, most = NODES[-2:]
        slope = less(took[most], took[fewer]) / (most - fewer)
        if slope <= 0:  # a busy machine: as if nothing but computing took time
            slope = products[most] / most
        return Machine(
            sizes.weight_bytes / products[1],
            2 * sizes.parameters / slope,
            sizes.kv_bytes / max(cached, 1e-12),
            sizes.attention / max(seen, 1e-12),
            host=max(call + host.step, 0.0),
            host_row=max(row - node + host.row, 0.0),
            host_node=max(node + host.node, 0.0),
            host_draft=max(host.draft, 0.0),
            overlaps=False,
            products=Curve.of({n: 1e3 * products[n] * UNIT / sizes.parameters for n in NODES}),
        )


def measured(target: TreeDecoder, sizes: Sizes, rounds: int = 9) -> Machine:
    """The machine as it runs this model, by so many rounds."""
    rates = Rates(target, sizes, rounds)
    for _ in range(rounds):
        rates.round()
    return rates.machine()


def _products(target: TreeDecoder, nodes: int) -> Callable[[], object]:
    """All products of a call of so many nodes."""
    runner = target.runner
    if isinstance(runner, LlamaRunner):
        runs = runner.products()
    else:
        assert isinstance(runner, TransformersRunner), "every other runner reads more than text"
        linears = [m for m in runner.model.modules() if isinstance(m, torch.nn.Linear)]
        runs = [(m, m.in_features) for m in linears]
    each = {wide: torch.randn(1, nodes, wide, device="cpu").to(target.dtype) for _, wide in runs}
    return lambda: [run(each[wide]) for run, wide in runs]


def _call(target: TreeDecoder, rows: int, nodes: int, behind: int) -> Callable[[], object]:
    """A call that reads so many tokens of each of some prompts behind others."""
    wide = target.width(behind + nodes)
    cache, at = target.open(rows, wide), torch.arange(behind + nodes, device="cpu").expand(rows, -1)
    if behind:
        first = at[:, :behind]
        target.forward(cache, causal(first % target.vocab_size, first, wide), last=1)
    piece = at[:, behind:]
    asked = causal(piece % target.vocab_size, piece, wide)
    return lambda: target.forward(cache, asked)


class _Host(NamedTuple):
    """Seconds that the engine takes of a step, a row and a node, and of a step that drafts."""

    step: float
    row: float
    node: float
    draft: float


class _Around:
    """What the engine takes around calls: steps of a tiny model, less its calls."""

    def __init__(self, vocab: int, rounds: int) -> None:
        tiny = TreeDecoder(LlamaRunner(llama(vocab_size=vocab, num_hidden_layers=1), False))
        # a real model's weights leave nothing of the engine in caches
        self._away = torch.zeros(1 << 25, device="cpu").sum
        self._steps = [Steps(tiny, rows, (n,), NEAR, rounds, self._away) for rows, n in ENGINE]
        self._calls = [_call(tiny, rows, nodes, NEAR) for rows, nodes in ENGINE]
        self._took: list[list[float]] = [[] for _ in ENGINE]

    def round(self) -> None:
        """Each of the steps and of the calls once."""
        for steps, call, took in zip(self._steps, self._calls, self._took, strict=True):
            steps.round()
            self._away()
            took.append(timed(call))

    def host(self) -> _Host:
        """What the rounds so far say."""
        alone, plain, drafted, longer = (
            less(steps.took[nodes], took)
            for (_, nodes), steps, took in zip(ENGINE, self._steps, self._took, strict=True)
        )
        (one, _), (many, _), (_, few), (_, more) = ENGINE
        _, node = line({many * few: drafted, many * more: longer})
        step, row = line({one: alone, many: plain})
        return _Host(step, row - node, node, drafted - plain - many * (few - 1) * node)
