"""Token-level verification of a chain on a CPU (Leviathan et al. 2023, algorithm 1).

    accept x_i iff u_i q_i(x_i) < p_i(x_i)
    at the first refusal y ~ norm((p_i - q_i)+), after the last acceptance y ~ p

Laws are normalised lazily: position i is read only if all before it were accepted, and the row
where the walk stops is already in scratch when the residual is formed.
"""

from outrider.ops.cpu.rejection_walk import RejectionWalk
from outrider.types import Draft, Draws, Scores, Verdict


def verify(draft: Draft, scores: Scores, draws: Draws, *, overlap: bool = True) -> Verdict:
    """Path, count and next token; with `overlap` also sum min(p, q) at each examined position."""
    walk = RejectionWalk(draft, scores, draws)
    results = []
    for b in range(walk.batch):
        path: list[int] = []
        shared: list[float] = []
        node = 0
        while len(path) < walk.depth and (kid := walk.kid(b, node, 0)) >= 0:
            walk.enter(b, node)
            kept = None if overlap else walk.kept(b, node, kid)
            drawn = walk.guess(b, node, 0) if kept is None else kept
            if overlap:
                shared.append(walk.overlap())
            if walk.uniform(b, node, 0) * drawn < walk.owed(b, kid):
                path.append(kid)
                node = kid
                continue
            if kept is not None:
                walk.guess(b, node, 0)
            walk.refuse(b)
            break
        else:
            walk.enter(b, node)
        results.append((path, walk.draw(b, node), shared))
    return walk.verdict(results, overlap)
