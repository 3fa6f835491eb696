"""What stands between products on a CUDA device, in Triton's interpreter: it is transformers'."""

import os
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from families import based
from test_llama import TREES, tree_scores_as_its_paths
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from outrider.models import LlamaRunner, TreeDecoder, adapt, layer, llama as lean
from outrider.models.batch_invariance import BatchInvariance
from outrider.models.cache import SlotCache
from outrider.models.prefill import causal as line
from outrider.types import Nodes
from tiny import llama

try:
    from outrider.models import cuda_kernels
except ImportError:
    pytest.skip("Triton is not installed", allow_module_level=True)

#: Before 3.7 a loop in the interpreter cannot end at a tensor with NumPy 2.5.
NEW = tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and NEW
interpreted = pytest.mark.skipif(
    not INTERPRETS, reason="no interpreter was chosen before Triton was imported, or an old one"
)

SHAPES = {
    "a head each": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads of 24": {"head_dim": 24},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
}


@pytest.fixture
def kernels(monkeypatch):
    """Lean decoders take Triton's kernels, with slices of 16 slots and blocks of 16 rows."""

    def chosen(shape, act, rotary, positions, like):
        assert cuda_kernels.unsupported_reason(shape, act) is None
        cos, sin = layer.rotary_factors(shape.size, rotary, positions, like)
        made = cuda_kernels.TritonKernels(shape, cos, sin)
        return layer.LayerForm(made, BatchInvariance(), "Triton's")

    monkeypatch.setattr(lean, "chosen", chosen)
    monkeypatch.setattr(cuda_kernels, "SLICE", 16)
    monkeypatch.setattr(cuda_kernels, "ROWS", 16)


def own_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor(ids, device=model.device)).logits


def text(rows, length):
    return [[(7 * i + 3 + 5 * row) % 32 for i in range(length)] for row in range(rows)]


def written(runner, ids, at_once):
    """Logits of every token, read so many at once."""
    causal = TreeDecoder(runner)
    cache = causal.open(len(ids), 512)
    tokens = torch.tensor(ids, device=runner.device)
    parts, wide = [], max(128, tokens.shape[1])
    with torch.inference_mode():
        for start in range(0, tokens.shape[1], at_once):
            some = tokens[:, start : start + at_once]
            at = torch.arange(start, start + some.shape[1], device=runner.device).expand(
                len(ids), -1
            )
            parts.append(causal.forward(cache, line(some, at, wide)).logits_BQV)
    return torch.cat(parts, 1)


class Case:
    """One call of kernels for 4 heads over 2 of 24 numbers: two rows, three nodes of a tree."""

    def __init__(self, dtype, width=40):
        torch.manual_seed(0)
        shape = SimpleNamespace(heads=4, kv_heads=2, size=24, eps=1e-5)
        self.cos, self.sin = (torch.randn(64, 12).repeat(1, 2).to(dtype) for _ in range(2))
        kernels = cuda_kernels.TritonKernels(shape, self.cos, self.sin)
        self.positions = torch.tensor([[4, 5, 5], [30, 31, 31]])
        self.slots = self.positions + torch.tensor([0, 0, 1])
        visible = torch.arange(width) <= self.slots[..., None]
        visible[:, 2, [5, 31]] = False  # its sibling, and a token of the second row
        self.nodes = Nodes(self.slots, self.positions, self.slots, visible, self.positions[:, 0])
        self.call = kernels.open(self.nodes)
        self.qkv = torch.randn(2, 3, 8 * 24).to(dtype)
        cache = SlotCache(1, 2, width)
        cache.begin(self.slots, width, 0)
        self.layer = cache.layers[0]
        keys, values = self.layer.buffers(2, 24, self.qkv)
        for each in (keys, values):
            each.copy_(torch.randn(each.shape))

    def attended(self):
        """By torch: what is in the cache behind the call, and the answer."""
        keys, values = (each.clone() for each in (self.layer.keys, self.layer.values))
        heads = self.qkv.view(2, 3, 8, 24)
        x = heads[:, :, :6].float()
        turned = torch.cat([-x[..., 12:], x[..., :12]], -1)
        cos, sin = (table[self.positions][:, :, None].float() for table in (self.cos, self.sin))
        x = (x * cos + turned * sin).to(self.qkv.dtype)
        for row in range(2):
            for node in range(3):
                keys[row, :, self.slots[row, node]] = x[row, node, 4:]
                values[row, :, self.slots[row, node]] = heads[row, node, 6:]
        every = [each.float().repeat_interleave(2, 1) for each in (keys, values)]
        queries = x[:, :, :4].transpose(1, 2).float()
        mask = self.nodes.visible_BQW[:, None]
        answer = F.scaled_dot_product_attention(queries, *every, attn_mask=mask)
        return keys, values, answer.transpose(1, 2).flatten(2)


