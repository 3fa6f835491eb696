"""Rows come and go while others run: a text depends on no neighbour.

The property: any interleaving of submits, ends, cancels and steps, with fewer seats than requests,
gives every request the text that it has alone.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from requests_alone import CAPACITY, LONG, REQUESTS, SEATS, alone, engine_of, refuses

from outrider import (
    CapacityError,
    ConfigurationError,
    DraftModel,
    Engine,
    Limits,
    PromptError,
    Root,
    Sampling,
)
from outrider.engine import seating
from outrider.engine.batch import Prefill, begin, groups, slab
from outrider.engine.ledger import NEXT, Phase
from outrider.engine.planner import Report
from outrider.engine.request import Request
from outrider.engine.run import Run
from outrider.models.cache import SlotCache
from outrider.models.nodes import causal
from outrider.types import Inputs
from tiny import DRAFTERS, PROMPTS, VOCAB, Restless, pair


class Script:
    """A run that is played action by action; `texts` are what it has told, by request."""

    def __init__(self, engine: Engine, seats: int = SEATS) -> None:
        self.run = Run(engine, seats, CAPACITY)
        self.left = list(range(len(REQUESTS)))
        self.who: list[int] = []
        self.texts: list[list[int]] = []

    def play(self, action: str, pick: int) -> None:
        if action == "submit" and self.left:
            self.who.append(self.left.pop(pick % len(self.left)))
            self.texts.append([])
            assert self.run.submit(REQUESTS[self.who[-1]]) == len(self.who) - 1
        if action == "step":
            for block in self.run.step():
                self.texts[block.row] += block.token_ids
        open_ = [n for n, reason in enumerate(self.run.reasons) if reason is None]
        if action in ("cancel", "end") and open_:
            number = open_[pick % len(open_)]
            if action == "cancel":
                self.run.end(number)
            else:
                keep = min(pick, len(self.texts[number]))
                self.run.end(number, "stop", keep=keep)
                self.texts[number] = self.texts[number][:keep]

    def finish(self) -> None:
        while len(self.who) < 12:
            self.play("submit", 0)
        self.run.close()
        while not self.run.done:
            self.play("step", 0)

    def wrong(self, name: str) -> list[int]:
        """Requests whose text is not the one that they have alone."""
        found = []
        for number, (who, text) in enumerate(zip(self.who, self.texts, strict=True)):
            whole, reason = alone(name, who)
            outside = self.run._ledger.entries[number].cut
            same = text == whole[: len(text)] if outside else text == whole
            if not same or (not outside and self.run.reasons[number] != reason):
                found.append(number)
            assert self.run.requests[number].new_tokens == len(text)
        return found


ACTION = st.sampled_from(["submit", "submit", "step", "step", "step", "end", "cancel"])
SCRIPTS = st.lists(st.tuples(ACTION, st.integers(0, 20)), min_size=10, max_size=60)


def check(name: str, engine: Engine, script: list[tuple[str, int]]) -> None:
    played = Script(engine)
    for action, pick in script:
        played.play(action, pick)
    played.finish()
    assert played.wrong(name) == []
    run = played.run
    assert run.stats.new_tokens == sum(map(len, played.texts))
    assert all(phase in (Phase.ENDED, Phase.CANCELLED) for phase in run.phases)


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=SCRIPTS)
def test_neighbours_never_change_a_text(name, script):
    check(name, engine_of(name), script)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=SCRIPTS)
def test_neighbours_never_change_a_text_in_many_scripts(name, script):
    check(name, engine_of(name), script)


FIXED = [("submit", 0), ("submit", 3), ("step", 0), ("submit", 4), ("step", 0), ("cancel", 0)] * 3


def test_a_put_that_touches_a_neighbour_is_caught(monkeypatch):
    right = SlotCache.put

    def wrong(self, seats, other):
        right(self, seats, other)
        for stack in self.stacks:
            for seat in seats:
                stack[:, max(seat - 1, 0)] = stack[:, seat]
        return self

    check("chain", engine_of("chain"), FIXED)
    monkeypatch.setattr(SlotCache, "put", wrong)
    played = Script(engine_of("chain"))
    for action, pick in FIXED:
        played.play(action, pick)
    played.finish()
    assert played.wrong("chain")


@pytest.mark.parametrize("name", ["root", "chain", "tree"])
def test_blocks_may_be_read_late(name):
    """As on a GPU, where the host reads a block while the next step runs."""
    played = Script(engine_of(name))
    played.run._lag = 1
    for action, pick in FIXED:
        played.play(action, pick)
    played.finish()
    assert played.wrong(name) == []


# ---------------------------------------------------------------------- prefill


def test_a_long_prompt_is_not_read_to_by_short_ones(monkeypatch):
    counted = []
    right = Prefill.step

    def step(self, tokens=None):
        counted.append(len(self.requests) * (self.context.bound - 1))
        return right(self, tokens)

    monkeypatch.setattr(Prefill, "step", step)
    engine = engine_of("chain")
    prompts = [LONG, *[LONG[i : i + 10] for i in range(7)]]
    run = engine.run(prompts, Sampling(0), Limits(4))
    texts = [[] for _ in prompts]
    for block in run:
        texts[block.row] += block.token_ids
    assert sum(counted) <= 1.15 * sum(len(prompt) for prompt in prompts)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == [
            t for b in engine.run([prompt], Sampling(0), Limits(4)) for t in b.token_ids
        ]


@pytest.mark.parametrize("lengths", [[], [1], [5, 5, 5], [400] + [10] * 7, list(range(1, 300, 7))])
def test_every_row_is_in_one_group_and_little_of_it_is_padding(lengths):
    together = groups(lengths)
    assert sorted(row for rows in together for row in rows) == list(range(len(lengths)))
    for rows in together:
        size = len(rows) * max(lengths[row] for row in rows)
        assert size - sum(lengths[row] for row in rows) <= max(64, size / 8)


def test_a_prompt_is_read_in_pieces_between_the_steps_of_others(monkeypatch):
    monkeypatch.setattr(seating, "CHUNK", 16)
    engine = engine_of("chain")
    run = Run(engine, 2, CAPACITY)
    run.submit(Request(PROMPTS[0], Sampling(0), Limits(60)))
    text = [token for block in run.step() for token in block.token_ids]
    late = run.submit(Request(LONG, Sampling(0), Limits(5)))
    steps, other = 0, []
    while run.reasons[late] is None:
        for block in run.step():
            (other if block.row == late else text).extend(block.token_ids)
        if run.phases[late] is Phase.PREFILLING:
            steps += 1
    assert steps >= len(LONG) // 16 - 1
    text += [token for block in run for token in block.token_ids]
    assert text == [
        t for b in engine.run([PROMPTS[0]], Sampling(0), Limits(60)) for t in b.token_ids
    ]
    assert other == [t for b in engine.run([LONG], Sampling(0), Limits(5)) for t in b.token_ids]


def test_joining_writes_into_free_seats_and_moves_nobody():
    engine = engine_of("tree")
    run = Run(engine, 4, CAPACITY)
    run.submit(Request(PROMPTS[0], Sampling(0), Limits(40)))
    run.step()
    buffers = [stack.data_ptr() for stack in run.batch.cache.stacks]
    tokens = run.batch.tokens_SL.data_ptr()
    for prompt in PROMPTS[1:4]:
        run.submit(Request(prompt, Sampling(0), Limits(40)))
    for _ in range(3):
        run.step()
    assert run.batch.rows == 4
    assert [stack.data_ptr() for stack in run.batch.cache.stacks] == buffers
    assert run.batch.tokens_SL.data_ptr() == tokens


def test_a_run_that_never_ends_keeps_nothing_of_what_is_over():
    engine = engine_of("chain")
    run, texts = Run(engine, 3, CAPACITY), {}
    for turn in range(60):
        if turn < 40:
            texts[run.submit(REQUESTS[turn % len(REQUESTS)])] = []
        if turn % 7 == 6:
            waiting = [n for n in texts if run.reason(n) is None]
            run.end(waiting[-1])
        for block in run.step():
            texts[block.row] += block.token_ids
        for number in [n for n in texts if run.reason(n) is not None]:
            stats = run.forget(number)
            assert stats.new_tokens == len(texts.pop(number))
    assert run.done
    assert not texts
    assert not run.requests
    assert run.stats.new_tokens > 100
    assert run.submit(REQUESTS[0]) == 40
    with refuses(ConfigurationError, "no request 3", "this run has 1"):
        run.forget(3)
    with refuses(ConfigurationError, "request 40 is not over"):
        run.forget(40)


def test_free_seats_use_up_no_seeds():
    """Requests without a seed draw one from torch's generator; the next ones must not move."""
    target, small = pair()
    before = torch.get_rng_state()
    slab(target, DRAFTERS["chain"](small), SEATS, CAPACITY)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_is_put_together_and_taken_apart():
    target, small = pair()
    engine = Engine(target, DRAFTERS["tree"](small))
    few = begin(target, engine.drafter, [REQUESTS[1], REQUESTS[3]], CAPACITY)
    batch = slab(target, engine.drafter, 3, CAPACITY)
    assert batch.rows == 0
    batch = batch.put([0, 1], few)
    batch = batch.put([2], begin(target, engine.drafter, [REQUESTS[0]], CAPACITY))
    assert batch.rows == 3
    assert batch.context.length_B.tolist() == [len(REQUESTS[n].prompt) for n in (1, 3, 0)]
    assert batch.context.sampling.greedy == "some"
    assert batch.context.sampling.shaping.repetition_B.tolist() == [1, pytest.approx(1.4), 1]
    batch = batch.put([0], batch.take([2])).narrow(2)
    assert batch.context.length_B.tolist() == [len(REQUESTS[n].prompt) for n in (0, 3)]
    assert batch.context.tokens_BL[0, : len(REQUESTS[0].prompt)].tolist() == list(
        REQUESTS[0].prompt
    )
    assert batch.stop_BS.shape == (2, 1)


