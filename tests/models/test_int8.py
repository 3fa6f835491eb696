"""Drafts in 8 bits: what products compute, exact texts and laws, what is refused."""

import copy

import pytest
import torch
from tiny_whisper import audio, whisper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, Qwen3Config
from transformers.pytorch_utils import Conv1D

import tiny_heads
from outrider import (
    ConfigurationError,
    DraftModel,
    Engine,
    Root,
    SamplingParams,
    StopConditions,
    load,
    verifiers,
)
from outrider.models import LlamaRunner, TreeDecoder, adapt, linear
from outrider.models.cpu_kernels import build, cross_attention, int8
from outrider.models.cpu_kernels.int8 import Int8Product, rounded
from outrider.models.heads import blockwise
from outrider.models.heads.eagle3 import HeadStates
from outrider.models.prefill import causal
from outrider.testing import llama
from outrider.testing.runs import p_value, text_law
from outrider_lab.certify.laws import CertifiedText, law
from tiny import PROMPTS, Mislabelled, decode, pair

PROMPT, SIZE, LENGTH = (1, 3, 0, 2), 6, 3
QUICK = {"threads": 1, "pack_weights": False, "dtype": "float32"}

pytestmark = pytest.mark.skipif(bool(build.unbuilt()), reason=f"no kernels: {build.unbuilt()}")


def in_8_bits(weight):
    scale, whole = rounded(weight.float())
    return scale[:, None] * whole


def test_numbers_are_rounded_to_the_nearest():
    x = torch.randn(7, 50) * 10 ** torch.linspace(-6, 3, 7)[:, None]
    x[3] = 0
    assert ((in_8_bits(x) - x).abs() <= x.abs().amax(-1, keepdim=True) / 254 * 1.001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (5, 7), (70, 100)])
@torch.inference_mode()
def test_products_are_those_of_the_rounded_weights(outputs, inputs, dtype):
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x = torch.randn(2, 67, inputs).to(dtype)
    expected = x.double() @ in_8_bits(weight).double().T + bias.double()
    near = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    out = Int8Product(weight, bias)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=near, atol=near)
    with pytest.raises(ValueError, match=f"{inputs} inputs are wanted"):
        Int8Product(weight, bias)(x[..., 1:])
    plain = x.double() @ weight.double().T + bias.double()
    assert (plain - expected).abs().max() > 1e-2  # and not those of the weights themselves


def alike(run, x):
    """Whether a row has the same bits alone, among a few, among many, and with two threads."""
    whole, threads = run(x), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = [run(x)]
    finally:
        torch.set_num_threads(threads)
    found += [torch.cat([run(part) for part in x.split(size)]) for size in (1, 3, 5)]
    return all(torch.equal(each, whole) for each in found)


@torch.inference_mode()
def test_rows_are_alike_in_every_call():
    torch.manual_seed(1)
    run = Int8Product(torch.randn(1100, 96), None)
    x = torch.randn(70, 96).bfloat16()
    assert alike(run, x)
    assert not alike(lambda x: run(x) * (1 + 2**-7 * (len(x) == 1)), x)
    x[4, 2] = torch.nan
    assert run(x).isnan().all(-1).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-7), (torch.float32, 2**-15)])
