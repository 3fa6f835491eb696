"""Certify a generator that is not ours: prompts in, tokens out."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider import arguments, ops
from outrider.certify import marginal, margins
from outrider.certify.conditional import Pool
from outrider.certify.laws import Text, flatter, score
from outrider.certify.report import Report, Test
from outrider.certify.run import Ids, Power, Progress, add, settings, support
from outrider.errors import ConfigurationError, PromptError
from outrider.models import adapt
from outrider.request import token_ids
from outrider.sampling import Sampling
from outrider.types import LanguageModel

Generator = Callable[[list[list[int]]], Sequence[Sequence[int]]]


class _Model:
    """A draft model as the source of q."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def __call__(self, texts: Sequence[Text], sampling: Sampling) -> Tensor:
        return ops.probs(score(self.model, texts, sampling).laws)


class _Flatter:
    """Without a draft model: the target's own law at twice the temperature."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def __call__(self, texts: Sequence[Text], sampling: Sampling) -> Tensor:
        return flatter(self.model, texts, sampling)


def foreign(
    generator: Generator,
    target: Any,
    prompts: Sequence[Ids],
    sampling: Sampling | None = None,
    power: Power | None = None,
    *,
    draft: Any = None,
    setup: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Test whether a generator draws from the law of `target` under `sampling`.

    generator  gets a list of prompts (token ids) and returns the new tokens of each, at most
               `power.new_tokens`, drawn with fresh randomness at every call
    target     a transformers model or a `LanguageModel`, in float32
    draft      the draft model the generator uses, if there is one: it sharpens the tests

    At temperature 0 the greedy certificate is the only test. Penalties, biases, bans and processors
    of `sampling` act on the law that is tested; `min_new_tokens` is refused, as the stop tokens of
    the generator are not known here.

    Raises ConfigurationError for arguments of another kind and for a generator that returns too few
    lists, PromptError for prompts that are no token ids.
    """
    if not callable(generator):
        do = "give what maps a list of prompts to the new tokens of each"
        arguments.refuse("generator", "a function", generator, do)
    sampling, power = settings(sampling, power)
    if sampling.min_new_tokens:
        raise ConfigurationError(
            "a generator's stop tokens are not known here; got "
            f"min_new_tokens={sampling.min_new_tokens}; leave it out, and certify the generator "
            "without it"
        )
    every = [tuple(token_ids(p, number)) for number, p in enumerate(prompts)]
    if not every:
        raise PromptError("no prompt to certify with; got none; give at least one")
    started = time.perf_counter()
    model = _adapted(target)
    longest = max(every, key=len)
    allowed = margins.tolerance(model, [Text(longest, ())], 4) if len(longest) > 2 else 1e-3
    allowed *= margins.stretch(sampling)
    run = _Foreign(generator, model, every, sampling, power, progress or (lambda *_: None))
    tests: list[Test]
    if sampling.temperature == 0:
        tests = [run.greedy(allowed)]
    else:
        guesses = _Flatter(model) if draft is None else _Model(_adapted(draft))
        tests = run.conditional(guesses, allowed)
        tests.append(run.marginal(guesses))
    about = {"generator": "foreign", "greedy": sampling.temperature == 0, "tolerance": allowed}
    return Report(
        tuple(tests),
        power.level,
        power.power,
        power.effect,
        about | (setup or {}),
        time.perf_counter() - started,
    )


class _Foreign:
    def __init__(
        self,
        generator: Generator,
        model: LanguageModel,
        prompts: Sequence[tuple[int, ...]],
        sampling: Sampling,
        power: Power,
        progress: Progress,
    ) -> None:
        self.generator, self.model, self.prompts = generator, model, prompts
        self.sampling, self.power, self.progress = sampling, power, progress
        self.each = power.each()
        self._row = 0

    def _texts(self, prompts: Sequence[tuple[int, ...]]) -> list[Text]:
        found = self.generator([list(p) for p in prompts])
        if len(found) != len(prompts):
            raise ConfigurationError(
                f"the generator must return one list of new tokens per prompt; got {len(found)} "
                f"for {len(prompts)} prompts"
            )
        texts = []
        for prompt, new in zip(prompts, found, strict=True):
            self._row += 1
            texts.append(Text(prompt, tuple(int(t) for t in new), self._row))
        return [t for t in texts if t.new]

    def _batches(self, tokens: int) -> Any:
        """Batches of texts until that many tokens have been seen."""
        seen = at = empty = 0
        while seen < tokens:
            batch = [self.prompts[(at + i) % len(self.prompts)] for i in range(self.power.rows)]
            at += len(batch)
            texts = self._texts(batch)
            empty = 0 if texts else empty + 1
            if empty == 3:
                raise ConfigurationError(
                    "the generator returned no tokens three times in a row; got only empty lists; "
                    "return the new tokens without the prompt"
                )
            if texts:
                seen += sum(len(t.new) for t in texts)
                yield texts, seen

    def greedy(self, allowed: float) -> Test:
        gaps, count = [], 0
        for texts, seen in self._batches(self.power.equality):
            self.progress("greedy certificate", seen, self.power.equality)
            scored = score(self.model, texts, self.sampling)
            gaps.append(margins.shortfall(scored, None))
            count = seen
        return margins.certificate("greedy certificate", gaps, count, allowed)

    def conditional(
        self, guesses: Callable[[Sequence[Text], Sampling], Tensor], allowed: float
    ) -> list[Test]:
        pool, outside = Pool(), 0
        for texts, seen in self._batches(self.power.tokens):
            self.progress("conditional tests", seen, self.power.tokens)
            outside += add(pool, self.model, guesses, texts, self.sampling, allowed)
        return [*pool.results(self.each, self.power.power), support(outside, pool.tokens)]

    def marginal(self, guesses: Callable[[Sequence[Text], Sampling], Tensor]) -> Test:
        texts = [Text(p, (0,)) for p in self.prompts]
        with torch.inference_mode():
            law = ops.probs(score(self.model, texts, self.sampling).laws)
            guess = guesses(texts, self.sampling)
            apart = (law - guess).abs().sum((1, 2)) - law.square().sum((1, 2))
        chosen = int(apart.argmax())
        first: list[int] = []
        while len(first) < self.power.samples:
            self.progress("marginal test", len(first), self.power.samples)
            wanted = min(self.power.rows, self.power.samples - len(first))
            found = self._texts([self.prompts[chosen]] * wanted)
            if not found:
                break
            first += [t.new[0] for t in found]
        return marginal.test(law[chosen, 0], first, self.each, self.power.power)


def _adapted(model: Any) -> LanguageModel:
    """A transformers model driven by us, or a `LanguageModel` as it is."""
    if hasattr(model, "forward") and hasattr(model, "config"):
        adapted: LanguageModel = adapt(model, packed=False)
        return adapted
    made: LanguageModel = model
    return made


__all__ = ["Generator", "foreign"]
