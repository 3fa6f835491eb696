"""RSD's experiments 1 and 2: methods at equal draft length, and at equal target budget.

SD, block verification, SpecInfer, SpecTr, RSD-C, RSD-S, and hub nodes with traversal. Decoded in
batches, because block efficiency does not depend on them; the token rate is timed apart, one prompt
at a time. All methods see the same prompts, so differences are paired.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider import verifiers
from outrider.bench import published, record
from outrider.bench.score_code import parses, similarity
from outrider.drafters import Beam, DraftModel, HubTree, Paths, Root
from outrider.sampling import Sampling
from outrider.speculator import Speculator, Stop
from outrider.theory.length import memory_bound_speedup
from outrider.types import Drafter

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Arm:
    """A method with one of its trees."""

    method: str
    tree: str
    depth: int
    make: Callable[[Any], Drafter]
    rule: str


def _chain(length: int, method: str, rule: str) -> Arm:
    return Arm(method, str(length), length, lambda m: DraftModel(m, (1,) * length), rule)


def _dashed(counts: Counts) -> str:
    return "-".join(map(str, counts))


def _arms(
    lengths: Sequence[int], paths: Sequence[tuple[int, int]], trees: Sequence[Counts]
) -> list[Arm]:
    found = []
    for length in lengths:
        found += [_chain(length, "SD", "rejection"), _chain(length, "block", "block")]
    for width, depth in paths:
        name = f"{width}x{depth}"
        for method, rule in (("SpecInfer", "multi_round"), ("SpecTr", "kseq")):
            made = lambda m, w=width, d=depth: Paths(m, w, d)  # noqa: E731
            found.append(Arm(method, name, depth, made, rule))
        beam = lambda m, w=width, d=depth: Beam(m, w, d)  # noqa: E731
        found.append(Arm("RSD-S", name, depth, beam, "rejection"))
        found.append(Arm("RSD-S + traversal", name, depth, beam, "traversal"))
    for counts in trees:
        name = _dashed(counts)
        drawn = lambda m, c=counts: DraftModel(m, c)  # noqa: E731
        found.append(Arm("RSD-C", name, len(counts), drawn, "rejection"))
        hub = lambda m, c=counts: HubTree(m, c)  # noqa: E731
        found.append(Arm("hub + traversal", name, len(counts), hub, "traversal"))
    return found


def draft_lengths() -> dict[int, list[Arm]]:
    """C.3.1: draft length L -> arms."""
    return {
        2: _arms([2], [(2, 2), (3, 2)], [(2, 2), (2, 1), (3, 1)]),
        3: _arms([3], [(3, 3), (4, 3)], [(2, 2, 2), (3, 1, 1), (4, 1, 1)]),
        4: _arms([4], [(5, 4), (7, 4)], [(2, 2, 2, 2), (5, 1, 1, 1), (7, 1, 1, 1)]),
        5: _arms([5], [(6, 5), (12, 5)], [(2,) * 5, (6, 1, 1, 1, 1), (12, 1, 1, 1, 1)]),
    }


def budgets() -> dict[int, list[Arm]]:
    """C.3.2: tokens that the target scores in a call, the pending one left out -> arms."""
    return {
        6: _arms([6], [(2, 3), (3, 2)], [(2, 1, 1), (2, 2), (3, 1)]),
        10: _arms([10], [(2, 5), (5, 2)], [(2, 1, 1, 1, 1), (2, 2, 1), (5, 1)]),
        14: _arms([14], [(2, 7), (7, 2)], [(2,) + (1,) * 6, (2, 2, 2), (7, 1)]),
        21: _arms([21], [(3, 7), (7, 3)], [(3,) + (1,) * 6, (3, 2, 2), (7, 1, 1)]),
        30: _arms([30], [(5, 6), (6, 5)], [(2,) * 4, (5,) + (1,) * 5, (6, 1, 1, 1, 1)]),
    }


@dataclass(frozen=True)
class Plan:
    """How much is decoded."""

    prompts: int = 32
    new_tokens: int = 96
    temperature: float = 1.0
    timed: int = 3  #: prompts for the token rate
    rows: int = 16
    seed: int = 0


def run(
    name: str,
    groups: dict[int, list[Arm]],
    pair: Speculator,
    prompts: Sequence[dict[str, str]],
    plan: Plan,
    out: Path,
    progress: Callable[[str, int, int], None],
    pictures: bool = True,
) -> dict[str, list[record.Row]]:
    """Measure every arm of every group; returns the tables that were written."""
    if pictures:
        record.pyplot()
    settings = {
        "plan": vars(plan) | {},
        "target": str(pair.notes.target),
        "dtype": pair.notes.dtype,
    }
    store = record.Store(out, name, settings)
    chosen = list(prompts)[: plan.prompts]
    draft = pair.engine.drafter.model  # type: ignore[attr-defined]
    ratio = size_ratio(pair)
    jobs = [(0, _plain())] + [(group, arm) for group, arms in groups.items() for arm in arms]
    for number, (group, arm) in enumerate(jobs):
        progress(f"{arm.method} {arm.tree}", number, len(jobs))
        speculator = pair.using(arm.make(draft), verifiers.get(arm.rule))
        key = f"{group} {arm.method} {arm.tree}"
        store.get(key, lambda s=speculator, a=arm: _measure(s, a, chosen, plan))  # type: ignore[misc]
    rows = [_row(store, group, arm, ratio) for group, arm in jobs]
    tables = {
        "all": rows,
        "best": _best(rows),
        "differences": [d for group in groups for d in _differences(store, group, rows)],
    }
    if name == "budget":
        tables["published"] = [
            {"budget": b, "method": m, "tree": t, "block efficiency": e, "MBSU": s}
            for b, methods in published.RSD_BUDGET.items()
            for m, (t, e, s) in methods.items()
        ]
    store.write(tables)
    if pictures:
        _draw(name, tables, out)
    return tables


def _plain() -> Arm:
    return Arm("plain", "", 0, lambda m: Root(), "match")


def parameters(source: str) -> int:
    """Parameters of a checkpoint, from its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    return sum(p.numel() for p in model.parameters())


