"""What is read to train on, and what is refused."""

import json

import pytest

from outrider import Engine, Root
from outrider.errors import ConfigurationError
from outrider.models import adapt
from outrider.testing import llama
from outrider.text.speculator import Speculator
from outrider.train.features import TrainText
from outrider.train.job import answered
from outrider.train.task import Task
from outrider.train.texts import TextPiece, read, split, tokenized


class Letters:
    """One token a letter."""

    def __call__(self, text):
        return {"input_ids": [ord(letter) % 64 for letter in text]}

    def decode(self, token_ids, **settings):
        return "".join(chr(64 + token) for token in token_ids)

    def get_vocab(self):
        return {chr(64 + token): token for token in range(64)}


def test_texts_prompts_and_answers_are_read(tmp_path):
    (tmp_path / "plain.txt").write_text("one text\nof two lines")
    rows = [{"text": "a"}, {"prompt": "ask", "text": "answer", "held_out": True}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert read([tmp_path], ("text",)) == [
        TextPiece("", "one text\nof two lines"),
        TextPiece("", "a"),
        TextPiece("ask", "answer", True),
    ]
    assert read([tmp_path / "plain.txt"], ("prompt",)) == [
        TextPiece("one text", ""),
        TextPiece("of two lines", ""),
    ]


def test_only_what_follows_a_prompt_is_learnt_and_long_texts_are_cut():
    (pair,) = tokenized([TextPiece("12345", "x" * 20)], Letters())
    assert (len(pair[0].tokens), pair[0].start) == (25, 5)
    lengths = [len(text.tokens) for text, _ in tokenized([TextPiece("", "x" * 600)], Letters())]
    assert lengths == [256, 256, 88]


def test_held_out_texts_are_those_that_say_so_or_every_twentieth():
    texts = [(TrainText((n,) * 60), None) for n in range(40)]
    learnt, held = split(texts)
    assert [text.tokens[0] for text in held] == [10, 30]
    assert len(learnt) == 38
    learnt, held = split([(text, text.tokens[0] < 3) for text, _ in texts])
    assert [text.tokens[0] for text in held] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.txt", None, "cannot read training text"),
        ("latin.txt", b"caf\xe9", "cannot read training text"),
        ("empty.txt", b" \n", "has no text"),
        ("rows.jsonl", b'{"text": 3}', "line 1 of"),
        ("rows.jsonl", b'{"words": "x"}', "line 1 of"),
        ("rows.jsonl", b'{"text": "x"}\nx', "line 2 of"),
        ("rows.jsonl", b"[1, 2]", "line 1 of"),
        ("folder", None, "cannot read training text"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(name, content, said, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        read([path], ("text",))


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no training text"):
        read([tmp_path], ("text",))


def test_too_little_text_is_refused():
    with pytest.raises(ConfigurationError, match="too little text"):
        split([(TrainText((1,) * 30), None)] * 30)
    with pytest.raises(ConfigurationError, match="too little text"):
        split([(TrainText((1,) * 4000), None)])


def test_a_task_without_texts_or_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing to train on"):
        Task("target", tmp_path)
    with pytest.raises(ConfigurationError, match="kind must be one of head, layers"):
        Task("target", tmp_path, (tmp_path,), kind="tree")


def test_answers_are_written_as_they_come_and_gone_on_with(tmp_path):
    model = llama(vocab_size=64)
    speculator = Speculator(Engine(adapt(model, packed=False), Root()), Letters())
    prompts = [TextPiece(f"def f{n}(x):", "", n == 2) for n in range(3)]
    path = tmp_path / "answers.jsonl"
    whole = answered(speculator, prompts, path, tokens=12, rows=2)
    assert [held for _, held in whole] == [False, False, True]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:10])  # interrupted while it was writing
    assert answered(speculator, prompts, path, tokens=12, rows=1) == whole
    assert path.read_text() == "".join(lines)