# ---------------------------------------------------------------------- phases and bad input


def test_requests_wait_for_a_seat_in_order():
    run = Run(engine_of("chain"), 2, CAPACITY)
    numbers = [run.submit(Request([n + 1], Sampling(0), Limits(6))) for n in range(6)]
    assert run.phases == [Phase.WAITING] * 6
    run.step()
    assert run.phases == [Phase.RUNNING] * 2 + [Phase.WAITING] * 4
    order = []
    for block in run:
        if block.row not in order:
            order.append(block.row)
    assert order == numbers
    assert run.phases == [Phase.ENDED] * 6
    assert list(run) == []
    assert run.submit(Request([9], Sampling(0), Limits(2))) == 6  # an idle run takes more
    assert sum(len(block.token_ids) for block in run) == 2


def test_a_request_can_be_cancelled_in_every_phase(monkeypatch):
    monkeypatch.setattr(seating, "CHUNK", 16)
    run = Run(engine_of("chain"), 2, CAPACITY)
    first = run.submit(Request(PROMPTS[0], Sampling(0), Limits(30)))
    run.step()
    reading = run.submit(Request(LONG, Sampling(0), Limits(5)))
    waiting = run.submit(Request([5], Sampling(0), Limits(5)))
    gone = run.submit(Request([6], Sampling(0), Limits(5)))
    run.end(gone)
    run.step()
    assert run.phases[reading] is Phase.PREFILLING
    run.end(reading)
    assert [block.row for block in run.step()] == [first]
    run.step()
    assert run.phases[waiting] is Phase.RUNNING
    run.end(first, "stop")
    texts = list(run)
    assert {block.row for block in texts} == {waiting}
    assert run.reasons == ["stop", "cancelled", "length", "cancelled"]
    cancelled = Phase.CANCELLED
    assert run.phases == [Phase.ENDED, cancelled, Phase.ENDED, cancelled]
    assert run.requests[reading].new_tokens == 0


