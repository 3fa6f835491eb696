"""Noise, the draft-step sampler and the laws of what the CPU path draws."""

import numpy as np
import pytest
import torch
from cases import DTYPES

from outrider import noise, ops
from outrider.noise import Purpose
from outrider.ops.cpu import BACKEND as CPU, keys
from outrider.ops.cpu.law_slices import DrawWithoutReplacement, pick
from outrider.ops.reference import draws as reference
from outrider.tree import branching, children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores


def _laws(vocab, dtype, temperature=1.0, floor=False, batch=2, rows=2, seed=0):
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch, rows, vocab, generator=rng) * 2).to(dtype)
    limits = logits.float().topk(5, -1).values[..., -1] if floor else None
    return Laws(logits, torch.full((batch,), 1 / temperature), limits, greedy="none")


def test_words_are_the_references():
    for seed, position in ((0, 0), (-5, 3), (2**62, 10**6)):
        for purpose in Purpose:
            theirs = noise.stream(torch.tensor(seed), torch.tensor(position), purpose)
            key = keys.stream(seed, position, purpose)
            assert key == int(theirs) % 2**64
            assert [keys.uniform(key, i) for i in range(4)] == noise.uniforms(theirs, 4).tolist()
            race = noise.exponentials(theirs, 50).log()
            np.testing.assert_allclose(keys.log_race(key, 50), race, rtol=2e-6, atol=1e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [32, 65])
@pytest.mark.parametrize("change", [{}, {"temperature": 0.6}, {"floor": True}])
def test_sampler_kernel_equals_the_reference(kernels, dtype, vocab, change):
    laws = _laws(vocab, DTYPES[dtype], **change)
    streams = torch.arange(4).view(2, 2) * 977
    with ops.use("reference"):
        tokens, drawn = ops.sample(laws, streams)
    ours, kept = kernels.ops["sample"](laws, streams)
    assert ours.tolist() == tokens.tolist()
    torch.testing.assert_close(kept.lse_BR, drawn.lse_BR, atol=2e-6, rtol=1e-6)
    _, there, _ = kernels.ops["several"](laws, streams, 1)
    assert there.all()


def test_greedy_rows_take_the_lowest_argmax(kernels):
    laws = _laws(40, torch.float32)
    laws.logits_BRV[0, 0, [7, 20]] = 9.0
    laws = laws._replace(inverse_temperature_B=torch.tensor([torch.inf, 1.0]), greedy="some")
    streams = torch.zeros(2, 2, dtype=torch.int64)
    for sample in (kernels.ops["sample"], CPU.ops["sample"], reference.sample):
        tokens, drawn = sample(laws, streams)
        assert int(tokens[0, 0]) == 7
        assert drawn.lse_BR is None or float(drawn.lse_BR[0, 0]) == 0


@pytest.mark.parametrize("scale", [1.0, 200.0, -200.0, 1e-3])
def test_weights_of_any_range_are_the_laws(scale):
    """exp(z) may leave float32; the draws' own weights are the law all the same."""
    laws = _laws(50, torch.float32)
    laws = laws._replace(logits_BRV=laws.logits_BRV + scale)
    _, drawn = CPU.ops["sample"](laws, torch.zeros(2, 2, dtype=torch.int64))
    for row, (values, sums) in enumerate(zip(drawn.host.values, drawn.host.sums, strict=True)):
        ours = torch.from_numpy(values) / torch.tensor(sums)[:, None]
        torch.testing.assert_close(ours, ops.probs(laws)[:, row], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 2048, 2049, 5000])
