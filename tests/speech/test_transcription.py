"""One text whatever drafts and whoever is beside; sound encoded once; fallback; what fails."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import whispers
from test_audio import written as wav

import outrider
from outrider import AudioError, ConfigurationError, DraftModel, PromptLookup
from outrider.drafters import ReferenceLookup, SampledTree
from outrider.models import TreeDecoder
from outrider.models.cpu_kernels import build, int16_attention
from outrider.speech.window_decoder import WindowDecoder

GREEDY = {"temperature": 0, "language": "en", "max_new_tokens": 12}


def outline(transcript):
    """What must not change."""
    return [
        (s.start, s.end, s.tokens, [(word.word, word.start, word.end) for word in s.words or ()])
        for s in transcript.segments
    ]


@pytest.fixture
def encoded(tiny, monkeypatch):
    """How many windows the encoder has read."""
    counts = []
    reader = tiny.engine.target.runner.reader
    before = reader.encode

    def counted(inputs):
        counts.append(inputs.features.shape[0])
        return before(inputs)

    monkeypatch.setattr(reader, "encode", counted)
    return counts


def test_every_drafter_writes_the_plain_text(tiny):
    samples = whispers.sound(5)
    plain = tiny.transcribe(samples, **GREEDY)
    other = whispers.whisper(seed=1, layers=1)
    small = TreeDecoder(type(tiny.engine.target.runner)(other, False))
    drafters = [PromptLookup(3), DraftModel(small, (1, 1, 1)), SampledTree(small, (2, 1))]
    for drafter in drafters:
        mine = tiny.using(drafter).transcribe(samples, **GREEDY)
        assert outline(mine) == outline(plain)
    assert outline(tiny.transcribe(whispers.sound(5, 1), **GREEDY)) != outline(plain)


@pytest.mark.skipif(build.unbuilt() is not None, reason=str(build.unbuilt()))
def test_in_8_bits_the_encoder_rounds_and_a_draft_changes_no_text():
    sounds = [whispers.sound(seconds, seed) for seed, seconds in enumerate((1.5, 3.4))]
    plain = whispers.loaded(dtype="int8")
    expected = [outline(one) for one in plain.transcribe(sounds, **GREEDY)]
    more = {"num_speculative_tokens": 3, "planner": "fixed"}
    drafted = whispers.loaded(dtype="int8", drafter=None, draft_layers=(0,), **more)
    found = drafted.transcribe(sounds, **GREEDY)
    assert [outline(one) for one in found] == expected
    assert sum(one.stats.decoded.drafted for one in found) > 0
    encoder = plain.engine.target.runner.reader._encoder
    assert encoder.layers.in_int16 == (int16_attention.unfit(16) is None)
    assert not whispers.loaded(dtype="int4").engine.target.runner.reader._encoder.layers.in_int16


def test_a_reference_is_copied_window_by_window(tiny):
    samples = whispers.sound(5)
    plain = tiny.transcribe(samples, **GREEDY)
    mine = tiny.transcribe(samples, reference=plain, **GREEDY)
    assert outline(mine) == outline(plain)
    other = tiny.transcribe(samples, reference="qqqqqqqq", **GREEDY)
    assert outline(other) == outline(plain)
    assert mine.stats.decoded.drafted > 0
    assert plain.stats.decoded.drafted == 0
    assert mine.settings["reference"] is True


def test_recordings_side_by_side_are_the_recordings_alone(tiny):
    several = [whispers.sound(seconds, seed) for seed, seconds in enumerate((5, 1.1, 3.3, 7))]
    drawn = GREEDY | {"temperature": (0, 0.7), "logprob_threshold": 0.0, "best_of": 2}
    for asked in (GREEDY, GREEDY | {"timestamps": "word"}, drawn):
        together = tiny.transcribe(several, **asked)
        alone = [tiny.transcribe(samples, **asked) for samples in several]
        assert [outline(one) for one in together] == [outline(one) for one in alone]
    assert outline(together[0]) != outline(together[3])
    assert any(segment.temperature == 0.7 for segment in together[0].segments)
    other = tiny.transcribe(several, **drawn | {"seed": 1})
    assert [outline(one) for one in other] != [outline(one) for one in together]


def test_windows_between_pauses_do_not_depend_on_how_many_run_at_once(tiny):
    samples = whispers.sound(9)
    two, many = (tiny.transcribe(samples, batch_size=n, **GREEDY) for n in (2, 7))
    assert outline(two) == outline(many)
    assert two.settings["windows"] == "pauses"
    assert two.settings["condition_on_previous_text"] is False
    assert two.stats.windows >= 5
    order = [segment.window for segment in many.segments]
    assert order == sorted(order)  # told in order
    plain = tiny.transcribe(samples, timestamps=False, **GREEDY)  # longer than a window
    assert plain.settings["windows"] == "pauses"
    spans = tiny.transcribe(samples, vad=[(1.0, 2.0), (6.5, 8.0)], **GREEDY)
    assert spans.stats.windows == 2
    assert spans.segments[0].start >= 1.0


def test_every_window_is_encoded_once(tiny, encoded):
    """With detection, no-speech, every temperature, copies of each, and word times."""
    asked = {
        "logprob_threshold": 0.0,
        "no_speech_threshold": 0.999,
        "temperature": (0.0, 0.5, 1.0),
        "best_of": 2,
        "word_timestamps": True,
        "max_new_tokens": 10,
    }
    result = tiny.transcribe([whispers.sound(4), whispers.sound(1, 1)], **asked)
    windows = sum(one.stats.windows for one in result)
    assert windows > 3
    assert sum(encoded) == windows
    assert [one.stats.attempts for one in result] == [5 * one.stats.windows for one in result]
    assert all(segment.temperature == 1.0 for segment in result[0].segments)


def test_fallback_stops_at_the_first_text_that_will_do(tiny):
    samples = whispers.sound(1.5)
    plain = tiny.transcribe(samples, **GREEDY)
    asked = GREEDY | {"temperature": (0.0, 1.0)}
    one = tiny.transcribe(samples, **asked | {"logprob_threshold": -1e9})
    assert outline(one) == outline(plain)
    assert one.stats.attempts == one.stats.windows
    two = tiny.transcribe(samples, **asked | {"logprob_threshold": 0.0})
    assert two.stats.attempts == 2 * two.stats.windows
    assert two.segments[0].temperature == 1.0


def test_silence_is_left_out(tiny):
    samples = whispers.sound(3)
    asked = GREEDY | {"logprob_threshold": None, "no_speech_threshold": 0.0}
    silent = tiny.transcribe(samples, **asked)
    assert silent.text == ""
    assert silent.stats.silent == silent.stats.windows == 2
    assert tiny.transcribe(samples, **asked | {"no_speech_threshold": 1.0}).text


def test_mean_log_probabilities_are_at_temperature_one(tiny):
    """The law that a text was drawn from has its temperature; the threshold does not."""
    samples = whispers.sound(1.5)
    drawn = tiny.transcribe(
        samples, **GREEDY | {"temperature": 0.3, "timestamps": False, "max_new_tokens": 8}
    )
    segment, words = drawn.segments[0], tiny.hearing.vocabulary
    made = whispers.extractor()(samples, sampling_rate=16000, return_tensors="pt")
    head = [
        words.start_id,
        words.languages["en"],
        words.tasks["transcribe"],
        words.no_timestamps_id,
    ]
    ids = torch.tensor([[*head, *segment.tokens]])
    with torch.no_grad():
        logits = tiny.hearing.model(**made, decoder_input_ids=ids).logits[0, len(head) - 1 :]
    logits[:, list(words.suppress)] = -torch.inf
    logits[0, list(words.begin_suppress)] = -torch.inf
    logs = logits.log_softmax(-1)[range(len(segment.tokens)), list(segment.tokens)]
    assert segment.avg_logprob == pytest.approx(float(logs.sum()) / (len(logs) + 1), rel=1e-3)


def test_segments_come_as_they_are_heard(tiny):
    samples = whispers.sound(7)
    running = tiny.transcribe_stream(samples, **GREEDY)
    first = next(running)
    assert first.start < 2.0
    assert not running.done
    assert running.transcripts == [None]
    rest = list(running)
    assert (first, *rest) == running.transcripts[0].segments
    assert running.heard(0) == pytest.approx(7)


def test_a_recording_that_fails_does_not_stop_the_others(tiny, monkeypatch):
    several = [whispers.sound(3), np.full(16000, np.nan, np.float32), whispers.sound(2, 1)]
    running = tiny.transcribe_stream(several, **GREEDY).drain()
    assert list(running.errors) == [1]
    assert "recording 1 must have finite samples" in str(running.errors[1])
    assert outline(running.transcripts[2]) == outline(tiny.transcribe(several[2], **GREEDY))
    with pytest.raises(AudioError, match="recording 1"):
        tiny.transcribe(several, **GREEDY)

    before = WindowDecoder.step  # a window's text that fails on the way

    def failing(self):
        over = before(self)
        for job in over:
            if job.seed == 65536 and not job.reference:
                job.error = outrider.NumericalError("NaN")
                break
        return over

    monkeypatch.setattr(WindowDecoder, "step", failing)
    running = tiny.transcribe_stream([several[0], several[2]], **GREEDY).drain()
    assert len(running.errors) == 1
    assert sum(one is not None for one in running.transcripts) == 1


def test_what_is_no_speech_model_says_so(shipped):
    with pytest.raises(ConfigurationError, match=r"does not turn speech into text.*Whisper"):
        shipped.transcribe("talk.wav")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"language": "klingon"}, "unknown language of this model 'klingon'"),
        ({"task": "sing"}, "unknown task"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": ()}, "temperature must be"),
        ({"beam_size": 0}, "beam_size must be"),
        ({"beam_size": 5, "temperature": 0.4}, "beams are searched at temperature 0"),
        ({"beam_size": 5, "patience": 0}, "patience must be"),
        ({"patience": 1.0}, "say beam_size=5"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"timestamps": "phone"}, "unknown timestamps"),
        ({"timestamps": "none", "word_timestamps": True}, "contradicts"),
        ({"batch_size": 2, "condition_on_previous_text": True}, "side by side"),
        ({"vad": [(3, 1)]}, "vad must be"),
        ({"reference": ["a", "b"]}, "one for each recording"),
        ({"suppress_tokens": "a,b"}, "suppress_tokens must be"),
        ({"suppress_tokens": [10**6]}, "outside the vocabulary"),
        ({"logprob_threshold": "low"}, "logprob_threshold must be"),
        ({"sampling_rate": 0}, "sampling_rate must be"),
        ({"initial_prompt": 5}, "initial_prompt must be"),
        ({"max_new_tokens": 1000}, None),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(tiny, asked, message):
    samples = whispers.sound(0.5)
    if message is None:  # the decoder's context ends it
        assert tiny.transcribe(samples, **{"temperature": 0} | asked).text
        return
    with pytest.raises(ConfigurationError, match=message):
        tiny.transcribe(samples, **asked)


def test_an_english_model_refuses_languages_and_translation(english):
    samples = whispers.sound(0.5)
    for asked in ({"language": "fr"}, {"task": "translate"}):
        with pytest.raises(ConfigurationError, match="knows English alone"):
            english.transcribe(samples, **asked)
    assert english.transcribe(samples, language="en", max_new_tokens=3).language is None


def test_files_and_rates_are_one_recording(tiny, tmp_path):
    samples = whispers.sound(1.5)
    path = wav(tmp_path / "talk.wav", samples)
    quiet = np.round(samples * 32767).astype(np.int16)
    for given in (path, str(path), quiet, {"array": quiet, "sampling_rate": 16000}):
        assert tiny.transcribe(given, **GREEDY).text == tiny.transcribe(samples, **GREEDY).text
    assert tiny.transcribe(path, **GREEDY).name == str(path)
    half = wav(tmp_path / "half.wav", samples[::2], 8000)
    assert tiny.transcribe(half, **GREEDY).duration == pytest.approx(1.5)
    with pytest.raises(AudioError, match="no such file"):
        tiny.transcribe([path, tmp_path / "missing.wav"], **GREEDY)


def test_a_draft_with_another_encoder_reads_its_own_features(tiny):
    """Other mel channels: its frames come from the same samples."""
    model = whispers.whisper(seed=2, layers=1, mels=40)
    mine = whispers.loaded(draft=model, drafter="draft_model", num_speculative_tokens=2)
    assert mine.hearing.draft_extractor.feature_size == 40
    samples = whispers.sound(3)
    assert outline(mine.transcribe(samples, **GREEDY)) == outline(
        tiny.transcribe(samples, **GREEDY)
    )


def test_hearing_goes_on_with_another_drafter(tiny):
    assert tiny.using(ReferenceLookup(2)).hearing is tiny.hearing
    assert replace(tiny.hearing, name="x").vocabulary == tiny.hearing.vocabulary


def test_a_tokenizer_without_timestamps_will_do():
    """Those of Whisper's first English checkpoints end at the special tokens."""
    talk = whispers.sound(3, 1)
    old, new = (whispers.loaded(english=True, timed=timed) for timed in (False, True))
    assert old.engine.target.vocab_size == new.engine.target.vocab_size
    mine, usual = (one.transcribe(talk, temperature=0) for one in (old, new))
    assert [(s.start, s.tokens) for s in mine.segments] == [
        (s.start, s.tokens) for s in usual.segments
    ]
    assert len(old.tokenizer) < old.engine.target.vocab_size
