"""Encoder-decoders by `load` and `adapt`: shared encoders, refusals, inputs that cannot be read."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from seq2seq_families import ALONE, BART, BERT, DECODERS, FAMILIES, IDS, T5, build, own

from outrider import SamplingParams, StopConditions, load
from outrider.errors import ConfigurationError, UnsupportedModel, VocabularyMismatch
from outrider.models import TreeDecoder, adapt, calibrate, runner_of
from outrider.models.bart import BartReader
from outrider.models.prefill import causal
from outrider.models.seq2seq.input_modality import there
from outrider.models.seq2seq.reader import EncoderReader
from outrider.types import Encoded, Inputs

QUICK = {"threads": 1, "pack_weights": False, "dtype": "float32"}


def text_of(speculator, prompts=((2,), (2, 9)), sampling=None, inputs=None):
    """Texts of rows whose sources are made up."""
    target, count = speculator.engine.target, len(prompts)
    source = target.probe(count)._replace(encoded=None) if inputs is None else inputs
    how = sampling or [SamplingParams(1.0, seed=seed) for seed in range(count)]
    rows = [source.take([row]) for row in range(count)]
    run = speculator.engine.run(list(map(list, prompts)), how, StopConditions(12), inputs=rows)
    texts = [[] for _ in prompts]
    for block in run:
        texts[block.row] += block.token_ids
    return texts, run.stats


def bart(seed=0, layers=2, kind="bart"):
    return build(own(kind, **{**BART, "decoder_layers": layers}), seed=seed)


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return build(own("llama", **sizes, num_attention_heads=2, vocab_size=97))


def with_encoder_of(model, draft):
    """The draft with the target's encoder, as distilled models have it."""
    draft.get_encoder().load_state_dict(model.get_encoder().state_dict())
    return draft


@pytest.fixture
def read(monkeypatch):
    """How many rows encoders have read, whosever they are."""
    rows = []
    for reader in (BartReader, EncoderReader):
        right = reader.encode

        def encode(self, inputs, right=right):
            rows.append(len(inputs.mask_BS))
            return right(self, inputs)

        monkeypatch.setattr(reader, "encode", encode)
    return rows


@pytest.mark.parametrize(
    ("equal", "wish", "whose"),
    [
        (True, "auto", "the target's"),
        (True, False, "its own"),
        (False, "auto", "its own"),
        (False, True, "the target's"),
    ],
)
@pytest.mark.parametrize("kind", ["bart", "mvp"])  # lean, and by its own forward
def test_a_draft_with_an_equal_encoder_attends_to_the_targets_states(
    equal, wish, whose, kind, read
):
    target, draft = bart(kind=kind), bart(seed=1, layers=1, kind=kind)
    if equal:
        draft = with_encoder_of(target, draft)
    options = {"shared_noise": True, "share_encoder": wish, **QUICK}
    pair = load(target, draft, **options)
    assert pair.notes.encoder == whose
    plain = load(target, drafter="none", rule="match", **QUICK)
    assert plain.notes.encoder is None
    expected, _ = text_of(plain)
    read.clear()
    assert text_of(pair)[0] == expected
    assert sum(read) == (2 if whose == "the target's" else 4)


def test_a_decoder_alone_drafts_for_the_whole_model(tmp_path):
    """By path: a WhisperForCausalLM checkpoint stays one, and takes the target's states."""
    build(FAMILIES["Whisper"]()).save_pretrained(tmp_path / "target")
    small = build(DECODERS["WhisperForCausalLM"](), kind="WhisperForCausalLM", seed=1)
    small.save_pretrained(tmp_path / "draft")
    pair = load(
        tmp_path / "target", tmp_path / "draft", branching=(2, 2), shared_noise=True, **QUICK
    )
    assert pair.notes.encoder == "the target's"
    expected, _ = text_of(load(tmp_path / "target", drafter="none", rule="match", **QUICK))
    texts, stats = text_of(pair)
    assert texts == expected
    assert stats.mean_acceptance_length >= 1


def test_layers_and_context_are_the_decoders():
    """Of T5's `n_positions` and Whisper's `num_hidden_layers` neither is what it seems."""
    unlimited = adapt(build(own("t5", **T5)))
    assert unlimited.context > 1 << 20
    whisper = adapt(build(FAMILIES["Whisper"]()))
    assert (whisper.runner.layers, whisper.context) == (2, 64)
    alone = adapt(build(DECODERS["WhisperForCausalLM"](), kind="WhisperForCausalLM"))
    assert alone.runner.layers == 1
    assert adapt(bart(layers=3)).runner.layers == 3


