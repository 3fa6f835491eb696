"""Whisper base on recorded speech: transformers' texts, one text whatever drafts, word times.

The folders `whisper-base` and `speech` of OUTRIDER_MODELS; benchmarks/recognition.py has all 34
windows. Two minutes on one core.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from training.whisper_recordings import asterisk, joined
from training.whisper_speech import RATE

import outrider

pytestmark = pytest.mark.real

GREEDY = {"language": "en", "temperature": 0}
WINDOWS = 3


def outline(transcript):
    """What must not change; log-probabilities round with the width of a step."""
    return [(segment.start, segment.end, segment.tokens) for segment in transcript.segments]


@pytest.fixture(scope="module")
def speculator(whisper):
    return outrider.load(whisper, drafter="none", dtype="float32", threads=1)


@pytest.fixture(scope="module")
def windows(speech):
    return [window.samples for window in joined(asterisk(speech, "en"))][:WINDOWS]


def test_texts_are_transformers(speculator, windows):
    together = speculator.transcribe(windows, timestamps=False, **GREEDY)
    model, extractor = speculator.hearing.model, speculator.hearing.extractor
    texts = []
    for samples in windows:
        made = extractor(samples, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(made["input_features"], language="en", task="transcribe")
        texts.append(speculator.tokenizer.decode(out[0], skip_special_tokens=True).strip())
    assert [one.text for one in together] == texts
    assert len(set(texts)) == WINDOWS


def test_drafts_and_references_do_not_change_the_text(speculator, windows, whisper):
    plain = speculator.transcribe(windows[0], **GREEDY)
    layers = outrider.load(
        whisper,
        draft_layers=(0, 1, 2, 3, 5),
        num_speculative_tokens=3,
        dtype="float32",
        threads=1,
    )
    mine = layers.transcribe(windows[0], **GREEDY)
    assert outline(mine) == outline(plain)
    assert mine.stats.decoded.block_efficiency > 1.5  # less is no draft
    copied = speculator.transcribe(windows[0], reference=plain.text, **GREEDY)
    assert copied.text == plain.text
    assert copied.stats.decoded.block_efficiency > 2.5


def test_a_long_recording_is_cut_and_encoded_once(speculator, windows):
    long = np.concatenate(windows[:2])
    counts = []
    reader = speculator.engine.target.runner.reader
    before = reader.encode
    reader.encode = lambda inputs: counts.append(len(inputs.mask_BS)) or before(inputs)
    try:
        result = speculator.transcribe(long, word_timestamps=True, temperature=(0.0, 0.2))
    finally:
        del reader.encode
    assert result.language == "en"
    assert sum(counts) == result.stats.windows >= 2
    starts = [word.start for segment in result.segments for word in segment.words]
    assert sum(a > b for a, b in pairwise(starts)) == 0
    assert result.segments[-1].end <= len(long) / RATE + 0.1
