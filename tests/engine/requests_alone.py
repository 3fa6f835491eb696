"""Requests of many kinds on the tiny pair, and the text that each has alone."""

from functools import lru_cache

import pytest

from outrider import Engine, SamplingParams, StopConditions, Timestamps
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from tiny import DRAFTERS, PROMPTS, VOCAB, pair

MAX_NUM_SEQS = 3
LONG = [(7 * i * i + 3 * i) % VOCAB for i in range(140)]
TEXTS = [*PROMPTS, LONG[:70], LONG[5:], [4, 4], LONG[30:47], PROMPTS[0], [9, 9, 9], LONG[:33], [1]]
HOW = [
    SamplingParams(0),
    SamplingParams(1.0, seed=11),
    SamplingParams(0.8, seed=12, top_p=0.8),
    SamplingParams(1.0, seed=13, repetition_penalty=1.4, no_repeat_ngram_size=3),
    SamplingParams(1.1, seed=14, top_k=6, min_p=0.02),
    SamplingParams(0, frequency_penalty=0.5, min_new_tokens=4),
    SamplingParams(1.0, seed=15, begin_suppress_tokens=(3, 5, 8), forced_eos_token_id=3),
    SamplingParams(
        0.9, seed=16, timestamps=Timestamps(VOCAB // 2, 3, 6), forced_bos_token_id=VOCAB - 9
    ),
]
REQUESTS = [
    Request(text, HOW[at % len(HOW)], StopConditions(4 + 5 * at % 17, (3,) if at % 3 == 0 else ()))
    for at, text in enumerate([*TEXTS, *TEXTS[:2]])
]
CAPACITY = 256


@lru_cache
def engine_of(name: str) -> Engine:
    target, small = pair()
    return Engine(target, DRAFTERS[name](small))


@lru_cache
def alone(name: str, number: int) -> tuple[list[int], str]:
    run = EngineRun(engine_of(name), 1, CAPACITY)
    run.submit(REQUESTS[number])
    return [token for block in run for token in block.token_ids], run.reasons[0]


def refuses(error, *parts):
    return pytest.raises(error, match=".*".join(parts))
