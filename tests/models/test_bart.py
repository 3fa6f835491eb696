"""The lean runner of BART and its like computes what transformers computes, for every family."""

import pytest
import torch
from rows_with_sources import played
from seq2seq_families import BART, DECODERS, build, own

import outrider
from outrider import Beams, SamplingParams, Stop
from outrider.models import TreeDecoder, adapt, layer_subset, load_checks
from outrider.models.bart import BartRunner
from outrider.models.bart_encoder import FAMILIES, fits
from outrider.models.cpu_kernels import build as build_kernels
from outrider.models.linear import can_pack
from outrider.models.prefill import causal
from outrider.models.seq2seq import runner_of
from outrider.types import Inputs

#: Those of text, each with what its checkpoints have besides. Heads of 8 are torch's, of 16
#: compiled.
SHAPES = {
    "bart": {"activation_function": "gelu", "scale_embedding": True},
    "blenderbot": {"activation_function": "gelu"},
    "blenderbot-small": {"activation_function": "gelu"},
    "m2m_100": {"activation_function": "relu", "scale_embedding": True},
    "marian": {"activation_function": "swish", "scale_embedding": True},
    "mbart": {"activation_function": "gelu", "scale_embedding": True},
    "pegasus": {"activation_function": "relu", "scale_embedding": True},
    "plbart": {"activation_function": "gelu"},
}
SIZES = {"encoder_layers": 2, "decoder_layers": 3}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}


def made(kind, **more):
    """Random norms and biases as well, so that a wrong order of theirs shows."""
    model = build(own(kind, **{**BART, **SIZES, **SHAPES[kind], **more}))
    torch.manual_seed(1)
    for name, table in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "bias" in name:
            table.data.add_(0.2 * torch.randn_like(table))
    return model


def test_every_family_of_text_is_tried():
    assert SHAPES.keys() == FAMILIES.keys() - {"whisper"}


@torch.inference_mode()
def test_a_draft_that_writes_few_tokens_reads_all_of_them():
    """One trimmed to the first twenty read every other token of its target as the twentieth."""
    model = made("bart")
    whole, first = adapt(model, packed=False), torch.arange(20)
    source = whole.probe(1)
    ids, at = torch.tensor([[3, 41, 7, 55, 30]]), torch.arange(5)[None]
    assert int(ids.max()) < whole.vocab_size
    right = whole.forward(whole.open(1, 64, source), causal(ids, at, 64)).logits_BQV
    layer_subset.trim(model, first)
    trimmed = adapt(model, packed=False, vocab_size=whole.vocab_size)
    trimmed.ids_K = first
    found = trimmed.forward(trimmed.open(1, 64, source), causal(ids, at, 64)).known_BQK
    assert found.shape[-1] == len(first)
    assert torch.allclose(found, right[..., first], atol=1e-5)


@pytest.mark.parametrize("heads", [{}, HEADS], ids=["of 8", "of 16"])
@pytest.mark.parametrize("packed", [False, True] if can_pack() else [False])
@pytest.mark.parametrize("kind", SHAPES)
@torch.inference_mode()
def test_trees_score_as_transformers_while_rows_join_and_leave(kind, packed, heads):
    model = made(kind, **heads)
    lean, theirs = adapt(model, packed=packed), TreeDecoder(runner_of(model)(model))
    assert isinstance(lean.runner, BartRunner)
    in_one_call = packed and bool(heads) and not build_kernels.unbuilt()
    assert (lean.runner.whole is not None) == in_one_call
    sources = lean.probe(4)._replace(encoded=None)
    assert played(lean, sources, own=theirs) < 1e-5
    assert load_checks.trees(lean, "target") < 1e-4


@pytest.mark.parametrize("kind", [k for k in DECODERS if k.removesuffix("ForCausalLM") in {
    "Bart", "Blenderbot", "BlenderbotSmall", "Marian", "MBart", "Pegasus", "PLBart"
}])  # fmt: skip
@torch.inference_mode()
def test_a_decoder_alone_reads_the_targets_states(kind):
    model = build(DECODERS[kind](), kind=kind)
    lean, theirs = adapt(model), TreeDecoder(runner_of(model)(model))
    assert isinstance(lean.runner, BartRunner)
    assert lean.reads == "states"
    assert played(lean, lean.probe(4), own=theirs) < 1e-5


@torch.inference_mode()
def test_padding_within_a_source_is_read_as_the_model_reads_it():
    model = made("m2m_100")
    lean, theirs = adapt(model), TreeDecoder(runner_of(model)(model))
    ids = torch.tensor([[9, 1, 7, 1, 1, 30]])
    source = Inputs(ids, None, torch.ones_like(ids, dtype=torch.bool))
    told = [one.encode(source).encoded.states_BTE for one in (lean, theirs)]
    torch.testing.assert_close(*told, rtol=1e-4, atol=1e-5)


def test_what_is_no_such_model_runs_its_own_forward():
    model = made("bart")
    assert fits(model)
    model.model.decoder.layers[0].fc1 = type("Other", (torch.nn.Linear,), {})(32, 48)
    assert not fits(model)
    assert not fits(build(own("mvp", **BART)))


PROMPTS = [[5, 9, 30, 31, 8, 2], [40, 41, 42, 40, 41, 42, 40, 41, 2], [60, 2], [7, 8, 9, 10, 2]]


@pytest.fixture(scope="module", params=SHAPES)
def loaded(request):
    model = made(request.param, **HEADS)
    model.generation_config.forced_eos_token_id = model.generation_config.forced_bos_token_id = None
    return model, outrider.load(model, dtype="float32", threads=1, pack_weights=False)


def generated(model, prompt, beams=1):
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, num_beams=beams
    )[0, 1:].tolist()
    return ids[: ids.index(2) + 1] if 2 in ids else ids


def texts(generation):
    return [done.token_ids for done in generation.completions]


def test_greedy_texts_of_a_ragged_batch_are_transformers(loaded):
    model, speculator = loaded
    assert "lean" in speculator.engine.target.runner.means
    expected = [generated(model, prompt) for prompt in PROMPTS]
    how = (SamplingParams(0), Stop(24))
    for one in (speculator.plain(), speculator, speculator.using(outrider.ReferenceLookup(4))):
        assert texts(one.generate(PROMPTS, *how)) == expected
        assert texts(one.generate(PROMPTS[:1], *how)) == expected[:1]


def test_seeded_texts_do_not_depend_on_drafts(loaded):
    _, speculator = loaded
    how = [SamplingParams(0.9, seed=row) for row in range(len(PROMPTS))]
    plain = texts(speculator.plain(shared_noise=True).generate(PROMPTS, how, Stop(24)))
    for drafter in (outrider.ReferenceLookup(4), outrider.PromptLookup(3)):
        done = speculator.using(drafter, "match").generate(PROMPTS, how, Stop(24))
        assert texts(done) == plain


def test_beams_are_transformers(loaded):
    model, speculator = loaded
    for prompt in PROMPTS[:2]:
        done = speculator.generate([prompt], SamplingParams(0), Stop(24), beams=Beams(5))
        assert texts(done)[:1] == [generated(model, prompt, 5)]
