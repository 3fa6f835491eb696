"""`outrider bench images`: pictures as tokens, the test of their laws, the command as a whole."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outrider.errors import ConfigurationError
from outrider_lab.images import digits, experiment, training
from outrider_lab.papers import app


def some(pixels):
    return experiment.Written([list(row) for row in pixels], 1, None, None, 1.0)


def test_the_digits_are_texts_of_a_class_and_64_pixels():
    texts = digits.texts()
    assert texts.shape == (1797, 65)
    assert set(texts[:, 0].tolist()) == {digits.class_token(n) for n in range(10)}
    assert texts[:, 1:].min() == 0
    assert texts[:, 1:].max() == 15
    first = digits.picture(texts[0, 1:].tolist())
    assert first.shape == (8, 8)
    assert first[0, 2] == 5 / 15


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'outrider\[bench\]'"):
        digits.texts()


def test_the_energy_test_sees_other_laws_and_no_others():
    rng = np.random.default_rng(1)
    one, other = (some(rng.integers(16, size=(120, 64))) for _ in range(2))
    assert experiment.energy_test(one, other, 199) > 0.05
    dark = some(rng.integers(14, size=(120, 64)))
    assert experiment.energy_test(one, dark, 199) < 0.02


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Decoders that are trained in a second, kept in a cache of their own."""
    monkeypatch.setattr(training, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(training, "TARGET", replace(training.TARGET, hidden=32, layers=2, steps=40))
    monkeypatch.setattr(training, "DRAFT", replace(training.DRAFT, hidden=16, steps=40))
    return tmp_path


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scale", ["1", "2"])
def test_the_command_draws_pictures_and_counts_calls(small, scale):
    words = ["images", "--images", "20", "--out", str(small), "--guidance-scale", scale]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    tables = json.loads((small / "images.json").read_text())["tables"]
    plain, speculative, _ = tables["arms"]
    assert plain["target calls"] == 20 * 64
    assert speculative["plain's calls / its"] > 1.2
    assert speculative["mean acceptance length"] > 1.2
    assert speculative["energy test against plain, p"] > 0.01
    assert len(tables["by-row"]) == 8
    assert all(0 <= row["column 8"] <= 1 for row in tables["by-row"])
    assert (small / "images.png").stat().st_size > 10_000
    assert len(list((small / "cache").rglob("*.pt"))) == 2


def test_a_decoder_is_trained_once(small):
    size = training.DRAFT
    told = []
    first = training.decoder(size, digits.texts(), lambda *done: told.append(done))
    assert len(told) == size.steps
    again = training.decoder(size, digits.texts(), lambda *done: told.append(done))
    assert len(told) == size.steps
    for mine, its in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, its)
