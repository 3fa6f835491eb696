"""Transcripts of a tiny Whisper are transformers', token for token: short, long, conditioned."""

import pytest
import torch
import whispers
from transformers.utils import ModelOutput

from outrider.speech import word_timestamps

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
    known = tiny.hearing.vocabulary
    banned = [*known.suppress, *range(known.first_timestamp_id, len(tiny.tokenizer))]
    asked = {"temperature": 0, "timestamps": False, "max_new_tokens": BUDGET}
    mine = tiny.transcribe(samples, suppress_tokens=banned, **asked)
    made = whispers.extractor()(samples, sampling_rate=16000, return_tensors="pt")
    model = tiny.hearing.model
    assert model.detect_language(**made).tolist() == [known.languages[mine.language]]
    out = model.generate(
        **made, language=mine.language, suppress_tokens=banned, max_new_tokens=BUDGET
    )
    expected = [token for token in out[0].tolist()[-BUDGET:] if token != known.end_id]
    assert list(mine.segments[0].tokens) == expected
    assert mine.segments[0].end == pytest.approx(1.3)
    other = tiny.transcribe(samples, **asked)
    assert list(other.segments[0].tokens) != expected  # what must not come matters


@pytest.mark.filterwarnings("ignore")
def test_an_english_model_takes_neither_language_nor_task(english):
    samples = whispers.sound(5, 3)
    mine = english.transcribe(samples, temperature=0, max_new_tokens=BUDGET)
    asked = {"return_timestamps": True, "temperature": 0.0, "condition_on_prev_tokens": True}
    other = theirs(english.hearing.model, samples, **asked)
    assert mine.language is None
    assert same(ours(mine), other, english.hearing.vocabulary.first_timestamp_id)


@torch.no_grad()
def their_times(ear, heard, prompt):
    """transformers' times of a window's tokens, from its own attention: one eager pass."""
    model, window = ear.model, heard.window
    ids = torch.tensor([[*prompt, *heard.text.tokens]])
    kernel = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        seen = model(
            input_features=window.features_FS[None], decoder_input_ids=ids, output_attentions=True
        ).cross_attentions
    finally:
        model.set_attn_implementation(kernel)
    made = ModelOutput(cross_attentions=[seen], sequences=ids)
    heads = ear.vocabulary.alignment_heads
    asked = {"num_frames": window.count, "num_input_ids": len(prompt)}
    times = model._extract_token_timestamps(made, heads, **asked)[0]
    start = ear.seconds(window.first)
    return [start, *(start + time for time in times[len(prompt) : -1].tolist())]


@pytest.mark.parametrize("seconds", [5, 7])
def test_word_times_are_transformers_token_times(tiny, monkeypatch, seconds):
    """The same text in, the same times out: a token's end is what its own query looks at."""
    windows, before = [], word_timestamps.of_window
    monkeypatch.setattr(
        word_timestamps,
        "of_window",
        lambda ear, heard, prompt, language: (
            windows.append((heard, prompt)) or before(ear, heard, prompt, language)
        ),
    )
    mine = tiny.transcribe(
        whispers.sound(seconds, 2),
        temperature=0,
        language="en",
        word_timestamps=True,
        max_new_tokens=BUDGET,
    )
    ear, pieces, different = tiny.hearing, iter(mine.segments), set()
    for heard, prompt in windows:
        times = their_times(ear, heard, prompt)
        for piece in heard.pieces:
            segment = next(pieces)
            places = [
                at
                for at in range(piece.first, piece.last)
                if heard.text.tokens[at] < ear.vocabulary.end_id
            ]
            assert "".join(word.word for word in segment.words) == segment.text
            assert segment.words[0].start == pytest.approx(times[places[0]], abs=1e-3)
            assert segment.words[-1].end == pytest.approx(times[places[-1] + 1], abs=1e-3)
            different.add(segment.words[-1].end)
    assert next(pieces, None) is None
    assert len(different) > 2  # the times are no constant


def test_no_speech_is_the_chance_at_the_start_token(tiny):
    """Read with the prompt's own call; compared with the model's own forward."""
    samples = whispers.sound(1.0, 4)
    mine = tiny.transcribe(
        samples, temperature=0, language="de", initial_prompt="abc", max_new_tokens=4
    )
    model, known = tiny.hearing.model, tiny.hearing.vocabulary
    made = whispers.extractor()(samples, sampling_rate=16000, return_tensors="pt")
    ids = [known.previous_id, *tiny.hearing.encode(" abc"), known.start_id]
    with torch.no_grad():
        logits = model(**made, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
    expected = float(logits.softmax(-1)[known.no_speech_id])
    assert mine.segments[0].no_speech_prob == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        alone = model(**made, decoder_input_ids=torch.tensor([ids[-1:]])).logits[0, -1]
    assert expected != pytest.approx(float(alone.softmax(-1)[known.no_speech_id]), rel=1e-2)
