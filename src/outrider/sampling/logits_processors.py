"""Penalties, biases, bans and processors: what changes logits before temperature and filters.

They read the text so far, so at a tree node they read that node's own prefix: the committed tokens
and the path down to the node. The native ones are tensors over [B, R, V]; processors in the manner
of transformers are called once per depth with rows of equal length. Rows that ask for nothing keep
`SamplingRows.shaping` None and pay nothing.

    penalties   bias -> repetition -> frequency and presence
    ngrams      of the text -> of the source
    places      minimum length -> what must not come first
    timestamps
    places      forced first and last token
    processors
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.row_params import NEVER, Processor, Shaping
from outrider.sampling import custom_processors, timestamps
from outrider.sampling.node_prefixes import NodePrefixes, ceiling
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import Context, Tree

# Settings of several rows side by side: what shapes their logits, as tensors.

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
    bias = torch.zeros(len(settings), vocab, dtype=torch.float32, device="cpu")
    for row, s in enumerate(settings):
        if s.logit_bias:
            told = torch.tensor(list(s.logit_bias.values()), dtype=torch.float32, device="cpu")
            bias[row, list(s.logit_bias)] = told
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


def validate(
    settings: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[Sequence[int]],
    vocab: int,
    device: torch.device | str,
    first: int = 0,
    others: Sequence[SamplingParams] = (),
) -> list[SamplingParams]:
    """The settings with processors as they can be called at tree nodes; each is tried out here.

    The requests are numbered from `first`; `others` run beside them. Raises ConfigurationError for
    a processor that cannot be replayed and for a token outside the vocabulary.
    """
    tried: dict[tuple[int, ...], tuple[Processor, ...]] = {}  # rows with the same ones share them
    uses = Counter[int]()
    for s in (*settings, *others):
        uses.update(map(id, s.processors))
    admitted = []
    for row, (s, prompt) in enumerate(zip(settings, prompts, strict=True)):
        for name, ids in _named(s):
            for token in ids:
                if not 0 <= token < vocab:
                    raise ConfigurationError(
                        f"{name} names token {token}, outside the vocabulary of {vocab}; use the "
                        "target's token ids"
                    )
        same = tuple(map(id, s.processors))
        if same and same not in tried:
            tried[same] = custom_processors.replayable(
                s.processors,
                [*s.padding, *prompt],
                vocab,
                device,
                stop_ids[row],
                [uses[id(p)] for p in s.processors],
            )
        if same:
            s = replace(s, processors=custom_processors.of_row(tried[same], first + row))
        admitted.append(s)
    return admitted


def _named(s: SamplingParams) -> list[tuple[str, Collection[int]]]:
    """The settings that name tokens, with the tokens."""
    found: list[tuple[str, Collection[int]]] = [("logit_bias", s.logit_bias or ())]
    found.append(("begin_suppress_tokens", s.begin_suppress_tokens))
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        token = vars(s)[name]
        if token is not None:
            found.append((name, [token]))
    if s.timestamps is not None:
        found.append(("timestamps", [s.timestamps.first_id]))
    return found


def apply(
    logits_BRV: Tensor,
    shaping: Shaping,
    context: Context,
    nodes_BM: Tensor,
    tree: Tree,
    start: int = 0,
    alive_BR: Tensor | None = None,
) -> Tensor:
    """Logits of nodes start..M of a tree as their prefixes change them, float32 [B, R, V].

    `nodes_BM` are the tokens of nodes 0..M, the pending token first. `alive_BR` marks nodes that
    can be reached (None: all): processors are spared the others, whose text may have gaps. With
    `start` 0, where parents are at hand, neither do they see what a parent's logits forbid.

    What comes in is what penalties and processors see: logits here. transformers' beam search
    hands log-probabilities to them, and so may a caller.
    """
    size = logits_BRV.shape[1]
    nodes = NodePrefixes(context, shaping.prompt_B, nodes_BM, tree, start, size)
    logits = penalised(logits_BRV.float(), shaping, nodes)
    if logits is logits_BRV:
        logits = logits.clone()  # the model's own logits stay as they are
    ban_repeats(logits, shaping, nodes)
    ban_by_place(logits, shaping, nodes)
    timestamps.hold(logits, shaping, nodes)
    force_ends(logits, shaping, nodes)
    if shaping.processed:
        custom_processors.process(logits, shaping, context, nodes_BM, tree, start, alive_BR)
    return logits


def penalised(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> Tensor:
    """Biases, then the repetition penalty, then frequency and presence penalties."""
    logits, vocab = logits_BRV, logits_BRV.shape[-1]
    if shaping.bias_BV is not None:
        logits = logits + shaping.bias_BV[:, None]
    if shaping.repetition_B is not None:
        factor = shaping.repetition_B[:, None, None]
        less = torch.where(logits < 0, logits * factor, logits / factor)
        logits = torch.where(prefixes.counts(vocab) > 0, less, logits)
    if shaping.frequency_B is not None or shaping.presence_B is not None:
        times = prefixes.counts(vocab, made_only=True)
        if shaping.frequency_B is not None:
            logits = logits - shaping.frequency_B[:, None, None] * times
        if shaping.presence_B is not None:
            logits = logits - shaping.presence_B[:, None, None] * (times > 0)
    return logits


def ban_repeats(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> None:
    """Ban tokens that would repeat an n-gram. Written in place.

    What is committed is looked through for all nodes of a row, and is not copied for each: behind a
    long text that would take longer than all else between two calls of the model.
    """
    if shaping.ngram_B is None and shaping.source_ngram_B is None:
        return
    most = max((*shaping.ngrams, *shaping.source_ngrams), default=1) - 1
    ends_BRK, at = prefixes.ends(most), most + prefixes.depth_BR[..., None] + 1
    text = [prefixes.committed()[:, None], ends_BRK]
    source = [] if shaping.source_BS is None else [shaping.source_BS[:, None]]
    on_host = logits_BRV.device.type == "cpu"
    for size_B, sizes, places in (
        (shaping.ngram_B, shaping.ngrams, text),
        (shaping.source_ngram_B, shaping.source_ngrams, source),
    ):
        if size_B is None:
            continue
        for size in sizes:
            back = at + torch.arange(1 - size, 0, device=at.device)
            last_BRK = ends_BRK.gather(2, back.expand(*ends_BRK.shape[:2], -1))
            for where in places:  # windows of a tree's tokens begin in what is committed
                where = where[..., most + 1 - size :] if where is ends_BRK else where
                banned = repeats(last_BRK, where, logits_BRV.shape[-1], on_host)
                banned &= (size_B == size)[:, None, None]
                logits_BRV.masked_fill_(banned, -torch.inf)


def repeats(last_BRK: Tensor, where_BRL: Tensor, vocab: int, on_host: bool) -> Tensor:
    """Tokens that stand behind a node's last K tokens in `where`, bool [B, R, V].

    -1 is no token; `where` may be the same for all nodes of a row. No token follows where a text
    has fewer than K.
    """
    rows, count, before = last_BRK.shape
    banned = torch.zeros(rows, count, vocab + 1, dtype=torch.bool, device=last_BRK.device)
    windows = where_BRL.shape[-1] - before
    if windows < 1:
        return banned[..., :-1]
    ends = where_BRL[..., before:]  # -1 behind the end: a window that is not whole
    inside = (ends >= 0) & (ends < vocab)
    same = inside & (last_BRK >= 0).all(-1, keepdim=True)
    for k in range(before):
        same = same & (where_BRL[..., k : k + windows] == last_BRK[..., k : k + 1])
    ends = ends.expand(same.shape)
    if on_host:  # no device to wait for: few windows are the same
        row, node, place = same.nonzero(as_tuple=True)
        banned[row, node, ends[row, node, place]] = True
    else:
        banned.scatter_(2, torch.where(same, ends, vocab), True)
    return banned[..., :-1]


def ban_by_place(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> None:
    """Stop tokens before the least length, and what must not come first. Written in place."""
    if prefixes.context.least >= shaping.opened:
        return
    if shaping.stops_BK is not None and shaping.least_B is not None:
        _ban_few(logits_BRV, shaping.stops_BK, prefixes.made_BR < shaping.least_B[:, None])
    if shaping.begin_BK is not None:
        begins = prefixes.made_BR == 0
        if shaping.first_B1 is not None:  # a text begins behind a forced first token
            begins = prefixes.made_BR == (shaping.first_B1 >= 0).long()
        _ban_few(logits_BRV, shaping.begin_BK, begins)


def force_ends(logits_BRV: Tensor, shaping: Shaping, prefixes: NodePrefixes) -> None:
    """The first and the last token of a text, where they are given. Written in place."""
    forced, length, end_B = None, prefixes.context.length_B, shaping.end_B
    if shaping.first_B1 is not None:
        forced = torch.where(prefixes.made_BR == 0, shaping.first_B1, -1)
    # no row is longer than `bound`, and no path than the nodes: mostly no end is near
    far = prefixes.context.bound + prefixes.stop < shaping.soonest
    if shaping.last_B1 is not None and end_B is not None and not far:
        ends = (length - end_B)[:, None] + prefixes.depth_BR == -1
        other = -1 if forced is None else forced
        forced = torch.where(ends & (shaping.last_B1 >= 0), shaping.last_B1, other)
    if forced is None:
        return
    here, index = forced >= 0, forced.clamp(min=0)[..., None]
    own = torch.where(here[..., None], 0.0, logits_BRV.gather(2, index))
    logits_BRV.clamp_(max=ceiling(here)).scatter_(2, index, own)


def _ban_few(logits_BRV: Tensor, ids_BK: Tensor, where_BR: Tensor) -> None:
    """Ban a row's ids (-1: none) at these nodes, and touch nothing else."""
    count = logits_BRV.shape[1]
    banned = where_BR[..., None] & (ids_BK >= 0)[:, None]
    least = torch.where(banned, -torch.inf, torch.inf).to(logits_BRV.dtype)
    index = ids_BK.clamp(min=0)[:, None].expand(-1, count, -1)
    logits_BRV.scatter_reduce_(2, index, least, "amin")


__all__ = ["apply", "build", "validate"]
