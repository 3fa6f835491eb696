"""Tests of this folder run on models of the reader's own machine: OUTRIDER_MODELS names where."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models_directory():
    """The directory of models, each a folder that transformers can load."""
    named = os.environ.get("OUTRIDER_MODELS", "")
    if not named or not Path(named).is_dir():
        pytest.skip(f"needs real models: set OUTRIDER_MODELS to a directory of them; got {named!r}")
    return Path(named)
