"""Verification of one step, measured: correctness first, then time, then a table and one JSON file.

    python benchmarks/verify.py                    # CPU contestants, or GPU ones where CUDA is
    python benchmarks/verify.py --quick            # one minute
    python benchmarks/verify.py --out results.json

Rows are medians of interleaved calls. `floor` is the time of the passes over memory that no exact
method can avoid; `share` is what the call costs next to one forward of a small target on this
device, because a verification kernel is only ever a part of a step.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contestants
import numpy as np
import timing
import torch
import transformers
from inputs import make

from outrider.models import isa

SIZES = [
    (1, 5, 4_096, "fp32"), (1, 5, 32_000, "fp32"), (1, 5, 151_936, "fp32"),
    (1, 1, 32_000, "fp32"), (1, 10, 32_000, "fp32"), (8, 5, 32_000, "fp32"),
    (1, 5, 50_257, "bf16"),
]  # fmt: skip
COMPILED = ((1, 5, 32_000, "fp32"), (1, 5, 151_936, "fp32"))  #: compiling takes a minute a size
GPU_SIZES = [
    (batch, gamma, vocab, dtype)
    for batch in (1, 8, 64)
    for gamma in (1, 3, 5, 10, 20)
    for vocab in (32_000, 50_257, 51_864, 151_936, 256_000)
    for dtype in ("bf16", "fp16", "fp32")
]
DIAGONAL = [
    (1, 5, 32_000, "bf16"), (1, 5, 151_936, "bf16"), (1, 20, 256_000, "bf16"),
    (1, 5, 151_936, "fp32"), (1, 5, 51_864, "fp16"), (8, 5, 151_936, "bf16"),
    (64, 5, 151_936, "bf16"), (64, 20, 256_000, "bf16"), (1, 1, 50_257, "fp16"),
    (8, 10, 32_000, "fp16"), (64, 1, 32_000, "bf16"), (1, 3, 151_936, "bf16"),
]  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DISTANCES = (0.05, 0.2, 0.5)
#: What a step is compared with on a GPU: one forward cannot be faster than reading the weights.
WEIGHT_BYTES = 1.5e9 * 2  #: 1.5 B parameters in 16 bits


def check(device: str) -> dict[str, Any]:
    """Same path and count as float64 for the same uniforms, and a G-test of the first token."""
    from outrider import ops, verifiers
    from outrider.engine.step import run_kernel

    worst, wrong, total = 0.0, 0, 0
    rule = verifiers.get("rejection")
    backend = "cpu" if device == "cpu" else "triton"
    for seed in range(30):
        x = make(2, 4, 3_001, torch.float32, DISTANCES[seed % 3], seed, device)
        with ops.use(backend):
            ours = run_kernel(rule, x.draft, x.scores, x.draws)
        double = x.scores.laws._replace(logits_BRV=x.target_logits.double())
        guess = x.cold.laws._replace(logits_BRV=x.draft_logits.double())
        with ops.use("reference"):
            theirs = rule(x.cold._replace(laws=guess), x.scores._replace(laws=double), x.draws)
        wrong += int((ours.path_BD != theirs.path_BD).any(1).sum())
        total += 2
        with ops.use(backend):
            _, drawn = ops.sample(x.scores.laws, x.draws.seed_B[:, None].expand(-1, 5))
        if drawn.lse_BR is not None:  # a CPU keeps weights instead
            exact = x.target_logits.double().logsumexp(-1)
            error = (drawn.lse_BR - exact).abs() / exact.abs().clamp(min=1)
            worst = max(worst, float(error.max()))
    if wrong or worst > 1e-6:
        raise SystemExit(f"wrong before timing: {wrong} of {total} paths, LSE error {worst:.1e}")
    return {
        "paths_checked": total, "lse_error": worst, "g_p_value": g_test(device, backend),
        "contestants": laws_of(contenders(device)),
    }  # fmt: skip


def contenders(device: str) -> list[contestants.Contestant]:
    """Everyone who can run on this device."""
    missing = contestants.absent()
    every = contestants.on_cpu() if device == "cpu" else contestants.on_gpu()
    return [one for one in every if one.name not in missing]


def laws_of(
    every: list[contestants.Contestant], vocab: int = 32, batch: int = 2_000, device: str = ""
) -> dict[str, float]:
    """p-value of the first emitted token of each exact contestant; `batch` requests, gamma 2.

    The drafted tokens are drawn anew for every request. Wrong contestants end the run. A compiled
    one runs the code of its eager twin and is checked by that.
    """
    from scipy.stats import chi2

    found = {}
    device = device or ("cuda" if any(one.graph for one in every) else "cpu")
    x = make(1, 2, vocab, torch.float32, 0.4, 1, device)
    torch.manual_seed(5)
    guess = x.draft_logits[0].softmax(-1)
    tokens = torch.stack([torch.multinomial(row, batch, replacement=True) for row in guess], 1)
    law = x.target_logits[0, 0].double().softmax(-1).cpu().numpy()
    for one in every:
        if not one.exact or not one.emits or one.compiled:
            continue
        counts = np.zeros(vocab)
        for i in range(batch):
            ids = torch.cat([x.ids[:, :1], tokens[i : i + 1]], 1)
            keys = x.draws._replace(seed_B=x.draws.seed_B + 977 * i)
            y = x._replace(
                ids=ids, draft=x.draft._replace(tokens_BN=ids), cold=x.cold._replace(tokens_BN=ids),
                draws=keys,
            )  # fmt: skip
            counts[int(contestants.first_token(one.run(y), y)[0])] += 1
        seen = counts > 0
        g = 2 * float((counts[seen] * np.log(counts[seen] / (law[seen] * batch))).sum())
        found[one.name] = float(chi2.sf(g, vocab - 1))
        if found[one.name] < 1e-6:
            raise SystemExit(f"wrong before timing: {one.name}, G-test p = {found[one.name]:.1e}")
    return found


def g_test(device: str, backend: str) -> float:
    """p-value of the first emitted token over independent requests, V = 64."""
    from scipy.stats import chi2

    from outrider import ops, verifiers
    from outrider.engine.step import run_kernel
    from outrider.types import Draws

    vocab, batch = 64, 4_096 if device == "cpu" else 32_768
    counts = np.zeros(vocab)
    x = make(1, 1, vocab, torch.float32, 0.4, 0, device)
    guess = x.draft_logits[0, 0].float().softmax(-1)
    laws = x.scores.laws._replace(
        logits_BRV=x.target_logits.expand(batch, -1, -1),
        inverse_temperature_B=torch.ones(batch, device=device),
    )
    drafted = x.cold.laws._replace(
        logits_BRV=x.draft_logits.expand(batch, -1, -1),
        inverse_temperature_B=torch.ones(batch, device=device),
    )
    for trial in range(5):
        torch.manual_seed(trial)
        tokens = torch.multinomial(guess, batch, replacement=True)
        ids = torch.stack([torch.zeros_like(tokens), tokens], 1)
        seeds = torch.arange(batch, device=device) + trial * batch
        draft = x.cold._replace(tokens_BN=ids, laws=drafted)
        with ops.use(backend):
            scores, keys = x.scores._replace(laws=laws), Draws(seeds, torch.zeros_like(seeds))
            found = run_kernel(verifiers.get("rejection"), draft, scores, keys)
        first = torch.where(found.count_B > 0, tokens, found.next_B)
        counts += torch.bincount(first, minlength=vocab).cpu().numpy()
    expected = x.target_logits[0, 0].double().softmax(-1).cpu().numpy() * counts.sum()
    seen = counts > 0
    g = 2 * float((counts[seen] * np.log(counts[seen] / expected[seen])).sum())
    p = float(chi2.sf(g, vocab - 1))
    if p < 1e-6:
        raise SystemExit(f"wrong before timing: G-test p = {p:.1e}")
    return p


def floor_of(x: Any, drafts: bool) -> timing.Run:
    """The pass that no exact method avoids on a CPU: exp and sum of every row, once."""
    rows = [x.target_logits.float()]
    if drafts:
        rows.append(x.draft_logits.float())
    flat = [row for part in rows for row in part.reshape(-1, part.shape[-1]).unbind()]
    out = torch.empty_like(flat[0])
    buffer = out.numpy()

    def run(_: int) -> float:
        whole = 0.0
        for row in flat:
            np.exp(row.numpy(), out=buffer)
            whole += float(out.sum())
        return whole

    return run


def forward_us(vocab: int) -> float:
    """One forward of a small transformer's layers and head on this CPU, for the end-to-end share.

    256 wide, 24 layers, six positions: the shipped pair's target with a head of `vocab` rows.
    """
    blocks = [torch.randn(256, 1024) for _ in range(48)]
    head, x = torch.randn(vocab, 256), torch.randn(6, 256)

    def run() -> None:
        for weight in blocks:
            (x @ weight).sum()
        x @ head.T

    run()
    times = []
    for _ in range(5):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return 1e6 * sorted(times)[2]


def measure_cpu(sizes: list[Any], repeats: int) -> list[dict[str, Any]]:
    """All CPU contestants at every size and distance."""
    found = []
    for batch, gamma, vocab, name in sizes:
        for distance in (*DISTANCES, "accept", "reject"):
            forced = distance if isinstance(distance, str) else ""
            share = 0.0 if isinstance(distance, str) else distance
            few = 2 if vocab > 100_000 else 4
            sets = [
                make(batch, gamma, vocab, DTYPES[name], share, seed, forced=forced)
                for seed in range(few)
            ]
            runs: dict[str, timing.Run] = {"empty call": lambda i: None}
            for one in contenders("cpu"):
                if one.compiled and (batch, gamma, vocab, name) not in COMPILED:
                    continue
                if batch == 1 or not one.single:
                    runs[one.name] = lambda i, one=one, sets=sets: one.run(sets[i % len(sets)])
            runs["copy of the same bytes"] = lambda i, x=sets[0]: (
                x.target_logits.clone(), x.draft_logits.clone()
            )  # fmt: skip
            runs["floor, target and draft"] = floor_of(sets[0], drafts=True)
            runs["floor, target"] = floor_of(sets[0], drafts=False)
            size = {"batch": batch, "gamma": gamma, "vocab": vocab, "dtype": name,
                    "distance": distance}  # fmt: skip
            step = forward_us(vocab)
            for row, times in timing.on_cpu(runs, repeats).items():
                found.append(size | {"row": row, "forward_us": step} | times)
            table(
                [
                    row
                    for row in found
                    if row["distance"] == distance
                    and row["vocab"] == vocab
                    and row["batch"] == batch
                    and row["gamma"] == gamma
                    and row["dtype"] == name
                ]
            )
    return found  # fmt: skip


def measure_gpu(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Ours on the whole grid, the slow ones on a diagonal; cold data, rotating inputs."""
    sizes = DIAGONAL[:4] if quick else GPU_SIZES
    shapes = [(*size, False) for size in sizes]
    shapes += [(*size, True) for size in sizes if size[0] > 1 and size[1] > 1]
    bandwidth = copy_bandwidth()
    return [row for shape in shapes for row in measure_shape(shape, bandwidth, repeats)]


