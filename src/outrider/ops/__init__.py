"""Numerical operations behind one set of names; the PyTorch reference is the specification.

Each name runs on the backend in charge of its inputs' device (`outrider.ops.backend`), and in the
reference where that backend has no code of its own. Nothing outside this package asks which.

Draws, one stream of `outrider.noise` per key. Greedy rows take the most probable tokens instead, in
descending order:

    streams(seed_B, position_B, purpose, count)     keys [B, count]
    sample(law, keys_BR)                            tokens_BR, law
    several(law, keys_BR, count, placed=())         tokens_BRK, there_BRK or None (all), law
    independent(law, rows_Bc, keys_Bc)              tokens_Bc, there_Bc, law
    survivors(law, keys_BR, phi_BR, psi_BR, width)  Survivors (parent, token, phi, psi, each [B, w])
    merit(law, keys_BR)                             perturbed scores [B, R, V], the largest wins
    perturbed(law, race_BRV)                        the same with exponential noise that is given
    largest(scores_BRV, count)                      the tokens with the best scores, there_BRK
    greedily(law, tokens_BRK, there_BRK)            the best tokens in greedy rows, these in others
    stack(laws)                                     the laws of several levels as one

    likely(law, count, gap)                         the most probable tokens of each, as lists
    found_once(law)                                 the law, which keeps what is found in it

The law that a draw returns is the one to declare in the draft. It carries what the draw has
computed already (`Laws.lse_BR`, `Laws.host`), and lacks the tokens that were `placed`.

Verifying: `fused(op, draft, scores, draws)` is the verdict of a backend's kernel, or None where the
rule's own formula is to run (`outrider.verifiers.run_kernel`). `commit_tokens` cuts a step's block
at stop tokens, limits and faults. `warp` makes laws of logits; `floors` turns top-k, top-p and
min-p into thresholds.
"""

from torch import Tensor

from outrider.ops.backend import NAMES, VerifyKernel, chosen, dispatched, fused, use
from outrider.ops.reference import draws, walking
from outrider.ops.reference.draws import Survivors, greedily, largest, merit, perturbed
from outrider.ops.reference.probs import (
    draw,
    floors as reference_floors,
    probs,
    residual,
    scaled,
    select,
    stack,
)
from outrider.ops.reference.walking import follow
from outrider.row_params import SamplingRows
from outrider.types import Laws

assisted = dispatched(walking.assisted)
floors = dispatched(reference_floors)
found_once = dispatched(draws.found_once)
independent = dispatched(draws.independent)
likely = dispatched(draws.likely)
sample = dispatched(draws.sample)
commit_tokens = dispatched(walking.commit_tokens)
several = dispatched(draws.several)
streams = dispatched(draws.streams)
survivors = dispatched(draws.survivors)


def warp(logits_BRV: Tensor, sampling: SamplingRows) -> Laws:
    """Laws of raw logits under each row's sampling parameters: one place, run once per side."""
    filters = sampling.most_top_k or sampling.any_top_p or sampling.any_min_p
    return Laws(
        logits_BRV,
        sampling.inverse_temperature_B,
        floors(logits_BRV, sampling) if filters else None,
        greedy=sampling.greedy,
    )


__all__ = [
    "NAMES",
    "Survivors",
    "VerifyKernel",
    "assisted",
    "chosen",
    "commit_tokens",
    "draw",
    "floors",
    "follow",
    "fused",
    "greedily",
    "independent",
    "largest",
    "likely",
    "merit",
    "perturbed",
    "probs",
    "residual",
    "sample",
    "scaled",
    "select",
    "several",
    "stack",
    "streams",
    "survivors",
    "use",
    "warp",
]
