"""transformers' own speech pipeline with `custom_generate`: short, chunked, whole files."""

from functools import lru_cache

import numpy as np
import pytest
import transformers
from spoken_whisper import extractor, perturbed, tokenizer, whisper

from outrider.integrations.generate import SpeculativeGenerate


def sound(seconds, seed=0):
    noise = np.random.default_rng(seed).standard_normal(int(16000 * seconds))
    return (0.1 * noise).astype(np.float32)


@lru_cache
def asr():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return transformers.pipeline(
            "automatic-speech-recognition",
            model=whisper(),
            tokenizer=tokenizer(),
            feature_extractor=extractor(),
        )
    finally:
        transformers.logging.set_verbosity(before)


CASES = {
    "a file": (sound(0.8), {}),
    "a batch": ([sound(0.8), sound(1.0, 1), sound(0.5, 2)], {"batch_size": 3}),
    "a whole file": (sound(2.6), {"return_timestamps": True}),
    "chunks": (sound(2.6), {"chunk_length_s": 1, "batch_size": 2, "ignore_warning": True}),
    "chunks with times": (
        sound(2.6),
        {"chunk_length_s": 1, "batch_size": 2, "ignore_warning": True, "return_timestamps": True},
    ),
    "its language": (sound(0.8), {"return_language": True}),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """transformers has advice for some of these calls."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES)
def test_the_speech_pipeline_gives_the_same_text(case):
    given, how = CASES[case]
    call = SpeculativeGenerate(draft_model=perturbed(whisper()))
    plain = {"num_beams": 1, "language": "en"}
    texts = [
        asr()(given, generate_kwargs={**plain, **more}, **how)
        for more in ({}, {"custom_generate": call})
    ]
    assert texts[0] == texts[1]
    assert call.total.accepted > 5


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES)
def test_the_beams_that_the_pipeline_asks_for_by_itself(case):
    """It has five unless told otherwise."""
    given, how = CASES[case]
    call = SpeculativeGenerate(drafter="none")
    texts = [
        asr()(given, generate_kwargs={"language": "en", **more}, **how)
        for more in ({}, {"custom_generate": call}, {"num_beams": 1})
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert call.total.new_tokens > 20
