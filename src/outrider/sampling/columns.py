"""Settings of several rows side by side: what shapes their logits, as tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.row_params import NEVER, Shaping
from outrider.sampling.sampling_params import SamplingParams

Device = torch.device | str


def build(
    settings: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[Sequence[int]],
    vocab: int,
    device: Device,
    *,
    ends: Sequence[int] = (),
    sources: Sequence[Sequence[int]] = (),
) -> Shaping | None:
    """The batch's shaping, or None if no row asks for any. `validate` has looked at the settings.

    `ends`, the committed lengths at which rows end, are needed where a last token is forced, and
    `sources`, the ids of what they read, where n-grams of these must not come again.
    """
    if not any(s.shapes for s in settings):
        return None

    def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
        values = [getattr(s, name) for s in settings]
        if all(value == off for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=device)

    early = [
        [token for token in ids if s.min_new_tokens and 0 <= token < vocab]
        for s, ids in zip(settings, stop_ids, strict=True)
    ]
    copied = [s.encoder_no_repeat_ngram_size for s in settings]
    last = [() if (t := s.forced_eos_token_id) is None else (t,) for s in settings]
    first = [() if (t := s.forced_bos_token_id) is None else (t,) for s in settings]
    rules = [s.timestamps for s in settings]
    return Shaping(
        torch.tensor([len(p) for p in prompts], device=device),
        bias_BV=_biases(settings, vocab, device),
        repetition_B=column("repetition_penalty", 1.0),
        frequency_B=column("frequency_penalty", 0.0),
        presence_B=column("presence_penalty", 0.0),
        ngram_B=column("no_repeat_ngram_size", 0, torch.int64),
        source_ngram_B=column("encoder_no_repeat_ngram_size", 0, torch.int64),
        source_BS=_ids([sources[row] if n else () for row, n in enumerate(copied)], device),
        least_B=column("min_new_tokens", 0, torch.int64),
        stops_BK=_ids(early, device),
        begin_BK=_ids([s.begin_suppress_tokens for s in settings], device),
        timestamps_B3=_ids([() if t is None else t.row for t in rules], device),
        first_B1=_ids(first, device),
        last_B1=_ids(last, device),
        end_B=torch.tensor(list(ends), device=device) if any(last) else None,
        ngrams=tuple(sorted({s.no_repeat_ngram_size for s in settings} - {0})),
        source_ngrams=tuple(sorted(set(copied) - {0})),
        marks=tuple(sorted({t.row[:2] for t in rules if t is not None})),
        opened=max(map(_opened, settings, prompts, early)),
        soonest=min((ends[row] for row, ids in enumerate(last) if ids), default=NEVER),
        processors=tuple(s.processors for s in settings),
        padding=tuple(s.padding for s in settings),
        ends=tuple(frozenset(ids) for ids in stop_ids),
        masks=any(_may_mask(s, ids, vocab) for s, ids in zip(settings, early, strict=True)),
    )


#: Columns that say of tokens what `among` can say of some of them.
_ANYWHERE = {"prompt_B", "bias_BV", "least_B", "stops_BK", "begin_BK"}


def among(shaping: Shaping, ids_K: Tensor, least: int = 0) -> Shaping | None:
    """The same rules over logits of these tokens alone, [B, R, K], which are then numbered so.

    No row is shorter than `least`.

    None where rules read the text, or logits of other tokens.

    >>> few = among(Shaping(torch.ones(1), begin_BK=torch.tensor([[7, 2]])), torch.tensor([2, 5]))
    >>> few.begin_BK.tolist()
    [[-1, 0]]
    """
    named = zip(shaping._fields, shaping, strict=True)
    tables = {name: value for name, value in named if isinstance(value, Tensor)}
    if shaping.processed or not tables.keys() <= _ANYWHERE:
        return None
    changed: dict[str, Any] = {}
    bias_BV = shaping.bias_BV
    if bias_BV is not None:
        changed["bias_BV"] = bias_BV.index_select(1, ids_K.to(bias_BV.device))
    for name in ("stops_BK", "begin_BK"):
        if name in tables and least < shaping.opened:
            same = tables[name][..., None] == ids_K
            changed[name] = torch.where(same.any(-1), same.long().argmax(-1), -1)
    return shaping._replace(**changed)


def _opened(s: SamplingParams, prompt: Sequence[int], early: Sequence[int]) -> int:
    """The committed length from which on nothing is banned for being too early."""
    first = 1 + (s.forced_bos_token_id is not None) if s.begin_suppress_tokens else 0
    return len(prompt) + max(first, s.min_new_tokens if early else 0)


def _ids(rows: Sequence[Sequence[int]], device: Device) -> Tensor | None:
    """Ids of each row [B, K], -1 padded; None if no row has any."""
    most = max(map(len, rows))
    if not most:
        return None
    return torch.tensor([[*ids, *[-1] * (most - len(ids))] for ids in rows], device=device)


def _biases(settings: Sequence[SamplingParams], vocab: int, device: Device) -> Tensor | None:
    if not any(s.logit_bias for s in settings):
        return None
    bias = torch.zeros(len(settings), vocab)
    for row, s in enumerate(settings):
        if s.logit_bias:
            bias[row, list(s.logit_bias)] = torch.tensor(list(s.logit_bias.values()))
    return bias.to(device)


def _may_mask(s: SamplingParams, early: Sequence[int], vocab: int) -> bool:
    """Whether its bans may leave no token at all at some node; a forced one is always left."""
    if s.processors or s.no_repeat_ngram_size or s.encoder_no_repeat_ngram_size:
        return True  # they ban what the text says
    banned = {token for token, value in (s.logit_bias or {}).items() if value == -float("inf")}
    banned.update(early, s.begin_suppress_tokens)
    rule = s.timestamps
    if rule is None:
        return len(banned) >= vocab
    # each of these ranges may be all that the rules leave: first timestamps, or special tokens
    most = vocab if rule.max_initial is None else min(rule.first_id + rule.max_initial + 1, vocab)
    left = range(rule.first_id, most), range(rule.end_id, rule.no_timestamps_id)
    return any(all(token in banned for token in ids) for ids in left)
