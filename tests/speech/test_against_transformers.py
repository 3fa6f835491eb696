"""Transcripts of a tiny Whisper are transformers', token for token: short, long, conditioned."""

import pytest
import torch
import whispers

BUDGET = 20


def theirs(model, samples, **asked):
    """The segments of transformers' generate: (start, end, tokens)."""
    made = whispers.extractor()(
        samples,
        sampling_rate=16000,
        return_tensors="pt",
        truncation=False,
        padding="longest",
        return_attention_mask=True,
    )
    out = model.generate(
        **made, return_segments=True, max_new_tokens=BUDGET, max_length=None, **asked
    )
    return [
        (round(float(s["start"]), 2), round(float(s["end"]), 2), s["tokens"].tolist())
        for s in out["segments"][0]
    ]


def ours(transcript):
    return [(round(s.start, 2), round(s.end, 2), list(s.tokens)) for s in transcript.segments]


def same(mine, other, first):
    """Equal, but for the second timestamp that transformers leaves at a window's last piece."""
    if len(mine) != len(other):
        return False
    for (start, end, tokens), (a, b, ids) in zip(mine, other, strict=True):
        if len(ids) == len(tokens) + 1 and ids[-1] >= first and ids[-2] >= first:
            ids = ids[:-1]
        if (start, end, tokens) != (a, b, ids):
            return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_recording_is_transformers(tiny, conditioned, seed):
    samples = whispers.sound(7, seed)
    mine = tiny.transcribe(
        samples,
        temperature=0,
        language="fr",
        max_new_tokens=BUDGET,
        condition_on_previous_text=conditioned,
    )
    model = tiny.hearing.model
    asked = {"return_timestamps": True, "language": "fr", "temperature": 0.0}
    other = theirs(model, samples, condition_on_prev_tokens=conditioned, **asked)
    first = tiny.hearing.vocabulary.first_timestamp_id
    assert mine.stats.windows > 3
    assert same(ours(mine), other, first)
    wrong = theirs(model, samples, condition_on_prev_tokens=not conditioned, **asked)
    assert not same(ours(mine), wrong, first)  # the history matters


@pytest.mark.filterwarnings("ignore")
def test_a_short_recording_without_timestamps_is_transformers(tiny):
    samples = whispers.sound(1.3)
    mine = tiny.transcribe(samples, temperature=0, timestamps=False, max_new_tokens=BUDGET)
    made = whispers.extractor()(samples, sampling_rate=16000, return_tensors="pt")
    model = tiny.hearing.model
    out = model.generate(**made, max_new_tokens=BUDGET, max_length=None)
    end = tiny.hearing.vocabulary.end_id
    prompt, expected = out[0][:4].tolist(), [t for t in out[0][4:].tolist() if t != end]
    assert prompt[1] == tiny.hearing.vocabulary.languages[mine.language]  # detected alike
    assert list(mine.segments[0].tokens) == expected
    assert mine.segments[0].end == pytest.approx(1.3)
    other = tiny.transcribe(
        whispers.sound(1.3, 5), temperature=0, timestamps=False, max_new_tokens=BUDGET
    )
    assert list(other.segments[0].tokens) != expected  # it listens


@pytest.mark.filterwarnings("ignore")
def test_an_english_model_takes_neither_language_nor_task(english):
    samples = whispers.sound(5, 3)
    mine = english.transcribe(samples, temperature=0, max_new_tokens=BUDGET)
    asked = {"return_timestamps": True, "temperature": 0.0, "condition_on_prev_tokens": True}
    other = theirs(english.hearing.model, samples, **asked)
    assert mine.language is None
    assert same(ours(mine), other, english.hearing.vocabulary.first_timestamp_id)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seconds", [1.5, 5])
def test_word_times_are_transformers_token_times(tiny, seconds):
    samples = whispers.sound(seconds, 2)
    mine = tiny.transcribe(
        samples, temperature=0, language="en", word_timestamps=True, max_new_tokens=BUDGET
    )
    made = whispers.extractor()(
        samples,
        sampling_rate=16000,
        return_tensors="pt",
        truncation=False,
        padding="longest" if seconds > 2 else "max_length",
        return_attention_mask=True,
    )
    out = tiny.hearing.model.generate(
        **made,
        language="en",
        return_timestamps=True,
        return_token_timestamps=True,
        return_segments=True,
        max_new_tokens=BUDGET,
        max_length=None,
        temperature=0.0,
        condition_on_prev_tokens=True,
    )
    compared = 0
    for segment, other in zip(mine.segments, out["segments"][0], strict=False):
        if other["tokens"].tolist()[: len(segment.tokens)] != list(segment.tokens):
            break  # transformers reads on behind the end of a short recording
        times = other["token_timestamps"].tolist()
        text = [at for at, t in enumerate(segment.tokens) if t < tiny.hearing.vocabulary.end_id]
        said = "".join(word.word for word in segment.words)
        assert said == segment.text
        assert segment.words[-1].end == pytest.approx(times[text[-1]], abs=0.011)
        if text[0] > 0:
            assert segment.words[0].start == pytest.approx(times[text[0] - 1], abs=0.011)
        compared += 1
    assert compared >= (1 if seconds < 2 else 4)


def test_no_speech_is_the_chance_at_the_start_token(tiny):
    """Read with the prompt's own call; compared with the model's own forward."""
    samples = whispers.sound(1.0, 4)
    mine = tiny.transcribe(
        samples, temperature=0, language="de", initial_prompt="abc", max_new_tokens=4
    )
    model, words = tiny.hearing.model, tiny.hearing.vocabulary
    made = whispers.extractor()(samples, sampling_rate=16000, return_tensors="pt")
    ids = [words.previous_id, *tiny.hearing.encode(" abc"), words.start_id]
    with torch.no_grad():
        logits = model(**made, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
    expected = float(logits.softmax(-1)[words.no_speech_id])
    assert mine.segments[0].no_speech_prob == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        alone = model(**made, decoder_input_ids=torch.tensor([ids[-1:]])).logits[0, -1]
    assert expected != pytest.approx(float(alone.softmax(-1)[words.no_speech_id]), rel=1e-2)
