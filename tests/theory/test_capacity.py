"""Capacity on paper: the formula against sums by hand, and the command that prints it."""

import json
import math

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.costs import Curve, Sizes
from outrider.errors import ConfigurationError
from outrider.models.sources import ModelSource
from outrider.shipped import shipped
from outrider_lab.flops import sizes
from outrider_lab.theory import capacity
from outrider_lab.theory.capacity import Drafting, Machine

H100 = Machine(3.35e12, 600e12)
SEVEN = Sizes(14e9, 131e3, 7e9, layers=32)
SEVENTY = Sizes(140e9, 328e3, 70e9, layers=80)
RATES = ["--bandwidth", "3.35T", "--flops", "600T"]
NUMBERS = ["plan", "--model-bytes", "14G", "--kv-bytes", "131K", *RATES]


def but(option, value):
    """These with another value of one."""
    words = list(NUMBERS)
    words[words.index(option) + 1] = value
    return words


def test_a_step_is_the_longer_of_reading_and_computing():
    """7B on an H100: 4.18 ms of weights, 0.010 ms of cache a row, 0.023 ms a node."""
    read = 14e9 / 3.35e12 + 4 * 256 * 131e3 / 3.35e12
    computed = 64 * 5 * 14e9 / 600e12
    assert capacity.step(SEVEN, H100, 4, 5, 256) == pytest.approx(read)
    assert capacity.step(SEVEN, H100, 64, 5, 256) == pytest.approx(computed)
    core = H100._replace(overlaps=False, host=1e-3)
    both = 14e9 / 3.35e12 + 64 * 256 * 131e3 / 3.35e12 + computed
    assert capacity.step(SEVEN, core, 64, 5, 256) == pytest.approx(both + 1e-3)


@pytest.mark.parametrize(
    ("model", "machine", "context", "rows"),
    [
        (SEVEN, H100, 256, 39),
        (SEVEN, H100, 2048, 115),
        (SEVEN, H100, 8192, math.inf),
        (SEVENTY, H100._replace(devices=8), 256, 36),
        (SEVENTY, H100._replace(devices=8), 2048, 43),
    ],
)
def test_rows_from_which_a_step_is_compute_bound(model, machine, context, rows):
    """B* = W / (5 c - k L)."""
    found = capacity.compute_bound(model, machine, 5, context)
    assert found == rows or round(found) == pytest.approx(rows, abs=1)
    if math.isfinite(found):
        p = capacity.parts(model, machine)
        memory = p.weights + found * context * p.token
        assert memory == pytest.approx(found * 5 * p.node)


def test_measured_products_stand_for_reading_and_computing():
    """5 ms for one node of 1e9 parameters, 8 for 64: what lies between is on the line."""
    core = H100._replace(products=Curve.of({1: 5.0, 64: 8.0}), overlaps=False, host_node=1e-3)
    cached = 2 * 256 * 131e3 / 3.35e12
    for rows, nodes, ms in ((2, 1, 7 * (5 + 3 / 63)), (2, 32, 56.0)):
        found = capacity.step(SEVEN, core, rows, nodes, 256)
        assert found == pytest.approx(1e-3 * ms + cached + rows * nodes * 1e-3)
    drafting = core._replace(host_draft=0.5)
    assert capacity.step(SEVEN, drafting, 2, 1, 0) == capacity.step(SEVEN, core, 2, 1, 0)
    with_draft = capacity.step(SEVEN, drafting, 2, 3, 0) - capacity.step(SEVEN, core, 2, 3, 0)
    assert with_draft == pytest.approx(0.5)
    halved = core._replace(devices=2)
    assert capacity.step(SEVEN, halved, 2, 32, 0) == pytest.approx(0.028 + 0.064)


def test_all_reduces_are_two_a_layer_between_devices_alone():
    many = H100._replace(devices=8, all_reduce=12e-6)
    alone = many._replace(devices=1)
    assert capacity.parts(SEVENTY, many).reduces == pytest.approx(160 * 12e-6)
    assert capacity.parts(SEVENTY, alone).reduces == 0


