"""A distilled Whisper drafts for the one that it was distilled from: one encoder runs for both."""

import numpy as np
import pytest
import whispers

import outrider
from outrider.models.bart import BartReader
from outrider.models.seq2seq.reader import EncoderReader

HOW = {"language": "en", "temperature": 0.0, "max_new_tokens": 12}


def loaded(teacher, **more):
    plain = {"dtype": "float32", "threads": 1, "pack_weights": False, "device": "cpu"}
    return outrider.load(teacher, tokenizer=whispers.tokenizer(), **plain, **more)


@pytest.fixture
def read(monkeypatch):
    """The windows that an encoder has read, whosever it is."""
    calls = []
    for reader in (BartReader, EncoderReader):
        right = reader.encode

        def encode(self, inputs, right=right):
            calls.append(len(inputs.mask_BS))
            return right(self, inputs)

        monkeypatch.setattr(reader, "encode", encode)
    return calls


@pytest.mark.parametrize(
    ("same", "other", "whose", "encoders"),
    [
        (True, {}, "the target's", 1),  # as Distil-Whisper is made
        (False, {}, "its own", 2),  # an encoder that was trained on
        (False, {"mels": 16}, "its own", 2),  # other features, as large-v3 and turbo for large-v2
    ],
)
def test_an_equal_encoder_reads_a_window_once(read, same, other, whose, encoders):
    teacher, student = whispers.whisper(), whispers.whisper(seed=1, layers=1, **other)
    if same:
        student.get_encoder().load_state_dict(teacher.get_encoder().state_dict())
    noise = np.random.default_rng(3).uniform(-0.5, 0.5, 48_000).astype(np.float32)
    right = loaded(whispers.whisper(), drafter="none").transcribe(noise, **HOW)
    pair = loaded(teacher, draft=student, num_speculative_tokens=3)
    assert pair.notes.encoder == whose
    read.clear()
    heard = pair.transcribe(noise, **HOW)
    assert [one.tokens for one in heard.segments] == [one.tokens for one in right.segments]
    assert heard.text == right.text
    assert heard.stats.windows == right.stats.windows
    assert sum(read) == encoders * heard.stats.windows
