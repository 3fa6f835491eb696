"""What f and g may return for n states: probabilities, normal laws, densities; as tables.

A table holds the laws of n states. Those of continuous laws draw outcomes and tell log-densities.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from outrider import noise
from outrider.errors import ConfigurationError


@dataclass(frozen=True)
class Gaussian:
    """Normal laws of n states, to be returned by f or g: independent coordinates.

    mean  numbers [n], or vectors [n, D]
    std   standard deviations above 0, of mean's shape or of one that broadcasts to it

    An outcome is a float, or an array [D].

    >>> Gaussian([0.0, 2.0], 0.5).std
    0.5
    """

    mean: ArrayLike
    std: ArrayLike = 1.0


@dataclass(frozen=True)
class Density:
    """The continuous law of one state, by two functions; f and g return a list with one a state.

    draw         (random generator of NumPy, n) -> n independent outcomes
    log_density  n outcomes -> the log-densities [n]; -inf where there is none

    Both must be of one law, and log-densities of f and g of one measure: where they are not, the
    outcomes follow neither, and nobody can tell in general.

    >>> import math
    >>> law = Density(lambda rng, n: rng.exponential(2.0, n), lambda x: -x / 2 - math.log(2))
    """

    draw: Callable[[np.random.Generator, int], Any]
    log_density: Callable[[Any], Any]


@dataclass(frozen=True)
class Probabilities:
    """Laws over outcomes 0 .. V - 1."""

    probs_nV: Tensor  #: float64; rows sum to one

    def __len__(self) -> int:
        return len(self.probs_nV)


@dataclass(frozen=True)
class NormalLaws:
    """Normal laws of independent coordinates, one a state."""

    mean_nD: NDArray[np.float64]
    std_nD: NDArray[np.float64]
    plain: bool  #: outcomes are floats, not vectors of one

    def __len__(self) -> int:
        return len(self.mean_nD)

    def law(self, number: int) -> Density:
        """One of them as a pair of functions."""
        mean, std = self.mean_nD[number], self.std_nD[number]
        if self.plain:
            mean, std = mean[0], std[0]
        return Density(
            lambda rng, n: mean + std * rng.standard_normal((n, *np.shape(mean))),
            lambda x: log_normal(np.asarray(x).reshape(len(x), -1), mean, std),
        )

    def take(self, numbers: Sequence[int]) -> "NormalLaws":
        """The laws of these numbers, in this order."""
        rows = np.asarray(numbers, np.int64)
        return NormalLaws(self.mean_nD[rows], self.std_nD[rows], self.plain)

    def drawn(self, keys_n: Tensor) -> list[Any]:
        """One outcome of each law, by the noise of its key."""
        noise_nD = normals(keys_n, self.mean_nD.shape[1])
        return self.outcomes(self.mean_nD + self.std_nD * noise_nD)

    def outcomes(self, values_nD: NDArray[np.float64]) -> list[Any]:
        """Rows as what users are given: floats or vectors."""
        return values_nD[:, 0].tolist() if self.plain else list(values_nD)

    def log_density(self, outcomes: Sequence[Any]) -> NDArray[np.float64]:
        """The log-density [n] of the i-th outcome under the i-th law."""
        values = np.asarray(outcomes, np.float64).reshape(self.mean_nD.shape)
        return log_normal(values, self.mean_nD, self.std_nD)


@dataclass(frozen=True)
class DensityLaws:
    """Other laws over a continuum, one a state."""

    laws: Sequence[Density]

    def __len__(self) -> int:
        return len(self.laws)

    def law(self, number: int) -> Density:
        """One of them."""
        return self.laws[number]

    def take(self, numbers: Sequence[int]) -> "DensityLaws":
        """The laws of these numbers, in this order."""
        return DensityLaws([self.laws[number] for number in numbers])

    def drawn(self, keys_n: Tensor) -> list[Any]:
        """One outcome of each law, by the noise of its key."""
        both = zip(self.laws, keys_n.tolist(), strict=True)
        return [only(law.draw(generator(key), 1)) for law, key in both]

    def log_density(self, outcomes: Sequence[Any]) -> NDArray[np.float64]:
        """The log-density [n] of the i-th outcome under the i-th law."""
        found = [
            float(np.asarray(law.log_density(alone(outcome)), np.float64).reshape(()))
            for law, outcome in zip(self.laws, outcomes, strict=True)
        ]
        return np.array(found, np.float64)


ContinuousLaws: TypeAlias = NormalLaws | DensityLaws
LawTable: TypeAlias = Probabilities | ContinuousLaws


def only(outcomes: Any) -> Any:
    """The only outcome of a list or an array of one."""
    if len(outcomes) != 1:
        raise ConfigurationError(
            f"Density.draw(rng, 1) must return one outcome; got {len(outcomes)}; return an array "
            "or a list as long as was asked for"
        )
    first = outcomes[0]
    return first.item() if isinstance(first, np.generic) else first


def alone(outcome: Any) -> Any:
    """One outcome as the array (or list) of one that `Density.log_density` takes."""
    if isinstance(outcome, (float, int, np.ndarray)):
        return np.asarray(outcome)[None]
    return [outcome]


def log_normal(
    values_nD: NDArray[np.float64], mean: ArrayLike, std: ArrayLike
) -> NDArray[np.float64]:
    """Log-densities [n] of normal laws of independent coordinates."""
    scaled = (values_nD - np.asarray(mean)) / np.asarray(std)
    size = np.log(np.broadcast_to(std, scaled.shape)).sum(-1)
    found = -0.5 * (scaled**2).sum(-1) - size - 0.5 * scaled.shape[-1] * np.log(2 * np.pi)
    return np.asarray(found)


def normals(keys_n: Tensor, count: int) -> NDArray[np.float64]:
    """Standard normal numbers [n, count] of these streams, by inversion of 53 bits."""
    return np.asarray(torch.special.ndtri(fine_uniforms(keys_n, count)))


def fine_uniforms(keys_n: Tensor, count: int) -> Tensor:
    """Uniforms [n, count] of 53 bits within (0, 1): log-densities are compared in float64."""
    bits = (noise.words(keys_n, count) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) * 2.0**-52


def generator(key: int) -> np.random.Generator:
    """NumPy's generator for one stream."""
    return np.random.Generator(np.random.Philox(key=key % 2**64))
