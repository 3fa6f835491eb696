"""Markdown tables of measured files: what README and docs show.

    python benchmarks/table.py benchmarks/results/<device>/verify-<date>.json
    python benchmarks/table.py benchmarks/results/<card>     # a folder of benchmarks/gpu_day.py
    python benchmarks/table.py FILE --rows "transformers; two kernels, LSE kept" --vocab 151936

Times are medians in microseconds of one call; in brackets how many times faster than transformers'
function at the same size. Nothing is written here that the file does not hold.
"""

import argparse
import json
from pathlib import Path
from typing import Any

BASE = "transformers"
CPU_ROWS = (
    BASE, "PyTorch, no host read", "vLLM-like (PyTorch)", "cpu drop-in, cold", "cpu, cold",
    "cpu, LSE kept", "floor, target and draft", "floor, target",
)  # fmt: skip
GPU_ROWS = (
    BASE, "PyTorch, no host read", "vLLM-like (PyTorch)", "FlashInfer chain", "paper exact",
    "drop-in", "two kernels, LSE kept", "one kernel, LSE kept",
)  # fmt: skip
SIZE = ("batch", "gamma", "vocab", "dtype", "distance")


def markdown(document: dict[str, Any], rows: tuple[str, ...], vocab: int | None = None) -> str:
    """One line per size, one column per contestant of `rows` that the file knows."""
    sizes: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        if "dropped" not in row and vocab in (None, row["vocab"]):
            key = tuple(row.get(name, "mixed") for name in SIZE)
            sizes.setdefault(key, {})[row["row"]] = row
    known = [name for name in rows if any(name in found for found in sizes.values())]
    lines = [
        f"{document['hardware']}, torch {document['versions']['torch']}, {document['date']}; "
        "median us of one call (times faster than transformers)", "",
        "| B, gamma, V, dtype | inputs | " + " | ".join(known) + " | share of a step |",
        "|" + "---|" * (len(known) + 3),
    ]  # fmt: skip
    for (batch, gamma, width, dtype, distance), found in sizes.items():
        base = found.get(BASE, {}).get("median_us")
        cells = []
        for name in known:
            time = found.get(name, {}).get("median_us")
            ratio = "" if name == BASE or not (base and time) else f" ({base / time:.1f}x)"
            cells.append("" if time is None else f"{time:.4g}{ratio}")
        ours = next((found[n] for n in reversed(known) if n in found and "LSE kept" in n), None)
        share = "" if ours is None else f"{_share(ours):.1f} %"
        lines.append(
            f"| {batch}, {gamma}, {width:,}, {dtype} | {distance} | " + " | ".join(cells)
            + f" | {share} |"
        )  # fmt: skip
    lines += ["", *(f"{name}: {why}." for name, why in document.get("absent", {}).items())]
    return "\n".join(lines).rstrip()


def read(path: Path) -> dict[str, Any]:
    """A document of benchmarks/verify.py, or one made of a folder of benchmarks/gpu_day.py."""
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    stages = {name: _results(path / f"{name}.json") for name in ("environment", "verification")}
    machine = stages["environment"]["machine"]
    rows = [row for result in stages["verification"].values() for row in result.get("rows", [])]
    return {
        "hardware": machine["gpu"],
        "date": machine["date"],
        "versions": stages["environment"]["packages"],
        "absent": stages["verification"].get("right before timed", {}).get("absent", {}),
        "rows": [row for row in rows if not row["warm"]],
    }


def _results(path: Path) -> dict[str, dict[str, Any]]:
    document = json.loads(path.read_text())
    if document["rehearsal"]:
        raise SystemExit(f"{path} is a rehearsal: its times are no measurement of a card")
    return {key: item["result"] for key, item in document["items"].items() if "result" in item}


def generation(folder: Path) -> str:
    """Tokens per second of a day's end-to-end stage: one line a pair and batch, one column an arm.

    In brackets the times of plain decoding in the same line.
    """
    found = [one for one in _results(folder / "end_to_end.json").values() if "tokens_s" in one]
    arms = list(dict.fromkeys(one["arm"] for one in found))
    groups: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for one in found:
        groups.setdefault((one["pair"], one["batch"]), {})[one["arm"]] = one
    lines = [
        f"| pair, batch, tokens/s | {' | '.join(arms)} | alpha of the chain |",
        "|" + "---|" * (len(arms) + 2),
    ]
    for (pair, batch), group in groups.items():
        base = group.get("plain", {}).get("tokens_s")
        cells = []
        for arm in arms:
            speed = group.get(arm, {}).get("tokens_s")
            ratio = f" ({speed / base:.2f}x)" if speed and base and arm != "plain" else ""
            cells.append("" if speed is None else f"{speed:.0f}{ratio}")
        alpha = group.get("chain", {}).get("alpha")
        cells.append("" if alpha is None else f"{alpha:.2f}")
        lines.append(f"| {pair}, {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(row: dict[str, Any]) -> float:
    time: float = row["median_us"]
    return 100 * time / (time + row["forward_us"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a file of verify.py, or a folder of gpu_day.py")
    parser.add_argument("--rows", help="contestants, separated by semicolons")
    parser.add_argument("--vocab", type=int)
    given = parser.parse_args()
    document = read(given.file)
    names = {row["row"] for row in document["rows"]}
    rows = GPU_ROWS if "empty kernel" in names else CPU_ROWS
    if given.rows:
        rows = tuple(name.strip() for name in given.rows.split(";"))
        if unknown := [name for name in rows if name not in names]:
            raise SystemExit(f"--rows must name contestants of {given.file}; got {unknown}")
    print(markdown(document, rows, given.vocab))
    if given.file.is_dir():
        print(f"\n{generation(given.file)}")


if __name__ == "__main__":
    main()
