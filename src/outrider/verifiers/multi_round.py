"""Multi-round rejection (SpecInfer, Miao et al. 2024): i.i.d. children, one rejection test each.

    p^1 = p;  accept X_k iff u q(X_k) < p^k(X_k);  else p^{k+1} = norm((p^k - q)+)

It is `rejection` on children drawn with replacement, under the name of its paper and restricted to
the drafts of its paper, so that benchmarks can name it. A token that was refused once has
p^{k+1}(X_k) = 0, so a repeated draw is refused for sure; but it must be played, because it takes
its share from the residual: merged paths keep their multiplicity.
"""

from outrider.types import DrawKind
from outrider.verifiers.aliases import AliasedVerifier
from outrider.verifiers.rejection import Rejection

MULTI_ROUND = AliasedVerifier(
    "multi_round", Rejection(), frozenset({DrawKind.FIXED, DrawKind.WITH})
)
