"""Bans of n-grams that were there already: in the row's own text, or in its source."""

import torch
from torch import Tensor

from outrider.row_params import Shaping
from outrider.sampling.prefixes import NodePrefixes


def ban(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> None:
    """Ban tokens that would repeat an n-gram. Written in place."""
    if shaping.ngram_B is None and shaping.source_ngram_B is None:
        return
    text, length = prefixes.texts()
    source = None if shaping.source_BS is None else shaping.source_BS[:, None]
    for size_B, sizes, where in (
        (shaping.ngram_B, shaping.ngrams, text),
        (shaping.source_ngram_B, shaping.source_ngrams, source),
    ):
        if size_B is None or where is None:
            continue
        for size in sizes:
            banned = repeats(text, length, where, size, logits_BRV.shape[-1])
            banned &= (size_B == size)[:, None, None]
            logits_BRV.masked_fill_(banned, -torch.inf)


def repeats(
    text_BRL: Tensor, length_BR: Tensor, where_BRL: Tensor, size: int, vocab: int
) -> Tensor:
    """Tokens that would complete an n-gram that stands in `where`, bool [B, R, V].

    `where` is -1 padded, and may be the same for all nodes of a row.
    """
    rows, count, _ = text_BRL.shape
    banned = torch.zeros(rows, count, vocab + 1, dtype=torch.bool, device=text_BRL.device)
    windows = where_BRL.shape[-1] - size + 1
    if windows < 1:
        return banned[..., :-1]
    same = (length_BR[..., None] + 1 >= size).expand(-1, -1, windows)
    for k in range(size - 1):
        want = (length_BR - size + 1 + k).clamp(min=0)
        same = same & (where_BRL[..., k : k + windows] == text_BRL.gather(2, want[..., None]))
    ends = where_BRL[..., size - 1 :]  # -1 behind the end: a window that is not whole
    said = torch.where(same & (ends >= 0) & (ends < vocab), ends, vocab)
    return banned.scatter_(2, said, True)[..., :-1]
