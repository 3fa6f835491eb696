"""DFlash heads: the law of each place in a block against its formulas, folders, texts, refusals."""

import pytest
import torch
from tiny_dflash import BLOCK, MASK, block_states, dflash, written
from transformers import LlamaConfig, Qwen3Config

import outrider
from outrider import DraftModel, SamplingParams, StopConditions
from outrider.engine import step
from outrider.engine.batch import begin
from outrider.engine.request import Request
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.models.heads.dflash import SLIDING, BlockSight, MaskedBlockHead, spread
from outrider.models.heads.model import HeadModel
from outrider.types import PLAIN
from outrider.verifiers import VERIFIERS
from tiny import PROMPTS, VOCAB, decode, llama, pair
from tiny_heads import IDS, SIZES, target

LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False}


SIGHTS = {
    "all": (),
    "causal windows": (BlockSight(3, causal=True), BlockSight()),
    "windows": (BlockSight(2), BlockSight(5)),
    "causal": (BlockSight(causal=True),) * 2,
}


@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (2, 2, 1, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("sights", SIGHTS)
@torch.inference_mode()
def test_the_law_of_each_place_in_a_block(kind, counts, sights):
    """Ragged rows, one of a token, plain steps between; behind the block nothing is drawn."""
    driven = pair(runner="transformers")[0]
    head = dflash(kind, (0, 1), IDS, sights=SIGHTS[sights])
    drafter = DraftModel(HeadModel(MaskedBlockHead(head), VOCAB), counts)
    prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[3])
    requests = [
        Request(prompt, SamplingParams(1.0, seed=row + 7), StopConditions(24))
        for row, prompt in enumerate(prompts)
    ]
    batch, kept = begin(driven, drafter, requests, 128), 0
    for shape in (None, PLAIN, None, None, PLAIN, PLAIN, None):
        draft = step.propose(drafter, batch, shape)
        for row, length in enumerate(batch.context.length_B.tolist()) if shape is None else ():
            text = batch.context.tokens_BL[row, :length]
            told = driven.runner.model(input_ids=text[None], output_hidden_states=True)
            hidden = [told.hidden_states[layer][0, : length - 1] for layer in (0, 1)]
            expected = block_states(head, hidden, int(text[-1]))[1:]
            expected = expected @ head.lm_head.weight.T
            nodes = draft.laws.logits_BRV.shape[1]
            for node, depth in enumerate(draft.tree.depth_BN[0, :nodes].tolist()):
                law = draft.laws.logits_BRV[row, node]
                if depth == BLOCK - 1:
                    assert (law == -torch.inf).all()
                else:
                    assert torch.allclose(law[IDS], expected[depth], atol=1e-4)
                    assert (law > -torch.inf).sum() == len(IDS)
        scores = step.score(driven, batch, draft, drafter.aux_layers)
        verdict = step.verify(VERIFIERS["traversal"], batch, draft, scores)
        kept += int(verdict.count_B.sum())
        batch, _ = step.commit(driven, drafter, batch, draft, scores, verdict)
    assert kept


def authors(folder, head, **changed):
    fields = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
        **SIZES,
        "num_hidden_layers": 2,
    }
    return written(folder, fields | changed, head)


def speculators(folder, head, **changed):
    fields = {
        "speculators_model_type": "dflash",
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 2],
        "draft_vocab_size": head.config.draft_vocab_size,
        "projector_type": "dflash",
        "shift_label": False,
        "emb_dim": 256,
        "transformer_layer_config": {"model_type": "qwen3", **SIZES, "num_hidden_layers": 2},
    }
    return written(folder, fields | changed, head)


