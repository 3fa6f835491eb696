"""What benchmarks make of their times: on clocks that tests turn, as machines are not asked."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import beside_ctranslate2
import continuous_batching
import growth
import starts


@pytest.fixture
def clock(monkeypatch):
    """Seconds that all clocks show."""
    shown = SimpleNamespace(seconds=0.0)
    for name in ("process_time", "thread_time", "monotonic"):
        monkeypatch.setattr(time, name, lambda: shown.seconds)
    return shown


def arm_of(clock, text, each):
    """Takes the next of these seconds in every call, the first and the last again and again."""
    calls = iter(each)

    def run(source):
        clock.seconds += next(calls)
        return text

    return run


def test_translators_are_compared_by_their_least_times_a_token(clock):
    arms = {
        "transformers float32": arm_of(clock, [5, 6, 7, 8], [9, 8, 8, 8, 8]),
        "outrider float32": arm_of(clock, [5, 6, 7, 8], [99, 4, 2, 3, 2]),
        "CTranslate2 float32": arm_of(clock, [5, 6], [1, 1, 1, 5, 7]),
    }
    told = beside_ctranslate2.compared(arms, [[1]], 4)
    assert [row["ms a token"] for row in told] == [2000, 500, 500]
    assert [row["times CTranslate2's speed"] for row in told] == [0.25, 1, 1]
    assert [row["texts as transformers'"] for row in told] == ["1 of 1", "1 of 1", "0 of 1"]


def arms_of(**speeds):
    """What growth.py measured: milliseconds of a step, inside and outside the target."""
    return {
        name: {"step": sum(each[:2]), "target": each[0], "outside": each[1]}
        | {"of plain": each[2], "in sum": each[-1]}
        for name, each in speeds.items()
    }


def test_growth_marks_what_grows_faster_than_bytes_and_what_loses():
    def at(length, read, **speeds):
        return {"rows": 1, "length": length, "bytes": read, "arms": arms_of(**speeds)}

    small = at(1024, 100, plain=(10.0, 1.0, 1.0), copies=(10.0, 1.0, 0.98))
    fair = at(2048, 200, plain=(20.0, 2.0, 1.0), copies=(30.0, 2.1, 0.97))
    assert growth.marked([small, fair]) == []
    bad = at(2048, 150, plain=(20.0, 1.0, 1.0), copies=(20.0, 1.7, 0.96, 0.95))
    assert growth.marked([small, bad]) == [
        "1 rows of 2048 tokens: copies has 0.960 of plain decoding's speed",
        "1 rows of 2048 tokens: copies has 0.950 of plain decoding's speed, all blocks together",
        "1 rows, 1024 to 2048 tokens: plain, target: 2.00 times, the bytes 1.50",
        "1 rows, 1024 to 2048 tokens: copies, outside: 1.70 times, the bytes 1.50",
    ]
    assert growth.marked([small, bad | {"rows": 4}])[2:] == []  # another number of rows


def test_growth_adds_up_blocks_by_their_tokens():
    blocks = [{"step": 10.0, "tokens": 1.0}, {"step": 20.0, "tokens": 4.0}]
    assert growth._in_sum(blocks) == 6.0


def test_continuous_batching_tells_milliseconds_a_token_beside_plain():
    told = continuous_batching.told_of("planned", [2.0, 4.0], [4.0, 4.0], 100, True, {3: 4, 1: 2})
    assert told == {
        "engine": "planned",  # as the page draws it
        "ms a token": 30,
        "times plain": "1.500 [1.000, 2.000]",
        "texts equal": True,
        "sizes": "{1: 2, 3: 4}",
    }


def test_a_server_listens_before_it_is_ready(clock, monkeypatch):
    answers = iter([None, None, 503, 503, 200])

    def status(port):
        clock.seconds += 2.0
        return next(answers)

    monkeypatch.setattr(starts, "status", status)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    process = SimpleNamespace(terminate=lambda: None, wait=lambda: None)
    assert starts.serving(process, 80) == (6.0, 10.0)
