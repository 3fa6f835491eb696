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
from outrider.sampling import (
    begin_end_suppression,
    custom_processors,
    ngrams,
    penalties,
    prefixes,
    processor_replay,
    timestamps,
)
from outrider.sampling.columns import build
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
            tried[same] = processor_replay.replayable(
                s.processors,
                [*s.padding, *prompt],
                vocab,
                device,
                stop_ids[row],
                [uses[id(p)] for p in s.processors],
            )
        if same:
            s = replace(s, processors=processor_replay.of_row(tried[same], first + row))
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
    nodes = prefixes.NodePrefixes(context, shaping.prompt_B, nodes_BM, tree, start, size)
    logits = penalties.penalised(logits_BRV.float(), shaping, nodes)
    if logits is logits_BRV:
        logits = logits.clone()  # the model's own logits stay as they are
    ngrams.ban(logits, shaping, nodes)
    begin_end_suppression.ban(logits, shaping, nodes)
    timestamps.hold(logits, shaping, nodes)
    begin_end_suppression.force(logits, shaping, nodes)
    if shaping.processed:
        custom_processors.process(logits, shaping, context, nodes_BM, tree, start, alive_BR)
    return logits


__all__ = ["apply", "build", "validate"]
