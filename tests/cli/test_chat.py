"""`outrider chat`: a conversation by standard input, with a tiny instruct model."""

import builtins

import pytest

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
