"""The first page of a report: of each paper what came out in a sentence, and whether that is shown.

Every sentence is made of a document's tables. It is `shown` where intervals or the two one-sided
tests say so, `missed` where they say the contrary, `open` where prompts are too few or an interval
holds both, and `told` where nothing is claimed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from outrider_lab.bench.intervals import LEAST
from outrider_lab.book.pages import Page
from outrider_lab.certify.report import Row
from outrider_lab.papers.alpha_drafters import DRAFT
from outrider_lab.papers.k_sweep import PANEL
from outrider_lab.tasks.arms import DEFAULT

Verdict = Literal["shown", "missed", "open", "told"]


@dataclass(frozen=True)
class Finding:
    """A sentence, where its tables stand, and what they show of it."""

    text: str
    verdict: Verdict
    page: Page


@dataclass(frozen=True)
class FindingsPart:
    """A paper, or what is asked besides: its experiments, the first with a picture to be shown."""

    name: str
    experiments: tuple[str, ...]


PARTS = (
    FindingsPart("Speculation here", ("tasks", "speed")),
    FindingsPart("Leviathan et al. 2023", ("theory", "alpha", "beams")),
    FindingsPart("Chen et al. 2023", ("k-sweep", "chen")),
    FindingsPart("Jeon et al. 2024", ("toy", "budget", "draft-length", "tree")),
    FindingsPart("Wagner et al. 2024", ("wagner",)),
    FindingsPart("Drafts of the target's own layers", ("layers",)),
)
#: A sentence and its verdict; of a formula besides that no model has a part in it.
Said = tuple[str, Verdict] | tuple[str, Verdict, Literal["formula"]]


def findings(page: Page) -> list[Finding]:
    """What one experiment has to say, in its own order; of an older version's tables only that."""
    make = MAKERS.get(page.document["experiment"])
    of = str(page.document["settings"].get("target") or page.document["settings"].get("pair") or "")
    try:
        found = list(make(page.tables)) if make else []
    except KeyError as missing:
        text = f"{page.name} is of another version, without {missing}: run it again"
        return [Finding(text, "open", page)]
    return [
        Finding(f"{said[0]} ({named(of)})" if of and len(said) == 2 else said[0], said[1], page)
        for said in found
    ]


def named(model: str) -> str:
    """A model as a sentence names it.

    >>> named("shipped"), named("/home/me/models/smollm2")
    ('shipped pair', 'smollm2')
    """
    return "shipped pair" if model == "shipped" else model.split(" with ")[0].split("/")[-1]


Tables = dict[str, list[Row]]


def _ends(text: str) -> tuple[float, float] | None:
    """An interval as tables print it; None of ""."""
    if not text:
        return None
    low, high = text.strip("[]").split(",")
    return float(low), float(high)


def _above(row: Row, ends: str, prompts: int, null: float = 1.0) -> Verdict:
    """Whether a figure is shown to be above `null`; `prompts` that are too few show nothing."""
    found = _ends(row.get(ends, ""))
    if found is None or prompts < LEAST:
        return "open"
    return "shown" if found[0] > null else "missed" if found[1] < null else "open"


def _signed(sign: str, wanted: str = "+") -> Verdict:
    """Whether a sign is the one that is `wanted`; a word in its place leaves that open."""
    return "open" if sign not in ("+", "-") else "shown" if sign == wanted else "missed"


def _equal(verdict: str) -> Verdict:
    return "shown" if verdict == "equal" else "missed" if verdict == "different" else "open"


def _tasks(tables: Tables) -> Iterator[Said]:
    for row in tables["speed"]:
        if row["drafter"] == DEFAULT:
            yield (
                f"The default drafter decodes {row['all']} times as fast as plain decoding at "
                f"T = {row['T']:g}, over {row['prompts']} prompts of six kinds",
                _signed(row["sign"]),
            )
    for row in tables["scores"]:
        if "within 0.1" in row and row["T"] > 0:
            yield (
                f"{row['drafter']}, T = {row['T']:g}: scores are plain decoding's within 0.1: they "
                f"differ by {row['difference']:+.3f} {row['90 % interval']}, power "
                f"{row['power']:.2f}",
                _equal(row["within 0.1"]),
            )