@interpreted
@pytest.mark.parametrize("reads", [16, 64])  # parts of a text: three, and one
@pytest.mark.parametrize("most", [0, 64])  # rows that torch's attention is for, and ours
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_torchs(monkeypatch, dtype, most, reads):
    """float16 for half precision: the interpreter has products of bfloat16 wrong."""
    for name, value in (("SLICE", 16), ("READS", reads), ("MOST", most)):
        monkeypatch.setattr(cuda_kernels, name, value)
    case = Case(dtype)
    keys, values, answer = case.attended()
    assert (case.call.splits, case.call.mask is None) == (3 if reads == 16 else 1, most > 0)
    got = case.call.attend(case.qkv, case.layer)
    near = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 4e-3}
    torch.testing.assert_close(got.float(), answer, **near)
    torch.testing.assert_close(case.layer.keys, keys, **near)
    assert torch.equal(case.layer.values, values)


def behind(width, first=None):
    """A call behind so many slots, of which those of `first` have its keys and values."""
    case = Case(torch.float32, width)
    if first is not None:
        wide = first.layer.keys.shape[2]
        for mine, its in (
            (first.layer.keys, case.layer.keys),
            (first.layer.values, case.layer.values),
        ):
            its[:, :, :wide] = mine
        case.qkv = first.qkv
    return case


@interpreted
@pytest.mark.parametrize(  # parts of one size: all, and those of the first slots
    "most", [pytest.param(64, marks=pytest.mark.exhaustive), 2]
)
def test_an_answer_has_the_same_bits_behind_every_width(monkeypatch, most):
    """Replayed steps see more slots than eager ones, masked; parts of long texts grow."""
    for name, value in (("SLICE", 16), ("READS", 16), ("SPLITS", most), ("JOINED", 4)):
        monkeypatch.setattr(cuda_kernels, name, value)
    first = behind(40)
    answer = first.call.attend(first.qkv, first.layer)
    torch.testing.assert_close(answer, first.attended()[2], rtol=0, atol=1e-5)
    for width in (56, 120, 1000):
        case = behind(width, first)
        assert case.call.splits == cuda_kernels.parts(width) >= first.call.splits
        assert torch.equal(case.call.attend(case.qkv, case.layer), answer), width
    monkeypatch.setattr(cuda_kernels, "READS", 512)  # parts that follow from the width
    assert not torch.equal(case.call.attend(case.qkv, case.layer), answer)


@interpreted
def test_parts_of_a_long_text_are_joined(monkeypatch):
    """Of 16 slots, of 32, of 64: what nodes far behind see is torch's, and in the same bits."""
    for name, value in (("SLICE", 16), ("READS", 16), ("SPLITS", 2), ("JOINED", 4)):
        monkeypatch.setattr(cuda_kernels, name, value)
    cases = [Case(torch.float32, 300)]
    cases[0].call.visible[:, :, :300] = cases[0].nodes.visible_BQW[:, :, :300] = True
    cases.append(behind(420, cases[0]))
    cases[1].call.visible[:, :, :300] = True
    answers = [case.call.attend(case.qkv, case.layer) for case in cases]
    torch.testing.assert_close(answers[0], cases[0].attended()[2], rtol=0, atol=1e-5)
    assert torch.equal(*answers)


