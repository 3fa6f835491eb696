"""Recursive rejection over a tree on a CPU (Jeon et al. 2024, algorithm 6, slips mended).

At a node every child is tested in draw order against what its earlier siblings left over:

    accept c iff u q(c) < left(c);  on refusal left <- norm((left - q)+), q <- q without c

Only the laws of visited nodes are normalised.
"""

from outrider.ops.cpu.rejection_walk import RejectionWalk
from outrider.types import Draft, Draws, Scores, Verdict


def verify(draft: Draft, scores: Scores, draws: Draws, *, overlap: bool = True) -> Verdict:
    """Path, count, next token and the first draw's overlap at each depth that was examined."""
    walk = RejectionWalk(draft, scores, draws)
    results = []
    for b in range(walk.batch):
        path: list[int] = []
        shared: list[float] = []
        node, going = 0, True
        while going:
            walk.enter(b, node)
            going = False
            for k in range(walk.most if len(path) < walk.depth else 0):
                kid = walk.kid(b, node, k)
                if kid < 0:
                    continue
                drawn = walk.guess(b, node, k)
                if overlap and k == 0:
                    shared.append(walk.overlap())
                if walk.uniform(b, node, k) * drawn < walk.owed(b, kid):
                    path.append(kid)
                    node, going = kid, True
                    break
                walk.refuse(b, last=False)
            if overlap and len(shared) < len(path):
                shared.append(float("nan"))
        results.append((path, walk.draw(b, node), shared))
    return walk.verdict(results, overlap)
