"""The planner that weighs tokens against milliseconds, nothing drafted included.

A step with the draft n is worth  gain(n) - rho (S(n) - S(plain)): the tokens it is expected to add,
less those that the row would have written in the time it takes longer. The rate rho is plain
decoding's, or the rows' own of late where that is more: the renewal-reward criterion, whose
largest rate is found by taking the best step for the rate so far (Dinkelbach 1967).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf, prod
from operator import attrgetter, mul

import torch

from outrider.costs import Costs
from outrider.engine.speculation_policy.estimates import (
    BET,
    FIRST,
    LEVEL,
    SUREST,
    Backoff,
    ReadingBudget,
    RowMemory,
    SharedEstimates,
)
from outrider.engine.speculation_policy.prices import CONTEXT, CostModel, StepPrices
from outrider.engine.speculation_policy.protocol import (
    BatchView,
    PlannedRow,
    PlanReport,
    StepReport,
)
from outrider.errors import ConfigurationError
from outrider.types import PLAIN, DraftShape

SURE = 2.0  #: what reading must be expected to bring, of what it takes, by a guess
KNOWN, SURE_KNOWN = 32, 1.5  #: looks behind which it is no guess, and what it must bring then
LOOK = 0.25  #: of reading: what the first look behind it may cost
UNSURE = 0.1  #: of what a row has to write yet: how much later another one may be done
DARE = 1.0  #: plain steps that drafts of a row may take longer than what they have brought it
ROWS = 4  #: of a batch, for each step in which a drafter that foresees far too little is not asked
LONGEST_REST = 5  #: behind looks at a row alone, in a row, that were in vain: a step for each
_MOSTLY = 0.9  #: share of plain steps that is worth a word
_LENGTH, _GREEDY = attrgetter("length"), attrgetter("greedy")


class AdaptiveState:
    """What a run of `Adaptive` has shown so far."""

    def __init__(
        self,
        costs: Costs,
        before: SharedEstimates,
        reading_budget: ReadingBudget,
        prices: CostModel,
    ) -> None:
        self.drafts, self.deepest = prices.drafts, prices.deepest
        self.prices, self.costs = prices, costs
        self.rows: dict[int, RowMemory] = {}
        self.before, self.pool = before, SharedEstimates(before)
        self.backoff, self.reading_budget = Backoff(), reading_budget
        self.view, self.context = BatchView(()), 0  #: of the step under way
        self.reading = 0.0  #: milliseconds that a draft model needs ahead of it, if it drafts
        self.rests: tuple[int, ...] = ()  #: rows, and about how long, for whom nothing paid
        self.loses = 0.0  #: plain steps that a look is expected to lose them
        self.rest = 0  #: plain steps of the same rows for which nobody need ask
        self.predicted = 0.0
        self.steps, self.bare = 0, 0
        self.kept, self.tried = 0, 0

    def memory(self, row: PlannedRow) -> RowMemory:
        """What is remembered of a row."""
        memory = self.rows.get(row.request_id)
        if memory is None:
            greedy = row.request.sampling.temperature == 0
            memory = self.rows[row.request_id] = RowMemory(greedy)
        return memory

    def own(self, memory: RowMemory, drafted: int, told_late: bool) -> DraftShape:
        """What one row was asked for, whatever its neighbours were.

        Where blocks are told late: the smallest shape that has room for what was drafted.
        """
        if not drafted:
            return PLAIN
        if not told_late:
            return memory.shape
        return next((shape for shape in self.drafts if shape.max_nodes > drafted), self.drafts[-1])


@dataclass(frozen=True)
class Adaptive:
    """The shape that is worth most by what a row has shown and by measured costs, or none.

    Acceptance is learnt row by row: what one row shows counts for another, beside it or after it,
    only where no text depends on it, and until that one has shown more itself. Where nothing pays,
    a drafter that cannot foresee is looked at again after 8, 16, 32, 64 plain steps, and one that
    foresees far too little for a batch is asked again after a step for every `ROWS` rows. Greedy,
    placed and coupled texts never depend on the choice; other sampled texts follow from the seed
    and the costs. docs/planner.md says what the choice may depend on, and why.

    >>> from outrider.engine.request import Request
    >>> from outrider.types import PLAIN
    >>> chain = [DraftShape(d, d + 1, d, True) for d in (4, 3, 2, 1)] + [PLAIN]
    >>> view = BatchView([PlannedRow(0, Request([1]), 1)])
    >>> cheap, dear = Costs.of({1: 6.0, 5: 8.0}), Costs.of({1: 6.0, 5: 40.0})
    >>> [Adaptive().plan(Adaptive().open(chain, c), view).max_depth for c in (cheap, dear)]
    [4, 0]
    """

    _before: SharedEstimates = field(
        init=False, repr=False, compare=False, default_factory=SharedEstimates
    )
    _reading_budget: ReadingBudget = field(
        init=False, repr=False, compare=False, default_factory=ReadingBudget
    )
    #: Of the last run's shapes and costs, one at most.
    _prices: list[tuple[Sequence[DraftShape], CostModel]] = field(
        init=False, repr=False, compare=False, default_factory=list
    )

    def open(self, shapes: Sequence[DraftShape], costs: Costs | None) -> AdaptiveState:
        """Nothing is known yet of its rows. Raises ConfigurationError without costs."""
        if costs is None:
            raise ConfigurationError(
                "the adaptive planner weighs tokens against milliseconds; got no costs; give "
                "Engine(..., costs=...), or leave the planner out"
            )
        before, last = self._prices[0] if self._prices else ((), None)
        if last is not None and (last.costs, before) == (costs, shapes):
            prices = CostModel(costs, last.drafts, last)
        else:
            drafts = sorted((s for s in shapes if s.max_depth), key=lambda shape: shape.max_nodes)
            prices = CostModel(costs, drafts)
        self._prices[:] = [(shapes, prices)]
        return AdaptiveState(costs, self._before, self._reading_budget, prices)

    def plan(self, state: AdaptiveState, view: BatchView) -> DraftShape:
        """The shape that is worth most over all rows; if texts depend on it, to each row."""
        rows, state.rest = view.rows, 0
        state.view, state.context = view, max(rows, key=_LENGTH).length
        if not state.drafts or (view.dropped and view.ignores_drafts):
            return PLAIN
        if len(state.rows) >= 2 * max(view.max_num_seqs, len(rows)):  # some ended from outside
            state.rows = {row.request_id: state.memory(row) for row in rows}
        state.reading = state.prices.read_on(view.unread, len(rows))
        if (
            len(rows) == 1
            and view.ignores_drafts
            and rows[0].foresee is not None
            and not state.reading
        ):
            prices = state.prices.of(1, state.context, corrected=True)
            memory = state.memory(rows[0])
            best = _foreseen(memory, rows[0], state.drafts, prices)
            if best >= 0:
                return state.drafts[best]
            memory.vain += 1
            state.rest = min(memory.vain, LONGEST_REST)
            return PLAIN
        if view.ignores_drafts and state.rests and state.rests == _who(state):
            return state.drafts[0] if _due(state, state.loses) else PLAIN
        levels: Sequence[float] = (LEVEL, LEVEL)
        if view.ignores_drafts:
            # what a row shows is its own already: alone it is not told it once more
            levels = (state.pool if len(rows) > 1 else state.before).level.chances
        memories, gains = [], []
        for row in rows:
            memory = state.memory(row)
            memories.append(memory)
            level = levels[memory.greedy]
            gains.append(memory.gains(row, state.drafts, state.deepest, level))
        if not view.ignores_drafts:
            return _apart(state, memories, gains)
        best = _jointly(state, memories, gains)
        return PLAIN if best < 0 else state.drafts[best]

    def learn(self, state: AdaptiveState, step: StepReport) -> AdaptiveState:
        """Count what was looked at, row by row, and what it took."""
        view, prices = state.view, state.prices
        if not view.rows:
            return state
        rows, context = len(view.rows), state.context
        took = plain = prices.of(rows, context, corrected=view.ignores_drafts).plain
        if step.nodes > 1:
            took = prices.step(step.nodes, rows, context, corrected=view.ignores_drafts)
        plain_steps = took / plain
        reading = state.reading if step.depth else 0.0
        state.predicted += took + reading
        state.steps += 1
        state.bare += step.nodes == 1
        if step.nodes == 1 and view.ignores_drafts:
            state.reading_budget.steps += 1
        for block in step.blocks:
            memory = state.rows.get(block.request_id)
            if memory is None:
                continue
            depth = step.depth
            if not view.ignores_drafts:
                # its own part alone: what it took for others is not its to know
                own = state.own(memory, block.drafted, step.late)
                depth = own.max_depth
                full = prices.step(1, view.max_num_seqs, 0)
                plain_steps = prices.step(own.max_nodes, view.max_num_seqs, 0) / full
            elif depth:
                memory.hit_rate.observe(block.drafted > 0)
            depth = min(depth, block.drafted)
            kept = min(block.accepted, depth)
            if view.ignores_drafts and step.depth:
                state.pool.observe(memory.greedy, depth, kept)
            if block.drafted:
                memory.streaks.observe(depth, kept)
                state.kept += block.accepted
                state.tried += min(block.accepted + 1, depth)
            memory.observe(len(block.token_ids), plain_steps, block.drafted)
            if block.finish_reason is not None:
                del state.rows[block.request_id]
                if view.ignores_drafts:
                    wrote = len(block.token_ids)
                    for row in view.rows:
                        if row.request_id == block.request_id:
                            wrote += row.length - len(row.request.prompt)
                    state.reading_budget.lengths.append(wrote)
        if view.ignores_drafts and step.milliseconds is not None:
            prices.observe(step.nodes, rows, context, max(step.milliseconds - reading, 0.0))
        return state

    def report(self, state: AdaptiveState) -> PlanReport:
        """Predicted time, and why most steps were plain, where their costs are a reason."""
        few = state.steps < FIRST or state.bare <= _MOSTLY * state.steps
        if few or not state.drafts:
            return PlanReport(state.predicted)
        prices = state.prices.of(max(len(state.view.rows), 1), state.context)
        costs = prices.more[0] / prices.plain
        kept = state.kept / state.tried if state.tried else LEVEL
        if costs < sum(kept**depth for depth in range(1, state.drafts[0].max_depth + 1)):
            return PlanReport(state.predicted)  # it would have paid: there was no draft, or no time
        why = f"the smallest draft costs {costs:.0%} of a plain step"
        if state.tried:
            why += f", and {kept:.0%} of drafted tokens looked at were kept"
        return PlanReport(state.predicted, why)


def _foreseen(
    memory: RowMemory, row: PlannedRow, drafts: Sequence[DraftShape], prices: StepPrices
) -> int:
    """Of drafts that are foreseen for a row alone the one that is worth most, -1 for none.

    It may take longer than a plain step by what drafts have brought this row, and by so much
    that losing it costs `BET` as is expected: one and a half steps for a copy of which nine in
    ten are right, a fifth of one for a guess. So a text that refuses all of them loses little,
    and one that repeats itself is copied at once. No node is looked for that costs more than it
    can be worth.
    """
    assert row.foresee is not None
    left, deepest = row.request.left(row.length), drafts[-1].max_nodes - 1
    room = deepest if left is None else max(left - 1, 0)
    rate, holds = memory.speed / prices.plain, memory.brought / memory.expected
    forecast, least, dared = [0.0], rate * prices.node, 0.0
    memory.forecast = forecast
    for nodes, gain in enumerate(row.foresee()):
        if nodes == 1:
            chance = min(holds * gain, SUREST)
            dared = prices.plain * (memory.budget + BET / (1 - chance))
            if prices.more[0] > dared:
                return -1
        if nodes:
            forecast.append(gain)
            if nodes >= deepest or holds * (gain - forecast[-2]) < least:
                break
    best, most, last = -1, 0.0, len(forecast) - 1
    for at, (shape, more) in enumerate(zip(drafts, prices.more, strict=True)):
        nodes = min(shape.max_nodes - 1, last)
        worth = min(holds * forecast[nodes], room) - rate * more
        if worth > most and more <= dared:
            best, most = at, worth
        if nodes == last:
            break
    return best


def _jointly(
    state: AdaptiveState, memories: Sequence[RowMemory], gains: Sequence[Sequence[float]]
) -> int:
    """The draft that is worth most to the rows together, -1 for none.

    A step costs more as soon as one row has a draft; a row that has none gains nothing by it. What
    a draft model has not read it reads first, which what is left to be written has to be worth.
    """
    view = state.view
    rows = view.rows
    prices = state.prices.of(len(rows), state.context, corrected=True)
    if len(rows) == 1:  # without a draft it is a plain step: how often matters to no choice
        total, rate = gains[0], memories[0].speed / prices.plain
    else:
        believed = state.pool.hit_rate.chances
        chances = [
            memory.hit_chance(row, believed[memory.greedy])
            for memory, row in zip(memories, rows, strict=True)
        ]
        drafted = 1 - prod(1 - chance for chance in chances)
        prices = StepPrices(prices.plain, tuple(more * drafted for more in prices.more))
        likely = [[c * gain for gain in each] for c, each in zip(chances, gains, strict=True)]
        total = _summed(likely, _weights(state, rows, memories) if view.closed else None)
        tokens = sum(memory.tokens for memory in memories)
        speed = max(1.0, tokens / sum(memory.time for memory in memories))
        rate = speed * len(rows) / prices.plain
    best = _best(state, rows[0], memories, total, prices, rate)
    reading = rate * state.reading
    if best >= 0 and reading:
        each = 1 + total[best] / len(rows)
        worth = total[best] - rate * prices.more[best]
        looks = min(map(state.pool.looks.__getitem__, map(_GREEDY, memories)))
        sure = SURE_KNOWN if looks >= KNOWN else SURE
        ahead = sum(map(state.reading_budget.ahead, rows)) / len(rows)
        if worth * ahead / each < sure * reading:
            best = -1
    if best >= 0:
        state.backoff = Backoff()
        state.reading_budget.vain = 1
        state.rests = ()
    elif reading and (look := _look(state, prices, rate)) >= 0:
        return look
    elif rows[0].foresee is None:
        loses = max(rate * prices.more[0] - total[0], 0.0) + reading
        return 0 if _due(state, loses / (rate * prices.plain)) else -1
    else:
        needed = rate * (1 - len(rows) ** -0.5)  # sums over many rows vary less
        far = all(needed * more > gain for gain, more in zip(total, prices.more, strict=True))
        state.rest = len(rows) // ROWS if far else 0
    return best


def _look(state: AdaptiveState, prices: StepPrices, rate: float) -> int:
    """A draft to look at where a draft model has to read first, -1: none now.

    It is as large as what reading costs lets it be: if it is kept it pays, and tells the most.
    """
    rows = state.view.rows
    reading, plain = rate * state.reading, rate * prices.plain
    look = 0
    for at, more in enumerate(prices.more):
        if rate * more <= LOOK * reading:
            look = at
    loses = reading + rate * prices.more[look]  # tokens
    writes = sum(map(state.reading_budget.writes, rows))
    return look if state.reading_budget.spend(loses / plain, writes / plain) else -1


def _who(state: AdaptiveState) -> tuple[int, ...]:
    """The rows under way, and about how long they are."""
    return (state.context // CONTEXT, *(row.request_id for row in state.view.rows))


def _due(state: AdaptiveState, loses: float) -> bool:
    """Count a step for which nothing pays; whether it is time to look again in its place.

    Until then nothing is learnt, so that while the rows stay the same nothing is weighed anew.
    """
    due = state.backoff.over(loses)
    state.rests, state.loses = () if due or len(state.view.rows) == 1 else _who(state), loses
    return due


def _apart(
    state: AdaptiveState, memories: Sequence[RowMemory], gains: Sequence[Sequence[float]]
) -> DraftShape:
    """Each row by its own odds and its part of a full batch's time: nothing of its neighbours.

    A row's text then follows from its seed, the costs and `max_num_seqs`.
    """
    most, chosen = state.view.max_num_seqs, []
    for row, memory, gain in zip(state.view.rows, memories, gains, strict=True):
        full = state.prices.of(most, row.length)
        share = StepPrices(full.plain / most, tuple(more / most for more in full.more))
        best = _best(state, row, [memory], gain, share, memory.speed / share.plain)
        if best >= 0:
            memory.backoff = Backoff()
        elif row.foresee is None:
            loses = max(memory.speed / share.plain * share.more[0] - gain[0], 0.0)
            best = 0 if memory.backoff.over(loses / memory.speed) else -1
        memory.shape = PLAIN if best < 0 else state.drafts[best]
        chosen.append(best)
    widest = max(chosen)
    if widest < 0:
        return PLAIN
    shape = state.drafts[widest]
    if min(chosen) == widest:
        return shape
    shapes = [memory.shape for memory in memories]
    depths = torch.tensor([each.max_depth for each in shapes], device="cpu")
    return shape._replace(most_B=depths, sizes=tuple(each.max_nodes - 1 for each in shapes))


def _best(
    state: AdaptiveState,
    row: PlannedRow,
    memories: Sequence[RowMemory],
    gains: Sequence[float],
    prices: StepPrices,
    rate: float,
) -> int:
    """The draft that is worth most at this rate; -1: none is worth anything, or takes too long.

    It may take as many plain steps longer as drafts have brought of late, and DARE more. Of copies
    other texts' odds are a guess, and behind long texts, where nodes are dear, a deep draft would
    bet on it. Who foresees has read the text itself; a draft model that reads prompts is about as
    good everywhere, and short drafts would not bring back what reading took.
    """
    dared = inf
    if row.foresee is None and not state.costs.reading:
        dared = DARE + sum(memory.tokens - memory.time for memory in memories) / len(memories)
    best, most = -1, 0.0
    for at, (gain, more) in enumerate(zip(gains, prices.more, strict=True)):
        worth = gain - rate * more
        if worth > most and more <= dared * prices.plain:
            best, most = at, worth
    return best


def _weights(
    state: AdaptiveState, rows: Sequence[PlannedRow], memories: Sequence[RowMemory]
) -> list[float] | None:
    """What each row's tokens count for where no row comes after it, 1 on average.

    A step of k rows takes S(k), so a step less of any row saves what it takes beside the others,
    about (S(B) - S(1)) / (B - 1), and of the last one S(1). Who that will be is guessed from what
    the rows have left to write and how fast they have been.
    """
    left = [row.request.left(row.length) for row in rows]
    known = [max(each, 1) for each in left if each is not None]
    if len(known) < len(left):
        return None
    count = len(rows)
    one, all_of = (state.prices.of(many, state.context).plain for many in (1, count))
    beside = (all_of - one) / (count - 1)
    due = [n * memory.time / memory.tokens for n, memory in zip(known, memories, strict=True)]
    scale = 1 + UNSURE * max(due)
    last = [exp((each - max(due)) / scale) for each in due]
    premium = (one - beside) / sum(last)
    return [(beside + premium * each) * count / all_of for each in last]


def _summed(gains: Sequence[Sequence[float]], weights: Sequence[float] | None) -> list[float]:
    """The rows' gains from each draft together."""
    if weights is None:
        return [sum(each) for each in zip(*gains, strict=True)]
    return [sum(map(mul, weights, each)) for each in zip(*gains, strict=True)]
