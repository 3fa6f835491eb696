"""A target in several processes: its texts are those of one process, whoever comes and goes."""

import os
import signal
import time

import pytest
import sharding
import torch
from families import FAMILIES
from transformers import AutoModelForCausalLM
from transformers.distributed import tensor_parallel

import outrider
from outrider.errors import ConfigurationError
from outrider.models import adapt, distributed, llama
from outrider.models.hf import TransformersRunner
from outrider.testing import llama as tiny_llama

NO_ACCELERATE = "needs the package accelerate: pip install 'outrider[tp]'"
PROMPTS = [[5 + (7 * row + 3 * at) % 90 for at in range(3 + row % 4)] for row in range(20)]


def saved(kind, folder):
    """A tiny model of a family, and a draft that often agrees with it; as arguments of `load`."""
    torch.manual_seed(0)
    config = FAMILIES[kind]()
    config.initializer_range = 0.3
    if "validate_param" in vars(tensor_parallel.ColwiseParallel):  # halves alone, before 5.21
        config.vocab_size = 98
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "target")
    again = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    with torch.no_grad():
        for weight in again.parameters():
            weight.add_(0.1 * weight.std().nan_to_num(0.0) * torch.randn_like(weight))
    again.save_pretrained(folder / "draft")
    return {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "dtype": "float32",
        "pack_weights": False,
        "planner": "fixed",
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return saved("Llama", tmp_path_factory.mktemp("llama"))


def cut(load, size=2):
    return {**load, "tensor_parallel": size}


def careless(rank):
    """Rank 1 leaves the entries of accepted paths where the tree had them."""
    if rank == 1:
        distributed.Shard.keep = lambda self, cache, first_B, path_BD: None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("branching", [None, [2, 2]], ids=["chain", "tree"])
def test_texts_are_those_of_one_process(tiny, branching):
    """8 requests on 3 rows; one is cancelled in its row, one while it waits."""
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    load = tiny | ({"num_speculative_tokens": 3} if branching is None else {"branching": branching})
    asked = {"load": load, "prompts": PROMPTS[:8], "max_num_seqs": 3}
    whole = sharding.decoded(asked)
    told, codes = sharding.forked({**asked, "load": cut(load), "cancel": {"1": 2, "7": 1}})
    assert codes == [0, 0]
    assert told["phases"] == ["ENDED", "CANCELLED", *["ENDED"] * 5, "CANCELLED"]
    assert told["texts"][7] == []
    assert told["texts"][1] == whole["texts"][1][: len(told["texts"][1])]
    left = [0, 2, 3, 4, 5, 6]
    assert [told["texts"][n] for n in left] == [whole["texts"][n] for n in left]
    assert whole["accepted"] > 10, "a draft that is never right shows little"


def test_a_rank_that_does_not_follow_is_seen_in_the_texts(tiny):
    """The control: half of the heads read entries of paths that were never taken."""
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    asked = {"load": tiny | {"branching": [2, 2]}, "prompts": PROMPTS[:4]}
    whole = sharding.decoded(asked)
    told, _ = sharding.forked({**asked, "load": cut(asked["load"])}, before=careless)
    assert told["texts"] != whole["texts"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_of_weights_in_half_precision_are_not_packed(tiny, dtype):
    """Kernels would read a part by the address of the whole, which is none: both processes died."""
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    load = {name: tiny[name] for name in ("target", "planner")}
    load |= {"drafter": "prompt_lookup", "dtype": dtype}
    told, codes = sharding.forked({"load": cut(load), "prompts": PROMPTS[:2], "tokens": 8})
    assert codes == [0, 0]
    assert [len(text) for text in told["texts"]] == [8, 8]


def test_what_rank_0_refuses_ends_all(tiny):
    """An error of rank 0 is told there, and the others go home."""
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    load = cut(tiny) | {"drafter": "layer_skip", "draft": None, "drafter_options": {"skip": 1}}
    told, codes = sharding.forked({"load": load, "prompts": PROMPTS[:1]})
    assert "UnsupportedModel" in told["error"]
    assert codes[0] == 1


def test_sharded_weights_are_not_for_the_lean_runner():
    """Each process has a part of them: the model's own forward brings the parts together."""
    from torch.distributed import destroy_process_group, device_mesh, init_process_group
    from torch.distributed.tensor import Shard, distribute_tensor

    model = tiny_llama()
    assert llama.fits(model)
    os.environ.update(sharding.environment(0, 1, sharding.free_port()))
    init_process_group("gloo")
    try:
        mesh = device_mesh.init_device_mesh("cpu", (1,))
        layer = model.model.layers[0].mlp.up_proj
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
        assert not llama.fits(model)
        assert isinstance(adapt(model).runner, TransformersRunner)
    finally:
        destroy_process_group()
        for name in sharding.environment(0, 1, 0):
            del os.environ[name]


@pytest.mark.parametrize(
    ("changes", "environment", "words"),
    [
        ({}, {}, "torchrun --nproc-per-node 2"),
        ({}, {"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({"tensor_parallel": 1}, {}, "at least 2"),
        ({"tensor_parallel": "two"}, {}, "whole number"),
        ({"device": "meta"}, {"WORLD_SIZE": "2"}, "leave it out"),
    ],
)
def test_a_group_that_cannot_be(tiny, monkeypatch, changes, environment, words):
    """Said before anything is read."""
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=words):
        outrider.load(**(cut(tiny) | changes))


def of_torchrun(load, prompts, size=2):
    """Under torchrun, and by one process; two requests more are cancelled on the way."""
    asked = {"load": load, "prompts": [*prompts, *prompts[:2]], "tokens": 32, "capacity": 256}
    whole = sharding.decoded(asked)
    rows = len(prompts)
    cancel = {str(rows): 9, str(rows + 1): 1}
    told = sharding.started({**asked, "load": cut(load, size), "cancel": cancel}, size)
    assert told["phases"] == ["ENDED"] * rows + ["CANCELLED"] * 2
    assert whole["accepted"] > 4 * rows
    return told["texts"][:rows], whole["texts"][:rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("Qwen2", {"num_speculative_tokens": 4}),
        ("Qwen2", {"branching": [2, 2, 1]}),
        ("Gemma 2", {"branching": [2, 2, 1]}),
    ],
)
def test_torchrun_20_texts(kind, shape, tmp_path):
    """By two processes on loopback: 20 of 20."""
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    told, whole = of_torchrun(saved(kind, tmp_path) | shape, PROMPTS)
    assert told == whole


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"num_speculative_tokens": 4}, {"branching": [3, 2, 1]}])
def test_torchrun_20_texts_of_the_shipped_pair(held_out, shape):
    """By two processes on loopback: 20 of 20."""
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    prompts = [prompt[start:][:200] for prompt in held_out for start in (0, 90, 180)][:20]
    load = {"dtype": "float32", "pack_weights": False, "planner": "fixed"} | shape
    told, whole = of_torchrun(load, prompts)
    assert len(told) == 20
    assert told == whole


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_run(tiny, tmp_path, victim):
    """Within 10 s, with one error that says so. Without torchrun, which would do it by itself."""
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    go = tmp_path / "go"
    asked = {"load": cut(tiny) | {"num_speculative_tokens": 3}, "go": str(go)}
    asked |= {"prompts": PROMPTS[:4] * 20, "tokens": 100}
    ranks = sharding.alone(asked)
    try:
        sharding.wait_for(go, 60)
        ranks[victim].send_signal(signal.SIGKILL)
        dead = time.monotonic()
        _, said = ranks[1 - victim].communicate(timeout=60)
        assert time.monotonic() - dead < 10
        assert ranks[1 - victim].returncode == 1
        assert said.count("one of the 2 processes that hold the target is gone") == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stderr.close()
