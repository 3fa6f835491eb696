"""What is typed into `outrider chat` on a real terminal: long lines, history, pasted text."""

import json
import os
import select
import sys
import time

import pytest

pty = pytest.importorskip("pty")
pytest.importorskip("readline")

LISTENS = """
import json
from outrider.cli.chat import edit_lines, listen
edit_lines()
for _ in range(4):
    print("\\n<" + json.dumps(listen("> ")) + ">")
"""


@pytest.fixture
def terminal():
    """A process that listens on a terminal of its own: what is typed, and what it has read then."""
    child, fd = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", LISTENS])

    def until(mark, seconds=30):
        seen, end = b"", time.monotonic() + seconds
        while mark not in seen:
            assert select.select([fd], [], [], max(end - time.monotonic(), 0))[0], seen
            seen += os.read(fd, 1 << 16)
        return seen

    def typed(text):
        for at in range(0, len(text), 512):  # no more than a terminal takes at once
            os.write(fd, text[at : at + 512])
            time.sleep(0.01)
        told = until(b">\r\n").decode()
        return json.loads(told[told.rindex("\n<") + 2 : told.rindex(">\r\n")])

    until(b"> ")
    yield typed
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(fd)


def test_lines_are_edited_recalled_and_of_any_length(terminal):
    long = "long " * 2000  # a terminal by itself keeps 4,095 bytes of a line
    assert terminal(long.encode() + b"\r") == long
    assert terminal("gr\u00fcn\x7f\x7f\u00fcn\tx\r".encode()) == "gr\u00fcn\tx"
    assert terminal(b"\x1b[A!\r") == "gr\u00fcn\tx!"


def test_a_text_that_is_pasted_is_one_message(terminal):
    import readline

    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit knows no bracketed paste")
    assert terminal(b"\x1b[200~one\rtwo\r\rthree\x1b[201~\r") == "one\ntwo\n\nthree"
