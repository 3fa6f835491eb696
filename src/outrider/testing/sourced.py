"""Tiny encoder-decoders and sources of several lengths, for drafters of models that read a source.

target, draft = encoder_decoders("t5")
Engine(target, MyDrafter(draft)).run(prompts, inputs=sources(target, len(prompts)))
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from outrider import verifiers
from outrider.drafters import Root
from outrider.engine.engine import Engine
from outrider.engine.request import Request, StopConditions
from outrider.models import TreeDecoder, adapt
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing.checks import Case, check, expect
from outrider.testing.models import PROMPTS, VOCAB, disturb, pair
from outrider.testing.runs import finished
from outrider.types import Inputs, LanguageModel, Verifier

IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 256,
    **IDS,
}


def _t5() -> PreTrainedModel:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,  # as many as the decoder: transformers counts these for its cache
            num_decoder_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


#: Families, each of another kind of decoder: what makes a random model of it.
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": _t5,
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**BART)),
}


def encoder_decoder(family: str = "t5", size: float = 0.0) -> PreTrainedModel:
    """A random model of a family in FAMILIES, peaked enough to disagree about.

    `size` is that of the noise on its weights, as in `perturbed`.

    >>> encoder_decoder("t5").config.vocab_size
    32
    """
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:  # norms and biases are not left at 1 and 0
                parameter.add_(0.05 * torch.randn_like(parameter))
    if size:
        torch.manual_seed(1)
        disturb(model, size)
    return model


@lru_cache
def encoder_decoders(family: str = "t5", size: float = 0.05) -> tuple[TreeDecoder, TreeDecoder]:
    """A target and a draft model, each with an encoder, that agree more or less.

    `size` is as in `perturbed`. The same call gives the same objects.

    >>> target, draft = encoder_decoders()
    >>> target.reads, draft.reads
    ('source', 'source')
    """
    return adapt(encoder_decoder(family)), adapt(encoder_decoder(family, size))


def sources(target: TreeDecoder, rows: int) -> list[Inputs]:
    """Something to read for each of `rows` rows, of several lengths where they may differ."""
    made = target.probe(rows)
    assert made is not None, "the model reads text alone"
    made = made._replace(encoded=None)
    return [_alone(made.take([row])) for row in range(rows)]


def _alone(row: Inputs) -> Inputs:
    """A row without its padding."""
    size = int(row.mask_BS.sum())
    ids = None if row.ids_BS is None else row.ids_BS[:, :size]
    return row._replace(ids_BS=ids, mask_BS=row.mask_BS[:, :size])


# Checks of a drafter whose target reads a source, and of one that is given texts to copy from.

MATCH = verifiers.get("match")
LENGTHS = (14, 5, 11, 9)  #: of four texts in three into: the second leaves, the last one joins
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
    """Greedy text, and text under `match` where it can verify, is plain decoding's."""
    drafter = case.make(small)
    ways: list[tuple[Verifier | None, float]] = [(None, 0.0)]
    if verifiers.supports(MATCH, drafter.kinds, all(shape.is_chain for shape in drafter.shapes)):
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
        expected, _ = finished(Engine(target, Root(), rule), 3, requests)
        texts, _ = finished(Engine(target, drafter, rule), 3, requests)
        for row, (text, plain) in enumerate(zip(texts, expected, strict=True)):
            expect(
                text == plain,
                f"temperature {temperature}, row {row}: {text}; plain decoding gives {plain}",
            )
