"""Prompts on the same file, engine by engine in turn: time for a token, first token, memory."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cli.console import Show
from outrider_lab.bench import intervals
from outrider_lab.certify.report import Row
from outrider_lab.papers.record import Store
from outrider_lab.peers.engines import LLAMA, OPENVINO, TRANSFORMERS, EngineGone, EngineProcess

OURS = "outrider"
PLAIN, DEFAULT, DRAFT = (f"{OURS}, {way}" for way in ("plain", "nothing set", "draft model"))
LLAMA_PLAIN = "llama.cpp"
MODES = ("NGRAM_SIMPLE", "NGRAM_CACHE", "NGRAM_MAP_K", "NGRAM_MOD")
_COMPILING, _PATIENCE = "still being compiled", 4
_NAMES = {"cpu": "ms a token, CPU", "wall": "wall"}
FIRSTS = 6  #: prompts whose first token is timed apart, which reads them once more
WIDTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class TextRequest:
    """What is measured of one file.

    model, draft  GGUF files
    own, peer     the Python of our process, and of the others'
    cores         that every process is pinned to; () none. Several: ways are compared by the
                  clock, as threads share a token's work
    modes         of llama.cpp besides plain decoding and its draft model
    engines       names of the peers that are there
    rounds        calls of ours on each prompt: sums are of the first, as the others' are (some of
                  them remember what they wrote); the fastest says whether a prompt loses to plain
    """

    model: Path
    draft: Path | None
    own: str
    peer: str
    engines: tuple[str, ...]
    modes: tuple[str, ...] = MODES
    cores: tuple[int, ...] = (0,)
    dtype: str = "auto"
    tokens: int = 64
    first_start: bool = True
    rounds: int = 1

    @property
    def threads(self) -> int:
        """As many as cores."""
        return max(len(self.cores), 1)

    @property
    def clock(self) -> str:
        """What is compared: processor time; of several threads that of the clock on the wall."""
        return "wall" if self.threads > 1 else "cpu"


def title_of(model: Path) -> str:
    """What a file is called on the page; one that says nothing is called after its folder.

    >>> title_of(Path("qwen/model.gguf")), title_of(Path("a/qwen.Q8_0.gguf"))
    ('qwen', 'qwen.Q8_0.gguf')
    """
    return model.parent.name if model.stem == "model" else model.name


@dataclass(frozen=True)
class Arm:
    """A way of decoding: the process that does it, and what it is asked besides."""

    name: str
    python: str
    words: dict[str, Any]
    ask: dict[str, Any] = field(default_factory=dict)


def arms(asked: TextRequest) -> list[Arm]:
    """Every way that the engines which are there can decode this file."""
    usual: dict[str, Any] = {
        "model": str(asked.model),
        "threads": asked.threads,
        "cores": list(asked.cores),
    }
    draft = {} if asked.draft is None else {"draft": str(asked.draft)}
    mine = usual | {"engine": "outrider", "dtype": asked.dtype}
    found = [
        Arm(PLAIN, asked.own, mine, {"way": "plain"}),
        Arm(DEFAULT, asked.own, mine, {"way": "default"}),
    ]
    if draft:
        found.append(Arm(DRAFT, asked.own, mine | draft, {"way": "default"}))
    if LLAMA.name in asked.engines:
        words = usual | {"engine": LLAMA.name}
        for mode in ("NONE", *asked.modes):
            name = LLAMA_PLAIN if mode == "NONE" else f"llama.cpp {mode}"
            found.append(Arm(name, asked.peer, words | {"mode": mode}))
        if draft:
            more = words | draft | {"mode": "DRAFT_SIMPLE"}
            found.append(Arm("llama.cpp, draft model", asked.peer, more))
    for engine, dtype in ((OPENVINO.name, "auto"), (TRANSFORMERS.name, "float32")):
        if engine in asked.engines:
            python = asked.own if engine == TRANSFORMERS.name else asked.peer
            words = usual | {"engine": engine, "dtype": dtype}
            found.append(Arm(engine, python, words | {"mode": "NONE"}))
            found.append(Arm(f"{engine}, lookup", python, words | {"mode": "PROMPT_LOOKUP"}))
    return found


@dataclass
class TextFigures:
    """What came of one file: rows of every arm by prompt, starts, and why some arms are left out.

    rows    cpu, wall, tokens, text, memory; of the first FIRSTS prompts first_cpu and first_wall,
            a call for one token; of ours `fastest`, the least of all rounds by the clock
    clock   what is compared, cpu or wall
    starts  cpu, wall, means by arm; `first` of ours with nothing in the cache, if asked for
    steps   milliseconds of our steps by nodes
    """

    kinds: list[str]
    rows: dict[str, list[Row]]
    starts: dict[str, Row]
    left_out: dict[str, str]
    steps: dict[int, float]
    clock: str = "cpu"

    def token(self, rows: Sequence[Row]) -> float:
        """Milliseconds a token of whole calls, by the clock that is compared."""
        return _token(rows, self.clock)


def run(
    asked: TextRequest,
    prompts: Sequence[tuple[str, list[int]]],
    store: Store,
    progress: Show,
) -> TextFigures:
    """Measure what the store does not have yet: prompt by prompt, arm by arm."""
    title = title_of(asked.model)
    found = TextFigures([kind for kind, _ in prompts], {}, {}, {}, {}, asked.clock)
    processes: dict[str, EngineProcess] = {}
    every = arms(asked)
    if asked.first_start:  # nothing else is in memory yet
        progress(f"{title}: first start", 0, 1)
        found.starts["first"] = store.get(f"{title}: first start", _first_start, every[0])
    try:
        for arm in every:
            key = str(arm.words)
            try:
                if key not in processes:
                    progress(f"{title}: {arm.name} starts", 0, 1)
                    processes[key] = started(arm)
                    processes[key].ask(prompt=prompts[0][1], tokens=8, **arm.ask)  # warm
            except EngineGone as gone:
                found.left_out[arm.name] = str(gone)
                continue
            found.rows[arm.name] = []
            process = processes[key]
            found.starts[arm.name] = store.get(f"{title}: start of {arm.name}", _started, process)
        mine = processes[str(every[0].words)]
        steps = store.get(f"{title}: steps", mine.ask, widths=WIDTHS)["ms"]
        found.steps = {int(n): ms for n, ms in steps.items()}
        here = [arm for arm in every if arm.name in found.rows]
        many = len(prompts) * len(here)
        for number, (_, prompt) in enumerate(prompts):
            for place, arm in enumerate(here):
                progress(f"{title}: {arm.name}", number * len(here) + place, many)
                key = f"{title}: {arm.name}, prompt {number}"
                process = processes[str(arm.words)]
                row = store.get(key, _answered, process, arm, prompt, asked.tokens, number < FIRSTS)
                found.rows[arm.name].append(dict(row))
            for call in range(1, asked.rounds):
                for arm in here:
                    if not arm.name.startswith(OURS):
                        continue
                    progress(f"{title}: {arm.name}, again", (number + 1) * len(here), many)
                    key = f"{title}: {arm.name}, prompt {number}, call {call + 1}"
                    process = processes[str(arm.words)]
                    again = store.get(key, _answered, process, arm, prompt, asked.tokens, False)
                    row = found.rows[arm.name][number]
                    row["fastest"] = min(_fastest(row, found.clock), again[found.clock])
    finally:
        for process in processes.values():
            process.close()
    return found


def started(arm: Arm) -> EngineProcess:
    """Its process; ours with compiled kernels, which a busy machine's first start may not have."""
    for _ in range(_PATIENCE):
        process = EngineProcess(arm.python, arm.words)
        if _COMPILING not in str(process.ready["means"]):
            break
        process.close()
    return process


