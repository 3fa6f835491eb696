"""benchmarks/captions.py: pictures of lines, a reader in its folder, and a table of drafts."""

import random
import string
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import captions
import text_lines


def test_lines_are_drawn_whole_and_alike_for_a_seed():
    texts, images = text_lines.pictures(40, seed=3)
    again, others = text_lines.pictures(40, seed=3)
    assert texts == again
    assert len(set(texts)) > 30
    assert all(set(text) <= set(text_lines.CHARACTERS) for text in texts)
    assert max(map(len, texts)) < text_lines.LONGEST
    for image, other in zip(images, others, strict=True):
        assert image.size == (text_lines.WIDE, text_lines.HIGH)
        assert image.tobytes() == other.tobytes()
        assert image.getextrema()[0][0] < 120  # ink
    assert text_lines.picture("a", random.Random(0)) != text_lines.picture("b", random.Random(0))


def test_characters_are_tokens():
    words = text_lines.tokenizer()
    ids = text_lines.labels(["a B", "1"])
    assert ids.tolist()[1][2:] == [text_lines.EOS, text_lines.PAD, text_lines.PAD]
    assert words.decode(ids[0], skip_special_tokens=True) == "a B"
    every = "".join(text_lines.CHARACTERS)
    assert words.decode(words(every)["input_ids"], skip_special_tokens=True) == every
    assert set(string.ascii_letters) < set(every)


@pytest.mark.exhaustive
def test_every_draft_writes_what_plain_decoding_does(tmp_path):
    size = text_lines.ReaderSize(width=32, draft_width=16, steps=3, draft_steps=2, batch=4)
    target, draft = text_lines.trained(size, tmp_path)
    assert text_lines.trained(size, tmp_path) == (target, draft)  # trained once
    rows = captions.measured(captions.speculators(target, draft, 3), 3)
    assert [row["arm"] for row in rows] == ["plain", "recall", "suffix", "shallow", "assistant"]
    assert all(row["as plain"] == 3 for row in rows)
    plain, *_, shallow, _ = rows
    assert plain["tokens a call"] == 1
    assert shallow["calls"] < plain["calls"]
