"""The replacement inside assisted generation: called, exact, same prefix, refused where unknown."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import (
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation import utils

from outrider.errors import BackendUnavailable
from outrider_lab.baselines import assisted_generation as fast

FUNCTION, ORIGINAL = utils._speculative_sampling, fast.theirs()
VOCAB = 48


def _ready(model):
    config = model.generation_config
    config.pad_token_id, config.eos_token_id = 0, None
    config.top_k = 0
    return model.eval()


def _llama(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return _ready(LlamaForCausalLM(config))


def _t5(seed):
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _ready(T5ForConditionalGeneration(config))


def _whisper(seed):
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=10, max_target_positions=64, num_mel_bins=4,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.generation_config.decoder_start_token_id = 1
    return _ready(model)


PAIRS = {
    "llama": (_llama, lambda: {"input_ids": torch.tensor([[3, 5, 7]])}),
    "t5": (_t5, lambda: {"input_ids": torch.tensor([[3, 5, 7]])}),
    "whisper": (_whisper, lambda: {"input_features": torch.ones(1, 4, 20)}),
}


def _generate(name, tokens=12, **more):
    make, inputs = PAIRS[name]
    target, assistant = make(0), make(1)
    return GenerationMixin.generate(
        target, **inputs(), assistant_model=assistant, do_sample=True, max_new_tokens=tokens, **more
    )


@pytest.mark.parametrize("name", PAIRS)
def test_assisted_generation_calls_the_replacement(name):
    with fast.patched() as calls:
        torch.manual_seed(3)
        text = _generate(name)
    assert calls.count > 0
    assert 0 <= calls.accepted <= calls.drafted
    assert text.shape[1] > 10
    assert utils._speculative_sampling is FUNCTION


def test_patch_and_unpatch_nest():
    outer = fast.patch()
    with fast.patched() as inner:
        assert inner is outer
        assert utils._speculative_sampling is fast.speculative_sampling
    assert utils._speculative_sampling is fast.speculative_sampling
    fast.unpatch()
    fast.unpatch()
    assert utils._speculative_sampling is FUNCTION


def _inputs(seed, gamma=4, vocab=VOCAB, spread=0.7, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    target = torch.randn(1, gamma + 1, vocab, generator=rng) * 2
    draft = target[:, :gamma] + spread * torch.randn(1, gamma, vocab, generator=rng)
    ids = torch.multinomial(draft[0].softmax(-1), 1, generator=rng).T
    prompt = torch.zeros(1, 3, dtype=torch.int64)
    return torch.cat([prompt, ids], 1), draft.to(dtype), gamma, target.to(dtype)


@pytest.mark.parametrize("weight", [None, 0.5])
@pytest.mark.parametrize("gamma", [1, 5])
def test_accepts_the_same_prefix_for_the_same_uniforms(gamma, weight):
    for seed in range(60):
        inputs = _inputs(seed, gamma)
        torch.manual_seed(seed)
        theirs, n = ORIGINAL(*inputs, assistant_ensemble_weight=weight)
        torch.manual_seed(seed)
        ours, m = fast.speculative_sampling(*inputs, assistant_ensemble_weight=weight)
        assert int(n) == int(m)
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours[:, :n], theirs[:, :n])


def test_masked_logits_never_come_out():
    ids, draft, gamma, target = _inputs(1)
    target[:, :, ::3] = -torch.inf
    draft[:, :, 1::3] = -torch.inf
    for seed in range(40):
        torch.manual_seed(seed)
        valid, _ = fast.speculative_sampling(ids, draft, gamma, target)
        assert bool((valid % 3 != 0).all())


def test_equal_laws_accept_everything():
    ids, _, gamma, target = _inputs(2)
    valid, n = fast.speculative_sampling(ids, target[:, :gamma].clone(), gamma, target)
    assert int(n) == gamma
    assert valid.shape == (1, gamma + 1)


def test_first_token_follows_the_target():
    """G-test of the first emitted token over fresh drafts."""
    vocab, trials = 7, 6000
    rng = torch.Generator().manual_seed(5)
    target = torch.randn(1, 2, vocab, generator=rng)
    draft = torch.randn(1, 1, vocab, generator=rng)
    counts = torch.zeros(vocab)
    torch.manual_seed(0)
    for _ in range(trials):
        ids = torch.multinomial(draft[0, 0].softmax(-1), 1)[None]
        valid, _ = fast.speculative_sampling(ids, draft, 1, target)
        counts[valid[0, 0]] += 1
    expected = target[0, 0].softmax(-1) * trials
    g = 2 * (counts * (counts / expected).log()).nan_to_num().sum()
    assert float(g) < 27.9  # chi-square, 6 degrees of freedom, p = 1e-4


def test_text_of_a_seed_differs_only_in_the_drawn_tokens():
    torch.manual_seed(11)
    plain = _generate("llama", tokens=1)
    with fast.patched():
        torch.manual_seed(11)
        assert _generate("llama", tokens=1).shape == plain.shape


def test_batches_are_refused():
    ids, draft, gamma, target = _inputs(0)
    with pytest.raises(ValueError, match="one sequence at a time"):
        fast.speculative_sampling(ids.repeat(2, 1), draft, gamma, target)


@pytest.mark.parametrize("function", [None, lambda input_ids, logits: None])
def test_an_unknown_version_is_refused(monkeypatch, function):
    fake = SimpleNamespace() if function is None else SimpleNamespace(**{fast.NAME: function})
    monkeypatch.setattr(fast, "_utils", fake)
    with pytest.raises(BackendUnavailable, match=transformers.__version__):
        fast.patch()


def earlier(
    candidate_input_ids, candidate_logits, candidate_length, new_logits, is_done_candidate,
    assistant_ensemble_weight=None,
):  # fmt: skip
    """The signature of transformers 5.17, where the text may end with the drafted tokens."""
    four = candidate_input_ids, candidate_logits, candidate_length, new_logits
    valid, n = ORIGINAL(*four, assistant_ensemble_weight=assistant_ensemble_weight)
    all_of_them = is_done_candidate and n == candidate_length
    return (valid[:, :-1], n - 1) if all_of_them else (valid, n)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("weight", [None, 0.5])
def test_a_version_that_tells_of_a_draft_s_end(monkeypatch, done, weight):
    """It passes that by position, and wants no token behind a draft that is accepted in full."""
    monkeypatch.setattr(utils, fast.NAME, earlier)
    assert fast.theirs()(*_inputs(0))[0].shape[1] >= 1
    ends = set()
    with fast.patched():
        for seed in range(60):
            inputs = _inputs(seed, 2, spread=0.2)
            torch.manual_seed(seed)
            theirs, n = earlier(*inputs, done, assistant_ensemble_weight=weight)
            torch.manual_seed(seed)
            ours, m = utils._speculative_sampling(*inputs, done, assistant_ensemble_weight=weight)
            assert int(n) == int(m)
            assert ours.shape == theirs.shape
            assert torch.equal(ours[:, :n], theirs[:, :n])
            ends.add((int(n), ours.shape[1]))
    assert ((1, 2) if done else (2, 3)) in ends


@pytest.mark.parametrize("seed", range(3))
def test_the_device_path_accepts_the_same_prefix_in_the_interpreter(seed):
    """What runs on CUDA, without CUDA: kernels in Triton's interpreter."""
    import os

    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter was not chosen before Triton was imported")
    ids, draft, gamma, target = _inputs(seed)
    torch.manual_seed(seed)
    valid, n = fast._on_device(ids, draft, target, gamma, None)
    torch.manual_seed(seed)
    theirs, m = ORIGINAL(ids, draft, gamma, target)
    assert int(n) == int(m)
    assert valid.shape == theirs.shape
    assert torch.equal(valid[:, :n], theirs[:, :n])


