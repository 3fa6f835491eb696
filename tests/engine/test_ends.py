"""Where rows end: budgets, stop tokens, stop strings, the context; retirement; interruption."""

import threading
from itertools import zip_longest

import pytest

from outrider import Engine, Root, SamplingParams, Speculator, Stop, StopConditions
from outrider.text.output_text import Detokenizer
from tiny import DRAFTERS, PROMPTS, decode, pair

NAMES = ["root", "chain", "tree", "prompt_lookup"]
GREEDY = SamplingParams(0)


def plain(prompt, length):
    target, _ = pair()
    return decode(Engine(target, Root()), [prompt], GREEDY, StopConditions(length))[0][0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 17])
def test_the_budget_is_met_exactly(name, budget):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small))
    rows, run = decode(engine, PROMPTS, GREEDY, StopConditions(budget))
    assert [len(row) for row in rows] == [budget] * len(PROMPTS)
    assert run.reasons == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_stop_token_ends_its_row_and_is_kept(name):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small))
    expected = [plain(prompt, 40) for prompt in PROMPTS]
    stops = [(row[9], row[14]) for row in expected]
    limits = [StopConditions(40, ids) for ids in stops]
    rows, run = decode(engine, PROMPTS, GREEDY, limits)
    for row, whole, ids in zip(rows, expected, stops, strict=True):
        assert row == whole[: min(whole.index(i) for i in ids) + 1]
    assert run.reasons == ["stop"] * len(PROMPTS)


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_token_at_the_budget_is_a_stop(name):
    target, small = pair()
    whole = plain(PROMPTS[0], 40)
    at = next(i for i in range(8, 40) if whole[i] not in whole[:i])
    limits = StopConditions(at + 1, (whole[at],))
    rows, run = decode(Engine(target, DRAFTERS[name](small)), PROMPTS[:1], GREEDY, limits)
    assert rows[0] == whole[: at + 1]
    assert run.reasons == ["stop"]
    rows, run = decode(
        Engine(target, DRAFTERS[name](small)), PROMPTS[:1], GREEDY, StopConditions(at, (whole[at],))
    )
    assert rows[0] == whole[:at]
    assert run.reasons == ["length"]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0, seed=1)])
@pytest.mark.parametrize("name", NAMES)
def test_generation_ends_cleanly_at_the_context(name, sampling):
    target, small = pair(context=48)
    engine = Engine(target, DRAFTERS[name](small))
    for budget in (None, 500):
        rows, run = decode(engine, PROMPTS, sampling, StopConditions(budget))
        assert [len(p) + len(r) for p, r in zip(PROMPTS, rows, strict=True)] == [48] * len(PROMPTS)
        assert run.reasons == ["context"] * len(PROMPTS)
    fits = StopConditions(48 - len(PROMPTS[0]))
    assert decode(engine, PROMPTS[:1], sampling, fits)[1].reasons == ["length"]


def test_at_the_context_every_drafter_writes_the_same():
    target, small = pair(context=48)
    texts = [
        decode(Engine(target, DRAFTERS[name](small)), PROMPTS, GREEDY, StopConditions(None))[0]
        for name in NAMES
    ]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_ended_leave_the_batch_and_the_others_do_not_notice(name):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small))
    budgets = [3, 40, 7, 41, 5]
    rows, run = decode(engine, PROMPTS, GREEDY, [StopConditions(b) for b in budgets])
    assert rows == [plain(p, b) for p, b in zip(PROMPTS, budgets, strict=True)]
    assert run.batch.rows <= 2  # five rows began
    assert [r.new_tokens for r in run.requests] == budgets


@pytest.mark.parametrize("name", ["root", "tree"])
def test_rows_leave_the_batch_when_blocks_are_read_late_too(name):
    """As on a GPU, where the host reads a block while the next step runs."""
    target, small = pair()
    budgets = [3, 40, 7, 41, 5]
    run = Engine(target, DRAFTERS[name](small)).run(
        PROMPTS, GREEDY, [StopConditions(b) for b in budgets]
    )
    run._outputs.lag = 1
    rows = [[] for _ in PROMPTS]
    for block in run:
        rows[block.request_id].extend(block.token_ids)
    assert rows == [plain(p, b) for p, b in zip(PROMPTS, budgets, strict=True)]
    assert run.batch.rows <= 2
    assert [r.new_tokens for r in run.requests] == budgets
    assert run.stats.score_ms > 0


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_sampled_rows_survive_retirement_too(name):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small))
    budgets = [3, 40, 7, 41, 5]
    rows = [SamplingParams(1.0, top_p=0.9, seed=i) for i in range(5)]
    texts, _ = decode(engine, PROMPTS, rows, [StopConditions(b) for b in budgets])
    for prompt, sampling, budget, text in zip(PROMPTS, rows, budgets, texts, strict=True):
        assert text == decode(engine, [prompt], sampling, StopConditions(budget))[0][0]