def test_inverse_transform_never_picks_a_token_without_weight(size):
    weights = np.zeros(size, dtype=np.float32)
    weights[size // 2] = 0.5
    for uniform in (0.0, 0.3, 1 - 2**-53):
        index, mass = pick(weights, uniform)
        assert index == size // 2
        assert mass == pytest.approx(0.5)
    assert pick(np.ones(size, dtype=np.float32), 1 - 2**-53)[0] == size - 1


@pytest.mark.parametrize("size", [1, 7, 128, 129, 5000])
def test_an_urn_gives_every_token_once_and_keeps_the_digits_of_small_weights(size):
    weights = np.full(size, 1e-12, dtype=np.float32)
    weights[size // 3] = 1.0
    urn = DrawWithoutReplacement(weights)
    seen = []
    for k in range(min(size, 40)):
        token, weight, mass = urn.draw(0.999 if k else 0.5)
        assert weight == pytest.approx(1e-12 if k else 1.0)
        assert mass == pytest.approx(1e-12 * (size - k) if k else 1.0, rel=1e-5)
        seen.append(token)
        urn.take(token)
    assert len(set(seen)) == len(seen)
    for token in range(size):
        urn.take(token)
    assert urn.draw(0.3)[1:] == (0.0, 0.0)


@pytest.mark.parametrize("several", [reference.several, CPU.ops["several"]])
def test_placed_tokens_leave_before_the_draw_and_what_lacks_is_told(several):
    laws = _laws(40, torch.float32, floor=True)  # five tokens a row
    streams = torch.arange(4).view(2, 2)
    tokens, there, left = several(laws, streams, 1, [2, 0])
    assert tokens.shape == there.shape == (2, 2, 3)
    best = laws.logits_BRV.topk(5, -1).indices
    assert tokens[:, 0, 1:].tolist() == best[:, 0, :2].tolist()
    assert there.tolist() == [[[True] * 3, [True, False, False]]] * 2
    gone = torch.zeros_like(laws.logits_BRV, dtype=torch.bool)
    gone[:, 0] = gone[:, 0].scatter(-1, best[:, 0, :2], True)
    assert torch.equal(left.logits_BRV, laws.logits_BRV.masked_fill(gone, -torch.inf))
    tokens, there, _ = several(laws, streams, 7)
    assert there.sum(-1).eq(5).all()
    assert tokens[..., :5].sort().values.tolist() == best.sort().values.tolist()


def test_keys_of_a_few_rows_are_those_of_many():
    seeds, starts = torch.tensor([3, -(2**61), 2**62]), torch.tensor([0, 7, 10**6])
    few = ops.streams(seeds, starts, Purpose.DRAFT, 6)
    assert few.tolist() == noise.split(noise.stream(seeds, starts, Purpose.DRAFT), 6).tolist()


def _g(counts, law):
    counts = np.asarray(counts, float)
    expected = np.asarray(law) * counts.sum()
    seen = counts > 0
    return 2 * float((counts[seen] * np.log(counts[seen] / expected[seen])).sum())


def _limit(freedom):
    from scipy.stats import chi2

    return float(chi2.isf(1e-5, freedom))


@pytest.mark.parametrize("op", ["chain", "block", "tree"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_first_two_tokens_follow_the_target(op, backend):
    """G-test of what is emitted over fresh drafts, for the CPU's own draws and the reference's."""
    from outrider import verifiers
    from outrider.engine import step

    vocab, batch = 5, 6000
    counts = (2, 1) if op == "tree" else (1, 1)
    tree, draws = branching(counts), children(counts)
    rng = torch.Generator().manual_seed(1)
    target = torch.randn(1, 1, vocab, generator=rng).expand(batch, tree.nodes, -1).contiguous()
    guess = torch.randn(1, 1, vocab, generator=rng).expand(batch, tree.nodes, -1).contiguous()
    law, q = target[0, 0].softmax(-1), guess[0, 0].softmax(-1)
    tokens = torch.zeros(batch, tree.nodes, dtype=torch.int64)
    for node in range(tree.nodes):
        kids = [k for k in draws[0, node].tolist() if k >= 0]
        if kids:
            tokens[:, kids] = torch.multinomial(q.expand(batch, -1), len(kids), generator=rng)
    row = torch.where(draws >= 0, torch.arange(tree.nodes)[None, :, None], -1)
    ones = torch.ones(batch)
    draft = Draft(
        tokens, tree, draws, torch.full_like(draws, 1), row,
        Laws(guess, ones, greedy="none"), frozenset({DrawKind.WITHOUT}),
    )  # fmt: skip
    scores = Scores(Laws(target, ones, greedy="none"))
    keyed = Draws(torch.arange(batch) * 31, torch.zeros(batch, dtype=torch.int64))
    rule = verifiers.get("block" if op == "block" else "rejection")
    with ops.use(backend):
        verdict = step.run_kernel(rule, draft, scores, keyed)
    path, count = verdict.path_BD, verdict.count_B
    first = torch.where(count > 0, tokens.gather(1, path[:, :1].clamp(min=0))[:, 0], verdict.next_B)
    assert _g(torch.bincount(first, minlength=vocab), law) < _limit(vocab - 1)
    second = torch.where(
        count > 1, tokens.gather(1, path[:, 1:2].clamp(min=0))[:, 0], verdict.next_B
    )[count > 0]
    assert _g(torch.bincount(second, minlength=vocab), law) < _limit(vocab - 1)


def test_cpu_sampler_follows_the_law():
    laws = _laws(9, torch.float32, batch=1, rows=1)
    many = laws._replace(logits_BRV=laws.logits_BRV.expand(1, 20000, -1))
    tokens, _ = CPU.ops["sample"](many, torch.arange(20000)[None] * 7)
    counts = torch.bincount(tokens[0], minlength=9)
    assert _g(counts, ops.probs(laws)[0, 0]) < _limit(8)
