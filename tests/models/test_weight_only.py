"""Weights in a type of their own, sums in float32: numbers, texts, what is refused."""

import contextlib

import pytest
import torch
from families import FAMILIES, build
from tiny_whisper import audio, whisper
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import outrider
from outrider import (
    ConfigurationError,
    LoadConfig,
    SamplingParams,
    StopConditions,
    UnknownName,
    loading,
)
from outrider.models import adapt, attention, isa, linear, load_checks, weight_only
from outrider.models.cpu_kernels import build as kernels
from outrider.models.linear import fused
from outrider.models.prefill import causal
from outrider.models.weight_only_tensor import WeightOnlyTensor
from outrider.testing import llama
from tiny import PROMPTS

CPU = torch.device("cpu")
QUICK = {"threads": 1, "planner": "fixed"}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
TYPES = list(weight_only.KINDS)
needs_bf16_products = pytest.mark.skipif(
    not isa.has_bf16_products(), reason="bfloat16 weights are multiplied with float32 here"
)
needs_kernels = pytest.mark.skipif(
    weight_only.unsupported_reason(CPU) is not None,
    reason=f"no kernels: {weight_only.unsupported_reason(CPU)}",
)


def kept(model, dtype):
    made = linear.beside(model)
    weight_only.keep(made, dtype, "it")
    return made


def dense(model):
    """The same model with its widened weights, as torch multiplies them."""
    made = linear.beside(model)
    for module in made.modules():
        for leaf, weight in module._parameters.items():
            if isinstance(weight, WeightOnlyTensor):
                numbers = weight.numbers().contiguous()
                module._parameters[leaf] = torch.nn.Parameter(numbers, requires_grad=False)
    return made


def half_near(otherwise):
    """How near results of bfloat16 weights are: less where inputs are rounded to bfloat16, too."""
    return 0.03 if isa.has_bf16_products() else otherwise


