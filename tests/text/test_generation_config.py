"""What a decoder-only model's generation_config.json says is followed, or named; calls override."""

import json
import pickle
import shutil
from contextlib import suppress

import pytest
import torch
from served import serving

import outrider
from outrider import Root, SamplingParams, Stop, cli
from outrider.integrations.generate import generate
from outrider.loading import load
from outrider.shipped import shipped as folder_of
from outrider.text.decoder_prompt import ModelDefaults
from outrider.text.speculator import Speculator
from tiny import PROMPTS, llama

PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False, "drafter": "prompt_lookup"}
SAID = [
    {"suppress_tokens": [3, 9, 17]},
    {"bad_words_ids": [[5], [8, 2], [1, 4, 1]]},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"begin_suppress_tokens": [7, 8, 20], "min_new_tokens": 4, "eos_token_id": 11},
    {"min_length": 12, "eos_token_id": [11, 4]},
    {"sequence_bias": [[[5], -4.0], [[2, 7], 6.0]]},
    {"forced_eos_token_id": 6, "suppress_tokens": [1], "repetition_penalty": 1.2},
]


def saved(path, **said):
    """A model's folder whose generation configuration says this, and the model."""
    model = llama()
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(said))
    return type(model).from_pretrained(path)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("said", SAID, ids=lambda said: "-".join(said))
def test_texts_are_transformers_own(tmp_path, said):
    model = saved(tmp_path, **said)
    speculator = load(tmp_path, **PLAIN)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        told = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
        ours = speculator.generate([prompt], SamplingParams(0), Stop(16)).completions[0].token_ids
        assert ours == told[0, len(prompt) :].tolist()
        through = generate(model, ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert through[0].tolist() == told[0].tolist()


def test_a_call_overrides_and_none_ignores(tmp_path):
    plain = load(llama(), **PLAIN)
    saved(tmp_path, repetition_penalty=1.7, suppress_tokens=[3])
    ruled = load(tmp_path, **PLAIN)
    alone = load(tmp_path, generation_config="none", **PLAIN)
    usual, other = (s.generate([PROMPTS[0]], SamplingParams(0), Stop(12)) for s in (plain, ruled))
    assert usual.completions[0].token_ids != other.completions[0].token_ids
    for one in (
        alone.generate([PROMPTS[0]], SamplingParams(0), Stop(12)),
        ruled.generate([PROMPTS[0]], SamplingParams(0), Stop(12), rules=SamplingParams()),
    ):
        assert one.completions[0].token_ids == usual.completions[0].token_ids
    assert ruled.rules.repetition_penalty == 1.7
    assert ruled.using(Root()).rules == ruled.rules
    with pytest.raises(outrider.ConfigurationError, match="'auto' or 'none'"):
        load(tmp_path, generation_config="vllm", **PLAIN)


@pytest.mark.parametrize("said", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_temperature_and_filters_are_those_of_texts_without_any(tmp_path, said):
    saved(tmp_path, temperature=3.0, do_sample=True, **said)
    speculator = load(tmp_path, **PLAIN)
    greedy = speculator.generate([PROMPTS[0]], SamplingParams(0), Stop(12)).completions[0].token_ids
    drawn = [
        speculator.generate([PROMPTS[0]], how, Stop(12)).completions[0].token_ids
        for how in (None, SamplingParams(3.0, seed=1))
    ]
    assert drawn[0] == greedy
    assert drawn[1] != greedy


def test_what_does_not_draw_has_no_temperature():
    said = {"do_sample": False, "temperature": 0.1, "top_k": 3, "repetition_penalty": 1.1}
    assert ModelDefaults.of(said, []).followed == ("repetition_penalty=1.1",)


def test_what_is_not_followed_is_named_in_one_line(tmp_path, caplog):
    saved(tmp_path, typical_p=0.9, guidance_scale=2.0, do_sample=True)
    with caplog.at_level("WARNING", "outrider"):
        load(tmp_path, **PLAIN)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "guidance_scale=2.0, typical_p=0.9, which outrider does not follow" in lines[0]


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 7.0}, {"repetition_penalty": -2}])
def test_what_nothing_can_follow_is_our_error(tmp_path, bad):
    (name, _), *_ = bad.items()
    with pytest.raises(outrider.ConfigurationError, match=name):
        ModelDefaults.of(bad, [])


@pytest.fixture(scope="module")
def banned(shipped):
    """What the shipped pair says first, which the model's configuration bans."""
    done = shipped.generate("def f(x):\n", SamplingParams(0), Stop(1)).completions[0]
    return done.token_ids[0]


@pytest.fixture(scope="module")
def published(tmp_path_factory, banned):
    """The shipped target with a generation configuration of its own."""
    path = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(folder_of("target"), path, symlinks=True)
    said = json.loads((path / "generation_config.json").read_text())
    said |= {"suppress_tokens": [banned], "temperature": 2.0, "top_k": 1, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


@pytest.mark.exhaustive
def test_the_command_line_follows_it(published, banned, monkeypatch, capsys):
    asked = ["generate", "def f(x):\n", "--model", published, "--drafter", "none", "-n", 4]
    asked += ["--dtype", "float32", "--threads", 1, "--json"]

    def first(*more):
        monkeypatch.setattr("sys.argv", ["outrider", *map(str, [*asked, *more])])
        with suppress(SystemExit):
            cli.main()
        return json.loads(capsys.readouterr().out)["token_ids"]

    own = first()
    assert own[0] != banned
    assert own == first("--temperature", 0)  # top_k=1
    assert first("--generation-config", "none")[0] == banned


def test_a_server_follows_it_and_requests_override(shipped, banned):
    defaults = ModelDefaults.of(
        {"suppress_tokens": [banned], "repetition_penalty": 5.0, "temperature": 2.0, "top_k": 1},
        shipped.eos_ids,
    )
    more = (shipped.tokenizer, shipped.eos_ids, shipped.notes)
    own = Speculator(shipped.engine, *more, defaults=defaults)
    with serving(shipped) as plain, serving(own) as server:

        def text(of, **asked):
            asked = {"temperature": None, "max_tokens": 12, "seed": 3} | asked
            asked = {name: value for name, value in asked.items() if value is not None}
            return of.client().completions.create(model="pair", prompt="def f(x):\n", **asked)

        greedy = text(server, temperature=0).choices[0].text
        assert text(server).choices[0].text == greedy
        assert greedy != text(plain, temperature=0).choices[0].text
        free = {"extra_body": {"repetition_penalty": 1.0}, "logit_bias": {str(banned): 0}}
        same = text(server, temperature=0, **free).choices[0].text
        assert same == text(plain, temperature=0).choices[0].text
    assert pickle.loads(pickle.dumps(defaults)) == defaults  # it goes to another process


@pytest.mark.parametrize("said", [{"top_k": -1}, {"temperature": "hot"}, {"min_new_tokens": 2.5}])
def test_what_cannot_be_followed_is_refused_by_the_files_name(tmp_path, said):
    saved(tmp_path, **said)
    found = rf"^generation_config.json of the model '{tmp_path}': {next(iter(said))}"
    with pytest.raises(outrider.ConfigurationError, match=found):
        load(tmp_path, **PLAIN)
    load(tmp_path, generation_config="none", **PLAIN)
