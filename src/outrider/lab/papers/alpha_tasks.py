"""What texts are written from: the prompts of a decoder-only model, the sources of an encoder's."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider import Limits, Request, Sampling, Speculator
from outrider.engine.batch import encoded
from outrider.errors import ConfigurationError
from outrider.text.tokens import encode
from outrider.types import Inputs

#: What one task is: a row of a file, with its texts by name.
Rows = Sequence[dict[str, str]]
PROMPT = 64  #: tokens of a prompt that are read, the last ones


def reads_sources(pair: Speculator) -> bool:
    """Whether the target is an encoder-decoder."""
    return pair.engine.target.reads == "source"


def tasks(pair: Speculator, rows: Rows) -> list[Request]:
    """A request for every row: its `prompt`'s end, or its `source` as encoder states.

    Every source is read once here and never again.
    """
    if not reads_sources(pair):
        prompts = (pair.tokenizer.encode(row["prompt"].rstrip())[-PROMPT:] for row in rows)
        return [Request(prompt) for prompt in prompts]
    start = decoder_start(pair)
    return [Request(start, inputs=_source(pair, row["source"], n)) for n, row in enumerate(rows)]


def _source(pair: Speculator, text: str, number: int) -> Inputs:
    target = pair.engine.target
    ids = torch.tensor([encode(pair.tokenizer, text, number)], device=target.device)
    inputs = encoded(target, [Inputs(ids, None, torch.ones_like(ids, dtype=torch.bool))])
    assert inputs is not None
    return inputs


def decoder_start(pair: Speculator) -> tuple[int, ...]:
    """What the decoder's text begins with."""
    from transformers import AutoConfig, GenerationConfig

    start = None
    for kind in (GenerationConfig, AutoConfig):
        try:
            start = kind.from_pretrained(pair.notes.target).decoder_start_token_id
        except (OSError, AttributeError):
            continue
        if start is not None:
            return (int(start),)
    raise ConfigurationError(
        f"{pair.notes.target} does not say what its texts begin with; got no "
        "decoder_start_token_id; add it to its generation_config.json"
    )


def asked(request: Request, sampling: Sampling, pair: Speculator, new_tokens: int) -> Request:
    """The task under these settings. Texts of an encoder-decoder end, others go on."""
    ends = pair.eos_ids if reads_sources(pair) else ()
    return replace(request, sampling=sampling, limits=Limits(new_tokens, ends))
