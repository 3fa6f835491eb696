"""Chen et al. 2023, figure 1: what the draft length K does to time, its spread and acceptance."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from outrider import verifiers
from outrider.cli.console import Show
from outrider.drafters import DraftModel
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.output_text import Stop
from outrider.text.speculator import Speculator
from outrider_lab import drawing
from outrider_lab.bench import intervals, measure
from outrider_lab.papers import published, record

#: Chen's middle panel: accepted tokens and the one more, of the most that a call can give. At K = 0
#: it is 1. Blocks count in full, those that the budget cuts as well.
PANEL = "tokens per call / (K + 1)"


def run(
    pair: Speculator,
    prompts: Sequence[dict[str, str]],
    out: Path,
    progress: Show,
    *,
    new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 0.8,
    most: int = 7,
    repeats: int = 2,
    rule: str = "rejection",
    seed: int = 0,
    pictures: bool = True,
) -> record.Tables:
    """Time for `new_tokens` tokens at K = 0..most, the values of K interleaved per prompt.

    Every repeat of a prompt has a seed of its own: another sample, as in the paper. All values of K
    have the same seeds.
    """
    settings = {
        "rule": rule,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "prompts": len(prompts),
        "of": record.of_prompts(prompts),
        "samples": "a seed for each prompt and repeat",
    } | record.of_pair(pair.notes)
    store = record.Store(out, "k-sweep", settings)
    draft = record.draft_of(pair)
    arms = {
        k: pair.using(DraftModel(draft, (1,) * k), verifiers.get(rule)) if k else pair.plain()
        for k in range(most + 1)
    }
    texts = [prompt["prompt"].rstrip() for prompt in prompts]
    for arm in arms.values():
        arm.generate(texts[0], SamplingParams(temperature, seed=0), Stop(8))

    def timed(k: int, index: int, repeat: int) -> record.Row:
        drawn = seed + len(texts) * repeat + index
        how = SamplingParams(temperature, top_p=top_p, seed=drawn)
        stats = arms[k].generate(texts[index], how, Stop(new_tokens, token_ids=())).stats
        return {
            "seconds": stats.seconds,
            "steps": stats.steps,
            "accepted": stats.accepted,
            "tokens": stats.new_tokens,
        }

    total = repeats * len(prompts) * len(arms)
    for number, (repeat, index, k) in enumerate(measure.turns(list(arms), len(texts), repeats)):
        progress(f"K = {k}", number, total)
        store.get(f"{k} {index} {repeat}", timed, k, index, repeat)
    rows = [row_of(store.rows, k) for k in arms]
    papers: list[record.Row] = [
        {"task": task, "plain ms/token": plain, "K = 4 ms/token": fast, "speed-up": plain / fast}
        for task, (plain, fast) in published.CHEN.items()
    ]
    tables = {"k": rows, "published": papers}
    store.write(tables)
    if pictures:
        _draw(rows, out)
    return tables


def row_of(stored: dict[str, record.Row], k: int) -> record.Row:
    """The line of draft length k, of all runs by their keys: K, prompt and repeat.

    Intervals are over prompts: a prompt's repeats count as one. The speed-up is paired.
    """
    mine, plain = _by_prompt(stored, k), _by_prompt(stored, 0)
    seconds = sorted(row["seconds"] for runs in mine.values() for row in runs)
    prompts = sorted(mine)

    def each(name: str, of: dict[int, list[record.Row]] = mine) -> list[float]:
        return [statistics.fmean(row[name] for row in of[prompt]) for prompt in prompts]

    mean = intervals.mean(each("seconds"), intervals.LOG)
    loops = intervals.quotient([1e3 * s for s in each("seconds")], each("steps"), intervals.LOG)
    emitted = [a + s for a, s in zip(each("accepted"), each("steps"), strict=True)]
    panel = intervals.quotient(emitted, [s * (k + 1) for s in each("steps")], intervals.LOG)
    gain = intervals.quotient(each("seconds", plain), each("seconds"), intervals.LOG)
    return {
        "K": k,
        "mean s": mean.value,
        "95 %": mean.text(),
        "deviation s": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "P90 s": _quantile(seconds, 0.90),
        "P99 s": _quantile(seconds, 0.99),
        PANEL: panel.value,
        f"{PANEL} 95 %": panel.text(),
        "ms per loop": loops.value,
        "ms per loop 95 %": loops.text(2),
        "speed-up": gain.value,
        "speed-up 95 %": gain.text(2),
        "sign": gain.sign(1.0) if k else "",
        "runs": len(seconds),
    }


def _by_prompt(stored: dict[str, record.Row], k: int) -> dict[int, list[record.Row]]:
    found: dict[int, list[record.Row]] = {}
    for key, row in stored.items():
        draft, prompt, _ = map(int, key.split())
        if draft == k:
            found.setdefault(prompt, []).append(row)
    return found


def _quantile(ordered: Sequence[float], level: float) -> float:
    return ordered[min(int(level * len(ordered)), len(ordered) - 1)]


def _draw(rows: Sequence[record.Row], out: Path) -> None:
    figure, grid = drawing.panels(1, 3, (14, 4.5))
    axes = grid[0]
    k = [row["K"] for row in rows]
    axes[0].errorbar(
        k,
        [r["mean s"] for r in rows],
        [r["deviation s"] for r in rows],
        fmt="o-",
        label="mean and deviation",
    )
    axes[0].plot(k, [r["P90 s"] for r in rows], "--", label="P90")
    axes[0].plot(k, [r["P99 s"] for r in rows], ":", label="P99")
    axes[0].set_title("time of a text, s")
    axes[1].plot(k, [r[PANEL] for r in rows], "o-")
    axes[1].set_title(PANEL)
    axes[2].plot(k, [r["ms per loop"] for r in rows], "o-")
    axes[2].set_title("time per loop, ms")
    for row in rows:
        drawing.whisker(axes[1], row["K"], row[f"{PANEL} 95 %"])
        drawing.whisker(axes[2], row["K"], row["ms per loop 95 %"])
    for axis in axes:
        axis.set_xlabel("K")
    drawing.legend(figure, axes, 3)
    drawing.save(figure, out, "k-sweep")
