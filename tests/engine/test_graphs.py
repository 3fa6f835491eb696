"""A replayed step is the step: texts and counts, while rows come and go and widths change."""

import pytest
import torch
from recorder import HostRead, Recorder

from outrider import Engine, StopConditions, ops, verifiers
from outrider.engine import graphs, outputs, step
from outrider.engine.engine_run import EngineRun
from outrider.engine.graphs import CudaCapture, Graphed
from outrider.engine.outputs import InFlightOutput
from outrider.engine.request import Request
from outrider.engine.speculation_policy import PlanReport
from outrider.engine.step import spec_decode_step
from outrider.errors import ConfigurationError
from outrider.models.batch_invariance import UNIT
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import LENGTH, RUNNING
from tiny import DRAFTERS, ON_HOST, PROMPTS, TRANSLATED, begun, decode, pair

SEEDED = [SamplingParams(1.0, seed=5 + i) for i in range(3)]
ENDS = [StopConditions(10), StopConditions(24), StopConditions(17)]


@pytest.fixture(autouse=True)
def off_the_host():
    """Verbs as they run on a device: tensors alone, no value is read."""
    with ops.use("reference"):
        yield


def engines(name, planner=None, **sizes):
    """The same engine without graphs and with a capture that needs no device."""
    target, small = pair(runner="transformers", **sizes)
    eager, graphed = (Engine(target, DRAFTERS[name](small), planner=planner) for _ in range(2))
    graphed.capture = Recorder()
    return eager, graphed


def counted(stats):
    keys = ("prompt_tokens", "new_tokens", "steps", "drafted", "accepted_per_position", "overlaps")
    return {key: stats.as_dict().get(key, stats.overlaps) for key in keys}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in (*ON_HOST, *TRANSLATED)])
def test_texts_and_counts_are_the_same_while_rows_leave(name):
    eager, graphed = engines(name)
    want, run = decode(eager, PROMPTS[:3], SEEDED, ENDS)
    got, again = decode(graphed, PROMPTS[:3], SEEDED, ENDS)
    assert got == want
    for one, other in zip(run.requests, again.requests, strict=True):
        assert counted(one) == counted(other)
        assert one.overlap == pytest.approx(other.overlap)
    assert graphed.capture.records >= 2  # anew when a row has left
    assert graphed.capture.replays > graphed.capture.records
    assert again.stats.engine_steps == graphed.capture.replays + graphed.capture.warmed
    assert again.stats.captures == graphed.capture.records
    assert again.stats.captures + again.stats.replays == graphed.capture.replays


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.5)])
@pytest.mark.parametrize("name", ["chain", "tree"])
def test_greedy_and_mixed_rows(name, temperatures):
    settings = [SamplingParams(t, top_p=0.9, seed=3) for t in temperatures]
    eager, graphed = engines(name)
    want, _ = decode(eager, PROMPTS[:3], settings, ENDS)
    assert decode(graphed, PROMPTS[:3], settings, ENDS)[0] == want


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["chain", "tree"])
def test_a_wider_cache_is_captured_anew(name, monkeypatch):
    monkeypatch.setattr(graphs, "ROOM", 128)
    prompt = list(range(1, 32)) * 3  # 93 tokens: 128 slots are seen, then 256
    eager, graphed = engines(name, context=512)
    want, _ = decode(eager, [prompt], SEEDED[0], StopConditions(60))
    got, _ = decode(graphed, [prompt], SEEDED[0], StopConditions(60))
    assert got == want
    assert graphed.capture.records == graphed.capture.warmed == 2


def test_a_step_is_captured_for_every_bound_of_its_width(monkeypatch):
    """Drafters cut buffers at the bound: a replay must not look at less than the rows hold."""
    _, graphed = engines("n-gram table")
    bounds, propose = [], step.propose

    def noted(drafter, batch, shape):
        bounds.append((batch.context.bound + shape.max_nodes) % UNIT)
        return propose(drafter, batch, shape)

    monkeypatch.setattr(step, "propose", noted)
    decode(graphed, PROMPTS[:2], SEEDED[:2], StopConditions(30))
    assert set(bounds) == {0}


