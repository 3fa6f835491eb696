"""The tree of errors. Every message says what is wrong, what was given and what to do.

OutriderError
├── ConfigurationError          the request cannot be honoured as written
│   ├── UnknownName             a drafter, rule or option that is not registered
│   ├── RemoteCodeRefused        a model folder asks for Python that nobody allowed to run
│   ├── UnsupportedModel        an architecture that cannot be driven exactly, with the reason
│   └── VocabularyMismatch      target and draft do not share one tokenizer
├── PromptError                 a prompt that cannot be decoded, is empty or does not fit
├── AudioError                  a recording that is missing, empty or cannot be read
├── ImageError                  an image that is missing, remote, too large or cannot be read
├── CapacityError               the cache is too small for prompt, budget and tree
├── NumericalError              a model returned NaN, or a law with no mass
├── ShardLost                   a process that holds a part of the target is gone
├── WorkerTimeout            a function in an executor has not answered in time
└── BackendUnavailable          an ops backend that was asked for cannot run here
"""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pickle import UnpicklingError


class OutriderError(Exception):
    """Base of every error that outrider raises on purpose."""


class ConfigurationError(OutriderError, ValueError):
    """An argument is outside its range, or two arguments contradict each other."""


class UnknownName(ConfigurationError):
    """A name that no registry knows. The message lists the names that exist; lossy ones say so."""

    def __init__(
        self, kind: str, given: str, known: Iterable[str], lossy: Collection[str] = ()
    ) -> None:
        names = sorted(known)
        close = get_close_matches(given, names, 1) or get_close_matches(given.lower(), names, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        listed = ", ".join(f"{name} (lossy)" if name in lossy else name for name in names)
        super().__init__(f"unknown {kind} {given!r}; known: {listed}.{hint}")


class UnsupportedModel(ConfigurationError):
    """The model cannot be driven over trees or rolled back exactly; the message has the reason."""


class RemoteCodeRefused(ConfigurationError):
    """A model folder asks for Python of its own, which nobody allowed to run."""


class VocabularyMismatch(ConfigurationError):
    """Target and draft model disagree on what a token id means."""


class PromptError(OutriderError, ValueError):
    """A prompt is empty, longer than the context, or not valid UTF-8."""


class AudioError(OutriderError, ValueError):
    """A recording is missing, empty, of another rate than was said, or cannot be read."""


class ImageError(OutriderError, ValueError):
    """An image is missing, remote, too large, or no picture that can be read."""


class CapacityError(OutriderError, ValueError):
    """Prompt, budget and draft tree do not fit in the cache that was asked for."""


class NumericalError(OutriderError, ArithmeticError):
    """A model returned NaN logits, or masked every token of a row."""


class ShardLost(OutriderError, RuntimeError):
    """A process that holds a part of a sharded target is gone, or no longer in step."""


class WorkerTimeout(OutriderError, TimeoutError):
    """A function that runs in an executor has not answered within the time that it was given."""


class BackendUnavailable(OutriderError, RuntimeError):
    """The ops backend that was asked for by name cannot run on this machine."""


# What other libraries' errors say, in one line of ours: they raise all kinds on broken files.


@contextmanager
def usable_file(model: str, file: str) -> Iterator[None]:
    """In here foreign errors mean that this file of a model's folder says what cannot be used."""
    try:
        yield
    except OutriderError as error:
        if type(error) is not ConfigurationError or model in str(error):
            raise
        raise ConfigurationError(f"{file} of the model {model!r}: {error}") from error
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
