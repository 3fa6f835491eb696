"""Costs of whole steps, measured by driving them on text that was made up.

The drafter proposes, the target scores, the rule verifies and all is committed, as in a run; the
text repeats itself, so that a drafter that copies has what to copy. On a CPU every step starts from
a copy of the same rows, which have made room for the largest. A size's cost is the plain step's by
the median of what it took of the plain step in its own round: a machine's pace changes with what
else it does. More nodes never cost less, as fewer could be padded.

A start has a budget (`models.budget`). Under one that ends early fewer sizes are timed, one, three
and six nodes at least, which show how a step grows. A line is drawn between them, and behind them
nodes cost in proportion: more can be cut into calls of six, so they never cost more, and a step
that is flat so far need not stay so.

Keys and values of a text are read anew in every step, and attention to them takes as long for each
node more where it is arithmetic that takes the time: a tree that is nearly free behind a short text
costs several plain steps behind a long one. So one row is timed behind a long text, too, of which
most is copies of a few read tokens, and other lengths are on the line through both. What a row adds
by its length is its own: more rows add as much each.

A measurement is a generator that stops behind every look: a server goes on with it while nobody
asks.
"""

import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from outrider.costs import Costs, Curve
from outrider.engine.batch import Batch, begin
from outrider.engine.request import Request, StopConditions
from outrider.engine.step import GraphedStep, commit, propose, score
from outrider.models import budget
from outrider.models.prefill import inference, skimmable, skimming
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import PLAIN, DraftShape, Verdict

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

#: Nodes of a row that are timed, as far as shapes go: kernels take rows by fours, sixes and eights,
#: and what a step costs jumps behind these.
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 32, 64)
FEW = (3, 5, 9, 17, 32)  #: behind a long text, where only what it adds is measured
KEY = (3, 6)  #: what is timed beside a plain step where there is time for little
CONTEXTS = (64, 8192)  #: committed tokens of a row; the second of one row alone
READ_ALL = 448  #: the second, where every token of it has to be read
ENTRIES = 1 << 27  #: bytes of keys and values of the second, or it is shorter
UNREAD = 128  #: tokens that a draft model reads for the clock, if there are as many
ROUNDS, ENOUGH = 3, 8  #: looks at each size behind the one that warms up, at least and at most
IN_A_START = 2  #: of them, at least, under a budget that ends
SECONDS = 1.0  #: that more looks than the least may take
MOST_ROWS = 16  #: of a batch that is measured
_ROUND = 6.0  #: times a plain step, for each size: what two rounds take, copies included
_LONGER = 30.0  #: times a plain step: what measuring behind a long text takes, and twice that,
#: where every token of it is read
_FIRST = 0.6  #: of a budget that ends: for the short text
_PERIOD = 29  #: tokens of the made-up text before it repeats itself
_IN_A_ROW = 4  #: steps that are timed together on a device
_MOST_NODES = 512  #: of all rows together; what lies above is as between the last two sizes


T = TypeVar("T")
#: The verbs of one step.
Step: TypeAlias = Callable[[Batch, DraftShape], GraphedStep]
#: Work that stops behind every look at the clock, where other steps may be made.
Looks: TypeAlias = Generator[None, None, T]


def upto(max_num_seqs: int) -> list[int]:
    """The numbers of rows that are measured; others, up to so many, are estimated from these.

    By fours, as a step's cost grows evenly between them and a start has little time.

    >>> upto(2), upto(5), upto(1000)
    ([1, 2], [1, 4, 8], [1, 4, 16])
    """
    rows, most = [1], min(max_num_seqs, MOST_ROWS)
    while rows[-1] < most:
        rows.append(4 * rows[-1] if 2 * rows[-1] < most else 2 * rows[-1])
    return rows


