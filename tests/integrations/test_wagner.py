"""The paper's protocol runs on any pair and its tables hold every method."""

import torch

from outrider.lab.papers import wagner
from outrider.lab.papers.score import ROUGE_1
from outrider.lab.papers.wagner_pairs import tiny_pair
from outrider.lab.papers.wagner_tables import render


def test_all_tables_of_a_tiny_pair(monkeypatch):
    monkeypatch.setattr(wagner, "QUICK_GAMMAS", (1, 3))
    monkeypatch.setattr(wagner, "TABLE_8", (3,))
    pair = tiny_pair(40)
    document = wagner.run(pair, quick=True, prompts=1, tokens=5, large_vocab=60)
    methods = [row["method"] for row in document["main"]]
    assert methods == ["transformers", "paper exact", "paper sigmoid", "outrider"]
    assert [row["exact"] for row in document["main"]] == [True, True, False, True]
    assert all(row["calls"] > 0 for row in document["main"])
    assert {row["gamma"] for row in document["gamma"]} == {1, 3}
    text = render(document)
    assert "constructed agreement" in text
    assert "paper sigmoid (lossy)" in text


def test_the_function_is_put_back_after_an_error():
    from transformers.generation import utils

    before = utils._speculative_sampling
    try:
        with wagner.measured(lambda *a: 1 / 0, wagner.Calls()):
            utils._speculative_sampling(None, None, 1, torch.zeros(1))
    except ZeroDivisionError:
        pass
    assert utils._speculative_sampling is before


def test_rouge_counts_shared_words():
    assert ROUGE_1(["The Cat sat."], ["the cat sat"]) == 1  # rouge-score's own words
    assert ROUGE_1(["a a", "x"], ["a b", ""]) == 0.5  # what has no reference does not count
    assert ROUGE_1(["return a + b"], ["return a - b"]) == 1  # signs are no words