def test_the_shipped_pair_accepts_the_same_prefix_at_every_step(monkeypatch):
    """Both functions on every step of a real generation, with the same uniforms."""
    from outrider_lab.papers.wagner import generate
    from outrider_lab.papers.wagner_pairs import shipped_pair

    counts = []

    def both(*inputs):
        state = torch.get_rng_state()
        theirs, n = ORIGINAL(*inputs[:4])
        torch.set_rng_state(state)
        ours, m = fast.speculative_sampling(*inputs[:4])
        assert int(n) == int(m)
        assert torch.equal(ours[:, :n], theirs[:, :n])
        counts.append(int(n))
        return ours, m

    monkeypatch.setattr(utils, fast.NAME, lambda *a, **more: both(*a))
    text = generate(shipped_pair(1), 0, 30, 5, seed=4, heuristic=True)
    assert len(text) == 30
    assert len(counts) > 3
    assert sum(counts) > 0


def _recorded(prompts, tokens):
    """(draft logits, target logits) of every step of real generations of the shipped pair."""
    from outrider_lab.papers.wagner import WagnerCalls, generate, measured
    from outrider_lab.papers.wagner_pairs import shipped_pair

    steps = []

    def keep(ids, draft, length, target, assistant_ensemble_weight=None):
        steps.append((draft.clone(), target.clone()))
        return fast.speculative_sampling(ids, draft, length, target)

    pair = shipped_pair(prompts)
    with measured(keep, WagnerCalls()):
        for number in range(prompts):
            generate(pair, number, tokens, 4, seed=number)
    return steps


