"""SmolLM2-135M-Instruct in bfloat16: chains write plain decoding's text, whoever sits beside.

The folder `smollm2` of OUTRIDER_MODELS. `benchmarks/half_precision.py` asks the same of more texts.
"""

import pytest

import outrider
from outrider import SamplingParams, Stop

pytestmark = pytest.mark.real

HOW = {"dtype": "bfloat16", "threads": 1, "pack_weights": True}
#: Prompts whose texts go past 128 and 256 tokens.
LENGTHS, BUDGET = (110, 118, 244, 250), 24


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chains_write_what_plain_decoding_writes(smollm2, temperature):
    lookup = outrider.load(smollm2, drafter="prompt_lookup", rule="match", **HOW)
    text = lookup.tokenizer(outrider.load.__doc__)["input_ids"]
    prompts = [text[20 * row : 20 * row + length] for row, length in enumerate(LENGTHS)]
    settings = [SamplingParams(temperature, seed=row) for row in range(len(prompts))]
    stop = Stop(BUDGET, token_ids=())
    plain = lookup.plain(shared_noise=temperature > 0)
    expected = [
        plain.generate(ids, how, stop).completions[0].token_ids
        for ids, how in zip(prompts, settings, strict=True)
    ]
    prompts.append(text[:400])  # beside the others
    settings.append(SamplingParams(1.0, seed=9))
    layers = (0, 1, 14, 28, 29)
    draft = outrider.load(smollm2, draft_layers=layers, shared_noise=temperature > 0, **HOW)
    usual = outrider.load(smollm2, **HOW)  # a tree where the kernels are compiled
    assert usual.engine.drafter.chain != usual.engine.target.rounding.trees
    for made in (lookup, draft, usual, plain):
        result = made.generate(prompts, settings, stop, capacity=512)
        texts = [completion.token_ids for completion in result.completions]
        assert texts[:-1] == expected
