"""Certify a generator that is not ours: prompts in, tokens out."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.models import adapt
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import Inputs, LanguageModel
from outrider_lab.certify import near_tie_certificate
from outrider_lab.certify.laws import CertifiedText, flatter, law, of_draft
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

#: Prompts to new tokens. Of an encoder-decoder it is told, too, which of the prompts each is.
Generator = Callable[..., Sequence[Sequence[int]]]


def foreign(
    generator: Generator,
    target: torch.nn.Module | LanguageModel,
    prompts: Sequence[Ids],
    sampling: SamplingParams | None = None,
    power: Power | None = None,
    *,
    inputs: Sequence[Inputs] | None = None,
    draft: torch.nn.Module | LanguageModel | None = None,
    setup: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> CertifyReport:
    """Test whether a generator draws from the law of `target` under `sampling`.

    generator  gets a list of prompts (token ids) and returns the new tokens of each, at most
               `power.new_tokens`, drawn with fresh randomness at every call
    target     a transformers model or a `LanguageModel`, in float32
    inputs     what the row of each prompt reads, where the target reads more than text: the
               generator gets the prompts and, as a second list, which of all prompts each is
    draft      the draft model the generator uses, if there is one: it sharpens the tests

    At temperature 0 the greedy certificate is the only test. Penalties, biases, bans and processors
    of `sampling` act on the law that is tested; `min_new_tokens` and `forced_eos_token_id` are
    refused: the generator's stop tokens, and where it would have come to its end, are not known.

    Raises ConfigurationError for arguments of another kind and for a generator that returns too few
    lists, PromptError for prompts that are no token ids.
    """
    if not callable(generator):
        do = "give what maps a list of prompts to the new tokens of each"
        arguments.refuse("generator", "a function", generator, do)
    sampling, power = settings(sampling, power)
    for name in ("min_new_tokens", "forced_eos_token_id"):
        if (given := vars(sampling)[name]) != vars(SamplingParams())[name]:
            raise ConfigurationError(
                f"where a generator stops is not known here; got {name}={given}; leave it out, "
                "and certify the generator without it"
            )
    started = time.perf_counter()
    model = _adapted(target)
    if model.reads != "text" and inputs is None:
        raise ConfigurationError(
            "what a generator reads besides the text is not known here; got no inputs for a "
            "target with an encoder; give those of each prompt"
        )
    ids = checked(prompts, model, inputs)
    tolerance = _rounding(model, ids) * near_tie_certificate.stretch(sampling)
    # without a draft model: the target's own law at twice the temperature
    guess = partial(flatter, model) if draft is None else partial(_drafted, _adapted(draft))
    runner = CertifyRunner(model, sampling, power, guess, tolerance, power.each())
    texts = _Texts(generator, ids, power, progress or (lambda *_: None))
    tests: list[Test]
    if sampling.temperature == 0:
        name = "greedy certificate"
        tests = [runner.certificate(name, texts.batches(name, power.equality_tokens), sampling)]
    else:
        tests, _ = runner.conditional(texts.batches("conditional tests", power.tokens))
        tests.append(runner.marginal(ids, texts.of_one))
    about = {"generator": "foreign", "greedy": sampling.temperature == 0, "tolerance": tolerance}
    return report(tests, power, about | dict(setup or {}), started)


def _rounding(model: LanguageModel, prompts: Sequence[CertifiedPrompt]) -> float:
    if model.reads != "text":
        return rounding(model, prompts, 4)
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    return (
        near_tie_certificate.tolerance(model, [longest.text(())], 4)
        if len(longest.tokens) > 2
        else 1e-3
    )


def _drafted(
    draft: LanguageModel, texts: Sequence[CertifiedText], sampling: SamplingParams
) -> Tensor:
    return law(draft, of_draft(draft, texts), sampling)


class _Texts:
    """What the generator returns, in batches."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[CertifiedPrompt],
        power: Power,
        progress: Progress,
    ) -> None:
        self.generator, self.prompts = generator, prompts
        self.power, self.progress = power, progress
        self._row = 0

    def _generate(self, prompts: Sequence[CertifiedPrompt]) -> list[CertifiedText]:
        asked: list[object] = [[list(prompt.tokens) for prompt in prompts]]
        if prompts[0].inputs is not None:
            asked.append([prompt.number for prompt in prompts])
        lists = self.generator(*asked)
        if len(lists) != len(prompts):
            raise ConfigurationError(
                f"the generator must return one list of new tokens per prompt; got {len(lists)} "
                f"for {len(prompts)} prompts"
            )
        texts = []
        for prompt, new in zip(prompts, lists, strict=True):
            self._row += 1
            texts.append(prompt.text([int(t) for t in new], self._row))
        return [t for t in texts if t.new]

    def batches(self, name: str, tokens: int) -> Iterator[list[CertifiedText]]:
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

    def of_one(self, prompt: CertifiedPrompt) -> Iterator[list[CertifiedText]]:
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
