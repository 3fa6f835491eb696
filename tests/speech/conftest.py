"""A tiny Whisper, loaded once."""

import pytest
import whispers

import outrider


def loaded(**changes):
    """A speculator of a tiny Whisper in float32, nothing measured."""
    english = changes.pop("english", False)
    model = whispers.whisper(english=english)
    return outrider.load(
        model,
        tokenizer=whispers.tokenizer(english),
        dtype="float32",
        threads=1,
        packed=False,
        **{"drafter": "root"} | changes,
    )


@pytest.fixture(scope="session")
def tiny():
    """A multilingual one, decoded plainly."""
    return loaded()


@pytest.fixture(scope="session")
def english():
    """One that knows English alone."""
    return loaded(english=True)