def size_ratio(pair: Speculator) -> float:
    """Size of the draft over size of the target, both read once a call."""
    return parameters(pair.notes.draft) / parameters(pair.notes.target)


def _measure(
    speculator: Speculator, arm: Arm, prompts: Sequence[dict[str, str]], plan: Plan
) -> record.Row:
    stop = Stop(plan.new_tokens, token_ids=())
    steps, tokens, parsed, alike = [], [], [], []
    for start in range(0, len(prompts), plan.rows):
        part = prompts[start : start + plan.rows]
        how = [Sampling(plan.temperature, seed=plan.seed + start + i) for i in range(len(part))]
        result = speculator.generate([p["prompt"].rstrip() for p in part], how, stop)
        for prompt, done in zip(part, result.completions, strict=True):
            steps.append(done.stats.steps)
            tokens.append(done.stats.new_tokens)
            parsed.append(parses(prompt["prompt"].rstrip(), done.text))
            alike.append(similarity(done.text, prompt.get("reference", "")))
    rate = []
    for number, prompt in enumerate(prompts[: plan.timed]):
        how_one = Sampling(plan.temperature, seed=plan.seed + number)
        stats = speculator.generate(prompt["prompt"].rstrip(), how_one, stop).stats
        rate.append(stats.tokens_per_second)
    return {"steps": steps, "tokens": tokens, "parsed": parsed, "alike": alike, "rate": rate}


def efficiency(row: record.Row, units: Sequence[int]) -> float:
    """Tokens per target call over some prompts."""
    return float(sum(row["tokens"][u] for u in units) / sum(row["steps"][u] for u in units))


def _row(store: record.Store, group: int, arm: Arm, ratio: float) -> record.Row:
    found = store.rows[f"{group} {arm.method} {arm.tree}"]
    count = len(found["steps"])
    tau, low, high = record.interval(lambda units: efficiency(found, units), count)
    parsed, plow, phigh = record.mean_interval([float(p) for p in found["parsed"]])
    return {
        "group": group,
        "method": arm.method,
        "tree": arm.tree,
        "block efficiency": tau,
        "tau 95 %": f"[{low:.3f}, {high:.3f}]",
        "MBSU": memory_bound_speedup(tau, arm.depth, ratio),
        "tokens/s": statistics.median(found["rate"]) if found["rate"] else None,
        "parses": parsed,
        "parses 95 %": f"[{plow:.2f}, {phigh:.2f}]",
        "edit similarity": statistics.fmean(found["alike"]),
    }


def _best(rows: Sequence[record.Row]) -> list[record.Row]:
    """The tree of the best block efficiency of each method and group."""
    found: dict[tuple[int, str], record.Row] = {}
    for row in rows:
        key = (row["group"], row["method"])
        if key not in found or row["block efficiency"] > found[key]["block efficiency"]:
            found[key] = row
    return list(found.values())


PAIRS = (
    ("block", "SD"),
    ("RSD-S", "RSD-C"),
    ("RSD-C", "SpecTr"),
    ("SpecTr", "SpecInfer"),
    ("RSD-S + traversal", "RSD-S"),
    ("hub + traversal", "RSD-S"),
)


def _differences(store: record.Store, group: int, rows: Sequence[record.Row]) -> list[record.Row]:
    """Paired differences of block efficiency between the best trees, 95 % by bootstrap."""
    best = {r["method"]: r["tree"] for r in _best(rows) if r["group"] == group}
    found = []
    for better, worse in PAIRS:
        if better not in best or worse not in best:
            continue
        a = store.rows[f"{group} {better} {best[better]}"]
        b = store.rows[f"{group} {worse} {best[worse]}"]
        gap, low, high = record.interval(
            lambda units, a=a, b=b: efficiency(a, units) - efficiency(b, units),  # type: ignore[misc]
            len(a["steps"]),
        )
        sign = "+" if low > 0 else "-" if high < 0 else "open"
        found.append(
            {
                "group": group,
                "difference": f"{better} ({best[better]}) - {worse} ({best[worse]})",
                "block efficiency": gap,
                "95 %": f"[{low:+.3f}, {high:+.3f}]",
                "sign": sign,
            }
        )
    return found


def _draw(name: str, tables: dict[str, list[record.Row]], out: Path) -> None:
    plt = record.pyplot()
    label = "draft length" if name == "draft-length" else "tokens scored by the target"
    figure, axes = plt.subplots(1, 4, figsize=(18, 4))
    methods = [m for m in dict.fromkeys(r["method"] for r in tables["best"]) if m != "plain"]
    for axis, value in zip(axes, ("block efficiency", "MBSU", "tokens/s", "parses"), strict=True):
        for method in methods:
            rows = [r for r in tables["best"] if r["method"] == method]
            axis.plot([r["group"] for r in rows], [r[value] for r in rows], "o-", label=method)
        axis.set_xlabel(label)
        axis.set_title(value)
    axes[0].legend(fontsize=8)
    record.save(figure, out, name)
    plt.close(figure)