@pytest.mark.parametrize(("slots", "size"), [(50, 64), (32, 8), (200, 80)])
@torch.inference_mode()
def test_attention_over_a_window(slots, size, dtype, error):
    torch.manual_seed(2)
    keys, values = torch.randn(2, 2, 3, slots, size).to(dtype)
    q = torch.randn(2, 9, 3, size).to(dtype)
    laid = cross_attention.laid_keys(keys), cross_attention.laid_values(values)
    there = torch.tensor([slots, slots - 13])
    out = cross_attention.attend(q, *laid, there, slots, 0.5)
    for row, seen in enumerate(there.tolist()):
        scores = q[row].transpose(0, 1).double() @ keys[row, :, :seen].double().mT
        expected = ((0.5 * scores).softmax(-1) @ values[row, :, :seen].double()).transpose(0, 1)
        torch.testing.assert_close(out[row].double(), expected, rtol=error, atol=error)

    with pytest.raises(TypeError, match="over keys of"):
        cross_attention.attend(q.double(), *laid, there, slots)
    for wrong in (q[:1], q[:, :, :2]):
        with pytest.raises(IndexError, match=f"{slots} slots of"):
            cross_attention.attend(wrong, *laid, there, slots)
    with pytest.raises(IndexError, match=f"{slots} slots of"):
        cross_attention.attend(q, *laid, there[:1], slots)

    def run(q_Q):
        return cross_attention.attend(q_Q[None].expand(2, -1, -1, -1), *laid, there, slots)[1]

    assert alike(run, q[1])
    assert not alike(lambda q: run(q) * (1 + error * (len(q) == 1)), q[1])


@torch.inference_mode()
def test_layers_of_any_model_are_kept_so_and_the_model_is_left_as_it_is():
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    config = GPT2Config(vocab_size=23, bos_token_id=1, eos_token_id=2, **shape)
    gpt2 = GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    before = gpt2(ids).logits
    got = law(adapt(gpt2, int8=True), [CertifiedText((3, 1), (4, 1, 5))], SamplingParams(1.0))[0]
    assert torch.equal(gpt2(ids).logits, before)
    small = copy.deepcopy(gpt2)
    small.lm_head.weight = torch.nn.Parameter(in_8_bits(small.lm_head.weight))
    for part in small.modules():
        if type(part) is Conv1D:
            part.weight = torch.nn.Parameter(in_8_bits(part.weight.T).T)
    expected = small(ids).logits[0, 1:4].softmax(-1)
    torch.testing.assert_close(got.float(), expected, rtol=1e-4, atol=1e-5)
    assert (got.float() - before[0, 1:4].softmax(-1)).abs().max() > 1e-4


def test_a_model_without_layers_of_those_types_is_refused():
    class Other(torch.nn.Linear):
        """Not one that is known."""

    model = llama(vocab_size=8)
    for part in list(model.modules()):
        for name, child in part.named_children():
            if type(child) is torch.nn.Linear:
                other = Other(child.in_features, child.out_features, bias=False)
                setattr(part, name, other)
    with pytest.raises(ConfigurationError, match="layers of type Linear and Conv1D; got draft_d"):
        linear.quantize_int8(model)


def engines(drafter_of):
    model = llama(5, vocab_size=SIZE)
    small = TreeDecoder(LlamaRunner(llama(3, vocab_size=SIZE), False, int8=True))
    target = TreeDecoder(LlamaRunner(model, False))
    engine = Engine(target, drafter_of(DraftModel(small, (1, 1))), verifiers.get("block"))
    return engine, text_law(model, PROMPT, LENGTH)


def test_texts_have_the_targets_law():
    engine, truth = engines(lambda drafter: drafter)
    chance, run = p_value(engine, truth, PROMPT, LENGTH, 1000)
    assert 0 < run.stats.accepted < run.stats.drafted
    assert chance > 1e-4


def test_a_draft_that_declares_another_law_is_seen():
    engine, truth = engines(Mislabelled)
    assert p_value(engine, truth, PROMPT, LENGTH, 1000)[0] < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_and_coupled_texts_are_plain_decodings(temperature):
    target, _ = pair()
    how = [SamplingParams(temperature, seed=row) for row in range(3)]
    plain, _ = decode(Engine(target, Root(), "match"), PROMPTS[:3], how, StopConditions(24))
    engine = Engine(
        target, DraftModel(adapt(llama(), int8=True), (2, 1), shared_noise=True), "match"
    )
    texts, run = decode(engine, PROMPTS[:3], how, StopConditions(24))
    assert texts == plain
    assert run.stats.accepted > 0