def test_a_request_can_be_ended_from_outside():
    target, small = pair()
    run = Engine(target, DRAFTERS["chain"](small)).run(PROMPTS[:2], GREEDY, StopConditions(40))
    rows = [[], []]
    for block in run:
        rows[block.request_id].extend(block.token_ids)
        if len(rows[0]) >= 10 and run.reasons[0] is None:
            run.end(0, "stop")
    assert run.reasons == ["stop", "length"]
    assert rows[1] == plain(PROMPTS[1], 40)
    assert rows[0] == plain(PROMPTS[0], 40)[: len(rows[0])]
    assert len(rows[0]) < 40


class Interrupted:
    """A target that is interrupted in its n-th call, as by Ctrl-C."""

    def __init__(self, model, calls):
        self.model, self.left = model, calls

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.model.forward(*args, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_run_leaves_its_text_and_a_usable_engine(name):
    target, small = pair()
    engine = Engine(Interrupted(target, 6), DRAFTERS[name](small))
    run = engine.run(PROMPTS[:1], GREEDY, StopConditions(40))
    tokens = []

    def go_on():
        for block in run:
            tokens.extend(block.token_ids)

    with pytest.raises(KeyboardInterrupt):
        go_on()
    expected = plain(PROMPTS[0], 40)
    assert 0 < len(tokens) < 40
    assert tokens == expected[: len(tokens)]
    assert run.stats.new_tokens == len(tokens)
    assert decode(engine, PROMPTS[:1], GREEDY, StopConditions(40))[0][0] == expected
    # the interrupted run itself goes on where it was
    go_on()
    assert tokens == expected


class Letters:
    """A tokenizer of one letter per token."""

    def decode(self, ids, **_):
        return "".join(chr(ord("A") + token) for token in ids)


def lettered(target, drafter):
    return Speculator(Engine(target, drafter), Letters())


@pytest.mark.parametrize("strings", [(), ("never there",)])
@pytest.mark.parametrize("blocks", [1, 99])
def test_a_stream_is_drained_from_where_it_is(blocks, strings):
    target, small = pair()
    speculator, stop = lettered(target, DRAFTERS["chain"](small)), Stop(12, strings)
    want = speculator.generate(PROMPTS[:2], GREEDY, stop).completions
    stream = speculator.stream(PROMPTS[:2], GREEDY, stop)
    told = ["", ""]
    for block, _ in zip(stream, range(blocks), strict=False):
        told[block.request_id] += block.text
    for _ in range(2):
        stream.drain()
        done = stream.result().completions
        assert [c.text for c in done] == [c.text for c in want]
        assert [c.token_ids for c in done] == [c.token_ids for c in want]
    assert all(c.text.startswith(text) for c, text in zip(done, told, strict=True))


def test_an_interrupted_drain_has_the_text_of_its_tokens():
    target, small = pair()
    want = Letters().decode(plain(PROMPTS[0], 24))
    speculator = lettered(Interrupted(target, 4), DRAFTERS["chain"](small))
    stream = speculator.stream(PROMPTS[0], GREEDY, Stop(24))
    with pytest.raises(KeyboardInterrupt):
        stream.drain()
    begun = stream.result().completions[0]
    assert begun.finish_reason == "running"
    assert begun.text
    assert want.startswith(begun.text)
    stream.drain()
    assert stream.result().texts == [want]


def test_logprobs_of_a_block_end_where_its_tokens_do():
    target, small = pair()
    speculator = lettered(target, DRAFTERS["chain"](small))
    whole = Letters().decode(plain(PROMPTS[0], 20))
    for begin in range(2, 10):
        stop = Stop(20, (whole[begin : begin + 2],))
        stream = speculator.stream(PROMPTS[0], GREEDY, stop, logprobs=True)
        for block in stream:
            assert len(block.block.logprobs) == len(block.token_ids) == len(block.block.token_ids)
        done = stream.result().completions[0]
        assert len(done.logprobs) == len(done.token_ids) == done.stats.new_tokens


def left_by_break(stream):
    for _ in stream:
        break


def left_by_an_error(stream):
    def fail(block):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(map(fail, stream))


def left_by_closing(stream):
    blocks = (block for block in stream)
    next(blocks)
    blocks.close()


def left_in_another_thread(stream):
    thread = threading.Thread(target=next, args=(stream,))
    thread.start()
    thread.join()


LEAVE = [left_by_break, left_by_an_error, left_by_closing, left_in_another_thread]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(1.0, seed=7)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", ["chain", "sampled tree", "beam", "coupled dynamic tree"])
def test_streams_may_be_left_early_and_taken_up_again(name, sampling):
    target, small = pair()
    speculator, stop = lettered(target, DRAFTERS[name](small)), Stop(16)
    want = speculator.generate(PROMPTS[:2], sampling, stop)
    streams = []
    for leave in LEAVE:
        streams.append(speculator.stream(PROMPTS[:2], sampling, stop))
        leave(streams[-1])
        assert streams[-1].result().completions[0].token_ids
        assert speculator.generate(PROMPTS[:2], sampling, stop).texts == want.texts
    for _ in zip_longest(*streams):  # all by turns
        pass
    for stream in streams:
        assert stream.result().texts == want.texts
        assert stream.result().stats.accepted == want.stats.accepted


# Text: with the shipped pair's tokenizer.


@pytest.fixture(scope="module")
def arms(shipped):
    from outrider import DraftModel, PromptLookup

    small = shipped.engine.drafter.model
    return {
        "plain": shipped.plain(),
        "chain": shipped,
        "tree": shipped.using(DraftModel(small, (2, 2, 1))),
        "prompt_lookup": shipped.using(PromptLookup(6)),
    }


def test_streaming_gives_what_generate_gives(arms, held_out):
    stop = Stop(20)
    expected = arms["plain"].generate(held_out[:2], GREEDY, stop)
    for name, arm in arms.items():
        stream = arm.stream(held_out[:2], GREEDY, stop)
        texts, ids = ["", ""], [[], []]
        for block in stream:
            texts[block.request_id] += block.text
            ids[block.request_id] += block.token_ids
        result = stream.result()
        assert texts == result.texts == expected.texts, name
        assert ids == [c.token_ids for c in result.completions]
        assert [c.finish_reason for c in result.completions] == ["length"] * 2
        assert arm.generate(held_out[:2], GREEDY, stop).texts == texts


@pytest.mark.exhaustive
def test_the_text_ends_before_a_stop_token_that_is_no_special_one(arms, held_out):
    prompt = held_out[0]
    whole = arms["plain"].generate(prompt, GREEDY, Stop(24)).completions[0].token_ids
    at = next(i for i in range(6, 24) if whole[i] not in whole[:i])
    expected = arms["plain"].generate(prompt, GREEDY, Stop(at)).texts[0]
    for strings in ((), ("never there",)):
        stop = Stop(24, strings, (whole[at],))
        for name, arm in arms.items():
            done = arm.generate(prompt, GREEDY, stop).completions[0]
            assert (done.text, done.token_ids) == (expected, whole[: at + 1]), name
            assert "".join(block.text for block in arm.stream(prompt, GREEDY, stop)) == expected


def test_a_stop_string_cuts_at_the_right_token(arms, held_out):
    prompt = held_out[0]
    whole = arms["plain"].generate(prompt, GREEDY, Stop(40)).completions[0]
    decode_ids = arms["plain"].tokenizer.decode
    for begin in (3, 20):
        string = whole.text[begin : begin + 4]
        cut = whole.text.index(string)
        count = next(n for n in range(41) if string in decode_ids(whole.token_ids[:n]))
        for name, arm in arms.items():
            result = arm.generate(prompt, GREEDY, Stop(40, ("never there", string)))
            done = result.completions[0]
            assert done.text == whole.text[:cut], name
            assert done.token_ids == whole.token_ids[:count], name
            assert done.finish_reason == "stop"
            assert done.stats.new_tokens == result.stats.new_tokens == count
            blocks = arm.stream(prompt, GREEDY, Stop(40, ("never there", string)))
            assert "".join(block.text for block in blocks) == done.text, name


def test_streamed_text_never_holds_the_beginning_of_a_stop_string():
    class Letters:
        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    for parts, told in [
        (("abcE", "N", "Dx"), ["abc", "", ""]),
        (("abcE", "EN", "x"), ["abc", "E", "ENx"]),
        (("aE", "N"), ["a", "", "EN"]),  # the rest comes when the text ends
    ]:
        words = Detokenizer(Letters(), ("END",))
        out = [words.push(list(map(ord, part))) for part in parts]
        if words.stopped_at is None and told[len(out) :]:
            out.append(words.finish())
        assert out == told
        assert "".join(told) == words.text


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_stop_string_within_the_least_tokens_is_text(size):
    class Letters:
        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    for least, kept in [(0, 1), (3, 4), (4, 7), (6, 7), (7, None)]:  # one may begin within them
        words = Detokenizer(Letters(), ("END", "x"), least=least)
        given = list(map(ord, "xENDENDx"))
        for at in range(0, len(given), size):
            words.push(given[at : at + size])
            if words.stopped_at is not None:
                break
        else:
            words.finish()
        ends = {1: ("", 1), 4: ("x", 4), 7: ("xEND", 7), None: ("xENDEND", 8)}
        assert (words.text, words.stopped_at) == ends[kept], (least, size)


@pytest.mark.exhaustive
def test_stop_strings_end_their_own_row_only(arms, held_out):
    whole = arms["plain"].generate(held_out[:2], GREEDY, Stop(20)).completions
    string = whole[0].text[8:12]
    stops = [Stop(20, (string,)), Stop(20)]
    for arm in arms.values():
        first, second = arm.generate(held_out[:2], GREEDY, stops).completions
        assert first.finish_reason == "stop"
        assert first.text == whole[0].text[: whole[0].text.index(string)]
        assert second.token_ids == whole[1].token_ids


def test_the_stop_token_is_in_the_ids_and_not_in_the_text(arms, held_out):
    whole = arms["plain"].generate(held_out[0], GREEDY, Stop(24)).completions[0]
    token = whole.token_ids[12]
    for arm in arms.values():
        done = arm.generate(held_out[0], GREEDY, Stop(24, token_ids=(token,))).completions[0]
        assert done.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
        assert done.finish_reason == "stop"


def test_result_is_of_its_moment():
    target, small = pair()
    stream = lettered(target, DRAFTERS["chain"](small)).stream(
        PROMPTS[0], GREEDY, Stop(12), logprobs=True
    )
    next(stream)
    begun = stream.result().completions[0]
    count = len(begun.token_ids)
    stream.drain()
    assert len(begun.token_ids) == len(begun.logprobs) == count


def test_result_can_be_read_in_the_middle(arms, held_out):
    stream = arms["chain"].stream(held_out[0], GREEDY, Stop(32))
    next(stream)
    begun = stream.result().completions[0]
    assert begun.finish_reason == "running"
    assert len(begun.token_ids) >= 1
    for _ in stream:
        pass
    done = stream.result().completions[0]
    assert done.finish_reason == "length"
    assert done.token_ids[: len(begun.token_ids)] == begun.token_ids


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_a_text_is_told_whole_in_whatever_pieces_it_comes(arms, size):
    tokenizer = arms["chain"].tokenizer
    text = "na\u00efve \U0001f600\U0001f680 caf\u00e9\n\tdef f(x):  # \u4f60\u597d " * 3
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    words = Detokenizer(tokenizer)
    told = [words.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert not any("\ufffd" in one for one in told)
    assert "".join([*told, words.finish()]) == words.text == text


def test_half_a_character_is_told_once(arms):
    tokenizer = arms["chain"].tokenizer
    words = Detokenizer(tokenizer)
    words.push(tokenizer("\U0001f600")["input_ids"][:2])  # a BOS and the first byte
    assert [words.finish(), words.finish()] == ["\ufffd", ""]
    assert words.text == "\ufffd"


@pytest.mark.exhaustive
def test_bfloat16_chains_write_what_plain_decoding_writes(held_out):
    import outrider

    pair16 = outrider.load(dtype="bfloat16", threads=1, pack_weights=True)
    for prompt in held_out[:3]:
        a = pair16.generate(prompt, GREEDY, Stop(40))
        b = pair16.plain().generate(prompt, GREEDY, Stop(40))
        assert a.completions[0].token_ids == b.completions[0].token_ids
        assert a.stats.mean_acceptance_length > 1.3