def measure_shape(
    shape: tuple[int, int, int, str, bool],
    bandwidth: float,
    repeats: int,
    *,
    warm: bool = False,
    compiled: bool = True,
    device: str = "cuda",
    clock: Callable[..., dict[str, dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """Every contestant of a card at one (batch, gamma, vocab, dtype, ragged).

    `warm`: one input set again and again, in the cache where it fits; else sets in turn that
    together exceed it. Without `compiled` torch.compile's, which take a minute a size, stay out.
    """
    batch, gamma, vocab, name, ragged = shape
    row_bytes = vocab * DTYPES[name].itemsize * batch
    every = row_bytes * (2 * gamma + 1)
    sets = 1 if warm else max(2, min(20, -(-240_000_000 // every)))
    data = [
        make(batch, gamma, vocab, DTYPES[name], DISTANCES[i % 3], i, device, ragged=ragged)
        for i in range(sets)
    ]
    tiny = torch.zeros(1, device=device)
    runs: dict[str, tuple[timing.Run, bool]] = {
        "empty kernel": (lambda i: tiny.add_(0), True),
        "two empty kernels": (lambda i: tiny.add_(0).add_(0), True),
        "four empty kernels": (lambda i: tiny.add_(0).add_(0).add_(0).add_(0), True),
        "copy of the same bytes": (lambda i: data[i].target_logits.clone(), True),
    }
    size = {"batch": batch, "gamma": gamma, "vocab": vocab, "dtype": name, "sets": sets}
    size |= {"ragged": ragged, "distance": "ragged" if ragged else "mixed", "warm": warm}
    found, floors = [], {}
    for one in contenders("cuda"):
        if one.single and (batch > 1 or (batch, gamma, vocab, name) not in DIAGONAL):
            continue
        if (ragged and not one.ragged) or (one.compiled and not compiled):
            continue
        try:
            one.run(data[0])
        except Exception as error:  # a contestant that cannot run here must not end the run
            why = f"{type(error).__name__}: {str(error)[:200]}"
            print(f"dropped: {one.name}: {why}")
            found.append(size | {"row": one.name, "dropped": why})
            continue
        runs[one.name] = (lambda i, one=one: one.run(data[i]), one.graph)
        floors[one.name] = row_bytes * (gamma + 1 + gamma * one.drafts) / bandwidth * 1e6
    times = (clock or timing.on_gpu)(runs, sets, repeats)
    empty = times["empty kernel"]["median_us"]
    forward = WEIGHT_BYTES / bandwidth * 1e6
    for row, numbers in times.items():
        if "dropped" in numbers:
            print(f"dropped: {row}: {numbers['dropped']}")
            found.append(size | {"row": row} | numbers)
            continue
        extra = {"floor_us": floors.get(row)}
        if floors.get(row):
            extra["over_floor"] = numbers["median_us"] / floors[row]
            extra["less_empty_over_floor"] = (numbers["median_us"] - empty) / floors[row]
        found.append(size | {"row": row, "forward_us": forward} | numbers | extra)
    table(found)
    return found


def copy_bandwidth() -> float:
    """Bytes read per second by a large device copy (half of what it moves is written)."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        out.copy_(source)
    begin.record()
    for _ in range(10):
        out.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 2 * 10 * source.numel() / (begin.elapsed_time(end) * 1e-3)


def table(rows: list[dict[str, Any]]) -> None:
    """Print one size."""
    first = rows[0]
    rows = [row for row in rows if "dropped" not in row]
    print(
        f"\nB={first['batch']} gamma={first['gamma']} V={first['vocab']} {first['dtype']} "
        f"distance={first.get('distance', 'mixed')}"
    )
    base = next((row["median_us"] for row in rows if row["row"] == contestants.BASE), None)
    print(f"{'':30}{'median us':>11}{'p10':>9}{'p90':>9}{'x':>8}{'share of a step':>17}")
    for row in rows:
        times = f"{base / max(row['median_us'], 1e-3):8.2f}" if base else f"{'':8}"
        share = row["median_us"] / (row["median_us"] + row["forward_us"])
        print(
            f"{row['row']:30}{row['median_us']:11.1f}{row['p10_us']:9.1f}{row['p90_us']:9.1f}"
            f"{times}{100 * share:16.1f}%"
        )


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--out", type=Path, help="where to write the JSON document")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    versions = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }

    versions["transformers"] = transformers.__version__
    name = isa.processor()
    if given.device == "cpu":
        print("No GPU is used: CPU contestants only. With CUDA the same command runs the kernels.")
    else:
        name = torch.cuda.get_device_name()
    print("hardware:", name, versions)
    for missing, why in contestants.absent().items():
        print(f"{missing}: {why}")
    checks = check(given.device)
    print("correct before timing:", checks)
    with torch.inference_mode():
        if given.device == "cpu":
            sizes = SIZES[:3] if given.quick else SIZES
            rows = measure_cpu(sizes, 15 if given.quick else 40)
        else:
            rows = measure_gpu(20 if given.quick else 50, given.quick)
    document = {
        "hardware": name, "threads": given.threads, "versions": versions,
        "date": time.strftime("%Y-%m-%d"), "checks": checks, "absent": contestants.absent(),
        "graph_breaks": contestants.graph_breaks(make(1, 5, 512, torch.float32, 0.2, 0)),
        "rows": rows,
    }  # fmt: skip
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(document, indent=1) + "\n")
        print("written:", given.out)


if __name__ == "__main__":
    main()
