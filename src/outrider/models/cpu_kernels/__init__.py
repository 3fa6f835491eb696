"""Kernels in C for CPUs, and how they come to be. Nothing is imported here: `build` starts to
compile before torch is imported."""
