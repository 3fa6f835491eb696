"""The paper's kernels and the ideal sigmoid do what they say, and say that they are lossy."""

import pytest
import torch
from cases import Case, build

from outrider import noise, ops
from outrider_lab.baselines import PAPER_EXACT, PAPER_SIGMOID, Paper


def _logits(gamma=2, vocab=40):
    rng = torch.Generator().manual_seed(4)
    target = torch.randn(1, gamma + 1, vocab, generator=rng) * 2
    draft = target[:, :gamma] + torch.randn(1, gamma, vocab, generator=rng)
    target[..., ::9] = -torch.inf
    draft[..., 3::9] = -torch.inf
    return draft, target


def test_exactness_is_told():
    assert PAPER_EXACT.exact
    assert not PAPER_SIGMOID.exact


@pytest.mark.parametrize("paper", [PAPER_EXACT, PAPER_SIGMOID, Paper(True, -10.0, 10.0)])
def test_tile_kernel_equals_its_arithmetic(kernels, paper):
    draft, target = _logits()
    with ops.use("cpu"):
        theirs = paper.tables(draft, target)
    with ops.use("triton"):
        ours = paper.tables(draft, target)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("paper", [PAPER_EXACT, PAPER_SIGMOID])
def test_returns_what_transformers_expects(paper):
    draft, target = _logits(gamma=3)
    ids = torch.multinomial(draft[0].softmax(-1), 1).T
    for seed in range(20):
        torch.manual_seed(seed)
        valid, n = paper(ids, draft, 3, target)
        assert valid.shape == (1, int(n) + 1)
        assert torch.equal(valid[:, :n], ids[:, :n])
        assert torch.isfinite(target[0, int(n), valid[0, -1]])


def test_exact_accepts_as_transformers_does():
    from outrider_lab.baselines.assisted_generation import theirs

    draft, target = _logits(gamma=4)
    ids = torch.multinomial(draft[0].softmax(-1), 1).T
    for seed in range(40):
        torch.manual_seed(seed)
        _, n = PAPER_EXACT(ids, draft, 4, target)
        torch.manual_seed(seed)
        _, m = theirs()(ids, draft, 4, target)
        assert int(n) == int(m)


def test_the_papers_sigmoid_nearly_switches_the_rule_off():
    """A target logit 30 nats below the draft's: the exact ratio is 9e-14, the sigmoid's 0.994."""
    target, draft = torch.zeros(1, 2, 4), torch.zeros(1, 1, 4)
    target[0, 0, 1], draft[0, 0, 1] = -15.0, 15.0
    tau, *_ = Paper(True, -1e3, 1e3).tables(draft, target)
    assert float(tau[0, 0, 1]) == pytest.approx(0.9944, abs=5e-4)


def _squash(z, alpha, beta):
    s = torch.sigmoid((z - alpha) / (beta - alpha))
    return torch.where(z < alpha, 0.0, torch.where(z > beta, 1.0, s))


@pytest.mark.parametrize("bounds", [(-1e3, 1e3), (-10.0, 10.0)])
@pytest.mark.parametrize("seed", range(3))
def test_ideal_sigmoid_equals_its_arithmetic(kernels, seed, bounds):
    from ideal_sigmoid import EXACT, ideal_sigmoid

    assert not EXACT
    draft, scores, draws = build(Case(seed=seed, mask=seed == 1, vocab=50, spread=4.0))
    ours = ideal_sigmoid(draft, scores, draws, alpha=bounds[0], beta=bounds[1])
    z, zq = scores.laws.logits_BRV.double(), draft.laws.logits_BRV.double()
    p, q = _squash(z, *bounds), _squash(zq, *bounds)
    u = noise.accept_uniforms(draws, 4, 1)[..., 0].double()
    race = noise.residual_race(draws, 50).double()
    for b in range(2):
        n = 0
        tokens = draft.tokens_BN[b, 1:]
        while n < 3 and u[b, n] * q[b, n, tokens[n]] < p[b, n, tokens[n]]:
            n += 1
        merit = z[b, n].exp() / race[b] if n == 3 else (p[b, n] - q[b, n]).clamp(min=0) / race[b]
        assert int(ours.count_B[b]) == n
        assert int(ours.next_B[b]) == int(merit.argmax())
