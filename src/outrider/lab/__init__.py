"""Measuring: timed comparisons, the papers' experiments, and kernels to compare with."""
