"""What our kernels are measured against: never imported by a rule, never a default.

The kernels of Wagner et al. 2024 rewritten from its description, with a PyTorch tail. The sigmoid
variant is lossy and says so (`exact` is False).
"""

from outrider_lab.baselines.paper import PAPER_EXACT, PAPER_SIGMOID, Paper

__all__ = ["PAPER_EXACT", "PAPER_SIGMOID", "Paper"]
