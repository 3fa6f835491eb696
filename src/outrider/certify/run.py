"""Certify a speculator: decode in batches, teacher-force what came out, test it."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider import arguments, noise, ops, verifiers
from outrider.certify import marginal, margins, verdicts
from outrider.certify.conditional import ORDERS, SETS, Pool
from outrider.certify.laws import Guesses, Text, score
from outrider.certify.report import Report, Test
from outrider.drafters import Root
from outrider.engine import Engine, Observer
from outrider.errors import ConfigurationError, PromptError
from outrider.request import Limits, token_ids
from outrider.sampling import Sampling
from outrider.stats import Stats
from outrider.types import Drafter, LanguageModel

Ids = Sequence[int]
Batch = list[tuple[tuple[int, ...], int]]  #: prompts, each with its seed
Progress = Callable[[str, int, int], None]  #: what, done, of how many


@dataclass
class Known:
    """What certifications of one target, with all settings the same, have in common.

    Nothing in it depends on the rule under test, so a matrix computes it once per drafter.
    """

    plain: dict[tuple[Any, ...], list[tuple[int, ...]]] = field(default_factory=dict)
    coupled: dict[int, tuple[Drafter, Test]] = field(default_factory=dict)
    tolerance: dict[int, float] = field(default_factory=dict)  #: by most nodes of a draft


AT_ONCE = 4  #: the marginal test decodes one token a text: so many times more texts together


@dataclass(frozen=True)
class Power:
    """How much is decoded and what must be detectable.

    tokens     tokens for the conditional tests        samples  runs of the marginal test
    equality   tokens for each certificate             level    joint false-alarm level
    power      probability with which stated effects are found
    effect     "exact" is only said if a shift of this much probability would have been found
    """

    tokens: int = 16_384
    samples: int = 2_048
    equality: int = 1_024
    level: float = 1e-3
    power: float = 0.9
    effect: float = 0.03
    new_tokens: int = 64  #: tokens per text
    rows: int = 32  #: texts decoded together
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "samples", "equality", "new_tokens", "rows", "seed"):
            least, do = (None, "use 0") if name == "seed" else (1, "use 1 or more")
            object.__setattr__(self, name, arguments.whole(name, getattr(self, name), do, least))
        for name in ("level", "power", "effect"):
            do = "leave it out for the default"
            value = arguments.number(name, getattr(self, name), "a number", do)
            object.__setattr__(self, name, value)
        if not 0 < self.level < 0.5 or not 0.5 <= self.power < 1 or not 0 < self.effect < 1:
            raise ConfigurationError(
                f"level must lie in (0, 1/2), power in [1/2, 1), effect in (0, 1); got {self}; "
                "change the one outside"
            )

    def each(self, more: int = 0) -> float:
        """Level of one statistical test: Bonferroni. `more` tests beside those of a text."""
        return self.level / (len(SETS) + len(ORDERS) + 2 + more)  # marginal and support


def settings(sampling: Sampling | None, power: Power | None) -> tuple[Sampling, Power]:
    """What was asked for or the defaults; another kind of object is refused by name."""
    for name, given, kind in (("sampling", sampling, Sampling), ("power", power, Power)):
        if given is not None and not isinstance(given, kind):
            do = f"write {kind.__name__}(...)"
            arguments.refuse(name, f"a {kind.__name__}", given, do)
    return sampling or Sampling(), power or Power()


def certify(
    engine: Engine,
    prompts: Sequence[Ids],
    sampling: Sampling | None = None,
    power: Power | None = None,
    *,
    setup: dict[str, Any] | None = None,
    progress: Progress | None = None,
    known: Known | None = None,
) -> Report:
    """Test whether an engine with its drafter and rule keeps the law of its target.

    `prompts` are token ids; a few dozen different ones of 16 to 48 tokens are enough. At
    temperature 0 only the greedy certificate applies. Penalties, biases, bans and processors act on
    the law that is tested as they do on the text; `min_new_tokens` has nothing to act on, as stop
    tokens are tokens like any other here. Give models in float32: half precision
    moves laws by more than the tests tolerate when texts are scored in other block sizes.
    `known` keeps what does not depend on the rule, for further ones with all else the same.

    Raises ConfigurationError for arguments of another kind, PromptError for prompts that are no
    token ids, too few or too short.
    """
    if not isinstance(engine, Engine):
        do = "give the engine of a speculator, speculator.engine"
        arguments.refuse("engine", "an Engine", engine, do)
    sampling, power = settings(sampling, power)
    every = [tuple(token_ids(p, number)) for number, p in enumerate(prompts)]
    if not every:
        raise PromptError("no prompt to certify with; got none; give at least one")
    started = time.perf_counter()
    quiet: Progress = lambda *_: None  # noqa: E731
    run = _Run(engine, every, sampling, power, progress or quiet, known or Known())
    tests: list[Test] = [run.greedy()]
    if sampling.temperature > 0:
        tests.append(run.coupled())
        tests += run.conditional()
        tests.append(run.marginal())
    rule = engine.choose_rule("all" if sampling.temperature == 0 else "none")
    about = {
        "drafter": engine.drafter.name,
        "rule": rule.name,
        "rule_options": verifiers.taken(rule),
        "rule_says_exact": rule.exact,
        "sampling": described(sampling),
        "seed": power.seed,
        "greedy": sampling.temperature == 0,
        "block_efficiency": run.stats.block_efficiency,
        "alpha": run.alpha,
        "tolerance": run.tolerance,
    }
    return Report(
        tuple(tests),
        power.level,
        power.power,
        power.effect,
        about | (setup or {}),
        time.perf_counter() - started,
    )


class _Run:
    """The parts of one certification, which share the tolerance and the prompts."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        sampling: Sampling,
        power: Power,
        progress: Progress,
        known: Known,
    ) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.power, self.progress, self.known = power, progress, known
        self.each = power.each(len(verdicts.NAMES))
        self.stats = Stats()
        self.alpha: float | None = None
        sample = [Text(p, (), 0) for p in prompts[:8]]
        longest = max(len(t.prompt) for t in sample)
        if longest < 3:
            raise PromptError(
                f"prompts must have at least 3 tokens; got at most {longest}; give longer ones"
            )
        alike = [t for t in sample if len(t.prompt) == longest]
        nodes = engine.drafter.shapes[0].max_nodes
        if nodes not in known.tolerance:
            known.tolerance[nodes] = margins.tolerance(engine.target, alike, nodes)
        self.tolerance = known.tolerance[nodes] * margins.stretch(sampling)

    def batches(self, rows: int, purpose: int, together: int) -> Iterator[Batch]:
        """Prompts with a fresh seed for every row, so many of them at a time."""
        every = []
        for row in range(rows):
            seed = (self.power.seed * 8 + purpose) * 1_000_003 + row
            every.append((self.prompts[row % len(self.prompts)], seed))
        for start in range(0, rows, together):
            yield every[start : start + together]

    def decode(
        self,
        engine: Engine,
        batch: Batch,
        sampling: Sampling,
        new: int,
        observe: Observer | None = None,
    ) -> list[Text]:
        """Texts of exactly `new` tokens: stop tokens are tokens like any other here."""
        settings = [dataclasses.replace(sampling, seed=seed) for _, seed in batch]
        run = engine.run([p for p, _ in batch], settings, Limits(new), observe=observe)
        tokens: list[list[int]] = [[] for _ in batch]
        for block in run:
            tokens[block.row] += block.token_ids
        self.stats.add(run.stats)
        return [Text(p, tuple(t), s) for (p, s), t in zip(batch, tokens, strict=True)]

    def plain_texts(self, batch: Batch, sampling: Sampling, new: int) -> list[tuple[int, ...]]:
        """What the target alone writes with the same noise."""
        bias = tuple((sampling.logit_bias or {}).items())  # a dictionary is no key
        alike = dataclasses.replace(sampling, logit_bias=None, processors=())
        key = (alike, bias, tuple(sampling.processors), new, tuple(batch))
        if key not in self.known.plain:
            alone = Engine(self.engine.target, Root(), verifiers.get("match"))
            self.known.plain[key] = [t.new for t in self.decode(alone, batch, sampling, new)]
        return self.known.plain[key]

    def greedy(self) -> Test:
        """The rule under test at temperature 0."""
        cold = dataclasses.replace(self.sampling, temperature=0)
        return self._certificate("greedy certificate", self.engine, cold, 0)

    def coupled(self) -> Test:
        """The drafter under test with the target's own noise deciding: text equals plain text."""
        given = self.engine.drafter
        if id(given) not in self.known.coupled:
            engine = Engine(self.engine.target, shared_noise(given), verifiers.get("match"))
            test = self._certificate("coupled equality", engine, self.sampling, 1)
            self.known.coupled[id(given)] = given, test  # the object is kept, so its id is its own
        return self.known.coupled[id(given)][1]

    def _certificate(self, name: str, engine: Engine, sampling: Sampling, purpose: int) -> Test:
        new = self.power.new_tokens
        rows = max(self.power.equality // new, 1)
        gaps, count, differ = [], 0, 0
        outside = 0
        for batch in self.batches(rows, purpose, self.power.rows):
            self.progress(name, count, rows * new)
            texts = self.decode(engine, batch, sampling, new)
            same = self.plain_texts(batch, sampling, new)
            differ += sum(text.new != other for text, other in zip(texts, same, strict=True))
            scored = score(engine.target, texts, sampling)
            seeds = torch.tensor([t.seed for t in texts], device=scored.token_BT.device)
            race = None if sampling.temperature == 0 else margins.race(scored, seeds)
            gaps.append(margins.shortfall(scored, race))
            outside += margins.outside(scored, self.tolerance)
            count += int(scored.valid_BT.sum())
        scale = 1.0 if sampling.temperature == 0 else 1.0 / sampling.temperature
        test = margins.certificate(name, gaps, count, self.tolerance * max(scale, 1.0))
        note = f"{rows - differ} of {rows} texts equal plain decoding; " + test.detail
        return dataclasses.replace(test, detail=note, passed=test.passed and not outside)

    def conditional(self) -> list[Test]:
        """Set tests, PIT and support over freshly decoded texts; verdict tests on the way."""
        power, pool, outside = self.power, Pool(), 0
        target = self.engine.target
        guesses = Guesses(self.engine.drafter, target)
        judged = verdicts.Verdicts(self.engine.choose_rule("none"))
        rows = -(-power.tokens // power.new_tokens)
        self.stats = Stats()  # from here on: the configuration under test alone
        for batch in self.batches(rows, 2, power.rows):
            self.progress("conditional tests", pool.tokens, rows * power.new_tokens)
            texts = self.decode(self.engine, batch, self.sampling, power.new_tokens, judged)
            outside += add(pool, target, guesses, texts, self.sampling, self.tolerance)
        self.alpha = pool.alpha
        tests = pool.results(self.each, power.power) + judged.results(self.each, power.power)
        return [*tests, support(outside, pool.tokens)]

    def marginal(self) -> Test:
        """Many first tokens of the prompt where target and draft differ most."""
        power, target = self.power, self.engine.target
        short = [p[-8:] for p in self.prompts]
        texts = [Text(p, (0,)) for p in short]
        guesses = Guesses(self.engine.drafter, target)
        law_BTV = ops.probs(score(target, texts, self.sampling).laws)
        guess_BTV = guesses(texts, self.sampling)
        apart = (law_BTV - guess_BTV).abs().sum((1, 2)) - law_BTV.square().sum((1, 2))
        chosen = int(apart.argmax())
        first: list[int] = []
        kept = self.stats
        self.stats = Stats()
        for batch in self.batches(power.samples, 3, AT_ONCE * power.rows):
            self.progress("marginal test", len(first), power.samples)
            again = [(short[chosen], seed) for _, seed in batch]
            first += [t.new[0] for t in self.decode(self.engine, again, self.sampling, 1)]
        self.stats = kept
        return marginal.test(law_BTV[chosen, 0], first, self.each, power.power)


def add(
    pool: Pool,
    target: LanguageModel,
    guesses: Callable[[Sequence[Text], Sampling], torch.Tensor],
    texts: Sequence[Text],
    sampling: Sampling,
    tolerance: float,
) -> int:
    """Score texts into the pool; returns how many tokens lie outside their law's support."""
    with torch.inference_mode():
        scored = score(target, texts, sampling)
        seeds = torch.tensor([t.seed for t in texts], device=scored.token_BT.device)
        # positions below zero: streams that no generator of ours ever reads
        keys = noise.stream(seeds, torch.full_like(seeds, -7), noise.Purpose.ACCEPT)
        uniform = noise.uniforms(keys, scored.token_BT.shape[1])
        law = ops.probs(scored.laws)
        guess = guesses(texts, sampling).to(law.device)
        pool.add(law, guess, scored.token_BT, scored.valid_BT, uniform)
        return margins.outside(scored, tolerance)


def support(outside: int, count: int) -> Test:
    """No emitted token may lie outside the filtered support."""
    return Test(
        "support",
        float(outside),
        None,
        count,
        outside == 0,
        f"{outside} tokens of zero probability",
    )


def described(sampling: Sampling) -> dict[str, Any]:
    """Plain values for a report; processors by name."""
    found = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    found["logit_bias"] = None if sampling.logit_bias is None else dict(sampling.logit_bias)
    found["processors"] = [getattr(p, "__name__", type(p).__name__) for p in sampling.processors]
    return found


def shared_noise(drafter: Drafter) -> Drafter:
    """The drafter in coupled mode if it has one, so that long paths are accepted."""
    fields = (
        {f.name for f in dataclasses.fields(drafter)} if dataclasses.is_dataclass(drafter) else ()
    )
    if "coupled" in fields:
        made: Drafter = dataclasses.replace(drafter, coupled=True)  # type: ignore[type-var]
        return made
    return drafter
