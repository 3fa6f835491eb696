"""Whisper's own `generate` with beams, against itself: windows, thresholds, fallback, words."""

import pytest
import torch
import transformers
from spoken_whisper import features, perturbed, whisper
from test_generate_whisper import LONG, SHORT, THRESHOLDS, WAYS, both, same

from outrider.integrations import beam_generate
from outrider.integrations.generate import SpeculativeGenerate

BEAMS = {"num_beams": 4}
DRAFTING = {
    "root": {"drafter": "none"},
    "draft": {"num_speculative_tokens": 3},
    "lookup": {"drafter": "prompt_lookup", "ngram": (1, 2)},
}


@pytest.fixture(autouse=True)
def quiet():
    """transformers has advice for some of these calls."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def with_beams(name, recordings=2):
    seconds, how = WAYS[name]
    return seconds[:recordings], how | BEAMS


#: What is asked for, and what is scored ahead; each way once unless slow tests are run, too.
DRAFTED = {"timestamps": "draft", "thresholds": "draft", "words": "draft", "dictionary": "lookup"}
ONCE = [(way, DRAFTED.get(way, "root")) for way in WAYS if way != "sequences"]
AGAIN = [*((way, "root") for way in DRAFTED), ("long words", "lookup")]
slow = pytest.mark.slow


@pytest.mark.one_in(12)
@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of lengths that differ
@pytest.mark.parametrize(
    ("way", "drafting"), [*ONCE, *(pytest.param(*case, marks=slow) for case in AGAIN)]
)
def test_one_recording_is_equal_to_plain_generate_in_everything(way, drafting):
    """Sequences, scores, beam indices, segments, times of words."""
    model = whisper(attention="eager" if "words" in way else "sdpa")
    settings = DRAFTING[drafting]
    if "drafter" not in settings:
        settings = settings | {"draft_model": perturbed(model)}
    plain, fast, call = both(model, with_beams(way, 1), **settings)
    same(told(fast), told(plain))
    assert call.total.new_tokens > 20
    greedy, _, _ = both(model, (WAYS[way][0][:1], WAYS[way][1]), drafter="none")
    assert not torch.equal(texts(plain), texts(greedy))  # or beams would not matter


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize(
    "way",
    [
        "short",
        "conditioned",
        *(pytest.param(way, marks=slow) for way in ("timestamps", "long", "prompted")),
    ],
)
def test_recordings_side_by_side(way):
    model = whisper()
    plain, fast, _ = both(model, with_beams(way), draft_model=perturbed(model))
    same(texts(fast), texts(plain))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "seconds", [SHORT, *(pytest.param(one, marks=slow) for one in ((1.0,), LONG))]
)
def test_thresholds_and_fallback(seconds):
    """What will not do is drawn anew; the hotter temperature is as good as greedy."""
    model = whisper()
    how = {**THRESHOLDS, "temperature": (0.0, 1e-3), "logprob_threshold": -1.2, **BEAMS}
    plain, fast, _ = both(model, (seconds, how), drafter="none")
    same(texts(fast), texts(plain))
    never = {**how, "logprob_threshold": None, "compression_ratio_threshold": None}
    never["no_speech_threshold"] = None
    other, _, _ = both(model, (seconds, never), drafter="none")
    assert not torch.equal(texts(other), texts(plain))


def test_silence_of_an_english_model_is_told_for_every_beam():
    model = whisper(seed=1)
    model.generation_config.is_multilingual = False
    frames, mask = features(LONG)
    how = {"attention_mask": mask, **THRESHOLDS, **BEAMS}
    try:
        plain = model.generate(frames, **how)
        fast = model.generate(frames, custom_generate=SpeculativeGenerate(drafter="none"), **how)
    finally:
        model.generation_config.is_multilingual = True
    same(fast["sequences"], plain["sequences"])


def test_attention_in_another_beams_row_gives_other_times(monkeypatch):
    model = whisper(attention="eager")
    right = beam_generate.spread_attention
    monkeypatch.setattr(
        beam_generate, "spread_attention", lambda a, at, rows: right(a, at * 0, rows)
    )
    plain, wrong, _ = both(model, with_beams("words", 1), drafter="none")
    same(texts(wrong), texts(plain))
    with pytest.raises(AssertionError):
        same(wrong["token_timestamps"], plain["token_timestamps"])


def told(result):
    """A result without attention: of that, only what makes word times is the same."""
    if isinstance(result, dict):
        return {name: told(one) for name, one in result.items() if "attention" not in name}
    return [told(one) for one in result] if isinstance(result, list) else result


def texts(result):
    """The sequences of a result of either kind."""
    return result if isinstance(result, torch.Tensor) else result["sequences"]
