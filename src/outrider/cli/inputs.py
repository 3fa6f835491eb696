"""Texts that a command reads: as they are typed, from a file, or from standard input."""

import os
import sys
from pathlib import Path

from outrider.cli.console import err
from outrider.errors import ConfigurationError, PromptError

INPUT = "-"  #: names standard input


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input; never an empty one."""
    if prompt is not None and file is not None:
        raise ConfigurationError("got both a prompt and --file; give one of them")
    text = prompt
    if text is None:
        text = read_input("prompt") if file is None else read_file(file, "prompt")
    if not text:
        raise PromptError("the prompt is empty; got ''; give at least one character")
    return text


def read_source(given: str) -> str:
    """The source: what a file of that name holds, standard input for "-", or the text itself."""
    if given == INPUT:
        text = read_input("source")
    else:
        text = read_file(Path(given), "source") if _is_file(given) else given
    if not text:
        raise PromptError("the source is empty; got ''; give at least one character")
    return text


def read_input(what: str) -> str:
    """Standard input."""
    if sys.stdin.isatty():
        err.print(f"reading the {what} from the keyboard; Ctrl-D ends it", style="dim")
    return _decoded(sys.stdin.buffer.read(), "standard input")


def read_file(path: Path, what: str) -> str:
    """A file of text."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PromptError(
            f"cannot read the {what}; got {path}: {error.strerror}; check the path"
        ) from error
    return _decoded(raw, str(path))


def _is_file(given: str) -> bool:
    """Whether a file has this name; a text may be too long for one, or hold what none can."""
    try:
        return os.path.isfile(given)
    except ValueError:
        return False


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not valid UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
            "convert the file first (for example with iconv)"
        ) from error
