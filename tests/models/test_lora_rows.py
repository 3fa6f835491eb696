"""Rows of one batch with adapters of their own: each is its adapted model's, exactly."""

import json
from functools import partial
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

import outrider
from outrider import Beams, SamplingParams, Stop
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request, StopConditions
from outrider.errors import ConfigurationError, UnknownName, UnsupportedModel
from outrider.models import isa
from outrider.models.prefix_cache import PrefixCache
from tiny import PROMPTS, llama

LOAD = {"dtype": "float32", "device": "cpu", "threads": 1, "pack_weights": False}
SIZE = 12
#: What each adapter changes: other layers, ranks and scalings.
KINDS = {
    "one": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "two": {
        "r": 2,
        "lora_alpha": 16,
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.k_proj": 3},
        "alpha_pattern": {"layers.1.self_attn.k_proj": 5},
        "target_modules": ["k_proj", "o_proj", "gate_proj", "up_proj", "lm_head"],
    },
}


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, initializer_range=0.3, eos_token_id=None, bos_token_id=None)
    ).eval()


def gemma2(**more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"tie_word_embeddings": False, **more}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, initializer_range=0.3)).eval()


WIDE = {"r": 3, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
#: How a target runs: lean, or through its own forward, with Conv1D, with windows.
MODELS = {
    "lean": (llama, KINDS),
    "gpt2": (gpt2, dict.fromkeys(KINDS, WIDE)),
    "gemma2": (
        gemma2,
        {name: {"r": 3, "target_modules": ["q_proj", "down_proj"]} for name in KINDS},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def served(request, tmp_path_factory):
    """A target with two adapters, and each as a merged model alone."""
    make, kinds = MODELS[request.param]
    return adapted(tmp_path_factory.mktemp(request.param), make, kinds)


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    return adapted(tmp_path_factory.mktemp("lean"), llama, KINDS)


def adapted(folder, make, kinds, **more):
    how = LOAD | more
    make().save_pretrained(folder / "base")
    for seed, (name, settings) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        base = type(make()).from_pretrained(folder / "base")
        config = peft.LoraConfig(**settings, init_lora_weights=False)
        model = peft.get_peft_model(base, config)
        model.save_pretrained(folder / name, save_embedding_layers=False)
    lora = {name: folder / name for name in kinds}
    rows = outrider.load(folder / "base", lora_modules=lora, drafter="recall", **how)
    alone = {name: outrider.load(folder / name, drafter="recall", **how) for name in kinds}
    alone[None] = outrider.load(folder / "base", drafter="recall", **how)
    return SimpleNamespace(rows=rows, alone=alone, folder=folder)


def ids(generation):
    return [one.token_ids for one in generation.completions]


#: Of the prompts, whose texts are then written side by side.
NAMES = ["one", None, "two", "one", "two"]


def expected(served, *settings, **options):
    each = zip(PROMPTS, NAMES, strict=True)
    return [ids(served.alone[name].generate([p], *settings, **options))[0] for p, name in each]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_of_one_batch_are_each_its_merged_models(served, temperature):
    settings = SamplingParams(temperature, seed=5), Stop(SIZE)
    found = ids(served.rows.generate(list(PROMPTS), *settings, lora_request=NAMES))
    assert found == expected(served, *settings)
    bare = ids(served.rows.generate(list(PROMPTS), *settings))
    assert found != bare
    assert [a for a, name in zip(found, NAMES, strict=True) if name is None] == [bare[1]]


DRAFTERS = {
    "none": {},
    "suffix": {},
    "draft_model": {"draft": llama(seed=0), "branching": (2, 1, 1)},
    "layer_skip": {"drafter_options": {"skip": (1,)}, "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_whatever_drafts(lean, drafter):
    lora = {name: lean.folder / name for name in KINDS}
    more = DRAFTERS[drafter] | LOAD
    rows = outrider.load(lean.folder / "base", lora_modules=lora, drafter=drafter, **more)
    found = rows.generate(list(PROMPTS), SamplingParams(0), Stop(SIZE), lora_request=NAMES)
    assert ids(found) == expected(lean, SamplingParams(0), Stop(SIZE))


@pytest.mark.parametrize("make", [llama, gemma2])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_row_has_its_bits_whoever_stands_beside_it(tmp_path, make, dtype):
    """What packed products round makes much of the last bit of an adapter's sums."""
    if make is gemma2 and dtype == "bfloat16" and not isa.has_bf16_products():
        pytest.skip("nothing is rounded here, and sums of own forwards are as they come")
    sizes = {"hidden_size": 320, "intermediate_size": 384}
    layers = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    kinds = {name: {"r": r, "target_modules": layers} for name, r in (("one", 5), ("two", 8))}
    rows = adapted(tmp_path, partial(make, **sizes), kinds, dtype=dtype).rows
    names, prompts = [None, "one", "two", "one", "one", "one"], [*PROMPTS, PROMPTS[0]]

    def written(some):
        told = rows.generate(
            [prompts[at] for at in some],
            SamplingParams(0),
            Stop(SIZE),
            logprobs=True,
            lora_request=[names[at] for at in some],
        )
        return [(one.token_ids, one.logprobs) for one in told.completions]

    alone = [written([at])[0] for at in range(len(prompts))]
    assert written(range(len(prompts))) == alone
    assert written([1, 3, 4, 0]) == [alone[at] for at in (1, 3, 4, 0)]


def test_beams(lean):
    options = {"beams": Beams(3)}
    found = lean.rows.generate(
        list(PROMPTS), SamplingParams(0), Stop(6), lora_request=NAMES, **options
    )
    assert ids(found) == expected(lean, SamplingParams(0), Stop(6), **options)


def test_copies_of_a_prompt_have_its_adapter(lean):
    options = {"num_return_sequences": 2}
    settings = SamplingParams(0.8, seed=3), Stop(SIZE)
    found = lean.rows.generate(list(PROMPTS[:2]), *settings, lora_request=["two", None], **options)
    both = zip(PROMPTS[:2], ["two", None], strict=True)
    alone = [ids(lean.alone[name].generate([p], *settings, **options)) for p, name in both]
    assert ids(found) == [text for texts in alone for text in texts]


def test_rows_that_join_leave_and_begin_alike(lean):
    """Prefixes are not shared across adapters, and rows keep theirs as they move."""
    prompt = [int(n) % 29 + 3 for n in torch.arange(70) * 11]
    engine = lean.rows.engine
    run = EngineRun(engine, 2, 200, prefixes=PrefixCache(1 << 24))
    wanted = [(["one", "two", None][at % 3], prompt[: 70 - at]) for at in range(9)]
    numbers = {}
    for at, (name, text) in enumerate(wanted):
        size = StopConditions(4 + 3 * (at % 4))
        numbers[run.submit(Request(text, SamplingParams(0), size, lora_name=name))] = at
    run.close()
    texts = {at: [] for at in numbers.values()}
    for block in run:
        texts[numbers[block.request_id]] += block.token_ids
    for at, (name, text) in enumerate(wanted):
        alone = lean.alone[name].plain().engine
        every = alone.run([text], SamplingParams(0), StopConditions(4 + 3 * (at % 4)))
        assert texts[at] == [token for block in every for token in block.token_ids]


def test_one_for_all_and_by_vllms_request(lean):
    settings = list(PROMPTS), SamplingParams(0), Stop(SIZE)
    named = ids(lean.rows.generate(*settings, lora_request="two"))
    asked = SimpleNamespace(lora_name="two", lora_int_id=1, lora_path="elsewhere")
    assert named == ids(lean.rows.generate(*settings, lora_request=asked))
    assert named == ids(lean.alone["two"].generate(*settings))


def test_names_are_checked_before_any_work(lean):
    with pytest.raises(UnknownName, match=r"unknown adapter 'tow'; known: one, two. Did you mean"):
        lean.rows.generate(list(PROMPTS), lora_request="tow")
    with pytest.raises(UnknownName, match="unknown adapter 'one'; known: "):
        lean.alone[None].generate(list(PROMPTS), lora_request="one")
    with pytest.raises(ConfigurationError, match="got 2 for 5 prompts"):
        lean.rows.generate(list(PROMPTS), lora_request=["one", None])
    with pytest.raises(ConfigurationError, match=r"lora_request must be an adapter by name; got 3"):
        lean.rows.generate(list(PROMPTS), lora_request=3)


def _load(folder, **lora):
    return outrider.load(folder / "base", lora_modules=lora, drafter="recall", **LOAD)


def _copied(lean, tmp_path, weights=None, **said):
    """The adapter "one", changed."""
    config = json.loads((lean.folder / "one" / "adapter_config.json").read_text("utf-8"))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | said), "utf-8")
    stored = load_file(lean.folder / "one" / "adapter_model.safetensors")
    save_file(
        stored if weights is None else weights(stored), tmp_path / "adapter_model.safetensors"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"use_dora": True}, "DoRA norms each changed weight"),
        ({"peft_type": "IA3"}, "it is of kind IA3"),
        ({"bias": "all"}, "changes biases"),
        ({"modules_to_save": ["lm_head"]}, "brings whole modules"),
    ],
    ids=["dora", "ia3", "bias", "modules"],
)
def test_what_is_more_than_two_products_is_to_be_merged(lean, tmp_path, said, why):
    with pytest.raises(ConfigurationError, match=f"'x' cannot be served beside.*{why}.*merged"):
        _load(lean.folder, x=_copied(lean, tmp_path, **said))


