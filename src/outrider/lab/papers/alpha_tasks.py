"""What texts are written from: the prompts of a decoder-only model, the sources of an encoder's."""

from collections.abc import Sequence
from dataclasses import replace

from outrider import Limits, Request, Sampling, Speculator
from outrider.engine.batch import encoded
from outrider.text.asked import Reader

#: What one task is: a row of a file, with its texts by name.
Rows = Sequence[dict[str, str]]
PROMPT = 64  #: tokens of a prompt that are read, the last ones
#: As many new tokens as a source has, and these: a correction is about as long.
MORE = 32


def reads_sources(pair: Speculator) -> bool:
    """Whether the target is an encoder-decoder."""
    return pair.engine.target.reads == "source"


def tasks(pair: Speculator, rows: Rows) -> list[Request]:
    """A request for every row: its `prompt`'s end, or its `source` as encoder states.

    Every source is read once here and never again. The rules of a generation configuration are
    left out: what is measured are the models' own laws.
    """
    if not reads_sources(pair):
        prompts = (pair.tokenizer.encode(row["prompt"].rstrip())[-PROMPT:] for row in rows)
        return [Request(prompt) for prompt in prompts]
    target = pair.engine.target
    reader = Reader(target, pair.tokenizer, pair.opening, pair.eos_ids)
    asked = reader.read([row["source"] for row in rows])
    assert asked.inputs is not None
    return [
        Request(start, inputs=encoded(target, [inputs]))
        for start, inputs in zip(asked.prompts, asked.inputs, strict=True)
    ]


def longest(request: Request) -> int:
    """The most new tokens of an answer to a source."""
    assert request.inputs is not None
    return int(request.inputs.mask_BS.sum()) + MORE


def length(pair: Speculator, request: Request, new_tokens: int, wanted: int) -> int:
    """New tokens of a greedy text, of `wanted` or more from every prompt.

    Answers to sources are read to their ends, other texts as far as the target has room.
    """
    if request.inputs is not None:
        return max(new_tokens, longest(request))
    return min(max(new_tokens, wanted), pair.engine.target.context - len(request.prompt))


def asked(request: Request, sampling: Sampling, pair: Speculator, new_tokens: int) -> Request:
    """The task under these settings. Texts of an encoder-decoder end, others go on."""
    ends = pair.eos_ids if reads_sources(pair) else ()
    return replace(request, sampling=sampling, limits=Limits(new_tokens, ends))
