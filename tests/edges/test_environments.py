"""What the program around outrider has set, or closed, changes no answer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import outrider
from outrider import SamplingParams, Stop

HOW = (
    SamplingParams(0),
    SamplingParams(0.8, seed=3, top_p=0.9, repetition_penalty=1.2, logit_bias={11: 3.3}),
)
#: Functions of torch that make what `torch.set_default_dtype` says, where they are told nothing.
OF_FLOATS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}


def texts(speculator):
    return [speculator.generate("def f(x):", how, Stop(max_new_tokens=8)).texts for how in HOW]


@pytest.fixture
def plain(shipped):
    return texts(shipped)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def usual(request):
    """What tensors are made of where nothing is said: kernels write float32, past the end of half
    as many bytes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def test_another_default_dtype_changes_no_text(plain, shipped, usual):
    assert texts(shipped) == plain


def test_what_is_loaded_with_another_default_dtype_is_the_same(plain, usual):
    loaded = outrider.load(dtype="float32", threads=1, pack_weights=True, planner="fixed")
    assert texts(loaded) == plain


def made_of_floats(tree):
    """The calls in a module that make tensors of floats."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            filled = name == "full" and "inf" in ast.unparse(node.args[1])
            if (
                isinstance(owner, ast.Name)
                and owner.id == "torch"
                and (name in OF_FLOATS or filled)
            ):
                yield node


def test_every_tensor_of_floats_says_of_which():
    source = Path(outrider.__file__).parent
    told = {True: [], False: []}
    for path in sorted(source.rglob("*.py")):
        if path.is_relative_to(source / "testing"):
            continue
        for call in made_of_floats(ast.parse(path.read_text("utf-8"))):
            words = {word.arg for word in call.keywords}
            told["dtype" in words].append(f"{path.relative_to(source)}:{call.lineno}")
    assert told[False] == []
    assert len(told[True]) > 50


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_standard_streams_that_were_closed_lead_nowhere(tmp_path):
    """Else the next files have their numbers, and are written to as a terminal is."""
    program = f"""
import os
from outrider import cli
from outrider.cli import commands
commands.main = lambda: print("heard by nobody", flush=True)
cli.main()
places = [os.path.realpath(f"/proc/self/fd/{{number}}") for number in range(3)]
with open({str(tmp_path / "told")!r}, "w") as file:
    file.write(" ".join(places))
"""
    run = [sys.executable, "-W", "error", "-c", program]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *run], check=True, timeout=120)
    assert (tmp_path / "told").read_text() == "/dev/null /dev/null /dev/null"
