from outrider_echo import Echo, Refuse

from outrider.testing import check_drafter, check_verifier


def test_the_drafter_does_what_every_drafter_must():
    check_drafter(lambda model: Echo())


def test_the_rule_does_what_every_rule_must():
    check_verifier(Refuse())
