"""What stands between products of layers with states, compiled: what torch's operators give, and
the same bits for a node whatever stands beside it."""

import gc
import weakref

import pytest
import torch
from recurrent_models import made

import outrider
from outrider import SamplingParams, Stop
from outrider.models.cpu_kernels import build, mixers, outer_product
from outrider.models.recurrent.norms import compile_norms
from outrider.models.recurrent.short_conv import over_windows
from outrider.models.recurrent.ssd import MixerScan

pytestmark = pytest.mark.skipif(build.unbuilt() is not None, reason=f"{build.unbuilt()}")
BF16 = torch.bfloat16
RING = 8


def windows(rows, nodes, taps, seed=0):
    """Places that are written now and places of before, some of them not there."""
    random = torch.Generator().manual_seed(seed)
    lines = (torch.arange(nodes) + 5) % RING
    places = torch.randint(0, RING, (rows, nodes, taps), generator=random)
    there = torch.rand(rows, nodes, taps, generator=random) > 0.2
    return mixers.Windows(places, there, lines.expand(rows, -1).contiguous())


def convolution(dtype, channels=40, taps=4, rows=2, nodes=3):
    random = torch.Generator().manual_seed(1)
    ring = torch.randn(rows, RING, channels, generator=random).to(dtype)
    projected = torch.randn(rows, nodes, 2 * channels, generator=random).to(dtype)
    weight = torch.randn(channels, taps, generator=random).to(dtype)
    bias = torch.randn(channels, generator=random).to(dtype)
    return ring, projected[..., channels:], weight, bias


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("channels", [16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_convolution_is_what_torchs_operators_give(dtype, channels, taps, activation):
    ring, x, weight, bias = convolution(dtype, channels, taps)
    where = windows(2, 3, taps)
    written = ring.clone()
    written[torch.arange(2)[:, None], where.lines_BQ] = x
    found = written[torch.arange(2)[:, None, None], where.places_BQK]
    found = (found * where.there_BQK[..., None]).permute(0, 3, 1, 2)
    expected = over_windows(found, weight, bias, activation).mT
    assert mixers.unsupported_reason(x.mT, weight, bias, activation) is None
    out = mixers.convolve(ring, where, x, weight, bias, activation)
    assert torch.equal(ring, written)
    if activation is None:
        assert torch.equal(out, expected)
    else:
        assert torch.allclose(out, expected, rtol=1e-6 if dtype != BF16 else 8e-3, atol=1e-6)


def test_a_convolution_without_a_kernel_says_why():
    _, x, weight, bias = convolution(torch.float32)
    refused = [
        (x.double(), weight, bias, None), (x.to(BF16), weight, bias, None),
        (x, weight, bias, "relu"), (x, weight[:8], bias, None), (x, weight, bias.double(), None),
    ]  # fmt: skip
    for given in refused:
        assert "compiled for" in mixers.unsupported_reason(*given)
    with pytest.raises(ValueError, match="pieces"):
        mixers.convolve(x, windows(2, 3, 4), x, weight, bias, None)


def mixer(dtype, rows=2, nodes=5, heads=6, groups=2, keys=32, values=16):
    """A layer's tables as parts of a projection, its log, and what it makes of dt."""
    random = torch.Generator().manual_seed(2)

    def numbers(*shape):
        return torch.randn(*shape, generator=random)

    sizes = (heads * values, groups * keys, groups * keys, heads)
    mixed = numbers(rows, nodes, sum(sizes)).to(dtype)
    x, b, c, dt = mixed.split(sizes, -1)
    x, b, c = (
        x.unflatten(-1, (heads, -1)),
        b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)),
    )
    steps = outer_product.Steps(
        -numbers(heads).exp(), numbers(heads), numbers(heads), True, (1e-3, 3.0)
    )
    log = (
        torch.rand(rows, RING, heads, generator=random), numbers(rows, RING, groups, keys),
        numbers(rows, RING, heads, values),
    )  # fmt: skip
    return numbers(rows, heads, keys, values), (x, dt, b, c), steps, log


def scan(state, inputs, steps, log, origins, due=(3, 2)):
    rows, nodes = inputs[0].shape[:2]
    lines = ((torch.arange(nodes) + 5) % RING).expand(rows, -1).contiguous()
    origins = origins.expand(rows, -1).contiguous()
    ahead = torch.tensor([due[0]] * rows), torch.tensor([due[1], *[0] * (rows - 1)])
    return outer_product.over_scan(state, origins, inputs, steps, log, lines, ahead)


TREE = torch.tensor([[0, 1, 1, 2, 0]])


