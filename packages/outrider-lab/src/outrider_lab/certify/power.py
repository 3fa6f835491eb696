"""How much a certification decodes, and what it must be able to find."""

from dataclasses import dataclass

from outrider import arguments
from outrider.errors import ConfigurationError


@dataclass(frozen=True)
class Power:
    """How much is decoded and what must be detectable.

    tokens     tokens for the conditional tests        samples  runs of the marginal test
    equality_tokens  tokens for each certificate          level    joint false-alarm level
    power      probability with which stated effects are found
    effect     "exact" is only said if a shift of this much probability would have been found
    """

    tokens: int = 16_384
    samples: int = 2_048
    equality_tokens: int = 1_024
    level: float = 1e-3
    power: float = 0.9
    effect: float = 0.03
    new_tokens: int = 64  #: tokens per text
    rows: int = 32  #: texts decoded together
    seed: int = 0

    def __post_init__(self) -> None:
        for name, given in list(vars(self).items()):
            value: float
            if name in ("level", "power", "effect"):
                value = arguments.number(name, given, "a number", "leave it out for the default")
            elif name == "seed":
                value = arguments.whole(name, given, "use 0")
            else:
                value = arguments.whole(name, given, "use 1 or more", least=1)
            object.__setattr__(self, name, value)
        if not 0 < self.level < 0.5 or not 0.5 <= self.power < 1 or not 0 < self.effect < 1:
            raise ConfigurationError(
                f"level must lie in (0, 1/2), power in [1/2, 1), effect in (0, 1); got {self}; "
                "change the one outside"
            )

    def each(self, more: int = 0) -> float:
        """Level of one statistical test: Bonferroni. `more` tests beside those of a text."""
        from outrider_lab.certify.distribution_tests import ORDERS, SETS

        return self.level / (len(SETS) + len(ORDERS) + 2 + more)  # marginal and support