@inference
def whole(work: Looks[T]) -> T:
    """What it finds, without a stop."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found


def measured(engine: "Engine", rows: int) -> Looks[Costs]:
    """Milliseconds of a step of so many rows, by nodes; of one row by its context, too."""
    allowed = budget.current()
    most = max(shape.max_nodes for shape in engine.shapes)
    room = max(engine.target.context - most - 1, 1)
    short = min(CONTEXTS[0], room)
    batch = _made_up(engine, rows, short)
    long = min(_long(batch.cache), room)
    yield
    alone = rows > 1 or long <= short or long < min(READ_ALL, CONTEXTS[-1])
    with allowed.part(1.0 if alone else _FIRST):
        first = yield from _curve(engine, batch, SIZES)
    found, reading = {short: first}, _reading(engine, batch)
    steps = _LONGER if skimmable(batch.cache) else 2 * _LONGER
    if not alone and allowed.left >= steps * first.times[0] / 1e3:
        yield
        sizes = KEY if allowed.limited else FEW
        some = yield from _curve(engine, _made_up(engine, rows, long), sizes)
        each = zip(some.at, some.times, strict=True)
        longer = Curve.of({n: max(took - first.milliseconds(n), 0.0) for n, took in each})
        found[long] = Curve.of(
            {n: took + longer.milliseconds(n) for n, took in zip(*first, strict=True)}
        )
    return Costs({rows: found}, {rows: reading})


def _long(cache: object) -> int:
    """Tokens of a long text: as many as show what attention takes, and copy fast."""
    least = min(READ_ALL, CONTEXTS[-1])
    if not skimmable(cache):
        return least
    each = sum(stack[:, :1, :, :1].nbytes for stack in cache.stacks)
    return min(CONTEXTS[-1], max(least, ENTRIES // max(each, 1)))


def _curve(engine: "Engine", batch: Batch, sizes: Sequence[int]) -> Looks[Curve]:
    """By nodes of a row."""
    shapes = _timed(engine.shapes, batch.rows, sizes, largest=max(sizes) > max(KEY))
    device, step = torch.device(engine.target.device), engine.stepper()
    allowed = budget.current()

    def look(rows: Batch, shape: DraftShape) -> tuple[int, float]:
        if device.type == "cuda":
            return _on_cuda(step, rows, shape)
        return _on_cpu(engine, step, rows, shape)

    beyond, least = 0, IN_A_START if allowed.limited else ROUNDS
    if allowed.limited:
        plain = look(_with_room(engine, batch, [PLAIN]), PLAIN)[1] / 1e3
        if allowed.left < _ROUND * len(shapes) * plain:
            beyond = max(shape.max_nodes for shape in shapes)
            shapes = _timed(engine.shapes, batch.rows, KEY, largest=False)
    start = _with_room(engine, batch, shapes)
    rounds: list[dict[int, float]] = []
    spent = 0.0
    for count in range(ENOUGH + 1):
        took: dict[int, float] = {}
        # Up and down in turn: a plain step right behind a large one takes a quarter more.
        for shape in shapes if count % 2 else reversed(shapes):
            if engine.room.fitting(shape) is not shape:
                continue
            yield
            began = time.monotonic()
            try:
                nodes, each = look(start, shape)
            except (MemoryError, RuntimeError) as error:
                if not engine.room.lost(shape, error):
                    raise
                continue
            took[nodes] = min(each, took.get(nodes, each))
            spent += time.monotonic() - began
        if count or allowed.over():
            rounds.append(took)
        if allowed.over() or (len(rounds) >= least and spent > SECONDS):
            break
    return _beyond(_of_plain(rounds), beyond)


def _beyond(curve: Curve, most: int) -> Curve:
    """With an estimate of the largest size, where that was not timed: nodes in proportion.

    >>> _beyond(Curve.of({1: 10.0, 3: 10.0, 6: 11.0}), 24).milliseconds(12)
    22.0
    """
    last, time_of_last = curve.at[-1], curve.times[-1]
    if most <= last:
        return curve
    return Curve((*curve.at, most), (*curve.times, time_of_last * most / last))


def _of_plain(rounds: Sequence[dict[int, float]]) -> Curve:
    """From milliseconds by nodes in each round: the least plain step by the medians of ratios.

    A round may lack a size: nothing was there to copy.

    >>> _of_plain([{1: 4.0, 2: 5.0}, {1: 8.0, 2: 10.0}, {1: 4.0, 2: 4.0, 3: 8.0}])
    Curve(at=(1, 2, 3), times=(4.0, 5.0, 8.0))
    """
    plain = min(rounds[0])
    sizes = sorted(set().union(*rounds))
    of = {n: statistics.median(t[n] / t[plain] for t in rounds if n in t) for n in sizes}
    least = min(took[plain] for took in rounds)
    return Curve.of({n: round(least * min(of[m] for m in of if m >= n), 4) for n in of})


def _again(batch: Batch) -> Batch:
    """These rows for another step that starts from them: a copy, but for entries of tokens.

    Those stay where they are: what a step writes behind the rows the next one writes anew. A copy
    would lie in small pages, of which a step reads slower than of those of a long text in a run.
    """
    return batch.take(range(batch.rows), batch.cache if skimmable(batch.cache) else None)


def _on_cpu(engine: "Engine", step: Step, batch: Batch, shape: DraftShape) -> tuple[int, float]:
    """Nodes and milliseconds of a step of these rows' copy."""
    state = _again(batch)
    device = state.context.length_B.device
    started = _clock(device)
    if engine.foreseeing is not None:
        engine.foreseeing.foresee(state.memory, state.context)
    made = step(state, shape)
    return made.draft.tree.nodes, 1e3 * (_clock(device) - started)


