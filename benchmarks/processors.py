"""Ours beside llama.cpp on the same GGUF files: processes of their own that take turns on one core.

    python benchmarks/requantize.py MODEL.gguf MODEL.Q8_0.gguf --type Q8_0      # for each type
    python -m venv peers && peers/bin/pip install xllamacpp
    python benchmarks/processors.py MODEL.BF16.gguf MODEL.Q8_0.gguf --peer peers/bin/python

On a processor with more than AVX2 the same under a cap of our side (llama.cpp picks its kernels by
itself, so it keeps what the processor has):

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OUTRIDER_ISA=avx2 python benchmarks/...

Prompts are the shipped ones of six kinds. Greedy; processor time of each process, so a neighbour on
the core costs little. "decode" leaves out the prompt: a call for one token is taken off. The best
of llama.cpp's n-gram modes, in sum, is what our default (nothing set) is set against.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
HERE = Path(__file__).parent
PLAIN, DEFAULT = "ours plain", "ours, nothing set"
WIDTHS = (1, 2, 3, 4, 6, 8)


class Worker:
    """An engine in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.ready = self._read()

    def ask(self, **what: object) -> dict[str, Any]:
        """One line there, one line back."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"ended without an answer: {' '.join(self._process.args)}")
        return dict(json.loads(line))


def serve(path: str, core: int, dtype: str) -> None:
    """Our side: both ways of decoding one model, and what its steps cost."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if core >= 0:
        os.sched_setaffinity(0, {core})
    import time

    started = time.process_time()
    import outrider
    from outrider.models.calibrate import cost
    from outrider_lab.tasks.prompts import tasks, token_ids

    speculator = outrider.load(path, threads=1, dtype=dtype)
    ways = {PLAIN: speculator.plain(), DEFAULT: speculator}
    notes = speculator.notes
    told = {"dtype": notes.dtype, "means": notes.means, "ready": time.process_time() - started}
    print(json.dumps(told), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "each" in asked:
            found: Any = [
                (task.kind, token_ids(speculator.tokenizer, task.turns))
                for task in tasks(asked["each"])
            ]
        elif "widths" in asked:
            found = cost(speculator.engine.target, asked["widths"], repeats=20)
        else:
            started = time.process_time()
            done = ways[asked["way"]].generate(
                asked["prompt"], outrider.SamplingParams(0), outrider.Stop(asked["tokens"])
            )
            spent, first = time.process_time() - started, done.completions[0]
            found = {"text": first.text, "tokens": len(first.token_ids), "cpu": spent}
        print(json.dumps(found if isinstance(found, dict) else {"found": found}), file=answers)
        answers.flush()


def compare(path: str, asked: argparse.Namespace) -> None:
    """Print one file's figures."""
    from peers_llama import MODES

    mine = Worker([
        sys.executable, __file__, path, "--serve", "--core", str(asked.core), "--dtype", asked.dtype
    ])  # fmt: skip
    modes = MODES if asked.modes is None else ("NONE", *asked.modes)
    theirs = {
        f"llama.cpp {mode}": Worker(
            [asked.peer, str(HERE / "peers_llama.py"), path, mode, "1", str(asked.core)]
        )
        for mode in modes
    }
    print(f"\n{Path(path).name}: ours {mine.ready}")
    steps = mine.ask(widths=WIDTHS)
    one = steps["1"]
    print("our steps, ms: " + ", ".join(f"t({n}) {ms} ({ms / one:.2f})" for n, ms in steps.items()))
    prompts = mine.ask(each=asked.each)["found"]
    arms = [PLAIN, DEFAULT, *theirs]
    cpu, tokens = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
    first, same, worst = dict.fromkeys(arms, 0.0), 0, 9.9

    def call(arm: str, prompt: list[int], count: int) -> dict[str, Any]:
        if arm in theirs:
            return theirs[arm].ask(prompt=prompt, tokens=count)
        return mine.ask(way=arm, prompt=prompt, tokens=count)

    for arm in arms:
        call(arm, prompts[0][1], 8)  # warm
    for kind, prompt in prompts:
        found = {arm: call(arm, prompt, asked.tokens) for arm in arms}
        for arm in arms:
            first[arm] += call(arm, prompt, 1)["cpu"]
            cpu[arm] += found[arm]["cpu"]
            tokens[arm] += found[arm]["tokens"]
        same += found[PLAIN]["text"] == found[DEFAULT]["text"]
        each = {arm: 1e3 * found[arm]["cpu"] / found[arm]["tokens"] for arm in arms}
        worst = min(worst, each[PLAIN] / each[DEFAULT])
        print(f"  {kind:9}" + "".join(f" {each[arm]:7.2f}" for arm in arms), flush=True)
    print(f"{'':24} ms a token  decode alone  of llama.cpp plain (whole, decode)")
    whole = {arm: 1e3 * cpu[arm] / tokens[arm] for arm in arms}
    decode = {
        arm: 1e3 * (cpu[arm] - first[arm]) / max(tokens[arm] - len(prompts), 1) for arm in arms
    }
    base = "llama.cpp NONE"
    for arm in arms:
        print(
            f"{arm:24} {whole[arm]:9.2f} {decode[arm]:12.2f} "
            f"{whole[arm] / whole[base]:14.3f} {decode[arm] / decode[base]:8.3f}"
        )
    best = min(theirs, key=lambda arm: whole[arm])
    print(
        f"nothing set: {whole[best] / whole[DEFAULT]:.2f} times {best}'s speed (its best), "
        f"{whole[PLAIN] / whole[DEFAULT]:.2f} of plain, worst prompt {worst:.2f}, "
        f"texts as plain {same} of {len(prompts)}"
    )
    for worker in (mine, *theirs.values()):
        worker.close()


def main() -> None:
    """Read files and how to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--peer", default=sys.executable, help="a Python that has xllamacpp")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--each", type=int, default=4, help="prompts of each of six kinds")
    parser.add_argument("--modes", nargs="*", help="llama.cpp's n-gram modes; all that it has")
    parser.add_argument("--core", type=int, default=0, help="that all run on; -1: any")
    parser.add_argument("--dtype", default="auto", help="of our side")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.files[0], asked.core, asked.dtype)
        return
    caps = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OUTRIDER_ISA")
    capped = " ".join(f"{name}={os.environ[name]}" for name in caps if name in os.environ)
    model = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    print(f"{model[0] if model else platform.machine()}; {capped or 'no cap'}")
    for path in asked.files:
        compare(path, asked)


if __name__ == "__main__":
    main()
