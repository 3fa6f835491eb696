"""N-gram tables in files: what `training/ngram.py` writes, and what `write` keeps of a count.

A safetensors file with, for each order n, `keys_n` (int64, sorted: n tokens packed into one number,
the follower last) and `counts_n` (uint16 or int64), and the vocabulary's size as metadata.
"""

from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider import arguments
from outrider.drafters.ngram_table import Table, table_of
from outrider.errors import ConfigurationError


def write(table: Table, file: str | Path) -> None:
    """Keep a table.

    >>> write(count(tokens, vocab_size=4096, order=4), "mine.safetensors")  # doctest: +SKIP
    """
    arrays: dict[str, torch.Tensor] = {}
    for n, (keys, counts) in enumerate(zip(table.keys, table.counts, strict=True), 1):
        arrays |= {f"keys_{n}": keys.contiguous(), f"counts_{n}": counts.contiguous()}
    save_file(arrays, str(file), metadata={"vocabulary": str(table.vocab_size)})


def opened(table: str | Path | Table | None) -> Table | None:
    """A table that was given as one or as its file, or not at all."""
    return table if table is None or isinstance(table, Table) else read(table)


def read(file: str | Path) -> Table:
    """The table in a file. Raises ConfigurationError if there is none.

    >>> read("mine.safetensors").order  # doctest: +SKIP
    4
    """
    if not isinstance(file, (str, Path)):
        arguments.refuse("table", "a Table or the path of its file", file, "see ngram_file.write")
    try:
        changed = Path(file).stat()
        return _read(str(file), changed.st_mtime_ns, changed.st_size)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(
            f"cannot read an n-gram table; got {str(file)!r} ({type(error).__name__}: {error}); "
            "give a file written by outrider.drafters.ngram_file.write or python -m training.ngram"
        ) from error


@lru_cache(maxsize=4)
def _read(file: str, changed: int, size: int) -> Table:
    """Kept while the file stays as it is: reading takes longer than many a request."""
    with safe_open(file, "pt") as opened:
        vocab_size = int((opened.metadata() or {})["vocabulary"])
        orders = range(1, len(set(opened.keys())) // 2 + 1)
        keys = [opened.get_tensor(f"keys_{n}").to(torch.int64) for n in orders]
        counts = [opened.get_tensor(f"counts_{n}").to(torch.int64) for n in orders]
    bits = int(vocab_size - 1).bit_length()
    if not keys or len(keys) * bits > 62:
        raise ValueError(f"{len(keys)} orders of {vocab_size} tokens")
    for n, (key, count) in enumerate(zip(keys, counts, strict=True), 1):
        if key.dim() != 1 or key.shape != count.shape:
            raise ValueError(f"order {n}: keys {tuple(key.shape)}, counts {tuple(count.shape)}")
        if not len(key):
            continue
        follower = key & ((1 << bits) - 1)
        rising = bool((key[1:] > key[:-1]).all())
        inside = key[0] >= 0 and follower.max() < vocab_size
        if not rising or not inside or count.min() < 1:
            raise ValueError(f"order {n}: keys must rise, name known tokens and be counted")
    return table_of(keys, counts, vocab_size)
