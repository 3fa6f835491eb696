"""A short measurement at load: which threads, dtype and packing run this model fastest on this CPU.

The result is kept in the user's cache directory, keyed by model shape, torch and processor. Every
choice can be overridden at load.

A result may have been taken in a bad second: another program had a core, and two threads seemed no
faster than one. So it is doubted until a later start has measured the same while nobody held it up;
the second, the fourth, the eighth ... start measures anew, a part of what the first one took, and
what the two agree on stays. What steps cost (`recall_costs`) is doubted in the same way.
"""

import atexit
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from outrider.costs import Costs, due
from outrider.models import budget, isa

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from outrider.types import LanguageModel

    #: Target and draft model.
    Models: TypeAlias = tuple[LanguageModel, LanguageModel | None]
    Build: TypeAlias = Callable[["Setting"], Models]

#: More threads must win by this factor: beside a busy neighbour they cost more than they give.
MORE_THREADS = 1.15
#: What the OpenMP runtimes read about idle threads.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_PROC_BIND")
#: What torch and oneDNN read about which kernels to run.
KERNELS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
_PASSES = 3
_SHARE = 0.6  #: of a start's budget; the rest is for what whole steps cost
_AGAIN = 0.3  #: the same of a start that measures anew
_ALIKE = 1.05  #: a setting that is slower by less is kept: texts may depend on it
_DISTURBED = 0.2  #: of the time that several threads are timed: what others may use of their cores
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  #: of a weight
_WORTH_ANOTHER_LOOK = 2.0  #: seen on a shared machine: 1.7 times the least time for a second
_CORES = "/proc/stat"  #: of Linux: what cores did, in ticks
_CONTEXT = 96  #: committed tokens in the cache while timing


@dataclass(frozen=True)
class Setting:
    """One way to run a model on a CPU."""

    threads: int
    dtype: str
    packed: bool
    draft_dtype: str | None = None  #: what draft models' weights are kept in; None: `dtype`


@dataclass
class Calibration:
    """What was chosen, and what else was tried."""

    setting: Setting
    candidates: list[dict[str, int | str | float]] = field(default_factory=list)
    cached: bool = False
    starts: int = 1  #: that have had it, this one included
    agreed: bool = False  #: two of them measured it

    @property
    def doubted(self) -> bool:
        """Whether this start is to measure anew."""
        return due(self.starts) and not self.agreed

    def scores(self) -> dict[Setting, float]:
        """Milliseconds of all that was tried."""
        scores: dict[Setting, float] = {}
        for note in self.candidates:
            values: dict[str, Any] = {**note}
            took = float(values.pop("score_ms"))
            scores[Setting(**values)] = took
        return scores


def cache_dir() -> Path:
    """Where calibrations are kept: $XDG_CACHE_HOME/outrider or ~/.cache/outrider; where there is
    no home, or none that can be written, a folder for temporary files."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:  # a relative one is left alone, as its specification has it
        usual = (given if given.is_absolute() else Path.home() / ".cache") / "outrider"
        usual.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError):  # an unknown user; a folder that is not to be written
        return homeless()
    return usual


@cache
def homeless() -> Path:
    """The user's own folder among temporary files, or one of this process alone.

    Libraries are loaded from it: one that others own or may look into is left alone.
    """
    user = os.getuid() if os.name == "posix" else 0
    try:
        kept = Path(tempfile.gettempdir(), f"outrider-{user}")
        kept.mkdir(mode=0o700, exist_ok=True)
        found = kept.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077:
            return kept
    except OSError:
        pass  # a file has that name, or there is no place for temporary files
    try:
        own = tempfile.mkdtemp(prefix="outrider-")
    except OSError:
        return Path(os.devnull, "outrider")  # what cannot be written is not kept
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def key(*configs: "PretrainedConfig | None", about: str = "") -> str:
    """Identity of model shapes, software and processor, and of anything else."""
    import torch

    from outrider.models.cpu_kernels import build  # which keeps libraries beside calibrations

    shapes = [c.to_json_string() for c in configs if c is not None]
    parts = [
        *shapes,
        about,
        torch.__version__,
        isa.processor(),
        # Processors of one name differ behind a hypervisor.
        isa.cpuinfo("flags", "Features") or "",
        str(cores()),
        # Whether idle threads spin or sleep can turn the verdict on two threads around.
        *(f"{name}={os.environ.get(name)}" for name in (*WAITING, *KERNELS, "OUTRIDER_COMPILED")),
        f"isa={isa.level().name}",
        # What is measured without compiled kernels is no measure of a start that has them.
        f"kernels={build.identity()}",
        "18",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def cores() -> int:
    """How many this process may use: a container may run on all of a machine's, for the time of a
    few."""
    try:
        return min(len(os.sched_getaffinity(0)), _quota())
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _quota(groups: Path = Path("/sys/fs/cgroup"), told: Path = Path("/proc/self/cgroup")) -> int:
    """So many cores' time control groups allow, rounded up; very many where they set no limit."""
    files = [groups / f"cpu/cpu.cfs_{name}_us" for name in ("quota", "period")]
    least = _limit(" ".join(read for one in files if (read := _read(one))))
    own = next((line[4:] for line in _read(told).splitlines() if line.startswith("0::/")), "")
    for group in (groups / own, *(groups / own).parents):  # this group's, and of those around it
        least = min(least, _limit(_read(group / "cpu.max")))
    return least