@pytest.mark.parametrize(("layout", "ids"), [(authors, None), (speculators, IDS)])
def test_a_folder_drafts_for_its_target(tmp_path, layout, ids):
    model = target()
    head = dflash(ids=ids, lent=model)
    speculator = outrider.load(model, layout(tmp_path, head), branching=(2, 1, 1), **LOAD)
    driven = speculator.engine.drafter.model
    assert driven.aux_layers == (1, 2)
    for name, weight in head.state_dict().items():
        assert torch.equal(driven.runner.head.state_dict()[name], weight), name
    assert "lm_head.weight" not in driven.runner.head.state_dict()
    sampling = [SamplingParams(0)] * 5
    own = decode(speculator.plain().engine, PROMPTS, sampling, StopConditions(14))[0]
    assert decode(speculator.engine, PROMPTS, sampling, StopConditions(14))[0] == own


def test_layers_that_go_without_saying(tmp_path):
    folder = authors(tmp_path, dflash(), dflash_config={"mask_token_id": MASK})
    assert spread(6, 2) == (1, 3)
    assert outrider.load(target(), folder, **LOAD).engine.drafter.aux_layers == (2, 4)


MIXED = [SLIDING, "full_attention"]
LAYERS = {"model_type": "qwen3", **SIZES, "num_hidden_layers": 2}
SLIDES = {"transformer_layer_config": {**LAYERS, "layer_types": MIXED, "sliding_window": 5}}


def own(**more):
    return {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1], **more}}


@pytest.mark.parametrize(
    ("layout", "fields", "sights"),
    [
        (speculators, SLIDES, [(5, True), (None, False)]),
        (speculators, SLIDES | {"sliding_window_non_causal": True}, [(5, False), (None, False)]),
        (authors, {"layer_types": MIXED, "sliding_window": 5}, [(5, True), (None, False)]),
        (authors, own(use_swa=True, swa_window_size=6), [(6, False)] * 2),
        (authors, own(causal=True), [(None, True)] * 2),
        (
            authors,
            {"layer_types": MIXED, "sliding_window": 5, **own(causal=False)},
            [(5, False), (None, False)],
        ),
        (authors, {}, [(None, False)] * 2),
    ],
)
def test_windows_of_layers(tmp_path, layout, fields, sights):
    """As speculators and vLLM read them; the texts stay the target's."""
    model = target()
    folder = layout(tmp_path, dflash(lent=model), **fields)
    speculator = outrider.load(model, folder, branching=(2, 1, 1), shared_noise=True, **LOAD)
    assert list(speculator.engine.drafter.model.runner.head.config.sights) == sights
    sampling = [SamplingParams(0), SamplingParams(1.0, seed=2)]
    expected = decode(speculator.plain().engine, PROMPTS[:2], sampling, StopConditions(14))[0]
    assert decode(speculator.engine, PROMPTS[:2], sampling, StopConditions(14))[0] == expected


@pytest.mark.parametrize(
    ("layout", "fields", "error", "said"),
    [
        (speculators, {"projector_type": "mlp"}, ConfigurationError, "projector_type='mlp'"),
        (speculators, {"shift_label": True}, ConfigurationError, "shift_label=True, which is not"),
        (speculators, {"block_size": None}, ConfigurationError, "block_size=None"),
        (authors, {"dflash_config": {"causal_head": True}}, ConfigurationError, "causal_head=True"),
        (authors, {"selector_rank": 8}, ConfigurationError, "selector_rank=8, which is not"),
        (authors, {"layer_types": [SLIDING] * 2}, ConfigurationError, "sliding_window=None"),
        (authors, {"hidden_size": 64}, ConfigurationError, "width 64, for a target of width 32"),
        (authors, {"vocab_size": 40}, VocabularyMismatch, "a vocabulary of 40 tokens"),
        (authors, {"num_hidden_layers": 3}, ConfigurationError, "not those that its config.json"),
    ],
)
def test_what_is_not_computed_or_does_not_fit(tmp_path, layout, fields, error, said):
    with pytest.raises(error, match=said):
        outrider.load(llama(num_hidden_layers=6), layout(tmp_path, dflash(), **fields), **LOAD)
