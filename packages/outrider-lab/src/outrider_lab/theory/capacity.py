"""What a step costs on a machine, on paper, and where speculation stops paying.

A step over B rows of N nodes each, behind L tokens of context, reads all weights once and every
row's cache once, and multiplies every node with every weight:

    memory  = weights / bandwidth + B L kv_bytes / cache_bandwidth
    compute = B N (2 parameters / flops + L attention / attention_flops)
    step    = max(memory, compute) + 2 layers all_reduce + host + B (host_row + N host_node)

That is the roofline model (Williams, Waterman and Patterson 2009) on a device that computes while
it reads. A processor core does one after the other: its step is the sum of both. Rates are those
that kernels reach, not those of the data sheet. Where products were measured by their number of
nodes, what they took stands for weights / bandwidth and for 2 parameters / flops. A step with a
draft, N > 1, takes host_draft besides.

>>> h100 = Machine(3.35e12, 600e12)
>>> seven = Sizes(14e9, 131e3, 7e9)
>>> round(1e3 * step(seven, h100, rows=8, nodes=5, context=2048), 2)
4.82
>>> round(compute_bound(seven, h100, nodes=5, context=256))
39
"""

import math
from typing import NamedTuple

from outrider.costs import Curve, Sizes
from outrider.errors import ConfigurationError
from outrider_lab.theory.length import expected_tokens

_MOST = 1 << 20  #: rows that nobody has
UNIT = 1e9  #: parameters that `Machine.products` is about


class Machine(NamedTuple):
    """Effective rates of one device, and how many of them hold a part of the model each."""

    bandwidth: float  #: bytes a second, reading weights
    flops: float  #: operations a second, in products
    cache_bandwidth: float | None = None  #: reading the cache; None: as weights
    attention_flops: float | None = None  #: in attention; None: as in products
    devices: int = 1
    all_reduce: float = 0.0  #: seconds
    host: float = 0.0  #: seconds a step that neither reads weights nor multiplies
    host_row: float = 0.0  #: the same for every row
    host_node: float = 0.0  #: the same for every node
    host_draft: float = 0.0  #: the same once more for a step that verifies a draft
    overlaps: bool = True  #: whether it computes while it reads
    #: Milliseconds of all products of so many nodes with 1e9 parameters, the reading of these
    #: included, where they were measured; None: by bandwidth and flops
    products: Curve | None = None


def check(sizes: Sizes, machine: Machine) -> None:
    """Refuse what no machine or model is: ConfigurationError names the field."""
    given = sizes._asdict() | machine._replace(products=None)._asdict()
    for name, value in given.items():
        least_open = name in ("weight_bytes", "parameters", "bandwidth", "flops", "devices")
        least_open = least_open or name in ("cache_bandwidth", "attention_flops")
        if value is None or isinstance(value, bool):
            continue
        if not math.isfinite(value) or value < 0 or (least_open and value == 0):
            raise ConfigurationError(
                f"{name} must be a number {'above' if least_open else 'of at least'} 0; got "
                f"{value!r}; leave it out if nobody knows it and it may be"
            )


class CostParts(NamedTuple):
    """Seconds, of which steps are made."""

    weights: float  #: W: all weights are read
    token: float  #: k: one token of one row's cache is read
    node: float  #: c: one node goes through the products
    attended: float  #: one node attends to one token
    reduces: float  #: all all-reduces
    host: float


def parts(sizes: Sizes, machine: Machine) -> CostParts:
    """What the parts of a step take; weights, cache and operations are shared by the devices."""
    devices = machine.devices
    cache = (machine.cache_bandwidth or machine.bandwidth) * devices
    attends = (machine.attention_flops or machine.flops) * devices
    return CostParts(
        sizes.weight_bytes / (machine.bandwidth * devices),
        sizes.kv_bytes / cache,
        2 * sizes.parameters / (machine.flops * devices),
        sizes.attention / attends,
        2 * sizes.layers * machine.all_reduce if devices > 1 else 0.0,
        machine.host,
    )


def step(sizes: Sizes, machine: Machine, rows: int, nodes: int, context: int) -> float:
    """Seconds of a step of so many rows with as many nodes and so much context each."""
    p = parts(sizes, machine)
    cached, attended = rows * context * p.token, rows * nodes * context * p.attended
    if machine.products is not None:
        milliseconds = machine.products.milliseconds(rows * nodes)
        both = milliseconds * 1e-3 * sizes.parameters / UNIT / machine.devices + cached + attended
    else:
        memory, compute = p.weights + cached, rows * nodes * p.node + attended
        both = max(memory, compute) if machine.overlaps else memory + compute
    own = p.host + rows * (machine.host_row + nodes * machine.host_node)
    own += machine.host_draft if nodes > 1 else 0.0
    return both + p.reduces + own


def compute_bound(sizes: Sizes, machine: Machine, nodes: int, context: int) -> float:
    """Rows from which on products, not memory, set the step's time: B* = W / (N c - k L).

    Infinity where reading a row's cache takes longer than its nodes' products.
    """
    p = parts(sizes, machine)
    per_row = nodes * (p.node + context * p.attended) - context * p.token
    return p.weights / per_row if per_row > 0 else math.inf


class Drafting(NamedTuple):
    """A chain of drafted tokens: how likely each is kept, and what drafting it takes."""

    tokens: int
    acceptance: float
    draft: Sizes | None = None  #: a draft model, whole on one device; None: drafts cost nothing


def speedup(sizes: Sizes, machine: Machine, rows: int, context: int, drafting: Drafting) -> float:
    """Tokens a second with a chain over those of plain decoding, at this number of rows.

    Every drafted token takes a step of the draft model. Kept tokens are `expected_tokens`.
    """
    plain = step(sizes, machine, rows, 1, context)
    spent = step(sizes, machine, rows, drafting.tokens + 1, context)
    if drafting.draft is not None:
        one = machine._replace(
            devices=1, all_reduce=0.0, host=0.0, host_row=0.0, host_node=0.0, host_draft=0.0
        )
        spent += drafting.tokens * step(drafting.draft, one, rows, 1, context)
    return expected_tokens(drafting.acceptance, drafting.tokens) * plain / spent


def pays_until(sizes: Sizes, machine: Machine, context: int, drafting: Drafting) -> float:
    """The most rows at which a chain is faster than plain decoding; 0: at none, infinity: always.

    More rows only ever make drafted tokens dearer, so the last one is found by halving.
    """

    def pays(rows: int) -> bool:
        return speedup(sizes, machine, rows, context, drafting) > 1

    if not pays(1):
        return 0
    if pays(_MOST):
        return math.inf
    low, high = 1, _MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
