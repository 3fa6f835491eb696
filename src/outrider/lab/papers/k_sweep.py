"""Chen et al. 2023, figure 1: what the draft length K does to time, its spread and acceptance."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider import verifiers
from outrider.drafters import DraftModel
from outrider.lab import measure
from outrider.lab.papers import published, record
from outrider.laws.sampling import Sampling
from outrider.text.speculator import Speculator
from outrider.text.stop import Stop

Progress = Callable[[str, int, int], None]


def run(
    pair: Speculator,
    prompts: Sequence[dict[str, str]],
    out: Path,
    progress: Progress,
    *,
    new_tokens: int = 128,
    temperature: float = 1.0,
    most: int = 7,
    repeats: int = 2,
    rule: str = "rejection",
    seed: int = 0,
    pictures: bool = True,
) -> dict[str, list[record.Row]]:
    """Time for `new_tokens` tokens at K = 0..most, the values of K interleaved per prompt."""
    if pictures:
        record.pyplot()
    settings = {
        "rule": rule,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "seed": seed,
        "prompts": len(prompts),
        "of": record.of_prompts(prompts),
    } | record.of_pair(pair.notes)
    store = record.Store(out, "k-sweep", settings)
    draft = record.draft_of(pair)
    arms = {
        k: pair.using(DraftModel(draft, (1,) * k), verifiers.get(rule)) if k else pair.plain()
        for k in range(most + 1)
    }
    texts = [prompt["prompt"].rstrip() for prompt in prompts]
    for arm in arms.values():
        arm.generate(texts[0], Sampling(temperature, seed=0), Stop(8))

    def timed(k: int, index: int) -> record.Row:
        how = Sampling(temperature, seed=seed + index)
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
        store.get(f"{k} {index} {repeat}", timed, k, index)
    rows = [_row(store, k) for k in arms]
    base = rows[0]["mean s"]
    for row in rows:
        row["speed-up"] = base / row["mean s"]
    papers: list[record.Row] = [
        {"task": task, "plain ms/token": plain, "K = 4 ms/token": fast, "speed-up": plain / fast}
        for task, (plain, fast) in published.CHEN.items()
    ]
    tables = {"k": rows, "published": papers}
    store.write(tables)
    if pictures:
        _draw(rows, out)
    return tables


def _row(store: record.Store, k: int) -> record.Row:
    runs = [row for key, row in store.rows.items() if key.startswith(f"{k} ")]
    seconds = sorted(row["seconds"] for row in runs)
    steps = sum(row["steps"] for row in runs)
    mean, low, high = record.mean_interval(seconds)
    return {
        "K": k,
        "mean s": mean,
        "95 %": f"[{low:.3f}, {high:.3f}]",
        "deviation s": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "P90 s": _quantile(seconds, 0.90),
        "P99 s": _quantile(seconds, 0.99),
        "accepted / (K + 1)": sum(row["accepted"] for row in runs) / (steps * (k + 1)),
        "tokens per loop": sum(row["tokens"] for row in runs) / steps,
        "ms per loop": 1e3 * sum(seconds) / steps,
        "runs": len(seconds),
    }


def _quantile(ordered: Sequence[float], level: float) -> float:
    return ordered[min(int(level * len(ordered)), len(ordered) - 1)]


def _draw(rows: Sequence[record.Row], out: Path) -> None:
    plt = record.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    k = [row["K"] for row in rows]
    axes[0].errorbar(k, [r["mean s"] for r in rows], [r["deviation s"] for r in rows], fmt="o-")
    axes[0].plot(k, [r["P90 s"] for r in rows], "--", label="P90")
    axes[0].plot(k, [r["P99 s"] for r in rows], ":", label="P99")
    axes[0].legend()
    axes[0].set_title("time for the tokens, s")
    axes[1].plot(k[1:], [r["accepted / (K + 1)"] for r in rows[1:]], "o-")
    axes[1].set_title("accepted / (K + 1)")
    axes[2].plot(k, [r["ms per loop"] for r in rows], "o-")
    axes[2].set_title("time per loop, ms")
    for axis in axes:
        axis.set_xlabel("K")
    record.save(figure, out, "k-sweep")
    plt.close(figure)