def test_speculation_pays_up_to_the_rows_that_are_found():
    chain = Drafting(4, 0.8, Sizes(1e9, 0, 5e8))
    last = capacity.pays_until(SEVEN, H100, 256, chain)
    assert capacity.speedup(SEVEN, H100, last, 256, chain) > 1
    assert capacity.speedup(SEVEN, H100, last + 1, 256, chain) <= 1
    assert capacity.pays_until(SEVEN, H100, 256, chain._replace(acceptance=0.0)) == 0
    fat = SEVEN._replace(kv_bytes=131e5)
    assert capacity.pays_until(fat, H100, 8192, chain._replace(draft=None)) == math.inf


def test_sizes_of_a_folder():
    """The shipped target: everything is read but the table of embeddings, unless it is tied."""
    found = sizes(ModelSource(shipped("target"), "target"), "bfloat16")
    source = ModelSource(shipped("target"), "target").config
    wide = source.num_key_value_heads * (source.hidden_size // source.num_attention_heads)
    assert found.weight_bytes == 2 * found.parameters
    assert found.kv_bytes == source.num_hidden_layers * 2 * wide * 2
    read = 20328704 - (0 if source.tie_word_embeddings else 4096 * source.hidden_size)
    assert found.parameters == read


def test_the_command_prints_what_the_formula_says():
    done = CliRunner().invoke(app, [*NUMBERS, "--json", "--rows", "4,64", "--nodes", "1,5"])
    told = json.loads(done.stdout)
    at = told["contexts"][0]
    for b, line in zip(told["rows"], at["step_ms"], strict=True):
        for n, ms in zip(told["nodes"], line, strict=True):
            by_hand = capacity.step(SEVEN._replace(layers=0), H100, b, n, 256)
            assert ms == pytest.approx(1e3 * by_hand)
    assert told["contexts"][2]["compute_bound_from"]["5"] is None
    shown = CliRunner().invoke(app, NUMBERS).stdout
    assert "compute-bound from" in shown
    assert "never" in shown


def test_a_step_that_is_compute_bound_with_one_row_is_so_with_any():
    slow = [*but("--flops", "1G"), "--nodes", "1,9", "--contexts", "256"]
    shown = CliRunner().invoke(app, [*slow, "--acceptance", "0"]).stdout
    lines = [line.split() for line in shown.splitlines()]
    said = [[word for word in line if word != "│"] for line in lines]
    assert ["compute-bound", "from", "any", "any"] in said
    assert ["pays", "up", "to", "(at", "0)", "none"] in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", *RATES], "--model-bytes"),
        (["plan", "--model-bytes", "14G", "--kv-bytes", "131K", "--flops", "1T"], "--bandwidth"),
        (but("--flops", "fast"), "write --flops"),
        (but("--bandwidth", "0"), "above 0"),
        (but("--bandwidth", "-3T"), "above 0"),
        (but("--kv-bytes", "131X"), "above 0"),
        ([*NUMBERS, "--rows", "0"], "positive"),
        ([*NUMBERS, "--acceptance", "1.5"], "in \\[0, 1\\]"),
        ([*NUMBERS, "--dtype", "float32"], "--dtype"),
        (["plan", "no/such/model", *RATES], "cannot load"),
        ([*NUMBERS, "--measure"], "got --measure and no model"),
        (["plan", str(shipped("target")), "--measure", "--flops", "1T"], "--measure and --flops"),
        ([*NUMBERS, "--prompts", "mine.jsonl"], "got --model-bytes as well; leave one out"),
        (["plan", "model", "--prompts", "mine.jsonl", "--measure"], "got --measure as well"),
        (["plan", "model", "--prompts", "mine.jsonl", "--rows", "1,2"], "got --rows as well"),
        ([*NUMBERS, "--limit", "3"], "--limit is of --prompts"),
        ([*NUMBERS, "--draft-model", "draft"], "--draft-model is of --prompts"),
        ([*NUMBERS, "--threads", "1"], "--threads is of --measure and --prompts"),
    ],
)
def test_what_is_no_machine_is_said(words, says):
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigurationError)
    with pytest.raises(ConfigurationError, match=says):
        raise done.exception
