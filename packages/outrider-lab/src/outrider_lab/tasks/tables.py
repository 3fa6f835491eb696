"""What the answers say: speed over plain decoding by kind of prompt, and whether scores are equal.

Speed is plain decoding's time per token over the arm's, a ratio for each prompt; a kind's is the
geometric mean over its prompts. Scores are compared prompt by prompt with plain decoding's, by two
one-sided tests with MARGIN (`lab.equivalence`).
"""

import statistics
from collections.abc import Sequence

from outrider_lab.bench import intervals
from outrider_lab.bench.intervals import Interval
from outrider_lab.certify.report import Row
from outrider_lab.equivalence import MARGIN, equivalence
from outrider_lab.tasks.arms import PLAIN
from outrider_lab.tasks.prompts import KINDS
from outrider_lab.tasks.run import TaskAnswers
from outrider_lab.tasks.scores import NAMES

Key = tuple[float, str]  #: temperature and arm
#: Means that are told of an arm, and the counts whose quotients they are.
RATES = (("accepted", "accepted", "drafted"), ("alpha", "overlap", "overlaps"))


def ratios(answers: TaskAnswers, clock: str) -> dict[Key, list[float]]:
    """Plain decoding's time per token over every other arm's, prompt by prompt."""
    found: dict[Key, list[float]] = {}
    for (t, arm), rows in answers.rows.items():
        if arm != PLAIN:
            pairs = zip(rows, answers.rows[t, PLAIN], strict=True)
            found[t, arm] = [_ms(plain, clock) / _ms(row, clock) for row, plain in pairs]
    return found


def _ms(row: Row, clock: str) -> float:
    return 1e3 * float(row[clock]) / max(len(row["ids"]), 1)


def by_kind(answers: TaskAnswers, ratios: Sequence[float]) -> dict[str, Interval]:
    """An arm's speed over plain decoding by kind of prompt."""
    found: dict[str, Interval] = {}
    for kind in dict.fromkeys(task.kind for task in answers.tasks):
        pairs = zip(ratios, answers.tasks, strict=True)
        picked = [ratio for ratio, task in pairs if task.kind == kind]
        if picked:
            found[kind] = intervals.typical(picked)
    return found


def arms(answers: TaskAnswers, clock: str) -> list[Row]:
    """A row for each temperature and arm, plain decoding's too: time, block efficiency, pass@1.

    `ms a token` is the sum of times over the sum of tokens; `tokens a call` counts the token that
    the target adds itself; `accepted` is the share of drafted tokens that were kept, `alpha` the
    mean of sum min(target, draft), of drafters that have probabilities; pass@1 is the share of code
    that passes its tests, one answer each.
    """
    found: list[Row] = []
    for (t, arm), rows in answers.rows.items():
        tokens = [float(len(row["ids"])) for row in rows]
        took = intervals.quotient([1e3 * row[clock] for row in rows], tokens, intervals.LOG)
        calls = intervals.quotient(tokens, [row["steps"] for row in rows], intervals.LOG)
        row: Row = {
            "T": t,
            "drafter": arm,
            "ms a token": shown(took),
            "tokens a call": shown(calls),
        }
        for name, part, whole in RATES:
            counted = [one for one in rows if one.get(whole)]
            if len(counted) > 1:
                of = [one[part] for one in counted], [one[whole] for one in counted]
                row[name] = shown(intervals.quotient(*of))
        passed = [row["scores"]["passes"] for row in rows if "passes" in row["scores"]]
        if passed:
            row["pass@1"] = shown(intervals.mean(passed, intervals.SHARE))
        plain = answers.rows[t, PLAIN]
        same = sum(a["ids"] == b["ids"] for a, b in zip(rows, plain, strict=True))
        row |= {"texts as plain": f"{same} of {len(rows)}", "prompts": len(rows)}
        found.append(row)
    return found


def speeds(answers: TaskAnswers, clock: str) -> list[Row]:
    """A row for each temperature and arm: its speed by kind, over all prompts, and at its worst."""
    found: list[Row] = []
    for (t, arm), each in ratios(answers, clock).items():
        rows, plain = answers.rows[t, arm], answers.rows[t, PLAIN]
        kinds = {kind: shown(one) for kind, one in by_kind(answers, each).items()}
        whole = intervals.typical(each)
        same = sum(a["ids"] == b["ids"] for a, b in zip(rows, plain, strict=True))
        found.append(
            {"T": t, "drafter": arm}
            | kinds
            | {
                "all": shown(whole),
                "sign": whole.sign(1.0),
                "worst prompt": min(each),
                "tokens a call": sum(len(r["ids"]) for r in rows) / sum(r["steps"] for r in rows),
                "texts as plain": f"{same} of {len(rows)}" if t == 0 else None,
                "prompts": len(rows),
            }
        )
    return found


def shown(found: Interval) -> str:
    """A ratio and its interval, as in '1.52 [1.40, 1.66]'."""
    return f"{found.value:.2f} {found.text(2)}".rstrip()


def main_scores(answers: TaskAnswers) -> list[Row]:
    """A row for each temperature and arm: the mean main score by kind, and whether all are plain
    decoding's."""
    found: list[Row] = []
    for (t, arm), rows in answers.rows.items():
        mine, plain = _main(answers, rows), _main(answers, answers.rows[t, PLAIN])
        means: Row = {}
        for kind in KINDS:
            pairs = zip(mine, answers.tasks, strict=True)
            values = [value for value, task in pairs if task.kind == kind and value is not None]
            if values:
                means[f"{kind}: {NAMES[kind][0]}"] = statistics.fmean(values)
        row: Row = {"T": t, "drafter": arm} | means
        if arm != PLAIN:
            both = zip(mine, plain, strict=True)
            gaps = [a - b for a, b in both if a is not None and b is not None]
            row |= equivalence(gaps, MARGIN).row()
        found.append(row)
    return found


def _main(answers: TaskAnswers, rows: Sequence[Row]) -> list[float | None]:
    pairs = zip(answers.tasks, rows, strict=True)
    return [row["scores"].get(NAMES[task.kind][0]) for task, row in pairs]


def other_scores(answers: TaskAnswers) -> list[Row]:
    """All scores by name: means over the prompts that have them."""
    found: list[Row] = []
    for (t, arm), rows in answers.rows.items():
        means: Row = {}
        for kind in KINDS:
            for name in NAMES[kind]:
                values = [
                    row["scores"][name]
                    for task, row in zip(answers.tasks, rows, strict=True)
                    if task.kind == kind and name in row["scores"]
                ]
                if values:
                    means[f"{kind}: {name}"] = statistics.fmean(values)
        found.append({"T": t, "drafter": arm} | means)
    return found
