"""N-gram tables in files: what the training script writes is the law the drafter draws from."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import outrider
import tiny
from outrider.drafters import NgramTable
from outrider.drafters.ngram_table import count, read, write
from outrider.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from training.ngram import count_ngrams


@pytest.mark.parametrize("at_least", [1, 3])
def test_a_pruned_table_of_the_training_script_keeps_its_law(tmp_path, at_least):
    rng = np.random.default_rng(1)
    tokens = np.concatenate([np.tile(rng.integers(0, 40, 30), 5), rng.integers(0, 40, 400)])
    written = count_ngrams(tokens.astype(np.uint16), 40, order=4, at_least=at_least)
    written.save(tmp_path / "table.safetensors")
    table = read(tmp_path / "table.safetensors")
    assert (table.order, table.vocab_size) == (4, 40)
    for place in range(3, 300):
        context = tokens[place - 3 : place]
        law = table.probs(torch.as_tensor(context)[None])[0].double()
        assert law.sum().item() == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(law.numpy(), written.law(context.tolist()), atol=1e-7)


def test_a_count_comes_back_from_its_file(tmp_path):
    table = count([1, 2, 1, 2, 1, 3, 2, 1], 4, order=3)
    write(table, tmp_path / "mine.safetensors")
    again = read(tmp_path / "mine.safetensors")
    contexts = torch.tensor([[1, 2], [3, 2], [-1, 1], [-1, -1]])
    assert torch.equal(again.probs(contexts), table.probs(contexts))


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "text").write_text("counts")
    for name in ("text", "absent"):
        with pytest.raises(outrider.ConfigurationError, match=f"cannot read.*{name}"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("keys", "counts", "what"),
    [
        ([3, 1], [1, 1], "must rise"),
        ([0, 9], [1, 1], "known tokens"),
        ([0, 1], [1, 0], "be counted"),
        ([0, 1], [1], "keys"),
    ],
)
def test_a_table_without_a_law_is_refused(tmp_path, keys, counts, what):
    arrays = {"keys_1": torch.tensor(keys), "counts_1": torch.tensor(counts)}
    save_file(arrays, tmp_path / "bad.safetensors", metadata={"vocabulary": "9"})
    with pytest.raises(outrider.ConfigurationError, match=what):
        read(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("tokens", [[1, 2, 9], [1, -1, 2], [[1, 2], [3, 4]]])
def test_tokens_outside_the_vocabulary_are_not_counted(tokens):
    with pytest.raises(outrider.ConfigurationError, match=r"vocabulary of 8|one row"):
        count(tokens, 8, order=2)


def test_padding_of_the_target_is_never_drafted():
    target, _ = tiny.pair()
    table = count([1, 2, 3, 4, 5] * 6, 6, order=2)
    engine = Engine(target, NgramTable(table, 3, target.vocab_size))
    run = engine.run([[1, 2]], outrider.SamplingParams(1.0, seed=1), outrider.StopConditions(40))
    emitted = list(run)
    assert sum(len(block.token_ids) for block in emitted) == 40
    assert 0 < run.stats.accepted < run.stats.drafted


@pytest.mark.exhaustive
def test_load_drafts_with_the_shipped_table_or_with_ones_own(tmp_path):
    greedy, stop = outrider.SamplingParams(temperature=0), outrider.Stop(24)
    fixed = {"dtype": "float32", "threads": 1}
    shipped = outrider.load(drafter="ngram_table", **fixed)
    expected = shipped.plain().generate("def read(self, size", greedy, stop)
    found = shipped.generate("def read(self, size", greedy, stop)
    assert found.texts == expected.texts
    assert found.stats.mean_acceptance_length > 1
    write(count([5, 6, 7] * 9, 4096, order=2), tmp_path / "mine.safetensors")
    own = outrider.load(drafter="ngram_table", table=tmp_path / "mine.safetensors", **fixed)
    assert own.generate("def read(self, size", greedy, stop).texts == expected.texts


def test_a_table_of_another_vocabulary_is_refused():
    table = count([1, 2, 3] * 4, 8, order=2)
    with pytest.raises(outrider.VocabularyMismatch, match=r"8 tokens.*vocab_size=4096"):
        outrider.load(drafter="ngram_table", table=table, dtype="float32", threads=1)
