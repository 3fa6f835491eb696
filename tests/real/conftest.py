"""Tests of this folder run on models of the reader's own machine: OUTRIDER_MODELS names where."""

import os
from pathlib import Path

import annalog
import pytest


@pytest.fixture(scope="session")
def models_directory():
    """The directory of models, each a folder that transformers can load."""
    named = os.environ.get("OUTRIDER_MODELS", "")
    if not named or not Path(named).is_dir():
        pytest.skip(f"needs real models: set OUTRIDER_MODELS to a directory of them; got {named!r}")
    return Path(named)


def _folder(models, name):
    """One of them, or the test is skipped with its name."""
    if not (models / name).is_dir():
        pytest.skip(f"needs the folder {name} in {models}")
    return models / name


@pytest.fixture(scope="session")
def smollm2(models_directory):
    """SmolLM2-135M-Instruct."""
    return _folder(models_directory, "smollm2")


@pytest.fixture(scope="session")
def whisper(models_directory):
    """openai/whisper-base."""
    return _folder(models_directory, "whisper-base")


@pytest.fixture(scope="session")
def speech(models_directory):
    """Recordings with their texts: the Asterisk prompts, and LibriVox's in pocketsphinx."""
    return _folder(models_directory, "speech")


@pytest.fixture(scope="session")
def annalog_wheel(models_directory):
    """The wheel of annalog 1.0.6, which has the model in it."""
    found = annalog.wheel(models_directory)
    if found is None:
        pytest.skip(f"needs the wheel of annalog 1.0.6 in {models_directory / 'annalog'}")
    return found
