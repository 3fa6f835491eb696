# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""What the target still owes at a node after its first draws were refused, slice by slice.

    left(x) = (p(x) - sum_j c_j q_j(x))+,  0 at the tokens of the refused draws
    rest(x) = q(x) of the draws without replacement, 0 at those of them that were refused

Taking positive parts once, at the end, is the same as after every draw, because only what is not
negative is taken away. So a refused draw is one number c_j, and no residual row is stored. The sum
of `rest` is the mass that the next draw without replacement came from; summed over the tokens that
are left it keeps its precision where 1 - sum of the gone would lose it.
"""

import triton
import triton.language as tl

from outrider.ops.triton.law_slices import law
from outrider.ops.triton.residual_race import FIXED, WITHOUT
from outrider.ops.triton.tables import kid_of, kind_of, row_of, token_of


@triton.jit
def left_over(
    target, drafted, tables, taken, b, node, refused, offs,
    TARGET_FLOOR: tl.constexpr, DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """(left, rest) at the tokens `offs`; `taken` points to the c_j of this node."""
    left = law(target, b, node, offs, TARGET_FLOOR)
    rest = left * 0.0
    if HAS_DRAFT:  # neighbours that share a law row are taken away together
        row = b * 0 - 1
        share = 0.0
        j = refused * 0
        while j < refused:
            drawn = kind_of(tables, b, node, j) != FIXED
            if drawn & (kid_of(tables, b, node, j) >= 0):
                other = row_of(tables, b, node, j)
                if (other != row) & (row >= 0):
                    left -= share * law(drafted, b, row, offs, DRAFT_FLOOR)
                    share = 0.0
                share += tl.load(taken + j)
                row = other
            j += 1
        if row >= 0:
            last = law(drafted, b, row, offs, DRAFT_FLOOR)
            left = tl.maximum(left - share * last, 0.0)
            rest += last
    j = refused * 0
    while j < refused:
        kid = kid_of(tables, b, node, j)
        gone = (kid >= 0) & (offs == token_of(tables, b, kid))
        left = tl.where(gone, 0.0, left)
        rest = tl.where(gone & (kind_of(tables, b, node, j) == WITHOUT), 0.0, rest)
        j += 1
    return left, rest


@triton.jit
def drawn_at(drafted, tables, b, node, k, rest, DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr):
    """The probability with which draw k gave its token, when `rest` of its law was left."""
    q = 1.0
    if HAS_DRAFT:
        kind = kind_of(tables, b, node, k)
        if kind != FIXED:
            token = token_of(tables, b, kid_of(tables, b, node, k))
            q = law(drafted, b, row_of(tables, b, node, k), token, DRAFT_FLOOR)
            q = tl.where(kind == WITHOUT, q / tl.maximum(rest, 1e-30), q)
    return q
