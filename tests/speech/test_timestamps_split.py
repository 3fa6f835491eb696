"""A window's tokens as pieces; pauses; fallback; prompts: everything that needs no model."""

from itertools import pairwise

import numpy as np
import pytest

from outrider.errors import ConfigurationError, UnknownName, UnsupportedModel
from outrider.speech import settings, vad
from outrider.speech.settings import Thresholds
from outrider.speech.transcriber import window_prompt
from outrider.speech.vocabulary import Vocabulary
from outrider.speech.windows import cut_at_timestamps

FIRST = 100  # the timestamp 0.00 s
WORDS = Vocabulary(1, 0, 99, 2, {"en": 10, "fr": 11}, {"transcribe": 20, "translate": 21})


def at(*steps):
    """Timestamps for numbers, tokens of text for letters."""
    return [FIRST + one if isinstance(one, int) else ord(one) - 97 for one in steps]


@pytest.mark.parametrize(
    ("steps", "pieces", "advance"),
    [
        ((0, "a", "b", 40), [(0, 4, 0, 40)], 100),  # nothing is said behind it
        ((0, "a", 40, 40, "b", 80), [(0, 3, 0, 40), (3, 6, 40, 80)], 100),
        ((0, "a", 40, 40, "b", "c"), [(0, 3, 0, 40)], 40),  # the rest is read again
        ((0, "a", 40, 50, "b", 80, 80), [(0, 3, 0, 40), (3, 6, 50, 80)], 80),
        ((5, "a", "b"), [(0, 3, 0, 5)], 100),
        ((0, "a", "b"), [(0, 3, 0, 100)], 100),
        (("a", "b"), [(0, 2, 0, 100)], 100),
        ((), [], 100),
        ((0, 0), [(0, 1, 0, 0)], 100),  # it must go on
    ],
)
def test_windows_are_cut_where_two_timestamps_meet(steps, pieces, advance):
    found = cut_at_timestamps(at(*steps), FIRST, 100)
    assert [tuple(piece) for piece in found.pieces] == pieces
    assert found.advance == advance


@pytest.mark.parametrize(
    ("steps", "pieces"),
    [
        ((0, "a", 40, 40, "b", "c"), [(0, 3, 0, 40), (3, 6, 40, 100)]),
        ((0, "a", 40, 50, "b", 80, 80), [(0, 3, 0, 40), (3, 6, 50, 80)]),
        ((5, "a", "b"), [(0, 3, 5, 100)]),
    ],
)
def test_a_window_that_is_read_once_keeps_its_end(steps, pieces):
    assert [
        tuple(p) for p in cut_at_timestamps(at(*steps), FIRST, 100, whole=True).pieces
    ] == pieces


def test_pauses_are_where_nobody_speaks():
    rate = 16000
    sound = np.random.default_rng(0).normal(0, 0.1, 25 * rate).astype(np.float32)
    for second in (6.5, 8.0, 15.0):
        sound[int(second * rate) : int((second + 0.5) * rate)] = 0
    spans = vad.at_pauses(sound, rate, 10.0)
    assert spans[0][0] == 0
    assert spans[-1][1] == 25.0
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert all(end - start <= 10.0 for start, end in spans)
    assert 8.1 <= spans[0][1] <= 8.4  # the later of two pauses
    assert 15.1 <= spans[1][1] <= 15.4


def test_spans_of_speech_become_windows():
    sound = np.zeros(40 * 16000, np.float32)
    given = [(1.0, 3.0), (4.0, 8.0), (12.0, 14.0), (20.0, 39.0)]
    spans = vad.of_speech(given, sound, 16000, 10.0, "talk")
    assert spans[:2] == [(1.0, 8.0), (12.0, 14.0)]
    assert spans[2][0] == 20.0
    assert spans[-1][1] == pytest.approx(39.0)
    assert all(end - start <= 10.0 for start, end in spans)
    assert vad.of_speech(lambda samples: given, sound, 16000, 10.0, "talk") == spans


@pytest.mark.parametrize(
    "given", ["speech", [1.0, 2.0], [(2.0, 1.0)], [(0, 5), (3, 8)], [(50.0, 60.0)], [(0, "b")], 5]
)
def test_spans_that_are_none_are_refused(given):
    with pytest.raises(ConfigurationError, match="vad must be"):
        vad.of_speech(given, np.zeros(160000, np.float32), 16000, 5.0, "talk")


def test_when_a_text_will_not_do():
    limits = Thresholds(2.4, -1.0, 0.6)
    assert settings.needs_fallback(limits, 3.0, -0.1, 0.0)
    assert settings.needs_fallback(limits, 1.0, -1.1, 0.0)
    assert not settings.needs_fallback(limits, 1.0, -0.9, 0.9)
    assert not settings.needs_fallback(limits, 1.0, -1.1, 0.9)  # silence
    assert settings.silent(limits, 0.9, -1.1)
    assert not settings.silent(limits, 0.9, -0.5)
    assert not settings.silent(limits, 0.5, -1.1)
    assert settings.silent(Thresholds(None, None, 0.6), 0.7, 0.0)
    assert not settings.needs_fallback(Thresholds(None, None, None), 9.0, -9.0, 0.0)


def test_prompts():
    assert window_prompt(WORDS, "fr", "transcribe", True) == ([1, 11, 20], 0)
    assert window_prompt(WORDS, "en", "translate", False, (7, 8)) == ([2, 7, 8, 1, 10, 21, 99], 3)
    assert window_prompt(WORDS, "en", "transcribe", True, range(30, 40), 3)[0][:4] == [
        2,
        37,
        38,
        39,
    ]
    plain = Vocabulary(1, 0, 99, None)
    assert window_prompt(plain, None, "transcribe", False, (7,)) == ([1, 99], 0)


def test_languages_by_code_name_and_token():
    for given in ("fr", "French", "<|fr|>", " FRENCH "):
        assert WORDS.language(given, "m") == "fr"
    assert WORDS.language(None, "m") is None
    for given in ("tlh", "klingon", "de", ""):
        with pytest.raises(UnknownName, match=r"unknown language of this model.*en, fr"):
            WORDS.language(given, "m")
    with pytest.raises(ConfigurationError, match="name or code"):
        WORDS.language(3, "m")


def test_models_of_english_alone():
    plain = Vocabulary(1, 0, 99, 2)
    assert plain.language("en", "m") is None
    with pytest.raises(ConfigurationError, match=r"knows English alone.*language='fr'"):
        plain.language("fr", "m")
    with pytest.raises(ConfigurationError, match=r"knows English alone.*task='translate'"):
        plain.task("translate", "m")
    with pytest.raises(UnknownName, match="unknown task"):
        plain.task("summarise", "m")


def test_a_configuration_that_names_no_special_tokens_is_refused():
    with pytest.raises(UnsupportedModel, match=r"no_timestamps_token_id.*generation_config.json"):
        Vocabulary.of({"eos_token_id": 3, "decoder_start_token_id": 4}, "m")
