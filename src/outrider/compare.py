"""An honest comparison: plain, speculative and transformers' decoding of the same prompts.

Every arm takes its turn on every prompt in one process, the starting arm rotating, so that what
else the machine does falls on all alike. Times are those of whole calls, prompt included. Within a
table all arms have one dtype; transformers runs stock weights through its own loop.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from outrider import arguments, calibrate
from outrider.drafters import DraftModel, PromptLookup
from outrider.errors import ConfigurationError
from outrider.integrations.arms import Made, Stock
from outrider.load import load, shipped
from outrider.measure import Ratio, bootstrap
from outrider.prompts import read_prompts
from outrider.sampling import Sampling
from outrider.sources import DTYPES
from outrider.speculator import Speculator, Stop
from outrider.stats import VERBS, Stats
from outrider.text import encode
from outrider.tree import parents_of

PLAIN, SPECULATIVE = "plain", "speculative"
STOCK, ASSISTED = "transformers_generate", "transformers_assisted"
PAIRS = ((SPECULATIVE, PLAIN), (SPECULATIVE, ASSISTED), (PLAIN, STOCK), (ASSISTED, STOCK))


@dataclass(frozen=True)
class Plan:
    """What is compared. `chains` and `trees` are speculative settings, `assisted` the sweep of
    fixed draft lengths of transformers (its default always runs)."""

    target: str | None = None
    draft: str | None = None
    prompts: str | None = None  #: a file; None takes the shipped held-out set
    count: int | None = None  #: only the first so many prompts
    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    chains: tuple[int, ...] = (4,)
    trees: tuple[tuple[int, ...], ...] = ()
    assisted: tuple[int, ...] = (2, 4, 6)
    repeats: int = 2
    dtype: str = "auto"
    fastest: bool = False
    device: str | None = None
    threads: int | None = None
    packed: bool | None = None  #: pack our weights on a CPU; None measures

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {}
        for name in ("count", "max_new_tokens", "repeats", "threads"):
            given = getattr(self, name)
            if given is not None or name in ("max_new_tokens", "repeats"):
                plain[name] = arguments.whole(name, given, "use 1 or more", least=1)
        for name in ("chains", "assisted"):
            what, do = "whole numbers of at least 1", f"write {name}=(2, 4)"
            plain[name] = arguments.several(name, getattr(self, name), what, do, _positive)
        what, do = "lists of whole numbers of at least 1", "write trees=((3, 2), (2, 2, 1))"
        trees = arguments.several("trees", self.trees, what, do, _is_tree)
        plain["trees"] = tuple(tuple(map(int, counts)) for counts in trees)
        for counts in plain["trees"]:
            parents_of(counts)  # too many nodes
        what, do = "numbers", "write temperatures=(0.0, 1.0)"
        plain["temperatures"] = arguments.several(
            "temperatures", self.temperatures, what, do, arguments.is_number
        )
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if not self.temperatures or not (self.chains or self.trees):
            raise ConfigurationError(
                "nothing to compare: no temperature or no speculative setting; give at least one"
            )
        for temperature in self.temperatures:
            Sampling(temperature)


def _positive(value: Any) -> bool:
    return arguments.is_whole(value) and value > 0


def _is_tree(counts: Any) -> bool:
    return isinstance(counts, (list, tuple)) and bool(counts) and all(map(_positive, counts))


@dataclass(frozen=True)
class Trial:
    """One completion by one arm."""

    arm: str
    prompt: int
    repeat: int
    seconds: float
    token_ids: list[int]
    calls: int  #: of the target that yielded tokens; ours reads the prompt in one before these
    stats: Stats | None

    @property
    def ms_per_token(self) -> float:
        """Time of the whole call per emitted token."""
        return 1e3 * self.seconds / max(len(self.token_ids), 1)


@dataclass
class Table:
    """All trials at one temperature in one dtype."""

    temperature: float
    dtype: str
    trials: list[Trial] = field(default_factory=list)

    def arms(self, family: str | None = None) -> list[str]:
        """Arm names in order of appearance, of one family (what stands before the colon)."""
        names = list(dict.fromkeys(trial.arm for trial in self.trials))
        return [n for n in names if family is None or n.split(":")[0] == family]

    def of(self, arm: str) -> list[Trial]:
        """The trials of an arm."""
        return [trial for trial in self.trials if trial.arm == arm]

    def ms_per_token(self, arm: str) -> float:
        """Median over trials."""
        return statistics.median(trial.ms_per_token for trial in self.of(arm))

    def best(self, family: str) -> str:
        """The family's setting with the lowest time per token over all trials."""

        def cost(arm: str) -> float:
            mine = self.of(arm)
            return sum(t.seconds for t in mine) / max(sum(len(t.token_ids) for t in mine), 1)

        return min(self.arms(family), key=cost)

    def ratio(self, fast: str, slow: str) -> Ratio:
        """How many times less time per token `fast` takes, paired by prompt and repeat."""
        other = {(t.prompt, t.repeat): t.ms_per_token for t in self.of(slow)}
        pairs = [other[t.prompt, t.repeat] / t.ms_per_token for t in self.of(fast)]
        return bootstrap(pairs)

    def ratios(self) -> dict[str, Ratio]:
        """The families' best settings against each other."""
        return {f"{a}/{b}": self.ratio(self.best(a), self.best(b)) for a, b in PAIRS}

    def equal(self, one: str, two: str) -> dict[str, int]:
        """On how many prompts two arms made the same tokens."""
        mine, theirs = ({t.prompt: t.token_ids for t in self.of(arm)} for arm in (one, two))
        return {"equal": sum(mine[p] == theirs[p] for p in mine), "of": len(mine)}

    def loops(self, arm: str) -> float:
        """Share of texts that run in circles: fewer than half of their 4-grams are distinct."""
        texts = {t.prompt: t.token_ids for t in self.of(arm)}.values()
        return sum(map(looping, texts)) / max(len(texts), 1)

    def describe(self, arm: str) -> dict[str, Any]:
        """One arm's figures."""
        mine = self.of(arm)
        tokens, calls = sum(len(t.token_ids) for t in mine), sum(t.calls for t in mine)
        known = [t.stats for t in mine if t.stats is not None]
        found: dict[str, Any] = {
            "ms_per_token": round(self.ms_per_token(arm), 4),
            "tokens_per_second": round(tokens / sum(t.seconds for t in mine), 2),
            "block_efficiency": round(tokens / max(calls, 1), 4),
            "trials": len(mine),
            "dtype": self.dtype,
        }
        if known:
            steps = sum(s.engine_steps for s in known)
            found["mean_acceptance_length"] = round(1 + sum(s.accepted for s in known) / steps, 4)
            found["ms_per_step"] = {
                part: round(sum(getattr(s, f"{part}_ms") for s in known) / steps, 4)
                for part in (*VERBS, "host")
            }
        return found