@pytest.mark.parametrize("plus", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_scan_is_what_its_parts_give(dtype, plus):
    """By torch's formulas and the kernel of outer products, whose own formulas are tested."""
    state, inputs, steps, log = mixer(dtype)
    steps = steps._replace(plus=plus)
    c, b, delta, gone = MixerScan(steps)._given(*inputs)
    other, entries = state.clone(), [table.clone() for table in log]
    lines = ((torch.arange(5) + 5) % RING).expand(2, -1).contiguous()
    due = torch.tensor([3, 3]), torch.tensor([2, 0])
    expected = outer_product.over_nodes(
        other, TREE.expand(2, -1), c, b, delta, None, gone.exp(), tuple(entries), lines, due
    )
    expected = expected + inputs[0].float() * steps.skip_H[:, None]
    out = scan(state, inputs, steps, log, TREE)
    # in half precision a step that falls between two numbers may be rounded to the other one
    close = {"rtol": 1e-2, "atol": 5e-2} if dtype == BF16 else {"rtol": 1e-5, "atol": 1e-5}
    assert torch.allclose(out, expected, **close)
    assert torch.equal(state, other)  # what was due came from the log alone
    for mine, theirs in zip(log, entries, strict=True):
        assert torch.allclose(mine, theirs, **close)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("nodes", [5, 9, 70])
def test_a_node_of_a_scan_has_the_bits_of_plain_decoding(dtype, nodes):
    """A chain in one call and token by token; a row alone, and beside another one."""
    state, inputs, steps, log = mixer(dtype, nodes=nodes)
    # the ring holds every node: entries are settled behind it
    log = tuple(torch.zeros(2, 128, *table.shape[2:]) for table in log)
    lines = torch.arange(nodes).expand(2, -1).contiguous()
    zero = torch.zeros(2, dtype=torch.int64)
    chain = torch.arange(nodes).expand(2, -1).contiguous()
    whole = outer_product.over_scan(state.clone(), chain, inputs, steps, log, lines, (zero, zero))
    now, own = state.clone(), tuple(torch.zeros_like(table) for table in log)
    for node in range(nodes):
        at = slice(node, node + 1)
        few = tuple(table[:, at] for table in inputs)
        due = (zero + max(node - 1, 0), zero + min(node, 1))
        one = outer_product.over_scan(
            now, zero[:, None], few, steps, own, lines[:, at].contiguous(), due
        )
        assert torch.equal(one, whole[:, at])
    alone = tuple(table[1:] for table in inputs)
    logs = tuple(torch.zeros_like(table[1:]) for table in log)
    beside = outer_product.over_scan(
        state[1:].clone(), chain[1:], alone, steps, logs, lines[1:], (zero[1:], zero[1:])
    )
    assert torch.equal(beside, whole[1:])


def test_tables_that_lie_otherwise_are_left_to_torch():
    state, (x, dt, b, c), steps, log = mixer(torch.float32)
    for inputs in (
        (x.mT.contiguous().mT, dt, b, c),
        (x, dt.double(), b, c),
        (x, dt, b.to(BF16), c),
    ):
        assert scan(state, inputs, steps, log, TREE) is None


def test_softplus_is_torchs_from_one_end_to_the_other():
    heads, keys = 4096, 16
    dt = torch.linspace(-90, 40, heads).view(1, 1, heads)
    x = torch.ones(1, 1, heads, 16)
    b = torch.zeros(1, 1, 1, keys)
    steps = outer_product.Steps(torch.zeros(heads), None, None, True, (0.0, float("inf")))
    log = (
        torch.zeros(1, RING, heads),
        torch.zeros(1, RING, 1, keys),
        torch.zeros(1, RING, heads, 16),
    )
    scan(torch.zeros(1, heads, keys, 16), (x, dt, b, b), steps, log, torch.tensor([[0]]))
    found, expected = log[2][0, 5, :, 0], torch.nn.functional.softplus(dt[0, 0].double())
    assert torch.allclose(found.double(), expected, rtol=4e-7, atol=1e-37)
    assert torch.equal(log[0][0, 5], torch.ones(heads))  # decays of no time


@pytest.mark.parametrize(
    "kind", ["granitemoehybrid", "falcon_h1", "qwen3_next", "nemotron_h", "lfm2"]
)
def test_norms_are_computed_as_modelling_files_say(kind):
    model = made(kind)
    norms = [part for part in model.modules() if "RMSNorm" in type(part).__name__]
    for part in norms:
        torch.nn.init.normal_(part.weight, 1.0, 0.5)
    theirs = [type(part).forward for part in norms]
    assert compile_norms(model) == len(norms)
    for part, forward in zip(norms, theirs, strict=True):
        assert "forward" in vars(part)
        width = len(part.weight)
        x = torch.randn(2, 5, width)
        gate = torch.randn(2, 5, 2 * width)[..., width:]  # a part of a projection
        given = (x, gate) if "Gated" in type(part).__name__ else (x,)
        with torch.inference_mode():
            out = part(*given)
            assert torch.allclose(out, forward(part, *given), rtol=1e-5, atol=1e-6)
            one = part(*(table[1:, 3:4] for table in given))
            assert torch.equal(one, out[1:, 3:4])
        assert torch.equal(part(*given), forward(part, *given))  # where gradients are asked for


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "cut",
    [
        lambda nodes: torch.randn(2, nodes, 2, 3, 64)[:, :, 1],  # 4-d
        lambda nodes: torch.randn(2, nodes, 5, 64)[:, :, 1:2],
        lambda nodes: torch.randn(2, nodes, 2, 64)[:, :, 1],  # 3-d
        lambda nodes: torch.randn(2, 3, 64)[:, :nodes],
        lambda nodes: torch.randn(nodes, 2, 64).transpose(0, 1),
        lambda nodes: torch.randn(2, nodes, 64, 2)[..., 1],
        lambda nodes: torch.randn(64)[None].expand(nodes, -1),
        lambda nodes: torch.randn(64),
    ],
)
def test_a_gate_is_read_from_where_it_lies(cut, nodes, ahead):
    """Parts of larger tables, whose rows may be as far from each other or not."""
    gate = cut(nodes)
    x, weight = torch.randn(gate.shape), torch.randn(64)
    expected = mixers.norm(x, weight, 1e-6, 64, gate.clone().contiguous(), ahead)
    assert torch.equal(mixers.norm(x, weight, 1e-6, 64, gate, ahead), expected)


