"""Adapters by the `model` of a request: each is served as its merged model would be."""

import threading

import openai
import peft
import pytest
import torch
from served import NAME, PROMPT, far, serving, write
from transformers import AutoModelForCausalLM

import outrider
from outrider.cli.options import config_of
from outrider.cli.typed_values import folders
from outrider.errors import ConfigurationError
from outrider.shipped import shipped as packaged

LOAD = {"dtype": "float32", "device": "cpu", "threads": 1, "pack_weights": True}
COUPLED = {"speculative_config": {"method": "coupled"}}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters of the shipped target, whose weights are random and small."""
    where = {}
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(packaged("target"))
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        where[name] = tmp_path_factory.mktemp(name)
        peft.get_peft_model(base, config).save_pretrained(where[name])
    return where


@pytest.fixture(scope="module")
def speculator(adapters):
    return outrider.load(packaged("target"), lora_modules=adapters, drafter="suffix", **LOAD)


@pytest.fixture(scope="module")
def alone(adapters):
    """What each adapter writes as a merged model, and the target by itself."""
    texts = {}
    for name, target in {NAME: packaged("target"), **adapters}.items():
        target = outrider.load(target, tokenizer=packaged("target"), **LOAD)
        sampling = outrider.SamplingParams(0.8, seed=4)
        texts[name] = (
            target.plain(shared_noise=True).generate(PROMPT, sampling, outrider.Stop(24)).texts[0]
        )
    return texts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", [serving, far], ids=["one process", "behind a pipe"])
def test_two_adapters_in_one_batch_are_each_as_alone(speculator, alone, place):
    with place(speculator) as server:
        client, found = server.client(), {}

        def ask(name):
            found[name] = write(client, model=name, seed=4, extra_body=COUPLED)

        asking = [threading.Thread(target=ask, args=(name,)) for name in alone]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    assert {name: answer.choices[0].text for name, answer in found.items()} == alone
    assert len(set(alone.values())) == len(alone)
    assert {name: answer.model for name, answer in found.items()} == {name: name for name in alone}
    assert len({answer.system_fingerprint for answer in found.values()}) == len(alone)


def test_models_are_listed_with_what_they_stand_on(speculator):
    with serving(speculator) as server:
        client = server.client()
        listed = {one.id: getattr(one, "parent", None) for one in client.models.list()}
        assert listed == {NAME: None, "one": NAME, "two": NAME}
        assert client.models.retrieve("two").parent == NAME
        with pytest.raises(openai.NotFoundError, match="served: pair, one, two"):
            write(client, model="three")


def test_an_adapter_cannot_have_the_targets_name(speculator):
    with (
        pytest.raises(ConfigurationError, match="a name that is not the target's; got 'two'"),
        serving(speculator, names=("two",)),
    ):
        pass


def test_prompts_are_scored_by_the_adapter_too(speculator):
    with serving(speculator) as server:
        asked = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        scores = [
            write(server.client(), model=name, **asked).choices[0].logprobs.token_logprobs
            for name in (NAME, "one")
        ]
    assert scores[0][1:] != scores[1][1:]


def test_as_they_are_typed():
    assert folders("--lora-modules", ["a=x/y", "b=z=1"]) == {"a": "x/y", "b": "z=1"}
    assert config_of({"lora_modules": ["a=x"]}).lora_modules == {"a": "x"}
    for wrong in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(ConfigurationError, match="name=folder, each name once"):
            folders("--lora-modules", wrong)
