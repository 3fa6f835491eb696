"""The corrector: its damages, its pairs, its model against transformers', and a rehearsal."""

import itertools
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from training.corrector import __main__ as corrector, evaluate, export, held_out
from training.corrector.damage import KINDS, damage, neighbours
from training.corrector.evaluate import edits, figures
from training.corrector.model import AFTER, BEFORE, T5, Shape, to_transformers
from training.corrector.pairs import MOST_TOKENS, Batches, Pair, Pairs

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / corrector.TOKENIZER
CODE = '''def total(numbers, start=0):
    """The sum of all numbers."""
    result = start
    for number in numbers:
        result += number
    return result
'''
TEXTS = [(ROOT / "training" / name).read_text() for name in ("corpus.py", "muon.py", "model.py")]
TINY = Shape(layers=1, width=32, heads=2, inner=48, vocabulary=4096)


@pytest.mark.parametrize("kind", KINDS)
def test_each_damage_is_small_and_repeats_with_its_seed(kind):
    for seed in range(40):
        damaged = kind(CODE, random.Random(seed))
        assert damaged == kind(CODE, random.Random(seed))
        # A doubled word is the longest of them.
        assert damaged is not None
        assert edits(damaged, CODE) <= (8 if kind.__name__ == "doubled_word" else 3)
    assert len({kind(CODE, random.Random(seed)) for seed in range(40)}) > 3
    assert kind("x", random.Random(0)) is None


def test_more_damages_leave_more_to_repair():
    mean = [
        sum(edits(damage(CODE, times, random.Random(seed)), CODE) for seed in range(60)) / 60
        for times in (0, 1, 4)
    ]
    assert mean[0] == 0
    assert 0 < mean[1] < 3
    assert mean[2] > 2 * mean[1]


def test_neighbours_are_mutual():
    for letter in "abcdefghijklmnopqrstuvwxyz":
        assert all(letter in neighbours(near) for near in neighbours(letter))
    assert neighbours("1") == ""


def test_edits_are_levenshtein():
    assert (edits("kitten", "sitting"), edits("", "abc"), edits("abc", ""), edits("a", "a")) == (
        3,
        3,
        3,
        0,
    )
    assert edits("flaw", "lawn") == 2


def test_pairs_are_windows_of_the_documents_and_some_are_whole():
    pairs = Pairs(TEXTS, seed=5)
    taken = [pairs[n] for n in range(300)]
    assert taken == [pairs[n] for n in range(300)]
    assert taken != [Pairs(TEXTS, seed=6)[n] for n in range(300)]
    assert all(any(pair.whole.rstrip("\n") in text for text in TEXTS) for pair in taken)
    kept = sum(pair.damaged == pair.whole for pair in taken)
    assert 15 < kept < 70


def test_batches_hold_a_budget_of_tokens_and_say_what_was_meant():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    batches = Batches(Pairs(TEXTS, 5), tokenizer, size=1024, pool=64)
    pool = batches.of_pool(0)
    rows = 0
    for sources, inputs, targets in pool:
        assert len(sources) == len(inputs) == len(targets)
        # Widths are rounded up to 16 after the budget is met.
        assert len(targets) == 1 or targets.numel() <= 1024 + 32 * len(targets)
        assert max(sources.shape[1], targets.shape[1]) <= MOST_TOKENS + 16
        rows += len(sources)
        for line, said in zip(inputs.tolist(), targets.tolist(), strict=True):
            asked = [token for token in said if token >= 0]
            assert asked[-1] == batches.end
            assert batches.end not in asked[:-1]
            assert line[: len(asked)] == [batches.end, *asked[:-1]]
            text = tokenizer.decode(asked, skip_special_tokens=True)
            assert any(text.rstrip("\n") in document for document in TEXTS)
    assert 50 < rows <= 64


