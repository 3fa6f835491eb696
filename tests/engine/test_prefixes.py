"""Prompts that begin alike are read once: entries are copied, texts stay what they are."""

from collections import Counter
from contextlib import contextmanager

import pytest
from requests_alone import LONG, engine_of

from outrider import SamplingParams, StopConditions
from outrider.engine import scheduler
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.models.decoder import TreeDecoder
from outrider.models.prefix_cache import LEAST, WORTH, PrefixCache
from tiny import DRAFTERS, pair

MEGABYTE = 1 << 20
HEAD = LONG[:100]
#: Alike in part, as a whole, longer, and nothing alike.
PROMPTS = [[*HEAD, 7, 9], [*HEAD, 8], [*HEAD, 8], [*HEAD, 8, 3, 3], [*LONG[:40], 5], [9, 9, 4]]


@contextmanager
def counted(monkeypatch):
    """Counts the nodes that each model is asked for: rows times tokens."""
    nodes, forward = Counter(), TreeDecoder.forward

    def count(model, cache, asked, **options):
        nodes[model] += asked.tokens_BQ.numel()
        return forward(model, cache, asked, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TreeDecoder, "forward", count)
        yield nodes


def texts(engine, prompts, prefixes, max_num_seqs=3, budget=9):
    """The text of each prompt, and how much of it was copied."""
    run = EngineRun(engine, max_num_seqs, 256, prefixes=prefixes)
    requests = [
        Request(prompt, SamplingParams(0.9, seed=seed), StopConditions(budget))
        for seed, prompt in enumerate(prompts)
    ]
    run.submit_all(requests)
    run.close()
    found = [[] for _ in prompts]
    for block in run:
        found[block.request_id] += block.token_ids
    return found, [run.cached(number) for number in range(len(prompts))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [n for n in DRAFTERS if not n.startswith("coupled")])
def test_texts_are_those_without_copies(name):
    engine = engine_of(name)
    prefixes = PrefixCache(MEGABYTE)
    expected, nothing = texts(engine, PROMPTS, None)
    assert nothing == [0] * len(PROMPTS)
    found, copied = texts(engine, PROMPTS, prefixes)
    assert found == expected
    again, all_copied = texts(engine, PROMPTS, prefixes)
    assert again == expected
    if engine.drafter.aux_layers:
        assert len(prefixes) == 0
        assert copied == all_copied == nothing
        return
    assert sum(copied) >= 3 * len(HEAD)
    assert all_copied == [len(prompt) - 1 for prompt in PROMPTS]


def test_a_copy_of_another_beginning_is_seen(monkeypatch):
    """The negative control: a text that goes on from a prefix that is not its own is another."""
    engine = engine_of("coupled chain")
    expected, _ = texts(engine, PROMPTS, None)
    prefixes, other = PrefixCache(MEGABYTE), [*LONG[1:101], 8]
    texts(engine, [other], prefixes)
    monkeypatch.setattr(prefixes, "common", lambda one, known: min(len(one), len(known)))
    assert texts(engine, PROMPTS, prefixes)[0] != expected


def test_a_prompt_in_common_is_read_once(monkeypatch):
    engine = engine_of("chain")
    target, small = pair()
    prompts = [[*HEAD, 5]] * 4
    with counted(monkeypatch) as nodes:
        texts(engine, prompts, None, max_num_seqs=4, budget=1)
    apart = nodes[target], nodes[small]
    with counted(monkeypatch) as nodes:
        texts(engine, prompts, PrefixCache(MEGABYTE), max_num_seqs=4, budget=1)
    saved = 3 * len(HEAD)
    assert apart[0] - nodes[target] == saved
    assert apart[1] - nodes[small] == saved


