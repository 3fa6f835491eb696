"""Chen et al. 2023, from a text whose decimal points are broken characters."""

import re
from collections.abc import Iterator

from printed import Row, row, stated


def chen(text: str) -> Iterator[Row]:
    """Tables 1 and 2, and what the text and figure 1 say in words."""
    text = re.sub(r"(?<=\d)[^\x00-\x7f]+(?=\d)", ".", text)  # the copy's decimal points
    line = r"(ArS|SpS) \((\w+)\)\s*(?:(\w+) \([\w\- ]+\))?\s*([\d.]+)%? ([\d.]+)ms/Token ([\d.]+)"
    task = ""
    for method, law, named, score, time, speed in re.findall(line, text):
        task = named or task
        what = {"task": task, "law": law.lower(), "method": method}
        values = {"score": float(score), "ms/token": float(time), "speed-up": float(speed)}
        yield row("chen", "1", what, values)
    line = r"(Target|Draft)(?: \(Chinchilla\))? (\d+) (\d+) (\d+) (\d+)B"
    for model, *sizes in re.findall(line, text):
        names = ("width", "heads", "layers", "billion parameters")
        yield row("chen", "2", {"model": model}, dict(zip(names, map(float, sizes), strict=True)))
    yield from stated(
        "chen",
        text,
        [
            ("draft length of table 1", "K", r"batch size 1 and \S*?=(\d)\."),
            ("fastest draft length on XSum, figure 1", "K", r"XSum being optimal at \S*?=(\d)\."),
            ("tokens of figure 1", "tokens", r"Mean Sampling Time \((\d+) tokens\)"),
            ("draft model alone", "ms/token", r"sampling speed of ([\d.]+)ms/token"),
            ("target model alone", "ms/token", r"to ([\d.]+)ms/token ?for"),
            (
                "nucleus of XSum",
                "top-p",
                r"XSum was executed with nucleus parameter \S*?=([\d.]+),",
            ),
            ("nucleus of HumanEval", "top-p", r"HumanEval with \S*?=([\d.]+)and"),
            ("temperature of HumanEval", "T", r"and temperature ([\d.]+)\.\s"),
            ("sequences of XSum", "sequences", r"a total of ([\d,.]+) sequences"),
            ("samples of HumanEval", "sequences", r"generation of ([\d,.]+) samples"),
        ],
    )
