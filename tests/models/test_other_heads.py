"""Blockwise heads: their laws, texts, folders, refusals."""

import json

import pytest
import torch

import outrider
from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions
from outrider.engine import step
from outrider.engine.batch import begin
from outrider.engine.beam_search.search import search
from outrider.engine.request import Request
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.integrations.generate import SpeculativeGenerate
from outrider.models.heads import blockwise
from outrider.models.heads.blockwise import Blockwise, ParallelHead
from outrider.models.heads.model import HeadModel
from outrider.types import PLAIN
from outrider.verifiers import VERIFIERS
from tiny import PROMPTS, VOCAB, decode, llama, pair

IDS = torch.tensor([1, 2, 3, 5, 8, 13, 21])
LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False}


def heads(model, count=3, ids=None):
    torch.manual_seed(0)
    weight = model.lm_head.weight if ids is None else model.lm_head.weight[ids]
    return Blockwise(count, 32, 24, weight, ids).requires_grad_(False)


# ---------------------------------------------------------------------------------- blockwise


@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "some tokens"])
@torch.inference_mode()
def test_the_law_of_a_level_is_that_of_its_head(ids):
    """Rows of unequal length, plain steps between; deeper than there are heads nothing is drawn."""
    target = pair(runner="transformers")[0]
    model = target.runner.model
    small = heads(model, 2, ids)
    drafter = DraftModel(HeadModel(ParallelHead(small), VOCAB), (2, 1, 1))
    requests = [
        Request(prompt, SamplingParams(1.0, seed=row), StopConditions(16))
        for row, prompt in enumerate(PROMPTS[:3])
    ]
    batch = begin(target, drafter, requests, 128)
    for shape in (None, PLAIN, None, None):
        draft = step.propose(drafter, batch, shape)
        if shape is None:
            for row, length in enumerate(batch.context.length_B.tolist()):
                text = batch.context.tokens_BL[row, : length - 1]
                state = model.model(input_ids=text[None]).last_hidden_state[:, -1:]
                expected = small.logits(small(state))[0, 0]
                for node, depth in enumerate(draft.tree.depth_BN[0, :5].tolist()):
                    law = draft.laws.logits_BRV[row, node]
                    if depth == 2:
                        assert (law == -torch.inf).all()
                        continue
                    known = law if ids is None else law[ids]
                    assert torch.allclose(known, expected[depth], atol=1e-4)
            assert (draft.draws_BNK[:, 3:] == -1).all()
        scores = step.score(target, batch, draft, drafter.aux_layers)
        verdict = step.verify(VERIFIERS["traversal"], batch, draft, scores)
        batch, _ = step.commit(target, drafter, batch, draft, scores, verdict)


def test_folders_of_blockwise_heads(tmp_path):
    model = llama()
    blockwise.save(heads(model, ids=IDS), tmp_path, VOCAB)
    speculator = outrider.load(model, tmp_path, branching=(2, 2), **LOAD)
    read = speculator.engine.drafter.model.runner.heads
    assert torch.equal(read.ids_K, IDS)
    assert torch.equal(read.heads[2].up.weight, heads(model, ids=IDS).heads[2].up.weight)
    sampling = [SamplingParams(0)] * 5
    own = decode(speculator.plain().engine, PROMPTS, sampling, StopConditions(12))[0]
    assert decode(speculator.engine, PROMPTS, sampling, StopConditions(12))[0] == own
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    given = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    call = SpeculativeGenerate(draft_model=str(tmp_path))
    assert torch.equal(
        model.generate(ids, **given, custom_generate=call), model.generate(ids, **given)
    )


def test_blockwise_heads_that_do_not_fit(tmp_path):
    blockwise.save(heads(llama()), tmp_path, VOCAB)
    fields = json.loads((tmp_path / "config.json").read_text())

    def refused(error, said, **changed):
        (tmp_path / "config.json").write_text(json.dumps(fields | changed))
        with pytest.raises(error, match=said):
            outrider.load(llama(), tmp_path, **LOAD)

    refused(ConfigurationError, "medusa=True, which is not computed here", medusa=True)
    refused(ConfigurationError, "width 64, for a target of width 32", hidden_size=64)
    refused(VocabularyMismatch, "a vocabulary of 40 tokens", vocab_size=40)
    refused(ConfigurationError, "blockwise_heads", blockwise_heads=0)
    refused(ConfigurationError, "not those that their config.json asks for", blockwise_heads=4)


def test_greedy_text_of_every_head_is_the_targets(tmp_path):
    """No head can propose what the target would not say."""
    target = pair()[0]
    small = HeadModel(ParallelHead(heads(target_model())), VOCAB)
    for counts in ((1, 1), (2, 2)):
        engine = Engine(target, DraftModel(small, counts))
        texts = decode(engine, PROMPTS, [SamplingParams(0)] * 5, StopConditions(9))[0]
        assert (
            texts
            == decode(Engine(target, Root()), PROMPTS, [SamplingParams(0)] * 5, StopConditions(9))[
                0
            ]
        )


def test_beams_have_no_use_for_a_head():
    drafter = DraftModel(HeadModel(ParallelHead(heads(target_model())), VOCAB), (1, 1))
    request = Request(PROMPTS[0], SamplingParams(0), StopConditions(4))
    with pytest.raises(ConfigurationError, match="'draft_model' with a head, which reads them"):
        search(pair()[0], drafter, [request], outrider.Beams(2))


def test_drafters_that_hand_on_no_states_are_refused(tmp_path):
    blockwise.save(heads(llama()), tmp_path, VOCAB)
    with pytest.raises(ConfigurationError, match="'cascade' hands no states"):
        outrider.load(llama(), tmp_path, drafter="cascade", **LOAD)


def target_model():
    return pair(runner="transformers")[0].runner.model
