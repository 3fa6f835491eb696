"""What a certification says: each test, and the verdict they add up to."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Row = dict[str, Any]  #: figures by name, as JSON holds them
Verdict = Literal["exact", "not exact", "inconclusive"]
EXIT_CODES: dict[Verdict, int] = {"exact": 0, "not exact": 1, "inconclusive": 3}


@dataclass(frozen=True)
class Test:
    """One test. A statistical test has a p-value; a certificate counts unexplained positions."""

    name: str
    statistic: float
    p_value: float | None
    count: int  #: tokens or samples it saw
    passed: bool
    detail: str
    detectable: float | None = None  #: effect it finds with the stated power
    conclusive: bool = True  #: enough was seen to decide; else it counts as passed

    __test__ = False  # not a test case of pytest


@dataclass(frozen=True)
class CertifyReport:
    """All tests of one generator, with their joint false-alarm level and their power."""

    tests: tuple[Test, ...]
    level: float
    power: float
    effect: float  #: the shift that must be detectable for "exact" to be said
    setup: dict[str, object] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def detectable(self) -> float | None:
        """The shift of probability per token that the conditional set tests find."""
        found = [t.detectable for t in self.tests if t.name == "set q > p" and t.detectable]
        return found[0] if found else None

    @property
    def verdict(self) -> Verdict:
        """`not exact` if any test failed; `exact` only if a shift of `effect` would have shown."""
        if not all(test.passed for test in self.tests):
            return "not exact"
        if not self.tests:
            return "inconclusive"
        conclusive = [t for t in self.tests if t.detectable is not None]
        if not conclusive and any(t.name == "greedy certificate" for t in self.tests):
            return "exact" if self.setup.get("greedy") else "inconclusive"
        if self.detectable is None or self.detectable > self.effect:
            return "inconclusive"
        return "exact"

    @property
    def exit_code(self) -> int:
        """0 exact, 1 not exact, 3 inconclusive."""
        return EXIT_CODES[self.verdict]

    @property
    def failed(self) -> list[str]:
        """Names of the tests that failed."""
        return [t.name for t in self.tests if not t.passed]

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "verdict": self.verdict,
            "level": self.level,
            "power": self.power,
            "effect": self.effect,
            "detectable": self.detectable,
            "failed": self.failed,
            "tests": [_finite(asdict(t)) for t in self.tests],
            "setup": self.setup,
            "seconds": round(self.seconds, 2),
        }


def _finite(values: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity."""
    bad = {k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: (str(v) if k in bad else v) for k, v in values.items()}
