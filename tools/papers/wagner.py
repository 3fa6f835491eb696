"""Wagner et al. 2024, from a text whose tables are lines of tabs and formulas."""

import re
from collections.abc import Iterator, Sequence

from printed import Row, numbers, row, stated

SPEECH = [("LibriSpeech", "clean"), ("LibriSpeech", "other"), ("TED-LIUM", "release3"),
          ("CommonVoice 16", "en")]  # fmt: skip
WHISPERS = ("small.en", "large-v2")


def wagner(text: str) -> Iterator[Row]:
    """Tables 1 to 8, and what the text says of figures 3 to 5."""
    yield from _accuracy(text)
    yield from _scales(text)
    yield from _bandwidths(text)
    yield from _small_card(text)
    yield from _wall_clock(text)
    yield from _steps(text)
    yield from _acceptance(text)
    yield from stated(
        "wagner",
        text,
        [
            ("figure 4: methods' peak memory lies within, text", "MB", r"approximately (\d+)MB"),
            ("figure 5: methods' peak memory lies within, speech", "MB", r"of under (\d+) MB"),
            ("figure 3: initial gamma", "gamma", r"ranging from (\d+) to (\d+)\. The average"),
            ("bandwidth of an A100", "TB/s", r"bandwidth limit of ~(\d) TB/s"),
        ],
    )


def _before(text: str, caption: int) -> list[str]:
    """The lines of a table that stands above its caption."""
    end = text.index(f"\nTable {caption}: ")
    start = text.rfind("\nTable ", 0, end) if caption > 1 else end - 6000
    return [line for line in text[start:end].split("\n") if "\t" in line]


def _accuracy(text: str) -> Iterator[Row]:
    """Table 1. Cells of several rows ran together: a column's numbers are read downwards."""
    lines = _before(text, 1)
    said: list[list[float]] = [[], [], [], [], []]
    for line in lines:
        cells = line.rstrip("\t").split("\t")
        if "%" in cells[-1] and ("release3" in line or "en\t" in line or "clean" in line):
            for column, cell in zip(said, cells[-5:], strict=True):
                column += numbers(cell)
    # printed by data set within each model
    places = [(model, *data) for model in WHISPERS for data in SPEECH]
    for place, values in zip(places, zip(*said, strict=True), strict=True):
        yield _scored("1", dict(zip(("target", "data", "part"), place, strict=True)), "WER", values)
    last = next(line for line in reversed(lines) if "Gemma 7B" in line)
    columns = [numbers(cell) for cell in last.rstrip("\t").split("\t")[-5:]]
    targets = ("Llama 2-7B", "Llama 2-13B", "Qwen 7B", "Gemma 7B")
    for target, values in zip(targets, zip(*columns, strict=True), strict=True):
        yield _scored("1", {"target": target, "data": "CNN/DM", "part": ""}, "ROUGE-1", values)


def _scored(table: str, what: Row, score: str, values: Sequence[float]) -> Row:
    names = [f"{score} {method}" for method in ("baseline", "exact", "sigmoid")]
    names += ["less time, exact, %", "less time, sigmoid, %"]
    return row("wagner", table, what, dict(zip(names, values, strict=True)))


def _scales(text: str) -> Iterator[Row]:
    """Tables 2 and 7: the sigmoid's bounds."""
    seven = ("small.en", "large-v2", "Gemma 7B", "Qwen 7B", "Llama 2-7B", "Llama 2-13B")
    for table, targets in ((2, ("small.en", "Llama 2-7B")), (7, seven)):
        number = -1
        for line in _before(text, table):
            cells = line.rstrip("\t").split("\t")
            match = re.search(r"10\^\{?(\d)", line)
            begins = re.match(r"\tBaseline\t\d", line) is not None
            number += begins
            if not begins and match is None:
                continue
            # one line has the baseline's beside its own
            score = float(cells[2] if begins else cells[-2].split()[-1])
            name = "WER" if targets[number] in WHISPERS else "ROUGE-1"
            what = {"target": targets[number], "bound": match and 10.0 ** int(match[1])}
            gain = None if begins else float(re.findall(r"(-?[\d.]+)%", line)[-1])
            yield row("wagner", str(table), what, {name: score, "less time, %": gain})


