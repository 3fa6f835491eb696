"""Write pairs from the held-out modules: a few of every document, whatever its length.

    python -m training.corrector.held_out --data work/corpus --out work/heldout_pairs.jsonl

A line is `{"id", "source", "reference"}`: damaged code and what was meant.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from training.corrector.pairs import Pairs
from training.tokens import read_documents

USUAL = (60.0, 300.0)  # between two damages: fewer than the model learns from


def held_out(data: Path, each: int, seed: int) -> list[dict[str, str]]:
    """`each` pairs of every held-out document."""
    rows = []
    for number, row in enumerate(read_documents(data / "heldout.jsonl")):
        name = row["name"].partition("/")[2]
        pairs = Pairs([row["text"]], seed + number, characters=USUAL)
        for n in range(each):
            damaged, whole = pairs[n]
            rows.append({"id": f"{name}:{n}", "source": damaged, "reference": whole})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of training.corpus")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--each", type=int, default=2, help="pairs of a document")
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    rows = held_out(args.data, args.each, args.seed)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    args.out.write_text("".join(lines), encoding="utf-8")
    print(f"{args.out}: {len(rows)} pairs")


if __name__ == "__main__":
    main()