def test_where_parts_lie_does_not_depend_on_the_width():
    """As the kernel has them: one behind the other, none empty, the last one up to the end."""
    reads, splits = cuda_kernels.READS, cuda_kernels.SPLITS
    for width in (1, 128, 129, 8192, 8193, 24_576, 24_577, 131_072):
        begin = 0
        for part in range(cuda_kernels.parts(width)):
            assert begin < width
            times = 1 << part // splits
            assert begin == reads * splits * (times - 1) + part % splits * reads * times
            begin += reads * times
        assert begin >= width


@interpreted
def test_a_row_that_sees_nothing_says_nothing(monkeypatch):
    """Not a number would spread from there."""
    monkeypatch.setattr(cuda_kernels, "SLICE", 16)
    for reads in (16, 64):
        monkeypatch.setattr(cuda_kernels, "READS", reads)
        case = Case(torch.float32)
        case.call.visible[1] = False
        assert (case.call.attend(case.qkv, case.layer)[1] == 0).all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates_are_torchs(dtype):
    case = Case(dtype)
    torch.manual_seed(1)
    state, more, weight = (torch.randn(size).to(dtype) for size in ((2, 3, 40), (2, 3, 40), 40))
    near = {"rtol": 2e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for added in (None, more):
        x = state if added is None else state + added
        total, normed = case.call.norm(state, added, weight)
        wide = x.float()
        own = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        torch.testing.assert_close(total, x, **near)
        torch.testing.assert_close(normed, own.to(dtype) * weight, **near)
    both = torch.randn(2, 3, 2 * 1100).to(dtype)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(case.call.gate(both), F.silu(gate) * up, **near)


@interpreted
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES)
def test_texts_score_as_transformers_has_them(kernels, shape):
    model = llama(seed=3, **SHAPES[shape])
    rows, length, counts = (1, 40, (40, 8)) if shape == "grouped queries" else (2, 9, (9, 4, 1))
    ids = text(rows, length)
    own = own_logits(model, ids)
    for at_once in counts:
        got = written(LlamaRunner(model, packed=False), ids, at_once)
        torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_its_like_score_as_transformers_has_them(kernels, kind):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(based(kind, sliding_window=None)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = text(2, 12)
    got = written(LlamaRunner(model, packed=False), ids, 6)
    torch.testing.assert_close(got, own_logits(model, ids), rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("name", ["irregular"])
def test_trees_score_as_their_paths(kernels, name):
    """Ragged rows, drafts that branch, and padded rows of attention."""
    model = llama(seed=4, num_key_value_heads=2)
    tree_scores_as_its_paths(model, LlamaRunner(model, packed=False), TREES[name])


@interpreted
def test_half_precision_rounds_where_transformers_does(kernels):
    """float16: products of bfloat16 are wrong in the interpreter of Triton 3.6 to 3.9."""
    model = llama(seed=3, dtype=torch.float32)
    ids = text(1, 12)
    exact = own_logits(model, ids)
    model = model.half()
    own = own_logits(model, ids).float()
    got = written(LlamaRunner(model, packed=False), ids, 5).float()
    assert (got - exact).abs().max() < 1.5 * (own - exact).abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_device(monkeypatch, dtype, size, groups):
    """Texts read at once, a few tokens at a time and one by one, against float64."""
    monkeypatch.setattr(cuda_kernels, "MOST", 100)
    shape = {
        "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3, "head_dim": size,
        "num_attention_heads": 6, "num_key_value_heads": 6 // groups, "vocab_size": 32,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    model = llama(seed=3, **shape).cuda()
    ids = text(3, 130)
    exact = own_logits(model.double(), ids)
    model = model.to(dtype)
    own = (own_logits(model, ids) - exact).norm()
    adapted = adapt(model).runner
    assert "Triton" in adapted.means
    for at_once in (130, 60, 7, 1):  # torch's attention, blocks of rows, a tree, a token
        got = written(adapted, ids, at_once)
        assert (got - exact).norm() < 1.5 * own, at_once


def test_shapes_it_was_not_written_for():
    shape = type("Shape", (), {"size": 64})()
    assert cuda_kernels.unsupported_reason(shape, "silu") is None
    assert "silu" in cuda_kernels.unsupported_reason(shape, "gelu")
    shape.size = 320
    assert "256" in cuda_kernels.unsupported_reason(shape, "silu")