def _bandwidths(text: str) -> Iterator[Row]:
    """Table 3; its heads stand above each other's columns, the larger model is the target."""
    for line in _before(text, 3):
        if line.count("GB/s") == 3:
            target = line.split("\t")[0].replace("Llama2 ", "Llama 2-").replace("Whisper ", "")
            target = target.replace("Small.EN", "small.en").replace("Large V2", "large-v2")
            found = [float(value) for value in re.findall(r"([\d.]+) GB/s", line)]
            names = ("baseline GB/s", "exact GB/s", "sigmoid GB/s")
            yield row("wagner", "3", {"target": target}, dict(zip(names, found, strict=True)))


def _small_card(text: str) -> Iterator[Row]:
    """Table 4: an RTX 2080 TI."""
    places = [(model, *data) for model in WHISPERS for data in SPEECH]
    places.append(("Qwen 1.8B", "XSum", ""))
    lines = [line for line in _before(text, 4) if line.count("%") == 2 and "Delta" not in line]
    for place, line in zip(places, lines, strict=True):
        what = dict(zip(("target", "data", "part"), place, strict=True))
        values = numbers(" ".join(line.rstrip("\t").split("\t")[-5:]))
        yield _scored("4", what, "WER" if place[2] else "ROUGE-1", values)


def _pairs(order: Sequence[int]) -> list[Row]:
    """The sixteen rows of tables 5 and 6: speech by data set, then the two sets of articles."""
    found = [
        {"target": WHISPERS[model], "data": SPEECH[i][0], "part": SPEECH[i][1]}
        for i in order
        for model in (0, 1)
    ]
    for data in ("CNN/DM", "XSum"):
        targets = ("Gemma 7B", "Qwen 7B", "Llama 2-7B", "Llama 2-13B")
        found += [{"target": target, "data": data, "part": ""} for target in targets]
    return found


def _wall_clock(text: str) -> Iterator[Row]:
    """Table 5."""
    lines = [line for line in _before(text, 5) if line.count("%") == 2]
    for what, line in zip(_pairs((2, 0, 1, 3)), lines, strict=True):
        one, other = re.findall(r"([\d.]+)%", line)
        values = {"less wall, exact, %": float(one), "less wall, sigmoid, %": float(other)}
        yield row("wagner", "5", what, values)


def _steps(text: str) -> Iterator[Row]:
    """Table 6."""
    lines = [line for line in _before(text, 6) if line.count("%") == 2 and "Delta" not in line]
    for what, line in zip(_pairs((2, 0, 1, 3)), lines, strict=True):
        spread = re.findall(r"([\d.]+)\s*(?:±|\{\\pm\})\s*([\d.]+)", line)
        one, other = re.findall(r"([\d.]+)%", line)
        values = {}
        for method, (mean, deviation) in zip(("baseline", "exact", "sigmoid"), spread, strict=True):
            values |= {f"{method} ms": float(mean), f"{method} ms, deviation": float(deviation)}
        less = {"less a step, exact, %": float(one), "less a step, sigmoid, %": float(other)}
        yield row("wagner", "6", what, values | less)


def _acceptance(text: str) -> Iterator[Row]:
    """Table 8: three methods of each of three pairs, four initial gammas."""
    lines = [line for line in _before(text, 8) if line.count("%") == 4]
    targets = [target for target in ("Gemma 7B", "Qwen 7B", "Llama 2-7B") for _ in range(3)]
    for target, line in zip(targets, lines, strict=True):
        method = re.search(r"Sigmoid|Exact|Baseline", line)
        assert method is not None
        shares, times = re.findall(r"([\d.]+)%", line), re.findall(r"([\d.]+) ms", line)
        for gamma, share, time in zip((3, 5, 10, 15), shares, times, strict=True):
            what = {"target": target, "method": method[0].lower(), "gamma": gamma}
            yield row("wagner", "8", what, {"accepted, %": float(share), "ms": float(time)})
