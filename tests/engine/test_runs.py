"""Rows come and go while others run: a text depends on no neighbour.

The property: any interleaving of submits, ends, cancels and steps, with fewer rows than requests,
gives every request the text that it has alone.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from requests_alone import CAPACITY, LONG, MAX_NUM_SEQS, REQUESTS, alone, engine_of, refuses

from outrider import ConfigurationError, Engine, SamplingParams, StopConditions
from outrider.engine import scheduler
from outrider.engine.batch import Prefill, begin, groups, slab
from outrider.engine.engine_run import EngineRun
from outrider.engine.outputs import RequestStatus
from outrider.engine.request import Request
from outrider.models.cache import SlotCache
from tiny import DRAFTERS, PROMPTS, Restless, pair


class Script:
    """A run that is played action by action; `texts` are what it has told, by request."""

    def __init__(self, engine: Engine, max_num_seqs: int = MAX_NUM_SEQS) -> None:
        self.run = EngineRun(engine, max_num_seqs, CAPACITY)
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
                self.texts[block.request_id] += block.token_ids
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
            outside = self.run._requests.entries[number].cut
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
    assert all(phase in (RequestStatus.ENDED, RequestStatus.CANCELLED) for phase in run.phases)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
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

    def wrong(self, into, other):
        right(self, into, other)
        for stack in self.stacks:
            for at in into:
                stack[:, max(at - 1, 0)] = stack[:, at]
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
    played.run._outputs.lag = 1
    for action, pick in FIXED:
        played.play(action, pick)
    played.finish()
    assert played.wrong(name) == []


def test_another_shape_every_step_in_a_batch_that_others_join():
    target, small = pair()
    check("coupled chain", Engine(target, Restless(DRAFTERS["coupled chain"](small))), FIXED)


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
    run = engine.run(prompts, SamplingParams(0), StopConditions(4))
    texts = [[] for _ in prompts]
    for block in run:
        texts[block.request_id] += block.token_ids
    assert sum(counted) <= 1.15 * sum(len(prompt) for prompt in prompts)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == [
            t
            for b in engine.run([prompt], SamplingParams(0), StopConditions(4))
            for t in b.token_ids
        ]


def calls(monkeypatch, target, fails=()):
    """The nodes of each call that the target gets; those of these numbers fail."""
    counted, right = [], type(target).forward

    def forward(self, cache, nodes, **options):
        if self is target:
            counted.append(nodes.tokens_BQ.shape[1])
            if len(counted) in fails:
                raise RuntimeError("the model failed")
        return right(self, cache, nodes, **options)

    monkeypatch.setattr(type(target), "forward", forward)
    return counted


@pytest.mark.parametrize(("name", "steps"), [("root", [20, 1, 1]), ("chain", [19, 5])])
def test_the_first_step_reads_the_prompt(monkeypatch, name, steps):
    """A call less than a prompt and its steps, if nothing is drafted in the first."""
    engine = engine_of(name)
    made = calls(monkeypatch, engine.target)
    run = engine.run([LONG[:20]], SamplingParams(0), StopConditions(3))
    for _ in run:
        pass
    assert made[: len(steps)] == steps
    stats = run.stats
    assert stats.prefill_ms > 0
    assert stats.score_ms > 0
    assert stats.seconds > 0


def test_rows_of_unlike_lengths_read_their_ends_in_the_first_step(monkeypatch):
    engine = engine_of("root")
    prompts = [LONG[:30], LONG[3:15], LONG[5:25]]
    settings = [SamplingParams(0), SamplingParams(0.8, seed=3), SamplingParams(0.6, seed=4)]

    def texts(prompts, settings):
        told = [[] for _ in prompts]
        for block in engine.run(prompts, settings, StopConditions(6)):
            told[block.request_id] += block.token_ids
        return told

    want = [texts([one], [setting])[0] for one, setting in zip(prompts, settings, strict=True)]
    made = calls(monkeypatch, engine.target)
    assert texts(prompts, settings) == want
    assert made == [18, 12, *[1] * 5]  # the shortest has 12 tokens


def test_who_joins_behind_a_first_step_that_failed_finds_the_prompt_read(monkeypatch):
    engine = engine_of("root")
    want = [
        t for b in engine.run([LONG], SamplingParams(0), StopConditions(5)) for t in b.token_ids
    ]
    run = EngineRun(engine, 2, CAPACITY)
    with monkeypatch.context() as patch:
        calls(patch, engine.target, fails=[1])
        first = run.submit(Request(LONG, SamplingParams(0), StopConditions(5)))
        with pytest.raises(RuntimeError, match="the model failed"):
            run.step()
    second = run.submit(Request(LONG, SamplingParams(0), StopConditions(5)))
    told = {first: [], second: []}
    for block in run:
        told[block.request_id] += block.token_ids
    assert told == {first: want, second: want}


@pytest.mark.parametrize("lengths", [[], [1], [5, 5, 5], [400] + [10] * 7, list(range(1, 300, 7))])
def test_every_row_is_in_one_group_and_little_of_it_is_padding(lengths):
    together = groups(lengths)
    assert sorted(row for rows in together for row in rows) == list(range(len(lengths)))
    for rows in together:
        size = len(rows) * max(lengths[row] for row in rows)
        assert size - sum(lengths[row] for row in rows) <= max(64, size / 8)


def test_a_prompt_is_read_in_pieces_between_the_steps_of_others(monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 16)
    engine = engine_of("chain")
    run = EngineRun(engine, 2, CAPACITY)
    run.submit(Request(PROMPTS[0], SamplingParams(0), StopConditions(60)))
    text = [token for block in run.step() for token in block.token_ids]
    late = run.submit(Request(LONG, SamplingParams(0), StopConditions(5)))
    steps, other = 0, []
    while run.reasons[late] is None:
        for block in run.step():
            (other if block.request_id == late else text).extend(block.token_ids)
        if run.phases[late] is RequestStatus.PREFILLING:
            steps += 1
    assert steps >= len(LONG) // 16 - 1
    text += [token for block in run for token in block.token_ids]
    assert text == [
        t
        for b in engine.run([PROMPTS[0]], SamplingParams(0), StopConditions(60))
        for t in b.token_ids
    ]
    assert other == [
        t for b in engine.run([LONG], SamplingParams(0), StopConditions(5)) for t in b.token_ids
    ]


def test_joining_writes_into_free_seats_and_moves_nobody():
    engine = engine_of("tree")
    run = EngineRun(engine, 4, CAPACITY)
    run.submit(Request(PROMPTS[0], SamplingParams(0), StopConditions(40)))
    run.step()
    buffers = [stack.data_ptr() for stack in run.batch.cache.stacks]
    tokens = run.batch.tokens_SL.data_ptr()
    for prompt in PROMPTS[1:4]:
        run.submit(Request(prompt, SamplingParams(0), StopConditions(40)))
    for _ in range(3):
        run.step()
    assert run.batch.rows == 4
    assert [stack.data_ptr() for stack in run.batch.cache.stacks] == buffers
    assert run.batch.tokens_SL.data_ptr() == tokens


def test_a_short_row_that_moves_beside_a_long_one_is_copied_as_what_it_is(monkeypatch):
    copied, take = [], SlotCache.take

    def told(cache, rows, slots=None):
        few = take(cache, rows, slots)
        copied.append((cache.width, few.stacks[0].shape[3]))
        return few

    engine = Engine(pair()[0], DRAFTERS["root"](None))
    requests = [
        Request(prompt, SamplingParams(0), StopConditions(budget))
        for prompt, budget in (([5] * 90, 12), ([2, 7], 4), ([6, 1, 3], 12))
    ]
    single, run = EngineRun(engine, 1, CAPACITY), EngineRun(engine, 3, CAPACITY)
    single.submit(requests[2])
    text = [token for block in single for token in block.token_ids]
    run.submit_all(requests)
    while run.batch is None or run.batch.rows < 3:
        run.step()
    monkeypatch.setattr(SlotCache, "take", told)
    moved = [token for block in run if block.request_id == 2 for token in block.token_ids]
    assert [wide > 90 and few < 10 for wide, few in copied] == [True]
    assert moved == text[-len(moved) :] != []


def test_a_run_that_never_ends_keeps_nothing_of_what_is_over():
    engine = engine_of("chain")
    run, texts = EngineRun(engine, 3, CAPACITY), {}
    for turn in range(60):
        if turn < 40:
            texts[run.submit(REQUESTS[turn % len(REQUESTS)])] = []
        if turn % 7 == 6:
            waiting = [n for n in texts if run.reason(n) is None]
            run.end(waiting[-1])
        for block in run.step():
            texts[block.request_id] += block.token_ids
        for number in [n for n in texts if run.reason(n) is not None]:
            stats = run.release(number)
            assert stats.new_tokens == len(texts.pop(number))
    assert run.done
    assert not texts
    assert not run.requests
    assert run.stats.new_tokens > 100
    assert run.submit(REQUESTS[0]) == 40
    with refuses(ConfigurationError, "no request 3", "this run has 1"):
        run.release(3)
    with refuses(ConfigurationError, "request 40 is not over"):
        run.release(40)


def test_free_seats_use_up_no_seeds():
    """Requests without a seed draw one from torch's generator; the next ones must not move."""
    target, small = pair()
    before = torch.get_rng_state()
    slab(target, DRAFTERS["chain"](small), MAX_NUM_SEQS, CAPACITY)
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
    assert batch.stop_BS.shape == (2, 4)  # room for a multiple of four