def test_only_what_may_follow_follows():
    assert set(NEXT) == set(Phase)
    assert not NEXT[Phase.FAILED]
    assert not NEXT[Phase.CANCELLED]
    entry = Run(engine_of("root"), 1, CAPACITY)
    entry.submit(Request([1], Sampling(0), Limits(1)))
    with pytest.raises(AssertionError, match="WAITING -> FAILED"):
        entry._ledger.entries[0].move(Phase.FAILED, "error")


def test_what_a_run_refuses():
    engine = engine_of("chain")
    run = Run(engine, 1, 64)
    good = Request(PROMPTS[0], Sampling(0), Limits(8))
    with refuses(CapacityError, "prompt 0", "6 tokens", "budget 60", "capacity=64"):
        run.submit(Request(PROMPTS[0], Sampling(0), Limits(60)))
    for prompt, part in (([], "no tokens"), ([VOCAB], "vocabulary"), ([1] * 256, "context")):
        with refuses(PromptError, "prompt 0", part):
            run.submit(Request(prompt, Sampling(0), Limits(8)))
    with refuses(ConfigurationError, "logit_bias names token 99"):
        run.submit(Request([1], Sampling(0, logit_bias={99: 1.0}), Limits(8)))
    with refuses(PromptError, "token ids"):
        Request("text")
    with refuses(ConfigurationError, "sampling must be a Sampling"):
        Request([1], 0.5)
    assert run.submit(good) == 0  # what was refused left no trace
    for number in (1, -1, "0"):
        with refuses(ConfigurationError, "no request", "submit returned"):
            run.end(number)
    run.step()
    with refuses(ConfigurationError, "keep must be", "at most"):
        run.end(0, "stop", keep=100)
    run.end(0)
    with refuses(ConfigurationError, "request 0 is over already", "cancelled", "end it once"):
        run.end(0)
    run.close()
    with refuses(ConfigurationError, "this run is closed", "another run"):
        run.submit(good)
    with refuses(ConfigurationError, "seats", "at least 1"):
        Run(engine, 0)


