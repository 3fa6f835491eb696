"""An honest comparison: plain, speculative and transformers' decoding of the same prompts.

Every arm takes its turn on every prompt in one process, the starting arm rotating, so that what
else the machine does falls on all alike. Times are those of whole calls, prompt included. Within a
table all arms have one dtype; transformers runs stock weights through its own loop.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from outrider import arguments
from outrider.drafters import DraftModel, PromptLookup
from outrider.errors import ConfigurationError
from outrider.models.sources import DTYPES
from outrider.sampling.sampling_params import SamplingParams
from outrider.shipped import shipped
from outrider.stats import VERBS
from outrider.text.output_text import Stop
from outrider.text.prompts import encode
from outrider.text.speculator import Speculator
from outrider.tree import parents_of
from outrider_lab.bench import measure
from outrider_lab.bench.arms import Stock, TimedCompletion
from outrider_lab.bench.intervals import Interval
from outrider_lab.bench.machine import environment, load_to_measure
from outrider_lab.bench.measure import Trial
from outrider_lab.bench.prompts import read_prompts
from outrider_lab.certify.report import Row

PLAIN, SPECULATIVE = "plain", "speculative"
DEFAULT = f"{SPECULATIVE}: default"  #: what `load` makes with nothing set
STOCK, ASSISTED = "transformers_generate", "transformers_assisted"
PAIRS = ((SPECULATIVE, PLAIN), (SPECULATIVE, ASSISTED), (PLAIN, STOCK), (ASSISTED, STOCK))


@dataclass(frozen=True)
class ComparePlan:
    """What is compared. `chains` and `trees` are speculative settings beside what `load` does with
    nothing set, `assisted` is the sweep of fixed draft lengths of transformers, whose
    default always runs as well."""

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
    trust_remote_code: bool = False  #: Python files of model folders may run

    def __post_init__(self) -> None:
        plain: dict[str, object] = {}
        for name, given in (
            ("count", self.count),
            ("max_new_tokens", self.max_new_tokens),
            ("repeats", self.repeats),
            ("threads", self.threads),
        ):
            if given is not None or name in ("max_new_tokens", "repeats"):
                plain[name] = arguments.whole(name, given, "use 1 or more", least=1)
        for name, lengths in (("chains", self.chains), ("assisted", self.assisted)):
            what, do = "whole numbers of at least 1", f"write {name}=(2, 4)"
            plain[name] = arguments.several(name, lengths, what, do, arguments.is_count)
        what, do = "lists of whole numbers of at least 1", "write trees=((3, 2), (2, 2, 1))"
        trees = arguments.several("trees", self.trees, what, do, _is_tree)
        plain["trees"] = tuple(tuple(map(int, counts)) for counts in trees)
        for counts in trees:
            parents_of(counts)  # too many nodes
        what, do = "numbers", "write temperatures=(0.0, 1.0)"
        plain["temperatures"] = arguments.several(
            "temperatures", self.temperatures, what, do, arguments.is_number
        )
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if not self.temperatures:
            raise ConfigurationError("nothing to compare: no temperature; give at least one")
        for temperature in self.temperatures:
            SamplingParams(temperature)


def _is_tree(counts: object) -> bool:
    return (
        isinstance(counts, (list, tuple))
        and bool(counts)
        and all(arguments.is_count(n) for n in counts)
    )


@dataclass
class CompareTable:
    """All trials at one temperature in one dtype; times are those of whole calls."""

    temperature: float
    dtype: str
    trials: list[Trial[TimedCompletion]] = field(default_factory=list)

    def arms(self, family: str | None = None) -> list[str]:
        """Arm names in order of appearance, of one family (what stands before the colon)."""
        names = list(dict.fromkeys(trial.arm for trial in self.trials))
        return [n for n in names if family is None or n.split(":")[0] == family]

    def of(self, arm: str) -> list[Trial[TimedCompletion]]:
        """The trials of an arm."""
        return [trial for trial in self.trials if trial.arm == arm]

    def ms_per_token(self, arm: str) -> float:
        """Median over trials."""
        return statistics.median(trial.ms_per_token for trial in self.of(arm))

    def best(self, family: str) -> str:
        """The family's setting with the lowest time per token over all trials."""

        def cost(arm: str) -> float:
            mine = self.of(arm)
            return sum(t.seconds for t in mine) / max(sum(t.tokens for t in mine), 1)

        return min(self.arms(family), key=cost)

    def ratio(self, fast: str, slow: str) -> Interval:
        """How many times less time per token `fast` takes, paired by prompt and repeat."""
        return measure.ratio(self.trials, fast, slow)

    def ratios(self) -> dict[str, Interval]:
        """The families' best settings against each other."""
        return {f"{a}/{b}": self.ratio(self.best(a), self.best(b)) for a, b in PAIRS}

    def texts(self, arm: str) -> dict[int, list[int]]:
        """Tokens of an arm by prompt."""
        return {t.prompt: t.result.token_ids for t in self.of(arm)}

    def equal(self, one: str, two: str) -> dict[str, int]:
        """On how many prompts two arms made the same tokens."""
        mine, theirs = (self.texts(arm) for arm in (one, two))
        return {"equal": sum(mine[p] == theirs[p] for p in mine), "of": len(mine)}

    def loops(self, arm: str) -> float:
        """Share of texts that run in circles: fewer than half of their 4-grams are distinct."""
        texts = self.texts(arm).values()
        return sum(map(looping, texts)) / max(len(texts), 1)

    def describe(self, arm: str) -> Row:
        """One arm's figures."""
        mine = self.of(arm)
        tokens, calls = sum(t.tokens for t in mine), sum(t.result.calls for t in mine)
        known = [t.result.stats for t in mine if t.result.stats is not None]
        figures: Row = {
            "ms_per_token": round(self.ms_per_token(arm), 4),
            "tokens_per_second": round(tokens / sum(t.seconds for t in mine), 2),
            "block_efficiency": round(tokens / max(calls, 1), 4),
            "trials": len(mine),
            "dtype": self.dtype,
        }
        if known:
            steps = sum(s.engine_steps for s in known)
            figures["mean_acceptance_length"] = round(1 + sum(s.accepted for s in known) / steps, 4)
            figures["ms_per_step"] = {
                part: round(sum(vars(s)[f"{part}_ms"] for s in known) / steps, 4)
                for part in (*VERBS, "host")
            }
        return figures


