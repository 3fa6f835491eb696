"""Leviathan et al. 2023, A.4: beam search under speculation, by w, u and gamma.

For each width w: how many target calls a step of the search takes, how many texts a call scores,
and what a step costs, against the same search without anything scored ahead. The beams are compared
text by text; the paper's own method approximates them, here they are the same. What chooses how far
ahead to score goes on with what it learned on the prompts before, as an engine's searches do.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from outrider.cli.console import Show
from outrider.drafters import DraftModel, PromptLookup, Root
from outrider.engine.beam_search.lookahead import LookaheadDepth, LookaheadDepths
from outrider.engine.beam_search.search import Searched, search
from outrider.engine.beam_search.step import Beams
from outrider.engine.request import Request, StopConditions
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.prompts import encode
from outrider.text.speculator import Speculator
from outrider.types import Drafter
from outrider_lab.bench import intervals, measure
from outrider_lab.papers import alpha_tasks, record

WIDTHS = (1, 2, 5, 10)


class BeamArm(NamedTuple):
    """One way to search with w beams."""

    width: int
    name: str
    drafter: Drafter
    ahead: int  #: gamma
    draft_beams: int | None = None  #: u
    adapts: bool = False

    @property
    def key(self) -> str:
        """What its measurements are stored under."""
        return f"{self.width} {self.name} {self.draft_beams or self.width} {self.ahead}"


def arms(pair: Speculator, widths: Sequence[int]) -> Iterator[BeamArm]:
    """Without anything ahead, copies, the draft model's beams, and what the search chooses.

    Without a draft model it chooses among copies.
    """
    drafter = pair.engine.drafter
    model = drafter.model if isinstance(drafter, DraftModel) else None
    for width in widths:
        yield BeamArm(width, "tree", Root(), 0)
        for ahead in (3, 6):
            yield BeamArm(width, "copy", PromptLookup(ahead), ahead)
        if model is None:
            yield BeamArm(width, "copy, chosen", PromptLookup(6), 6, adapts=True)
            continue
        for ahead, wide in ((2, width), (4, width), (2, 2 * width)):
            yield BeamArm(width, "draft", DraftModel(model, (1,) * ahead), ahead, wide)
        yield BeamArm(width, "draft, chosen", DraftModel(model, (1,) * 4), 4, width, adapts=True)


def run(
    pair: Speculator,
    prompts: Sequence[dict[str, str]],
    out: Path,
    progress: Show,
    *,
    new_tokens: int = 48,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 1,
) -> record.Tables:
    """Every arm on every prompt, interleaved; tables by arm."""
    settings = {
        "new_tokens": new_tokens,
        "prompts": len(prompts),
        "of": record.of_prompts(prompts),
    } | record.of_pair(pair.notes)
    store = record.Store(out, "beams", settings)
    every = {arm.key: arm for arm in arms(pair, widths)}
    if pair.engine.target.reads == "source":
        asked = alpha_tasks.tasks(pair, prompts)
    else:  # whole prompts
        asked = [Request(encode(pair.tokenizer, row["prompt"].rstrip())) for row in prompts]
    paces = LookaheadDepths()

    def measured(arm: BeamArm, index: int) -> record.Row:
        limits = StopConditions(new_tokens, pair.eos_ids)
        request = replace(asked[index], sampling=SamplingParams(0), limits=limits)
        chosen = paces.lent(arm.ahead, arm.width, 1)
        with chosen if arm.adapts else nullcontext(LookaheadDepth(arm.ahead, adapts=False)) as pace:
            started = time.perf_counter()
            found = _search(pair, arm, request, pace)
            seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "calls": found.counts.calls,
            "nodes": found.counts.nodes,
            "steps": found.counts.steps,
            "margin": found.counts.margin[0],
            "answered": pace.answered,
            "beams": [one.token_ids for one in found.hypotheses[0]],
        }

    for arm in every.values():
        warm = replace(asked[0], sampling=SamplingParams(0), limits=StopConditions(4))
        _search(pair, arm, warm, LookaheadDepth(arm.ahead))
    turns = measure.turns(list(every), len(asked), repeats)
    for number, (repeat, index, key) in enumerate(turns):
        progress(key, number, repeats * len(asked) * len(every))
        store.get(f"{key} | {index} {repeat}", measured, every[key], index)
    rows = [row_of(store.rows, arm, every) for arm in every.values()]
    tables = {"beams": rows}
    store.write(tables)
    return tables


def _search(pair: Speculator, arm: BeamArm, request: Request, pace: LookaheadDepth) -> Searched:
    beams = Beams(arm.width, num_return_sequences=arm.width)
    target = pair.engine.target
    return search(target, arm.drafter, [request], beams, False, pace, arm.draft_beams)


def row_of(stored: dict[str, record.Row], arm: BeamArm, every: dict[str, BeamArm]) -> record.Row:
    """The line of an arm, of all runs by their keys: arm, prompt and repeat."""
    mine = _runs(stored, arm.key)
    tree = _runs(stored, next(key for key, a in every.items() if a[:2] == (arm.width, "tree")))
    same = sum(row["beams"] == tree[at]["beams"] for at, row in mine.items())

    def each(name: str, rows: dict[str, record.Row] = mine) -> list[float]:
        """Sums over a prompt's repeats, prompts in one order."""
        sums = dict.fromkeys(sorted(at.split()[0] for at in mine), 0.0)
        for at in mine:
            sums[at.split()[0]] += rows[at][name]
        return list(sums.values())

    calls = intervals.quotient(each("calls"), each("steps"), intervals.LOG)
    gain = intervals.quotient(each("seconds", tree), each("seconds"), intervals.LOG)
    return {
        "w": arm.width,
        "scored ahead": arm.name,
        "u": arm.draft_beams,
        "gamma": arm.ahead,
        "calls/step": calls.value,
        "95 %": calls.text(),
        "predicted": _predicted(stored, arm, every),
        "nodes/call": sum(each("nodes")) / sum(each("calls")),
        "ms/step": 1e3 * sum(each("seconds")) / sum(each("steps")),
        "speed against tree": gain.value,
        "speed 95 %": gain.text(2),
        "sign": gain.sign(1.0),
        "same beams": f"{same}/{len(mine)}",
        "least margin": min(row["margin"] for row in mine.values()),
    }


def _predicted(
    stored: dict[str, record.Row], arm: BeamArm, every: dict[str, BeamArm]
) -> float | None:
    """Calls a step that `LookaheadDepth` expects of this depth, from what a deeper arm's calls
    answered."""
    kin = [
        other
        for other in every.values()
        if (other.width, other.name, other.draft_beams) == (arm.width, arm.name, arm.draft_beams)
        and other.ahead > arm.ahead
    ]
    if not kin or arm.adapts:
        return None
    deepest = max(kin, key=lambda other: other.ahead)
    pace = LookaheadDepth(deepest.ahead)
    for row in _runs(stored, deepest.key).values():
        pace.answered += [(depth, steps) for depth, steps in row["answered"]]
    return 1 / pace.expected(arm.ahead)


def _runs(stored: dict[str, record.Row], key: str) -> dict[str, record.Row]:
    """The measurements of an arm, by prompt and turn."""
    named = (name.split(" | ") for name in stored)
    return {at: stored[f"{name} | {at}"] for name, at in named if name == key}
