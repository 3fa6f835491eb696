"""Check every published value that outrider prints against the texts of the papers.

    python tools/papers/check.py FOLDER             # 0 if every value is the text's
    python tools/papers/check.py FOLDER --write     # write the data file from the texts

FOLDER has the texts named in `TEXTS`. Each table is read from its text again, number by
number, and compared with `published.json` in both directions: a value that differs, a row that no
text has, a row that the file lacks. Jeon's tables are also held to what they must obey: MBSU is
efficiency / (L r + 1) with one r a table, and a tree of both experiments has one efficiency. That
tells a cell that slipped into another row, which comparing with the text alone could not.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import chen
import jeon
import leviathan
import wagner
from printed import Row

from outrider_lab.papers import published

TEXTS = {
    "chen": "chen-2023-speculative-sampling.txt",
    "leviathan": "leviathan-2023-speculative-decoding.txt",
    "wagner": "wagner-2024-optimized-speculative-sampling.txt",
    "jeon": "jeon-2024-recursive-speculative-decoding.txt",
}
READERS = {
    "chen": chen.chen,
    "leviathan": leviathan.leviathan,
    "wagner": wagner.wagner,
    "jeon": jeon.jeon,
}
DATA = Path(published.__file__).with_suffix(".json")


def rows_of(folder: Path) -> list[Row]:
    """Every row of every table, from the texts."""
    found = []
    for name, reader in READERS.items():
        text = (folder / TEXTS[name]).read_text(encoding="utf-8")
        found += list(reader(text))
    return found


def key(row: Row) -> str:
    """What a row is found by."""
    return json.dumps([row["paper"], row["table"], row["row"]], sort_keys=True)


def written(rows: list[Row]) -> str:
    """The data file: a table a paragraph, a row a line, as `published.rows` reads it."""
    tables: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        tables.setdefault((row["paper"], row["table"]), []).append(row)
    parts = []
    for (paper, number), group in tables.items():
        first = group[0]["row"]
        of = {k: v for k, v in first.items() if all(row["row"].get(k) == v for row in group)}
        if len(group) == 1:
            of = {}
        by = [name for name in first if name not in of]
        values = list(dict.fromkeys(name for row in group for name in row["values"]))
        head = {"paper": paper, "table": number, "of": of, "by": by, "values": values}
        lines = []
        for row in group:
            cells = [row["row"][name] for name in by]
            cells += [row["values"].get(name) for name in values]
            lines.append(json.dumps(cells + ([row["note"]] if "note" in row else [])))
        body = ",\n".join(lines)
        parts.append(f'{json.dumps(head)[:-1]}, "rows": [\n{body}\n]}}')
    return "[\n" + ",\n".join(parts) + "\n]\n"


def differences(ours: list[Row], theirs: list[Row]) -> list[str]:
    """What the data file says otherwise than the texts, a line each."""
    wrong = [f"twice in the data: {name}" for name, n in Counter(map(key, ours)).items() if n > 1]
    data, text = {key(row): row for row in ours}, {key(row): row for row in theirs}
    wrong += [f"no text has {name}" for name in data.keys() - text.keys()]
    wrong += [f"the data lack {name}" for name in text.keys() - data.keys()]
    for name in data.keys() & text.keys():
        for part in ("values", "note"):
            if data[name].get(part) != text[name].get(part):
                said, read_ = data[name].get(part), text[name].get(part)
                wrong.append(f"{part} of {name}: data {said}, text {read_}")
    return wrong


def main() -> int:
    """Exit status 1 if anything differs."""
    arguments = [part for part in sys.argv[1:] if part != "--write"]
    if len(arguments) != 1:
        print(__doc__)
        return 2
    theirs = rows_of(Path(arguments[0]))
    if "--write" in sys.argv:
        DATA.write_text(written(theirs), encoding="utf-8")
        print(f"written: {DATA.name}; run this again without --write to check it")
        return 0
    ours = published.rows()
    wrong = differences(ours, theirs) + jeon.sizes_fit(ours) + jeon.trees_agree(ours)
    for paper in READERS:
        mine = [row for row in ours if row["paper"] == paper]
        tables = {row["table"] for row in mine}
        values = sum(len(row["values"]) for row in mine)
        print(f"{paper}: {len(tables)} tables and texts, {len(mine)} rows, {values} values")
    print("\n".join(wrong) if wrong else "every value is the text's")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
