"""The one-launch kernel against a float64 twin of its own sampling algorithm."""

import numpy as np
import pytest
from cases import Case, build, twin

from outrider import noise, ops
from outrider.noise import Purpose
from outrider.ops.cpu import keys
from outrider.types import DrawKind

BLOCK, TRIES = 32, 4


def _law(laws, b, row, vocab):
    law = np.zeros(vocab)
    found = ops.probs(laws._replace(logits_BRV=laws.logits_BRV.double()))[b, row].numpy()
    law[: len(found)] = found
    return law


def next_token(draft, scores, draws, b, count, rounds, part):
    """(token, which proposal) as the kernel finds them: hierarchy, thinning, race."""
    laws = scores.laws
    vocab = laws.logits_BRV.shape[-1]
    p, q = _law(laws, b, count, vocab), np.zeros(vocab)
    refused = count < draft.tree.max_depth and int(draft.draws_BNK[b, count, 0]) >= 0
    if refused and int(draft.kind_BNK[b, count, 0]) == DrawKind.FIXED:
        q[int(draft.tokens_BN[b, count + 1])] = 1
    elif refused:
        q = _law(draft.laws, b, int(draft.row_BNK[b, count, 0]), vocab)
    key = keys.stream(int(draws.seed_B[b]), int(draws.start_B[b]), Purpose.RESIDUAL)
    slices = -(-vocab // BLOCK)
    wide = np.zeros(slices * BLOCK)
    wide[:vocab] = p
    tiles = wide.reshape(slices, BLOCK // part, part)

    def pick(weights, u):
        cdf = np.cumsum(weights)
        return min(int((cdf <= u * cdf[-1]).sum()), len(weights) - 1)

    hot = bool(np.isinf(float(laws.inverse_temperature_B[b])))
    for t in range(0 if hot else TRIES * rounds):
        u = [keys.fine_uniform(key, 4 * t + w) for w in range(4)]
        at = pick(tiles.sum((1, 2)), u[0])
        sub = pick(tiles[at].sum(1), u[1])
        x = min(at * BLOCK + sub * part + pick(tiles[at, sub], u[2]), vocab - 1)
        if u[3] * p[x] < p[x] - q[x]:
            return x, t
    race = noise.residual_race(draws, vocab)[b].double().numpy()
    left = np.maximum(p - q, 0)
    return int(((left if left.sum() > 1e-7 else p) / race).argmax()), -1


SHAPES = [
    (1, 33, "fp32", 0.8),
    (3, 65, "fp32", 0.8),
    (4, 97, "bf16", 0.3),
    (3, 31, "fp16", 0.8),
    (5, 65, "bf16", 0.1),
    (2, 64, "fp32", 3.0),
    (3, 100, "fp16", 0.05),
    (4, 40, "fp32", 0.0),
]
CASES = [
    Case(seed=seed, counts=(1,) * depth, vocab=vocab, dtype=dtype, spread=spread)
    for seed, (depth, vocab, dtype, spread) in enumerate(SHAPES)
]
CASES += [Case(kept=True), Case(mask=True), Case(floor=True), Case(temperature=0.6)]
CASES += [Case(ragged=True), Case(hot="some"), Case(mixed=True), Case(kind=DrawKind.FIXED)]
CASES += [Case(batch=1, counts=(1, 1))]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_its_twin(kernels, case, rounds):
    from one_launch import chain_one_launch, one_shape

    draft, scores, draws = build(case)
    verdict, kept = chain_one_launch(draft, scores, draws, tries=TRIES, rounds=rounds)
    theirs = twin("chain", draft, scores, draws)
    assert verdict.path_BD.tolist() == theirs.path_BD.tolist()
    assert verdict.count_B.tolist() == theirs.count_B.tolist()
    _, part, _ = one_shape(case.vocab, scores.laws.logits_BRV.dtype, 1)
    for b, count in enumerate(theirs.count_B.tolist()):
        token, tried = next_token(draft, scores, draws, b, count, rounds, part)
        assert (int(verdict.next_B[b]), int(kept[b])) == (token, tried)
