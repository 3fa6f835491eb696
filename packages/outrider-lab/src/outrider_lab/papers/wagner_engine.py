"""Beside the protocol: the same recordings through outrider's own transcription, plain and drafted.

The paper changes one function of transformers' loop; what a whole recogniser gains is another
question. Here whole recordings are transcribed, each arm in turn, encoder and decoder apart.
"""

import time
from collections.abc import Sequence

import torch

from outrider.loading import load
from outrider.speech.result import TranscriptStats
from outrider.stats import RequestStats
from outrider.text.speculator import Speculator
from outrider_lab.bench import measure
from outrider_lab.certify.report import Row
from outrider_lab.papers.wagner_pairs import WagnerPair
from outrider_lab.recordings import SpokenText

TEMPERATURES = (0.0, 1.0)


def run(
    pair: WagnerPair, target: str, draft: str, language: str | None, dtype: str, count: int
) -> list[Row]:
    """Word errors and times of the first `count` recordings at T = 0 and 1; every row is exact."""
    threads = torch.get_num_threads()
    drafted = load(target, draft, dtype=dtype, device=pair.device, threads=threads, planner="fixed")
    recordings = pair.recordings[:count]
    arms = {"plain": drafted.plain(), "draft": drafted}
    return [
        row
        for temperature in TEMPERATURES
        for row in _rows(pair, arms, recordings, language, temperature)
    ]


def _rows(
    pair: WagnerPair,
    arms: dict[str, Speculator],
    recordings: Sequence[SpokenText],
    language: str | None,
    temperature: float,
) -> list[Row]:
    clock = time.perf_counter if pair.device.type == "cuda" else time.thread_time
    texts: dict[str, list[str]] = {name: [] for name in arms}
    seconds = dict.fromkeys(arms, 0.0)
    stats: dict[str, list[TranscriptStats]] = {name: [] for name in arms}
    for _, number, name in measure.turns(list(arms), len(recordings)):
        start = clock()
        heard = arms[name].transcribe(
            str(recordings[number].file), language=language, temperature=temperature,
            timestamps="none", no_speech_threshold=None, seed=number,
        )  # fmt: skip
        seconds[name] += clock() - start
        texts[name].append(heard.text)
        stats[name].append(heard.stats)
    references = [one.text for one in recordings]
    rows: list[Row] = []
    for name in arms:
        decoded = RequestStats()
        for one in stats[name]:
            decoded.add(one.decoded)
        rows.append(
            {
                "arm": name,
                "temperature": temperature,
                "score": pair.score(texts[name], references),
                "seconds": seconds[name],
                "encoder_ms": sum(one.encoder_ms for one in stats[name]),
                "decoder_ms": sum(one.decoder_ms for one in stats[name]),
                "tokens": decoded.new_tokens,
                "tokens_a_step": decoded.block_efficiency,
                "alpha": decoded.alpha,
                "texts": texts[name],
            }
        )
    return rows