def _with_room(engine: "Engine", batch: Batch, shapes: Sequence[DraftShape]) -> Batch:
    """These rows as steps of all the shapes find them, but of those there is no memory for."""
    if torch.device(engine.target.device).type == "cuda":
        return batch
    for shape in sorted(shapes, key=lambda shape: shape.max_nodes, reverse=True):
        if engine.room.fitting(shape) is shape:
            try:
                return _roomy(engine, batch, shape)
            except (MemoryError, RuntimeError) as error:
                if not engine.room.lost(shape, error):
                    raise
    return batch


def _roomy(engine: "Engine", batch: Batch, shape: DraftShape) -> Batch:
    """A copy of these rows behind a step that kept nothing and went on as the text does.

    It makes room in the copy's caches, which a run's steps seldom do; and what copies the text
    still finds where it goes on, which it would not behind a token that the target wrote.
    """
    state = _again(batch)
    draft = propose(engine.drafter, state, shape)
    scores = score(engine.target, state, draft, engine.drafter.aux_layers)
    length_B = state.context.length_B
    as_before = (length_B - _PERIOD).clamp(min=0)[:, None]
    nothing = length_B.new_full((batch.rows, draft.tree.max_depth), -1)
    follows_B = state.context.tokens_BL.gather(1, as_before)[:, 0]
    verdict = Verdict(nothing, torch.zeros_like(length_B), follows_B)
    return commit(engine.target, engine.drafter, state, draft, scores, verdict)[0]


def _on_cuda(step: Step, batch: Batch, shape: DraftShape) -> tuple[int, float]:
    """The same of some steps in a row, as the host is ahead of the device in a run, by events.

    Two go ahead untimed: the first of a kind compiles kernels, the second is captured as a graph,
    and either would tell a planner that drafts cost many times what they do.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(2):
        nodes = step(batch, shape).draft.tree.nodes
    start.record()
    for _ in range(_IN_A_ROW):
        step(batch, shape)
    end.record()
    end.synchronize()
    return nodes, start.elapsed_time(end) / _IN_A_ROW


def _reading(engine: "Engine", batch: Batch) -> float:
    """Milliseconds for a token of every row that a draft model has not read.

    Reading so many takes longer than the draft behind them, or nothing is read: what copies take
    varies, and planners pay for looks where drafts have to be read for.
    """
    shape = _timed(engine.shapes, batch.rows, SIZES)[:2][-1]
    unread = min(UNREAD, batch.context.bound - 1)
    if not shape.max_depth or unread < 1:
        return 0.0
    state, device = _again(batch), torch.device(engine.target.device)
    least: dict[int, float] = {}
    for count in range(ROUNDS + 1):
        counts = count > 0 or budget.current().over()  # for both, or for neither
        for each in (0, unread):
            some = state._replace(context=state.context._replace(unread=each))
            started = _clock(device)
            propose(engine.drafter, some, shape)
            took = _clock(device) - started
            if counts:
                least[each] = min(took, least.get(each, took))
        if least and budget.current().over():
            break
    more = least[unread] - least[0]
    return round(1e3 * more / unread, 6) if more > least[0] else 0.0


def _clock(device: torch.device) -> float:
    """Seconds. On a CPU this thread's own clock, which stands while others have its core.

    Of several threads each does an equal part of a call, this one too, so that its own time is what
    the call takes where nobody else is at work. A clock on the wall told a busy server that a step
    of three nodes and one of six take as long as each other, and it drafted where that costs most.
    """
    if device.type == "cpu":
        return time.thread_time()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _timed(
    shapes: Sequence[DraftShape], rows: int, sizes: Sequence[int], largest: bool = True
) -> list[DraftShape]:
    """Some of the shapes, from none to the largest that so many rows are likely to use."""
    drafts = sorted((s for s in shapes if s.max_depth), key=lambda shape: shape.max_nodes)
    fitting = [shape for shape in drafts if rows * shape.max_nodes <= _MOST_NODES] or drafts[:1]
    if not fitting:
        return [PLAIN]
    some = {min(fitting, key=lambda shape: abs(shape.max_nodes - size)) for size in sizes}
    some |= {fitting[-1]} if largest else set()
    return [PLAIN, *sorted(some, key=lambda shape: shape.max_nodes)]


def _made_up(engine: "Engine", rows: int, context: int) -> Batch:
    """So many rows of one text that repeats itself, read once, if at all."""
    target, draws = engine.target, random.Random(0)
    period = [draws.randrange(target.vocab_size) for _ in range(_PERIOD)]
    text = (period * (context // _PERIOD + 1))[:context]
    most = max(shape.max_nodes for shape in engine.shapes)
    request = Request(text, SamplingParams(seed=0), StopConditions(), target.probe(1))
    capacity = engine.slots(rows, context + 2 * most)
    with skimming():
        batch = begin(target, engine.drafter, [request], capacity)
    return batch if rows == 1 else batch.take([0] * rows)
