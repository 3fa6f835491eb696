"""What our kernels are measured against: never imported by a rule, never a default.

paper   the two kernels of Wagner et al. 2024 rewritten from its description, with a PyTorch tail
ideal   the sigmoid approximation on our own skeleton: one launch, no normaliser, no host read

The sigmoid variants are lossy and say so (`exact` is False).
"""

from outrider.ops.baselines.paper import PAPER_EXACT, PAPER_SIGMOID, Paper

__all__ = ["PAPER_EXACT", "PAPER_SIGMOID", "Paper"]
