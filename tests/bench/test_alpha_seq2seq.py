"""`bench alpha` on encoder-decoders: tiny random T5 pairs that read sources."""

import sys
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

from outrider import DraftModel, Engine, Root, SamplingParams, Speculator
from outrider.cli import app
from outrider.drafters import ReferenceLookup
from outrider.errors import ConfigurationError
from outrider.models import adapt
from outrider.text.decoder_prompt import DecoderPrompt
from outrider_lab.papers import (
    alpha,
    alpha_drafters,
    alpha_measure,
    alpha_quality,
    alpha_tasks,
    beams,
    options,
    score,
    theory,
)
from outrider_lab.papers.alpha_drafters import AlphaCopies, AlphaSource, cut
from outrider_lab.tasks import chooser

VOCAB = 32
START = 0


@lru_cache
def t5(noise=0.0, layers=2):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=layers,
        num_heads=4,
        decoder_start_token_id=START,
        eos_token_id=1,
        initializer_factor=3.0,
    )
    model = T5ForConditionalGeneration(config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return model


class Letters:
    """A tokenizer of one letter per id; 0 and 1 are the start and the end."""

    def __call__(self, text):
        return {"input_ids": [2 + ord(c) % (VOCAB - 2) for c in text]}

    def encode(self, text, **_):
        return self(text)["input_ids"]

    def decode(self, ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)


def speculator(folder, drafter=None, layers=2, eos=(1,)):
    t5(layers=layers).save_pretrained(folder)
    notes = SimpleNamespace(
        target=str(folder),
        draft=None,
        dtype="float32",
        device="cpu",
        threads=1,
        packed=False,
        vocab_size=VOCAB,
    )
    target = adapt(t5(layers=layers))
    opening = DecoderPrompt.of({"decoder_start_token_id": START}, eos, "T5")
    return Speculator(Engine(target, drafter or Root()), Letters(), eos, notes, opening)


ROWS = [
    {"source": f"def f{i}({'x, ' * (i % 4)}y):", "reference": f"def f{i}(y):"} for i in range(8)
]


def test_tasks_are_sources_that_are_read_once(tmp_path):
    pair = speculator(tmp_path)
    tasks = alpha_tasks.tasks(pair, ROWS)
    assert [task.prompt for task in tasks] == [(START,)] * len(ROWS)
    for task, row in zip(tasks, ROWS, strict=True):
        ids = Letters().encode(row["source"])
        assert task.inputs.ids_BS.tolist() == [ids]
        states = t5().encoder(torch.tensor([ids])).last_hidden_state
        torch.testing.assert_close(task.inputs.encoded.states_BTE, states, atol=1e-4, rtol=1e-3)
    asked = alpha_tasks.asked(tasks[0], SamplingParams(0), pair, 9)
    assert asked.limits.stop_ids == (1,)


def test_laws_are_those_of_the_source(tmp_path):
    """Against transformers' own forward; the laws of another source are not."""
    pair = speculator(tmp_path)
    tasks = alpha_tasks.tasks(pair, ROWS)
    batch = [alpha_tasks.asked(t, SamplingParams(1.0, seed=3), pair, 12) for t in tasks[:3]]
    texts = alpha_measure._written(pair, batch)
    for model, twin in ((pair.engine.target, t5()), (adapt(t5(0.2)), t5(0.2))):
        laws = AlphaSource(model).laws(texts, SamplingParams(1.0))
        expected = []
        for row, text in zip(ROWS, texts, strict=False):
            with torch.inference_mode():
                logits = twin(
                    input_ids=torch.tensor([Letters().encode(row["source"])]),
                    decoder_input_ids=torch.tensor([[*text.prompt, *text.new[:-1]]]),
                ).logits
            expected.append(logits[0].softmax(-1))
        torch.testing.assert_close(laws, torch.cat(expected), atol=1e-5, rtol=1e-4)
        moved = [
            replace(text, inputs=other.inputs)
            for text, other in zip(texts, texts[1:] + texts[:1], strict=True)
        ]
        assert (
            AlphaSource(model).laws(moved, SamplingParams(1.0)) - torch.cat(expected)
        ).abs().max() > 0.01


@pytest.mark.exhaustive
def test_alpha_agrees_with_what_engines_accept(tmp_path):
    """Texts that end are counted to their ends, at their own sources."""
    pair = speculator(tmp_path, eos=(5, 9, 12, 20))
    small = adapt(t5(0.1))
    tasks = alpha_tasks.tasks(pair, ROWS)
    sources = {"draft model": AlphaSource(small), "reference lookup": AlphaCopies()}
    how = {"tokens": 1000, "new_tokens": 60, "seed": 3}
    found = alpha_measure.alphas(pair, tasks, sources, 1.0, **how)
    assert list(found["tallies"]) == list(sources)
    alpha = {name: alpha_measure.alpha_of(found["tallies"][name]) for name in sources}
    lenient = [alpha_measure.alpha_of(found["tallies"]["draft model"], n).value for n in range(4)]
    assert lenient == sorted(lenient)
    batch = [
        alpha_tasks.asked(tasks[n % 8], SamplingParams(1.0, seed=n), pair, 60) for n in range(96)
    ]
    drafters = {"draft model": (DraftModel(small, (1,)), "rejection")}
    drafters["reference lookup"] = (ReferenceLookup(1), "match")
    for name, (drafter, rule) in drafters.items():
        stats = alpha_measure.decoded(Engine(pair.engine.target, drafter, rule), batch)[1].stats
        share = stats.accepted / stats.steps
        # eight sources, each with its own share, and texts of other seeds
        assert share == pytest.approx(alpha[name].value, abs=0.1), name
    texts = alpha_measure._written(pair, batch)
    assert len({len(text.new) for text in texts}) > 3  # some end before the others


def test_a_drafter_that_copies_is_judged_by_the_law_at_temperature_one(tmp_path):
    """At T = 0 what is accepted is the agreement of the argmaxes, and lenience only adds."""
    pair = speculator(tmp_path, eos=())
    tasks = alpha_tasks.tasks(pair, ROWS)
    how = {"tokens": 400, "new_tokens": 40, "seed": 0}
    found = alpha_measure.alphas(pair, tasks, {"copies": AlphaCopies()}, 0.0, **how)
    batch = [
        alpha_tasks.asked(task, SamplingParams(0), pair, alpha_tasks.length(pair, task, 40, 0))
        for task in tasks
    ]
    engine = Engine(pair.engine.target, ReferenceLookup(1), "match")
    stats = alpha_measure.decoded(engine, batch)[1].stats
    tally = found["tallies"]["copies"]
    lenient = [alpha_measure.alpha_of(tally, level).value for level in range(4)]
    assert lenient[0] == pytest.approx(stats.accepted / stats.steps)
    assert lenient == sorted(lenient)
    assert lenient[-1] > lenient[0]


def test_a_cut_t5_is_its_layers(tmp_path):
    pair = speculator(tmp_path, layers=4)
    made = cut(pair, str(tmp_path), [0, 2])
    torch.manual_seed(0)
    whole, config = (
        t5(layers=4),
        T5Config(**{**t5(layers=4).config.to_dict(), "num_decoder_layers": 2}),
    )
    twin = T5ForConditionalGeneration(config).eval()
    state = {k: v for k, v in whole.state_dict().items() if "decoder.block.1." not in k}
    state = {k: v for k, v in state.items() if "decoder.block.3." not in k}
    twin.load_state_dict(
        {k.replace("decoder.block.2.", "decoder.block.1."): v for k, v in state.items()}
    )
    tasks = alpha_tasks.tasks(pair, ROWS)
    texts = alpha_measure._written(
        pair, [alpha_tasks.asked(t, SamplingParams(1.0, seed=3), pair, 12) for t in tasks[:3]]
    )
    ours, theirs = (AlphaSource(m).laws(texts, SamplingParams(1.0)) for m in (made, adapt(twin)))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert (
        ours - AlphaSource(pair.engine.target).laws(texts, SamplingParams(1.0))
    ).abs().max() > 0.01


@pytest.mark.exhaustive
def test_the_experiment_with_and_without_a_draft(tmp_path, monkeypatch):
    monkeypatch.setattr(alpha_drafters, "library_tokens", lambda *_: torch.arange(600) * 7 % VOCAB)
    monkeypatch.setattr(alpha_drafters, "ORDERS", {"bigram": 2})
    monkeypatch.setattr(alpha_tasks, "MORE", 2)
    amount = alpha.AlphaAmount(40, 600, 1, 1, 4, 16, 3)
    arguments = (ROWS, tmp_path / "out", lambda *_: None, amount, False)
    alone = speculator(tmp_path / "model")
    tables = alpha.run(alone, *arguments)
    assert set(tables) == {"alpha", "speed", "lenience", "quality", "quality-equal"}
    assert {row["within 0.1"] for row in tables["quality-equal"]} == {"fewer than 20 prompts"}
    names = ["bigram", "reference lookup", "target, every other layer"]
    assert [row["drafter"] for row in tables["alpha"]][:3] == names
    assert any("T5-small" in row["drafter"] for row in tables["alpha"])
    speed = tables["speed"][0]
    assert speed["measured"] > 0
    assert speed["tokens a step"] >= 1
    greedy = [row for row in tables["quality"] if row["T"] == 0]
    assert [row["drafter"] for row in greedy] == [alpha_quality.PLAIN, *names]
    assert all(row["as plain"] == 1 for row in greedy)
    lines = (tmp_path / "out" / "alpha.jsonl").read_text()
    assert alpha.run(alone, *arguments) == tables
    assert (tmp_path / "out" / "alpha.jsonl").read_text() == lines
    drafted = speculator(tmp_path / "model", DraftModel(adapt(t5(0.1)), (1,)))
    drafted.notes.draft = "noisy"
    monkeypatch.setattr(alpha_drafters, "_layers", lambda source: None)
    monkeypatch.setattr(alpha_quality, "tables", lambda *_, **__: {})
    tables = alpha.run(drafted, *arguments)
    assert {"two", "lenience-speed"} < set(tables)
    assert alpha_drafters.DRAFT in [row["drafter"] for row in tables["alpha"]]


def test_beams_and_theory_read_the_sources(tmp_path):
    drafted = DraftModel(adapt(t5(0.2)), (1,))
    pair = speculator(tmp_path, drafted)
    found = beams.run(pair, ROWS[:2], tmp_path / "b", lambda *_: None, new_tokens=6, widths=(2,))
    assert {row["same beams"] for row in found["beams"]} == {"2/2"}
    pair.notes.draft = pair.notes.target
    amount = theory.TheoryAmount(2, 8, (2,))
    made = theory.run(pair, ROWS[:2], tmp_path / "t", lambda *_: None, amount, pictures=False)
    assert all(row["measured"] >= 1 for row in made["calls"])


@pytest.mark.parametrize(
    "words",
    [
        "tasks",
        "k-sweep",
        "draft-length",
        "budget",
        "tree",
        "chen",
        "chen --drafter suffix",
        "speed",
        "layers --quick",
        "k-sweep --draft-model corrector",
    ],
)
def test_what_goes_on_from_prompts_refuses_an_encoder_decoder(words, tmp_path):
    """They measured translations of code, or failed with an error of something else."""
    told = ["bench", *words.split(), "--model", "corrector", "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigurationError, match="encoder-decoder, 'corrector'; bench alpha, be"):
        CliRunner().invoke(app, told, catch_exceptions=False)


def test_drafters_are_not_tried_on_the_prompts_of_an_encoder_decoder(tmp_path):
    """It was told to come with its tokenizer, which it had."""
    (tmp_path / "mine.txt").write_text("Hello.")
    asked = chooser.ChoiceRequest("corrector", None, tmp_path / "mine.txt")
    with pytest.raises(ConfigurationError, match="got an encoder-decoder, 'corrector'"):
        chooser.run(asked, lambda *_: None)


def test_texts_for_a_speech_model_are_refused(tmp_path):
    pair = speculator(tmp_path)
    pair.hearing = object()
    with pytest.raises(ConfigurationError, match="got texts for it to read; only bench alpha"):
        alpha_tasks.tasks(pair, ROWS)


def test_scores_are_the_libraries():
    meant = ["def add(a, b):\n    return a + b", "import os"]
    right = alpha_quality.scores(meant, meant)
    assert {name: right[name] for name in ("BLEU", "ROUGE-2", "ROUGE-L", "exact")} == (
        pytest.approx({"BLEU": 100, "ROUGE-2": 100, "ROUGE-L": 100, "exact": 1})
    )
    half = alpha_quality.scores([meant[0], "x"], meant)
    assert half["ROUGE-2"] == half["ROUGE-L"] == 50
    assert half["exact"] == 0.5
    assert half["BLEU"] < 100


def test_worse_texts_are_not_called_equal():
    """Of 24 texts the arm loses a word in every third, in none, or half of all in every one."""
    meant = ["a b c d e f g h"] * 24
    fewer = ["a b c d e f g" if n % 3 == 0 else "a b c d e f g h" for n in range(24)]
    right = alpha_quality.equal(meant, meant, meant)
    assert (right["within 0.1"], right["difference"], right["power"]) == ("equal", 0, 1)
    close = alpha_quality.equal(fewer, meant, meant)
    assert close["within 0.1"] == "equal"
    assert close["difference"] == pytest.approx(-(1 - 14 / 15) / 3)
    worse = alpha_quality.equal(["a b c d"] * 24, fewer, meant)
    assert worse["within 0.1"] == "different"
    assert alpha_quality.equal(meant[:19], meant[:19], meant[:19])["within 0.1"].startswith("fewer")


def test_missing_libraries_and_texts_are_said_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ConfigurationError, match=r"outrider\[bench\]"):
        score.ready()
    with pytest.raises(ConfigurationError, match=r"got 'some/t5' without --prompts"):
        options.source_rows("some/t5", None)
    assert options.reads_sources("corrector")
    assert not options.reads_sources(None)
