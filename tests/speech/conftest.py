"""A tiny Whisper, loaded once."""

import pytest
import whispers


@pytest.fixture(scope="session")
def tiny():
    """A multilingual one, decoded plainly."""
    return whispers.loaded()


@pytest.fixture(scope="session")
def english():
    """One that knows English alone."""
    return whispers.loaded(english=True)
