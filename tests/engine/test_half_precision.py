"""bfloat16 on a CPU: a text is the same for any drafter, beside any row and in any capacity."""

import pytest
import torch

import outrider
from outrider import SamplingParams, Stop
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.models import batch_invariance, linear
from outrider.models.cpu_kernels import build
from outrider.models.prefix_cache import PrefixCache


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_do_not_depend_on_neighbours_or_drafters(held_out, temperature):
    """Texts that pass 128, 192 and 256 tokens, where a wider cache begins to be read."""
    coupled = temperature > 0
    pair = outrider.load(dtype="bfloat16", threads=1, pack_weights=True, shared_noise=coupled)
    text = [token for prompt in held_out for token in pair.tokenizer(prompt)["input_ids"]]
    prompts = [text[at : at + size] for at, size in ((0, 120), (200, 186), (400, 250))]
    settings = [SamplingParams(temperature, seed=seed) for seed in range(3)]
    stop = Stop(16, token_ids=())
    plain = pair.plain(shared_noise=coupled)
    each = list(zip(prompts, settings, strict=True))
    expected = [plain.generate(ids, how, stop).completions[0].token_ids for ids, how in each]
    beside = [*prompts, text[:440]], [*settings, SamplingParams(1.0, seed=7)]
    for made in (pair, plain):
        result = made.generate(*beside, stop, capacity=500)
        assert [one.token_ids for one in result.completions[:-1]] == expected


def test_texts_do_not_depend_on_copied_prompts(held_out):
    """A prompt read whole, in pieces beside others, or copied in part from another one."""
    pair = outrider.load(dtype="bfloat16", threads=1, pack_weights=True, shared_noise=True)
    text = [token for prompt in held_out for token in pair.tokenizer(prompt)["input_ids"]]
    prompts = [text[:cut] + text[300:340] for cut in (61, 140, 203)] + [text[:61] + text[400:420]]
    requests = [
        Request(ids, SamplingParams(0.8, seed=seed), outrider.StopConditions(16))
        for seed, ids in enumerate(prompts)
    ]

    def written(prefixes):
        run = EngineRun(pair.engine, 2, 400, prefixes=prefixes)
        run.submit_all(requests)
        texts = [[] for _ in prompts]
        while not run.done:
            for block in run.step():
                texts[block.request_id] += block.token_ids
        return texts, sum(map(run.cached, range(len(prompts))))

    expected, nothing = written(None)
    assert nothing == 0
    prefixes = PrefixCache(1 << 28)
    found, copied = written(prefixes)
    assert found == expected
    assert copied >= 61 + 140
    assert written(prefixes) == (expected, sum(len(prompt) - 1 for prompt in prompts))


def test_a_model_in_half_precision_says_what_it_pads(monkeypatch):
    """What is found depends on the processor: here, that it is found and where it shows."""
    monkeypatch.setattr(build, "_found", lambda: "not here")  # compiled attention pads nothing
    packed = linear.can_pack(torch.bfloat16)
    target = outrider.load(dtype="bfloat16", threads=1, pack_weights=packed).engine.target
    heads, size = target.runner.kv_heads, target.runner.size
    found = batch_invariance._found
    assert any(f"{min(heads, 4)}x{size}-torch.bfloat16" in name for name in found)
    assert target.rounding.skipped is not None
    assert target.width(1000) == target.rounding.width(1000) >= 1000
