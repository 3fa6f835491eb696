"""Checks of a drafter whose target reads a source, and of one that is given texts to copy from."""

from collections.abc import Sequence

from outrider import verifiers
from outrider.drafters import Root
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request, StopConditions
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing.case import Case, check, expect
from outrider.testing.models import PROMPTS, pair
from outrider.testing.sourced import encoder_decoders, sources
from outrider.types import Inputs, LanguageModel, Verifier

MATCH = verifiers.get("match")
LENGTHS = (14, 5, 11, 9)  #: of four texts in three seats: the second leaves, the last one joins
#: What rows may copy: nothing, all kinds of tokens, one that is none of theirs, one without end.
REFERENCES: Sequence[Sequence[int]] = ((), (3, 1, 4, 1, 5, 9, 2, 6), (31, 30, 29), (7,) * 40)


@check()
def text_from_a_source_is_plain_decodings(case: Case) -> None:
    """On an encoder-decoder: each row reads its own source, and may copy from it."""
    target, small = encoder_decoders()
    _same(case, target, small, sources(target, len(LENGTHS)), [()] * len(LENGTHS))


@check()
def references_leave_no_trace(case: Case) -> None:
    """Texts that are given to be copied, right or wrong, change what is drafted alone."""
    target, small = pair()
    _same(case, target, small, [None] * len(LENGTHS), REFERENCES)


def _same(
    case: Case,
    target: LanguageModel,
    small: LanguageModel,
    inputs: Sequence[Inputs | None],
    references: Sequence[Sequence[int]],
) -> None:
    """Greedy text, and text under `match` where it can judge, is plain decoding's."""
    drafter = case.make(small)
    ways: list[tuple[Verifier | None, float]] = [(None, 0.0)]
    if verifiers.judges(MATCH, drafter.kinds, all(shape.is_chain for shape in drafter.shapes)):
        ways.append((MATCH, 0.9))
    for rule, temperature in ways:
        requests = [
            Request(
                prompt,
                SamplingParams(temperature, seed=100 + row),
                StopConditions(length),
                source,
                ids,
            )
            for row, (prompt, length, source, ids) in enumerate(
                zip(PROMPTS, LENGTHS, inputs, references, strict=False)
            )
        ]
        expected = _texts(Engine(target, Root(), rule), requests)
        texts = _texts(Engine(target, drafter, rule), requests)
        for row, (text, plain) in enumerate(zip(texts, expected, strict=True)):
            expect(
                text == plain,
                f"temperature {temperature}, row {row}: {text}; plain decoding gives {plain}",
            )


def _texts(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    run = EngineRun(engine, 3, 128)
    run.submit_all(requests)
    run.close()
    texts: list[list[int]] = [[] for _ in requests]
    for block in run:
        texts[block.row] += block.token_ids
    return texts
