"""A test of exactness that users run on their own target, drafter, rule and sampling parameters.

    certify.certify(engine, prompts, SamplingParams(1.0))        # a speculator's engine
    certify.foreign(generator, target, prompts)            # anything: prompts in, tokens out

The report names each test, its statistic, its power and the joint false-alarm level.
"""

from typing import TYPE_CHECKING

from outrider import lazy

if TYPE_CHECKING:
    from outrider_lab.certify.black_box import foreign
    from outrider_lab.certify.power import Power
    from outrider_lab.certify.report import CertifyReport, Test
    from outrider_lab.certify.run import certify

__all__ = ["CertifyReport", "Power", "Test", "certify", "foreign"]

_EXPORTS = {
    "Power": "outrider_lab.certify.power",
    "CertifyReport": "outrider_lab.certify.report",
    "Test": "outrider_lab.certify.report",
    "certify": "outrider_lab.certify.run",
    "foreign": "outrider_lab.certify.black_box",
}
__getattr__, __dir__ = lazy.exports(__name__, _EXPORTS)
