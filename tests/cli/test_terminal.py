"""Control characters of what models wrote are shown on a terminal, and raw in files and pipes."""

import io
import json
import sys

import pytest
from rich.table import Table
from rich.text import Text

from outrider.cli.console import LINE_SECONDS, Terminal, bar, console, piece, printable, put
from outrider.models import budget

EVIL = "a\x1b]52;c;ZXZpbA==\x07b\x1b[2J\x9b31m\rc\x7f\td\n"
SHOWN = "a\\u001b]52;c;ZXZpbA==\\u0007b\\u001b[2J\\u009b31m\\u000dc\\u007f\td\n"


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def terminal(request):
    return request.param


def printed(terminal, text, monkeypatch):
    made = Screen() if terminal else io.StringIO()
    with monkeypatch.context() as only:
        only.setattr(sys, "stdout", made)
        put(text)
    return made.getvalue()


def test_printable_leaves_text_lines_and_tabs():
    assert printable(EVIL) == SHOWN
    assert printable("Größe 😀\n\tx") == "Größe 😀\n\tx"


def test_what_is_put_is_raw_in_a_pipe_alone(terminal, monkeypatch):
    assert printed(terminal, EVIL, monkeypatch) == (SHOWN if terminal else EVIL)


def test_a_document_stays_json_of_the_same_text(terminal, monkeypatch):
    text = "\x9b31m\x1b[2J\x7f"
    document = json.dumps({"text": text}, ensure_ascii=False)
    said = printed(terminal, document, monkeypatch)
    assert json.loads(said) == {"text": text}
    assert ("\x9b" in said) != terminal


def test_consoles_obey_their_own_styles_alone(terminal):
    made = io.StringIO()
    how = {"force_terminal": terminal, "color_system": "standard" if terminal else None}
    console = Terminal(file=made, highlight=False, soft_wrap=True, **how)
    console.print(EVIL, end="", markup=False)
    console.print(Text(EVIL, style="green"), end="")
    table = Table()
    table.add_column("x")
    table.add_row("p\x1b[2Jq")
    console.print(table)
    said = made.getvalue()
    assert ("\x1b[32m" in said) == terminal
    for order in ("\x1b]52", "\x1b[2J", "\x9b"):
        assert (order in said) != terminal
    assert ("\\u001b[2J" in said) == terminal


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_a_rejected_token_is_marked_where_no_colour_is_seen(environment, seen):
    """Without either it looks like a part of the text."""
    made = Terminal(file=io.StringIO(), force_terminal=True, _environ=environment)
    made.print(piece("rejected", "no", made.coloured), end="")
    assert made.coloured == seen
    assert made.file.getvalue() == ("\x1b[9;31mno\x1b[0m" if seen else "[-no-]")


def test_what_looks_like_an_emoji_stays_as_it_is():
    made = io.StringIO()
    console(file=made).print("x[a:b:c] :cat:", end="", markup=False)
    assert made.getvalue() == "x[a:b:c] :cat:"


def test_without_a_terminal_progress_is_lines_of_a_log(monkeypatch, capsys):
    """One for each item, for the same one now and then, and when all is done."""
    now = [100.0]
    monkeypatch.setattr("outrider.cli.console.time.monotonic", lambda: now[0])
    with bar("work") as show:
        for number in range(30):
            show(f"step {number}: loss {number / 7:.2f}", number, 40)
            now[0] += LINE_SECONDS / 10
        show("timing", 30, 40)
        show("timing", 39, 40)
        show("timing", 40, 40)
    assert capsys.readouterr().err.splitlines() == [
        *("step 0: loss 0.00 (0 of 40)", "step 11: loss 1.57 (11 of 40)"),
        *("step 22: loss 3.14 (22 of 40)", "timing (30 of 40)", "timing (40 of 40)"),
    ]
    with bar("work", LINE_SECONDS) as show:
        show("listening", 0, 2)
        show("listening", 2, 2)
    assert capsys.readouterr().err == ""


def test_a_bar_tells_what_a_start_measures(monkeypatch):
    made = Screen()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    with bar("plan"):
        budget._teller.get()("measuring this machine once: what steps cost")
    assert "measuring this machine once: what steps cost" in made.getvalue()