def looping(token_ids: Sequence[int]) -> bool:
    """Whether fewer than half of a text's 4-grams are distinct.

    >>> looping([1, 2] * 10), looping(list(range(20)))
    (True, False)
    """
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return bool(grams) and len(set(grams)) < 0.5 * len(grams)


Arm = Callable[[list[int], SamplingParams], TimedCompletion]


class Comparison:
    """Loads both sides once per dtype and measures; `document` is what `--json` prints."""

    def __init__(self, plan: ComparePlan) -> None:
        if plan.trees and plan.target is not None and plan.draft is None:
            raise ConfigurationError(
                f"a tree needs a draft model; got trees={plan.trees} and a target without one; "
                "give --draft-model, or leave --branching out"
            )
        self.plan = plan
        self.prompts = read_prompts(plan.prompts, plan.count)
        self.tables: list[CompareTable] = []
        self.target = plan.target or str(shipped("target"))
        self.draft = plan.draft
        if plan.target is None and plan.draft is None:
            self.draft = str(shipped("draft"))
        self.settings: dict[str, Row] = {}
        self._pair = self._load(plan.dtype)
        self.dtypes = [self._pair.notes.dtype]
        if self.dtypes[0] not in DTYPES:
            raise ConfigurationError(
                "transformers runs the same weights in its arms, which are to be in one of "
                f"{', '.join(DTYPES)}; got {self.target} in {self._pair.notes.weights}; give "
                "--dtype, or a folder"
            )
        if plan.fastest:
            self.dtypes += [d for d in ("float32", "bfloat16") if d != self.dtypes[0]]

    def _load(self, dtype: str) -> Speculator:
        pair = load_to_measure(
            self.target,
            self.draft,
            dtype=dtype,
            device=self.plan.device,
            threads="auto" if self.plan.threads is None else self.plan.threads,
            pack_weights="auto" if self.plan.packed is None else self.plan.packed,
            trust_remote_code=self.plan.trust_remote_code,
        )
        if pair.engine.target.reads != "text":
            raise ConfigurationError(
                "compare times models that go on from their prompts; got an encoder-decoder, "
                f"{self.target}; time it with outrider.load and stats"
            )
        notes = pair.notes
        self.settings[notes.dtype] = {
            "device": notes.device,
            "dtype": notes.dtype,
            "threads": notes.threads,
            "packed": notes.packed,
        }
        return pair

    @property
    def total(self) -> int:
        """Trials to come, for a progress bar."""
        arms = 4 + len(self.plan.chains) + len(self.plan.trees) + len(self.plan.assisted)
        tables = len(self.dtypes) * len(self.plan.temperatures)
        return arms * tables * self.plan.repeats * len(self.prompts)

    def run(self, progress: Callable[[], None] = lambda: None) -> "Comparison":
        """Measure every table."""
        for number, dtype in enumerate(self.dtypes):
            pair = self._pair if number == 0 else self._load(dtype)
            stock = Stock(
                self.target,
                self.draft,
                DTYPES[dtype],
                pair.notes.device,
                self.plan.trust_remote_code,
            )
            arms = self._arms(pair, stock)
            ids = [encode(pair.tokenizer, prompt) for prompt in self.prompts]
            for temperature in self.plan.temperatures:
                table = CompareTable(temperature, dtype)
                self.tables.append(table)
                self._measure(table, arms, ids, progress)
        return self

    def _arms(self, pair: Speculator, stock: Stock) -> dict[str, Arm]:
        most, eos = self.plan.max_new_tokens, pair.eos_ids

        def ours(speculator: Speculator) -> Arm:
            def call(prompt: list[int], how: SamplingParams) -> TimedCompletion:
                started = time.perf_counter()
                done = speculator.generate([prompt], how, Stop(most, token_ids=eos))
                seconds = time.perf_counter() - started
                tokens = done.completions[0].token_ids
                return TimedCompletion(tokens, seconds, done.stats.engine_steps, done.stats)

            return call

        def theirs(count: int | None) -> Arm:
            return lambda prompt, how: stock.assisted(prompt, how, most, count)

        arms: dict[str, Arm] = {PLAIN: ours(pair.plain()), DEFAULT: ours(pair)}
        drafter = pair.engine.drafter
        for count in self.plan.chains:
            if isinstance(drafter, DraftModel):
                chained = pair.using(DraftModel(drafter.model, (1,) * count))
            else:
                chained = pair.using(PromptLookup(count))
            arms[f"{SPECULATIVE}: {count} tokens"] = ours(chained)
        for counts in self.plan.trees:
            assert isinstance(drafter, DraftModel)
            name = ",".join(map(str, counts))
            arms[f"{SPECULATIVE}: tree {name}"] = ours(
                pair.using(DraftModel(drafter.model, counts))
            )
        arms[STOCK] = lambda prompt, how: stock.run(prompt, how, most)
        arms[f"{ASSISTED}: default"] = theirs(None)
        for count in self.plan.assisted:
            arms[f"{ASSISTED}: {count} tokens"] = theirs(count)
        return arms

    def _measure(
        self,
        table: CompareTable,
        arms: dict[str, Arm],
        ids: list[list[int]],
        progress: Callable[[], None],
    ) -> None:
        for arm in arms.values():
            arm(ids[0], SamplingParams(table.temperature, seed=0))  # warm-up
        for repeat, number, name in measure.turns(list(arms), len(ids), self.plan.repeats):
            how = SamplingParams(table.temperature, seed=1000 * repeat + number)
            done = arms[name](ids[number], how)
            table.trials.append(
                Trial(name, number, repeat, done.seconds, len(done.token_ids), done)
            )
            progress()

    def document(self) -> Row:
        """Everything measured, as plain values."""
        main = [t for t in self.tables if t.dtype == self.dtypes[0]]
        greedy = next((t for t in main if t.temperature == 0), None)
        document: Row = {
            "ratios": {k: r.row() for k, r in main[0].ratios().items()},
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
            document["text_equal"] = {
                f"{a}={b}": greedy.equal(greedy.best(a), greedy.best(b)) for a, b in pairs
            }
            document["loop_share"] = greedy.loops(PLAIN)
        return document

    def _block(self, table: CompareTable) -> Row:
        return {
            "dtype": table.dtype,
            "best": {family: table.best(family) for family in (SPECULATIVE, ASSISTED)},
            "ratios": {k: r.row() for k, r in table.ratios().items()},
            "methods": {arm: table.describe(arm) for arm in table.arms()},
        }

    def fastest(self) -> Row:
        """Each family in the dtype and setting that serve it best, and ratios of these times.

        Tables of different dtypes are not interleaved with each other, so no interval is given.
        """
        by_temperature: Row = {}
        for temperature in self.plan.temperatures:
            tables = [t for t in self.tables if t.temperature == temperature]
            chosen: Row = {}
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
            by_temperature[f"{temperature:g}"] = chosen
        return by_temperature