def test_the_model_is_transformers_t5():
    torch.manual_seed(0)
    model = T5(Shape(2, 64, 4, 96, 100))
    twin = to_transformers(model)
    sources, inputs = torch.randint(2, 100, (3, 20)), torch.randint(2, 100, (3, 150))
    sources[1, 15:] = model.pad
    ours = model(sources, inputs)
    seen = sources != model.pad
    theirs = twin(input_ids=sources, attention_mask=seen.long(), decoder_input_ids=inputs).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    blind = twin(input_ids=sources, decoder_input_ids=inputs).logits
    assert (blind[1] - ours[1]).abs().max() > 0.01


def test_a_new_model_finds_its_own_last_tokens_in_the_source():
    """Cross attention of the first layer, untrained; a control with weights of its own."""
    torch.manual_seed(0)
    ids = torch.randperm(280)[None, :60] + 10
    ids[0, 40] = ids[0, 10]  # this one stands twice, behind other tokens

    def found(model):
        states = model.encoder(model.shared(ids), torch.zeros(1))
        x, first = model.shared(ids), model.decoder.layers[0]
        later = torch.full((60, 60), -1e9).triu(1)
        normed = first.norms[0](x)
        x = first.norms[1](x + first.own(normed, normed, model.decoder.positions(60) + later))
        query, key = (
            part.unflatten(-1, (8, -1)) for part in (first.cross.q(x), first.cross.k(states))
        )
        return torch.einsum("bqhe,bkhe->qk", query, key).argmax(-1)

    model = T5(Shape(vocabulary=300))
    for stack, looks in ((model.encoder, BEFORE + AFTER), (model.decoder, BEFORE)):
        shares = stack.positions(40)[0].softmax(-1)
        for head, distance in enumerate(looks):
            assert shares[head, 20, 20 + distance] > 0.8
    places = torch.arange(60)
    assert (found(model) == places).sum() >= 58
    model.decoder.layers[0].cross.k.weight.data.normal_(std=1 / 16)
    assert (found(model) == places).sum() < 20


def test_figures_count_texts_and_characters():
    pairs = [Pair("abc", "abd"), Pair("xyz", "xyz"), Pair("uv", "uv")]
    found = figures(pairs, ["abd", "xy", "uv"])
    assert found == {
        "texts": 3,
        "exact": 2 / 3,
        "error rate before": 1 / 8,
        "error rate after": 1 / 8,
        "harmed": 0.5,
    }


def run(module, *words):
    """A command of the recipe, in this process."""
    before, sys.argv = sys.argv, ["training", *map(str, words)]
    try:
        module.main()
    finally:
        sys.argv = before


@pytest.mark.exhaustive
def test_rehearsal(tmp_path, capsys, monkeypatch):
    """Train, stop, go on, export, write pairs, evaluate."""
    monkeypatch.chdir(ROOT)
    clock = itertools.count(0, 0.02)  # seconds: as many steps on a busy machine as on a quiet one
    monkeypatch.setattr(corrector, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    data = tmp_path / "corpus"
    data.mkdir()
    for split, texts in (("train", TEXTS[:2]), ("heldout", TEXTS[2:])):
        rows = [{"name": f"cpython-3/{n}.py", "text": text} for n, text in enumerate(texts)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    sizes = [word for name, size in vars(TINY).items() for word in (f"--{name}", size)]
    often = ["--batch", 1024, "--pool", 24, "--warmup", 2, "--report-every", 1]
    words = ["--data", data, "--out", out, *sizes, *often]
    run(corrector, *words, "--minutes", 0.02)
    first = capsys.readouterr().out
    assert "held out" in first
    losses = [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", first)]
    assert losses[-1] < losses[0] - 0.05
    run(corrector, *words, "--minutes", 0.03)
    assert "resumed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="give the same sizes or another --out"):
        run(corrector, *words, "--minutes", 0.03, "--layers", 2)
    model, pairs = tmp_path / "export", tmp_path / "pairs.jsonl"
    run(export, "--checkpoint", out / "last.pt", "--out", model)
    run(held_out, "--data", data, "--out", pairs)
    capsys.readouterr()
    run(evaluate, "--model", model, "--pairs", pairs, "--most", 1)
    found = json.loads(capsys.readouterr().out)
    assert found["all"]["texts"] == 1
    assert set(found) == {"all", *(kind.__name__ for kind in KINDS)}
    assert not any(model.glob("tokenizer*"))
