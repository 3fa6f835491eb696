"""Chen et al. 2023, table 1: ordinary against speculative sampling on two tasks.

Greedy and nucleus sampling, batch 1, K = 4 drafted tokens, rule `rejection`; milliseconds per token
without the prompt, the score of the texts, and whether the two kinds of sampling score the same: an
equivalence test with its margin and power. Speed stands against what the machine's memory allows
plain decoding (`lab.bandwidth`).

A chat model writes the shipped summaries (ROUGE-2, nucleus 0.8, as XSum in the paper) and functions
(tests passed, nucleus 0.95 and temperature 0.8, as HumanEval). The shipped pair is no chat model:
it continues held-out code, scored by its likeness to what stood there and by whether it is Python.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from outrider import verifiers
from outrider.cli.console import Show
from outrider.drafters import DraftModel
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.output_text import Stop
from outrider.text.prompts import encode
from outrider.text.speculator import Speculator
from outrider_lab import bandwidth, drawing
from outrider_lab.bench import intervals, measure
from outrider_lab.bench.prompts import read_rows
from outrider_lab.equivalence import MARGIN, equivalence
from outrider_lab.papers import published, record
from outrider_lab.papers.score_code import parses, similarity
from outrider_lab.tasks import prompts as shipped_tasks
from outrider_lab.tasks.scores import scores

K = 4
PLAIN, FAST = "ArS", "SpS"  # the paper's names
LAWS = ("greedy", "nucleus")


@dataclass(frozen=True)
class ChenRequest:
    """A prompt, and what an answer to it is worth (of its text and ids), in [0, 1]."""

    ids: list[int]
    score: Callable[[str, Sequence[int]], float]


@dataclass(frozen=True)
class ChenTask:
    """One of the table's two tasks."""

    name: str
    score: str
    nucleus: SamplingParams
    prompts: list[ChenRequest]


@dataclass(frozen=True)
class ChenAmount:
    """How much is decoded."""

    prompts: int = 20  #: of each task
    samples: int = 4  #: nucleus completions of a prompt; greedily there is one
    new_tokens: int = 128
    margin: float = MARGIN
    seed: int = 0


def chat_tasks(pair: Speculator, count: int, run: bool) -> list[ChenTask]:
    """Summaries and functions; without `run` code is parsed, and its tests are not run."""
    every = shipped_tasks.tasks()
    found = []
    for kind, score, law in (
        ("summary", "ROUGE-2", SamplingParams(1.0, top_p=0.8)),
        ("code", "passes" if run else "parses", SamplingParams(0.8, top_p=0.95)),
    ):
        mine = [task for task in every if task.kind == kind][:count]
        asked = [
            ChenRequest(
                shipped_tasks.token_ids(pair.tokenizer, task.turns),
                partial(_scored, task, score, run),
            )
            for task in mine
        ]
        found.append(ChenTask(kind, score, law, asked))
    return found


def _scored(
    task: shipped_tasks.PromptTask, score: str, run: bool, text: str, ids: Sequence[int]
) -> float:
    return scores(task, text, ids, run)[score]


def code_tasks(pair: Speculator, count: int) -> list[ChenTask]:
    """Held-out code in two halves, continued: likeness to what stood there, and being Python."""
    rows = read_rows()[: 2 * count]
    half = len(rows) // 2
    found = []
    for name, score, part, law in (
        ("continuation", "likeness", rows[:half], SamplingParams(1.0, top_p=0.8)),
        ("code", "parses", rows[half:], SamplingParams(0.8, top_p=0.95)),
    ):
        asked = [
            ChenRequest(encode(pair.tokenizer, row["prompt"].rstrip()), partial(_worth, score, row))
            for row in part
        ]
        found.append(ChenTask(name, score, law, asked))
    return found


def _worth(score: str, row: record.Row, text: str, ids: Sequence[int]) -> float:
    if score == "likeness":
        return similarity(text, row.get("reference", ""))
    return float(parses(row["prompt"].rstrip(), text))


