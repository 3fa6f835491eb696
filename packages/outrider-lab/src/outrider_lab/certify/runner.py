"""What every certification does, whoever writes the texts: its settings, and the tests over them.

`run` decodes texts with an engine, `foreign` asks a generator for them; both hand them on here.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider import arguments, noise, ops, verifiers
from outrider.drafters import Root
from outrider.engine.engine import Engine
from outrider.engine.outputs import StepOutput
from outrider.engine.request import StopConditions, token_ids
from outrider.errors import ConfigurationError, PromptError
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import Inputs, LanguageModel
from outrider_lab.certify import distribution_tests, near_tie_certificate
from outrider_lab.certify.distribution_tests import PooledTest
from outrider_lab.certify.laws import CertifiedText, score
from outrider_lab.certify.power import Power
from outrider_lab.certify.report import CertifyReport, Test
from outrider_lab.certify.verification_tests import Verdicts

Ids = Sequence[int]
Progress = Callable[[str, int, int], None]  #: what, done, of how many
Guess = Callable[
    [Sequence[CertifiedText], SamplingParams], Tensor
]  #: q_BTV, to choose what to test


@dataclass(frozen=True)
class CertifiedPrompt:
    """What a text begins with, and what its row reads besides."""

    tokens: tuple[int, ...]
    number: int = 0  #: among the prompts that were given
    inputs: Inputs | None = field(default=None, compare=False, repr=False)  #: encoded, one row

    def text(self, new: Sequence[int], seed: int = 0) -> CertifiedText:
        """It continued."""
        return CertifiedText(self.tokens, tuple(new), seed, self.inputs)


def settings(sampling: SamplingParams | None, power: Power | None) -> tuple[SamplingParams, Power]:
    """What was asked for or the defaults; another kind of object is refused by name."""
    for name, given, kind in (("sampling", sampling, SamplingParams), ("power", power, Power)):
        if given is not None and not isinstance(given, kind):
            do = f"write {kind.__name__}(...)"
            arguments.refuse(name, f"a {kind.__name__}", given, do)
    return sampling or SamplingParams(), power or Power()


def checked(
    prompts: Sequence[Ids], target: LanguageModel, inputs: Sequence[Inputs] | None = None
) -> list[CertifiedPrompt]:
    """The prompts with what their rows read, encoded once; sources are made up if there are none.

    PromptError for what are no token ids, or for none at all, ConfigurationError for sources that
    the target cannot use, or that are not one for each prompt.
    """
    ids = [tuple(token_ids(prompt, number)) for number, prompt in enumerate(prompts)]
    if not ids:
        raise PromptError("no prompt to certify with; got none; give at least one")
    if target.reads == "text":
        if inputs is not None:
            raise ConfigurationError(
                f"the target reads text alone; got inputs for {len(inputs)} rows; leave them out"
            )
        return [CertifiedPrompt(tokens, number) for number, tokens in enumerate(ids)]
    if inputs is None:
        made = target.probe(len(ids))
        assert made is not None
        made = made._replace(encoded=None)  # a probe may bring states that no encoder made
        inputs = [made.take([row]) for row in range(len(ids))]
    if len(inputs) != len(ids):
        raise ConfigurationError(
            f"inputs are one for each prompt; got {len(inputs)} for {len(ids)} prompts; give as "
            "many, or none"
        )
    with torch.inference_mode():
        rows = [target.encode(row) for row in inputs]
    return [CertifiedPrompt(*both) for both in zip(ids, range(len(ids)), rows, strict=True)]


def rounding(target: LanguageModel, prompts: Sequence[CertifiedPrompt], nodes: int) -> float:
    """How far the target's logits move between blocks of one and of `nodes` tokens.

    Measured over the longest prompts; where a text begins with its source, over plain texts.
    """
    texts = [prompt.text(()) for prompt in prompts[:8]]
    if target.reads != "text":
        engine = Engine(target, Root(), verifiers.get("match"))
        settings = [SamplingParams(seed=row) for row in range(len(texts))]
        rows = [prompt.inputs for prompt in prompts[:8]]
        run = engine.run([text.prompt for text in texts], settings, StopConditions(16), inputs=rows)
        texts = _continued(texts, list(run))
    longest = max(len(text.prompt) for text in texts)
    alike = [text for text in texts if len(text.prompt) == longest]
    return near_tie_certificate.tolerance(target, alike, nodes)


def _continued(texts: Sequence[CertifiedText], blocks: Sequence[StepOutput]) -> list[CertifiedText]:
    """Texts whose prompts are what was written, too."""
    whole = [list(text.prompt) for text in texts]
    for block in blocks:
        whole[block.request_id] += block.token_ids
    return [
        dataclasses.replace(text, prompt=tuple(ids)) for text, ids in zip(texts, whole, strict=True)
    ]


def report(
    tests: Sequence[Test], power: Power, setup: dict[str, object], started: float
) -> CertifyReport:
    """All tests with the level and the power that they were made for."""
    seconds = time.perf_counter() - started
    return CertifyReport(tuple(tests), power.level, power.power, power.effect, setup, seconds)


@dataclass(frozen=True)
class CertifyRunner:
    """Tests of texts against the law of a target. Texts come in batches, decoded when asked for."""

    target: LanguageModel
    sampling: SamplingParams
    power: Power
    guess: Guess
    tolerance: float  #: how far the target's logits move by rounding
    level: float  #: of each statistical test

    def certificate(
        self, name: str, batches: Iterable[Sequence[CertifiedText]], sampling: SamplingParams
    ) -> Test:
        """Whether every token is the one that its law and its position's noise decide."""
        gaps, count, outside = [], 0, 0
        for texts in batches:
            scored = score(self.target, texts, sampling)
            race = None
            if sampling.temperature > 0:
                seeds = torch.tensor([t.seed for t in texts], device=scored.token_BT.device)
                race = near_tie_certificate.race(scored, seeds)
            gaps.append(near_tie_certificate.shortfall(scored, race))
            outside += near_tie_certificate.outside(scored, self.tolerance)
            count += int(scored.valid_BT.sum())
        scale = 1.0 if sampling.temperature == 0 else 1.0 / sampling.temperature
        test = near_tie_certificate.certificate(name, gaps, count, self.tolerance * max(scale, 1.0))
        return dataclasses.replace(test, passed=test.passed and not outside)

    def conditional(
        self, batches: Iterable[Sequence[CertifiedText]], verdicts: Verdicts | None = None
    ) -> tuple[list[Test], float]:
        """Set tests, PIT and support, those of verdicts counted on the way, and alpha."""
        pool, outside = PooledTest(), 0
        for texts in batches:
            outside += self._add(pool, texts)
        tests = pool.results(self.level, self.power.power)
        if verdicts is not None:
            tests += verdicts.results(self.level, self.power.power)
        return [*tests, _support(outside, pool.tokens)], pool.alpha

    @torch.inference_mode()
    def _add(self, pool: PooledTest, texts: Sequence[CertifiedText]) -> int:
        """Score texts into the pool; how many tokens lie outside their law's support."""
        scored = score(self.target, texts, self.sampling)
        seeds = torch.tensor([t.seed for t in texts], device=scored.token_BT.device)
        # positions below zero: streams that no generator of ours ever reads
        keys = noise.stream(seeds, torch.full_like(seeds, -7), noise.Purpose.ACCEPT)
        uniform = noise.uniforms(keys, scored.token_BT.shape[1])
        law = ops.probs(scored.laws)
        guess = self.guess(texts, self.sampling).to(law.device)
        pool.add(law, guess, scored.token_BT, scored.valid_BT, uniform)
        return near_tie_certificate.outside(scored, self.tolerance)

    def marginal(
        self,
        prompts: Sequence[CertifiedPrompt],
        texts_of: Callable[[CertifiedPrompt], Iterable[Sequence[CertifiedText]]],
    ) -> Test:
        """Many first tokens of the prompt where target and guess differ most."""
        with torch.inference_mode():
            texts = [prompt.text((0,)) for prompt in prompts]
            law_BTV = ops.probs(score(self.target, texts, self.sampling).laws)
            guess_BTV = self.guess(texts, self.sampling)
            apart = (law_BTV - guess_BTV).abs().sum((1, 2)) - law_BTV.square().sum((1, 2))
        chosen = int(apart.argmax())
        first = [text.new[0] for batch in texts_of(prompts[chosen]) for text in batch]
        return distribution_tests.test(law_BTV[chosen, 0], first, self.level, self.power.power)


def _support(outside: int, count: int) -> Test:
    """No emitted token may lie outside the filtered support."""
    detail = f"{outside} tokens of zero probability"
    return Test("support", float(outside), None, count, outside == 0, detail)
