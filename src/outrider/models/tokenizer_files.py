"""Tokenizers as they lie in folders: read, absent, or broken with the reason."""

from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from outrider import arguments
from outrider.errors import ConfigurationError, RemoteCodeRefused, first_line, kind_of
from outrider.models import gguf, pretrained
from outrider.models.config import read
from outrider.types import Tokenizer

#: Files that a tokenizer is read from: a folder without any has none.
_FILES = tuple(
    """
    tokenizer.json tokenizer.model tokenizer_config.json tekken.json spiece.model spm.model
    spm_char.model sentencepiece.model sentencepiece.bpe.model source.spm vocab.json
    vocab-src.json vocab.txt vocab.bpe merges.txt bpe.codes dict.txt prophetnet.tokenizer
    qwen.tiktoken
    """.split()
)


def found(folder: Path) -> list[str]:
    """The files of a tokenizer that this folder has."""
    return [name for name in _FILES if (folder / name).is_file()]


def beside(given: str | Path, role: str, trust: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model's folder, hub name or GGUF file; None where there is none.

    Raises ConfigurationError for one that is there and cannot be used.
    """
    known = gguf.described(given)
    if known is not None and (known / "tokenizer").is_dir():
        with suppress(OSError, ValueError):
            return pretrained.read_tokenizer(str(known / "tokenizer"), trust)
    where, how = gguf.located(given)
    folder = Path(given)
    there = found(folder)
    try:
        made = pretrained.read_tokenizer(where, trust, **how)
        gguf.remember(given, made, "tokenizer")
    except RemoteCodeRefused:
        raise
    except Exception as error:  # the tokenizers library raises plain ones
        if folder.is_dir() and not there:
            return None
        if isinstance(error, ImportError):
            raise ConfigurationError(
                f"the tokenizer of {given} needs a package that is not installed "
                f"({first_line(error)}); install it, or pass tokenizer=..."
            ) from error
        if not there and isinstance(error, (OSError, ValueError)):
            return None
        why = kind_of(error)
        if isinstance(error, TypeError) and "NoneType" in why:  # a path that is None
            why = "a file that it is read from, beside those, is missing"
        raise ConfigurationError(
            f"cannot read the tokenizer of the {role} model; got {str(given)!r} "
            f"({', '.join(there[:3]) or 'no file of it'}: {why}); download it again, or pass "
            "tokenizer=..."
        ) from error
    names = {*made.vocab_files_names.values(), "tokenizer.json"}
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        return None  # some families make an empty one of nothing
    return made


def is_processor(given: object) -> bool:
    """Whether it reads images or sound besides text: a processor, which has a tokenizer."""
    return read(given, "tokenizer", PreTrainedTokenizerBase) is not None


def read_tokenizer(
    given: str | Path | PreTrainedTokenizerBase, trust: bool = False
) -> PreTrainedTokenizerBase:
    """A tokenizer that was given by path, hub name or as an object."""
    if not isinstance(given, (str, Path)):
        inner = read(given, "tokenizer", PreTrainedTokenizerBase)
        if inner is not None:  # a processor's
            return inner
        if not isinstance(given, Tokenizer):
            do = "see AutoTokenizer, or wrap it: PreTrainedTokenizerFast(tokenizer_object=...)"
            arguments.refuse("tokenizer", "a tokenizer of transformers, or its path", given, do)
        return given
    where, how = gguf.located(given)
    try:
        return pretrained.read_tokenizer(where, trust, **how)
    except RemoteCodeRefused:
        raise
    except Exception as error:  # the tokenizers library raises plain ones
        raise ConfigurationError(
            f"cannot load the tokenizer; got {str(given)!r} ({kind_of(error)}); check the path "
            "or pass a tokenizer"
        ) from error
