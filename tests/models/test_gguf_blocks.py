"""A GGUF file's weights stay in its blocks: numbers, memory, texts, laws; what cannot be read."""

import logging
import struct

import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import SamplingParams, Stop, StopConditions, loading
from outrider.errors import ConfigurationError
from outrider.models import LlamaRunner, calibrate, isa, weight_only
from outrider.models.gguf import GgufFile
from outrider.models.sources import ModelSource
from outrider.models.weight_only_tensor import WeightOnlyTensor
from outrider_lab.certify import Power, certify

pytest.importorskip("gguf", reason="needs pip install 'outrider[gguf]'")
pytest.importorskip("accelerate", reason="needs pip install 'outrider[gguf]'")
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    weight_only.unsupported_reason(CPU) is not None,
    reason=f"no kernels: {weight_only.unsupported_reason(CPU)}",
)
QUICK = {"threads": 1, "planner": "fixed"}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
MADE = {"llama": lambda: tiny_gguf.model(**WIDE), "qwen2": tiny_gguf.qwen2}
KINDS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
TEXT = torch.tensor([[5, 40, 17, 3, 8, 60, 61, 62, 9, 9, 30]])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function that writes a file once and returns its path."""
    folder, known = tmp_path_factory.mktemp("gguf"), {}

    def written(name, kind):
        if (name, kind) not in known:
            known[name, kind] = folder / f"{name}.{kind}.gguf"
            tiny_gguf.write(known[name, kind], MADE[name](), kind)
        return known[name, kind]

    return written


def widened(path):
    """The model as transformers reads it, in float32."""
    made = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    return made.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MADE)
@torch.inference_mode()
def test_numbers_are_those_that_transformers_reads(files, name, kind):
    path = files(name, kind)
    model = ModelSource(path, "target").model(weight_only.STORED, CPU)
    assert model.dtype == torch.float32
    found, expected = model(TEXT).logits, widened(path)(TEXT).logits
    # inputs of whole weights are rounded to 16 bits, those of bfloat16 ones perhaps to 8
    near = {"F16": 5e-6, "BF16": 0.05 if isa.has_bf16_products() else 5e-6}.get(kind, 1e-3)
    assert (found - expected).abs().max() <= near * expected.abs().max()
    for leaf, weight in model.named_parameters():
        packed = isinstance(weight, WeightOnlyTensor)
        assert packed == (weight.dim() == 2), leaf


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MADE)
def test_weights_take_the_memory_that_the_file_takes(files, name, kind):
    path = files(name, kind)
    stored = [one.rows.nbytes for one in GgufFile(path).tensors.values() if len(one.shape) == 2]
    model = ModelSource(path, "target").model(weight_only.STORED, CPU)
    form = kind.lower()
    assert set(weight_only.formats(model)) == {form}
    # panels have 16 outputs: what the vocabulary of 102 lacks to whole ones is empty
    assert sum(stored) <= weight_only.formats(model)[form] <= 1.1 * sum(stored)
    if model.config.tie_word_embeddings:
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert head.record is table.record


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_texts_are_those_of_the_widened_model(files, name):
    path = files(name, "Q8_0")
    made = outrider.load(path, drafter="recall", **QUICK)
    target = made.engine.target
    assert isinstance(target.runner, LlamaRunner)
    assert target.dtype == torch.float32
    assert "q8_0; states and sums float32" in made.notes.weights
    prompt = "then the other"
    told = made.generate(prompt, SamplingParams(0), Stop(20, token_ids=())).completions[0].token_ids
    ids, dense = torch.tensor([made.tokenizer(prompt)["input_ids"]]), widened(path)
    dense.generation_config.eos_token_id = None
    text = dense.generate(ids, max_new_tokens=20, do_sample=False)
    assert told == text[0, ids.shape[1] :].tolist()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_the_law_is_the_targets(files, kind):
    """Every drafter reads the model as loaded; the black box is its own plain decoding."""
    made = outrider.load(
        files("llama", kind), files("llama", "F16"), num_speculative_tokens=3, **QUICK
    )
    prompts = [[3, 1, 4, 1, 5, 9 + i % 8, i % 23, 2, 6] for i in range(32)]
    power = Power(
        tokens=4_000,
        samples=512,
        equality_tokens=128,
        new_tokens=24,
        rows=64,
        effect=0.05,
        level=1e-3,
    )
    report = certify(made.engine, prompts, SamplingParams(1.0), power)
    assert not report.failed, report.as_dict()


def test_a_seeded_text_does_not_depend_on_its_neighbours(files):
    made = outrider.load(files("llama", "Q8_0"), drafter="recall", shared_noise=True, **QUICK)
    prompts = ["the", "then the other one", "he", "hot in the tent"]
    how, stop = [SamplingParams(0.8, seed=seed) for seed in range(4)], Stop(24, token_ids=())
    each = [
        made.generate([one], [s], stop).completions[0].token_ids
        for one, s in zip(prompts, how, strict=True)
    ]
    beside = made.generate(prompts, how, stop).completions
    assert [one.token_ids for one in beside] == each


def test_blocks_that_no_kernel_reads_are_widened_and_that_is_said(files, caplog):
    path = files("llama", "MXFP4")
    with caplog.at_level(logging.WARNING, "outrider"):
        made = outrider.load(path, drafter="none", **QUICK)
    said = "16 of type MXFP4 are widened to float16"
    assert said in caplog.text
    assert said in made.notes.weights
    model = ModelSource(path, "target").model(weight_only.STORED, CPU)
    with torch.inference_mode():
        expected = widened(path)(TEXT).logits
        torch.testing.assert_close(model(TEXT).logits, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (3, "does not begin"),
        *((at, f"it ends within its data, at byte {at} of") for at in (4, 10, 24, 60, 200)),
        (-100, "it ends within its data"),
    ],
)
def test_a_damaged_file_is_refused(files, tmp_path, cut, said):
    path = tmp_path / "cut.gguf"
    path.write_bytes(files("llama", "Q8_0").read_bytes()[:cut])
    with pytest.raises(ConfigurationError, match=said):
        GgufFile(path)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (8, struct.pack("<Q", 3) + b"\xff\xfea", r"architecture is no UTF-8: b'\\xff\\xfea'"),
        (4, struct.pack("<I", 7), "architecture is no text but UINT32"),
        (9, struct.pack("<IQI", 4, 1, 7), "architecture is no text but ARRAY of UINT32"),
        (9, struct.pack("<IQQ", 8, 1, 0), "architecture is no text but ARRAY of STRING"),
    ],
    ids=["latin", "number", "numbers", "texts"],
)
def test_an_architecture_that_is_no_text_is_refused(tmp_path, kind, value, said):
    key, path = b"general.architecture", tmp_path / "named.gguf"
    path.write_bytes(
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + struct.pack("<I", kind) + value
    )
    with pytest.raises(ConfigurationError, match=said):
        GgufFile(path)


def test_a_draft_of_the_targets_layers_and_another_types_file(files):
    """Layers of a packed target share its records; a dense dtype unpacks the file."""
    path = files("llama", "Q8_0")
    made = outrider.load(path, draft_layers=(0,), num_speculative_tokens=2, **QUICK)
    plain = outrider.load(path, drafter="none", dtype="float32", pack_weights=False, **QUICK)
    assert plain.notes.weights.startswith("float32")

    def greedy(speculator):
        run = speculator.engine.run([[5, 40, 17, 3]], [SamplingParams(0)], StopConditions(20))
        return [token for block in run for token in block.token_ids]

    assert greedy(made) == greedy(plain)


def test_a_file_of_another_type_is_measured_by_itself(files, monkeypatch):
    """Files of one model differ in nothing but the types of their tensors: a step in 4 bits is not
    planned by what one in 8 bits takes, nor by its threads."""
    asked = {}
    monkeypatch.setattr(calibrate, "recall_costs", lambda key: asked.setdefault("costs", key))
    monkeypatch.setattr(calibrate, "recall", lambda key: asked.update(threads=key))
    monkeypatch.setattr(calibrate, "cores", lambda: 2)

    class Asked(Exception):
        pass

    def stop(*_, **__):
        raise Asked

    monkeypatch.setattr(loading, "Engine", stop)
    monkeypatch.setattr(calibrate, "choose", stop)
    keys = {}
    for kind in ("Q8_0", "Q4_1", "BF16"):
        for threads in (1, "auto"):
            with pytest.raises(Asked):
                outrider.load(files("llama", kind), drafter="recall", threads=threads)
        keys[kind] = dict(asked)
        asked.clear()
        with pytest.raises(Asked):
            outrider.load(files("llama", kind), drafter="recall", threads=1)
        assert asked == {"costs": keys[kind]["costs"]}  # and the same file by what it took
        asked.clear()
    assert all(len({each[what] for each in keys.values()}) == 3 for what in ("costs", "threads"))
