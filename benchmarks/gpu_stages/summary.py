"""The short table at the end, from the result files alone."""

from collections.abc import Mapping
from typing import Any

from gpu_stages.record import DONE, DamagedFile, Record

Results = dict[str, dict[str, Any]]
BASE = "transformers"
OURS = ("one kernel, LSE kept", "two kernels, LSE kept")
#: Accept and good columns of docs/kernels.md, microseconds, on a card that copies 4.3 TB/s.
TARGETS = {
    "B=1 gamma=5 V=32000 bf16": (9.1, 7.1),
    "B=1 gamma=5 V=151936 bf16": (9.5, 7.5),
    "B=1 gamma=20 V=256000 bf16": (12.0, 9.9),
    "B=8 gamma=5 V=151936 bf16": (13.0, 11.0),
    "B=64 gamma=5 V=151936 bf16": (43.0, 38.0),
}


#: What reading the target's rows takes there: on another card this part is another.
FLOORS = {
    "B=1 gamma=5 V=32000 bf16": 0.09,
    "B=1 gamma=5 V=151936 bf16": 0.42,
    "B=1 gamma=20 V=256000 bf16": 2.5,
    "B=8 gamma=5 V=151936 bf16": 3.4,
    "B=64 gamma=5 V=151936 bf16": 27.0,
}


def targets(key: str, floor_us: float | None) -> tuple[float, float]:
    """Accept and good on a card that takes so long to read the target's rows; None: as the page's.

    >>> targets("B=64 gamma=5 V=151936 bf16", 39.0)
    (55.0, 50.0)
    """
    more = 0.0 if floor_us is None else floor_us - FLOORS[key]
    accept, good = TARGETS[key]
    return accept + more, good + more


def text(records: Mapping[str, Record | DamagedFile]) -> str:
    """The table: how far each stage is, then what matters most of each."""
    lines = ["stage | done | failed | left | says", "---|---|---|---|---"]
    details: list[str] = []
    for name, record in records.items():
        if isinstance(record, DamagedFile):
            lines.append(f"{name} | ? | ? | ? | {record}")
            continue
        done = sum(record.state(key) == DONE for key in record.planned)
        failed = len(record.failures)
        left = len(record.planned) - done - failed
        says = SAYS[name](record.results()) if record.items else ["not begun"]
        lines.append(f"{name} | {done} | {failed} | {left} | {says[0] if says else ''}")
        details += [f"  {line}" for line in says[1:]]
        details += [f"  {name}: {line}" for line in _failures(record.failures)]
    return "\n".join([*lines, *details])


def _failures(found: dict[str, str]) -> list[str]:
    """One line for each way to fail: who failed first, how many with them, and why."""
    ways: dict[str, list[str]] = {}
    for key, why in found.items():
        ways.setdefault(_first(why), []).append(key)
    return [
        f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}: {why}"
        for why, keys in ways.items()
    ]


def _first(why: str) -> str:
    return (why.splitlines() or [""])[0][:160]


def environment(found: Results) -> list[str]:
    """The card, the versions, the ceilings."""
    machine, packages = found.get("machine", {}), found.get("packages", {})
    top = found.get("ceilings", {})
    line = f"{machine.get('gpu', machine.get('processor', '?'))}, torch {packages.get('torch')}"
    if top:
        line += f", copy {top['copy_tb_s']:.2f} TB/s, launch {top['launch_us']:.1f} us"
    return [line]


def correctness(found: Results) -> list[str]:
    """Tests passed of those that ran."""
    runs = [one for one in found.values() if "passed" in one]
    passed, failed = (sum(one[key] for one in runs) for key in ("passed", "failed"))
    checkers = [name for name in ("memcheck", "racecheck") if found.get(name, {}).get("code") == 0]
    clean = f"; clean: {', '.join(checkers)}" if checkers else ""
    return [f"{passed} tests passed, {failed} failed{clean}"]