def _speed(tables: Tables) -> Iterator[Said]:
    for row in tables["speed"]:
        yield (
            f"Speculation is {row['times faster']:.2f} {row['interval']} times as fast as plain "
            f"decoding at T = {row['T']:g}; acceptance and the models' own times allow "
            f"{row['ceiling']:.2f}",
            _signed(row["sign"]),
        )


def _theory(tables: Tables) -> Iterator[Said]:
    drawn = [row for row in tables["calls"] if row["T"] == 1]
    for row in drawn[-1:]:
        low, high = _ends(row["95 %"]) or (0.0, float("inf"))
        inside = low <= row["by texts"] <= high
        yield (
            f"With {row['gamma']} drafted a call at T = 1 independent betas foretell "
            f"{row['tokens/call, i.i.d.']:.2f} tokens a call, the recorded text "
            f"{row['by texts']:.2f}; measured {row['measured']:.2f} {row['95 %']}, which "
            f"{'holds' if inside else 'does not hold'} the second",
            "told" if inside else "missed",  # what an interval holds is not shown to be equal
        )
    table = tables["table1"]
    gaps = [abs(row[name] - row[f"published {name}"]) for row in table
            for name in ("operations", "speed")]  # fmt: skip
    yield (
        f"Table 1: all {len(gaps)} values follow from the formulas, to the digits that are printed",
        "shown" if max(gaps) < 0.0051 else "missed",
        "formula",
    )


def _alpha(tables: Tables) -> Iterator[Said]:
    for row in tables["alpha"]:
        if row["drafter"] == DRAFT:
            yield (
                f"The draft model's alpha is {row['alpha T = 0']:.2f} {row['95 %, T = 0']} at "
                f"T = 0 and {row['alpha T = 1']:.2f} {row['95 %, T = 1']} at T = 1 (T5-small for "
                "T5-XXL, translation: 0.75 and 0.62)",
                "told",
            )
    by_task = [row for row in tables.get("tasks", []) if row.get("alpha T = 1") is not None]
    best = {row["task"]: row for row in sorted(by_task, key=lambda row: row["alpha T = 1"])}
    if best:
        told = (
            f"{task} {row['alpha T = 1']:.2f} {row['95 %, T = 1']}" for task, row in best.items()
        )
        yield f"alpha by task, T = 1, of the best drafter: {', '.join(told)}", "told"
    for row in tables.get("speed", []):
        if row["drafter"] == DRAFT:
            yield (
                f"T = {row['T']:g}: {row['expected']:.2f} times as fast expected, "
                f"{row['measured']:.2f} {row['95 %']} measured",
                _signed(row["sign"]),
            )
    for row in tables.get("quality-equal", []):
        if row["T"] > 0:
            yield (
                f"{row['drafter']}, T = 1: ROUGE-L is plain decoding's within 0.1: it differs by "
                f"{row['difference']:+.3f} {row['90 % interval']}, power {row['power']:.2f}",
                _equal(row["within 0.1"]),
            )


def _k_sweep(tables: Tables) -> Iterator[Said]:
    rows = tables["k"]
    panel = [row[PANEL] for row in rows]
    falls = all(after < before for before, after in pairwise(panel))
    yield (
        f"Figure 1's {PANEL} falls from {panel[0]:g} at K = 0 to {panel[-1]:.2f} at "
        f"K = {rows[-1]['K']}, at every K as in the paper",
        "shown" if falls and panel[0] == 1 else "missed",
    )
    best = max(rows, key=lambda row: row["speed-up"])
    yield (
        f"Fastest at K = {best['K']} (the paper: 3): {best['speed-up']:.2f} "
        f"{best['speed-up 95 %']} times plain decoding",
        _above(best, "speed-up 95 %", best["runs"]),
    )


