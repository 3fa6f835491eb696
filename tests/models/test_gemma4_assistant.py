"""Gemma 4's assistants: their laws by transformers' own forward, folders, texts, refusals."""

import pytest
import torch
import transformers
from test_parallel_heads import LOAD, SAMPLING, steps

import outrider
from outrider import DraftModel, StopConditions
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.integrations.generate import SpeculativeGenerate
from outrider.models import TransformersRunner, TreeDecoder
from outrider.models.heads.gemma4_assistant import KVSharedHead, layers_without_keys
from outrider.models.heads.model import HeadModel
from tiny import PROMPTS, VOCAB, decode, llama

WINDOW = 6
KINDS = ["sliding_attention", "full_attention"]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}


def randomised(model):
    """Norms and tables that are not left as they come."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(0.1 * torch.randn_like(weight))
            if "embed_tokens.weight" in name:
                weight.normal_(std=0.5)
    return model.eval().requires_grad_(False)


def gemma(shared=2, **more):
    """A target of which the last layers read others' keys and values."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **SIZES,
        num_hidden_layers=4 + shared,
        num_kv_shared_layers=shared,
        layer_types=(KINDS * 3)[: 4 + shared],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        **more,
    )
    return randomised(transformers.Gemma4ForCausalLM(config))


def assistant(ordered=False, **more):
    torch.manual_seed(1)
    text = transformers.Gemma4TextConfig(
        **(SIZES | {"hidden_size": 24} | more),
        num_hidden_layers=2,
        num_kv_shared_layers=2,
        layer_types=KINDS,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=32,
        use_ordered_embeddings=ordered,
        num_centroids=8,
        centroid_intermediate_top_k=3,
    )
    with layers_without_keys(text):
        made = randomised(transformers.Gemma4AssistantForCausalLM(config))
    if ordered:
        made.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return made


@pytest.mark.parametrize("ordered", [False, True], ids=["all tokens", "clusters"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 1)], ids=["chain", "tree"])
@torch.inference_mode()
def test_the_law_of_each_node(counts, ordered):
    """Below ragged texts, longer than the window, over steps that keep some and plain ones."""
    model, own = gemma(), assistant(ordered)
    target = TreeDecoder(TransformersRunner(model))
    head = HeadModel(KVSharedHead(own, model), VOCAB)
    assert head.aux_layers == (3, 2, -1), "the last layers that make keys of their own"
    for draft, texts in steps(DraftModel(head, counts), target, 3.0):
        for row, text in enumerate(texts):
            if len(text) == 1:
                continue  # it has nothing to read: no state, no key
            told = model.model(
                input_ids=torch.tensor([text[:-1]]),
                output_hidden_states=True,
                return_shared_kv_states=True,
            )
            states, first = {-1: told.last_hidden_state[:, -1:]}, len(text) - 1
            for node in range(draft.laws.logits_BRV.shape[1]):
                above = int(draft.tree.parent_BN[0, node])
                token = draft.tokens_BN[row, node].view(1, 1)
                x = torch.cat([model.get_input_embeddings()(token), states[above]], -1)
                said = own(
                    inputs_embeds=x,
                    position_ids=torch.tensor([[first]]),
                    attention_mask=torch.ones(1, first, dtype=torch.long),
                    shared_kv_states=dict(told.shared_kv_states),
                )
                states[node] = said.last_hidden_state
                law, expected = draft.laws.logits_BRV[row, node], said.logits[0, 0]
                there = law > -torch.inf
                assert there.sum() == (3 * VOCAB // 8 if ordered else VOCAB)
                assert torch.allclose(law[there], expected[there], atol=1e-4)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("given", ["folder", "model"])
def test_it_drafts_for_its_target(tmp_path, shared, given):
    model, draft = gemma(shared), assistant(ordered=True)
    if given == "folder":
        draft.save_pretrained(tmp_path)
        draft = tmp_path
    speculator = outrider.load(model, draft, branching=(2, 1, 1), shared_noise=True, **LOAD)
    own = decode(speculator.plain().engine, PROMPTS, SAMPLING, StopConditions(14))[0]
    assert decode(speculator.engine, PROMPTS, SAMPLING, StopConditions(14))[0] == own
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    more = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    call = SpeculativeGenerate(draft_model=draft)
    assert torch.equal(
        model.generate(ids, **more, custom_generate=call), model.generate(ids, **more)
    )
    assert call.stats.drafted


def test_what_does_not_fit(tmp_path):
    with pytest.raises(ConfigurationError, match="a Gemma 4 target of width 32 to read"):
        outrider.load(llama(), assistant(), **LOAD)
    with pytest.raises(ConfigurationError, match=r"queries for keys .*full_attention \(2, 32\)"):
        outrider.load(gemma(), assistant(global_head_dim=32), **LOAD)
    with pytest.raises(VocabularyMismatch, match="a vocabulary of 40 tokens"):
        outrider.load(gemma(), assistant(vocab_size=40), **LOAD)
    assistant().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="cannot read the assistant"):
        outrider.load(gemma(), tmp_path, **LOAD)
