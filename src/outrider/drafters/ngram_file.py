"""N-gram tables in files: what `training/ngram.py` writes, and what `write` keeps of a count.

A safetensors file with, for each order n, `keys_n` (int64, sorted: n tokens packed into one number,
the follower last) and `counts_n` (uint16 or int64), and the vocabulary's size as metadata.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

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


def read(file: str | Path) -> Table:
    """The table in a file. Raises ConfigurationError if there is none.

    >>> read("mine.safetensors").order  # doctest: +SKIP
    4
    """
    try:
        with safe_open(str(file), "pt") as opened:
            size = int((opened.metadata() or {})["vocabulary"])
            names = set(opened.keys())
            orders = range(1, len(names) // 2 + 1)
            keys = [opened.get_tensor(f"keys_{n}").to(torch.int64) for n in orders]
            counts = [opened.get_tensor(f"counts_{n}").to(torch.int64) for n in orders]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(
            f"cannot read an n-gram table; got {str(file)!r} ({type(error).__name__}: {error}); "
            "give a file written by outrider.drafters.ngram_file.write or python -m training.ngram"
        ) from error
    if not keys or any(len(k) != len(c) for k, c in zip(keys, counts, strict=True)):
        raise ConfigurationError(
            f"an n-gram table needs keys and counts of equal length for every order; got {file}, "
            f"with {[(len(k), len(c)) for k, c in zip(keys, counts, strict=True)]}; write it again"
        )
    return table_of(keys, counts, size)
