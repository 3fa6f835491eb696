"""What layers with states cost at the sizes that people run: random weights, published shapes.

    python benchmarks/hybrid.py                   # all models, one thread, bfloat16
    python benchmarks/hybrid.py lfm2 --dtype float32

For each model: milliseconds of this thread's processor time of a call of 1, 4 and 8 nodes (a chain
and a tree, of which two nodes are kept), the share of that which is spent on states and
convolution windows, their memory a row, and seconds of a text written plainly and with `recall`.
The text is a copy of half of its prompt with every 25th token changed: random weights copy nothing,
so a processor makes it the likeliest one, for both alike.
"""

import argparse
import os
import statistics
import time
from collections import Counter
from contextlib import contextmanager

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import outrider
from outrider import SamplingParams, StopConditions
from outrider.drafters import Root
from outrider.engine.engine import Engine
from outrider.models.prefill import ingest, of_tree
from outrider.models.recurrent import short_conv
from outrider.models.recurrent.states import RecurrentStates
from outrider.tree import chain, from_parents

#: LFM2-350M, Qwen3.5-0.8B and Granite-4.0-H-350M, from their published configurations.
SHAPES = {
    "lfm2": {
        "vocab_size": 65536,
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "intermediate_size": 6656,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "layer_types": [
            "full_attention" if at in (2, 5, 8, 10, 12, 14) else "conv" for at in range(16)
        ],
    },
    "qwen3_5_text": {
        "vocab_size": 248320,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        "vocab_size": 100352,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "layer_types": ["attention" if at in (10, 13, 17, 27) else "mamba" for at in range(32)],
        "tie_word_embeddings": True,
    },
}
TREES = {"1": chain(0), "4": chain(3), "8 as a tree": from_parents([-1, 0, 0, 1, 1, 2, 3, 5])}
BEHIND = 200  #: tokens ahead of what is timed
PROMPT, EDITED, NEW = 300, 25, 150


def made(kind: str, dtype: str) -> outrider.Speculator:
    """A model of this shape behind `recall`, as `load` sets it up."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPES[kind], eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    return outrider.load(model, drafter="recall", dtype=dtype, threads=1, generation_config="none")


@contextmanager
def watched(spent: Counter):
    """Counts the seconds that are spent on states and windows."""
    kept = [(RecurrentStates, name) for name in ("begin", "windows", "convolve", "recur", "keep")]
    kept.append((short_conv, "over_windows"))
    theirs = [(owner, name, getattr(owner, name)) for owner, name in kept]

    def timed(function):
        def run(*arguments):
            started = time.thread_time()
            try:
                return function(*arguments)
            finally:
                spent["states"] += time.thread_time() - started

        return run

    for owner, name, function in theirs:
        setattr(owner, name, timed(function))
    try:
        yield
    finally:
        for owner, name, function in theirs:
            setattr(owner, name, function)


@torch.inference_mode()
def calls(target, looks: int = 15) -> dict[str, tuple[float, float]]:
    """Milliseconds of calls, medians of interleaved looks, and their share of states."""
    random = torch.Generator().manual_seed(1)
    caches, first = {}, {}
    text = torch.randint(3, 1000, (1, BEHIND), generator=random)
    for name in TREES:
        caches[name], first[name] = target.open(1, 1024), torch.tensor([BEHIND])
        ingest(target, caches[name], text, BEHIND, settled_B=first[name])
    took, spent = {name: [] for name in TREES}, {name: Counter() for name in TREES}
    for _ in range(looks):
        for name, tree in TREES.items():
            drafted = torch.randint(3, 1000, (1, tree.nodes), generator=random)
            nodes = of_tree(drafted, tree, first[name], target.width(int(first[name]) + tree.nodes))
            started = time.thread_time()
            with watched(spent[name]):
                target.forward(caches[name], nodes)
                if not tree.is_chain:
                    target.keep(caches[name], first[name], torch.tensor([[1, 3]]))
            took[name].append(time.thread_time() - started)
            first[name] = first[name] + min(tree.nodes, 3)
    return {
        name: (1e3 * statistics.median(took[name]), spent[name]["states"] / sum(took[name]))
        for name in TREES
    }


@torch.inference_mode()
def room(target) -> float:
    """MiB of a row's states and logs."""
    cache, tree = target.open(1, 1024), TREES["8 as a tree"]
    target.forward(cache, of_tree(torch.zeros(1, 8).long(), tree, torch.tensor([0]), 64))
    return cache.recurrent.bytes / 2**20


def copied(speculator: outrider.Speculator) -> dict[str, float]:
    """Seconds of this thread for the same text, by drafter; the first token's are left out."""
    random = torch.Generator().manual_seed(2)
    prompt = torch.randint(3, 1000, (PROMPT,), generator=random).tolist()
    answer = [9 if at % EDITED == EDITED - 1 else token for at, token in enumerate(prompt)][:NEW]

    def dictated(input_ids, scores):
        for row, text in enumerate(input_ids.tolist()):
            at = len(text) - PROMPT
            if at < len(answer):
                scores[row, answer[at]] = 1e4
        return scores

    params = SamplingParams(0.0, processors=(dictated,))
    engine = speculator.engine
    engines = {"plain": Engine(engine.target, Root()), "recall": engine}
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(3):
        for name, one in engines.items():
            steps = one.run([prompt], [params], StopConditions(NEW))
            text = [*next(iter(steps)).token_ids]
            started = time.thread_time()
            for block in steps:
                text += block.token_ids
            found[name].append(time.thread_time() - started)
            assert text == answer, f"{name} wrote another text"
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=[*SHAPES], metavar="kind")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--without-text", action="store_true", help="calls alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for kind in arguments.kinds:
        speculator = made(kind, arguments.dtype)
        target = speculator.engine.target
        millions = sum(p.numel() for p in target.runner.model.parameters()) / 1e6
        print(f"{kind}: {millions:.0f} M parameters, {arguments.dtype}, {target.runner.means}")
        for name, (milliseconds, share) in calls(target).items():
            print(f"  t({name}) = {milliseconds:.1f} ms, states {share:.1%}", flush=True)
        print(f"  {room(target):.1f} MiB of states and logs a row")
        if not arguments.without_text:
            took = copied(speculator)
            ratio = took["plain"] / took["recall"]
            print(f"  copied text: {took['plain']:.2f} s plainly, {ratio:.2f}x with recall")


if __name__ == "__main__":
    main()