def run(
    pair: Speculator,
    tasks: Sequence[ChenTask],
    out: Path,
    progress: Show,
    amount: ChenAmount,
    pictures: bool = True,
) -> record.Tables:
    """Measure what is missing, write and return the tables."""
    arms = {PLAIN: pair.plain(), FAST: _speculative(pair)}
    asked = [record.of_prompts([one.ids for one in task.prompts]) for task in tasks]
    settings = {
        "new_tokens": amount.new_tokens,
        "seed": amount.seed,
        "drafter": arms[FAST].engine.drafter.name,
        "rule": rule_of(arms[FAST]),
        "of": asked,
    } | record.of_pair(pair.notes)
    store = record.Store(out, "chen", settings)
    limit = bandwidth.ceiling(pair.notes.target, pair.notes.dtype)

    def measured(task: ChenTask, law: str, arm: str, number: int, sample: int) -> record.Row:
        one = task.prompts[number]
        seed = amount.seed + 1000 * sample + number
        how = SamplingParams(0.0) if law == "greedy" else task.nucleus
        drawn, stop = replace(how, seed=seed), Stop(amount.new_tokens)
        (done,) = arms[arm].generate([one.ids], [drawn], stop).completions
        stats = done.stats
        return {
            "seconds": stats.seconds,
            "tokens": stats.new_tokens,
            "steps": stats.steps,
            "score": one.score(done.text, done.token_ids),
        }

    work = [
        (task, law, sample)
        for task in tasks
        for law in LAWS
        for sample in range(amount.samples if law == "nucleus" else 1)
    ]
    for warm in arms.values():
        warm.generate([tasks[0].prompts[0].ids], [SamplingParams(0.0)], Stop(8))
    total = sum(len(task.prompts) for task, _, _ in work) * len(arms)
    done = 0
    for task, law, sample in work:
        for _, number, arm in measure.turns(list(arms), len(task.prompts)):
            progress(f"{task.name}, {law}: {arm}", done, total)
            key = f"{task.name} {law} {arm} {number} {sample}"
            store.get(key, measured, task, law, arm, number, sample)
            done += 1
    runs = _Runs(store, amount)
    tables = {
        "table-1": [runs.row(task, law, arm, limit) for task in tasks for law in LAWS
                    for arm in arms],
        "scores": [runs.equal(task, law) for task in tasks for law in LAWS],
        "ceiling": [limit.row()],
        "published": published.flat("chen", "1"),
        "published-text": published.flat("chen", "text"),
    }  # fmt: skip
    store.write(tables)
    if pictures:
        draw(tables, amount, limit, out)
    return tables


def rule_of(arm: Speculator) -> str:
    """The name of the rule that verifies its drafts, if one was asked for."""
    return "of its own" if arm.engine.rule is None else arm.engine.rule.name


def _speculative(pair: Speculator) -> Speculator:
    """The paper's arm where there is a draft model; else the pair as it was loaded."""
    if isinstance(pair.engine.drafter, DraftModel):
        draft = DraftModel(pair.engine.drafter.model, (1,) * K)
        return pair.using(draft, verifiers.get("rejection"))
    return pair


