"""A head fitted to one text of SmolLM2-135M-Instruct drafts it; the text stays the model's own.

The folder `smollm2` of OUTRIDER_MODELS. Half a minute on one core.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import outrider
from outrider import SamplingParams, Stop
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config
from outrider.models.heads.formats import save
from outrider.models.heads.source import overlap

pytestmark = pytest.mark.real

PROMPT = "Write down the first ten elements of the periodic table, one per line."
GREEDY, BUDGET = SamplingParams(temperature=0), Stop(72)
LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False}


@pytest.fixture(scope="module")
def own(smollm2):
    """What the model says to the prompt, and the tokens of the whole conversation."""
    plain = outrider.load(smollm2, drafter="none", **LOAD)
    chat = [{"role": "user", "content": PROMPT}]
    told = plain.generate(chat, GREEDY, BUDGET).completions[0].token_ids
    text = plain.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return chat, told, plain.tokenizer(text, add_special_tokens=False)["input_ids"] + [*told]


@pytest.fixture(scope="module")
def fitted(smollm2, own, tmp_path_factory):
    """The folder of a head for the tokens of that text alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokens = torch.tensor([own[2]])
    ids = tokens.unique()
    layer = model.config.__class__(**{**model.config.to_dict(), "num_hidden_layers": 1})
    table = model.get_input_embeddings().weight
    head = Eagle3(Eagle3Config(layer, (2, 15, 27), len(ids)), embedding_VE=table, ids_K=ids)
    with torch.no_grad():
        told = model(input_ids=tokens, output_hidden_states=True)
        hidden = [told.hidden_states[layer][:, :-1] for layer in head.aux_layers]
        law = told.logits[0, 1:, ids].softmax(-1)
    before = overlap(head.eval(), model, tokens)
    optimizer = torch.optim.AdamW(head.parameters(), 1e-3)
    for _ in range(30):
        first = head(tokens[:, 1:], head.fuse(hidden))
        second = head(tokens[:, 2:], first.next_BQE[:, :-1])  # below a token that was drafted
        loss = cross_entropy(head.logits(first)[0], law)
        loss = loss + cross_entropy(head.logits(second)[0], law[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert overlap(head, model, tokens) > before + 0.3
    folder = tmp_path_factory.mktemp("head")
    save(head, folder, "HuggingFaceTB/SmolLM2-135M-Instruct")
    return folder


@pytest.mark.parametrize("more", [{}, {"drafter": "dynamic_tree"}, {"branching": (2, 2)}])
def test_a_fitted_head_drafts_and_the_text_is_the_models_own(smollm2, own, fitted, more):
    chat, told, _ = own
    speculator = outrider.load(smollm2, fitted, planner="fixed", **LOAD, **more)
    result = speculator.generate(chat, GREEDY, BUDGET)
    assert result.completions[0].token_ids == told
    assert result.stats.block_efficiency > 1.5
    print(f"{more or 'chain'}: {result.stats.block_efficiency:.2f} tokens a call")