def test_what_is_kept_is_what_counts():
    run = Run(engine_of("chain"), 2, CAPACITY)
    numbers = [run.submit(Request(p, Sampling(0), Limits(30))) for p in PROMPTS[:2]]
    told = sum(len(block.token_ids) for block in run.step() if block.row == numbers[0])
    run.end(numbers[0], "stop", keep=told - 1)
    list(run)
    assert run.requests[0].new_tokens == told - 1
    assert run.stats.new_tokens == told - 1 + 30
    assert run.reasons == ["stop", "length"]


# ---------------------------------------------------------------------- hidden states and inputs


class Reader(Root):
    """Plain decoding that keeps what it was shown of the target's states."""

    taps = (-1, 1)
    seen: list[torch.Tensor]

    def open(self, context, capacity):
        self.seen.append(context.hidden)
        return super().open(context, capacity)

    def commit(self, memory, context, draft, verdict, scores):
        self.seen.append(scores.hidden)


def test_a_drafter_that_asks_is_shown_the_states(monkeypatch):
    monkeypatch.setattr(seating, "CHUNK", 16)
    target, _ = pair()
    reader = Reader()
    object.__setattr__(reader, "seen", [])
    run = Run(Engine(target, reader), 2, CAPACITY)
    run.submit(Request(LONG, Sampling(0), Limits(4)))
    list(run)
    prompt, *steps = (states for states in reader.seen if states)
    assert [state.shape for state in prompt] == [(1, len(LONG) - 1, 32)] * 2
    assert [tuple(state.shape) for states in steps for state in states] == [(1, 1, 32)] * 8
    capacity = 256
    cache = target.open(1, capacity)
    text = torch.tensor([LONG])
    at = torch.arange(len(LONG))[None]
    with torch.inference_mode():
        whole = target.forward(cache, causal(text, at, capacity), taps=reader.taps).hidden
    for tap in (0, 1):
        states = torch.cat([prompt[tap], steps[0][tap]], 1)
        torch.testing.assert_close(states, whole[tap], atol=1e-4, rtol=1e-4)


