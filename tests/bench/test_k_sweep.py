"""Chen's figure 1 on a law that is known: constant, so that what is accepted has a closed form."""

import json
from itertools import pairwise

import pytest
import torch
from test_experiments import _Notes, _Words

from outrider import DraftModel, Engine, Speculator
from outrider.models import LlamaRunner, TreeDecoder
from outrider.testing import VOCAB, llama
from outrider_lab.papers import k_sweep
from outrider_lab.theory import length

TARGET, DRAFT = [0.4, 0.3, 0.2, 0.1], [0.55, 0.25, 0.1, 0.1]
ALPHA = 0.85  # sum min(p, q)


def constant(law):
    """A model that gives every token this law, whatever stands before it."""
    made = llama(num_hidden_layers=1, tie_word_embeddings=False)
    with torch.no_grad():
        for weight in made.parameters():
            weight.zero_()
        made.model.embed_tokens.weight.fill_(1)
        made.model.norm.weight.fill_(1)
        logits = torch.full((VOCAB,), -40.0)
        logits[: len(law)] = torch.tensor(law).log()
        made.lm_head.weight.copy_(logits[:, None] / made.config.hidden_size)
    return TreeDecoder(LlamaRunner(made, False))


@pytest.fixture(scope="module")
def known():
    """A pair whose drafts are accepted with probability ALPHA, each for itself."""
    engine = Engine(constant(TARGET), DraftModel(constant(DRAFT), (1,)))
    return Speculator(engine, _Words(), (), _Notes())


def swept(pair, out, prompts, **how):
    rows = [{"prompt": f"def f{n}(x):"} for n in range(prompts)]
    how = {"top_p": 1.0, "pictures": False} | how
    tables = k_sweep.run(pair, rows, out, lambda *_: None, **how)
    lines = (out / "k-sweep.jsonl").read_text().splitlines()
    return [row[k_sweep.PANEL] for row in tables["k"]], [json.loads(line) for line in lines]


def test_repeats_are_new_samples_and_k_is_told_the_same_ones(known, tmp_path):
    _, lines = swept(known, tmp_path, 1, most=1, repeats=4, new_tokens=16)
    found = {row["key"]: (row["steps"], row["accepted"]) for row in lines}
    assert len({found[f"1 0 {repeat}"] for repeat in range(4)}) > 1
    assert all(found[f"0 0 {repeat}"] == (16, 0) for repeat in range(4))


@pytest.mark.slow
def test_the_panel_is_the_laws_and_falls(known, tmp_path):
    """Of two prompts with ten repeats each: as close to the truth as twenty texts come."""
    panel, _ = swept(known, tmp_path, 2, repeats=10)
    true = [length.expected_tokens(ALPHA, k) / (k + 1) for k in range(8)]
    print([f"{shown:.3f} of {right:.3f}" for shown, right in zip(panel, true, strict=True)])
    assert panel[0] == 1
    assert all(after < before for before, after in pairwise(panel))
    for shown, right in zip(panel, true, strict=True):
        assert shown == pytest.approx(right, rel=0.05)
