"""SmolLM2 cut for three processes (it has nine heads): the texts of one process."""

import pytest
import sharding

TEXTS = (
    "The largest planet of the solar system is",
    "def quicksort(items):",
    "Once upon a time there was a",
    "A recipe for bread: take",
)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_three_processes_write_the_texts_of_one(models_directory, temperature):
    """Coupled, float32; drafted by recall, which needs no model."""
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    load = {
        "target": str(models_directory / "smollm2"),
        "drafter": "recall",
        "dtype": "float32",
        "pack_weights": False,
        "planner": "fixed",
    }
    asked = {"load": load, "prompts": TEXTS, "tokens": 24, "temperature": temperature}
    whole = sharding.decoded(asked)
    told = sharding.started({**asked, "load": load | {"tensor_parallel": 3}}, 3)
    assert told["texts"] == whole["texts"]
    assert all(len(text) == 24 for text in told["texts"])


@pytest.mark.real
@pytest.mark.slow
def test_nine_heads_are_not_cut_in_two(models_directory):
    """transformers' own reason is told."""
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    load = {"target": str(models_directory / "smollm2"), "drafter": "recall", "tensor_parallel": 2}
    told, _ = sharding.forked({"load": load, "prompts": TEXTS[:1]})
    assert "UnsupportedModel" in told["error"]
