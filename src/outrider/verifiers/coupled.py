"""Coupled sampling: the target's own Gumbel-max draw decides, the draft shared its noise.

The same rule as `match` (Daliri, Musco and Suresh 2025), restricted to placed and coupled children
so that a run which asks for it by name cannot be given a drafter that draws with noise of its own:
`match` would stay exact there but accept only sum p q. Of single coupled drafts it accepts
sum_x 1 / sum_v max(p_v/p_x, q_v/q_x), between (1 - TV) / (1 + TV) and 1 - TV.
"""

from outrider.types import DrawKind
from outrider.verifiers.aliases import AliasedVerifier
from outrider.verifiers.match import Match

COUPLED = AliasedVerifier("coupled", Match(), frozenset({DrawKind.FIXED, DrawKind.COUPLED}))
