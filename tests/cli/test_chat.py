"""`outrider chat`: a conversation by standard input, with a tiny instruct model."""

import builtins
import sys

import pytest

from outrider import cli
from outrider.cli import chat


@pytest.fixture
def typed(monkeypatch):
    """What the user types, line by line; then the input ends."""

    def lines(*texts):
        left = iter(texts)

        def read(prompt=""):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)

    return lines


def test_several_lines_are_one_message(typed):
    typed("one \\", "two", '"""three', "four", 'five"""', '"""', "six", '"""', "seven")
    assert [chat.listen("") for _ in range(4)] == ["one \ntwo", "three\nfour\nfive", "six", "seven"]
    with pytest.raises(EOFError):
        chat.listen("")


def test_a_message_that_does_not_fit_leaves_the_talk_as_it_was(shipped, typed, monkeypatch, capsys):
    told = []
    right = shipped.stream

    def stream(prompts, *rest, **more):
        told.append([turn["role"] for turn in prompts[0]])
        return right(prompts, *rest, **more)

    words = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", words)
    monkeypatch.setattr(shipped, "stream", stream)
    monkeypatch.setattr("outrider.cli.options.load", lambda *_, **__: shipped)
    monkeypatch.setattr(sys, "argv", ["outrider", "chat", "--max-new-tokens", "4"])
    typed("x = 1", "y = 1\n" * 1000, "z = 2")
    cli.main()
    assert told == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user"]]
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.endswith("/new forgets the conversation\n")
    assert err.count("\n") == 1
    assert out
