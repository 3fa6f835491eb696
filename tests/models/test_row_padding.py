"""A row of a model's own forward has its bits in calls of any size, where products round inputs."""

import contextlib
import functools

import families
import pytest
import torch
from families import FAMILIES, attentions, build
from torch.nn import functional as F
from transformers import AutoConfig

from outrider.models import (
    LlamaRunner,
    adapt,
    attention,
    batch_invariance,
    calibrate,
    isa,
    linear,
    row_padding,
    weight_only,
)
from outrider.models.batch_invariance import PaddingPolicy
from outrider.models.prefill import causal

pytestmark = pytest.mark.skipif(
    weight_only.unsupported_reason(torch.device("cpu")) is not None, reason="no kernels"
)
SIZES = {
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
}
SIZES |= {"intermediate_size_mlp", "word_embed_proj_dim"}
SIZES |= {"head_dim", "moe_intermediate_size", "rotary_dim", "v_head_dim"}
SIZES |= {"kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "laurel_rank"}
#: Whose attention is not looked up by the name of torch's, or which have experts.
OTHERS = ["Mixtral", "Qwen3-MoE", "Gemma 2", "Falcon (rotary)", "Falcon (ALiBi)", "BLOOM", "MPT"]
OTHERS += ["GPT-Neo", "GPT-J", "CodeGen", "XGLM", "BioGPT", "StableLM", "GPT-OSS", "DeepSeek-V3"]
OTHERS += ["Llama 4"]
IN_SHORT = {"Qwen3-MoE", "Gemma 2", "Falcon (ALiBi)", "BLOOM", "GPT-OSS", "Llama 4"}
LENGTH = 96
CUTS = ([1] * 96, [2] * 48, [3] * 32, [70, 1, 2, 3, 4, 16], [7] * 13 + [5])


def of(name, monkeypatch):
    """A model four times as wide as the tiny ones, in 8 bits if its layers fit."""

    class Wide:
        @staticmethod
        def for_model(kind, **given):
            def times(n):
                return [times(each) for each in n] if isinstance(n, list) else 4 * n

            wide = {k: times(v) if k in SIZES else v for k, v in given.items()}
            return AutoConfig.for_model(kind, **wide)

    monkeypatch.setattr(families, "AutoConfig", Wide)
    model = build(FAMILIES[name](), attentions(name)[-1])
    kept = linear.beside(model)
    weight_only.keep(kept, "bfloat16" if name == "Gemma 3n" else "int8", "it")
    return kept


def logits(target, ids, sizes):
    """Of a text that is read in calls of so many tokens."""
    cache, parts, at = target.open(len(ids), 256), [], 0
    for size in sizes:
        here = torch.arange(at, at + size).expand(len(ids), -1)
        at += size
        nodes = causal(ids[:, here[0]], here, target.width(at))
        parts.append(target.forward(cache, nodes).logits_BQV)
    return torch.cat(parts, 1)[0]


def alike(target, ids):
    whole = logits(target, ids[:1], [LENGTH])
    one = all(torch.equal(logits(target, ids[:1], sizes), whole) for sizes in CUTS)
    return one and torch.equal(logits(target, ids, CUTS[3]), whole)


def some_ids():
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.exhaustive)
        for name in FAMILIES
    ],
)
@torch.inference_mode()
def test_a_token_has_its_bits_in_calls_of_any_size(name, monkeypatch):
    """Greedy and seeded texts of these depended on how many tokens were drafted."""
    if name == "Gemma 3n" and not isa.has_bf16_products():
        pytest.skip("its layers have no whole blocks, and bfloat16 ones round nothing here")
    kept, ids = of(name, monkeypatch), some_ids()
    target = adapt(kept)
    own = kept(ids[:1], use_cache=False).logits[0]
    found = logits(target, ids[:1], [LENGTH])
    torch.testing.assert_close(found, own, rtol=1e-3, atol=0.02 * float(own.abs().max()))
    assert alike(target, ids)
    if isinstance(target.runner, LlamaRunner):
        return
    assert not target.trees_alike  # siblings stand in between: other sums
    by_name = name in ("BioGPT", "StableLM") or name not in (*OTHERS, "Gemma 3n")
    assert bool(target.runner._padding._clear) == by_name  # what needs no looking is spared it
    rows, _ = attention.tried(attention.unscaled, 4, 1, 32, torch.float32)
    if name in OTHERS and not rows.rows.free:
        monkeypatch.setattr(target.runner, "_padding", contextlib.nullcontext)
        assert not alike(target, ids)


@torch.inference_mode()
def test_what_is_padded_is_what_torch_computes():
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    x, weight, many = normal(2, 3, 32), normal(1, 32), normal(6, 3, 32)
    weights, ends = normal(4, 32, 16), torch.tensor([1, 1, 3, 6], dtype=torch.int32)
    cases = {
        "linear": lambda: F.linear(x, weight, normal(1) * 0 + 1),
        "transposed": lambda: x @ weight.T,
        "batched": lambda: torch.bmm(many, many.mT),
        "added": lambda: torch.baddbmm(many[:, :1, :3], many, many.mT, beta=0.5, alpha=2),
        "experts": lambda: F.grouped_mm(normal(6, 32) * 0 + x[0, 0], weights, offs=ends),
        "gate": lambda: torch.sigmoid(x[..., :1]),
        "outer": lambda: x[..., :1] @ x[..., :1].mT,
    }
    for name, run in cases.items():
        expected = run()
        with row_padding._Products() as products:
            found = run()
        torch.testing.assert_close(found, expected, msg=name)
        assert found.is_contiguous()
        assert products.met == (name != "outer")  # of one number a row nothing is summed
    assert not row_padding._pads.get()


