"""Tests for authors of drafters: what every drafter must do, run on a tiny pair without any file.

    from outrider.testing import check_drafter
    check_drafter(lambda model: MyDrafter(model))

Needs no test framework; inside one, run the CHECKS one by one.
"""

from outrider.testing import checks, source_checks
from outrider.testing.case import CHECKS, SETTINGS, Case, Check, Maker
from outrider.testing.law import p_value, text_law
from outrider.testing.meta import MetaModel
from outrider.testing.models import PROMPTS, RUNNERS, VOCAB, llama, pair, perturbed
from outrider.testing.runs import Restless, begun, decode
from outrider.testing.sourced import FAMILIES, encoder_decoder, encoder_decoders, sources


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
    "checks",
    "decode",
    "encoder_decoder",
    "encoder_decoders",
    "llama",
    "p_value",
    "pair",
    "perturbed",
    "source_checks",
    "sources",
    "text_law",
]
