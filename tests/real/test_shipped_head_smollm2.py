"""SmolLM2-135M-Instruct with its shipped head: the text is plain decoding's, and steps are saved.

The folder `smollm2` of OUTRIDER_MODELS. Half a minute on one core.
"""

import pytest

import outrider
from outrider import SamplingParams, Stop
from outrider.models import LlamaRunner, TransformersRunner, llama
from outrider.models.cpu_kernels import build

pytestmark = pytest.mark.real

ASKED = (
    "Why do leaves change their colour in autumn?",
    "Tell me a story about a clockmaker who has lost her watch.",
    "What should one know before adopting a cat?",
)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def speculator(smollm2, request):
    how = {"dtype": request.param, "draft_dtype": "target"}
    if request.param == "int8":  # the head, beside a target in bfloat16
        if build.unbuilt():
            pytest.skip(f"no kernels: {build.unbuilt()}")
        how = {"dtype": "bfloat16"}  # as its folder says
    fixed = {"threads": 1, "pack_weights": True, "planner": "fixed", "num_speculative_tokens": 3}
    return outrider.load(smollm2, draft="smollm2-head", **fixed, **how)


def test_texts_are_plain_decodings_in_fewer_steps(speculator):
    chats = [[{"role": "user", "content": each}] for each in ASKED]
    found = [
        [one.generate(chat, SamplingParams(temperature=0), Stop(96)) for chat in chats]
        for one in (speculator, speculator.plain())
    ]
    drafted, plain = ([each.completions[0].token_ids for each in some] for some in found)
    assert drafted == plain
    tokens = sum(map(len, drafted))
    steps = sum(each.stats.steps for each in found[0])
    print(f"{tokens / steps:.2f} tokens a step")
    assert tokens / steps > 1.6


def test_the_states_of_transformers_own_forward_are_those_that_the_head_was_trained_on(
    smollm2, monkeypatch
):
    """Beside a GPU, or a family without a lean runner, a head reads what transformers hands out."""
    how = {"threads": 1, "dtype": "float32", "pack_weights": False, "planner": "fixed"}
    chats = [[{"role": "user", "content": each}] for each in ASKED]
    lengths = []
    for runner in (LlamaRunner, TransformersRunner):
        speculator = outrider.load(smollm2, draft="smollm2-head", num_speculative_tokens=3, **how)
        assert type(speculator.engine.target.runner) is runner
        told = [
            speculator.generate(chat, SamplingParams(temperature=0), Stop(96)) for chat in chats
        ]
        tokens = sum(len(each.completions[0].token_ids) for each in told)
        lengths.append(tokens / sum(each.stats.steps for each in told))
        print(f"{runner.__name__}: {lengths[-1]:.3f} tokens a step")
        monkeypatch.setattr(llama, "fits", lambda model: False)
    assert lengths[1] == pytest.approx(lengths[0], rel=0.01)


def test_with_nothing_asked_rows_draft_by_copies_or_with_the_head(smollm2):
    speculator = outrider.load(smollm2, draft="smollm2-head", threads=1, dtype="bfloat16")
    assert speculator.engine.drafter.name == "either"
    asked = "Copy this list five times: red, green, blue, violet, orange, brown, grey."
    chats = [[{"role": "user", "content": each}] for each in (ASKED[0], asked)]
    ends = SamplingParams(temperature=0), Stop(96)
    for chat in chats:
        drafted, plain = (one.generate(chat, *ends) for one in (speculator, speculator.plain()))
        assert drafted.completions[0].token_ids == plain.completions[0].token_ids
        assert drafted.stats.block_efficiency > 1.25  # how much is drafted follows from costs
    sampled = [
        speculator.generate(chats[0], SamplingParams(temperature=0.7, seed=3), Stop(64)).texts
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1]
