"""How the learning rate runs over a training run: warm up, stay, fall to zero.

The fall is a separate stage on purpose: the checkpoint taken before it can be trained further
at the full rate, and a longer run shares its first part with a shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Steps in all, steps of warm-up, and the share of the run after which the rate falls."""

    steps: int
    warmup: int = 30
    flat: float = 0.7

    @property
    def fall_from(self) -> int:
        """The first step of the fall; the checkpoint to extend from is taken before it."""
        return int(self.steps * self.flat)

    def scale(self, step: int) -> float:
        """The rate at a step, as a share of its peak.

        >>> [round(Schedule(steps=10, warmup=2, flat=0.5).scale(s), 1) for s in range(0, 10, 3)]
        [0.5, 1.0, 0.8, 0.2]
        """
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        left = (self.steps - step) / max(1, self.steps - self.fall_from)
        return rise * min(1.0, left)
