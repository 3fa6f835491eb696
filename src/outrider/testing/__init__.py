"""Tests for authors of drafters, rules and model runners: what each must do, without any file.

    from outrider.testing import check_drafter, check_runner, check_verifier
    check_drafter(lambda model: MyDrafter(model))
    check_verifier(MyRule())
    check_runner(MyRunner, a_tiny_model_of_my_family)

Needs no test framework; inside one, run the CHECKS one by one.
"""

from transformers import PreTrainedModel

from outrider.models import TransformersRunner
from outrider.testing import checks, runner_checks, sourced
from outrider.testing.checks import CHECKS, SETTINGS, Case, Check, Maker
from outrider.testing.models import PROMPTS, RUNNERS, VOCAB, MetaModel, llama, pair, perturbed
from outrider.testing.runs import Restless, begun, decode, p_value, text_law
from outrider.testing.sourced import FAMILIES, encoder_decoder, encoder_decoders, sources
from outrider.types import Verifier


def check_drafter(make: Maker) -> None:
    """Run every check on the drafters that `make` gives: some seconds on a CPU.

    `make` is called many times, with a tiny draft model of 32 tokens or with one on the meta device
    (a drafter that needs no model leaves it aside); what it builds lies on `model.device`.

    Raises AssertionError that names the check, the setting, the shape and the rule.

    >>> from outrider import PromptLookup
    >>> check_drafter(lambda model: PromptLookup(2))
    """
    for check in CHECKS.values():
        for case in check.cases(make):
            check(case)


def check_verifier(rule: Verifier) -> None:
    """Run every check on a verification rule, with each kind of draft that it can verify: some
    seconds on a CPU.

    Its verdicts are well formed and read no device value, its `outcome` is a law and has what it
    did, and if it says `exact = True` greedy text is plain decoding's, and the first two tokens of
    4,000 seeds have the target's law. A proof by enumeration is `tests/exactness`, in a checkout.

    Raises AssertionError that names the check, the setting and the drafter.

    >>> from outrider import verifiers
    >>> check_verifier(verifiers.get("match"))
    """
    runner_checks.check_rule(rule)


def check_runner(runner: type[TransformersRunner], model: PreTrainedModel) -> None:
    """Run every check on a class of model runners, with a model of its family: a second or two.

    `model` is a decoder in float32 on the CPU, of a few small layers with random weights, at least
    32 tokens and 64 positions; one with windows has them at most 8 wide, so that the texts reach
    past them. Trees (chains, for a runner whose `trees` is False) score as the model's own forward
    scores their paths, over rows of different lengths and after a path was kept; text that is
    drafted is plain decoding's; and the model is left as it was.

    Raises AssertionError that names the check, or UnsupportedModel where the model cannot be run.

    >>> from outrider.models import TransformersRunner
    >>> check_runner(TransformersRunner, llama())
    """
    runner_checks.check_runner(runner, model)


__all__ = [
    "CHECKS",
    "FAMILIES",
    "PROMPTS",
    "RUNNERS",
    "SETTINGS",
    "VOCAB",
    "Case",
    "Check",
    "Maker",
    "MetaModel",
    "Restless",
    "begun",
    "check_drafter",
    "check_runner",
    "check_verifier",
    "checks",
    "decode",
    "encoder_decoder",
    "encoder_decoders",
    "llama",
    "p_value",
    "pair",
    "perturbed",
    "runner_checks",
    "sourced",
    "sources",
    "text_law",
]
