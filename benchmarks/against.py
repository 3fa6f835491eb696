"""The shipped pair's speed in this checkout against another one's, in turn, in one run.

    git worktree add /tmp/before COMMIT
    python benchmarks/against.py /tmp/before --temperatures 0 0.6 1

One process for each checkout, both loaded before anything is timed, one thread, the same dtype and
packing. They take turns prompt by prompt, the first one changing, and work while the other waits.
Printed per temperature: the mean ratio of decoding time per token (above 1: this checkout is
faster; geometric, over prompts) with a 95 % interval, the ratio for whole calls, prompts included,
milliseconds a step of both, and whether the texts are the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def serve() -> None:
    """Answer requests on standard input, a line of JSON each: what a checkout's process does."""
    import torch

    import outrider
    from outrider import SamplingParams, Stop

    given = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    speculator = outrider.load(**given)
    print(json.dumps(str(Path(outrider.__file__).parent)), flush=True)
    for line in sys.stdin:
        prompt, temperature, seed, budget = json.loads(line)
        sampling, stop = SamplingParams(temperature, seed=seed), Stop(budget, token_ids=())
        started = time.perf_counter()
        result = speculator.generate(prompt, sampling, stop)
        call, stats = time.perf_counter() - started, result.stats
        ids = result.completions[0].token_ids
        print(json.dumps([stats.seconds, call, stats.engine_steps, ids]), flush=True)


class Checkout:
    """A process that decodes with one checkout's code."""

    def __init__(self, root: Path, settings: dict[str, object]) -> None:
        env = os.environ | {
            "PYTHONPATH": str(root / "src"),
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True)
        home = self.ask(settings)
        assert home == str(root / "src" / "outrider"), f"{root} runs the code of {home}"

    def ask(self, what: object) -> list:
        """Send one line, wait for one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a checkout's process has ended; its error is above")
        return json.loads(line)


def compare(pair: list[Checkout], prompts: list[str], temperature: float, given) -> str:
    """One line of the table; `pair` is this checkout and the other one."""
    from outrider_lab.bench.intervals import typical

    ratios: list[list[float]] = [[] for _ in prompts]
    calls, steps, same = [], [[], []], 0
    for turn in range(-1, given.repeats):  # the first round warms up
        for number, prompt in enumerate(prompts if turn >= 0 else prompts[:2]):
            order = (0, 1) if (number + turn) % 2 else (1, 0)
            told = {}
            for who in order:
                told[who] = pair[who].ask([prompt, temperature, number, given.budget])
            if turn < 0:
                continue
            per_token = [told[who][0] / len(told[who][3]) for who in (0, 1)]
            ratios[number].append(per_token[1] / per_token[0])
            calls.append(told[1][1] / len(told[1][3]) / (told[0][1] / len(told[0][3])))
            same += told[0][3] == told[1][3]
            for who in order:
                steps[who].append(1e3 * told[who][0] / told[who][2])
    ratio = typical([statistics.geometric_mean(each) for each in ratios])
    mine, theirs = (statistics.median(each) for each in steps)
    return (
        f"T={temperature:<4} {ratio.value:.3f} {ratio}   whole calls "
        f"{statistics.median(calls):.3f}   {mine:.2f} against {theirs:.2f} ms a step   "
        f"{same} of {len(calls)} texts the same"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout's folder")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--branching", type=int, nargs="+", help="a tree instead of a chain of 4")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    if given.other is None:
        parser.error("name the other checkout's folder")
    shape = {"branching": given.branching} if given.branching else {"num_speculative_tokens": 4}
    settings = {"dtype": given.dtype, "threads": 1, "pack_weights": True, **shape}
    from outrider_lab.bench.prompts import read_prompts

    prompts = read_prompts(count=given.prompts)
    pair = [Checkout(root.resolve(), settings) for root in (HERE, given.other)]
    print(f"this checkout against {given.other}, {settings}", flush=True)
    for temperature in given.temperatures:
        print(compare(pair, prompts, temperature, given), flush=True)


if __name__ == "__main__":
    main()
