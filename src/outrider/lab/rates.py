"""What `theory.capacity` wants to know of this machine, measured without decoding with the model.

    products   all products of the model over so many nodes: reading weights and computing overlap
               as they do, which no two numbers say
    a call     of one node and of some, less their products: what else is in a call
    the cache  pieces of prompts behind many tokens and behind none: a slot is read once, and seen
               by every node
    the host   steps of a model of one tiny layer with the same vocabulary, less its calls

A machine's pace changes from one second to the next. So everything is timed once a round, what is
less another by both of the same round, and rates are medians of the rounds. Who compares them with
something else times that between the rounds.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from outrider.costs import Curve, Sizes
from outrider.lab.steps import Steps, timed
from outrider.models import CausalModel, LlamaRunner
from outrider.models.hf import TransformersRunner
from outrider.models.nodes import causal
from outrider.testing import llama
from outrider.theory.capacity import UNIT, Machine

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 144)  #: of products
PIECE = 16  #: tokens of a call, besides one
BEHIND, SEEING, ROWS = 1024, (1, 8), 4  #: tokens behind which pieces of so many are read, and rows
ENGINE = ((1, 1), (8, 1), (8, 2), (8, 6))  #: rows and nodes of the tiny model's steps
CONTEXT = 64  #: of the tiny model's rows


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
    def __init__(self, target: CausalModel, sizes: Sizes, rounds: int) -> None:
        self._sizes = sizes
        self._probes: dict[Hashable, Callable[[], object]] = {
            ("products", nodes): _products(target, nodes) for nodes in NODES
        }
        self._probes |= {("call", nodes): _call(target, 1, nodes, 0) for nodes in (1, PIECE)}
        for nodes in SEEING:
            for behind in (0, BEHIND):
                self._probes["behind", nodes, behind] = _call(target, ROWS, nodes, behind)
        self._engine = _Around(target.vocab_size, rounds)
        for run in self._probes.values():
            run()
        self._took: dict[Hashable, list[float]] = {name: [] for name in self._probes}

    @torch.inference_mode()
    def round(self) -> None:
        """Time everything once."""
        for name, run in self._probes.items():
            self._took[name].append(timed(run))
        self._engine.round()

    def machine(self) -> Machine:
        """What the rounds so far say."""
        sizes, took = self._sizes, self._took
        products = {nodes: median(took["products", nodes]) for nodes in NODES}
        call, between = line(
            {nodes: less(took["call", nodes], took["products", nodes]) for nodes in (1, PIECE)}
        )
        read = {n: less(took["behind", n, BEHIND], took["behind", n, 0]) for n in SEEING}
        cached, seen = line({nodes: each / (ROWS * BEHIND) for nodes, each in read.items()})
        host = self._engine.host()
        _, slope = line({nodes: products[nodes] for nodes in NODES[-2:]})
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


def measured(target: CausalModel, sizes: Sizes, rounds: int = 9) -> Machine:
    """The machine as it runs this model, by so many rounds."""
    rates = Rates(target, sizes, rounds)
    for _ in range(rounds):
        rates.round()
    return rates.machine()


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


class _Around:
    """What the engine takes around calls: steps of a tiny model, less its calls."""

    def __init__(self, vocab: int, rounds: int) -> None:
        tiny = CausalModel(LlamaRunner(llama(vocab_size=vocab, num_hidden_layers=1), False))
        # a real model's weights leave nothing of the engine in caches
        self._away = torch.zeros(1 << 25).sum
        self._steps = [Steps(tiny, rows, (n,), CONTEXT, rounds, self._away) for rows, n in ENGINE]
        self._calls = [_call(tiny, rows, nodes, CONTEXT) for rows, nodes in ENGINE]
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
