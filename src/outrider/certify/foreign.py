"""Certify a generator that is not ours: prompts in, tokens out."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from outrider import arguments
from outrider.certify import margins
from outrider.certify.judge import Ids, Judge, Power, Progress, Prompt, checked, report, settings
from outrider.certify.laws import Text, flatter, law
from outrider.certify.report import Report, Test
from outrider.errors import ConfigurationError
from outrider.laws.sampling import Sampling
from outrider.models import adapt
from outrider.types import LanguageModel

Generator = Callable[[list[list[int]]], Sequence[Sequence[int]]]


def foreign(
    generator: Generator,
    target: torch.nn.Module | LanguageModel,
    prompts: Sequence[Ids],
    sampling: Sampling | None = None,
    power: Power | None = None,
    *,
    draft: torch.nn.Module | LanguageModel | None = None,
    setup: Mapping[str, object] | None = None,
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
    ids = checked(prompts)
    started = time.perf_counter()
    model = _adapted(target)
    longest = max(ids, key=len)
    tolerance = margins.tolerance(model, [Text(longest, ())], 4) if len(longest) > 2 else 1e-3
    tolerance *= margins.stretch(sampling)
    # without a draft model: the target's own law at twice the temperature
    guess = partial(flatter, model) if draft is None else partial(law, _adapted(draft))
    judge = Judge(model, sampling, power, guess, tolerance, power.each())
    texts = _Texts(generator, ids, power, progress or (lambda *_: None))
    tests: list[Test]
    if sampling.temperature == 0:
        name = "greedy certificate"
        tests = [judge.certificate(name, texts.batches(name, power.equality), sampling)]
    else:
        tests, _ = judge.conditional(texts.batches("conditional tests", power.tokens))
        tests.append(judge.marginal(ids, texts.of_one))
    about = {"generator": "foreign", "greedy": sampling.temperature == 0, "tolerance": tolerance}
    return report(tests, power, about | dict(setup or {}), started)


class _Texts:
    """What the generator returns, in batches."""

    def __init__(
        self, generator: Generator, prompts: Sequence[Prompt], power: Power, progress: Progress
    ) -> None:
        self.generator, self.prompts = generator, prompts
        self.power, self.progress = power, progress
        self._row = 0

    def _generate(self, prompts: Sequence[Prompt]) -> list[Text]:
        lists = self.generator([list(p) for p in prompts])
        if len(lists) != len(prompts):
            raise ConfigurationError(
                f"the generator must return one list of new tokens per prompt; got {len(lists)} "
                f"for {len(prompts)} prompts"
            )
        texts = []
        for prompt, new in zip(prompts, lists, strict=True):
            self._row += 1
            texts.append(Text(prompt, tuple(int(t) for t in new), self._row))
        return [t for t in texts if t.new]

    def batches(self, name: str, tokens: int) -> Iterator[list[Text]]:
        """Batches of texts until that many tokens have been seen."""
        seen = at = empty = 0
        while seen < tokens:
            batch = [self.prompts[(at + i) % len(self.prompts)] for i in range(self.power.rows)]
            at += len(batch)
            texts = self._generate(batch)
            empty = 0 if texts else empty + 1
            if empty == 3:
                raise ConfigurationError(
                    "the generator returned no tokens three times in a row; got only empty lists; "
                    "return the new tokens without the prompt"
                )
            if texts:
                seen += sum(len(t.new) for t in texts)
                self.progress(name, seen, tokens)
                yield texts

    def of_one(self, prompt: Prompt) -> Iterator[list[Text]]:
        """Texts of one prompt, as many as the marginal test takes."""
        count, samples = 0, self.power.samples
        while count < samples:
            self.progress("marginal test", count, samples)
            texts = self._generate([prompt] * min(self.power.rows, samples - count))
            if not texts:
                return
            count += len(texts)
            yield texts


def _adapted(model: torch.nn.Module | LanguageModel) -> LanguageModel:
    """A transformers model driven by us, or a `LanguageModel` as it is."""
    return adapt(model, packed=False) if isinstance(model, torch.nn.Module) else model


__all__ = ["Generator", "foreign"]
