"""What `theory.capacity` wants to know of this machine, measured without decoding with the model.

    products   all products of the model over so many nodes: reading weights and computing overlap
               as they do, which no two numbers say
    a call     of one node and of some, less their products: what else is in a call
    the cache  pieces of prompts behind many tokens and behind none: a slot is read once, and seen
               by every node
    the host   steps of a model of one tiny layer with the same vocabulary, less its calls

Medians of this thread's own time over rounds in which everything is timed once.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from outrider import Limits, Sampling
from outrider.costs import Curve, Sizes
from outrider.drafters import Random
from outrider.engine.engine import Engine
from outrider.engine.planner import Report
from outrider.engine.planner.protocol import Finished, View
from outrider.engine.request import Request
from outrider.engine.run import Run
from outrider.models import CausalModel, LlamaRunner
from outrider.models.hf import TransformersRunner
from outrider.models.nodes import causal
from outrider.models.prefixes import Prefixes
from outrider.testing import llama
from outrider.theory.capacity import UNIT, Machine
from outrider.types import Shape

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 144)  #: of products
PIECE = 16  #: tokens of a call, besides one
BEHIND, SEEING, ROWS = 1024, (1, 8), 4  #: tokens behind which pieces of so many are read, and rows
ENGINE = ((1, 1), (8, 1), (8, 2), (8, 6))  #: rows and nodes of the tiny model's steps
_PREFIXES = 1 << 30  #: bytes of kept prompts: rows of one prompt are read once


def medians(probes: Mapping[Hashable, Callable[[], object]], rounds: int) -> dict[Hashable, float]:
    """Seconds of this thread for each of the probes, in rounds through all of them."""
    found: dict[Hashable, list[float]] = {name: [] for name in probes}
    for turn in range(rounds + 1):
        for name, run in probes.items():
            started = time.thread_time()
            run()
            if turn:
                found[name].append(time.thread_time() - started)
    return {name: median(times) for name, times in found.items()}


def line(at: Mapping[int, float]) -> tuple[float, float]:
    """Intercept and slope of the straight line through two points.

    >>> line({1: 5.0, 3: 9.0})
    (3.0, 2.0)
    """
    (a, first), (b, second) = sorted(at.items())
    slope = (second - first) / (b - a)
    return first - a * slope, slope


class _Told:
    """A planner that takes the chain it is told to."""

    def __init__(self) -> None:
        self.nodes = 1

    def open(self, shapes: Sequence[Shape], costs: object) -> dict[int, Shape]:
        """Shapes by nodes."""
        return {shape.max_nodes: shape for shape in shapes}

    def plan(self, state: dict[int, Shape], view: View) -> Shape:
        """The one of so many nodes."""
        return state[self.nodes]

    def learn(self, state: dict[int, Shape], step: Finished) -> dict[int, Shape]:
        """Nothing."""
        return state

    def report(self, state: object) -> Report:
        """Nothing."""
        return Report()


def steps(
    target: CausalModel,
    rows: int,
    nodes: tuple[int, ...],
    context: int,
    rounds: int,
    ahead: Callable[[], object] = lambda: None,
) -> dict[int, float]:
    """Seconds of the running engine's steps with chains of so many nodes, in turns.

    Drafts are random tokens. Rows have `context` tokens at first and one more with each step;
    `ahead` of each step is not counted.
    """
    most = max(*nodes, 2)
    drafter, told = Random(target.vocab_size, most - 1), _Told()
    engine = Engine(target, drafter, planner=told)
    room = (rounds * len(nodes) + 2) * most
    run = Run(engine, rows, context + room + most, prefixes=Prefixes(_PREFIXES))
    prompt = [5 + (7 * at) % 90 for at in range(context)]
    for row in range(rows):
        run.submit(Request(prompt, Sampling(1.0, seed=row), Limits(room)))
    found: dict[int, list[float]] = {n: [] for n in nodes}
    while run.stats.engine_steps < 2:  # reads the prompts, and warms up
        run.step()
    for _ in range(rounds):
        for told.nodes in nodes:
            ahead()
            started = time.thread_time()
            run.step()
            found[told.nodes].append(time.thread_time() - started)
    return {n: median(times) for n, times in found.items()}


@torch.inference_mode()
def measured(target: CausalModel, sizes: Sizes, rounds: int = 9) -> Machine:
    """The machine as it runs this model, on the threads that torch has."""
    probes: dict[Hashable, Callable[[], object]] = {
        ("products", nodes): _products(target, nodes) for nodes in NODES
    }
    probes |= {("call", nodes): _call(target, 1, nodes, 0) for nodes in (1, PIECE)}
    for nodes in SEEING:
        for behind in (0, BEHIND):
            probes["behind", nodes, behind] = _call(target, ROWS, nodes, behind)
    took = medians(probes, rounds)
    products = {nodes: took["products", nodes] for nodes in NODES}
    call, between = line({n: took["call", n] - products[n] for n in (1, PIECE)})
    cached, seen = line(
        {n: (took["behind", n, BEHIND] - took["behind", n, 0]) / (ROWS * BEHIND) for n in SEEING}
    )
    host = _engine(target.vocab_size, rounds)
    _, slope = line({n: products[n] for n in NODES[-2:]})
    return Machine(
        sizes.weight_bytes / products[1],
        2 * sizes.parameters / slope,
        sizes.kv_bytes / max(cached, 1e-12),
        sizes.attention / max(seen, 1e-12),
        host=max(call + host.step, 0.0),
        host_row=max(host.row, 0.0),
        host_node=max(between + host.node, 0.0),
        host_draft=max(host.draft, 0.0),
        overlaps=False,
        products=Curve.of({n: 1e3 * products[n] * UNIT / sizes.parameters for n in NODES}),
    )


def _products(target: CausalModel, nodes: int) -> Callable[[], object]:
    """All products of a call of so many nodes."""
    runner = target.runner
    if isinstance(runner, LlamaRunner):
        runs = runner.products()
    else:
        assert isinstance(runner, TransformersRunner), "every other runner reads more than text"
        linears = [m for m in runner.model.modules() if isinstance(m, torch.nn.Linear)]
        runs = [(m, m.in_features) for m in linears]
    each = {wide: torch.randn(1, nodes, wide).to(target.dtype) for _, wide in runs}
    return lambda: [run(each[wide]) for run, wide in runs]


def _call(target: CausalModel, rows: int, nodes: int, behind: int) -> Callable[[], object]:
    """A call that reads so many tokens of each of some prompts behind others."""
    wide = target.width(behind + nodes)
    cache, at = target.open(rows, wide), torch.arange(behind + nodes).expand(rows, -1)
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


def _engine(vocab: int, rounds: int) -> _Host:
    """By steps of a tiny model with so many tokens, less its calls."""
    tiny = CausalModel(LlamaRunner(llama(vocab_size=vocab, num_hidden_layers=1), False))
    large = torch.zeros(1 << 25)  # a real model's weights leave nothing of the engine in caches
    found = []
    for rows, nodes in ENGINE:
        call = _call(tiny, rows, nodes, 64)
        took = medians({"call": call, "away": large.sum}, rounds)["call"]
        found.append(steps(tiny, rows, (nodes,), 64, rounds, large.sum)[nodes] - took)
    alone, plain, drafted, longer = found
    (one, _), (many, _), (_, few), (_, more) = ENGINE
    _, node = line({many * few: drafted, many * more: longer})
    step, row = line({one: alone, many: plain})
    return _Host(step, row - node, node, drafted - plain - many * (few - 1) * node)
