"""What a draft in 8 bits costs and keeps, beside the same draft in the target's dtype.

    python -m benchmarks.int8_drafts [--target T --draft D] [--prompts 12] [--depths 4]
    python -m benchmarks.int8_drafts --products

Without models: the shipped pair. bfloat16, one thread, packed; plain decoding and both drafts take
turns on every prompt, at T = 0 and 1, and times are those of decoding, without the prompt. "alpha"
is the mean over drafted tokens of sum min(p, q); "a call" the time of a draft call, its law
included. `--products` times single products over weights that no cache holds, in microseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import outrider
from outrider import SamplingParams, Stop
from outrider.models.linear import product
from outrider.text.speculator import Speculator
from outrider_lab.bench import measure
from outrider_lab.bench.prompts import read_prompts

PLAIN = "plain"
FORMS: dict[str, dict[str, str]] = {"bfloat16": {}, "int8": {"draft_dtype": "int8"}}
SHAPES = ((512, 16384), (512, 2048), (576, 49152))  #: inputs, outputs
_COLD = 120 << 20  #: bytes of weights that are gone through, in 8 bits: several times any cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depths", default="4", help="tokens ahead, several with commas")
    parser.add_argument("--products", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.products:
        with torch.inference_mode():
            products()
        return
    for depth in map(int, asked.depths.split(",")):
        compared(asked, depth)


def compared(asked: argparse.Namespace, depth: int) -> None:
    """Both drafts against plain decoding, `depth` tokens ahead."""
    arms: dict[str, Speculator] = {}
    for name, form in FORMS.items():
        arms[name] = outrider.load(
            asked.target, asked.draft, num_speculative_tokens=depth, dtype="bfloat16", threads=1,
            pack_weights=True, **form,
        )  # fmt: skip
    arms = {PLAIN: arms["bfloat16"].plain()} | arms
    prompts = read_prompts(None, asked.prompts)
    for temperature in (0.0, 1.0):
        trials = measure.interleave(
            arms,
            prompts,
            lambda number, t=temperature: SamplingParams(t, seed=number),
            Stop(asked.tokens, token_ids=()),
        )
        plain = {t.prompt: t.result.completions[0].token_ids for t in trials if t.arm == PLAIN}
        for name in FORMS:
            mine = [trial for trial in trials if trial.arm == name]
            stats = [trial.result.stats for trial in mine]
            steps = sum(s.engine_steps for s in stats)
            laws = sum(s.overlaps for s in stats)  # none where children are placed, at T = 0
            alpha = f"alpha {sum(s.overlap for s in stats) / laws:.3f}, " if laws else ""
            ratio = measure.ratio(trials, name, PLAIN)
            same = sum(
                trial.result.completions[0].token_ids == plain[trial.prompt] for trial in mine
            )
            print(
                f"T = {temperature:g}, {depth} ahead, {name:9s} "
                f"{ratio.value:.2f} {ratio.text(2)} of plain; {alpha}"
                f"{sum(s.new_tokens for s in stats) / steps:.2f} tokens a step, a call "
                f"{sum(s.propose_ms for s in stats) / steps / depth:.2f} ms, scoring "
                f"{sum(s.score_ms for s in stats) / steps:.2f} ms; "
                f"plain's text {same}/{len(mine)}",
                flush=True,
            )


def products() -> None:
    """Products of one to sixteen rows with weights of 16 and of 8 bits."""
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
        copies = max(2, _COLD // weight.numel())
        forms = {
            "bfloat16": [product(weight.clone(), None, packed=True) for _ in range(copies)],
            "int8": [product(weight, None, int8=True) for _ in range(copies)],
        }
        for rows in (1, 2, 4, 8, 16):
            x = torch.randn(rows, inputs, dtype=torch.bfloat16)
            took = {name: timed(runs, x) for name, runs in forms.items()}
            print(
                f"{inputs} x {outputs}, {rows} row(s): "
                + ", ".join(f"{name} {us:.0f}" for name, us in took.items())
                + f": {took['int8'] / took['bfloat16']:.2f}",
                flush=True,
            )


def timed(runs: list[Callable[[Tensor], Tensor]], x: Tensor, repeats: int = 5) -> float:
    """Microseconds a product, the middle of the repeats."""
    found = []
    for _ in range(repeats):
        started = time.thread_time()
        for run in runs:
            run(x)
        found.append(1e6 * (time.thread_time() - started) / len(runs))
    return statistics.median(found)


if __name__ == "__main__":
    main()