def sent(block, *more):
    """A block as it leaves a device: copied to the host at once, read later."""
    tensors = {
        name: value.clone()
        for name, value in block._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    return InFlightOutput(block._replace(**tensors), *more)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lag", [0, 1])
def test_requests_that_come_while_others_run(lag, monkeypatch):
    monkeypatch.setattr(outputs, "InFlightOutput", sent)
    requests = [
        Request(tuple(prompt), how, end)
        for prompt, how, end in zip(PROMPTS * 2, SEEDED * 3, ENDS * 3, strict=False)
    ]

    def texts(made):
        run = EngineRun(made, max_num_seqs=2, capacity=64)
        run._outputs.lag = lag  # 1 is what a device has: the host reads while the next step runs
        run.submit_all(requests[:3])
        found = [[] for _ in requests[:6]]
        while not run.done:
            if len(run.phases) < 6 and run.stats.engine_steps == 3:
                run.submit_all(requests[3:6])
            for block in run.step():
                found[block.request_id] += block.token_ids
        return found

    eager, graphed = engines("tree")
    assert texts(graphed) == texts(eager)
    assert graphed.capture.replays


class Alternating:
    """A planner whose rows want less in every second step."""

    def open(self, shapes, costs):
        return [shapes[0], 0]

    def plan(self, state, view):
        state[1] += 1
        most = torch.tensor([1 + (state[1] + i) % 3 for i in range(len(view.rows))])
        return state[0]._replace(most_B=most if state[1] % 2 else None)

    def learn(self, state, step):
        return state

    def report(self, state):
        return PlanReport()


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_rows_that_want_less_in_some_steps(name):
    eager, graphed = engines(name, planner=Alternating())
    want, _ = decode(eager, PROMPTS[:3], SEEDED, ENDS)
    assert decode(graphed, PROMPTS[:3], SEEDED, ENDS)[0] == want
    assert graphed.capture.records >= 2  # with and without a limit of the rows


@pytest.mark.parametrize("name", ON_HOST)
def test_a_drafter_that_reads_the_host_cannot_be_captured(name):
    """They do on a CPU, where there is nothing to wait for."""
    eager, graphed = engines(name)
    want, _ = decode(eager, PROMPTS[:2], SEEDED[:2])
    got, run = decode(graphed, PROMPTS[:2], SEEDED[:2])
    assert got == want
    assert HostRead.__name__ in run.stats.why_eager


class ReadsInTheMiddle(Recorder):
    """A device on which the operator that stands for a host read comes late in a step."""

    def record(self, run, memory=None):
        def until(*_):
            run()
            raise RuntimeError("operation not permitted when stream is capturing")

        return super().record(until)


def test_a_step_that_cannot_be_captured_goes_on_without(caplog):
    eager, graphed = engines("tree")
    graphed.capture = capture = ReadsInTheMiddle()
    want, _ = decode(eager, PROMPTS[:3], SEEDED, ENDS)
    got, run = decode(graphed, PROMPTS[:3], SEEDED, ENDS)
    assert got == want
    assert decode(graphed, PROMPTS[:3], SEEDED, ENDS)[0] == want
    assert capture.records == 1
    assert (run.stats.captures, run.stats.replays) == (0, 0)
    assert "not permitted when stream is capturing" in run.stats.why_eager
    assert [r.levelname for r in caplog.records if "CUDA graphs" in r.message] == ["WARNING"]


def test_rows_that_need_python_step_without_graphs():
    """By "auto"; the rows beside and behind them are captured."""
    seen = []

    def noted(ids, scores):
        seen.append(ids)
        return scores

    settings = [SamplingParams(1.0, seed=5, processors=(noted,)), *SEEDED[1:]]
    eager, graphed = engines("chain")
    want, _ = decode(eager, PROMPTS[:3], settings, ENDS)
    seen.clear()
    got, run = decode(graphed, PROMPTS[:3], settings, ENDS)
    assert got == want
    assert seen
    assert run.stats.replays
    assert run.stats.captures + run.stats.replays < run.stats.engine_steps


def test_who_observes_may_keep_what_it_is_shown():
    kept = []
    _, graphed = engines("chain")
    run = graphed.run(
        PROMPTS[:2], SEEDED[:2], StopConditions(12), observe=lambda draft, *more: kept.append(draft)
    )
    for _ in run:
        pass
    assert not run.stats.replays
    assert len({draft.tokens_BN.data_ptr() for draft in kept}) == len(kept)


def test_graphs_that_were_dropped_early_are_captured_later():
    """Rows that come and go in every few steps cost no more than a few captures."""
    eager, graphed = engines("chain", context=512)
    ends = [StopConditions(4 + 3 * i) for i in range(12)]
    prompts, seeds = (PROMPTS * 3)[:12], [SamplingParams(1.0, seed=i) for i in range(12)]
    want, _ = decode(eager, prompts, seeds, ends)
    got, run = decode(graphed, prompts, seeds, ends)
    assert got == want
    assert 1 <= run.stats.captures <= 4
    _, again = decode(graphed, prompts[:1], seeds[:1], StopConditions(60))
    assert again.stats.captures == 1
    assert again.stats.replays > again.stats.engine_steps / 2


def test_refusals():
    target, small = pair()
    with pytest.raises(ConfigurationError, match="got a target on cpu; leave graphs out"):
        Engine(target, DRAFTERS["chain"](small), graphs=True)
    with pytest.raises(ConfigurationError, match="CUDA device"):
        CudaCapture(torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=r"graphs.*True, False or 'auto'.*got 'on'"):
        Engine(target, DRAFTERS["chain"](small), graphs="on")
    _, graphed = engines("chain")
    graphed.graphs = True
    with pytest.raises(ConfigurationError, match="1 processors of request 0"):
        decode(graphed, PROMPTS[:1], SamplingParams(1.0, processors=(lambda ids, scores: scores,)))


def test_rows_may_have_ended_whenever_a_step_is_replayed():
    """What is captured holds for later steps: rows that end then must not go on."""
    target, _ = pair(runner="transformers")
    drafter, rule = DRAFTERS["chain"](target), verifiers.get("match")  # all of it is accepted
    batch = begun(target, drafter, PROMPTS[:2], [SamplingParams(0)] * 2)
    graphed = Graphed(
        Recorder(),
        lambda *each: spec_decode_step(target, drafter, rule, *each),
        drafter.shapes,
        target,
    )
    batch = graphed(batch, drafter.shapes[0]).batch._replace(ended=False)
    batch = graphed(batch, drafter.shapes[0]).batch
    batch = batch._replace(reason_B=torch.tensor([LENGTH, RUNNING]))
    accepted = graphed(batch, drafter.shapes[0]).verdict.count_B.tolist()
    assert accepted == [0, drafter.shapes[0].max_depth]


class OnACard:
    """What a target on a device says of itself."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_who_reads_the_host_in_every_step_says_so(name):
    """Before any prompt is read; the others may be captured."""
    target, small = pair(runner="transformers")
    drafter = DRAFTERS[name](small)
    why = graphs.refusal(OnACard(), drafter)
    if name in TRANSLATED or name.startswith(("recall", "either")):
        assert f"drafter {drafter.name!r} reads values on the host" in why
    else:
        assert why is None
    assert "got a target on cpu" in graphs.refusal(target, drafter)


def test_several_processes_make_no_graph():
    class Split(OnACard):
        capturable = False

    assert "several processes" in graphs.refusal(Split(), DRAFTERS["root"](None))


def test_nothing_is_captured_on_a_cpu_and_statistics_say_so():
    target, small = pair()
    engine = Engine(target, DRAFTERS["chain"](small))
    _, run = decode(engine, PROMPTS[:1], SEEDED[:1], StopConditions(4))
    assert "got a target on cpu" in run.stats.as_dict()["why_eager"]
    assert Engine(target, DRAFTERS["chain"](small), graphs=False).eager == "graphs=False"
