"""What other libraries' errors say, in one line of ours: they raise all kinds on broken files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError

from outrider.errors import ConfigurationError, OutriderError


@contextmanager
def usable_file(model: str, file: str) -> Iterator[None]:
    """In here foreign errors mean that this file of a model's folder says what cannot be used."""
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:  # whatever somebody else's file makes of a library
        raise ConfigurationError(
            f"{file} of the model cannot be used; got {model!r} ({kind_of(error)}); download it "
            "again"
        ) from error


def pickled(error: UnpicklingError) -> str:
    """What is wrong with a pickled file that holds more than weights."""
    asked = re.search(
        r"(?:Unsupported|GLOBAL) [\w.]+", str(error).replace("global: GLOBAL", "GLOBAL")
    )
    found = f", it asks for {asked[0].split()[-1]}" if asked else ""
    return f"a pickled file that is more than weights{found}; it was not run; safetensors are safe"


def kind_of(error: BaseException) -> str:
    """What a foreign error says, with its kind where that is no plain one."""
    plain = isinstance(error, (OSError, ValueError)) or type(error) is Exception
    return first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory: Python's error, torch's of a GPU, or its untyped one of a CPU.

    >>> out_of_memory(MemoryError()), out_of_memory(ValueError("no"))
    (True, False)
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
