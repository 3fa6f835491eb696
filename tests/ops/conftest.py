"""Kernels in the interpreter: tiny slices, and a reason when they cannot run here."""

import os

import pytest


def why_not():
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton is not installed: {error}"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "the interpreter was not chosen before Triton was imported"
    return None


@pytest.fixture
def kernels():
    """The Triton backend with slices of 32 tokens, so that small vocabularies have many."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    from outrider.ops.triton import BACKEND, launch

    launch._forced.append((32, 4))
    yield BACKEND
    launch._forced.pop()