def _started(process: EngineProcess) -> Row:
    return {"wall": process.start, "cpu": process.ready["cpu"], "means": process.ready["means"]}


def _first_start(arm: Arm) -> Row:
    """Ours with an empty cache folder: what is compiled and measured once, is so now."""
    with tempfile.TemporaryDirectory() as folder:
        process = EngineProcess(arm.python, arm.words, {"XDG_CACHE_HOME": folder})
        found = _started(process)
        process.close()
    return found


def _answered(process: EngineProcess, arm: Arm, prompt: list[int], tokens: int, apart: bool) -> Row:
    """One answer; `apart`: its first token besides, by a call of its own."""
    whole = process.ask(prompt=prompt, tokens=tokens, **arm.ask)
    names = ("cpu", "wall", "tokens", "text", "memory", "steps")
    row: Row = {name: whole[name] for name in names if name in whole}
    if apart:
        first = process.ask(prompt=prompt, tokens=1, **arm.ask)
        row |= {"first_cpu": first["cpu"], "first_wall": first["wall"]}
    return row


def best_peer(found: TextFigures) -> str | None:
    """The other engine's way with the least time in sum; None if none is there."""
    theirs = [name for name in found.rows if not name.startswith(OURS)]
    return min(theirs, key=lambda name: found.token(found.rows[name]), default=None)


