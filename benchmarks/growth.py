"""What a step costs by length: plain, with copies, recall, and an untrained head; 1 to 16 rows.

    python benchmarks/growth.py MODEL [--lengths 1024 32768] [--rows 1 4 16]

Prompts are not read: the entries of the first 64 tokens stand in every slot behind them, which
costs a step what a read prompt would. Their tokens are drawn at random, as are those that are
written (T = 1), and the head has never been trained, so that drafts are of little use: what is
asked is what drafting costs where it cannot pay. Planners decide as they do in runs. Arms take
turns, blocks of steps of the same rows; told is the median block of each: thread CPU milliseconds
of a step inside the target and outside of it, and speed beside plain decoding's, of the median
block and of all of them together: whether a guess is kept decides about a block. The bytes that a
plain step reads are the weights and the keys and values of all rows; a term that grows faster than
they do from one length to the next is marked. Writes growth.json and growth.svg to DIR (--out).
"""

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig

import outrider
from outrider import Engine, EngineRun, Request, SamplingParams, StopConditions
from outrider.drafters import PromptLookup, Root
from outrider.engine.speculation_policy import Adaptive
from outrider.models import prefill
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config
from outrider.models.heads.formats import save

MOST = 20  #: tokens of a step
LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
PLAIN, COPIES, RECALL, HEAD = "plain", "copies", "recall", "head"
MARGIN = 1.1  #: of the bytes' growth: above it a term is marked
LEAST = 0.97  #: of plain decoding's speed


