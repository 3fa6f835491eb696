"""Layers of the target as a draft: what they compute and share, exact texts, what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_whisper import VOCAB, audio, whisper
from transformers import T5Config, T5ForConditionalGeneration

from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions, load
from outrider.drafters.draft_model import SampledChildren
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.models import adapt, load_checks
from outrider.models.calibrate import Setting
from outrider.models.cpu_kernels import build
from outrider.models.layer_subset import LayerSubset, LayerSubsetSource, cut, fill, trim
from outrider.models.sources import ModelSource
from outrider.testing import llama
from tiny import PROMPTS, decode

SETTING, CPU = Setting(1, "float32", False), torch.device("cpu")


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        initializer_factor=3.0,
    )
    return T5ForConditionalGeneration(config).eval()


TARGETS = {
    "llama": lambda: llama(num_hidden_layers=3),
    "whisper": lambda: whisper("three layers"),
    "t5": t5,
}


def made(kind, given, vocab=None):
    """A target and its shallow draft, driven."""
    source = ModelSource(TARGETS[kind](), "target")
    vocab = vocab or source.given.config.vocab_size
    target = source.driven(SETTING, CPU, vocab)
    return target, LayerSubsetSource(source, given).driven(SETTING, CPU, vocab)


def folder(path, model, layers, ids=None, **changed):
    """A draft folder with the target's own layers, a little perturbed."""
    small = cut(model, layers)
    torch.manual_seed(1)
    decoder = small.get_decoder()
    weights = {
        name: weight.detach() + 0.01 * torch.randn_like(weight)
        for name, weight in decoder.named_parameters()
        if name.startswith(("layers.", "layer_norm."))
    }
    if ids is not None:
        weights["ids"] = torch.tensor(ids)
    path.mkdir(exist_ok=True)
    save_file(
        {n: w.contiguous() for n, w in (weights | changed).items()}, path / "draft.safetensors"
    )
    (path / "draft.json").write_text(json.dumps({"of": "a test", "layers": layers}))
    return path


def test_every_layer_is_the_model_itself_and_nothing_is_copied():
    model = TARGETS["llama"]()
    same = cut(model, (0, 1, 2))
    ids = torch.tensor([[5, 1, 9, 2]])
    with torch.inference_mode():
        assert torch.equal(same(ids).logits, model(ids).logits)
        assert not torch.equal(cut(model, (0, 2))(ids).logits, model(ids).logits)
    whole = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in cut(model, (0, 2)).parameters()} <= whole
    assert model.config.num_hidden_layers == len(model.model.layers) == 3


@pytest.mark.parametrize("kind", TARGETS)
@torch.inference_mode()
def test_a_shallow_draft_scores_trees_and_shares_the_encoder(kind):
    target, draft = made(kind, LayerSubset((0, 2)))
    assert draft.runner.layers == 2
    assert draft.reads == ("text" if kind == "llama" else "states")
    assert load_checks.trees(draft, "draft") < 1e-4
    assert (load_checks.paths(draft, "draft") or 0.0) < 1e-4
    assert target.runner.layers == 3


def texts(kind, target, drafter, how, rule=None, rows=3):
    inputs = None
    prompts = PROMPTS[:rows]
    if kind != "llama":
        prompts = [[3], [3, 4, 5], [3, 9]][:rows]
        inputs = [audio(1, seed) for seed in range(rows)] if kind == "whisper" else None
        probe = target.probe(rows)
        inputs = inputs or [probe.take([row]) for row in range(rows)]
    run = Engine(target, drafter, rule).run(prompts, how, StopConditions(20), inputs=inputs)
    found = [[] for _ in prompts]
    for block in run:
        found[block.request_id] += block.token_ids
    return found, run.stats


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2)])
def test_greedy_and_coupled_texts_are_plain_decodings(kind, counts):
    target, draft = made(kind, LayerSubset((0, 2)))
    for how in (SamplingParams(0), SamplingParams(1.0, seed=4)):
        expected, _ = texts(kind, target, Root(), how, "match")
        drafter = DraftModel(draft, counts, shared_noise=bool(how.temperature))
        found, stats = texts(kind, target, drafter, how)
        assert found == expected
        assert stats.accepted > 0


