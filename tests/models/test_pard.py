"""PARD draft models: the law of each place by the model's own forward, folders, texts."""

import json

import pytest
import torch
from recurrent_models import made
from test_parallel_heads import LOAD, SAMPLING, steps

import outrider
from outrider import DraftModel, SamplingParams, StopConditions, testing
from outrider.errors import ConfigurationError, UnsupportedModel, VocabularyMismatch
from outrider.models import TransformersRunner, TreeDecoder
from outrider.models.heads.pard import ParallelDraftModel
from tiny import PROMPTS, VOCAB, decode, llama, pair

MASK, DEPTH = 31, 4


def drafting(device="cpu"):
    """A tiny model that guesses four tokens."""
    model = llama(num_hidden_layers=2, seed=3).to(device)
    return ParallelDraftModel(TreeDecoder(TransformersRunner(model)), MASK, DEPTH)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1), (2, 2, 1, 1, 1)], ids=["chain", "tree"])
@torch.inference_mode()
def test_masks_say_tokens_further_on(counts):
    """Ragged rows, plain steps between: accepted tokens are read as text; behind the last mask
    nothing is drawn."""
    target, draft_model = pair(runner="transformers")[0], drafting()
    own = draft_model.model.runner.model
    for draft, texts in steps(DraftModel(draft_model, counts), target):
        for row, text in enumerate(texts):
            whole = torch.tensor([[*text, *[MASK] * (DEPTH - 1)]])
            expected = own(input_ids=whole).logits[0, -DEPTH:]
            nodes = draft.laws.logits_BRV.shape[1]
            for node, depth in enumerate(draft.tree.depth_BN[0, :nodes].tolist()):
                law = draft.laws.logits_BRV[row, node]
                if depth == DEPTH:
                    assert (law == -torch.inf).all()
                else:
                    assert torch.allclose(law, expected[depth], atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1)])
def test_it_is_a_drafter_like_others(counts):
    testing.check_drafter(lambda model: DraftModel(drafting(model.device), counts))


def folder(path, model, **fields):
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pard_token": MASK} | fields))
    return path


@pytest.mark.parametrize("drafter", ["draft_model", "dynamic_tree", "either"])
def test_a_folder_drafts_for_any_target_of_its_tokens(tmp_path, drafter):
    where = folder(tmp_path, llama(num_hidden_layers=2, seed=3))
    speculator = outrider.load(llama(), where, drafter=drafter, shared_noise=True, **LOAD)
    assert speculator.notes.draft == str(tmp_path)
    own = decode(speculator.plain().engine, PROMPTS, SAMPLING, StopConditions(14))[0]
    assert decode(speculator.engine, PROMPTS, SAMPLING, StopConditions(14))[0] == own


def test_the_targets_own_weights_accept_what_is_right(tmp_path):
    """With the target as its own draft the first guess is always the target's."""
    where = folder(tmp_path, llama())
    speculator = outrider.load(llama(), where, drafter="draft_model", planner="fixed", **LOAD)
    told = speculator.generate(PROMPTS[:2], SamplingParams(0), outrider.Stop(30, token_ids=()))
    assert told.stats.mean_acceptance_length > 1.9


def test_what_does_not_fit(tmp_path):
    with pytest.raises(ConfigurationError, match=f"pard_token={VOCAB} and a vocabulary"):
        outrider.load(llama(), folder(tmp_path, llama(), pard_token=VOCAB), **LOAD)
    with pytest.raises(VocabularyMismatch, match="output sizes differ"):
        outrider.load(llama(), folder(tmp_path, llama(vocab_size=VOCAB + 8)), **LOAD)
    with pytest.raises(UnsupportedModel, match="reads its masks anew in every step"):
        outrider.load(llama(), folder(tmp_path, made("mamba2", vocab_size=VOCAB)), **LOAD)
