"""Every family of encoder-decoders over ragged trees, and decoders on another model's states."""

import pytest
import torch
from rows_with_sources import Rows, played
from seq2seq_families import DECODERS, FAMILIES, attentions, build

from outrider.errors import UnsupportedModel
from outrider.models import TreeDecoder, load_checks
from outrider.models.seq2seq import (
    DECODERS as DECODERS_OF_COMPOSITES,
    SUPPORTED,
    composed,
    runner as seq2seq_runner,
    runner_of,
)
from outrider.models.seq2seq.input_modality import there
from outrider.types import Inputs

CASES = [(name, attention) for name in FAMILIES for attention in attentions(name)]
NAMES = [f"{name}-{attention}" for name, attention in CASES]


def driven(name, attention="eager", seed=0):
    model = build(FAMILIES[name](), attention, seed)
    return TreeDecoder(runner_of(model)(model))


def blind(target):
    """The same without what the adapter does for positions: what a plain 4-D mask gives."""
    target.runner._patches, target.runner._named = [], False
    target.runner._takes -= {"position_ids"}
    return target


def test_at_least_22_families_and_every_supported_type():
    kinds = {config().model_type for config in FAMILIES.values()}
    assert kinds == SUPPORTED
    assert len(kinds) >= 22


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "attention"), CASES, ids=NAMES)
@torch.inference_mode()
def test_trees_score_as_paths_while_rows_join_and_leave(name, attention):
    target = driven(name, attention)
    sources = target.probe(4)._replace(encoded=None)
    assert played(target, sources) < 1e-5
    first = blind(target)
    rows = Rows(first, 1)
    rows.join(0, sources.take([0]), [0, *range(9, 20)])
    assert rows.step() > 1e-2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_check_at_load_passes_with_a_token_alone_in_it(name):
    assert load_checks.paths(driven(name), "target") < 1e-4


def test_a_decoder_that_looks_at_no_mask_for_a_token_alone_is_seen(monkeypatch):
    """LED's own forward makes none then: it would attend to slots of another branch."""
    monkeypatch.setattr(seq2seq_runner, "UNMASKED_ALONE", frozenset())
    with pytest.raises(UnsupportedModel, match="does not score trees as paths"):
        load_checks.paths(driven("LED"), "target")


@pytest.mark.parametrize("kind", DECODERS)
@torch.inference_mode()
def test_decoders_alone_attend_to_states_of_another_model(kind):
    model = build(DECODERS[kind](), kind=kind)
    draft = TreeDecoder(runner_of(model)(model))
    assert draft.reads == "states"
    states = draft.probe(4)
    assert played(draft, states) < 1e-5
    rows = Rows(blind(draft), 1)
    rows.join(0, states.take([0]), [0, *range(9, 20)])
    assert rows.step() > 1e-2


def test_every_decoder_of_a_composite_is_tried():
    configs = [config() for config in FAMILIES.values()]
    kinds = {config.decoder.model_type for config in configs if composed(config)}
    assert kinds == DECODERS_OF_COMPOSITES


@pytest.mark.parametrize("name", ["BigBird-Pegasus", "Moonshine", "Speech2Text", "BART"])
@torch.inference_mode()
def test_a_source_is_read_as_if_it_were_alone(name):
    """Also by encoders for which padding counts, or short sources change what follows."""
    target = driven(name)
    sources = target.probe(3)
    if name == "BigBird-Pegasus":  # beyond 14 tokens its attention is sparse
        mask = there([17, 7, 30])
        sources = Inputs((torch.arange(90).view(3, 30) % 90 + 5) * mask, None, mask)
    sources = sources._replace(encoded=None)
    together = target.encode(sources).encoded
    for row in range(3):
        alone = target.encode(sources.take([row])).encoded
        length = int(together.mask_BT[row].sum())
        assert length == int(alone.mask_BT.sum())
        gap = together.states_BTE[row, :length] - alone.states_BTE[0, :length]
        assert float(gap.abs().max()) < 1e-5
    if name == "BigBird-Pegasus":
        encoder = target.runner.model.get_encoder()
        assert encoder.attention_type == "block_sparse"
        ids = sources.ids_BS[2:]
        encoder.set_attention_type("original_full")
        full = encoder(input_ids=ids).last_hidden_state
        assert float((full - together.states_BTE[2:]).abs().max()) > 1e-3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["T5", "T5Gemma", "BART", "Whisper", "Speech2Text"])
def test_half_precision_scores_trees_as_paths(name):
    model = build(FAMILIES[name]()).to(torch.bfloat16)
    assert load_checks.paths(TreeDecoder(runner_of(model)(model)), "target") < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_families_on_a_cuda_device(name, attention):
    model = build(FAMILIES[name](), attention).cuda()
    assert load_checks.paths(TreeDecoder(runner_of(model)(model)), name) < 1e-4