def test_a_folder_fills_the_layers_and_trims_the_head(tmp_path):
    model = TARGETS["whisper"]()
    ids = [2, 40, 7, 8, 9, 21, 30]
    path = folder(tmp_path / "draft", model, [0, 2], ids)
    source = ModelSource(model, "target")
    target = source.driven(SETTING, CPU, VOCAB)
    draft = LayerSubsetSource(source, path).driven(SETTING, CPU, VOCAB)
    with torch.inference_mode():
        assert load_checks.trees(draft, "draft") < 1e-4
    for how in (
        SamplingParams(0),
        SamplingParams(1.0, seed=4),
        SamplingParams(1.0, seed=4, logit_bias={2: -50.0}),
    ):
        rule = "match" if how.temperature else None
        drafter = DraftModel(draft, (2, 1), shared_noise=bool(how.temperature))
        found, stats = texts("whisper", target, drafter, how, rule)
        assert found == texts("whisper", target, Root(), how, "match")[0]
    drafted = []
    run = Engine(target, DraftModel(draft, (3, 2))).run(
        [[3]], SamplingParams(1.0, seed=1), StopConditions(20), inputs=[audio(1)], trace=True
    )
    for block in run:
        drafted += block.trace.tokens
    assert set(drafted) <= set(ids)
    assert len(set(drafted)) > 2
    assert stats.steps


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 2)])
def test_greedy_drafts_of_a_trimmed_head_are_those_of_its_law_over_all_tokens(counts):
    """Their best tokens are looked for among its own."""
    model = TARGETS["llama"]()
    small, ids = cut(model, (0, 2)), torch.tensor([2, 20, 7, 8, 9, 21, 30])
    trim(small, ids)
    target, draft = adapt(model), adapt(small)
    rules = (
        SamplingParams(0),
        SamplingParams(0, logit_bias={8: -torch.inf, 30: 0.1}, begin_suppress_tokens=(2, 9)),
        SamplingParams(0, min_new_tokens=9, repetition_penalty=1.3),
    )

    def drafted(policy, order, how):
        draft.ids_K = ids[order]
        drafter = DraftModel(draft, counts, policy=policy)
        run = Engine(target, drafter).run(PROMPTS[:2], how, StopConditions(12), trace=True)
        return [block.trace.tokens for block in run]

    same, other = torch.arange(7), torch.arange(7).flip(0)
    for how in rules:
        found = drafted(None, same, how)
        assert found == drafted(SampledChildren(), same, how)  # a policy is given the law over all
        assert found != drafted(None, other, how)


@pytest.mark.parametrize("rule", ["block", "traversal", "rejection", "match"])
def test_a_head_without_any_token_that_may_come_drafts_nothing(rule):
    """Rules of a request may ban all that the draft knows."""
    model = TARGETS["llama"]()
    small = cut(model, (0, 2))
    ids = torch.tensor([4, 5, 6])
    trim(small, ids)
    target, draft = adapt(model), adapt(small)
    draft.ids_K = ids
    how = SamplingParams(1.0, seed=3, logit_bias=dict.fromkeys(ids.tolist(), -torch.inf))
    found, run = decode(
        Engine(target, DraftModel(draft, (1, 1)), rule), PROMPTS[:2], how, StopConditions(12)
    )
    assert run.stats.accepted == 0
    assert not {token for text in found for token in text} & {4, 5, 6}


@pytest.mark.skipif(bool(build.unbuilt()), reason=f"no kernels: {build.unbuilt()}")
def test_a_folder_may_say_that_it_is_kept_in_8_bits(tmp_path, monkeypatch):
    target = llama(num_hidden_layers=3)
    folder(tmp_path, target, [0, 2])

    def noted(**more):
        return load(
            target,
            tmp_path,
            num_speculative_tokens=2,
            threads=1,
            pack_weights=False,
            dtype="float32",
            **more,
        ).notes.draft_dtype

    assert noted() is None
    (tmp_path / "draft.json").write_text('{"layers": [0, 2], "draft_dtype": "int8"}')
    assert noted() == "int8"
    assert noted(draft_dtype="target") is None
    monkeypatch.setattr(build, "unbuilt", lambda: "no C compiler: 'cc' is not there")
    assert noted() == "float32 (int8 is not to be had: no C compiler: 'cc' is not there)"
    (tmp_path / "draft.json").write_text('{"layers": [0, 2], "draft_dtype": "int4"}')
    with pytest.raises(ConfigurationError, match="draft_dtype 'int4' is not int8"):
        noted()


def test_what_does_not_fit_is_refused(tmp_path):
    model = TARGETS["whisper"]()
    source = ModelSource(model, "target")

    def driven(path):
        return LayerSubsetSource(source, path).driven(SETTING, CPU, VOCAB)

    with pytest.raises(ConfigurationError, match=r"3 decoder layers.*got draft layers \(0, 7\)"):
        driven(LayerSubset((0, 7)))
    for wrong in ((2, 0), (), (0, 0), (-1, 1), (0.5,)):
        with pytest.raises(ConfigurationError, match=r"draft_layers.*write draft_layers=\(0, 5\)"):
            LayerSubset(wrong)
    with pytest.raises(ConfigurationError, match="layer 0 of T5ForConditionalGeneration holds"):
        made("t5", LayerSubset((1, 2)))
    path = folder(tmp_path / "wide", model, [0], **{"layers.0.fc1.weight": torch.zeros(64, 48)})
    with pytest.raises(ConfigurationError, match=r"fc1.weight is \[64, 48\], of the target \[64"):
        driven(path)
    path = folder(tmp_path / "more", model, [0], **{"layers.0.fc9.weight": torch.zeros(2)})
    with pytest.raises(ConfigurationError, match=r"the target has no layers\.0\.fc9"):
        driven(path)
    with pytest.raises(VocabularyMismatch, match=r"does not know.*48 tokens"):
        driven(folder(tmp_path / "ids", model, [0], [3, VOCAB]))
    broken = folder(tmp_path / "broken", model, [0])
    (broken / "draft.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="cannot read the draft folder"):
        driven(broken)
    with pytest.raises(ValueError, match=r"it has no layers.0"):
        fill(cut(model, (0,)), {})
