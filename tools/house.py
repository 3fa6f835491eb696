"""Figures of the house: size, habits and layers of `src/outrider`.

    python tools/house.py [FOLDER]      # src/outrider, or that of another checkout

Prints lines, functions over 50 and 100 lines, `Any` per 1,000 lines, `getattr` and `hasattr`,
imports of the CPU's and the card's code from outside `ops`, and the layers that
`tests/test_layers.py` holds the imports to. The last line says whether all limits hold; so does the
exit status.
"""

import ast
import re
import sys
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
}


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
    }, every


def main() -> int:
    """Print the figures of a checkout."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "src" / "outrider"
    figures, every = measure(root)
    for name, value in figures.items():
        limit = f"  (at most {LIMITS[name]})" if name in LIMITS else ""
        print(f"{value:>8}  {name}{limit}")
    for function in every[:3]:
        print(f"{function.lines:>8}  {function.where}")
    over = [name for name, limit in LIMITS.items() if figures[name] > limit]
    print("over the limit: " + ", ".join(over) if over else "all limits hold")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
