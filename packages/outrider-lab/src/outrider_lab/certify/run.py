"""Certify a speculator: decode in batches, teacher-force what came out, test it."""

import dataclasses
import inspect
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outrider import arguments, verifiers
from outrider.drafters import DraftModel, DynamicTree, Root
from outrider.engine.engine import Engine
from outrider.engine.engine_run import Observer
from outrider.engine.request import StopConditions
from outrider.errors import PromptError
from outrider.sampling.sampling_params import SamplingParams
from outrider.stats import Stats
from outrider.types import Drafter, Inputs
from outrider_lab.certify import near_tie_certificate, verification_tests
from outrider_lab.certify.laws import CertifiedText, DraftGuesses
from outrider_lab.certify.power import Power
from outrider_lab.certify.report import CertifyReport, Test
from outrider_lab.certify.runner import (
    CertifiedPrompt,
    CertifyRunner,
    Ids,
    Progress,
    checked,
    report,
    rounding,
    settings,
)

Batch = list[tuple[CertifiedPrompt, int]]  #: prompts, each with its seed


@dataclass
class CertifiedModel:
    """What certifications of one target, with all settings the same, have in common.

    Nothing in it depends on the rule under test, so a matrix computes it once per drafter.
    """

    plain: dict[Hashable, list[tuple[int, ...]]] = field(default_factory=dict)
    coupled: dict[int, tuple[Drafter, Test]] = field(default_factory=dict)
    tolerance: dict[int, float] = field(default_factory=dict)  #: by most nodes of a draft


AT_ONCE = 4  #: the marginal test decodes one token a text: so many times more texts together


def certify(
    engine: Engine,
    prompts: Sequence[Ids],
    sampling: SamplingParams | None = None,
    power: Power | None = None,
    *,
    inputs: Sequence[Inputs] | None = None,
    setup: Mapping[str, object] | None = None,
    progress: Progress | None = None,
    known: CertifiedModel | None = None,
) -> CertifyReport:
    """Test whether an engine with its drafter and rule keeps the law of its target.

    `prompts` are token ids; a few dozen different ones of 16 to 48 tokens are enough. Those of an
    encoder-decoder are what its decoder begins with, and `inputs` what each row reads, as
    `Engine.run` takes them; without them sources are made up. At
    temperature 0 only the greedy certificate applies. Penalties, biases, bans and processors act on
    the law that is tested as they do on the text; `min_new_tokens` has nothing to act on, as stop
    tokens are tokens like any other here. Give models in float32: half precision
    moves laws by more than the tests tolerate when texts are scored in other block sizes.
    A planner plans the rows of the batches that are decoded here as if each were alone.
    `known` keeps what does not depend on the rule, for further ones with all else the same.

    Raises ConfigurationError for arguments of another kind, PromptError for prompts that are no
    token ids, too few or too short.
    """
    if not isinstance(engine, Engine):
        do = "give the engine of a speculator, speculator.engine"
        arguments.refuse("engine", "an Engine", engine, do)
    sampling, power = settings(sampling, power)
    ids = checked(prompts, engine.target, inputs)
    started = time.perf_counter()
    run = _Run(
        engine.alone(),
        ids,
        sampling,
        power,
        progress or (lambda *_: None),
        known or CertifiedModel(),
    )
    tests = [run.greedy()]
    if sampling.temperature > 0:
        tests.append(run.coupled())
        tests += run.conditional()
        tests.append(run.marginal())
    rule = engine.choose_rule("all" if sampling.temperature == 0 else "none")
    about: dict[str, object] = {
        "drafter": engine.drafter.name,
        "rule": rule.name,
        "rule_options": verifiers.options_of(rule),
        "rule_says_exact": rule.exact,
        "sampling": described(sampling),
        "seed": power.seed,
        "greedy": sampling.temperature == 0,
        "block_efficiency": run.stats.block_efficiency,
        "alpha": run.alpha,
        "tolerance": run.runner.tolerance,
    }
    return report(tests, power, about | dict(setup or {}), started)