def _renamed(stored):
    return {key.replace("layers.1", "layers.7"): weight for key, weight in stored.items()}


def _narrow(stored):
    return {k: w[:, :16].contiguous() if "lora_A" in k else w for k, w in stored.items()}


def _broken(stored):
    return {key: weight * torch.nan for key, weight in stored.items()}


def _halved(stored):
    return {key: weight for key, weight in stored.items() if "layers.1" in key or "_A" in key}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_renamed, "does not fit the target LlamaForCausalLM: .*layers.7.* is no linear layer"),
        (_narrow, "does not fit the target LlamaForCausalLM: .*x 16, which is "),
        (_broken, "are no numbers"),
        (_halved, "it has half of"),
    ],
    ids=["deeper", "narrower", "nan", "half"],
)
def test_an_adapter_of_another_base_or_broken_is_named(lean, tmp_path, change, why):
    with pytest.raises(ConfigurationError, match=f"the adapter 'x'.*{why}"):
        _load(lean.folder, x=_copied(lean, tmp_path, change))


def test_folders_that_are_none(lean, tmp_path):
    with pytest.raises(ConfigurationError, match=r"no adapter_model.safetensors"):
        _load(lean.folder, x=tmp_path)
    with pytest.raises(ConfigurationError, match="folders of adapters by name"):
        outrider.load(lean.folder / "base", lora_modules={"x": 3}, **LOAD)


def test_targets_that_read_more_than_text_are_refused(lean):
    with pytest.raises(UnsupportedModel, match="adapters by row are for targets of text alone"):
        outrider.load("corrector", lora_modules={"x": lean.folder / "one"}, **LOAD)