@torch.inference_mode()
def test_what_is_not_read_may_be_anything():
    """torch looks at no number that is to be multiplied by 0, and writes where it is told to."""
    many, anything = torch.ones(2, 3, 4), torch.full((2, 3, 3), torch.nan)
    x = torch.linspace(-2, 2, 54)
    with row_padding._Products():
        assert torch.baddbmm(anything, many, many.mT, beta=0).isfinite().all()
        out = torch.empty(54)
        assert torch.equal(torch.sigmoid(x, out=out), out)
        assert out.shape == (54,)
        assert F.silu(x, inplace=True) is x
        assert torch.matmul(many, many.mT, out=None).shape == (2, 3, 3)
        assert torch.matmul(input=many, other=many.mT).shape == (2, 3, 3)
        assert torch.bmm(many, mat2=many.mT).shape == (2, 3, 3)


def test_rows_are_found_for_so_many_threads(monkeypatch):
    asked = []
    monkeypatch.setattr(row_padding, "_rows_of", lambda *key: asked.append(key) or PaddingPolicy())
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with row_padding._Products():
            F.linear(torch.ones(3, 4), torch.ones(5, 4))
    assert [key[-1] for key in asked] == [1, 2]


@pytest.mark.parametrize("shape", [(32, 5), (8, 320), (320, 8), (3, 3)])
@torch.inference_mode()
def test_small_products_are_alike_wherever_they_were_tried(shape, monkeypatch, tmp_path):
    """Sums of a few numbers agree by chance, and what pads finds every count alike."""
    monkeypatch.setattr(batch_invariance, "_found", {})
    monkeypatch.setattr(calibrate, "cache_dir", lambda: tmp_path)
    row_padding._rows_of.cache_clear()
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, shape[1], generator=random) for n in (shape[0], 70))
    with row_padding._Products():
        row_padding._rows_of(weight.shape, torch.get_num_threads())
        whole = F.linear(x, weight)
        batch_invariance._found.clear()  # what a later process reads
        row_padding._rows_of.cache_clear()
        for n in range(1, 70):
            assert torch.equal(F.linear(x[:n], weight), whole[:n])


@torch.inference_mode()
def test_a_gate_has_its_bits_beside_others():
    """Vectors of torch's sigmoid round otherwise than what is left of one."""
    x = torch.randn(700, generator=torch.Generator().manual_seed(0))
    with row_padding._Products():
        whole = torch.sigmoid(x[:, None])
        assert all(torch.equal(torch.sigmoid(x[:n, None]), whole[:n]) for n in range(1, 90))


FUNCTIONS = {
    "silu": F.silu,
    "module": torch.nn.SiLU(),
    "mish": F.mish,
    "elu": F.elu,
    "gelu": F.gelu,
    "tanh gelu": functools.partial(F.gelu, approximate="tanh"),
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "method": torch.Tensor.sigmoid,
    "exp2": torch.exp2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("size", "threads"), [(100, 1), (100, 3), (1408, 3), (14336, 4)])
@torch.inference_mode()
def test_a_function_of_each_number_has_its_bits_beside_others(name, size, threads):
    """torch.nn.functional's own were met with `inplace=False` and taken for those that write; and
    every thread's part of a large tensor ends on a number that may be in the middle of a row."""
    function, before = FUNCTIONS[name], torch.get_num_threads()
    x = torch.randn(101, size, generator=torch.Generator().manual_seed(0))
    counts = (2, 3, 5, 24, 25, 70, 71, 73, 99, 101)

    def differ():
        whole = torch.cat([function(x[row : row + 1]) for row in range(len(x))])
        return [n for n in counts if not torch.equal(function(x[:n]), whole[:n])]

    torch.set_num_threads(threads)
    try:
        with row_padding._Products() as products:
            assert differ() == []
            assert products.met
        if name == "mish" and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
            assert differ()  # as it is torch's own
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_what_is_clear_in_one_call_is_looked_at_in_larger_ones_and_by_more_threads():
    padding, x, before = row_padding.RowPadding(), torch.randn(5, 14336), torch.get_num_threads()
    whole = torch.cat([F.mish(row[None]) for row in x])
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            for rows in (1, 5, 1, 5):
                with padding(rows):
                    assert torch.equal(F.mish(x[:rows]), whole[:rows])
    finally:
        torch.set_num_threads(before)
    assert padding._clear == {1: 5, 4: 1}


def test_float32_weights_are_left_as_they_are():
    target = adapt(build(FAMILIES["Gemma 2"]()))
    assert target.runner._padding is contextlib.nullcontext
    assert target.trees_alike
