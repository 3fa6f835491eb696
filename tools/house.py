"""Figures of the house: size, habits and layers of `src/outrider`.

    python tools/house.py [FOLDER]      # src/outrider, or that of another checkout
    python tools/house.py --flow        # and what a load and a greedy request touch, here
    python tools/house.py --functions   # and by name what the greedy request does

Prints lines, functions over 50 and 100 lines, class names that several classes have, `Any` per
1,000 lines, `getattr` and `hasattr`, imports of the CPU's and the card's code from outside `ops`,
and the layers that `tests/test_layers.py` holds the imports to. The last line says whether all
limits hold; so does the exit status. What `import outrider` and `--help` take is said by
`benchmarks/doors.py`.

With --flow, files and functions of ours that run at least once while the shipped pair is loaded,
and while it writes 24 tokens after it has written some; with --functions also which of them.
"""

import argparse
import ast
import collections
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
#: What each figure may be at most.
LIMITS = {
    "layers": 12,
    "imports of ops.cpu and ops.triton outside ops": 0,
    "Any per 1,000 lines": 8,
    "getattr and hasattr": 30,
    "functions over 100 lines": 0,
    "files": 310,
    "lines": 43_000,
    "class names used twice": 8,
    "files of a greedy request": 36,
    "functions of a greedy request": 190,
    "files of a load": 75,
}
#: What a fresh process does to count what two calls run.
FLOW = """
import json, sys
import outrider
from outrider import SamplingParams, Stop

seen = set()

def look(frame, event, argument):
    code = frame.f_code
    if event == "call" and "/outrider/" in code.co_filename and code.co_name != "<module>":
        seen.add((code.co_filename, code.co_qualname))

def counted(call):
    seen.clear()
    sys.setprofile(look)
    result = call()
    sys.setprofile(None)
    return result, sorted(seen)

speculator, load = counted(lambda: outrider.load(threads=1, dtype="float32"))
greedy = SamplingParams(temperature=0)
speculator.generate("def f(x):", greedy, Stop(8))
_, greedy = counted(lambda: speculator.generate("def f(x):", greedy, Stop(24)))
print(json.dumps([load, greedy]))
"""


class Function(NamedTuple):
    """A function and how long it is."""

    lines: int
    where: str


def functions(path: Path, text: str) -> list[Function]:
    """Every function of a file, inner ones included."""
    return [
        Function(node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]


def layers(root: Path) -> int:
    """How many layers the test of the imports knows; 0 if the checkout has no such test."""
    test = root.parent.parent / "tests" / "test_layers.py"
    if not test.is_file():
        return 0
    for node in ast.parse(test.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            assert isinstance(node.value, ast.List)
            return len(node.value.elts)
    return 0


def measure(root: Path) -> tuple[dict[str, float], list[Function]]:
    """All figures of a package, and its functions, the longest first."""
    texts = {path: path.read_text("utf-8") for path in sorted(root.rglob("*.py"))}
    whole = "".join(texts.values())
    lines = whole.count("\n")
    named = r"^\s*(?:from|import) outrider\.ops\.(?:cpu|triton)\b"
    outside = "".join(t for path, t in texts.items() if "ops" not in path.relative_to(root).parts)
    every = [f for path, text in texts.items() for f in functions(path.relative_to(root), text)]
    every.sort(reverse=True)
    return {
        "files": len(texts),
        "lines": lines,
        "functions": len(every),
        "lines of the median function": every[len(every) // 2].lines,
        "functions over 50 lines": sum(f.lines > 50 for f in every),
        "functions over 100 lines": sum(f.lines > 100 for f in every),
        "Any per 1,000 lines": round(1000 * len(re.findall(r"\bAny\b", whole)) / lines, 1),
        "getattr and hasattr": len(re.findall(r"\b(?:getattr|hasattr)\(", whole)),
        "imports of ops.cpu and ops.triton outside ops": len(re.findall(named, outside, re.M)),
        "layers": layers(root),
        "class names used twice": len(twice(texts.values())),
    }, every


def twice(texts: Iterable[str]) -> list[str]:
    """Names that more than one class has."""
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    count = collections.Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return [name for name, number in count.items() if number > 1]


def flow() -> tuple[list[list[str]], list[list[str]]]:
    """What a load and a greedy request run of the package that is imported: [file, function]."""
    run = subprocess.run([sys.executable, "-c", FLOW], capture_output=True, text=True, check=True)
    load, greedy = json.loads(run.stdout.splitlines()[-1])
    return load, greedy


def by_file(ran: Iterable[Sequence[str]]) -> list[str]:
    """A line for each file, with its functions."""
    found = collections.defaultdict[str, list[str]](list)
    for file, function in ran:
        found[file.partition("/outrider/")[2]].append(function)
    return [f"{file}: {', '.join(names)}" for file, names in sorted(found.items())]


def main() -> int:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description="Figures of the house.")
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "src" / "outrider")
    parser.add_argument("--flow", action="store_true", help="run a load and a greedy request, too")
    parser.add_argument("--functions", action="store_true", help="and name what the request runs")
    asked = parser.parse_args()
    figures, every = measure(asked.folder)
    if asked.flow or asked.functions:
        load, greedy = flow()
        for call, ran in (("load", load), ("greedy request", greedy)):
            figures[f"files of a {call}"] = len({file for file, _ in ran})
            figures[f"functions of a {call}"] = len(ran)
        if asked.functions:
            print("\n".join(by_file(greedy)))
    for name, value in figures.items():
        limit = f"  (at most {LIMITS[name]})" if name in LIMITS else ""
        print(f"{value:>8}  {name}{limit}")
    for function in every[:3]:
        print(f"{function.lines:>8}  {function.where}")
    over = [name for name, limit in LIMITS.items() if figures.get(name, 0) > limit]
    print("over the limit: " + ", ".join(over) if over else "all limits hold")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
