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
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.row_params import Processor, Shaping
from outrider.sampling import custom_processors, timestamps
from outrider.sampling.columns import build
from outrider.sampling.prefixes import NodePrefixes, ceiling
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import Context, Tree


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
    uses = Counter(id(p) for s in (*settings, *others) for p in s.processors)
    admitted = []
    for row, (s, prompt) in enumerate(zip(settings, prompts, strict=True)):
        for name, ids in _named(s):
            outside = [token for token in ids if not 0 <= token < vocab]
            if outside:
                raise ConfigurationError(
                    f"{name} names token {outside[0]}, outside the vocabulary of {vocab}; use "
                    "the target's token ids"
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


def _named(s: SamplingParams) -> list[tuple[str, list[int]]]:
    """The settings that name tokens, with the tokens."""
    found = [("logit_bias", list(s.logit_bias or ()))]
    found.append(("begin_suppress_tokens", list(s.begin_suppress_tokens)))
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        token = getattr(s, name)
        found.append((name, [] if token is None else [token]))
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
