"""Windows by beam search: transformers' own texts, whatever drafts and whoever is heard beside."""

import pytest
import test_against_transformers as against
import whispers

from outrider import Beams, DraftModel
from outrider.drafters import Beam, ReferenceLookup
from outrider.errors import ConfigurationError
from outrider.speech.window_decoder import searched

BUDGET = 20
ASKED = {"temperature": 0, "language": "en", "beam_size": 4, "max_new_tokens": BUDGET}
WINDOWS = [whispers.sound(seconds, seed) for seconds, seed in ((1.5, 0), (2.0, 1), (0.7, 2))]


def theirs(model, samples, **asked):
    made = whispers.extractor()(samples, sampling_rate=16000, return_tensors="pt")
    out = model.generate(
        **made, num_beams=4, max_new_tokens=BUDGET, max_length=None, language="en", **asked
    )
    return out[0].tolist()


def plain(tokens):
    return [token for token in tokens if token < 256]


@pytest.mark.filterwarnings("ignore")
def test_texts_are_transformers(tiny):
    together = tiny.transcribe(WINDOWS, timestamps=False, **ASKED)
    for samples, beside in zip(WINDOWS, together, strict=True):
        alone = tiny.transcribe(samples, timestamps=False, **ASKED)
        expected = theirs(tiny.hearing.model, samples)
        # there a timestamp that was not asked for begins another window
        assert plain(alone.segments[0].tokens) == plain(expected[:BUDGET])
        assert beside.text == alone.text
        assert beside.segments[0].avg_logprob == pytest.approx(alone.segments[0].avg_logprob)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_recording_is_transformers(tiny, conditioned, seed):
    samples = whispers.sound(7, seed)
    mine = tiny.transcribe(samples, condition_on_previous_text=conditioned, **ASKED)
    model = tiny.hearing.model
    expected = against.theirs(
        model,
        samples,
        num_beams=4,
        language="en",
        return_timestamps=True,
        condition_on_prev_tokens=conditioned,
    )
    assert len(expected) > 3
    assert against.same(against.ours(mine), expected, tiny.hearing.vocabulary.first_timestamp_id)


def test_beams_differ_from_greedy_and_say_more_probable_texts(tiny):
    greedy = {name: value for name, value in ASKED.items() if name != "beam_size"}
    pairs = [
        (tiny.transcribe(samples, **ASKED), tiny.transcribe(samples, **greedy))
        for samples in WINDOWS
    ]
    assert any(beams.text != one.text for beams, one in pairs)
    for beams, one in pairs:
        assert beams.segments[0].no_speech_prob == pytest.approx(one.segments[0].no_speech_prob)
        assert beams.segments[0].avg_logprob > one.segments[0].avg_logprob - 0.05


def test_one_beams_log_probabilities_are_greedys(tiny, monkeypatch):
    """Those of the law of what is allowed: without that a banned token's share would be missing."""
    greedy = {name: value for name, value in ASKED.items() if name != "beam_size"}
    whole = tiny.transcribe(WINDOWS[0], **greedy).segments[0]
    monkeypatch.setattr(
        "outrider.speech.window_decoder.searched",
        lambda engine, requests, beams, pace: searched(engine, requests, Beams(1), pace),
    )
    one = tiny.transcribe(WINDOWS[0], **ASKED).segments[0]
    assert one.tokens == whole.tokens
    assert one.avg_logprob == pytest.approx(whole.avg_logprob, abs=1e-4)


def test_what_drafts_leaves_the_text(tiny):
    slow = tiny.transcribe(WINDOWS[1], **ASKED)
    copied = tiny.using(ReferenceLookup(4)).transcribe(WINDOWS[1], reference=slow.text, **ASKED)
    drafted = tiny.using(DraftModel(tiny.engine.target, (1, 1, 1))).transcribe(WINDOWS[1], **ASKED)
    for fast in (copied, drafted):
        assert [one.tokens for one in fast.segments] == [one.tokens for one in slow.segments]


def test_a_text_that_will_not_do_falls_back_to_drawing(tiny):
    hard = {**ASKED, "temperature": (0.0, 0.5), "logprob_threshold": 10.0, "best_of": 2}
    found = tiny.transcribe(WINDOWS[0], no_speech_threshold=None, **hard)
    assert found.stats.attempts == 3
    assert {one.temperature for one in found.segments} == {0.5}


def test_patience_and_words(tiny):
    found = tiny.transcribe(WINDOWS[0], patience=1.0, timestamps="word", **ASKED)
    assert found.segments[0].words
    assert found.settings["patience"] == 1.0


def test_a_drafter_without_use_is_refused_before_anything_is_heard(tiny):
    growing = tiny.using(Beam(tiny.engine.target, 2, 2))
    with pytest.raises(ConfigurationError, match="'beam'; use the drafter 'draft_model'"):
        growing.transcribe_stream(WINDOWS[0], **ASKED)
