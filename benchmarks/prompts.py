"""How long a prompt takes to be read, and a plain step behind it: ours beside transformers'.

    python benchmarks/prompts.py MODEL [--lengths 32 128 512 1500] [--rounds 5]

MODEL is a folder or a hub name; all arms are bfloat16 on one thread, whose CPU time is the clock:
ours packed, the model's own forward driven by us with its weights as they lie and packed, and
transformers' `generate`. Arms take turns; the least of the rounds counts. A prompt's time includes
its first token; a step's is that of sixteen more, divided.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import outrider
from outrider import Engine, Root, SamplingParams, StopConditions
from outrider.models import TransformersRunner, TreeDecoder, linear

STEPS = 16
Arm = Callable[[list[int], int], None]


def ours(engine: Engine) -> Arm:
    """Plain decoding."""

    def decode(prompt: list[int], tokens: int) -> None:
        for _ in engine.run([prompt], [SamplingParams(0)], StopConditions(tokens, ())):
            pass

    return decode


def theirs(model: PreTrainedModel) -> Arm:
    """`generate` with its own cache."""

    @torch.inference_mode()
    def decode(prompt: list[int], tokens: int) -> None:
        ids = torch.tensor([prompt])
        mask, most = torch.ones_like(ids), {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **most)

    return decode


def least(arms: dict[str, Arm], prompt: list[int], tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each arm."""
    found = dict.fromkeys(arms, float("inf"))
    for _ in range(rounds):
        for name, arm in arms.items():
            started = time.thread_time()
            arm(prompt, tokens)
            found[name] = min(found[name], 1e3 * (time.thread_time() - started))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512, 1500])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    speculator = outrider.load(given.model, dtype="bfloat16", threads=1, pack_weights=True)
    text = Path(__file__).with_name("planner.py").read_text()
    ids = speculator.tokenizer(text)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.bfloat16, trust_remote_code=False
    ).eval()
    packed = linear.pack_linear_layers(model)
    assert packed is not None
    arms = {
        "ours": ours(Engine(speculator.engine.target, Root())),
        "its own forward": ours(Engine(TreeDecoder(TransformersRunner(model)), Root())),
        "the same packed": ours(Engine(TreeDecoder(TransformersRunner(packed)), Root())),
        "transformers": theirs(model),
    }
    for length in given.lengths:
        prompt = (ids * (length // len(ids) + 1))[:length]
        read = least(arms, prompt, 1, given.rounds)
        whole = least(arms, prompt, 1 + STEPS, given.rounds)
        step = {name: (whole[name] - read[name]) / STEPS for name in arms}
        told = ", ".join(f"{n} {read[n]:.0f} ms and {step[n]:.1f} a step" for n in arms)
        over = [took["transformers"] / took["ours"] for took in (read, step)]
        print(f"{length} tokens: {told}; ours is {over[0]:.2f} and {over[1]:.2f} times as fast")


if __name__ == "__main__":
    main()