def untrained(target: Any, folder: str) -> str:
    """A folder with an EAGLE-3 head of the target's sizes that nobody has trained."""
    about = target.runner
    layer = LlamaConfig(
        vocab_size=about.vocab_size,
        hidden_size=about.hidden,
        intermediate_size=2 * about.hidden,
        num_hidden_layers=1,
        num_attention_heads=about.heads,
        num_key_value_heads=about.kv_heads,
        head_dim=about.size,
        max_position_embeddings=target.context,
    )
    torch.manual_seed(0)
    known = min(8192, about.vocab_size)
    layers = about.layers
    head = Eagle3(
        Eagle3Config(layer, aux_layers=(2, layers // 2, layers - 2), draft_vocab_size=known),
        embedding_VE=torch.randn(about.vocab_size, about.hidden) / 50,
        ids_K=torch.arange(known),
    ).bfloat16()
    save(head, folder, verifier="growth.py")
    return folder


def engines(model: str, arms: list[str], folder: str, dtype: str) -> dict[str, Engine]:
    """One for each arm; all but the head's share the target."""
    base = outrider.load(model, threads=1, dtype=dtype)
    target = base.engine.target
    found = {PLAIN: Engine(target, Root(), "match")}
    for name in arms:
        if name == RECALL:
            found[name] = base.engine
        elif name == COPIES:
            found[name] = Engine(target, PromptLookup(), "match", Adaptive())
        elif name == HEAD:
            head = untrained(target, folder)
            found[name] = outrider.load(model, head, threads=1, dtype=dtype).engine
    return found


def begun(
    engine: Engine, rows: int, length: int, steps: int, temperature: float = 1.0, text: int = 0
) -> EngineRun:
    """A run whose rows all have so many tokens of one of many texts, behind its first steps."""
    draws = random.Random(f"{length} {text}" if text else length)
    vocab = engine.target.vocab_size
    requests = [
        Request(
            [draws.randrange(vocab) for _ in range(length)],
            SamplingParams(temperature, seed=row),
            StopConditions(MOST * steps, ()),
        )
        for row in range(rows)
    ]
    room = length + MOST * steps + engine.drafter.shapes[0].max_nodes
    run = EngineRun(engine, rows, min(room, engine.target.context))
    run.submit_all(requests)
    with prefill.skimming():
        while not run.stats.engine_steps:
            run.step()
    return run


def block(run: EngineRun, steps: int, model: Any) -> dict[str, float]:
    """So many steps: milliseconds of one, those of them inside the target, tokens of all rows."""
    inside, tokens, forward = 0.0, 0, type(model).forward

    def clocked(*given: Any, **named: Any) -> Any:
        nonlocal inside
        started = time.thread_time()
        try:
            return forward(*given, **named)
        finally:
            inside += time.thread_time() - started

    with mock.patch.object(type(model), "forward", clocked):
        started = time.thread_time()
        for _ in range(steps):
            tokens += sum(len(output.token_ids) for output in run.step())
        took = time.thread_time() - started
    told = {"step": took, "target": inside, "outside": took - inside}
    return {name: 1e3 * value / steps for name, value in told.items()} | {"tokens": tokens / steps}


def measured(
    every: dict[str, Engine], rows: int, length: int, asked: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Medians of each arm's blocks, of all texts; arms take turns."""
    steps, blocks = asked.steps, asked.blocks
    how = rows, length, steps * (blocks + 1), asked.temperature
    found: dict[str, list[dict[str, float]]] = {name: [] for name in every}
    for text in range(asked.texts):
        runs = {name: begun(engine, *how, text) for name, engine in every.items()}
        for number in range(blocks + 1):
            for name, run in runs.items():
                told = block(run, steps, every[name].target)
                if number:  # the first one warms up
                    found[name].append(told)
    medians = {
        name: {key: statistics.median(one[key] for one in told) for key in told[0]}
        for name, told in found.items()
    }
    for name, told in found.items():
        each = [
            (plain["step"] / plain["tokens"]) / (mine["step"] / mine["tokens"])
            for plain, mine in zip(found[PLAIN], told, strict=True)
        ]
        medians[name]["of plain"] = statistics.median(each)
        medians[name]["in sum"] = _in_sum(found[PLAIN]) / _in_sum(told)
    return medians


def _in_sum(blocks: list[dict[str, float]]) -> float:
    """Milliseconds of a token, over all blocks."""
    return sum(one["step"] for one in blocks) / sum(one["tokens"] for one in blocks)


def bytes_read(engine: Engine, weights: int, rows: int, length: int) -> int:
    """Of a plain step: the weights once, keys and values of every row."""
    batch = begun(engine, 1, prefill.READ, 1).batch
    assert batch is not None
    stacks = batch.cache.stacks  # [planes, rows, heads, slots, size]
    each = sum(one.shape[0] * one.shape[2] * one.shape[4] * one.element_size() for one in stacks)
    return weights + rows * length * each


def marked(table: list[dict[str, Any]]) -> list[str]:
    """Sentences about what grows faster than the bytes read, and about arms that lose to plain.

    The target's part is plain decoding's: other arms have it read more where they draft more.
    """
    said = []
    for one in table:
        for name, told in one["arms"].items():
            for key, of in (("of plain", ""), ("in sum", ", all blocks together")):
                if told[key] < LEAST:
                    said.append(
                        f"{one['rows']} rows of {one['length']} tokens: {name} has "
                        f"{told[key]:.3f} of plain decoding's speed{of}"
                    )
    for before, after in itertools.pairwise(table):
        if before["rows"] != after["rows"]:
            continue
        bytes_grow = after["bytes"] / before["bytes"]
        terms = [(PLAIN, "target"), *((name, "outside") for name in after["arms"])]
        for name, term in terms:
            grows = after["arms"][name][term] / before["arms"][name][term]
            if grows > MARGIN * bytes_grow:
                said.append(
                    f"{after['rows']} rows, {before['length']} to {after['length']} tokens: "
                    f"{name}, {term}: {grows:.2f} times, the bytes {bytes_grow:.2f}"
                )
    return said


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds a token and row by length, and beside plain decoding."""
    from outrider_lab import drawing

    counts = sorted({one["rows"] for one in table})
    figure, axes = drawing.panels(2, len(counts), (3.4 * len(counts), 5.6))
    for column, rows in enumerate(counts):
        mine = [one for one in table if one["rows"] == rows]
        at = [one["length"] for one in mine]
        for name in mine[0]["arms"]:
            steps = [one["arms"][name]["step"] / one["arms"][name]["tokens"] for one in mine]
            axes[0][column].plot(at, steps, marker="o", label=name)
            axes[1][column].plot(at, [one["arms"][name]["of plain"] for one in mine], marker="o")
        first = mine[0]["arms"][PLAIN]["step"] / mine[0]["arms"][PLAIN]["tokens"]
        read = [first * one["bytes"] / mine[0]["bytes"] for one in mine]
        axes[0][column].plot(at, read, "k:", label="as the bytes read")
        axes[1][column].axhline(LEAST, color="k", linestyle=":")
        axes[0][column].set_title(f"{rows} rows" if rows > 1 else "1 row")
        axes[1][column].set_xlabel("tokens of context")
        for axis in (axes[0][column], axes[1][column]):
            axis.set_xscale("log", base=2)
    axes[0][0].set_ylabel("ms a token, CPU")
    axes[1][0].set_ylabel("speed of plain")
    axes[0][0].legend(frameon=False, fontsize=8)
    drawing.write(figure, [path])


def tables(table: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """A table for each number of rows, as the page beside other engines has them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in table:
        for name, told in one["arms"].items():
            found.setdefault(f"{one['rows']} rows" if one["rows"] > 1 else "1 row", []).append(
                {
                    "tokens of context": one["length"],
                    "MB read": one["bytes"] // 1_000_000,
                    "engine": name,
                    "ms a step": told["step"],
                    "of it outside the target": told["outside"],
                    "tokens a row": told["tokens"] / one["rows"],
                    "times plain": told["of plain"],
                    "in sum": told["in sum"],
                }
            )
    return found


def line(rows: int, length: int, read: int, name: str, told: dict[str, float]) -> str:
    """One arm at one length, in words."""
    return (
        f"{rows:2d} rows of {length:5d} tokens ({read / 1e6:.0f} MB): {name:7s} "
        f"{told['step']:.2f} ms a step, {told['outside']:.2f} outside the target, "
        f"{told['tokens'] / rows:.2f} tokens a row, {told['of plain']:.3f} of plain, "
        f"{told['in sum']:.3f} in sum"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a GGUF file")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--arms", nargs="*", default=[COPIES, RECALL, HEAD], help="beside plain decoding, or none"
    )
    parser.add_argument("-t", "--temperature", type=float, default=1.0)
    parser.add_argument(
        "--texts",
        type=int,
        default=1,
        help="of each length: few steps of one hang on two or three drafts",
    )
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--slots", type=int, default=1 << 17, help="most of all rows together")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path("growth"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    source = Path(asked.model)
    files = [source] if source.is_file() else list(source.glob("*.safetensors"))
    weights = sum(file.stat().st_size for file in files)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        every = engines(asked.model, asked.arms, folder, asked.dtype)
        written = MOST * asked.steps * (asked.blocks + 1)
        nodes = max(engine.drafter.shapes[0].max_nodes for engine in every.values())
        most = every[PLAIN].target.context - written - nodes
        lengths = sorted({min(length, most) for length in asked.lengths})
        for rows in asked.rows:
            for length in lengths:
                if rows * length > asked.slots:
                    continue
                arms = measured(every, rows, length, asked)
                read = bytes_read(every[PLAIN], weights, rows, length)
                table.append({"rows": rows, "length": length, "bytes": read, "arms": arms})
                for name, told in arms.items():
                    print(line(rows, length, read, name, told), flush=True)
    said = marked(table)
    print(
        *(said or ["no term grows faster than the bytes read, and no arm loses to plain decoding"]),
        sep="\n",
    )
    told = {"model": asked.model, "table": table, "faster than the bytes": said}
    about = "; ".join(said) or "no term grows faster than the bytes read"
    told |= {"tables": tables(table), "about": f"Thread CPU time, one thread. {about}."}
    (asked.out / "growth.json").write_text(json.dumps(told, indent=1) + "\n")
    draw(table, asked.out / "growth.svg")


if __name__ == "__main__":
    main()