def _limit(said: str) -> int:
    """The cores of "microseconds period"; the first is max or -1 where there is no limit."""
    quota, period, *_ = [*said.split(), "", ""]
    limited = quota.isdigit() and period.isdigit()
    return max(-(-int(quota) // max(int(period), 1)), 1) if limited else sys.maxsize


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def recall(identity: str) -> Calibration | None:
    """An earlier result; None: there is none, it cannot be read, or nothing was measured for it."""
    try:
        raw = json.loads(_file("calibration", identity).read_text())
        more = int(raw.get("starts", 1)) + 1, bool(raw.get("agreed", False))
        found = Calibration(Setting(**raw["setting"]), list(raw["candidates"]), True, *more)
        return found if found.scores() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(identity: str, calibration: Calibration) -> None:
    """Keep a result."""
    keep(_file("calibration", identity), json.dumps(asdict(calibration), indent=1))


def recall_costs(identity: str) -> Costs | None:
    """Costs of whole steps that were measured earlier, beside the calibration; None: not yet.

    While any are doubted the start is counted.
    """
    try:
        kept = Costs.parsed(_file("costs", identity).read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    found = replace(kept, starts=kept.starts + 1)
    if not found.agreed >= found.times.keys():
        remember_costs(identity, found)
    return found


def remember_costs(identity: str, costs: Costs) -> None:
    """Keep them."""
    keep(_file("costs", identity), costs.text())


def _file(kind: str, identity: str) -> Path:
    return cache_dir() / f"{kind}-{identity}.json"


def keep(path: Path, text: str) -> None:
    """Write a file of the cache folder, whole; a read-only home is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(text)
        scratch.replace(path)
    except OSError:
        return


def cost(model: "LanguageModel", widths: Sequence[int], repeats: int = 5) -> dict[int, float]:
    """Milliseconds of one forward over n nodes of a chain, the least of interleaved repeats.

    The least, because a busy neighbour only ever adds time: medians taken on a loaded machine chose
    the wrong packing. One thread is timed by its own clock, which stands while others run. Fewer
    nodes never cost more than others do, as they could be padded. A budget that is over ends it
    behind one look at each.
    """
    import torch

    from outrider.models.prefill import causal

    room = _CONTEXT + max(widths) + 8
    capacity = -(-room // 128) * 128
    cache = model.open(1, capacity, model.probe(1))
    device = torch.device(model.device)
    times: dict[int, list[float]] = {n: [] for n in widths}
    allowed = budget.current()
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    with torch.inference_mode():
        at = torch.arange(_CONTEXT, device=device)[None]
        model.forward(cache, causal(at % model.vocab_size, at, capacity), last=1)
        for _ in range(repeats + 1):
            for n in widths:
                at = _CONTEXT + torch.arange(n, device=device)[None]
                started = clock()
                model.forward(cache, causal(at % model.vocab_size, at, capacity))
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times[n].append((clock() - started) * 1e3)
            if allowed.over():
                break
    least = {n: min(t[1:] or t) for n, t in times.items()}  # the first round warms up
    return {n: round(min(least[m] for m in widths if m >= n), 4) for n in widths}


def others() -> float:
    """Seconds for which this process's cores ran anything else, counted from whenever.

    0.0 where no system says. Not what threads of this process waited for a core: where some of them
    spin they wait for each other.
    """
    try:
        lines = [line.split() for line in Path(_CORES).read_text().splitlines()]
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return 0.0
    busy = 0
    for name, *counts in lines:
        if name in mine:
            user, nice, system, _idle, _waiting, *more = map(int, counts[:8])
            busy += user + nice + system + sum(more)
    return busy / ticks - time.process_time() if busy else 0.0


def choose(
    build: "Build",
    *,
    threads: Sequence[int],
    dtypes: Sequence[str],
    packings: Sequence[bool],
    num_speculative_tokens: int,
) -> Calibration:
    """Time every combination and take the one with the lowest cost of decoding both ways.

    The score is the sum of a plain step t(1) and of a speculative step t(n) + gamma t_draft: no
    choice that slows ordinary decoding down can win by flattering the ratio. More threads than the
    fewest on offer must win by MORE_THREADS. Combinations near the best are timed again, in
    reverse order, and keep their least time: a busy neighbour's second falls on one of them.

    Where the budget ends before all are timed, the rest are estimated from the fastest that was, by
    the bytes that their weights take: reading them is what a step of a few nodes waits for. Where
    it ends before the first is built, that one is taken.
    """
    every = [Setting(c, d, p) for d in dtypes for p in packings for c in threads]
    if budget.current().over():
        return Calibration(every[0], [])
    with budget.current().part(_SHARE):
        scores = _timed(build, every, num_speculative_tokens, _PASSES)
    fastest = min(scores, key=lambda setting: scores[setting])
    for setting in every:
        if setting not in scores:
            bytes_of = _BYTES.get(setting.dtype, 2) / _BYTES.get(fastest.dtype, 2)
            scores[setting] = scores[fastest] * max(bytes_of, 1.0)
    ranked = sorted(scores, key=lambda setting: _counted(setting, scores[setting], threads))
    return Calibration(ranked[0], [_note(setting, scores[setting]) for setting in ranked])


def choose_again(
    before: Calibration, build: "Build", *, threads: Sequence[int], num_speculative_tokens: int
) -> Calibration:
    """What an earlier start chose, timed once more beside what was near it then.

    It stays, and two starts agree, unless another one is clearly faster now: then that one is
    taken, and doubted. Where others used the cores of several threads meanwhile nothing is known.
    """
    if budget.current().over():
        return before
    took = {before.setting: 0.0, **before.scores()}
    near = _WORTH_ANOTHER_LOOK * min(filter(None, took.values()), default=0.0)
    left = [s for s in took if took[s] <= near or s == before.setting]
    left.sort(key=lambda s: (s.dtype, s.packed) != (before.setting.dtype, before.setting.packed))
    before_it, began = others(), time.perf_counter()
    with budget.current().part(_AGAIN):
        scores = _timed(build, left, num_speculative_tokens, 1)
    disturbed = others() - before_it > _DISTURBED * (time.perf_counter() - began)
    if (disturbed and len(threads) > 1) or len(scores) < min(len(left), 2):
        return before
    counts = {s: _counted(s, scores[s], threads) for s in scores}
    best = min(counts, key=lambda setting: counts[setting])
    if counts[before.setting] <= _ALIKE * counts[best]:
        return replace(before, agreed=True)
    notes = [_note(s, scores.get(s, took[s])) for s in sorted(took, key=lambda s: s != best)]
    return replace(before, setting=best, candidates=notes)


def _note(setting: Setting, score: float) -> dict[str, int | str | float]:
    return {**asdict(setting), "score_ms": round(score, 3)}


def _counted(setting: Setting, score: float, threads: Sequence[int]) -> float:
    """A score as it counts: more threads than the fewest have to win by a factor."""
    return score * (1 if setting.threads == min(threads) else MORE_THREADS)


def _timed(
    build: "Build", left: Sequence[Setting], ahead: int, passes: int
) -> dict[Setting, float]:
    """Scores of these settings, as far as the budget goes; of the first one whatever it says."""
    import torch

    before, allowed = torch.get_num_threads(), budget.current()

    def score(models: "Models", count: int) -> float:
        torch.set_num_threads(count)
        target = cost(models[0], (1, ahead + 1), repeats=6)
        spent = target[1] + target[ahead + 1]
        if models[1] is not None:
            spent += ahead * cost(models[1], (1,), repeats=6)[1]
        return spent

    scores: dict[Setting, float] = {}
    made: tuple[str, bool] | None = None
    try:
        with allowed.measuring("how fast the model runs"):
            for _ in range(passes):
                for dtype, packed in dict.fromkeys((s.dtype, s.packed) for s in left):
                    if scores and allowed.over():
                        break
                    if made != (dtype, packed):  # a pass begins with what the last one ended with
                        made, models = (dtype, packed), build(Setting(before, dtype, packed))
                    for setting in [s for s in left if (s.dtype, s.packed) == (dtype, packed)]:
                        if scores and allowed.over():
                            break
                        took = score(models, setting.threads)
                        scores[setting] = min(took, scores.get(setting, took))
                close = _WORTH_ANOTHER_LOOK * min(scores.values())
                left = [s for s in reversed(left) if scores.get(s, close) < close]
                if len(left) == 1 or allowed.over():
                    break
    finally:
        torch.set_num_threads(before)
    return scores