def _token(rows: Sequence[Row], name: str) -> float:
    """Milliseconds a token of whole calls."""
    return float(1e3 * sum(row[name] for row in rows) / sum(row["tokens"] for row in rows))


def _fastest(row: Row, clock: str) -> float:
    """Seconds: the least of all rounds, where there are several."""
    return float(row["fastest" if "fastest" in row else clock])


def _after_first(rows: Sequence[Row], clock: str) -> float:
    """Milliseconds a token behind the first, where that is known."""
    apart = [row for row in rows if "first_cpu" in row]
    spent: float = sum(row[clock] - row[f"first_{clock}"] for row in apart)
    return 1e3 * spent / max(sum(int(row["tokens"]) - 1 for row in apart), 1)


def table(found: TextFigures) -> list[Row]:
    """A row for each arm; `against` is the best peer's time over the arm's, with its interval."""
    best = best_peer(found)
    return [_row(found, name, best) for name in found.rows]


def _row(found: TextFigures, name: str, best: str | None) -> Row:
    rows, plain = found.rows[name], found.rows[PLAIN]
    firsts = sorted(1e3 * row["first_wall"] for row in rows if "first_wall" in row)
    row: Row = {
        "engine": name,
        **{_NAMES[clock]: _token(rows, clock) for clock in sorted(_NAMES, key=found.clock.__ne__)},
        "behind the first token": _after_first(rows, found.clock),
        "first token, ms (median)": firsts[len(firsts) // 2],
        "peak MB": max(one["memory"] for one in rows),
        "start, s": found.starts[name]["wall"],
    }
    if best is not None:
        row["times the best other's speed"] = _times(found, found.rows[best], rows)
    row["times our plain"] = _times(found, plain, rows)
    of_plain = (
        _fastest(a, found.clock) / a["tokens"] / (_fastest(b, found.clock) / b["tokens"])
        for a, b in zip(plain, rows, strict=True)
    )
    row["worst prompt, of our plain"] = min(of_plain)
    row["texts as our plain"] = f"{same_texts(plain, rows)} of {len(rows)}"
    return row


def _times(found: TextFigures, others: Sequence[Row], mine: Sequence[Row]) -> str:
    """How many times faster in sum, as '1.52 [1.40, 1.66]'."""

    def value(units: Sequence[int]) -> float:
        return found.token([others[n] for n in units]) / found.token([mine[n] for n in units])

    ratio = intervals.interval(value, len(mine), intervals.LOG)
    return f"{ratio.value:.2f} {ratio.text(2)}".rstrip()


def same_texts(one: Sequence[Row], other: Sequence[Row]) -> int:
    """How many texts are the same, but for white space at their ends."""
    return sum(a["text"].strip() == b["text"].strip() for a, b in zip(one, other, strict=True))


def by_kind(found: TextFigures) -> list[Row]:
    """Milliseconds a token, by kind of prompt."""
    kinds = list(dict.fromkeys(found.kinds))
    return [
        {"engine": name} | {kind: found.token(list(_of(found, name, kind))) for kind in kinds}
        for name in found.rows
    ]


def _of(found: TextFigures, name: str, kind: str) -> Iterator[Row]:
    return (row for row, its in zip(found.rows[name], found.kinds, strict=True) if its == kind)
