"""Leviathan et al. 2023, A.4: beam search under speculation, by w, u and gamma.

For each width w: how many target calls a step of the search takes, how many texts a call scores,
and what a step costs, against the same search without anything scored ahead. The beams are compared
text by text; the paper's own method approximates them, here they are the same.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.drafters import DraftModel, PromptLookup, Root
from outrider.engine.request import Limits, Request
from outrider.engine.search.beams import Beams
from outrider.engine.search.decode import Searched, search
from outrider.engine.search.pace import Pace
from outrider.lab import measure
from outrider.lab.papers import record
from outrider.laws.sampling import Sampling
from outrider.text.speculator import Speculator
from outrider.text.tokens import encode
from outrider.types import Drafter

Progress = Callable[[str, int, int], None]
WIDTHS = (1, 2, 5, 10)


class Arm(NamedTuple):
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


def arms(pair: Speculator, widths: Sequence[int]) -> Iterator[Arm]:
    """Without anything ahead, copies, the draft model's beams, and what the search chooses."""
    model = record.draft_of(pair)
    for width in widths:
        yield Arm(width, "tree", Root(), 0)
        for ahead in (3, 6):
            yield Arm(width, "copy", PromptLookup(ahead), ahead)
        for ahead, wide in ((2, width), (4, width), (2, 2 * width)):
            yield Arm(width, "draft", DraftModel(model, (1,) * ahead), ahead, wide)
        yield Arm(width, "draft, chosen", DraftModel(model, (1,) * 4), 4, width, adapts=True)


def run(
    pair: Speculator,
    prompts: Sequence[dict[str, str]],
    out: Path,
    progress: Progress,
    *,
    new_tokens: int = 48,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 1,
) -> dict[str, list[record.Row]]:
    """Every arm on every prompt, interleaved; tables by arm."""
    settings = {
        "new_tokens": new_tokens,
        "prompts": len(prompts),
        "of": record.of_prompts(prompts),
    } | record.of_pair(pair.notes)
    store = record.Store(out, "beams", settings)
    every = {arm.key: arm for arm in arms(pair, widths)}
    ids = [encode(pair.tokenizer, prompt["prompt"].rstrip()) for prompt in prompts]

    def measured(arm: Arm, index: int) -> record.Row:
        pace = Pace(arm.ahead, adapts=arm.adapts)
        request = Request(ids[index], Sampling(0), Limits(new_tokens, pair.eos_ids))
        started = time.perf_counter()
        found = _search(pair, arm, request, pace)
        return {
            "seconds": time.perf_counter() - started,
            "calls": found.counts.calls,
            "nodes": found.counts.nodes,
            "steps": found.counts.steps,
            "margin": found.counts.margin[0],
            "answered": pace.answered,
            "beams": [one.token_ids for one in found.hypotheses[0]],
        }

    for arm in every.values():
        _search(pair, arm, Request(ids[0], Sampling(0), Limits(4)), Pace(arm.ahead))
    turns = measure.turns(list(every), len(ids), repeats)
    for number, (repeat, index, key) in enumerate(turns):
        progress(key, number, repeats * len(ids) * len(every))
        store.get(f"{key} | {index} {repeat}", measured, every[key], index)
    rows = [_row(store, arm, every) for arm in every.values()]
    tables = {"beams": rows}
    store.write(tables)
    return tables


def _search(pair: Speculator, arm: Arm, request: Request, pace: Pace) -> Searched:
    beams = Beams(arm.width, num_return_sequences=arm.width)
    target = pair.engine.target
    return search(target, arm.drafter, [request], beams, False, pace, arm.draft_beams)


def _row(store: record.Store, arm: Arm, every: dict[str, Arm]) -> record.Row:
    mine = _runs(store, arm.key)
    tree = _runs(store, next(key for key, a in every.items() if a[:2] == (arm.width, "tree")))
    steps = sum(row["steps"] for row in mine.values())
    calls = sum(row["calls"] for row in mine.values())
    same = sum(row["beams"] == tree[at]["beams"] for at, row in mine.items())
    seconds, without = (sum(row["seconds"] for row in rows.values()) for rows in (mine, tree))
    return {
        "w": arm.width,
        "scored ahead": arm.name,
        "u": arm.draft_beams,
        "gamma": arm.ahead,
        "calls/step": calls / steps,
        "predicted": _predicted(store, arm, every),
        "nodes/call": sum(row["nodes"] for row in mine.values()) / calls,
        "ms/step": 1e3 * seconds / steps,
        "speed against tree": without / seconds,
        "same beams": f"{same}/{len(mine)}",
        "least margin": min(row["margin"] for row in mine.values()),
    }


def _predicted(store: record.Store, arm: Arm, every: dict[str, Arm]) -> float | None:
    """Calls a step that `Pace` expects of this depth, from what a deeper arm's calls answered."""
    kin = [
        other
        for other in every.values()
        if (other.width, other.name, other.draft_beams) == (arm.width, arm.name, arm.draft_beams)
        and other.ahead > arm.ahead
    ]
    if not kin or arm.adapts:
        return None
    deepest = max(kin, key=lambda other: other.ahead)
    pace = Pace(deepest.ahead)
    for row in _runs(store, deepest.key).values():
        pace.answered += [(depth, steps) for depth, steps in row["answered"]]
    return 1 / pace.expected(arm.ahead)


def _runs(store: record.Store, key: str) -> dict[str, record.Row]:
    """The measurements of an arm, by prompt and turn."""
    named = (stored.split(" | ") for stored in store.rows)
    return {at: store.rows[f"{name} | {at}"] for name, at in named if name == key}