def test_a_norm_of_another_formula_is_left_alone():
    """Kimi's gate is a sigmoid."""
    model = made("kimi_linear")
    left = {type(p).__name__ for p in model.modules() if "RMSNorm" in type(p).__name__}
    assert compile_norms(model) > 0
    computed = {type(p).__name__ for p in model.modules() if "forward" in vars(p)}
    assert left - computed == {"KimiLinearRMSNormGated"}


class FusedRMSNorm(torch.nn.Module):
    """As in modelling files of others: what is added first is taken along."""

    eps = 1e-6

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, hidden_states, residual):
        summed = hidden_states + residual
        return torch.nn.functional.rms_norm(summed, (64,), self.weight, self.eps), summed


class PairRMSNorm(FusedRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states, torch.zeros_like(hidden_states))


class CardRMSNorm(FusedRMSNorm):
    def forward(self, hidden_states):
        raise RuntimeError("on a card alone")


class KeywordRMSNorm(FusedRMSNorm):
    def forward(self, hidden_states, *, gate):
        return hidden_states * gate


class PlainRMSNorm(FusedRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states, torch.zeros_like(hidden_states))[0]


def test_norms_that_take_or_give_something_else_are_left_alone():
    """They ended a load in a TypeError."""
    kinds = (FusedRMSNorm, PairRMSNorm, CardRMSNorm, KeywordRMSNorm, PlainRMSNorm)
    model = torch.nn.ModuleList(kind() for kind in kinds)
    assert compile_norms(model) == 1
    assert ["forward" in vars(part) for part in model] == [False] * 4 + [True]


def test_a_model_with_compiled_norms_goes_with_its_last_name():
    """Programs keep what is there after a load from the collector, candidates of it too."""
    model = made("falcon_h1")
    was = gc.isenabled()
    gc.disable()
    try:
        assert compile_norms(model) > 0
        gone = [weakref.ref(part) for part in model.modules() if "forward" in vars(part)]
        gone += [weakref.ref(part.weight) for part in model.modules() if "forward" in vars(part)]
        whole = weakref.ref(model)
        del model
        assert [ref() for ref in gone] == [None] * len(gone)
        assert whole() is None
    finally:
        if was:
            gc.enable()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind",
    ["granitemoehybrid", "falcon_h1", "mamba2", "qwen3_5_text", "lfm2", "bamba", "nemotron_h"],
)
def test_drafted_texts_of_packed_models_are_plain_ones_through_compiled_norms(monkeypatch, kind):
    normed, theirs = [], mixers.norm
    monkeypatch.setattr(mixers, "norm", lambda *given: normed.append(1) or theirs(*given))
    model, prompts = made(kind), [[7, 8, 9, 10, 11] * 5, [3, 4, 5, 6] * 6]
    packed = {"dtype": "int8", "threads": 1, "planner": "fixed"}
    plain = outrider.load(model, drafter="none", **packed)
    trees = {"chain": False}  # a random model keeps none of the chains that nobody asks for
    drafted = outrider.load(model, drafter="recall", drafter_options=trees, **packed)
    normed.clear()
    for sampling in (SamplingParams(0), SamplingParams(0.8, seed=4)):
        whole = plain.generate(prompts, sampling, Stop(40))
        found = drafted.generate(prompts, sampling, Stop(40))
        for one, other in zip(whole.completions, found.completions, strict=True):
            assert one.token_ids == other.token_ids
        assert found.stats.accepted > 0
    assert len(normed) > whole.stats.steps