def _pooled(function, steps, repeats):
    """Conditional tests over everything that `function` emits on those steps, drafts drawn anew.

    A row of a step is a law of the target beside the draft's guess at it. Whatever was accepted
    before it, the token that a verification emits there has the target's law.
    """
    from outrider_lab.certify.distribution_tests import PooledTest

    pool = PooledTest()
    torch.manual_seed(3)
    for draft, target in steps:
        gamma = draft.shape[1]
        law, guess = target[0].softmax(-1), draft[0].softmax(-1)
        drafted = torch.multinomial(guess, repeats, replacement=True)  # [gamma, repeats]
        emitted = torch.full((repeats, gamma), -1)
        for i in range(repeats):
            valid, _ = function(drafted[:, i][None], draft, gamma, target)
            emitted[i, : valid.shape[1]] = valid[0, :gamma]
        for i in range(repeats):  # the bonus token has no guess beside it
            there = emitted[i : i + 1] >= 0
            noise = torch.rand(1, gamma)
            tokens = emitted[i : i + 1].clamp(min=0)
            pool.add(law[None, :gamma], guess[None], tokens, there, noise)
    return pool


def test_the_shipped_pair_is_answered_by_the_target_s_law():
    """T = 1, V = 4,096: recorded laws of real steps; the sigmoid must fail the same test."""
    from outrider_lab.baselines import PAPER_SIGMOID

    steps = _recorded(2, 16)
    assert len(steps) > 5
    ours = _pooled(fast.speculative_sampling, steps, 40)
    assert ours.tokens > 500
    tests = ours.results(1e-5, 0.9)
    assert all(test.passed for test in tests), tests
    lossy = _pooled(PAPER_SIGMOID, steps, 40)
    assert not all(test.passed for test in lossy.results(1e-5, 0.9))


@pytest.mark.slow
def test_texts_of_the_shipped_pair_follow_its_target():
    """What patched assisted generation writes, certified against the target's law."""
    from outrider.sampling.sampling_params import SamplingParams
    from outrider_lab.certify import Power, foreign
    from outrider_lab.papers.wagner import generate
    from outrider_lab.papers.wagner_pairs import shipped_pair

    pair = shipped_pair(6)
    texts = (prompt.arguments["input_ids"][0].tolist() for prompt in pair.prompts)
    numbers = {tuple(ids): i for i, ids in enumerate(texts)}
    count = iter(range(10**6))

    def write(prompts):
        return [generate(pair, numbers[tuple(p)], 24, 4, seed=next(count)) for p in prompts]

    power = Power(tokens=1_500, samples=32, new_tokens=24, rows=6, effect=0.1)
    with fast.patched() as calls:
        report = foreign(
            write, pair.target, list(numbers), SamplingParams(), power, draft=pair.draft
        )
    assert calls.count > 500
    assert report.verdict == "exact", report