@dataclass(frozen=True)
class _Runs:
    """What the store holds, prompt by prompt: a prompt's samples count as one."""

    store: record.Store
    amount: ChenAmount

    def each(self, task: ChenTask, law: str, arm: str, name: str) -> list[float]:
        """The mean over a prompt's samples."""
        samples = range(self.amount.samples if law == "nucleus" else 1)
        return [
            statistics.fmean(
                self.store.rows[f"{task.name} {law} {arm} {number} {sample}"][name]
                for sample in samples
            )
            for number in range(len(task.prompts))
        ]

    def row(
        self, task: ChenTask, law: str, arm: str, limit: bandwidth.BandwidthCeiling
    ) -> record.Row:
        """A line of table 1, with how the arm stands to the ceiling."""
        tokens = self.each(task, law, arm, "tokens")
        ms = [1e3 * seconds for seconds in self.each(task, law, arm, "seconds")]
        rate = intervals.quotient(ms, tokens, intervals.LOG)
        score = intervals.mean(self.each(task, law, arm, "score"), intervals.SHARE)
        base_tokens = self.each(task, law, PLAIN, "tokens")
        base = [1e3 * seconds for seconds in self.each(task, law, PLAIN, "seconds")]
        own, plain = intervals.over(ms, tokens), intervals.over(base, base_tokens)
        gain = intervals.interval(lambda units: plain(units) / own(units), len(ms), intervals.LOG)
        return {
            "task": task.name,
            "law": law,
            "method": arm,
            "score": score.value,
            "score 95 %": score.text(),
            "of": task.score,
            "ms/token": rate.value,
            "ms/token 95 %": rate.text(2),
            "speed-up": gain.value,
            "speed-up 95 %": gain.text(2) if arm != PLAIN else "",
            "tokens a call": sum(tokens) / sum(self.each(task, law, arm, "steps")),
            "of the ceiling %": 100 * limit.ms_per_token / rate.value,
            "prompts": len(ms),
        }

    def equal(self, task: ChenTask, law: str) -> record.Row:
        """Whether both kinds of sampling score the same."""
        pairs = zip(
            self.each(task, law, FAST, "score"), self.each(task, law, PLAIN, "score"), strict=True
        )
        test = equivalence([fast - plain for fast, plain in pairs], self.amount.margin)
        paper, unit = ("HumanEval", 100.0) if task.name == "code" else ("XSum", 1.0)  # percent
        theirs = {
            one["method"]: one["score"] / unit
            for one in published.flat("chen", "1")
            if (one["task"], one["law"]) == (paper, law)
        }
        return {
            "task": task.name,
            "law": law,
            "score": task.score,
            "SpS - ArS": test.difference,
            "90 %": f"[{test.low:+.3f}, {test.high:+.3f}]",
            f"equal within {test.margin:g}": test.verdict,
            "p": test.p,
            "power": test.power,
            "prompts": test.prompts,
            "published": round(theirs[FAST] - theirs[PLAIN], 4) if theirs else None,
        }


def draw(
    tables: record.Tables, amount: ChenAmount, limit: bandwidth.BandwidthCeiling, out: Path
) -> None:
    """Milliseconds per token beside the ceiling, and the differences of scores in their margin."""
    plt = drawing.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    groups = list(dict.fromkeys((row["task"], row["law"]) for row in tables["table-1"]))
    for shift, (arm, colour) in enumerate(((PLAIN, "C0"), (FAST, "C1"))):
        rows = [row for row in tables["table-1"] if row["method"] == arm]
        at = [place + 0.36 * (shift - 0.5) for place in range(len(rows))]
        label = {PLAIN: "ordinary (ArS)", FAST: "speculative (SpS)"}[arm]
        axes[0].bar(at, [row["ms/token"] for row in rows], 0.36, color=colour, label=label)
        for x, row in zip(at, rows, strict=True):
            drawing.whisker(axes[0], x, row["ms/token 95 %"])
    least = f"the memory's {limit.bytes_a_second / 1e9:.1f} GB/s allow plain decoding"
    axes[0].axhline(limit.ms_per_token, color="black", linestyle=":", label=least)
    axes[0].set_xticks(range(len(groups)), [f"{task}\n{law}" for task, law in groups])
    axes[0].set_ylabel("ms per token")
    axes[0].margins(y=0.25)
    axes[0].legend(fontsize=8, loc="upper right")
    for place, row in enumerate(tables["scores"]):
        low, high = (float(end) for end in row["90 %"].strip("[]").split(", "))
        axes[1].plot([low, high], [place, place], color="C1")
        axes[1].plot([row["SpS - ArS"]], [place], "o", color="C1")
    axes[1].axvspan(-amount.margin, amount.margin, color="C0", alpha=0.12, label="margin")
    axes[1].axvline(0, color="black", linewidth=0.8)
    names = [f"{row['task']}, {row['law']}\n({row['score']})" for row in tables["scores"]]
    axes[1].set_yticks(range(len(names)), names)
    axes[1].invert_yaxis()
    axes[1].set_xlabel("score of speculative less ordinary sampling, 90 % intervals")
    axes[1].legend(fontsize=8)
    drawing.save(figure, out, "chen")
    plt.close(figure)