@torch.inference_mode()
def test_a_whisper_in_8_bits():
    model, source = whisper(), audio(1)
    whole, small = adapt(model), adapt(model, int8=True)
    nodes = causal(torch.tensor([[3, 1, 4, 1, 5, 9]]), torch.arange(6)[None], 128)
    logits = [m.forward(m.open(1, 128, source), nodes).logits_BQV for m in (whole, small)]
    overlap = torch.minimum(*(each.softmax(-1) for each in logits)).sum(-1)
    assert 0.9 < overlap.min() < 0.99999


def test_by_name(tmp_path):
    target, small = llama(), llama(1)
    found = load(target, small, draft_dtype="int8", num_speculative_tokens=2, **QUICK)
    assert found.notes.draft_dtype == "int8"
    plain = load(target, drafter="none", **QUICK)
    texts = [
        s.engine.run([PROMPTS[0]], [SamplingParams(0)], StopConditions(12)) for s in (found, plain)
    ]
    told = [[token for block in run for token in block.token_ids] for run in texts]
    assert told[0] == told[1]
    drafter = found.engine.drafter
    usual = load(target, small, num_speculative_tokens=2, **QUICK).engine.drafter
    laws = [
        law(d.model, [CertifiedText(tuple(PROMPTS[0]), (1, 2))], SamplingParams(1.0))
        for d in (drafter, usual)
    ]
    assert not torch.equal(*laws)


@pytest.mark.parametrize(
    ("draft", "more", "said"),
    [
        (None, {"drafter": "none"}, "draft_dtype is for a draft model; got draft_dtype='int8' and"),
        (True, {"draft_dtype": "int4"}, "draft_dtype must be 'int8', 'target' or None; got 'int4'"),
    ],
)
def test_what_cannot_be_had_is_refused(draft, more, said):
    with pytest.raises(ConfigurationError, match=said):
        load(llama(), draft and llama(1), **{"draft_dtype": "int8", **QUICK, **more})


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_a_head_may_be_kept_so_or_say_that_it_is(tmp_path, kind):
    head, target = tiny_heads.eagle3((0, 1, 2), kind=kind), tiny_heads.target()

    def logits(asked, **says):
        made = load(target, tiny_heads.speculators(tmp_path, head, **says), **asked, **QUICK)
        run, plain = (one.engine for one in (made, made.plain()))
        texts = [
            list(e.run([PROMPTS[0]], [SamplingParams(0)], StopConditions(12))) for e in (run, plain)
        ]
        told = [[token for block in text for token in block.token_ids] for text in texts]
        assert told[0] == told[1]
        states = torch.linspace(-1, 1, 32).expand(1, 1, -1)
        found = made.engine.drafter.model.runner.head.logits(HeadStates(states, states))
        return found, made.notes.draft_dtype

    whole, kept = logits({})
    assert kept is None
    small, kept = logits({"draft_dtype": "int8"})
    assert kept == "int8"
    assert 0 < (whole - small).abs().max() < 0.02 * whole.abs().max()
    says, kept = logits({}, draft_dtype="int8")
    assert kept == "int8"
    assert torch.equal(says, small)
    says, kept = logits({"draft_dtype": "target"}, draft_dtype="int8")
    assert kept is None
    assert torch.equal(says, whole)
    with pytest.raises(ConfigurationError, match="draft_dtype='int4', which is not 'int8'"):
        logits({}, draft_dtype="int4")


def test_a_head_of_another_kind_is_refused(tmp_path):
    target = llama()
    blockwise.save(blockwise.Blockwise(2, 32, 24, target.lm_head.weight), tmp_path, 32)
    with pytest.raises(ConfigurationError, match="target and EAGLE-3 heads; got the head"):
        load(target, tmp_path, draft_dtype="int8", **QUICK)


def test_without_kernels_it_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(build, "unbuilt", lambda: "no C compiler: 'cc' is not there")
    with pytest.raises(ConfigurationError, match="not to be had here: no C compiler"):
        load(llama(), llama(1), draft_dtype="int8", **QUICK)
    assert "compiled for a CPU, and models run on cuda" in int8.unsupported_reason(
        torch.device("cuda")
    )
