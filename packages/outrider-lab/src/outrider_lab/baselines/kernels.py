# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""The paper's kernel: tau(x) = min(1, p/q), a(x) = max(0, p - q), b = sum a, for every x.

Of every drafted row (Wagner et al. 2024, section 3.2); p and q are probabilities, or sigmoids of
logits.
"""

import triton
import triton.language as tl


@triton.jit
def squash(z, alpha, beta):
    """sigmoid((z - alpha) / (beta - alpha)); 0 below alpha, 1 above beta."""
    s = 1.0 / (1.0 + tl.exp(-(z - alpha) / (beta - alpha)))
    return tl.where(z < alpha, 0.0, tl.where(z > beta, 1.0, s))


@triton.jit
def paper_tile(
    zp, zq, ratio, rest, mass, vocab, alpha, beta, TILE: tl.constexpr, SIGMOID: tl.constexpr
):
    """One program per drafted token walks the vocabulary tile by tile. Grid (gamma, batch)."""
    i = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    gamma = tl.num_programs(0)
    p_row = (b * (gamma + 1) + i) * vocab
    q_row = (b * gamma + i) * vocab
    total = 0.0
    c = tl.program_id(0) * 0
    while c < vocab:
        offs = c + tl.arange(0, TILE)
        inside = offs < vocab
        p = tl.load(zp + p_row + offs, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(zq + q_row + offs, mask=inside, other=0.0).to(tl.float32)
        if SIGMOID:
            p = tl.where(inside, squash(p, alpha, beta), 0.0)
            q = tl.where(inside, squash(q, alpha, beta), 0.0)
        tau = tl.where(q > 0, tl.minimum(p / tl.where(q > 0, q, 1.0), 1.0), 0.0)
        a = tl.maximum(p - q, 0.0)
        tl.store(ratio + q_row + offs, tau, mask=inside)
        tl.store(rest + q_row + offs, a, mask=inside)
        total += tl.sum(a, axis=0)
        c += TILE
    tl.store(mass + b * gamma + i, total)