SPEECH = {"encoder": {"model_type": "sew"}, "decoder": {"model_type": "bert", **BERT}}
REFUSED = {
    "nllb-moe": ({**BART, "num_experts": 2}, "how many tokens an expert takes"),
    "switch_transformers": ({**T5, "num_experts": 2}, "how many tokens an expert takes"),
    "prophetnet": ({}, "n-gram streams"),
    "fsmt": ({"langs": ["en", "de"], "src_vocab_size": 9, "tgt_vocab_size": 9}, "cuts the text"),
    "pop2piano": ({}, "sound or notes, not text"),
    "speech-encoder-decoder": (SPEECH, "nobody has tried one with an encoder of 'sew'"),
    "electra": ({"is_decoder": True, "add_cross_attention": True}, "nobody has tried"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_with_the_reason_before_weights_are_read(kind, tmp_path):
    sizes, reason = REFUSED[kind]
    own(kind, **sizes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"'{kind}' models are not supported: .*{reason}"):
        load(tmp_path, drafter="none", tokenizer=None, **QUICK)


def test_a_composite_of_an_untried_decoder_is_refused(tmp_path):
    config = FAMILIES["BERT to BERT"]()
    config.decoder = own("electra", is_decoder=True, add_cross_attention=True)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="decoder of 'electra'"):
        load(tmp_path, drafter="none", **QUICK)


@pytest.mark.parametrize("kind", ["whisper", "bart"])
def test_cross_attention_without_a_source_is_no_target(kind, tmp_path):
    """A folder without weights: the configuration tells."""
    own(kind, **{**ALONE, "is_encoder_decoder": False}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"'{kind}' decoder alone cannot be a target"):
        load(tmp_path, drafter="none", **QUICK)


def test_pairs_that_cannot_share_are_refused(tmp_path):
    target = bart()
    with pytest.raises(UnsupportedModel, match="reads sources, which a 'llama' target has not"):
        load(llama(), target, **QUICK)
    wide = own("bart", **{**BART, "d_model": 64})
    with pytest.raises(ConfigurationError, match=r"states of width 64.*states of width 32"):
        load(target, build(wide), share_encoder=True, **QUICK)
    alone = build(own("bart", **{**ALONE, "d_model": 64}), kind="BartForCausalLM")
    with pytest.raises(ConfigurationError, match=r"states of width 64.*states of width 32"):
        load(target, alone, **QUICK)
    with pytest.raises(ConfigurationError, match=r"share_encoder=True is for a draft model"):
        load(target, drafter="none", share_encoder=True, **QUICK)
    text = llama()
    with pytest.raises(ConfigurationError, match="share_encoder=True is for a target and a draft"):
        load(target, text, share_encoder=True, **QUICK)


def test_other_vocabularies_name_reference_lookup():
    other = build(own("bart", **{**BART, "vocab_size": 99}))
    with pytest.raises(VocabularyMismatch, match="output sizes differ"):
        load(bart(), other, **QUICK)


def features(*shape):
    return Inputs(None, torch.zeros(1, *shape), there([shape[0]]))


def ids(*tokens):
    return Inputs(torch.tensor([tokens]), None, there([len(tokens)]))


STATES = Encoded(torch.zeros(1, 4, 16), there([4]))
UNREADABLE = [
    ("BART", None, "got request 0 with no inputs"),
    ("BART", features(20, 8), "reads source text; got features"),
    ("BART", ids(*range(3, 80), *range(3, 80)), "at most 128 tokens; got a source of 154"),
    ("BART", ids(5, 97), "token ids below 97; got a source with token id 97"),
    ("BART", Inputs(torch.zeros(1, 1).long(), None, there([0, 1])[:1]), "without tokens"),
    ("BART", ids(5)._replace(encoded=STATES), "states of width 32; got states of width 16"),
    ("Whisper", ids(5, 6), r"log-mel frames \[B, 12, 8\]; got source text"),
    ("Whisper", features(12, 16), r"got features \[1, 12, 16\].*Inputs.draft"),
    ("Whisper", features(13, 8), r"got features \[1, 13, 8\]; cut longer audio into windows"),
    ("Speech2Text", features(40, 9), r"frames \[B, S, 8\]; got features \[1, 40, 9\]"),
    ("Moonshine", features(100), "at least 895 of samples"),
    ("TrOCR (ViT to TrOCR)", features(3, 16, 8), r"pixels \[B, 3, 16, 16\]"),
]


@pytest.mark.parametrize(("name", "inputs", "message"), UNREADABLE)
def test_inputs_that_cannot_be_read_are_one_clear_error(name, inputs, message):
    speculator = load(build(FAMILIES[name]()), drafter="none", **QUICK)
    given = None if inputs is None else [inputs]
    with pytest.raises(ConfigurationError, match=message):
        speculator.engine.run([[2]], SamplingParams(0), StopConditions(4), inputs=given)


def test_sources_for_a_model_of_text_alone_are_refused():
    with pytest.raises(ConfigurationError, match=r"reads text alone.*leave out inputs"):
        load(llama(), drafter="none", **QUICK).engine.run(
            [[2]], SamplingParams(0), StopConditions(4), inputs=[ids(5, 6)]
        )


def test_a_draft_with_another_mel_count_reads_its_own_frames():
    target = build(FAMILIES["Whisper"]())
    config = FAMILIES["Whisper"]()
    config.num_mel_bins = 16
    pair = load(target, build(config, seed=1), shared_noise=True, **QUICK)
    expected, _ = text_of(load(target, drafter="none", rule="match", **QUICK))
    source = pair.engine.target.probe(2)._replace(encoded=None)
    with pytest.raises(ConfigurationError, match=r"\[B, 12, 16\]; got features \[2, 12, 8\]"):
        text_of(pair, inputs=source)
    finer = Inputs(None, source.features.repeat(1, 1, 2), source.mask_BS)
    assert text_of(pair, inputs=source._replace(draft=finer))[0] == expected


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["bart", "mvp"])
def test_made_up_states_need_no_encoder(kind, read):
    target = adapt(bart(kind=kind))
    assert min(calibrate.cost(target, (1, 3), repeats=1).values()) > 0
    assert not read


