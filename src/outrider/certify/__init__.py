"""A test of exactness that users run on their own target, drafter, rule and sampling parameters.

    certify.certify(engine, prompts, Sampling(1.0))        # a speculator's engine
    certify.foreign(generator, target, prompts)            # anything: prompts in, tokens out

The report names each test, its statistic, its power and the joint false-alarm level.
"""

from outrider.certify.foreign import foreign
from outrider.certify.judge import Power
from outrider.certify.report import Report, Test
from outrider.certify.run import certify

__all__ = ["Power", "Report", "Test", "certify", "foreign"]
