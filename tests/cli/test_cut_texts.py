"""A text that ends where the model's context does is no whole one, and commands say so."""

import builtins
import sys

import pytest

from outrider import cli


@pytest.fixture
def full(shipped, monkeypatch):
    """A prompt of three tokens less than the shipped target reads, and how many those are."""
    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
    room, text = shipped.engine.target.context, "x = 1\n" * 200
    while len(shipped.tokenizer(text)["input_ids"]) > room - 4:
        text = text[6:]
    return text, room


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["outrider", *words])
    cli.main()


@pytest.mark.parametrize("most", [None, 2])
def test_an_answer_that_the_context_cuts_says_so(shipped, full, monkeypatch, capsys, most):
    """One that is as long as was asked for does not."""
    text, room = full
    left = iter([text])
    monkeypatch.setattr(builtins, "input", lambda prompt="": next(left, None) or _end())
    monkeypatch.setattr(shipped.tokenizer, "chat_template", "{{ messages[-1].content }}")
    run(monkeypatch, "chat", "--seed", "1", *(() if most is None else ("-n", str(most))))
    said = f"(cut: the model's context of {room} tokens is full; /new forgets the talk)"
    assert (said in capsys.readouterr().out) == (most is None)


@pytest.mark.parametrize("most", ["128", "2"])
def test_a_text_that_the_context_cuts_says_so(full, monkeypatch, capsys, most):
    text, room = full
    run(monkeypatch, "generate", text, "-n", most, "-t", "0")
    said = f"the text ends where the model's context of {room} tokens does\n"
    assert capsys.readouterr().err == (said if most == "128" else "")


def _end():
    raise EOFError