def _chen(tables: Tables) -> Iterator[Said]:
    for row in tables["table-1"]:
        if row["method"] == "SpS":
            yield (
                f"{row['task']}, {row['law']}: speculative sampling is {row['speed-up']:.2f} "
                f"{row['speed-up 95 %']} times as fast (the paper: 1.92 to 2.46)",
                _above(row, "speed-up 95 %", row["prompts"]),
            )
    for row in tables["scores"]:
        key = next(name for name in row if name.startswith("equal within"))
        yield (
            f"{row['task']}, {row['law']}: {row['score']} is ordinary sampling's "
            f"{key.removeprefix('equal ')}: it differs by {row['SpS - ArS']:+.3f} {row['90 %']}, "
            f"power {row['power']:.2f}",
            _equal(row[key]),
        )


def _trees(tables: Tables) -> Iterator[Said]:
    """Signs of differences that the paper has, too; and the best method of each group."""
    groups = list(dict.fromkeys(row["group"] for row in tables["methods"] if row["group"]))
    for group in groups:
        rows = [row for row in tables["methods"] if row["group"] == group]
        best = max(rows, key=lambda row: row["block efficiency"])
        yield (
            f"At {group} most tokens a call: {best['method']} ({best['tree']}), "
            f"{best['block efficiency']:.2f} {best['tau 95 %']}",
            "told",
        )
    for row in tables["differences"]:
        if row.get("published"):
            paper = "+" if row["published"] > 0 else "-"
            yield (
                f"At {row['group']}, {row['difference']}: {row['block efficiency']:+.2f} "
                f"{row['95 %']} tokens a call (the paper: {row['published']:+.2f})",
                _signed(row["sign"], paper),
            )


def _toy(tables: Tables) -> Iterator[Said]:
    means = {row["method"]: row for row in tables["means"]}
    rsd = means["two without: recursive, traversal (RSD)"]
    others = [row["mean acceptance"] for name, row in means.items() if name.startswith("two iid")]
    right = rsd["at draft .3, target .4"] == 1 and rsd["mean acceptance"] > max(others)
    yield (
        "Figure 1: two drafts of a coin without replacement are always accepted, as the paper "
        f"says; with replacement {max(others):.3f} at best in the mean of all biases",
        "shown" if right else "missed",
    )


def _wagner(tables: Tables) -> Iterator[Said]:
    rows = {row["method"]: row for row in tables["profiled"]}
    for name in ("paper exact", "outrider"):
        row = rows[name]
        theirs = [one[key] for one in tables["published-methods"]
                  if (key := "less a step, exact, %") in one]  # fmt: skip
        told = f" (the paper: {min(theirs):g} to {max(theirs):g})" if name == "paper exact" else ""
        yield (
            f"{name} saves {row['step less %']:.1f} {row['step less 95 %']} % of a step's profiled "
            f"verification time over transformers'{told}",
            _above(row, "step less 95 %", row["prompts"], 0.0),
        )


MAKERS: dict[str, Callable[[Tables], Iterator[Said]]] = {
    "tasks": _tasks,
    "speed": _speed,
    "theory": _theory,
    "alpha": _alpha,
    "k-sweep": _k_sweep,
    "chen": _chen,
    "budget": _trees,
    "draft-length": _trees,
    "toy": _toy,
    "wagner": _wagner,
}


def first_page(found: Sequence[Page]) -> Iterator[tuple[FindingsPart, list[Finding], list[Page]]]:
    """Every part that has an experiment in the folder: what it found, and its pages in order."""
    for part in PARTS:
        mine = sorted(
            (page for page in found if page.document["experiment"] in part.experiments),
            key=lambda page: part.experiments.index(page.document["experiment"]),
        )
        if mine:
            yield part, [one for page in mine for one in findings(page)], mine