class _Run:
    """The texts of one certification, which share an engine, the prompts and the tolerance."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[CertifiedPrompt],
        sampling: SamplingParams,
        power: Power,
        progress: Progress,
        known: CertifiedModel,
    ) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.power, self.progress, self.known = power, progress, known
        self.stats = Stats()
        self.alpha: float | None = None
        longest = max(len(prompt.tokens) for prompt in prompts[:8])
        if longest < 3 and engine.target.reads == "text":
            raise PromptError(
                f"prompts must have at least 3 tokens; got at most {longest}; give longer ones"
            )
        nodes = engine.drafter.shapes[0].max_nodes
        if nodes not in known.tolerance:
            known.tolerance[nodes] = rounding(engine.target, prompts, nodes)
        self.runner = CertifyRunner(
            engine.target,
            sampling,
            power,
            DraftGuesses(engine.drafter, engine.target),
            known.tolerance[nodes] * near_tie_certificate.stretch(sampling),
            power.each(len(verification_tests.NAMES)),
        )

    @property
    def at_once(self) -> int:
        """Rows of one token that are decoded together: what rows read takes room."""
        return self.power.rows * (AT_ONCE if self.engine.target.reads == "text" else 1)

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
        sampling: SamplingParams,
        new: int,
        observe: Observer | None = None,
    ) -> list[CertifiedText]:
        """Texts of exactly `new` tokens: stop tokens are tokens like any other here."""
        settings = [dataclasses.replace(sampling, seed=seed) for _, seed in batch]
        run = engine.run(
            [prompt.tokens for prompt, _ in batch],
            settings,
            StopConditions(new),
            inputs=[prompt.inputs for prompt, _ in batch],
            observe=observe,
        )
        tokens: list[list[int]] = [[] for _ in batch]
        for block in run:
            tokens[block.request_id] += block.token_ids
        self.stats.add(run.stats)
        return [p.text(t, s) for (p, s), t in zip(batch, tokens, strict=True)]

    def plain_texts(
        self, batch: Batch, sampling: SamplingParams, new: int
    ) -> list[tuple[int, ...]]:
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
        drafter = self.engine.drafter
        if id(drafter) not in self.known.coupled:
            engine = Engine(self.engine.target, shared_noise(drafter), verifiers.get("match"))
            test = self._certificate("coupled equality", engine, self.sampling, 1)
            self.known.coupled[id(drafter)] = drafter, test  # kept, so that its id stays its own
        return self.known.coupled[id(drafter)][1]

    def _certificate(
        self, name: str, engine: Engine, sampling: SamplingParams, purpose: int
    ) -> Test:
        new = self.power.new_tokens
        rows = max(self.power.equality_tokens // new, 1)
        equal = 0

        def decoded() -> Iterator[list[CertifiedText]]:
            nonlocal equal
            count = 0
            for batch in self.batches(rows, purpose, self.power.rows):
                self.progress(name, count * new, rows * new)
                texts = self.decode(engine, batch, sampling, new)
                same = self.plain_texts(batch, sampling, new)
                equal += sum(text.new == other for text, other in zip(texts, same, strict=True))
                count += len(batch)
                yield texts

        test = self.runner.certificate(name, decoded(), sampling)
        note = f"{equal} of {rows} texts equal plain decoding; " + test.detail
        return dataclasses.replace(test, detail=note)

    def conditional(self) -> list[Test]:
        """Set tests, PIT and support over freshly decoded texts; verdict tests on the way."""
        power, verified = self.power, verification_tests.Verdicts(self.engine.choose_rule("none"))
        rows = -(-power.tokens // power.new_tokens)
        self.stats = Stats()  # from here on: the configuration under test alone

        def decoded() -> Iterator[list[CertifiedText]]:
            count = 0
            for batch in self.batches(rows, 2, power.rows):
                self.progress("conditional tests", count, rows * power.new_tokens)
                yield self.decode(self.engine, batch, self.sampling, power.new_tokens, verified)
                count += len(batch) * power.new_tokens

        tests, self.alpha = self.runner.conditional(decoded(), verified)
        return tests

    def marginal(self) -> Test:
        """Many first tokens of the prompt where target and draft differ most."""

        def decoded(prompt: CertifiedPrompt) -> Iterator[list[CertifiedText]]:
            count, samples = 0, self.power.samples
            for batch in self.batches(samples, 3, self.at_once):
                self.progress("marginal test", count, samples)
                again = [(prompt, seed) for _, seed in batch]
                yield self.decode(self.engine, again, self.sampling, 1)
                count += len(batch)

        stats = self.stats
        self.stats = Stats()  # these texts of one token are not what the report counts
        prompts = self.prompts
        if self.engine.target.reads == "text":  # a part of them is a prompt, too
            prompts = [dataclasses.replace(p, tokens=p.tokens[-8:]) for p in prompts]
        test = self.runner.marginal(prompts, decoded)
        self.stats = stats
        return test


def described(sampling: SamplingParams) -> dict[str, object]:
    """Plain values for a report; processors by name."""
    return {
        **{field.name: vars(sampling)[field.name] for field in dataclasses.fields(sampling)},
        "logit_bias": None if sampling.logit_bias is None else dict(sampling.logit_bias),
        "timestamps": None
        if sampling.timestamps is None
        else dataclasses.asdict(sampling.timestamps),
        "processors": [
            p.__name__ if inspect.isroutine(p) else type(p).__name__ for p in sampling.processors
        ],
    }


def shared_noise(drafter: Drafter) -> Drafter:
    """The drafter in coupled mode if it has one, so that long paths are accepted."""
    if isinstance(drafter, DraftModel) and drafter.policy is None:
        return dataclasses.replace(drafter, shared_noise=True)
    if isinstance(drafter, DynamicTree):
        return dataclasses.replace(drafter, shared_noise=True)
    return drafter