@needs_kernels
@pytest.mark.parametrize("family", ["opt", "gemma2"])
def test_deep_models_that_run_their_own_forward_pass_the_check_at_load(family):
    """A last bit of attention decides how the next product rounds: more than float32 is allowed."""
    sizes = {
        "opt": {"num_hidden_layers": 12, "ffn_dim": 512, "word_embed_proj_dim": 256},
        "gemma2": {"num_hidden_layers": 12, "intermediate_size": 512, "head_dim": 64},
    }
    heads = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(family, vocab_size=512, **ends, **heads, **sizes[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
    target = adapt(kept(model, "bfloat16"))
    assert load_checks.paths(target, "target") < (0.01 if isa.has_bf16_products() else 1e-3)
    target.runner._takes -= {"position_ids"}  # a mistake that it has to find
    with pytest.raises(outrider.UnsupportedModel):
        load_checks.paths(target, "target")


def in_pieces(model, ids, sizes):
    """Logits of a text that is read in calls of so many tokens, of itself and of one beside it."""
    rows, count = ids.shape
    cache, read = model.open(rows, 256), []
    while len(read) < len(sizes):
        at = sum(sizes[: len(read)])
        here = torch.arange(at, at + sizes[len(read)]).expand(rows, -1)
        nodes = causal(ids[:, here[0]], here, model.width(count))
        read.append(model.forward(cache, nodes).logits_BQV)
    return torch.cat(read, 1)[0]


@needs_kernels
@pytest.mark.parametrize(
    "kind", ["gemma3_text", "granite", "phi3", "olmo2", "starcoder2", "minicpm3", "youtu"]
)
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=needs_bf16_products), "int8"])
@torch.inference_mode()
def test_a_token_of_an_own_forward_has_its_bits_in_calls_of_any_size(kind, dtype, monkeypatch):
    """Greedy text of such models depended on how many tokens were drafted: torch's attention sums
    two or three rows otherwise than four, and the next product rounded that to other numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32}
    latent |= {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16}
    if kind in ("minicpm3", "youtu"):  # whose values are narrower than what is asked with
        del sizes["head_dim"], heads["num_key_value_heads"]
        sizes |= latent
    config = AutoConfig.for_model(kind, vocab_size=64, pad_token_id=0, **sizes, **heads)
    ids = torch.randint(3, 64, (2, 96), generator=torch.Generator().manual_seed(1))
    cuts = ([1] * 96, [2] * 48, [3] * 32, [90, 1, 2, 3], [7] * 13 + [5])

    def texts():
        small = kept(build(config, "sdpa"), dtype)
        driven = adapt(small)
        assert driven.rounding.rows is None  # other layers have as many rows as there are tokens
        whole = in_pieces(driven, ids, [96])
        assert torch.equal(whole, in_pieces(driven, ids[:1], [96]))
        near = {"rtol": 1e-3, "atol": 0.05 * float(whole.abs().max())}
        torch.testing.assert_close(whole, small(ids[:1]).logits[0], **near)
        return [torch.equal(in_pieces(driven, ids, sizes), whole) for sizes in cuts]

    assert all(texts())
    found, _ = attention.tried(attention.fused, 2, 2, 64, torch.float32)
    if not found.rows.free:  # on this processor: what is looked after is needed
        monkeypatch.setattr(weight_only, "rounds_inputs", lambda _: False)
        assert not all(texts())


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@torch.inference_mode()
def test_models_compute_with_the_rounded_weights(dtype):
    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    config = GPT2Config(vocab_size=32, bos_token_id=1, eos_token_id=2, **shape)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    for model in (GPT2LMHeadModel(config).eval(), llama(**WIDE), llama(tie_word_embeddings=True)):
        if dtype in weight_only.QUANTISED and model.config.model_type == "llama":
            model = llama(**WIDE)
        before = model(ids).logits
        small = kept(model, dtype)
        found = small(ids).logits
        assert small.dtype == found.dtype == torch.float32
        expected = dense(small)(ids).logits
        # inputs of whole weights are rounded to 16 bits, those of bfloat16 ones perhaps to 8
        near = {"int8": 1e-3, "int4": 1e-3, "bfloat16": half_near(1e-5)}.get(dtype, 1e-5)
        assert (found - expected).abs().max() <= near * expected.abs().max()
        assert torch.equal(model(ids).logits, before)  # whose tensors it was made of
        rounded = (found - before).abs().max()
        assert rounded < 1e-4 if dtype == "float32" else rounded > 1e-4
        nodes = causal(ids, torch.arange(5)[None], 128)
        for driven in (adapt(small), adapt(small, packed=True)):
            logits = driven.forward(driven.open(1, 128), nodes).logits_BQV
            torch.testing.assert_close(logits, found, rtol=1e-4, atol=1e-4)
            assert driven.dtype == torch.float32
            assert driven.rounding.rows is None  # no form of a call has to be tried


@needs_kernels
@torch.inference_mode()
def test_what_is_no_layer_gets_the_numbers():
    weight = WeightOnlyTensor(weight_only.PackedWeight.from_dense(torch.randn(5, 32), "q8_0"))
    numbers = weight.record.dequantize()
    assert torch.equal(weight[2:4], numbers[2:4])
    assert torch.equal(weight[torch.tensor([4, 0])], numbers[[4, 0]])
    assert torch.equal(weight * 2, numbers * 2)
    assert torch.equal(weight.T @ numbers, numbers.T @ numbers)
    assert weight.detach().record is weight.record
    assert weight.type() == "torch.FloatTensor"
    assert all(
        same is weight
        for same in (weight.float(), weight.to(torch.float32), weight.type(torch.float32))
    )
    assert "q8_0" in repr(weight)


@needs_kernels
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_texts_of_every_drafter_are_plain_decodings(dtype, monkeypatch):
    monkeypatch.setattr(isa, "has_bf16_products", lambda: False)
    model, small = llama(**WIDE), llama(1, **WIDE)
    if dtype == "bfloat16":
        model, small = model.bfloat16(), small.bfloat16()

    def texts(**how):
        made = outrider.load(model, dtype=dtype, **QUICK, **how)
        assert made.engine.target.dtype == torch.float32
        run = made.engine.run(PROMPTS, [SamplingParams(0)] * len(PROMPTS), StopConditions(20))
        found = [[] for _ in PROMPTS]
        for block in run:
            found[block.request_id] += block.token_ids
        return found

    plain = texts(drafter="none")
    more = {"num_speculative_tokens": 3}
    for how in (
        {"draft": small, **more},
        {"draft": small, "branching": (2, 1)},
        {"draft_layers": (0,), **more},
        {"draft": small, "draft_dtype": "int8", **more},
        {"drafter": "recall"},
        {"drafter": "layer_skip", "drafter_options": {"exit": 1}, **more},
    ):
        assert texts(**how) == plain, how
    assert model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def gap(found, expected):
    """How far apart, of what there is."""
    return float((found - expected).norm() / expected.norm())


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
@torch.inference_mode()
def test_a_whisper_keeps_its_weights_so(dtype):
    source, small = audio(1), kept(whisper(), dtype)
    nodes = causal(torch.tensor([[3, 1, 4, 1, 5, 9]]), torch.arange(6)[None], 128)
    found, expected = (
        m.forward(m.open(1, 128, source), nodes).logits_BQV
        for m in (adapt(small), adapt(dense(small)))
    )
    near = half_near(1e-3) if dtype == "bfloat16" else 1e-3
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


@needs_kernels
@torch.inference_mode()
def test_what_a_whisper_hears_is_rounded_to_8_bits_with_its_weights():
    """What it says next is not: a step's activations are float32."""
    source, small = audio(3), kept(whisper(), "int8")
    lean, exact = adapt(small), adapt(dense(small))
    states, expected = (m.encode(source).encoded.states_BTE for m in (lean, exact))
    assert 1e-3 < gap(states, expected) < 0.03
    alone = lean.encode(source.take([2])).encoded.states_BTE
    assert torch.equal(alone, states[2:])  # whatever stands beside it
    nodes = causal(torch.tensor([[3, 1, 4, 1, 5, 9]]).expand(3, -1), torch.arange(6)[None], 128)
    logits, wanted = (
        m.forward(m.open(3, 128, lean.encode(source)), nodes).logits_BQV for m in (lean, exact)
    )
    assert 1e-4 < gap(logits, wanted) < 0.02  # keys and values of those states are, too


