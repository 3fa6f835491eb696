"""Backends are chosen by device, by name, and never silently replaced when named."""

import os
import subprocess
import sys

import pytest
import torch
from cases import Case, build

from outrider import ops
from outrider.errors import BackendUnavailable, UnknownName
from outrider.ops import backend
from outrider.types import Kind


def test_devices_choose():
    with ops.use(None):
        if backend.explicit() is None:
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


def test_the_environment_chooses():
    code = "import torch; from outrider import ops; print(ops.chosen(torch.device('cpu')))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OUTRIDER_OPS": "reference"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "reference"


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
        if backend.explicit() is None:
            assert ops.fused("chain", draft, scores, draws) is None
    coupled = draft._replace(kinds=frozenset({Kind.COUPLED}))
    with ops.use("cpu"), pytest.raises(BackendUnavailable, match="matching rule"):
        ops.fused("tree", coupled, scores, draws)


def test_triton_refuses_what_it_cannot_run(kernels):
    draft, scores, draws = build(Case())
    laws = scores.laws
    wide = scores._replace(laws=laws._replace(logits_BRV=laws.logits_BRV.double()))
    with ops.use("triton"), pytest.raises(BackendUnavailable, match="float64"):
        ops.fused("chain", draft, wide, draws)
    assert kernels.unfit(torch.device("meta")) is not None


def test_cpu_tensors_need_the_interpreter():
    """Without it, asking for triton on a CPU is an error, not another backend."""
    pytest.importorskip("triton")
    code = (
        "import torch\nfrom outrider import ops\nfrom outrider.errors import BackendUnavailable\n"
        "from outrider.ops import backend\n"
        "with ops.use('triton'):\n"
        "    try:\n        backend.sampler(torch.device('cpu'))\n"
        "    except BackendUnavailable as error:\n        print('refused', error)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True
    )
    assert "refused" in run.stdout, run.stderr