def test_inputs_for_a_model_of_text_alone_are_refused():
    run = Run(engine_of("root"), 1, CAPACITY)
    inputs = Inputs(torch.tensor([[1, 2]]), None, torch.ones(1, 2, dtype=torch.bool))
    with refuses(ConfigurationError, "reads text alone", "request 0 with inputs", "leave out"):
        run.submit(Request([1], Sampling(0), Limits(4), inputs))


# ---------------------------------------------------------------------- planners


class Turns:
    """A planner that takes the shapes in turn and counts what it has learnt."""

    def __init__(self):
        self.learnt = 0

    def open(self, shapes, costs):
        self.costs = costs
        return shapes, 0

    def plan(self, state, view):
        rows = view.rows
        assert view.seats >= len(rows)
        assert view.closed
        assert all(isinstance(row.request, Request) for row in rows)
        assert all(row.length >= len(row.request.prompt) and row.gains is None for row in rows)
        shapes, at = state
        shape = shapes[at % len(shapes)]
        most = [at % 3] * len(rows)
        return shape._replace(most_B=torch.tensor(most)) if at % 2 else shape

    def report(self, state):
        return Report()

    def learn(self, state, step):
        blocks = step.blocks
        assert step.milliseconds > 0
        assert step.nodes > max(block.drafted for block in blocks)
        self.learnt += sum(len(block.token_ids) for block in blocks)
        assert all(block.drafted >= block.accepted for block in blocks)
        return state[0], state[1] + 1


@pytest.mark.parametrize("name", ["chain", "tree", "coupled chain", "coupled tree"])
def test_a_planner_chooses_among_the_shapes_and_no_exact_text_changes(name):
    target, small = pair()
    planner, costs = Turns(), {"target": {1: 1.0}}
    engine = Engine(target, DRAFTERS[name](small), None, planner, costs)
    how = Sampling(1.0, seed=4) if "coupled" in name else Sampling(0)
    run = engine.run(PROMPTS, how, Limits(30))
    texts = [[] for _ in PROMPTS]
    for block in run:
        texts[block.row] += block.token_ids
    plain = Engine(target, Root(), "match").run(PROMPTS, how, Limits(30))
    expected = [[] for _ in PROMPTS]
    for block in plain:
        expected[block.row] += block.token_ids
    assert texts == expected
    assert planner.costs == costs
    assert planner.learnt == 30 * len(PROMPTS)


def test_a_planner_outside_the_declared_shapes_is_refused():
    target, small = pair()

    class Wild(Turns):
        def plan(self, state, view):
            return state[0][0]._replace(key="wild", max_nodes=99)

    run = Engine(target, DraftModel(small, (1, 1)), None, Wild()).run(PROMPTS[:1], Sampling(0))
    with refuses(ConfigurationError, "planner", "'draft_model'", "'wild'", "choose among"):
        next(run)


def test_another_shape_every_step_in_a_batch_that_others_join():
    target, small = pair()
    check("coupled chain", Engine(target, Restless(DRAFTERS["coupled chain"](small))), FIXED)


class Seer:
    """A drafter that foresees, over one that does not."""

    def __init__(self, inner):
        self.inner, self.name, self.taps = inner, "seer", ()
        self.kinds, self.shapes = inner.kinds, inner.shapes
        self.open, self.commit, self.told = inner.open, inner.commit, []

    def foresee(self, memory, context):
        return [[0.0, float(length)] for length in context.length_B.tolist()]

    def propose(self, memory, context, shape):
        assert context.cache is not None
        return self.inner.propose(memory, context, shape)


def test_what_a_drafter_foresees_reaches_the_planner_row_by_row():
    target, small = pair()
    looked = []

    class Looking(Turns):
        def plan(self, state, view):
            looked.append([(row.number, row.length, row.gains[1]) for row in view.rows])
            return state[0][0]

    engine = Engine(target, Seer(DraftModel(small, (1, 1))), None, Looking())
    list(engine.run(PROMPTS, Sampling(0), Limits(6)))
    assert [number for number, _, _ in looked[0]] == list(range(len(PROMPTS)))
    assert all(length == gain for step in looked for _, length, gain in step)
