"""The shipped corrector: damaged code in, the code meant out, drafted by copies of the source."""

from functools import lru_cache

import pytest
import torch

import outrider
from outrider import SamplingParams, Stop
from outrider.shipped import CORRECTOR, parameters, shipped
from outrider_lab.bench.prompts import read_rows

ROWS = 3


@lru_cache
def corrector():
    return outrider.load(CORRECTOR, drafter="reference_lookup", dtype="float32", threads=1)


def pairs():
    rows = read_rows(shipped(CORRECTOR) / "heldout_pairs.jsonl", "source")
    short = [row for row in rows if 100 < len(row["source"]) < 260]
    return short[:ROWS]


def texts(speculator, sources, temperature=0.0):
    how = [SamplingParams(temperature, seed=n) for n in range(len(sources))]
    return speculator.generate(sources, how, Stop(120))


def test_it_copies_the_source_and_the_text_is_plain_decodings():
    sources = [row["source"] for row in pairs()]
    fast = texts(corrector(), sources)
    assert fast.texts == texts(corrector().plain(), sources).texts
    assert fast.stats.block_efficiency > 3.5
    for text, row in zip(fast.texts, pairs(), strict=True):
        assert abs(len(text) - len(row["reference"])) < 40


@pytest.mark.exhaustive
def test_other_drafters_copy_less():
    """Prompt lookup sees the answer alone, and the reference of another row is of no use."""
    sources = [row["source"] for row in pairs()]
    whole = texts(corrector(), sources).stats.block_efficiency
    assert texts(corrector().using(outrider.PromptLookup(8)), sources).stats.block_efficiency < 2
    moved = corrector().generate(
        sources,
        SamplingParams(0),
        Stop(120),
        reference=["import os\n" * 8] * len(sources),
    )
    assert moved.stats.block_efficiency < whole / 2


def test_sampled_text_is_plain_decodings():
    sources = [row["source"] for row in pairs()]
    fast = texts(corrector(), sources, 1.0)
    assert fast.texts == texts(corrector().plain(), sources, 1.0).texts
    assert fast.stats.block_efficiency > 1.5


def test_it_corrects():
    """Damages of every day, in a text of its own; most of them are found."""
    meant = """def total(self, values):
    for value in values:
        self.count += value
    return self.count"""
    damaged = meant.replace("values):", "values)").replace("self.", "slef.", 1)
    damaged = damaged.replace("return", "retrun")
    text = texts(corrector(), [damaged]).texts[0]
    assert sum(a != b for a, b in zip(text.split("\n"), meant.split("\n"), strict=True)) <= 1


def test_it_is_small_and_shares_the_tokenizer():
    folder = shipped(CORRECTOR)
    assert (folder / "model.safetensors").stat().st_size < 16e6
    assert not list(folder.glob("tokenizer*"))
    assert parameters(CORRECTOR) == sum(
        weight.numel() for weight in corrector().engine.target.runner.model.parameters()
    )
    pair = outrider.load(drafter="prompt_lookup", dtype="float32", threads=1, pack_weights=False)
    assert corrector().tokenizer.get_vocab() == pair.tokenizer.get_vocab()


@pytest.mark.exhaustive
def test_by_path_it_has_its_tokenizer_too():
    by_path = outrider.load(shipped(CORRECTOR), drafter="none", dtype="float32", threads=1)
    source = pairs()[0]["source"]
    assert texts(by_path, [source]).texts == texts(corrector(), [source]).texts
    with pytest.raises(outrider.ConfigurationError, match="tokenizer"):
        outrider.load(CORRECTOR, tokenizer="no/such/folder")


def test_batches_are_ragged_and_rows_are_those_alone():
    torch.manual_seed(0)
    sources = [row["source"] for row in pairs()]
    alone = [texts(corrector(), [source]).texts[0] for source in sources]
    assert texts(corrector(), sources).texts == alone
