"""Experts in the type that they came in: numbers, bits, texts, files; what cannot be packed."""

import pytest
import recurrent_models
import tiny_gguf
import torch
from families import FAMILIES, based, build
from transformers import AutoConfig, AutoModelForCausalLM

import outrider
from outrider import SamplingParams, Stop
from outrider.errors import ConfigurationError
from outrider.models import LlamaRunner, adapt, experts, linear, weight_only
from outrider.models.cpu_kernels.packed_experts import (
    Groups,
    PackedExperts,
    PackedMixture,
    SharedExpert,
    grouped,
    summed,
)
from outrider.models.cpu_kernels.packed_linear import PackedLinear, PackedWeight
from outrider.models.experts import ExpertsTensor
from outrider.models.gguf import GgufFile
from outrider.models.prefill import causal, of_tree
from outrider.models.sources import ModelSource
from outrider.models.weight_only_tensor import WeightOnlyTensor
from outrider.tree import from_parents

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    weight_only.unsupported_reason(CPU) is not None,
    reason=f"no kernels: {weight_only.unsupported_reason(CPU)}",
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 96}
#: What the lean decoder runs, by name.
LEAN = {
    "mixtral": lambda: based("mixtral", num_local_experts=4, **SIZES),
    "olmoe": lambda: based("olmoe", num_experts=5, num_experts_per_tok=3, **SIZES),
    "qwen2_moe": lambda: based("qwen2_moe", **SIZES, **FEW, **SHARED),
    "qwen2_moe, a dense layer": lambda: based(
        "qwen2_moe", mlp_only_layers=[1], **SIZES, **FEW, **SHARED
    ),
    "qwen3_moe": lambda: based("qwen3_moe", **SIZES, **FEW),
    "qwen3_moe, weights of 1": lambda: based("qwen3_moe", norm_topk_prob=True, **SIZES, **FEW),
}
#: Others of transformers, whose own forward runs.
OWN = {
    **{name: lambda name=name: build(FAMILIES[name]()) for name in ("GPT-OSS", "DeepSeek-V3")},
    **{
        kind: lambda kind=kind: recurrent_models.made(kind)
        for kind in ("qwen3_next", "lfm2_moe", "minimax", "kimi_linear", "jamba")
    },
    "nemotron_h": lambda: recurrent_models.made(  # experts without gates
        "nemotron_h",
        layers_block_type=["mamba", "moe", "attention", "mamba"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        n_group=1,
        topk_group=1,
    ),
}
IDS = torch.tensor([[5, 40, 17, 3, 8, 60, 61, 62, 9, 9, 30]])


def dense(config, seed=0):
    """A model whose parts all matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def kept(model, dtype="float16"):
    made = linear.beside(model)
    weight_only.keep(made, dtype, "the model")
    return made


def rounded(model):
    """The same numbers as a model of dense weights."""
    made = linear.beside(model)
    for module in made.modules():
        vars(module).pop("forward", None)
        for leaf, weight in module._parameters.items():
            if isinstance(weight, WeightOnlyTensor):
                numbers = torch.nn.Parameter(weight.numbers(), requires_grad=False)
                module._parameters[leaf] = numbers
    return made


def gap(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", [*LEAN, *OWN])
@torch.inference_mode()
def test_numbers_are_those_of_the_weights(name, monkeypatch):
    model = dense(LEAN[name]()) if name in LEAN else OWN[name]()
    small = kept(model)
    widened = []
    whole = WeightOnlyTensor.__torch_dispatch__
    monkeypatch.setattr(
        WeightOnlyTensor,
        "__torch_dispatch__",
        classmethod(lambda _, func, *of: widened.extend(map(type, of[1])) or whole(func, *of)),
    )
    found = small(IDS, use_cache=False).logits
    assert ExpertsTensor not in widened  # which would read all experts anew at every call
    stacks = {n: w for n, w in small.named_parameters() if w.dim() == experts.AXES}
    stacks = {n: w for n, w in stacks.items() if "conv" not in n}
    assert stacks
    assert all(isinstance(weight, ExpertsTensor) for weight in stacks.values())
    routed = [one.weight.record.format for m in small.modules() for one in experts.routers(m)]
    assert len(routed) >= len(stacks) // 2
    assert set(routed) == {"f32"}  # what chooses decides for all
    assert gap(found, rounded(small)(IDS, use_cache=False).logits) < 1e-5
    assert 1e-5 < gap(found, model(IDS, use_cache=False).logits) < 0.05
    assert all(type(weight) is torch.nn.Parameter for weight in model.parameters())


def calls(target, ids, sizes, capacity=64):
    """Logits of a text that is read in calls of so many tokens, beside itself."""
    cache, parts, at = target.open(len(ids), capacity), [], 0
    for size in sizes:
        here = torch.arange(at, at + size).expand(len(ids), -1)
        at += size
        parts.append(target.forward(cache, causal(ids[:, here[0]], here, capacity)).logits_BQV)
    return torch.cat(parts, 1)[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int4", "float32"])
@pytest.mark.parametrize("name", LEAN)
@torch.inference_mode()
def test_the_lean_decoder_computes_the_same_and_a_token_has_its_bits(name, dtype):
    model = dense(LEAN[name]())
    small = kept(model, dtype)
    target = adapt(small)
    assert isinstance(target.runner, LlamaRunner)
    assert target.trees_alike
    assert (target.runner.whole is None) == (name == "olmoe")  # whose norms are over all heads
    ids = torch.randint(3, 97, (3, 24), generator=torch.Generator().manual_seed(1))
    whole = calls(target, ids, [24])
    near = 0.03 if dtype in ("bfloat16", "int8", "int4") else 1e-5
    assert gap(whole, small(ids[:1], use_cache=False).logits[0]) < near
    for sizes in ([1] * 24, [2] * 12, [9, 1, 3, 11]):
        assert torch.equal(calls(target, ids, sizes), whole)
        assert torch.equal(calls(target, ids[:1], sizes), whole)
    target.runner.whole = None  # the layers one by one
    torch.testing.assert_close(calls(target, ids, [24]), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "field"),
    [(kind, {"hidden_act": act}) for kind in ("mixtral", "qwen2_moe") for act in ("gelu", "relu")]
    + [("olmoe", {"clip_qkv": 0.5})],
)
@torch.inference_mode()
def test_what_the_lean_decoder_does_not_compute_runs_by_its_own_forward(name, field):
    small = kept(dense(AutoConfig.for_model(**{**LEAN[name]().to_dict(), **field})))
    target = adapt(small)
    assert not isinstance(target.runner, LlamaRunner)
    assert gap(calls(target, IDS, [11]), small(IDS, use_cache=False).logits[0]) < 1e-5


def test_swish_is_silu():
    small = kept(
        dense(AutoConfig.for_model(**LEAN["mixtral"]().to_dict() | {"hidden_act": "swish"}))
    )
    assert isinstance(adapt(small).runner, LlamaRunner)


@torch.inference_mode()
def test_a_path_of_a_tree_has_the_bits_of_a_text():
    target = adapt(kept(dense(LEAN["qwen2_moe"]()), "int8"))
    tree = from_parents([-1, 0, 0, 1, 1, 2])
    tokens = torch.tensor([[7, 11, 13, 17, 19, 23]])
    cache = target.open(1, 64)
    scored = target.forward(cache, of_tree(tokens, tree, torch.zeros(1, dtype=torch.int64), 64))
    for path in ([0, 1, 3], [0, 1, 4], [0, 2, 5]):
        alone = calls(target, tokens[:, path], [len(path)])
        assert torch.equal(scored.logits_BQV[0, path], alone)


@torch.inference_mode()
def test_experts_are_chosen_and_summed_as_torch_does():
    torch.manual_seed(3)
    tokens, chosen, count = 37, 3, 7
    route = PackedLinear(PackedWeight.from_dense(torch.randn(count, 64), "f32"))
    stacks = torch.randn(count, 64, 64), torch.randn(count, 64, 32)
    gate_up, down = (
        PackedExperts([[PackedWeight.from_dense(w, "f32")] for w in s]) for s in stacks
    )
    shared = [torch.randn(64, 64), torch.randn(64, 32), torch.randn(1, 64)]
    common = SharedExpert(*(PackedLinear(PackedWeight.from_dense(w, "f32")) for w in shared))
    x = torch.randn(tokens, 64)

    def mlp(x, up, down):
        gate, value = (x @ up.T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * value) @ down.T

    for whole in (False, True):
        weights, ids = route(x).softmax(-1).topk(chosen)
        if whole:
            weights = weights / weights.sum(-1, keepdim=True)
        expected = torch.zeros(tokens, 64)
        for token in range(tokens):
            for weight, expert in zip(weights[token], ids[token], strict=True):
                expected[token] += weight * mlp(x[token], stacks[0][expert], stacks[1][expert])
        alone = PackedMixture(route, gate_up, down, chosen, whole)
        torch.testing.assert_close(alone(x), expected, rtol=1e-4, atol=1e-4)
        expected += torch.sigmoid(x @ shared[2].T) * mlp(x, *shared[:2])
        beside = PackedMixture(route, gate_up, down, chosen, whole, common)
        torch.testing.assert_close(beside(x), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(beside(x), torch.cat([beside(row[None]) for row in x]))
    broken = x.clone()
    broken[3] = torch.nan
    told = beside(broken)
    assert told[3].isnan().all()
    assert torch.equal(told[4:], beside(x)[4:])


@torch.inference_mode()
def test_choices_of_experts_that_are_not_here_give_nothing():
    ids = torch.tensor([[2, 0], [3, 1], [2, 3]])  # of three experts
    groups = grouped(ids, 3)
    assert groups.order_S.tolist() == [1, 3, 0, 4, 2, 5]
    assert groups.ends_X.tolist() == [1, 2, 4]
    weights = torch.randn(3, 16, 16)
    run = PackedExperts([[PackedWeight.from_dense(one)] for one in weights])
    x = torch.randn(3, 16)
    given = run(x[groups.order_S // 2], groups.ends_X)
    assert not given[4:].any()
    out = summed(given, torch.ones(3, 2), groups)
    expected = torch.stack(
        [weights[2] @ x[0] + weights[0] @ x[0], weights[1] @ x[1], weights[2] @ x[2]]
    )
    torch.testing.assert_close(out, expected)
    assert isinstance(groups, Groups)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_drafted_texts_are_plain_ones(dtype):
    model = dense(LEAN["qwen3_moe"]())
    model = model.half() if dtype == "float16" else model
    settings = {"threads": 1, "planner": "fixed", "dtype": dtype, "tokenizer": None}
    prompts = [[5, 40, 17, 3, 5, 40, 17], [9, 9, 30, 9, 9]]
    how = [SamplingParams(0), SamplingParams(0.9, seed=4)]
    texts = []
    for drafter in ("none", "recall", "suffix"):
        made = outrider.load(model, drafter=drafter, shared_noise=True, **settings)
        told = made.generate(prompts, how, Stop(24, token_ids=()))
        texts.append([one.token_ids for one in told.completions])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("kind", "architecture"), [("qwen2_moe", "qwen2moe"), ("qwen3_moe", "qwen3moe")]
)
@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("Q4_1", "Q5_1"), ("MXFP4", "MXFP4")])
@torch.inference_mode()
def test_a_file_keeps_experts_in_its_blocks(kind, architecture, types, tmp_path):
    model = dense(tiny_gguf.mixture(kind))
    path = tmp_path / f"{kind}.gguf"
    tiny_gguf.write(path, model, types[0], architecture, up=types[1])
    source = ModelSource(path, "target")
    assert source.config.moe_intermediate_size == model.config.moe_intermediate_size != 768
    small = source.model(weight_only.STORED, CPU)
    stacks = [w for w in small.parameters() if isinstance(w, ExpertsTensor)]
    assert len(stacks) == 2 * model.config.num_hidden_layers
    assert isinstance(adapt(small).runner, LlamaRunner)
    stored = GgufFile(path).tensors.values()
    if types[0] != "MXFP4":  # no kernel reads such blocks
        assert source.widened is None
        size = sum(one.rows.nbytes for one in stored if len(one.shape) == experts.AXES)
        assert size <= sum(r.nbytes for w in stacks for r in w.records) <= 1.01 * size
    else:
        assert "of type MXFP4 are widened" in source.widened
    found = small(IDS, use_cache=False).logits
    theirs = AutoModelForCausalLM.from_config(source.config).eval()
    theirs.load_state_dict(rounded(small).state_dict())
    expected = theirs(IDS, use_cache=False).logits
    assert gap(found, expected) < 2e-3
    if types[0] != "MXFP4":  # unpacked on purpose: experts have the file's widths there, too
        unpacked = ModelSource(path, "target").model("float32", CPU)
        assert gap(unpacked(IDS, use_cache=False).logits, expected) < 1e-5
    own = dict(model.named_parameters())
    for name, weight in small.named_parameters():
        if weight.dim() > 1:
            assert gap(weight.numbers(), own[name]) < (0.2 if "MXFP4" in types else 0.07), name


@pytest.mark.parametrize("part", ["up", "gate", "down"])
def test_a_file_without_one_of_a_layers_experts_says_so(part, tmp_path, monkeypatch):
    import gguf

    add = gguf.GGUFWriter.add_tensor
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_tensor",
        lambda self, name, *of, **how: (
            name == f"blk.1.ffn_{part}_exps.weight" or add(self, name, *of, **how)
        ),
    )
    model = dense(tiny_gguf.mixture("qwen3_moe"))
    tiny_gguf.write(tmp_path / "cut.gguf", model, "Q8_0", "qwen3moe", up="Q8_0")
    leaf = "down_proj" if part == "down" else "gate_up_proj"
    with pytest.raises(ConfigurationError, match=rf"are not in .*layers\.1\.mlp\.experts\.{leaf};"):
        ModelSource(tmp_path / "cut.gguf", "target").model(weight_only.STORED, CPU)


def test_products_of_a_mixture_that_do_not_fit_are_refused():
    made = {
        size: PackedLinear(PackedWeight.from_dense(torch.ones(*size)))
        for size in ((4, 32), (5, 32), (64, 32), (32, 32), (1, 32), (2, 32))
    }
    experts_of = {
        size: PackedExperts([[PackedWeight.from_dense(torch.ones(*size))]] * 4)
        for size in ((64, 32), (32, 32))
    }
    up, down = experts_of[64, 32], experts_of[32, 32]
    shared = made[64, 32], made[32, 32], made[1, 32]
    assert PackedMixture(made[4, 32], up, down, 2, True, SharedExpert(*shared))
    with pytest.raises(ConfigurationError, match="products of 5 experts are wanted for 32"):
        PackedMixture(made[5, 32], up, down, 2, True)
    with pytest.raises(ConfigurationError, match=r"\(4, 32, 64\).*; got"):
        PackedMixture(made[4, 32], down, down, 2, True)
    with pytest.raises(ConfigurationError, match=r"\(4, 32, 64\).*; got"):
        PackedMixture(made[4, 32], up, down, 2, True, SharedExpert(*shared[:2], made[2, 32]))


@pytest.mark.parametrize("wrong", ["blocks", "numbers", "chosen", "kinds", "rows"])
def test_what_cannot_be_packed_is_refused(wrong):
    odd = {**FEW, "moe_intermediate_size": 40}
    if wrong == "blocks":
        with pytest.raises(ConfigurationError, match=r"blocks of 32 inputs; got .* with 40"):
            kept(dense(based("qwen3_moe", **SIZES, **odd)), "int8")
    elif wrong == "numbers":
        model = dense(LEAN["mixtral"]())
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[2, 3, 4] = torch.inf
        with pytest.raises(ConfigurationError, match=r"layers\.1\.mlp\.experts\.down_proj of"):
            kept(model, "int8")
    elif wrong == "chosen":
        model = dense(LEAN["mixtral"]())
        small = kept(model)
        small.model.layers[0].mlp.gate.top_k = 9
        with pytest.raises(ConfigurationError, match="1 to 4 experts; got 9"):
            adapt(small)
    elif wrong == "kinds":
        each = [[PackedWeight.from_dense(torch.ones(16, 32), kind)] for kind in ("f32", "q8_0")]
        with pytest.raises(ConfigurationError, match="weights of one kind"):
            PackedExperts(each)
    else:
        run = PackedExperts([[PackedWeight.from_dense(torch.ones(16, 32))]] * 2)
        with pytest.raises(ConfigurationError, match=r"got \[3, 31\] and \[2\]"):
            run(torch.ones(3, 31), torch.tensor([1, 3]))
