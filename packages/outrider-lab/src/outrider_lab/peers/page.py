"""The page: every run in a folder as a section with its tables, picture, machine and command."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider_lab import drawing
from outrider_lab.bench import machine
from outrider_lab.certify.report import Row
from outrider_lab.peers.engines import CAPS

INTRODUCTION = """# Beside what people would use instead

Engines in processes of their own, pinned to the same cores, in turn on the same prompts or
recordings and on the same weights. Greedy. Times are processor seconds of the whole process,
prompts included, unless they say "wall", or the section that it compares by the clock; "behind the
first token" leaves out a call for one token (of the first six prompts).
Brackets are 95 % intervals over prompts (a jackknife, `outrider_lab.bench.intervals`). llama.cpp's
memory has the pages of the mapped file in it, ours the interpreter, torch and transformers.
`OUTRIDER_ISA` caps our kernels, `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA` torch's,
`CT2_FORCE_CPU_ISA` CTranslate2's; OpenVINO has no cap and keeps what the processor has. llama.cpp
is the wheel of `xllamacpp` for x86-64, which is built for AVX2 and has no instruction of AVX-512:
beside ours capped it is like against like; where ours is not, a llama.cpp built on that machine may
be faster than the one in the table.

Written by `outrider bench peers`; each section has its command, and `make venv`, `make models` and
`make peers` run all of them (`benchmarks/peers_page.py`).
"""


def capped() -> str:
    """The caps that are set, as words of a command; "" if none is."""
    return " ".join(f"{name}={os.environ[name]}" for name in CAPS if name in os.environ)


def section(
    title: str,
    tables: dict[str, list[Row]],
    left_out: dict[str, str],
    versions: dict[str, str],
    about: str,
    load: tuple[float, float],
) -> Row:
    """A run as the page keeps it; `load` is the machine's at its start and at its end."""
    return {
        "title": title,
        "about": about,
        "caps": capped(),
        "command": machine.command(),
        "date": machine.today(),
        "machine": machine.environment() | versions,
        "load": list(load),
        "tables": tables,
        "left out": left_out,
    }


def keep(out: Path, name: str, found: Row) -> None:
    """Write a section to the folder; one of the same name is replaced."""
    path = out / f"section-{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def sections(out: Path) -> dict[str, Row]:
    """Every section of a folder by name, the oldest first."""
    paths = sorted(out.glob("section-*.json"), key=lambda path: path.stat().st_mtime)
    found = (json.loads(path.read_text("utf-8")) for path in paths)
    names = (path.stem.removeprefix("section-") for path in paths)
    return dict(zip(names, found, strict=True))


def write(
    out: Path,
    page: Path,
    pictures: bool,
    first: Sequence[str] = (),
    left_out: Mapping[str, str] | None = None,
) -> None:
    """The page of all sections of a folder, its pictures beside it.

    Sections named in `first` come in that order ahead of the others; `left_out` are titles of
    sections that are not there, with the reasons.
    """
    every = sections(out)
    parts = [INTRODUCTION]
    for name in sorted(every, key=lambda name: first.index(name) if name in first else len(first)):
        parts.append(_section(name, every[name], page, pictures))
    if left_out:
        lines = (f"- {title}: {why}" for title, why in left_out.items())
        parts.append("## Left out\n\n" + "\n".join(lines) + "\n")
    page.write_text("\n".join(parts), encoding="utf-8")


def _section(name: str, found: Row, page: Path, pictures: bool) -> str:
    """One section in Markdown."""
    lines = [f"## {found['title']}\n", found["about"] + "\n"]
    for title, rows in found["tables"].items():
        if rows:
            lines += [f"{title}:\n", markdown(rows)]
    picture = found.get("picture") or (_draw(name, found, page) if pictures else None)
    if picture is not None:
        lines.append(f"![time of {found['title']}]({picture})\n")
    lines += [f"- left out: {arm}: {why}" for arm, why in found["left out"].items()]
    its = found["machine"]
    versions = ", ".join(
        f"{key} {value}"
        for key, value in its.items()
        if key not in ("machine", "processor", "cores", "device")
    )
    start, end = found["load"]
    lines += [
        f"- {its['processor']}, {its['cores']} cores, load {start:.1f} at the start and {end:.1f} "
        f"at the end, {found['date']}; {versions}",
        f"- `{(found['caps'] + ' ' + found['command']).strip()}`\n",
    ]
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a table.

    >>> print(markdown([{"engine": "a", "ms": 1.234}]))
    | engine | ms |
    | --- | --- |
    | a | 1.23 |
    <BLANKLINE>
    """
    fields = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(fields)} |", "| " + " | ".join("---" for _ in fields) + " |"]
    lines += [f"| {' | '.join(_cell(row.get(one)) for one in fields)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _draw(name: str, found: Row, page: Path) -> str | None:
    """Bars of the first table's first number, as SVG beside the page; its name."""
    rows: list[Row] = next(iter(found["tables"].values()), [])
    if not rows:
        return None
    most = max(row.get("clients", 1) for row in rows)
    rows = [row for row in rows if row.get("clients", most) == most]
    unit = next(name for name, value in rows[0].items() if isinstance(value, float))
    figure, axes = drawing.panels(1, 1, (8, 0.6 + 0.28 * len(rows)))
    (axis,) = axes[0]
    names = [row["engine"] for row in rows][::-1]
    values = [row[unit] for row in rows][::-1]
    colours = ["#1f6f8b" if one.startswith("outrider") else "#b0a99f" for one in names]
    bars = axis.barh(names, values, color=colours)
    axis.bar_label(bars, [f"{value:.3g}" for value in values], padding=2, fontsize=8)
    at = f", {most} clients" if "clients" in rows[0] else ""
    axis.set_xlabel(f"{unit}{at} (less is better)")
    axis.margins(x=0.1)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    (path,) = drawing.write(figure, [page.with_name(f"{page.stem}-{name}.svg")])
    return path.name