@needs_kernels
@torch.inference_mode()
def test_products_round_what_is_asked_for_and_in_8_bits():
    torch.manual_seed(3)
    layers = [torch.nn.Linear(64, outputs) for outputs in (32, 48)]
    x = torch.randn(70, 64)
    for dtype in weight_only.QUANTISED:
        parts = [kept(layer, dtype) for layer in layers]
        plain, rounded = (
            fused(parts, False, (0.5, 1.0), int8_activations=asked)(x) for asked in (False, True)
        )
        if dtype == "int8":
            assert 1e-3 < gap(rounded, plain) < 0.02
        else:
            assert torch.equal(rounded, plain)


@needs_kernels
def test_a_weight_that_is_lent_is_no_parameter_of_its_borrower():
    """As heads borrow their target's embedding."""
    model = kept(llama(**WIDE), "int8")
    borrower = torch.nn.Module()
    borrower.lent = model.get_input_embeddings().weight.detach()
    assert isinstance(borrower.lent, WeightOnlyTensor)
    assert not list(borrower.parameters())
    assert borrower.lent.record is model.get_input_embeddings().weight.record


@needs_kernels
@pytest.mark.parametrize("name", ["Gemma 2", "Qwen2"])
@torch.inference_mode()
def test_families_with_forwards_of_their_own(name):
    model = build(FAMILIES[name]())
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    small = kept(model, "bfloat16")
    near = half_near(1e-3)
    torch.testing.assert_close(small(ids).logits, dense(small)(ids).logits, rtol=near, atol=near)


def test_what_arithmetic_follows_from_a_type(monkeypatch):
    monkeypatch.setattr(kernels, "unbuilt", lambda: None)
    for has in (True, False):
        monkeypatch.setattr(isa, "has_tiles", lambda has=has: has)
        found = {name: weight_only.applies_to(name, CPU) for name in weight_only.KINDS}
        assert found == {
            "float32": False, "float16": True, "bfloat16": not has, "int8": True, "int4": True
        }  # fmt: skip
    assert not weight_only.applies_to("bfloat16", torch.device("cuda"))


@needs_kernels
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            torch.nan,
            r"got NaN or infinite ones in model\.layers\.1\.mlp\.up_proj\.weight of the tar",
        ),
        (torch.inf, r"weights are numbers; got NaN or infinite ones in model\.layers\.1\.mlp"),
        (None, "int8 has blocks of 32 inputs; got a layer with 48"),
    ],
)
def test_weights_that_cannot_be_kept_so_are_refused(broken, said):
    model = llama(**(WIDE if broken else {}))
    if broken:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 2] = broken
    with pytest.raises(ConfigurationError, match=said):
        outrider.load(model, dtype="int8", drafter="none", **QUICK)


def test_weights_that_others_have_quantised_are_left_to_them(monkeypatch):
    monkeypatch.setattr(isa, "has_bf16_products", lambda: False)
    model = llama(**WIDE).bfloat16()
    model.config.quantization_config = {"quant_method": "another"}
    with pytest.raises(ConfigurationError, match="quantised already, by its quantization_config"):
        outrider.load(model, dtype="int8", drafter="none", **QUICK)
    assert outrider.load(model, drafter="none", **QUICK).engine.target.dtype == torch.bfloat16


def test_what_there_is_is_said(monkeypatch):
    with pytest.raises(UnknownName, match="int4"):
        outrider.load(llama(), dtype="int3", drafter="none", **QUICK)
    monkeypatch.setattr(kernels, "unbuilt", lambda: "no C compiler: 'cc' is not there")
    with pytest.raises(ConfigurationError, match=r"dtype='int8' is not to be had here: no C comp"):
        outrider.load(llama(), dtype="int8", drafter="none", **QUICK)
    monkeypatch.setattr(isa, "has_bf16_products", lambda: False)
    made = outrider.load(llama(), drafter="none", pack_weights=False, **QUICK)
    assert made.notes.dtype == "float32"
    assert made.notes.weights == "float32, and so are states"


@needs_kernels
@pytest.mark.parametrize(("dtype", "waits"), [("int8", True), ("int4", True), ("float32", False)])
def test_quantised_weights_wait_before_anything_asks_for_kernels(monkeypatch, dtype, waits):
    """Whoever asks first waits for no longer than its patience, and that holds for all."""
    library, state = kernels.library(), kernels._State()
    monkeypatch.setattr(kernels, "_state", state)
    monkeypatch.setattr(kernels, "start", lambda: None)
    monkeypatch.setattr(kernels, "wait", lambda: setattr(state, "found", library))
    asked = LoadConfig(llama(), drafter="none", dtype=dtype, threads=1)
    with contextlib.nullcontext() if waits else pytest.raises(AssertionError):
        assert loading.choose_setting(loading.resolve(asked))[0].dtype == dtype
