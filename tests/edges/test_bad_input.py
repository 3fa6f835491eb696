"""Bad input through the library: one clear error before work is lost.

Every message says what is wrong, what was given and what to do.
"""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, XLNetConfig, XLNetLMHeadModel

import outrider
from letters import Letters
from outrider import Engine, Root, SamplingParams, Stop, StopConditions
from outrider.loading import load
from outrider.shipped import shipped
from outrider.text.prompts import encode
from outrider.types import Output
from tiny import DRAFTERS, PROMPTS, decode, llama, pair, perturbed

PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False}


def pairs_of(*models):
    return load(*models, **PLAIN)


def refused(kind, *parts):
    """Expects an error of this kind whose message holds these parts, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(parts))


def test_unknown_model_path(tmp_path):
    with refused(outrider.ConfigurationError, "target model", "no/such/model", "check the path"):
        load("no/such/model")
    with refused(outrider.ConfigurationError, "draft model", "nothing", "check the path"):
        load(shipped("target"), tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{not json")
    with refused(outrider.ConfigurationError, "target model", "check the path"):
        load(tmp_path)


def words(*names):
    from tokenizers import Tokenizer, models

    table = {name: i for i, name in enumerate(names)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(table)))


def test_a_draft_that_shares_no_token_with_its_target(tmp_path):
    llama().save_pretrained(tmp_path / "draft")
    words("\u4dc0", "\u4dc1").save_pretrained(tmp_path / "draft")
    with refused(outrider.VocabularyMismatch, "share no token", "use another draft model"):
        load(shipped("target"), tmp_path / "draft", **PLAIN)


def test_vocabulary_mismatch_names_the_first_difference():
    from outrider.models.load_checks import vocabulary

    with refused(outrider.VocabularyMismatch, "1 tokens exist on one side only", "'d'", "target"):
        vocabulary(words(*"abcd"), words(*"abc"), {"target": 4, "draft": 4})
    with refused(outrider.VocabularyMismatch, "different ids, first 'b': 1 against 2"):
        vocabulary(words(*"abc"), words(*"acb"), {"target": 4, "draft": 4})
    with refused(outrider.VocabularyMismatch, "draft model has 3 outputs", "4 tokens"):
        vocabulary(words(*"abcd"), None, {"target": 4, "draft": 3})
    with refused(outrider.VocabularyMismatch, "output sizes differ", "pass tokenizer"):
        vocabulary(None, None, {"target": 4, "draft": 3})
    assert vocabulary(words(*"abc"), words(*"abc"), {"target": 64, "draft": 8}) == 3


def test_output_sizes_that_differ():
    with refused(outrider.VocabularyMismatch, "output sizes differ", "tokenizer="):
        pairs_of(llama(), llama(vocab_size=40))


def test_an_unsupported_architecture_is_named():
    config = XLNetConfig(vocab_size=32, d_model=32, n_layer=1, n_head=2, d_inner=32)
    with refused(outrider.UnsupportedModel, "xlnet"):
        pairs_of(XLNetLMHeadModel(config))


def test_a_model_that_ignores_the_trees_mask_is_refused():
    class Deaf(LlamaForCausalLM):
        def forward(self, *args, attention_mask=None, **kwargs):
            return super().forward(*args, attention_mask=None, **kwargs)

    model = Deaf(llama().config).eval()
    model.load_state_dict(llama().state_dict())
    with refused(outrider.UnsupportedModel, "does not score trees as paths", "difference"):
        pairs_of(model)


def test_models_on_different_devices():
    target = llama()
    draft = perturbed(target, 0.1)
    draft.hf_device_map = {"": 0}
    with refused(outrider.ConfigurationError, "share a device", "draft model on cuda:0 and cpu"):
        pairs_of(target, draft)
    nowhere = perturbed(target, 0.1).to("meta")
    with refused(outrider.ConfigurationError, "on the meta device", "load it by its path"):
        pairs_of(target, nowhere)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"drafter": "oracle"}, ["unknown drafter 'oracle'", "prompt_lookup"]),
        ({"drafter": "prompt-lookup"}, ["Did you mean 'prompt_lookup'"]),
        ({"rule": "rejektion"}, ["unknown rule", "Did you mean 'rejection'"]),
        ({"dtype": "int3"}, ["unknown dtype 'int3'", "bfloat16"]),
        ({"threads": 0}, ["threads", "got 0"]),
        ({"threads": "many"}, ["threads", "'many'"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "got 0", "drafter 'none'"]),
        ({"branching": ()}, ["at least one drafted token", "drafter='none'"]),
        ({"branching": (2, 0)}, ["positive whole numbers", "got \\(2, 0\\)"]),
        ({"rule": "block", "branching": (2, 2)}, ["'block' cannot verify a tree", "traversal"]),
        ({"rule": "rejection", "shared_noise": True}, ["'rejection' cannot verify", "match"]),
        ({"drafter": "draft_model", "draft": None}, []),
        ({"branching": (2, 2), "num_speculative_tokens": 4}, ["\\(2, 2\\)", "=4", "leave"]),
        ({"drafter": "hub_tree", "branching": (2,), "num_speculative_tokens": 2}, ["leave"]),
        ({"drafter": "none", "num_speculative_tokens": 2}, ["'none' has no use for num_spec"]),
        ({"drafter": "prompt_lookup", "total_tokens": 9}, ["no use for total_tokens"]),
        ({"branching": (33,)}, ["vocabulary of 32", "smaller factors"]),
        ({"tree_acceptance": (0.5,)}, ["no use for tree_acceptance", "static_tree"]),
        ({"drafter": "static_tree", "tree_acceptance": (0.5,)}, ["total_tokens", "give both"]),
        (
            {"drafter": "static_tree", "tree_acceptance": (0.5, 0.6), "total_tokens": 5},
            ["increase"],
        ),
        (
            {"drafter": "dynamic_tree", "total_tokens": 999},
            ["candidates", "=999", "width=4"],
        ),
        ({"drafter": "dynamic_tree", "width": 0}, ["width", "at least 2", "got 0", "draft_model"]),
        ({"draft": []}, ["no draft model", "empty list"]),
        ({"drafter": "paths", "width": 2, "draft": [llama()] * 3}, ["every draft model", "3"]),
    ],
)
def test_options_that_do_not_exist_or_do_not_fit(settings, parts):
    target = llama()
    without = settings.get("drafter") in ("none", "prompt_lookup")
    draft = settings.pop("draft", None if without else perturbed(target, 0.1))
    with refused(outrider.ConfigurationError, *parts):
        load(target, draft, **(PLAIN | settings))


def test_several_draft_models_are_for_paths():
    target = llama()
    small = [perturbed(target, 0.1, seed) for seed in (1, 2)]
    with refused(outrider.ConfigurationError, "'draft_model' takes one", "got 2", "'paths'"):
        load(target, small, **PLAIN)
    with refused(outrider.VocabularyMismatch, "output sizes differ"):
        load(target, [small[0], llama(vocab_size=31)], drafter="paths", **PLAIN)
    both = load(target, small, drafter="paths", width=4, num_speculative_tokens=3, **PLAIN)
    drafter = both.engine.drafter
    assert len(drafter.models) == 2
    assert drafter.shapes[0].max_nodes == 13
    greedy = both.generate(PROMPTS[0], SamplingParams(0), Stop(16)).completions[0]
    plain = both.plain().generate(PROMPTS[0], SamplingParams(0), Stop(16)).completions[0]
    assert greedy.token_ids == plain.token_ids
    assert greedy.stats.accepted > 0


def test_a_dtype_that_the_loaded_model_does_not_have():
    with refused(outrider.ConfigurationError, "float32", "'bfloat16'", "convert"):
        load(llama(), **(PLAIN | {"dtype": "bfloat16"}))


def test_long_texts_to_copy_from_are_no_reason_for_warnings():
    """A reference may be longer than the context; of a prompt that is, our own error tells."""
    speculator = load(**PLAIN, drafter="reference_lookup", planner="fixed")
    long = "x = 1\n" * speculator.tokenizer.model_max_length
    speculator.generate("x = 1\n", SamplingParams(0), Stop(2), reference=long)
    with refused(outrider.PromptError, "context is"):
        speculator.generate(long, SamplingParams(0), Stop(2))
    assert not any("longer" in name for name in speculator.tokenizer.deprecation_warnings)


@pytest.mark.parametrize("token", [-1, 4096, 1 << 33, 10**20])
def test_token_ids_that_no_tokenizer_decodes(token):
    speculator = load(**PLAIN, planner="fixed")
    for ask in (speculator.generate, speculator.stream):
        with refused(outrider.PromptError, "prompt 1 has token id", str(token), "vocabulary of"):
            ask([[5], [6, token]])


@pytest.mark.parametrize("name", ["root", "chain", "tree", "prompt_lookup"])
def test_prompts_that_cannot_be_decoded(name):
    target, small = pair(context=48)
    engine = Engine(target, DRAFTERS[name](small))
    for prompts, parts in [
        ([], ["no prompt", "at least one"]),
        ([[1], []], ["prompt 1 has no tokens", "at least one token"]),
        ([[1], [2, 32]], ["prompt 1", "32", "vocabulary of 32"]),
        ([[-1]], ["-1", "vocabulary of 32"]),
        ([[1] * 48], ["prompt 0 has 48 tokens", "context is 48", "shorten"]),
    ]:
        with refused(outrider.PromptError, *parts):
            engine.run(prompts)
    longest = decode(engine, [[1] * 47], SamplingParams(0), StopConditions(5))
    assert [len(row) for row in longest[0]] == [1]
    assert longest[1].reasons == ["context"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_one_token_is_a_prompt(name):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small))
    alone, _ = decode(engine, [[6]], SamplingParams(0), StopConditions(12))
    assert alone == decode(Engine(target, Root()), [[6]], SamplingParams(0), StopConditions(12))[0]
    assert decode(engine, [[6], [6]], SamplingParams(0), StopConditions(12))[0] == alone * 2


def test_a_budget_of_nothing():
    for make in (StopConditions, Stop):
        for budget in (0, -3):
            with refused(outrider.ConfigurationError, "max_new_tokens", f"got {budget}", "None"):
                make(budget)


def test_a_cache_too_small_for_prompt_and_budget():
    target, small = pair()
    engine = Engine(target, DRAFTERS["chain"](small))
    with refused(outrider.CapacityError, "prompt 0", "6 tokens", "budget 40", "capacity=48"):
        engine.run(PROMPTS, limits=StopConditions(40), capacity=48)
    rows, _ = decode(engine, PROMPTS, SamplingParams(0), StopConditions(40), capacity=128)
    assert rows == decode(engine, PROMPTS, SamplingParams(0), StopConditions(40))[0]


def test_settings_that_are_not_one_per_prompt():
    target, _ = pair()
    engine = Engine(target, Root())
    with refused(outrider.ConfigurationError, "sampling", "got 2 for 5 prompts"):
        engine.run(PROMPTS, [SamplingParams(0)] * 2)
    with refused(outrider.ConfigurationError, "limits", "got 1 for 5 prompts"):
        engine.run(PROMPTS, limits=[StopConditions(3)])


class Broken:
    """A model that returns NaN from its n-th call on."""

    def __init__(self, model, calls, value=float("nan")):
        self.model, self.left, self.value = model, calls, value

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, *args, **kwargs):
        self.left -= 1
        output = self.model.forward(*args, **kwargs)
        broken = torch.full_like(output.logits_BQV, self.value)
        return output if self.left > 0 else Output(broken, output.hidden)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0), SamplingParams(1.0, seed=1)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("name", ["root", "chain", "tree", "prompt_lookup"])
def test_nan_from_the_target(name, value, sampling):
    target, small = pair()
    engine = Engine(Broken(target, 5, value), DRAFTERS[name](small))
    run = engine.run(PROMPTS[:2], sampling, StopConditions(30))
    before = []

    def exhaust():
        for block in run:
            before.extend(block.token_ids)

    with refused(outrider.NumericalError, "^the target", "NaN", "request 0", "check weights"):
        exhaust()
    assert before  # what was decoded before is not lost


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", ["chain", "tree", "beam", "paths"])
def test_nan_from_the_draft_model(name, batch, value):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](Broken(small, 9, value)))
    run = engine.run(PROMPTS[:batch], SamplingParams(1.0, seed=1), StopConditions(30))
    with refused(outrider.NumericalError, "draft model", "NaN"):
        list(run)


def test_text_without_a_tokenizer():
    speculator = pairs_of(llama())
    with refused(outrider.ConfigurationError, "text prompt needs a tokenizer", "token ids"):
        speculator.generate("hello")
    with refused(outrider.ConfigurationError, "stop strings need a tokenizer"):
        speculator.generate([1, 2], stop=Stop(4, ("x",)))
    result = speculator.generate([1, 2], SamplingParams(seed=0), Stop(4))
    assert len(result.completions[0].token_ids) == 4


def test_a_tokenizer_that_cannot_leave_special_tokens_out():
    letters = Letters("ab")
    assert encode(letters, "ab") == [0, 1]
    with refused(outrider.ConfigurationError, "tokenizer of transformers", "Letters", "set"):
        encode(letters, "ab", special=False)
    assert encode(letters, [1], special=False) == [1]


def test_bad_text_and_stop_strings(shipped):
    with refused(outrider.PromptError, "prompt 1 is empty", "''"):
        shipped.generate(["a", ""])
    with refused(outrider.PromptError, "no prompt"):
        shipped.generate([])
    with refused(outrider.ConfigurationError, "tuple of stop strings", r"strings=\('x',\)"):
        Stop(4, "x")
    with refused(outrider.ConfigurationError, "stop string is empty"):
        Stop(4, ("",))
    with refused(outrider.PromptError, "prompt 0 is not valid text", "character 1"):
        shipped.generate("a\udcff")


def test_arguments_of_another_kind(shipped):
    with refused(outrider.ConfigurationError, "stop must be a Stop", "16"):
        shipped.generate("a", SamplingParams(0), 16)
    with refused(outrider.ConfigurationError, "stop must be a Stop", "Sampling"):
        shipped.generate("a", Stop(4), SamplingParams(0))
    with refused(outrider.ConfigurationError, "tuple of functions"):
        SamplingParams(processors=lambda ids, scores: scores)
    for given in (b"abc", None, 7):
        with refused(outrider.PromptError, "text, token ids or messages"):
            shipped.generate(given)
    whole = shipped.generate([20, 21, 22], SamplingParams(0), Stop(4)).texts
    ids = torch.tensor([20, 21, 22])
    for given in (ids, ids[None], ids.numpy(), list(ids.numpy()), (p for p in [[20, 21, 22]])):
        assert shipped.generate(given, SamplingParams(0), Stop(4)).texts == whole


def test_every_error_is_an_outrider_error_and_a_usual_one():
    from outrider import errors

    kinds = [
        k for k in vars(errors).values() if isinstance(k, type) and k.__module__ == errors.__name__
    ]
    assert len(kinds) == 14
    for kind in kinds:
        assert issubclass(kind, outrider.OutriderError)
        assert getattr(outrider, kind.__name__) is kind
    assert issubclass(outrider.ConfigurationError, ValueError)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"drafter": "prompt_lookup", "branching": (2, 2)}, "no use for branching"),
        ({"drafter": "none", "width": 3}, "no use for width"),
        ({"drafter": "draft_model", "ngram": (1, 2)}, "no use for ngram"),
        ({"drafter": "none", "draft": "some/model"}, "no use for draft; got draft='some/model'"),
        ({"drafter": "ngram_table", "target": "some/model"}, "needs a table"),
        ({"drafter": "draft_model", "table": "mine.safetensors"}, "no use for table"),
        ({"drafter": "ngram_table", "table": "absent.safetensors"}, "cannot read"),
        ({"branching": "3,2"}, "positive whole numbers"),
        ({"num_speculative_tokens": 2.5}, "whole number"),
        ({"num_speculative_tokens": True}, "whole number"),
        ({"branching": (2, True)}, "positive whole numbers"),
        ({"drafter": "none", "shared_noise": True, "rule": "rejection"}, "got shared_noise=True"),
        ({"pack_weights": "yes", "threads": 1}, "pack_weights must be.*'yes'"),
        ({"device": "nowhere"}, "unknown device.*'nowhere'"),
    ],
)
def test_options_that_would_do_nothing_are_refused(how, what):
    with pytest.raises(outrider.ConfigurationError, match=what):
        outrider.load(**how)


def test_rotary_factors_that_switch_with_the_length_end_the_context_before_they_do():
    from transformers import Phi3Config, Phi3ForCausalLM

    from outrider.models import adapt

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    )
    target = adapt(Phi3ForCausalLM(config).eval())
    assert target.context == 32
    greedy, end = SamplingParams(0), StopConditions(64)
    plain = list(Engine(target, Root()).run([[1, 2, 3]], greedy, end))
    assert plain[-1].finish_reason == "context"
    fast = Engine(target, outrider.DraftModel(target, (1, 1, 1, 1))).run([[1, 2, 3]], greedy, end)
    assert [t for b in fast for t in b.token_ids] == [t for b in plain for t in b.token_ids]


def test_no_budget_and_no_context_is_an_error_before_memory_is_taken():
    target, _ = pair()
    target = copy.copy(target)  # others share the tiny pair
    target.context = 1 << 30
    with pytest.raises(outrider.CapacityError, match="give max_new_tokens"):
        Engine(target, Root()).run([[1, 2]], SamplingParams(0), StopConditions(None))


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_options_that_stop_or_sampling_have(call):
    ask = getattr(pairs_of(llama()), call)
    with refused(outrider.ConfigurationError, r"write stop=Stop\(max_new_tokens=...\)"):
        ask([1, 2], max_new_tokens=4)
    with refused(outrider.ConfigurationError, r"write sampling=SamplingParams\(top_k=...\)"):
        ask([1, 2], top_k=4)
    with refused(outrider.UnknownName, "option of generate 'logprob'", "'logprobs'"):
        ask([1, 2], logprob=True)
