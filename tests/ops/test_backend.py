"""Backends are chosen by device, by name, and never silently replaced when named."""

import pytest
import torch
from cases import Case, build

from outrider import ops
from outrider.errors import BackendUnavailable, UnknownName
from outrider.types import DrawKind


def test_devices_choose():
    with ops.use(None):
        if ops.explicit() is None:
            assert ops.chosen(torch.device("cpu")) == "cpu"
            assert ops.chosen(torch.device("meta")) == "reference"


def test_a_block_overrides_and_restores():
    before = ops.chosen(torch.device("cpu"))
    with ops.use("reference"):
        assert ops.chosen(torch.device("cpu")) == "reference"
        with ops.use("cpu"):
            assert ops.chosen(torch.device("cpu")) == "cpu"
        assert ops.chosen(torch.device("cpu")) == "reference"
    assert ops.chosen(torch.device("cpu")) == before


def test_unknown_names_are_refused():
    with pytest.raises(UnknownName, match="known: cpu, reference, triton"), ops.use("cuda"):
        pass


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setattr(ops, "_ENVIRONMENT", "reference")
    assert ops.chosen(torch.device("cpu")) == "reference"
    monkeypatch.setattr(ops, "_ENVIRONMENT", "fastest")
    with pytest.raises(UnknownName, match="fastest"):
        ops.chosen(torch.device("cpu"))


def test_the_reference_leaves_drafts_to_the_rule():
    draft, scores, draws = build(Case())
    with ops.use("reference"):
        assert ops.fused("chain", draft, scores, draws) is None
    with ops.use("cpu"):
        assert ops.fused("chain", draft, scores, draws) is not None


def test_a_named_backend_raises_where_the_automatic_choice_steps_aside():
    draft, scores, draws = build(Case(counts=(2,)))
    with ops.use("cpu"), pytest.raises(BackendUnavailable, match="the draft branches"):
        ops.fused("chain", draft, scores, draws)
    with ops.use(None):
        if ops.explicit() is None:
            assert ops.fused("chain", draft, scores, draws) is None
    coupled = draft._replace(kinds=frozenset({DrawKind.COUPLED}))
    with ops.use("cpu"), pytest.raises(BackendUnavailable, match="matching rule"):
        ops.fused("tree", coupled, scores, draws)


def test_triton_refuses_what_it_cannot_run(kernels):
    draft, scores, draws = build(Case())
    laws = scores.laws
    wide = scores._replace(laws=laws._replace(logits_BRV=laws.logits_BRV.double()))
    with ops.use("triton"), pytest.raises(BackendUnavailable, match="float64"):
        ops.fused("chain", draft, wide, draws)
    assert kernels.unsupported_reason(torch.device("meta")) is not None


def test_cpu_tensors_need_the_interpreter(kernels, monkeypatch):
    """Without it, asking for triton on a CPU is an error, not another backend."""
    monkeypatch.setattr("outrider.ops.triton._INTERPRETED", False)
    draft, scores, draws = build(Case())
    with ops.use("triton"):
        with pytest.raises(BackendUnavailable, match="needs CUDA tensors"):
            ops.fused("match", draft, scores, draws)
        with pytest.raises(BackendUnavailable, match="needs CUDA tensors"):
            ops.sample(scores.laws, torch.zeros(2, 4, dtype=torch.int64))


def test_a_missing_triton_is_an_error_when_named(monkeypatch):
    def absent(name):
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(ops, "import_module", absent)
    ops.load_backend.cache_clear()
    draft, scores, draws = build(Case())
    with ops.use("triton"), pytest.raises(BackendUnavailable, match="install triton"):
        ops.fused("chain", draft, scores, draws)
    monkeypatch.undo()
    ops.load_backend.cache_clear()
