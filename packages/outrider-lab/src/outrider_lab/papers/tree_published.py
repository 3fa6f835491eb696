"""Jeon's tables 1 to 54 in the form of our tables of the same experiments.

Thirteen pairs of models and two or three tasks: 27 tables an experiment. One of them stands in full
beside ours, all of them give the range and how often a difference has its sign.
"""

import statistics

from outrider_lab.papers import published
from outrider_lab.papers.published import REFERENCE, PublishedTree
from outrider_lab.papers.record import Row


def _row(experiment: str, one: PublishedTree) -> Row:
    found: Row = {"group": one.group, "method": one.method, "tree": one.tree}
    found |= {name: one.values[name] for name in ("block efficiency", "MBSU")}
    found["rate"] = one.values["tokens/s"] / published.plain_rate(experiment, one.of)
    return found | {"score": one.values.get("score")}


def best(experiment: str, groups: list[int]) -> list[Row]:
    """The best trees of the reference pair, as the paper's figures show them.

    >>> [row["tree"] for row in best("budget", [6])]
    ['6', '2x3', '2-1-1', '2x3']
    """
    theirs = published.best_trees(experiment)
    return [_row(experiment, one) for g in groups for one in theirs.get(g, {}).values()]


def every(experiment: str, groups: list[int]) -> list[Row]:
    """Every published row of these lengths or budgets, with its models and task."""
    return [
        dict(zip(("target", "draft", "task"), one.of, strict=True)) | _row(experiment, one)
        for one in published.jeon(experiment)
        if one.group in groups
    ]


def beside(experiment: str, group: int, method: str, tree: str) -> Row:
    """What a tree reached in the paper: on the reference pair, and from least to most of all pairs.

    >>> beside("budget", 6, "RSD-S", "2x3")
    {'published': 2.791, 'published, all': '1.36 to 2.79'}
    """
    key = (group, method, tree)
    found = {
        one.of: one.efficiency
        for one in published.jeon(experiment)
        if (one.group, one.method, one.tree) == key
    }
    if not found:
        return {"published": None, "published, all": ""}
    ends = f"{min(found.values()):.2f} to {max(found.values()):.2f}"
    return {"published": found.get(REFERENCE), "published, all": ends}


def difference(experiment: str, group: int, better: str, worse: str) -> Row:
    """Best tree against best tree in the paper: the reference pair, the median, how often above 0.

    >>> difference("budget", 6, "RSD-S", "RSD-C")["published, all"]
    '+0.07, above 0 in 25 of 27'
    """
    gaps = {}
    for of in dict.fromkeys(one.of for one in published.jeon(experiment)):
        methods = published.best_trees(experiment, of).get(group, {})
        if better in methods and worse in methods:
            gaps[of] = round(methods[better].efficiency - methods[worse].efficiency, 3)
    if not gaps:
        return {"published": None, "published, all": ""}
    above = sum(gap > 0 for gap in gaps.values())
    middle = statistics.median(gaps.values())
    told = f"{middle:+.2f}, above 0 in {above} of {len(gaps)}"
    return {"published": gaps.get(REFERENCE), "published, all": told}