def looping(token_ids: Sequence[int]) -> bool:
    """Whether fewer than half of a text's 4-grams are distinct.

    >>> looping([1, 2] * 10), looping(list(range(20)))
    (True, False)
    """
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return bool(grams) and len(set(grams)) < 0.5 * len(grams)


Arm = Callable[[list[int], Sampling], tuple[Made, Stats | None]]


class Comparison:
    """Loads both sides once per dtype and measures; `document` is what `--json` prints."""

    def __init__(self, plan: Plan) -> None:
        if plan.trees and plan.target is not None and plan.draft is None:
            raise ConfigurationError(
                f"a tree needs a draft model; got trees={plan.trees} and a target without one; "
                "give --draft, or leave --branching out"
            )
        self.plan = plan
        self.prompts = read_prompts(plan.prompts, plan.count)
        self.tables: list[Table] = []
        self.target = plan.target or str(shipped("target"))
        self.draft = plan.draft
        if plan.target is None and plan.draft is None:
            self.draft = str(shipped("draft"))
        self.settings: dict[str, Any] = {}
        self._pair = self._load(plan.dtype)
        self.dtypes = [self._pair.notes.dtype]
        if plan.fastest:
            self.dtypes += [d for d in ("float32", "bfloat16") if d != self.dtypes[0]]

    def _load(self, dtype: str) -> Speculator:
        pair = load(
            self.target,
            self.draft,
            dtype=dtype,
            num_speculative_tokens=max(self.plan.chains, default=4),
            device=self.plan.device,
            threads="auto" if self.plan.threads is None else self.plan.threads,
            packed="auto" if self.plan.packed is None else self.plan.packed,
        )
        notes = pair.notes
        self.settings[notes.dtype] = {
            name: getattr(notes, name) for name in ("device", "dtype", "threads", "packed")
        }
        return pair

    @property
    def total(self) -> int:
        """Trials to come, for a progress bar."""
        arms = 3 + len(self.plan.chains) + len(self.plan.trees) + len(self.plan.assisted)
        tables = len(self.dtypes) * len(self.plan.temperatures)
        return arms * tables * self.plan.repeats * len(self.prompts)

    def run(self, progress: Callable[[], None] = lambda: None) -> "Comparison":
        """Measure every table."""
        for number, dtype in enumerate(self.dtypes):
            pair = self._pair if number == 0 else self._load(dtype)
            stock = Stock(self.target, self.draft, DTYPES[dtype], pair.notes.device)
            arms = self._arms(pair, stock)
            ids = [encode(pair.tokenizer, prompt) for prompt in self.prompts]
            for temperature in self.plan.temperatures:
                table = Table(temperature, dtype)
                self.tables.append(table)
                self._measure(table, arms, ids, progress)
        return self

    def _arms(self, pair: Speculator, stock: Stock) -> dict[str, Arm]:
        most, eos = self.plan.max_new_tokens, pair.eos_ids

        def ours(speculator: Speculator) -> Arm:
            def call(prompt: list[int], how: Sampling) -> tuple[Made, Stats | None]:
                started = time.perf_counter()
                done = speculator.generate([prompt], how, Stop(most, token_ids=eos))
                seconds = time.perf_counter() - started
                tokens = done.completions[0].token_ids
                return Made(tokens, seconds, done.stats.engine_steps), done.stats

            return call

        def theirs(count: int | None) -> Arm:
            return lambda prompt, how: (stock.assisted(prompt, how, most, count), None)

        arms: dict[str, Arm] = {PLAIN: ours(pair.plain())}
        drafter = pair.engine.drafter
        for count in self.plan.chains:
            if isinstance(drafter, DraftModel):
                made = pair.using(DraftModel(drafter.model, (1,) * count))
            else:
                made = pair.using(PromptLookup(count))
            arms[f"{SPECULATIVE}: {count} tokens"] = ours(made)
        for counts in self.plan.trees:
            assert isinstance(drafter, DraftModel)
            name = ",".join(map(str, counts))
            arms[f"{SPECULATIVE}: tree {name}"] = ours(
                pair.using(DraftModel(drafter.model, counts))
            )
        arms[STOCK] = lambda prompt, how: (stock.run(prompt, how, most), None)
        arms[f"{ASSISTED}: default"] = theirs(None)
        for count in self.plan.assisted:
            arms[f"{ASSISTED}: {count} tokens"] = theirs(count)
        return arms

    def _measure(
        self, table: Table, arms: dict[str, Arm], ids: list[list[int]], progress: Any
    ) -> None:
        names = list(arms)
        for name in names:
            arms[name](ids[0], Sampling(table.temperature, seed=0))  # warm-up
        for repeat in range(self.plan.repeats):
            for number, prompt in enumerate(ids):
                how = Sampling(table.temperature, seed=1000 * repeat + number)
                turn = (repeat + number) % len(names)
                for name in names[turn:] + names[:turn]:
                    made, stats = arms[name](prompt, how)
                    table.trials.append(
                        Trial(name, number, repeat, made.seconds, made.token_ids, made.calls, stats)
                    )
                    progress()

    def document(self) -> dict[str, Any]:
        """Everything measured, as plain values."""
        main = [t for t in self.tables if t.dtype == self.dtypes[0]]
        greedy = next((t for t in main if t.temperature == 0), None)
        found: dict[str, Any] = {
            "ratios": {k: asdict(r) for k, r in main[0].ratios().items()},
            "methods": {arm: main[0].describe(arm) for arm in main[0].arms()},
            "text_equal": None,
            "loop_share": None,
            "by_temperature": {f"{t.temperature:g}": self._block(t) for t in main},
            "fastest": self.fastest() if self.plan.fastest else None,
            "environment": environment(),
            "settings": {
                **asdict(self.plan),
                **self.settings[self.dtypes[0]],
                "target": self.target,
                "draft": self.draft,
                "prompt_count": len(self.prompts),
                "times": "whole calls, prompt included, per emitted token",
            },
        }
        if greedy is not None:
            pairs = ((SPECULATIVE, PLAIN), (PLAIN, STOCK), (ASSISTED, STOCK))
            found["text_equal"] = {
                f"{a}={b}": greedy.equal(greedy.best(a), greedy.best(b)) for a, b in pairs
            }
            found["loop_share"] = greedy.loops(PLAIN)
        return found

    def _block(self, table: Table) -> dict[str, Any]:
        return {
            "dtype": table.dtype,
            "best": {family: table.best(family) for family in (SPECULATIVE, ASSISTED)},
            "ratios": {k: asdict(r) for k, r in table.ratios().items()},
            "methods": {arm: table.describe(arm) for arm in table.arms()},
        }

    def fastest(self) -> dict[str, Any]:
        """Each family in the dtype and setting that serve it best, and ratios of these times.

        Tables of different dtypes are not interleaved with each other, so no interval is given.
        """
        found: dict[str, Any] = {}
        for temperature in self.plan.temperatures:
            tables = [t for t in self.tables if t.temperature == temperature]
            chosen: dict[str, Any] = {}
            for family in (PLAIN, SPECULATIVE, STOCK, ASSISTED):
                best = min(tables, key=lambda t: t.ms_per_token(t.best(family)))
                arm = best.best(family)
                chosen[family] = {
                    "arm": arm,
                    "dtype": best.dtype,
                    "ms_per_token": round(best.ms_per_token(arm), 4),
                }
            chosen["ratios"] = {
                f"{a}/{b}": round(chosen[b]["ms_per_token"] / chosen[a]["ms_per_token"], 4)
                for a, b in PAIRS
            }
            found[f"{temperature:g}"] = chosen
        return found


def environment() -> dict[str, Any]:
    """Machine and versions."""
    import os
    from importlib.metadata import version

    return {
        "machine": platform.machine(),
        "processor": calibrate._cpu_name().split(":")[-1].strip(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        **{name: version(name) for name in ("outrider", "torch", "transformers", "numpy")},
    }
