"""benchmarks/verify.py: contestants are right before they are timed, and its GPU branch starts."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import contestants
import inputs
import timing
import verify

from outrider.types import Verdict


def test_every_exact_contestant_is_checked_and_a_wrong_one_ends_the_run():
    few = [one for one in contestants.on_cpu() if one.name in ("cpu, cold", "vLLM-like (PyTorch)")]
    found = verify.laws_of(few)
    assert set(found) == {"cpu, cold", "vLLM-like (PyTorch)"}
    wrong = contestants.Contestant("first draft always", lambda x: x.ids[:, 1:])
    with pytest.raises(SystemExit, match="first draft always"):
        verify.laws_of([wrong])


def test_a_kernel_that_tells_more_than_its_verdict_is_read_as_well():
    made = inputs.make(1, 2, 16, torch.float32, 0.4, 1, "cpu")
    verdict = Verdict(torch.tensor([[1, -1]]), torch.tensor([1]), torch.tensor([7]))
    first = made.ids[:, 1].tolist()
    assert contestants.first_token(verdict, made).tolist() == first
    assert contestants.first_token((verdict, torch.tensor([0])), made).tolist() == first


def test_contestants_that_cannot_run_are_named():
    missing = contestants.absent()
    if not torch.cuda.is_available():
        assert missing["kernels of outrider"] == "needs a CUDA device"
    names = {one.name for one in verify.contenders("cpu")}
    assert not names & set(missing)
    assert {"transformers", "PyTorch, no host read", "cpu, cold", "cpu, LSE kept"} <= names


@pytest.mark.slow
def test_the_gpu_branch_runs_up_to_the_device(monkeypatch):
    """Contestants, inputs and rows of a GPU run with kernels in the interpreter and no clock."""
    import os

    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter was not chosen before Triton was imported")
    made = []

    def small(batch, gamma, vocab, dtype, distance, seed, device, **more):
        assert device == "cuda"
        made.append((batch, gamma, dtype))
        return inputs.make(batch, min(gamma, 2), 40, dtype, distance, seed, **more)

    def once(runs, sets, repeats):
        tiny = {"median_us": 2.0, "p10_us": 1.0, "p90_us": 3.0, "host_us": 1.0}
        for run, capture in runs.values():
            if capture:
                run(sets - 1)
        return dict.fromkeys(runs, tiny)

    real = torch.zeros
    monkeypatch.setattr(verify, "make", small)
    monkeypatch.setattr(verify, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(timing, "on_gpu", once)
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: real(*a, **k))
    monkeypatch.setattr(verify, "DIAGONAL", [(1, 2, 151_936, "bf16"), (2, 2, 151_936, "bf16")])
    eager = [one for one in contestants.on_gpu() if not one.compiled]
    monkeypatch.setattr(contestants, "on_gpu", lambda: eager)
    rows = verify.measure_gpu(1, quick=True)
    names = {row["row"] for row in rows}
    expected = {one.name for one in eager} - set(contestants.absent()) - {"ideal sigmoid"}
    assert expected <= names, expected - names
    assert {"one kernel, LSE kept", "filters, kernels", "draft-step sampler"} <= names
    assert all(row["floor_us"] > 0 for row in rows if row["row"] in expected)
    assert made
    ragged = {row["row"] for row in rows if row["ragged"]}
    assert {"one kernel, LSE kept", "two kernels, cold", "block", "match"} <= ragged
    assert "transformers" not in ragged


def test_the_table_shows_what_the_file_holds():
    import table

    size = {"batch": 1, "gamma": 5, "vocab": 32_000, "dtype": "bf16", "forward_us": 90.0}
    document = {
        "hardware": "a card",
        "date": "today",
        "versions": {"torch": "2"},
        "absent": {"FlashInfer chain": "not installed"},
        "rows": [
            size | {"row": "transformers", "median_us": 300.0},
            size | {"row": "two kernels, LSE kept", "median_us": 10.0},
        ],
    }
    text = table.markdown(document, table.GPU_ROWS)
    assert "| 1, 5, 32,000, bf16 | mixed | 300 | 10 (30.0x) | 10.0 % |" in text
    assert "FlashInfer chain: not installed." in text
