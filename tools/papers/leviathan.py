"""Leviathan et al. 2023, from a text whose tables are lines of tabs."""

import re
from collections.abc import Iterator

from printed import Row, numbers, row, stated


def _table(text: str, caption: str) -> list[list[str]]:
    """The cells of a table that stands behind its caption, up to the first line without tabs."""
    lines = text[text.index(caption) :].split("\n")[1:]
    start = next(i for i, line in enumerate(lines) if "\t" in line)
    cells = []
    for line in lines[start + 1 :]:
        if "\t" in line and "<hr/>" not in line:
            cells.append(line.rstrip("\t").split("\t"))
        elif "<hr/>" not in line:
            return cells
    return cells


def leviathan(text: str) -> Iterator[Row]:
    """Tables 1 to 5, section A.5, and what the text says about bigrams."""
    for alpha, gamma, operations, speed in _table(text, "Table 1. The total"):
        values = {"operations": float(operations[:-1]), "speed": float(speed[:-1])}
        yield row("leviathan", "1", {"alpha": float(alpha), "gamma": int(gamma)}, values)
    for task, model, heat, gamma, alpha, speed in _table(text, "Table 2. Empirical"):
        what = {"task": _task(task), "draft": _model(model), "T": int(heat), "gamma": int(gamma)}
        values = {"alpha": float(alpha), "speed": float(speed[:-1])}
        yield row("leviathan", "2", what, values)
    for target, model, law, alpha in _table(text, "Table 3. Empirical"):
        what = {"target": _model(target), "draft": _model(model), "T": int(law[2:])}
        yield row("leviathan", "3", what, {"alpha": float(alpha)})
    for task, model, heat, gamma, *rest in _table(text, "Table 4. Expected"):
        what = {"task": _task(task), "draft": _model(model), "T": int(heat), "gamma": int(gamma)}
        names = ("alpha", "c", "expected", "measured")
        yield row("leviathan", "4", what, dict(zip(names, map(float, rest), strict=True)))
    levels = ("1", "0.5", "0.3", "0.1")
    for model, *alphas in _table(text, "Table 5. "):
        for level, alpha in zip(levels, alphas, strict=True):
            what = {"draft": _model(model), "T": 1, "lenience": float(level)}
            yield row("leviathan", "5", what, {"alpha": float(alpha)})
    fast = re.search(r"we get improvement factors of (.*?) respectively", text)
    zero = re.search(
        r"we get \S+ values of (.*?)\. .*?speed improvement factors of (.*?) resp", text
    )
    assert fast is not None
    assert zero is not None
    for heat, alphas, gains in ((1, None, fast[1]), (0, numbers(zero[1]), numbers(zero[2]))):
        gains = numbers(gains) if isinstance(gains, str) else gains
        for i, level in enumerate(levels):
            what = {"draft": "T5-small", "T": heat, "lenience": float(level)}
            values = {"alpha": alphas[i] if alphas else None, "speed": gains[i]}
            yield row("leviathan", "A.5", what, values)
    yield from stated(
        "leviathan",
        text,
        [
            ("bigram, translation: improvement", "speed", r"improvement factor of ([\d.]+)X with"),
            ("bigram, translation: length", "gamma", r"factor of [\d.]+X with \$\\gamma = (\d)\$"),
            ("cost of T5-small, section A.5", "c", r"With \$c = ([\d.]+)\$, using lenience"),
            ("an oracle for gamma gains at most", "%", r"up to \$\\sim (\d+)\\%\$ higher"),
        ],
    )


def _task(name: str) -> str:
    return "translation" if name == "ENDE" else {"CNNNDM": "summaries", "CNNDM": "summaries"}[name]


def _model(name: str) -> str:
    """The papers' names in the case that the rest of outrider writes.

    >>> _model("T5-SMALL (77M)"), _model("UNIGRAM"), _model("LAMDA (2B)")
    ('T5-small', 'unigram', 'LaMDA (2B)')
    """
    name = name.replace("★", "").strip()
    if name.startswith("T5-XXL"):
        return f"T5-XXL, {_task(name.split('(')[1].strip(')'))}"
    if name.startswith("T5-"):
        return "T5-" + name.split()[0][3:].lower()
    if name in ("UNIGRAM", "BIGRAM"):
        return name.lower()
    return name.replace("LAMDA", "LaMDA").replace("GPT-LIKE", "GPT-like")