@pytest.mark.parametrize("name", ["T5", "BART", "Whisper"])
@torch.inference_mode()
def test_hidden_states_are_what_the_output_layer_reads(name):
    model = build(FAMILIES[name]())
    target = TreeDecoder(runner_of(model)(model))
    cache = target.open(2, 64, target.probe(2))
    at = torch.arange(6).expand(2, -1)
    output = target.forward(cache, causal(at + 5, at, 64), last=3, aux_layers=(-1, 1))
    head = model.get_output_embeddings()
    assert output.hidden[0].shape == (2, 3, 32)
    assert torch.allclose(head(output.hidden[0]), output.logits_BQV, atol=1e-5)
    encoded = target.probe(2).encoded
    given = target.runner.given(encoded.states_BTE, encoded.mask_BT.long())
    own = model(**given, decoder_input_ids=at + 5, output_hidden_states=True)
    assert torch.allclose(output.hidden[1], own.decoder_hidden_states[1][:, -3:], atol=1e-4)


@pytest.mark.parametrize("name", ["T5", "MVP"])
def test_threads_share_one_model(name):
    """Patches are for one thread at a time: two caches, and plain calls between."""
    target = adapt(build(FAMILIES[name]()))
    source = target.probe(2)

    @torch.inference_mode()
    def scores(row):
        cache = target.open(1, 64, source.take([row]))
        at = torch.arange(8)[None] + 0
        return target.forward(cache, causal(at * (row + 3) % 90 + 5, at, 64)).logits_BQV

    @torch.inference_mode()
    def plain(row):
        return target.runner.plain(torch.arange(5, 25)[None], source.take([row]))

    alone = [[work(row) for row in (0, 1)] for work in (scores, plain)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            for work, expected in zip((scores, plain), alone, strict=True):
                every = [threads.submit(work, row) for row in (0, 1)]
                for one, wanted in zip(every, expected, strict=True):
                    assert torch.equal(one.result(), wanted)
    assert "forward" not in vars(target.runner.model.get_decoder())


def test_models_are_left_as_they_were():
    model = bart()
    before = copy.deepcopy(model.config.to_dict())
    adapt(model)
    assert model.config.to_dict() == before
    assert IDS["eos_token_id"] == model.config.eos_token_id