def verification(found: Results) -> list[str]:
    """Ours against transformers' function and the targets."""
    lines = []
    for key, result in found.items():
        times = {
            row["row"]: row["median_us"] for row in result.get("rows", []) if "median_us" in row
        }
        floors = {row["row"]: row.get("floor_us") for row in result.get("rows", [])}
        name = min((n for n in OURS if n in times), key=lambda n: times[n], default=None)
        if "geometries" in result:
            for row, best in result["best"].items():
                lines.append(f"{key}: {row} {best['median_us']:.1f} us with {best['geometry']}")
        if name is None or (key not in TARGETS and BASE not in times):
            continue
        line = f"{key}: {name} {times[name]:.1f} us"
        if BASE in times:
            line += f", {times[BASE] / times[name]:.1f}x of transformers ({times[BASE]:.0f} us)"
        if key in TARGETS:
            accept, good = targets(key, floors.get(name))
            met = "good" if times[name] <= good else "accept" if times[name] <= accept else "MISSED"
            line += f"; target {accept:.1f} / {good:.1f} us: {met}"
        lines.append(line)
    shapes = sum("rows" in result for result in found.values())
    return [f"{shapes} shapes", *lines[:12]]


def end_to_end(found: Results) -> list[str]:
    """Tokens per second of each arm, by pair and batch."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in found.values():
        if "tokens_s" in result:
            groups.setdefault((result["pair"], result["batch"]), []).append(result)
    lines = []
    for (pair, batch), arms in groups.items():
        best = ", ".join(f"{one['arm']} {one['tokens_s']:.0f}" for one in arms)
        lines.append(f"{pair}, B={batch}, tokens/s: {best}")
    return [f"{sum(map(len, groups.values()))} arms", *lines]


def pretrained(found: Results) -> list[str]:
    """Equal texts, then tokens per second of each arm, by batch."""
    lines, batches = [], dict[int, list[str]]()
    for key, result in found.items():
        if "tokens_s" in result:
            said = f"{result['arm']} {result['tokens_s']:.0f}"
            batches.setdefault(result["batch"], []).append(said)
        elif "texts" in key:
            each = [f"{arm} {one['equal']} of {one['texts']}" for arm, one in result.items()]
            lines.append(f"{key}: {', '.join(each)}")
    for batch, arms in batches.items():
        lines.append(f"B={batch}, tokens/s: {', '.join(arms)}")
    return [f"{sum(map(len, batches.values()))} arms", *lines]


def server(found: Results) -> list[str]:
    """Seconds until it listens and tokens per second by clients, of each arm."""
    lines = []
    for arm, result in found.items():
        each = [f"{key} {r['tokens_s']:.0f}" for key, r in result.items() if "clients" in key]
        if each:
            lines.append(f"{arm}, ready in {result['ready_s']:.1f} s, tokens/s: {', '.join(each)}")
    return [f"{len(lines)} servers", *lines]


def paper(found: Results) -> list[str]:
    """Summed time in the function, less than transformers'."""
    lines = []
    for key, result in found.items():
        rows = [f"{r['method']} {100 * r['sum_less']:+.0f} %" for r in result.get("main", [])]
        if rows:
            lines.append(f"{key}: summed time saved: {', '.join(rows)}")
    return [f"{len(found)} parts", *lines]


def growth(found: Results) -> list[str]:
    """Milliseconds of a step at each point."""
    lines = [f"{key} {r['ms_per_step']:.2f} ms" for key, r in found.items() if "ms_per_step" in r]
    return [f"{len(lines)} points", *(", ".join(lines[i : i + 4]) for i in range(0, len(lines), 4))]


SAYS = {
    "environment": environment, "correctness": correctness, "verification": verification,
    "end_to_end": end_to_end, "pretrained": pretrained, "server": server,
    "paper": paper, "growth": growth,
}  # fmt: skip
