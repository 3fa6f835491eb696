import torch
from outrider_echo import Echo, Refuse
from outrider_echo.family import CountingConfig, CountingForCausalLM, CountingRunner

from outrider.testing import check_drafter, check_runner, check_verifier
from outrider.testing.models import TINY


def test_the_drafter_does_what_every_drafter_must():
    check_drafter(lambda model: Echo())


def test_the_rule_does_what_every_rule_must():
    check_verifier(Refuse())


def test_the_runner_does_what_every_runner_must():
    torch.manual_seed(0)
    check_runner(CountingRunner, CountingForCausalLM(CountingConfig(**TINY)).eval())
