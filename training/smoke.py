"""Rehearse the whole recipe on a slice: `python -m training.smoke`, under five minutes.

Corpus, tokenizer, tokens, target with the loop penalty, draft, n-gram table, export and
evaluation, then the corrector, each by the command that the full recipe uses. The models are too
small to be of use; what is shown is that every step runs and feeds the next.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TINY_T5 = "--layers 1 --width 64 --heads 2 --inner 96 --vocabulary 1024"
TINY = "--layers 2 --width 64 --heads 2 --inner 192 --vocabulary 1024 --context 320"


def commands(folder: Path) -> list[str]:
    """The recipe in order, on a slice of the running interpreter's library."""
    data, runs, export = folder / "corpus", folder / "runs", folder / "export"
    tokenizer = folder / "tokenizer.json"
    often = "--save-every 20 --evaluate-every 40"
    last = {part: runs / part / "last.pt" for part in ("target", "draft")}
    exports = [
        f"export --checkpoint {last[part]} --tokenizer {tokenizer} --out {export / part}"
        for part in last
    ]
    return [
        f"corpus --out {data} --limit 400",
        f"tokenizer --corpus {data} --out {tokenizer} --vocabulary 1024",
        f"tokens --corpus {data} --tokenizer {tokenizer}",
        f"train --data {data} --out {runs / 'target'} {TINY} --tokens 160e3 --batch 8 --warmup 4 "
        f"--unloop 0.5 {often}",
        f"train --data {data} --initial {last['target']} --out {runs / 'unlooped'} --context 320 "
        f"--tokens 40e3 --batch 8 --warmup 4 --unloop 1 --unloop-from 0 "
        f"--unloop-reference {last['target']} {often}",
        f"distill --data {data} --target {last['target']} --layers 0 --out {runs / 'draft'} "
        f"--tokens 80e3 --context 320 --batch 8 --warmup 4 --pool 8 {often}",
        f"ngram --data {data} --out {folder / 'ngram.safetensors'} --vocabulary 1024",
        *exports,
        f"evaluate --data {data} --target {export / 'target'} --draft {export / 'draft'} "
        f"--ngram {folder / 'ngram.safetensors'} --tokenizer {tokenizer} --prompts 4 --every 8",
        f"corrector --data {data} --out {runs / 'corrector'} --tokenizer {tokenizer} {TINY_T5} "
        f"--minutes 0.1 --batch 1024 --pool 64",
        f"corrector.export --checkpoint {runs / 'corrector' / 'last.pt'} "
        f"--out {export / 'corrector'}",
        f"corrector.held_out --data {data} --out {folder / 'heldout_pairs.jsonl'}",
        f"corrector.evaluate --model {export / 'corrector'} --tokenizer {tokenizer} "
        f"--pairs {folder / 'heldout_pairs.jsonl'} --most 4",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, help="work here and keep the files")
    args = parser.parse_args()
    # Compiling would take longer than these models take to train.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as temporary:
        started = time.monotonic()
        for command in commands(args.keep or Path(temporary)):
            print(f"\n--- python -m training.{command}", flush=True)
            module, *rest = command.split()
            subprocess.run(
                [sys.executable, "-m", f"training.{module}", *rest], env=environment, check=True
            )
        print(f"\nthe whole recipe ran in {time.monotonic() - started:.0f} seconds")


if __name__ == "__main__":
    main()
