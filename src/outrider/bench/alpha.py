"""Leviathan et al. 2023, tables 2 to 5: alpha by drafter, predicted and measured improvement.

alpha = E[sum min(p, q)] over prefixes that the target wrote (at temperature 0: how often the
argmaxes agree). c = time of a draft step over time of a target step, measured. Expected improvement
(1 - alpha^(gamma + 1)) / ((1 - alpha)(gamma c + 1)); measured: plain over speculative time,
interleaved. The n-gram tables are counted from the standard library's sources on this machine,
without the modules that the prompts come from.
"""

import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider import measure, ops, verifiers
from outrider.bench import published, record
from outrider.certify.laws import Text, score
from outrider.drafters import DraftModel, Root
from outrider.drafters.ngram_table import NgramTable, Table, count
from outrider.engine import Engine, Limits
from outrider.sampling import Sampling
from outrider.speculator import Speculator, Stop
from outrider.theory import length
from outrider.types import Drafter

LENIENCES = (1.0, 0.5, 0.3, 0.1)
Progress = Callable[[str, int, int], None]


def library_tokens(pair: Speculator, prompts: Sequence[dict[str, str]], most: int) -> Tensor:
    """Tokens of the standard library, without the prompts' modules and without tests."""
    held_out = {row.get("id", "").split(":")[0] for row in prompts}
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[int] = []
    for path in sorted(root.glob("**/*.py")):
        parts = path.relative_to(root).parts
        if {"test", "tests", "site-packages", "idlelib"} & set(parts) or path.name in held_out:
            continue
        try:
            found += pair.tokenizer.encode(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if len(found) >= most:
            break
    return torch.tensor(found[:most])


def run(
    pair: Speculator,
    prompts: Sequence[dict[str, str]],
    out: Path,
    progress: Progress,
    *,
    tokens: int = 10_000,
    library: int = 2_000_000,
    timed: int = 4,
    repeats: int = 2,
    new_tokens: int = 64,
    seed: int = 0,
    pictures: bool = True,
) -> dict[str, list[record.Row]]:
    """All four tables."""
    if pictures:
        record.pyplot()
    settings = {
        "tokens": tokens,
        "library": library,
        "timed": timed,
        "repeats": repeats,
        "new_tokens": new_tokens,
        "seed": seed,
        "prompts": len(prompts),
    } | record.of_pair(pair.notes)
    store = record.Store(out, "alpha", settings)
    progress("counting n-grams", 0, 5)
    text = library_tokens(pair, prompts, library)
    vocab = pair.engine.target.vocab_size
    tables = {name: count(text, vocab, order) for name, order in ORDERS.items()}
    model = pair.engine.drafter.model  # type: ignore[attr-defined]
    names = [*ORDERS, "draft model"]
    for step, temperature in enumerate((0.0, 1.0), start=1):
        progress(f"alpha at T = {temperature:g}", step, 5)
        store.get(
            f"alpha {temperature}",
            lambda t=temperature: _alphas(  # type: ignore[misc]
                pair, prompts, tables, model, t, tokens, new_tokens, seed
            ),
        )
    found = {t: store.rows[f"alpha {t}"] for t in (0.0, 1.0)}
    progress("cost of a draft step", 3, 5)
    costs = store.get("cost", lambda: _costs(pair, prompts, tables, model))
    speeds: list[record.Row] = []
    for number, name in enumerate(names):
        progress(f"timing {name}", 3 + number // 2, 5)
        for temperature in (0.0, 1.0):
            alpha, c = found[temperature]["alpha"][name], costs[name]
            gamma = max(min(length.best_length(min(alpha, 0.999), c, 12), 12), 1)
            drafter = _drafter(name, tables, model, gamma)
            row = store.get(
                f"speed {name} {temperature} {gamma}",
                lambda d=drafter, t=temperature: _speed(  # type: ignore[misc]
                    pair, d, prompts[:timed], t, repeats, new_tokens, seed
                ),
            )
            speeds.append(
                {
                    "drafter": name,
                    "T": temperature,
                    "gamma": gamma,
                    "alpha": alpha,
                    "c": c,
                    "expected": length.speedup(min(alpha, 0.999), gamma, c),
                    "measured": row["median"],
                    "95 %": f"[{row['low']:.2f}, {row['high']:.2f}]",
                }
            )
    rows: list[record.Row] = [
        {
            "drafter": name,
            "alpha T = 0": found[0.0]["alpha"][name],
            "alpha T = 1": found[1.0]["alpha"][name],
            "tokens": found[1.0]["tokens"],
        }
        for name in names
    ]
    rows += [
        {"drafter": f"{name} (T5-XXL, published)", "alpha T = 0": zero, "alpha T = 1": one}
        for name, (zero, one) in published.LEVIATHAN_ALPHA.items()
    ]
    speeds += [
        {
            "drafter": f"{name} (published)",
            "T": float(t),
            "gamma": gamma,
            "alpha": alpha,
            "c": c,
            "expected": expected,
            "measured": measured,
        }
        for name, t, gamma, alpha, c, expected, measured in published.LEVIATHAN_SPEED
    ]
    lenient: list[record.Row] = [
        {"drafter": name}
        | {f"l = {level:g}": found[1.0]["lenient"][name][i] for i, level in enumerate(LENIENCES)}
        for name in names
    ]
    lenient += [
        {"drafter": f"{name} (published)"}
        | {f"l = {level:g}": values[i] for i, level in enumerate(LENIENCES)}
        for name, values in published.LEVIATHAN_LENIENCE.items()
    ]
    made = {"alpha": rows, "speed": speeds, "lenience": lenient}
    store.write(made)
    if pictures:
        _draw(made, names, out)
    return made


ORDERS = {"unigram": 1, "bigram": 2, "3-gram": 3}


def _drafter(name: str, tables: dict[str, Table], model: Any, gamma: int) -> Drafter:
    if name in tables:
        return NgramTable(tables[name], gamma)
    return DraftModel(model, (1,) * gamma)


@torch.inference_mode()
def _alphas(
    pair: Speculator,
    prompts: Sequence[dict[str, str]],
    tables: dict[str, Table],
    model: Any,
    temperature: float,
    tokens: int,
    new_tokens: int,
    seed: int,
) -> record.Row:
    """alpha of every drafter, and of every lenience, on the target's own text."""
    plain = Engine(pair.engine.target, Root(), verifiers.get("match"))
    ids = [tuple(pair.tokenizer.encode(p["prompt"].rstrip())[-64:]) for p in prompts]
    sums = {name: np.zeros(len(LENIENCES)) for name in (*tables, "draft model")}
    seen = row = 0
    sampling = Sampling(temperature)
    while seen < tokens:
        batch = [(ids[(row + i) % len(ids)], seed + row + i) for i in range(16)]
        row += len(batch)
        how = [Sampling(temperature, seed=s) for _, s in batch]
        run = plain.run([p for p, _ in batch], how, Limits(new_tokens))
        found: list[list[int]] = [[] for _ in batch]
        for block in run:
            found[block.row] += block.token_ids
        texts = [Text(p, tuple(t), s) for (p, s), t in zip(batch, found, strict=True)]
        law = ops.probs(score(pair.engine.target, texts, sampling).laws).flatten(0, 1)
        seen += len(law)
        for name in sums:
            if name in tables:
                guess = _table_laws(tables[name], texts, sampling)
            else:
                guess = ops.probs(score(model, texts, sampling).laws).flatten(0, 1)
            for i, level in enumerate(LENIENCES):
                sums[name][i] += float(torch.minimum(law / level, guess).sum())
        if temperature == 0 and row >= len(ids):
            break  # greedy text repeats itself from here on
    return {
        "alpha": {name: float(total[0] / seen) for name, total in sums.items()},
        "lenient": {name: (total / seen).tolist() for name, total in sums.items()},
        "tokens": seen,
    }


def _table_laws(table: Table, texts: Sequence[Text], sampling: Sampling) -> Tensor:
    """The table's law at every emitted token, under the same sampling."""
    from outrider.sampling import rows, warp

    contexts = []
    back = max(table.order - 1, 1)
    for text in texts:
        whole = (-1,) * back + text.prompt + text.new
        start = back + len(text.prompt)
        contexts += [whole[start + i - back : start + i] for i in range(len(text.new))]
    logits = table.probs(torch.tensor(contexts)).log()[None]
    return ops.probs(warp(logits, rows([sampling])))[0]


def _costs(
    pair: Speculator, prompts: Sequence[dict[str, str]], tables: dict[str, Table], model: Any
) -> record.Row:
    """c of each drafter: its time per drafted token over the target's per plain step."""
    text = prompts[0]["prompt"].rstrip()
    stop, how = Stop(48, token_ids=()), Sampling(1.0, seed=0)
    pair.plain().generate(text, how, stop)
    stats = pair.plain().generate(text, how, stop).stats
    step = stats.target_ms / stats.engine_steps
    found: record.Row = {}
    chained = pair.using(DraftModel(model, (1,) * 4))
    chained.generate(text, how, stop)
    drafted = chained.generate(text, how, stop).stats
    found["draft model"] = drafted.draft_ms / drafted.engine_steps / 4 / step
    for name, table in tables.items():
        context = torch.tensor([pair.tokenizer.encode(text)[-8:]])
        started = time.perf_counter()
        for _ in range(50):
            table.probs(context)
        found[name] = 1e3 * (time.perf_counter() - started) / 50 / step
    return found


def _speed(
    pair: Speculator,
    drafter: Drafter,
    prompts: Sequence[dict[str, str]],
    temperature: float,
    repeats: int,
    new_tokens: int,
    seed: int,
) -> record.Row:
    rule = verifiers.get("match" if temperature == 0 else "rejection")
    arms = {"plain": pair.plain(), "fast": pair.using(drafter, rule)}
    trials = measure.interleave(
        arms,
        [p["prompt"].rstrip() for p in prompts],
        lambda number: Sampling(temperature, seed=seed + number),
        Stop(new_tokens, token_ids=()),
        repeats,
    )
    ratio = measure.ratio(trials, "fast", "plain")
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high}


def _draw(tables: dict[str, list[record.Row]], names: Sequence[str], out: Path) -> None:
    plt = record.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    ours = [r for r in tables["speed"] if r["drafter"] in names]
    theirs = [r for r in tables["speed"] if r["drafter"] not in names]
    for rows, mark, label in ((ours, "o", "ours"), (theirs, "x", "Leviathan et al. 2023")):
        expected = [r["expected"] for r in rows]
        axes[0].plot(expected, [r["measured"] for r in rows], mark, label=label)
    most = max(max(r["expected"], r["measured"]) for r in (*ours, *theirs))
    axes[0].plot([0, most], [0, most], "k:", linewidth=1)
    axes[0].set_xlabel("expected improvement")
    axes[0].set_ylabel("measured improvement")
    axes[0].legend()
    for row in tables["lenience"]:
        values = [row[f"l = {level:g}"] for level in LENIENCES]
        mark = "o-" if row["drafter"] in names else "x:"
        axes[1].plot(LENIENCES, values, mark, label=row["drafter"])
    axes[1].set_xlabel("lenience l")
    axes[1].set_ylabel("alpha")
    axes[1].legend(fontsize=7)
    record.save(figure, out, "alpha")
    plt.close(figure)
