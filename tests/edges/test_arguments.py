"""Arguments of another kind: an error of ours that names the argument, what was given, what to do.

Scalars of NumPy and torch are numbers wherever Python's are.
"""

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import outrider
from outrider import (
    DraftModel,
    Engine,
    PromptLookup,
    SamplingParams,
    Stop,
    StopConditions,
    arguments,
)
from outrider.drafters import Beam, DynamicTree, Paths, Recall, StaticTree
from outrider.drafters.trees import optimal
from outrider.integrations.generate import speculative
from outrider.integrations.generate_setup import generate_setup, load_arguments
from outrider.loading import load
from outrider.models import adapt
from outrider.shipped import shipped
from outrider.text.prompts import encode
from outrider.verifiers.block import BlockVerifier
from outrider_lab.certify import Power, certify, foreign
from tiny import PROMPTS, decode, llama, pair, perturbed

PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False}
GREEDY, SHORT = SamplingParams(0), Stop(3)


def refused(*parts, kind=outrider.ConfigurationError):
    """Expects an error of this kind whose message holds these parts, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(parts))


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"temperature": "0.6"}, ["temperature must", "got '0.6'"]),
        ({"temperature": None}, ["temperature must", "got None", "use 0"]),
        ({"temperature": True}, ["temperature must", "got True"]),
        ({"temperature": 1e-38}, ["temperature must", "1e-30", "got 1e-38", "use 0"]),
        ({"top_p": "1"}, ["top_p must", "got '1'"]),
        ({"min_p": [0.1]}, ["min_p must", r"got \[0.1\]"]),
        ({"frequency_penalty": None}, ["frequency_penalty must", "got None"]),
        ({"top_k": "5"}, ["top_k must be a whole number", "got '5'"]),
        ({"no_repeat_ngram_size": 3.0}, ["no_repeat_ngram_size must", "got 3.0"]),
        ({"min_new_tokens": True}, ["min_new_tokens must", "got True"]),
        ({"seed": "a"}, ["seed must be a whole number", "got 'a'"]),
        ({"seed": 1.5}, ["seed must be a whole number", "got 1.5"]),
        ({"logit_bias": [5]}, ["logit_bias must be a mapping", r"got \[5\]"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias must be a mapping of token ids", "'x'"]),
        ({"logit_bias": {5: "1"}}, ["logit_bias of token 5", "got '1'"]),
        ({"logit_bias": {5: float("nan")}}, ["logit_bias of token 5", "got nan"]),
        ({"logit_bias": {5: float("inf")}}, ["logit_bias of token 5", "got inf"]),
        ({"processors": 5}, ["processors must be a tuple", "got 5"]),
        ({"temperature": 10**400}, ["temperature must be 0, or a finite number"]),
        ({"frequency_penalty": 10**400}, ["frequency_penalty must be a finite number"]),
        ({"logit_bias": {5: 10**400}}, ["logit_bias of token 5"]),
        ({"logit_bias": {5: 1e300}}, ["logit_bias of token 5 must be finite in float32", "1e.300"]),
        ({"logit_bias": {5: -(10**300)}}, ["logit_bias of token 5 must be finite in float32"]),
        ({"presence_penalty": 1e300}, ["presence_penalty must be a finite number", "float32"]),
        ({"repetition_penalty": 1e300}, ["repetition_penalty must be a positive", "float32"]),
        ({"repetition_penalty": 1e-300}, ["repetition_penalty must be a positive number"]),
        ({"top_k": 2**70}, ["top_k must be a whole number of 64 bits"]),
        ({"seed": 2**64}, ["seed must be a whole number of 64 bits"]),
    ],
)
def test_sampling(given, parts):
    with refused(*parts):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"max_new_tokens": "16"}, ["max_new_tokens must", "got '16'"]),
        ({"max_new_tokens": 1.5}, ["max_new_tokens must", "got 1.5"]),
        ({"token_ids": 5}, ["token_ids must be a tuple", "got 5"]),
        ({"token_ids": "5"}, ["token_ids must be a tuple", "got '5'"]),
        ({"token_ids": (-1,)}, ["token_ids must be", r"got \(-1,\)"]),
        ({"strings": (5,)}, ["strings must be a tuple of stop strings", r"got \(5,\)"]),
        ({"strings": None}, ["strings must be a tuple", "got None"]),
    ],
)
def test_stop(given, parts):
    with refused(*parts):
        Stop(**given)


def test_no_more_tokens_are_wanted_at_least_than_at_most(shipped):
    for more in ({}, {"beams": outrider.Beams(2)}):
        with refused("min_new_tokens must be max_new_tokens=8 or fewer", "got 9", "raise max_new"):
            shipped.plain().generate(
                ["x"] * 2, SamplingParams(0, min_new_tokens=9), Stop(8), **more
            )
    assert shipped.plain().generate("x", SamplingParams(0, min_new_tokens=8), Stop(8)).texts


def test_numbers_of_numpy_and_torch_are_numbers():
    how = SamplingParams(
        np.float32(0.5),
        np.int64(4),
        torch.tensor(0.75),
        seed=np.uint8(3),
        logit_bias={np.int32(5): 1},
    )
    assert how == SamplingParams(0.5, 4, 0.75, seed=3, logit_bias={5: 1}, min_p=0)
    assert all(type(value) in (int, float) for value in (how.temperature, how.top_k, how.seed))
    end = Stop(np.int32(3), ["a"], np.array([7, 9]))
    assert end == Stop(3, ("a",), (7, 9))
    assert StopConditions(torch.tensor(3), torch.tensor([7])) == StopConditions(3, (7,))
    target, small = pair()
    engine = Engine(target, DraftModel(small, (2, 1)))
    expected = decode(engine, PROMPTS, GREEDY, StopConditions(5))[0]
    engine = Engine(target, DraftModel(small, np.array([2, 1])))
    assert (
        decode(engine, [np.array(p) for p in PROMPTS], GREEDY, StopConditions(np.int64(5)))[0]
        == expected
    )
    loaded = load(llama(), perturbed(llama(), 0.1), branching=np.array([2, 1]), **PLAIN)
    assert loaded.engine.drafter.counts == (2, 1)
    lookup = load(llama(), ngram=(np.int64(1), 2), num_speculative_tokens=np.int64(3), **PLAIN)
    assert lookup.engine.drafter == PromptLookup(3, 2, 1)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"branching": 3}, ["branching must", "got 3", r"branching=\(3, 2, 1\)"]),
        ({"branching": "3,2"}, ["branching must", "got '3,2'"]),
        ({"branching": {3, 2}}, ["branching must", "got {2, 3}"]),
        ({"drafter": "beam", "width": "3"}, ["width must", "got '3'"]),
        ({"drafter": "beam", "width": 2.5}, ["width must", "got 2.5"]),
        ({"drafter": "dynamic_tree", "total_tokens": 8.5}, ["total_tokens must", "got 8.5"]),
        ({"drafter": "dynamic_tree", "width": 33}, ["width=33", "lower width"]),
        (
            {"drafter": "static_tree", "tree_acceptance": 0.5, "total_tokens": 4},
            ["acceptance", "got 0.5"],
        ),
        ({"drafter": PromptLookup(4)}, ["drafter must be a name", "using"]),
        ({"drafter": "ngram_table", "table": 5}, ["table must be a Table", "got 5"]),
        ({"shared_noise": "no"}, ["shared_noise must be True or False", "got 'no'"]),
        ({"rule": ["block"]}, ["rule must be", r"got \['block'\]"]),
        ({"tokenizer": 5}, ["tokenizer must be", "got 5"]),
        ({"tokenizer": "no/such/path"}, ["cannot load the tokenizer", "'no/such/path'"]),
        ({"draft": "whisper-base-draf"}, ["draft model", "Did you mean 'whisper-base-draft'"]),
        ({"draft": 3}, ["draft must be a language model", "got 3", "a path"]),
        (
            {"draft": torch.nn.DataParallel(llama())},
            ["DataParallel", "draft.module"],
        ),
        ({"target": ["path"]}, ["target must be a language model", r"got \['path'\]"]),
        ({"device": ["cpu"]}, ["unknown device", "'cpu'"]),
    ],
)
def test_load(settings, parts):
    target = llama()
    draft = (
        None
        if settings.get("drafter") in ("prompt_lookup", "ngram_table")
        else perturbed(target, 0.1)
    )
    with refused(*parts):
        load(**({"target": target, "draft": draft} | PLAIN | settings))


def test_without_a_draft_model_there_is_one_default():
    fixed = {"planner": "fixed"}
    assert load(llama(), **PLAIN, **fixed).engine.drafter == Recall()
    assert generate_setup(llama(), fixed).engine.drafter == Recall()
    planned = load(llama(), **PLAIN).engine.drafter
    assert planned == generate_setup(llama(), {}).engine.drafter == Recall(16, 16)
    lookup = load(llama(), ngram=(1, 4), **PLAIN).engine.drafter
    assert lookup == generate_setup(llama(), {"ngram": (1, 4)}).engine.drafter == PromptLookup(16)


@pytest.mark.parametrize("given", [3, (1, 2, 3), (4, 1), (0, 3), "14", (1, 2.0)])
def test_ngram(given):
    with refused("ngram must be the shortest and the longest", r"ngram=\(1, 4\)"):
        load(llama(), drafter="prompt_lookup", ngram=given, **PLAIN)


def test_drafters_made_by_hand():
    small = pair()[1]
    for make, name in [
        (lambda: DraftModel(small, 4), "counts"),
        (lambda: Beam(small, 2.5), "width"),
        (lambda: Paths(small, "3"), "count"),
        (lambda: DynamicTree(small, 8.5), "total_tokens"),
        (lambda: PromptLookup("8"), "num_speculative_tokens"),
        (lambda: PromptLookup(None), "num_speculative_tokens"),
        (lambda: PromptLookup(8, 1, 2), "most_ngram"),
    ]:
        with refused(f"^{name} must be"):
            make()


def test_drafters_of_too_many_nodes():
    target, small = pair()
    for make in (
        lambda: Beam(small, 64, 65),
        lambda: Paths(small, 65, 64),
        lambda: DynamicTree(small, 5000, 1000, 3),
        lambda: PromptLookup(4096),
    ):
        drafter = make()
        nodes = drafter.shapes[0].max_nodes
        with refused("at most 4096 nodes", f"got {nodes} by", drafter.name, "lower"):
            Engine(target, drafter)
    with refused("at most 4096 nodes", "got 5000 by"):
        StaticTree(small, parents=(-1, *range(4999)))
    with refused("at most 4096 nodes", "got 5000 by"):
        optimal([0.5, 0.5], 5000, 5000)
    Engine(target, Beam(small, 63, 65))  # 4096 with the pending token
    with refused("drafter must be a Drafter"):
        Engine(target, PromptLookup)


def test_a_tokenizer_by_path_and_a_rule_by_name():
    path = shipped("target")
    loaded = load(path, drafter="prompt_lookup", tokenizer=path, **PLAIN)
    assert isinstance(loaded.tokenizer, PreTrainedTokenizerFast)
    other = loaded.using(PromptLookup(2), "rejection")
    assert other.engine.rule.name == "rejection"
    with refused("drafter must be a Drafter", "'prompt_lookup'", r"load\(drafter=...\)"):
        loaded.using("prompt_lookup")
    for name, given in [("num_return_sequences", 2.5), ("capacity", "9")]:
        with refused(name, "whole number"):
            loaded.generate([1, 2], GREEDY, SHORT, **{name: given})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"num_assistant_tokens": 2.7}, ["num_assistant_tokens must", "got 2.7"]),
        ({"prompt_lookup_num_tokens": 0}, ["prompt_lookup_num_tokens must", "got 0"]),
        ({"prompt_lookup_max": 0}, ["prompt_lookup_max must", "got 0"]),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, ["prompt_lookup_max must", "got 2"]),
        ({"prompt_lookup_min": 0}, ["prompt_lookup_min must", "got 0"]),
        ({"max_matching_ngram_size": "x"}, ["max_matching_ngram_size must", "got 'x'"]),
    ],
)
def test_names_of_other_libraries(given, parts):
    with refused(*parts):
        load_arguments(given)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (3, ["draft_model must be a language model", "got 3"]),
        (shipped("draft"), ["draft_model must be a loaded model", "from_pretrained"]),
        ([llama()], ["'draft_model' takes one draft model", "got 1 in a list", "paths"]),
        (torch.nn.DataParallel(llama()), ["draft_model must be", "draft_model.module"]),
    ],
    ids=["number", "path", "list", "wrapped"],
)
def test_draft_models_behind_generate(given, parts):
    with refused(*parts):
        llama().generate(
            torch.tensor([[1, 2]]), custom_generate=speculative, draft_model=given, max_new_tokens=2
        )


def test_certify():
    target, small = pair()
    engine = Engine(target, DraftModel(small, (1, 1)))
    speculator = outrider.Speculator(engine)
    with refused("engine must be an Engine", "Speculator", "speculator.engine"):
        certify(speculator, PROMPTS)
    with refused("sampling must be a Sampling", "got 0.8"):
        certify(engine, PROMPTS, 0.8)
    with refused("generator must be a function", "Speculator"):
        foreign(speculator, target, PROMPTS)
    with refused("sampling must be a Sampling", "got 0.8"):
        foreign(lambda _: [], target, PROMPTS, 0.8)
    with refused("power must be a Power", "got 500"):
        foreign(lambda _: [], target, PROMPTS, power=500)
    for test in (lambda p: certify(engine, p), lambda p: foreign(lambda _: [], target, p)):
        with refused("prompt 0 must be token ids", "'text'", kind=outrider.PromptError):
            test(["text"])


@pytest.mark.parametrize(
    ("name", "given"),
    [("tokens", "5"), ("tokens", 2.5), ("rows", 0), ("seed", None), ("level", "1"), ("effect", [])],
)
def test_power(name, given):
    with refused(f"^{name} must be"):
        Power(**{name: given})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"input_ids": [[1, 2]]}, ["dict", r'\["input_ids"\]']),
        ([{"input_ids": [1, 2]}], ["prompt 0", r'\["input_ids"\]']),
        ({"role": "user", "content": "x"}, ["a list of messages", r'\[{"role"']),
        ([b"abc"], ["prompt 0", "bytes", "decode"]),
        (bytearray(b"abc"), ["bytearray", "decode"]),
        ([1.5, 2.5], ["prompt 0", "1.5", "float"]),
        ([[1, 2], [5.0]], ["prompt 1", "5.0", "float"]),
        (torch.tensor([1.0, 2.0]), ["prompt 0", "1.0", "float"]),
        (torch.ones(1, 1, 2, dtype=torch.int64), ["prompt 0", "flat list"]),
        (torch.tensor(3), ["a prompt", "int"]),
        (object(), ["a prompt", "object"]),
        ([True, False], ["prompt 0", "True", "bool"]),
        ([5, "7"], ["prompt 0", "'7'", "str"]),
        (["text", 5], ["prompt 1", "int"]),
        ({"a", "b"}, ["set", "order"]),
        ([{1, 2}], ["prompt 0", "set", "order"]),
        ([None], ["prompt 0", "NoneType"]),
        ([["a", "b"]], ["prompt 0", "'a'", "str"]),
        ((one for one in [5, 6]), ["prompt 0", "int"]),
    ],
)
def test_prompts(shipped, given, parts):
    with refused(*parts, kind=outrider.PromptError):
        shipped.generate(given, GREEDY, SHORT)


def test_a_batch_of_a_tokenizer_is_refused_with_advice(shipped):
    whole = shipped.tokenizer("def f(x):", return_tensors="pt")
    with refused("BatchEncoding", r'\["input_ids"\]', kind=outrider.PromptError):
        shipped.generate(whole, GREEDY, SHORT)
    text = shipped.generate("def f(x):", GREEDY, SHORT).texts
    assert shipped.generate(whole["input_ids"], GREEDY, SHORT).texts == text
    ids = whole["input_ids"][0]
    for given in (list(ids), tuple(ids.tolist()), [ids], np.array([ids.tolist()], dtype=object)):
        assert shipped.generate(given, GREEDY, SHORT).texts == text
    for given in ("def f(x):", [1.5], [[1, 2], ["3"]]):
        with refused("prompt", "must be token ids", kind=outrider.PromptError):
            shipped.engine.run(given)


def test_messages_that_a_template_refuses(shipped, monkeypatch):
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", template)
    with refused("messages of prompt 0", "roles must alternate", kind=outrider.PromptError):
        shipped.generate([{"role": "user", "content": "x"}], GREEDY, SHORT)


def test_stop_strings_that_are_special_tokens(shipped):
    """A stop string that is a special token stops as that token; with text around it, never."""
    special = shipped.tokenizer.convert_ids_to_tokens(1)
    assert special in shipped.tokenizer.all_special_tokens
    assert 1 not in shipped.eos_ids
    wanted = SamplingParams(0, logit_bias={1: 1e4}, min_new_tokens=3)
    for end in (Stop(9, (special,)), Stop(9, (special, "zzz"), ())):
        for run in (shipped, shipped.plain()):
            done = run.generate("def f(x):", wanted, end).completions[0]
            assert done.finish_reason == "stop"
            assert done.token_ids[-1] == 1
            assert len(done.token_ids) == 4
    with refused("stop string", repr(special + "x").replace("|", r"\|"), r"token_ids=\(1,\)"):
        shipped.generate("def f(x):", GREEDY, Stop(9, (special + "x",)))


def test_stop_tokens_outside_the_vocabulary(shipped):
    with refused("token_ids", "1000000", "vocabulary of 4096"):
        shipped.generate("def f(x):", GREEDY, Stop(3, token_ids=(10**6,)))


def test_long_values_do_not_fill_the_screen():
    assert arguments.shown(list(range(999))) == "a list of 999"
    assert arguments.shown(llama()) == "a LlamaForCausalLM"
    with refused("branching must", "got a list of 999"):
        load(llama(), llama(), branching=[0] * 999, **PLAIN)


def test_settings_of_generate_name_what_they_cannot_use():
    for drafter in (PromptLookup(4), 5):
        with refused("drafter must be a name"):
            generate_setup(llama(), {"drafter": drafter})


def test_classes_are_no_drafters_or_rules():
    model = adapt(llama())
    with refused("drafter must be a Drafter"):
        Engine(model, PromptLookup)
    with refused("rule must be a Verifier"):
        Engine(model, PromptLookup(), BlockVerifier)


def test_drafters_keep_plain_numbers():
    model, three = adapt(llama()), torch.tensor(3)
    for drafter in (
        PromptLookup(three),
        Beam(model, three, three),
        Paths(model, count=three, depth=three),
        DynamicTree(model, three, three, three),
    ):
        assert type(drafter.shapes[0].max_nodes) is int


def test_two_names_for_the_same_ngrams_agree():
    asked = load_arguments({"ngram": [1, 3], "prompt_lookup_max": 3})
    assert asked["ngram"] == (1, 3)


def test_a_number_among_prompts_is_no_prompt():
    with refused("prompt", kind=outrider.PromptError):
        encode(None, np.int64(5), 1)


def test_copies_of_the_largest_seed_are_drawn():
    speculator = load(llama(), **PLAIN)
    how = SamplingParams(1.0, seed=2**64 - 1)
    assert len(speculator.generate([5, 6], how, SHORT, num_return_sequences=2).completions) == 2


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (["a.Q8_0.gguf", "b.gguf"], ["GGUF files", "name one of them: .*a.Q8_0.gguf"]),
        (["vocab.deen.spm", "model.bin"], ["Marian's own files", "seq2seq.marian_file .* INTO"]),
        (["model.bin", "config.json", "shared_vocabulary.json"], ["CTranslate2's files"]),
        (["ggml-base.bin"], ["whisper.cpp's files"]),
        (["consolidated.00.pth", "params.json"], ["their author's own form"]),
        (["model.onnx"], ["ONNX files"]),
        (["base.pt"], ["files of torch alone"]),
        (["notes.txt"], ["no local folder with a config.json"]),
        (["source.spm", "config.json"], ["whose config.json cannot be used"]),  # transformers' own
        (["vocabulary.txt", "config.json"], ["whose config.json cannot be used"]),
        (["vocabulary.txt"], ["no local folder with a config.json"]),
        (["optimizer.pt", "adapter_config.json"], ["an adapter's weights are read from"]),
        (["optimizer.pt", "adapter_model.safetensors"], ["no local folder with a config.json"]),
    ],
)
def test_folders_of_other_programs_say_what_they_are(tmp_path, files, parts):
    """They were called no folder with a config.json, or a name of the hub."""
    for name in files:
        (tmp_path / name).write_text("{}")
    with refused(*parts):
        load(tmp_path)