def test_copies_come_in_beside_those_who_run(monkeypatch):
    """A request whose prompt is known sits down at once, not after pieces of other prompts."""
    monkeypatch.setattr(scheduler, "CHUNK", 8)
    prefixes = PrefixCache(MEGABYTE)
    run = EngineRun(engine_of("chain"), 4, 256, prefixes=prefixes)
    run.submit(Request([*HEAD, 7], SamplingParams(0), StopConditions(60)))
    run.step()
    numbers = run.submit_all([Request([*HEAD, 7], SamplingParams(0), StopConditions(60))] * 2)
    blocks = run.step()
    assert {block.request_id for block in blocks} == {0, *numbers}
    assert [run.cached(number) for number in numbers] == [len(HEAD)] * 2


def test_the_last_ones_are_kept_and_no_more():
    target, _ = pair()
    engine = engine_of("root")
    one = PrefixCache(MEGABYTE)
    texts(engine, [HEAD], one, budget=1)
    size = one.bytes
    assert size > 0
    prefixes = PrefixCache(2 * size + size // 2)
    first, second, third = ([at, *HEAD[1:]] for at in (1, 2, 3))
    for prompt in (first, second, first, third):
        texts(engine, [prompt], prefixes, budget=1)
    known = [prefixes.known(target, prompt) for prompt in (first, second, third)]
    assert known == [len(HEAD) - 1, 0, len(HEAD) - 1]
    assert prefixes.bytes == 2 * size
    longer = [*first, 5, 5]
    texts(engine, [longer], prefixes, budget=1)
    assert len(prefixes) == 2  # in place of the one that it goes on from
    assert prefixes.known(target, first) == len(HEAD) - 1
    small = PrefixCache(size - 1)
    assert texts(engine, [first] * 3, small, budget=1)[1] == [0, 0, 0]
    assert small.bytes == len(small) == 0


def test_little_in_common_is_not_worth_a_copy():
    target, _ = pair()
    prefixes = PrefixCache(MEGABYTE)
    texts(engine_of("root"), [HEAD], prefixes, budget=1)
    assert prefixes.known(target, [*HEAD[: LEAST - 1], 1, 1]) == 0
    assert prefixes.known(target, [*HEAD[:LEAST], 1, 1]) == LEAST
    assert prefixes.known(target, [*HEAD[:3], 1]) == 3
    far = [[at, *LONG[1 : WORTH + 20], at] for at in (1, 1, 2)]
    assert prefixes.together(target, far) == [0, 2]
    near = [[*LONG[100:130], at, at] for at in (1, 2)]
    assert prefixes.together(target, near) == [0, 1]


def test_nothing_is_kept_after_a_row_with_nan():
    """Nobody is given entries of a model that went wrong."""
    prefixes = PrefixCache(MEGABYTE)
    run = EngineRun(engine_of("root"), 2, 256, prefixes=prefixes)
    run.submit(Request(HEAD, SamplingParams(0), StopConditions(9)))
    run.submit(Request([1, 2, 3], SamplingParams(0), StopConditions(9)))
    run.step()
    assert len(prefixes) == 2
    run._requests.entries[0].poisoned = True
    run.end(0)
    run.step()
    assert len(prefixes) == 0


def test_a_row_that_leaves_in_the_first_step_leaves_no_other_s_entries_in_its_name():
    """Its neighbour moves to its place before prompts are kept that the step has read."""

    ill = []

    def fails(input_ids, scores):
        if ill:
            raise ZeroDivisionError
        return scores

    engine, prefixes = engine_of("root"), PrefixCache(MEGABYTE)
    run = EngineRun(engine, 2, 256, prefixes=prefixes)
    short = StopConditions(3)
    run.submit_all(
        [
            Request(LONG[:60], SamplingParams(0, processors=(fails,)), short),
            Request(LONG[30:90], SamplingParams(0), short),
        ]
    )
    ill.append(True)  # it was tried when it came
    while not run.done:
        run.step()
    assert [run.reason(0), run.reason(1)] == ["error", "length"]
    again = [*LONG[:60], 5]
    assert texts(engine, [again], prefixes)[0] == texts(engine, [again], None)[0]
