"""How long the doors take: `import outrider`, what a model needs, and every `--help`.

    python benchmarks/doors.py [--repeats 5]

Each line is a fresh process: the least CPU time of some runs, as a multiple of importing torch with
transformers' auto classes, and how many modules of ours were loaded.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

BASE = "import torch; from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer"
TELL = """
import json, resource, sys
spent = resource.getrusage(resource.RUSAGE_SELF)
ours = [name for name in sys.modules if name.split(".")[0] == "outrider"]
print(json.dumps([spent.ru_utime + spent.ru_stime, len(ours), "torch" in sys.modules]))
"""
HELP = """
import contextlib, io, sys
from outrider.cli import main
sys.argv = {words!r}
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
"""


def measured(code: str, repeats: int) -> tuple[float, int, bool]:
    """CPU seconds of a process that runs it, the least; modules of ours; whether torch came."""
    told = []
    for _ in range(repeats):
        run = subprocess.run(
            [sys.executable, "-c", code + TELL], capture_output=True, text=True, check=True
        )
        told.append(json.loads(run.stdout.splitlines()[-1]))
    return min(told)


def commands() -> list[list[str]]:
    """Every command, and the groups that have commands below them."""
    import typer

    from outrider.cli import app

    found: list[list[str]] = [[]]

    def walk(command: object, words: list[str]) -> None:
        for name, below in getattr(command, "commands", {}).items():
            found.append([*words, name])
            walk(below, found[-1])

    walk(typer.main.get_command(app), [])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    base, *_ = measured(BASE, repeats)
    lines = {
        "torch and transformers' auto classes": BASE,
        "and a model class of theirs": BASE + ", LlamaForCausalLM",
        "import outrider": "import outrider",
        "the function load": "from outrider import load",
        "all public names": "from outrider import *",
    }
    for words in commands():
        lines[" ".join(["outrider", *words, "--help"])] = HELP.format(
            words=["outrider", *words, "--help"]
        )
    print(f"{'':44} CPU s  times  our modules  torch")
    for name, code in lines.items():
        seconds, ours, torch = measured(code, repeats)
        print(f"{name:44} {seconds:5.2f} {seconds / base:6.2f} {ours:12}  {'yes' * torch}")
    print(f"\n{Path(sys.executable)}, least of {repeats}")


if __name__ == "__main__":
    main()
