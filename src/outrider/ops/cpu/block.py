"""Block verification of a chain on a CPU (Sun et al., ICLR 2025).

    r_0 = 1,  r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i))
    S_i = sum (r_i p_{i+1} - q_{i+1})+,  h_i = S_i / (S_i + 1 - r_i),  h_gamma = r_gamma
    tau = the largest i with u_i < h_i;  y ~ norm((r_tau p_{tau+1} - q_{tau+1})+), or p after gamma

One pass over both rows of every position until r reaches 0; the row at tau is read again. Rows that
the compiled kernel takes are verified by it, in the same bits (`compiled.py` says which those are).
"""

from collections.abc import Sequence

from outrider.ops.cpu import compiled
from outrider.ops.cpu.rejection_walk import RejectionWalk
from outrider.types import Draft, Draws, Scores, Verdict


def verify(draft: Draft, scores: Scores, draws: Draws, *, overlap: bool = True) -> Verdict:
    """Path, count and next token. u_i is the uniform of the draw that proposed x_i."""
    found = compiled.block(draft, scores, draws, overlap)
    if found is None:
        return walked(draft, scores, draws, overlap, range(scores.laws.logits_BRV.shape[0]))
    verdict = Verdict(*found[:4])
    if found.left:
        rest = walked(draft, scores, draws, overlap, found.left)
        for whole, part in zip(verdict, rest, strict=True):
            if whole is not None and part is not None:
                whole[found.left] = part
    return verdict


def walked(
    draft: Draft, scores: Scores, draws: Draws, overlap: bool, rows: Sequence[int]
) -> Verdict:
    """The verdicts of some rows, one law after another."""
    walk = RejectionWalk(draft, scores, draws)
    results = []
    for b in rows:
        chain: list[int] = []
        shared: list[float] = []
        node, reach = 0, 1.0
        ratios, best = [1.0], 0
        while len(chain) < walk.depth and (kid := walk.kid(b, node, 0)) >= 0 and reach > 0:
            walk.enter(b, node)
            drawn = walk.guess(b, node, 0)
            if overlap:
                shared.append(walk.overlap())
            if chain:  # at reach 1 the prefix is kept for certain
                keep = 1.0 if reach == 1 else _keep(walk.exceeds(reach), reach)
                if walk.uniform(b, chain[-2] if len(chain) > 1 else 0, 0) < keep:
                    best = len(chain)
            owed = walk.owed(b, kid)
            reach = min(1.0, reach * owed / drawn) if drawn > 0 else float(owed > 0)
            ratios.append(reach)
            chain.append(kid)
            node = kid
        ended = len(chain) >= walk.depth or walk.kid(b, node, 0) < 0
        if chain and ended:
            before = chain[-2] if len(chain) > 1 else 0
            if walk.uniform(b, before, 0) < reach:
                best = len(chain)
        path = chain[:best]
        node = path[-1] if path else 0
        walk.enter(b, node)
        if best < len(chain):
            walk.guess(b, node, 0)
            walk.refuse(b, ratios[best])
        results.append((path, walk.draw(b, node), shared[: best + 1]))
    return walk.verdict(results, overlap)


def _keep(excess: float, reach: float) -> float:
    bottom = excess + 1.0 - reach
    return excess / bottom if bottom > 0 else 1.0
