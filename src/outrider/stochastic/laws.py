"""f and g on n states, and what they may return: probabilities, normal laws, densities; as tables.

A table holds the laws of n states; `read` makes one of what came, or refuses it in words. Those of
continuous laws draw outcomes and tell log-densities.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from outrider import arguments, noise
from outrider.errors import ConfigurationError, NumericalError, WorkerTimeout


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


# What f and g have returned, read: laws in tables, or one sentence of what is wrong with it.

SLACK = 1e-5  #: a law may miss 1 by so much, as rounded numbers do; it is divided by its sum


def read(name: str, given: object, count: int) -> LawTable:
    """What f or g (`name`) returned for `count` states.

    Raises ConfigurationError for another number of laws or something that is no law, NumericalError
    for probabilities and parameters that are none.
    """
    if isinstance(given, Gaussian):
        return _gaussian(name, given, count)
    if isinstance(given, Sequence) and given and all(isinstance(law, Density) for law in given):
        _check_count(name, len(given), count)
        return DensityLaws(tuple(given))
    try:
        table = torch.as_tensor(_plain(given), device="cpu").detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        arguments.refuse(
            f"what {name} returns",
            "probabilities [n, V], a Gaussian, or a list of n Density",
            given,
            "return one law for each state",
        )
    if table.ndim != 2:
        raise ConfigurationError(
            f"what {name} returns must have one row of probabilities for each of {count} states; "
            f"got the shape {tuple(table.shape)}; return an array [n, V], a Gaussian or a list of "
            "Density"
        )
    _check_count(name, len(table), count)
    total = table.sum(-1)
    wrong = ~((table >= 0).all(-1) & ((total - 1).abs() <= SLACK))  # NaN is wrong, too
    if wrong.any():
        at = int(wrong.nonzero()[0, 0])
        raise NumericalError(
            f"{name} must return probabilities that sum to 1; got "
            f"{arguments.shown(table[at].tolist())} with sum {float(total[at]):.6g} for state {at} "
            f"of {count}; divide by the sum"
        )
    return Probabilities(table / total[:, None])


def _plain(given: object) -> object:
    """Lists of arrays as one array of its own (f may fill its own again, and what comes from a
    cluster cannot be written); tensors as they are."""
    return given if isinstance(given, Tensor) else np.array(given, np.float64)


def _check_count(name: str, got: int, count: int) -> None:
    if got != count:
        raise ConfigurationError(
            f"{name} must return one law for each state; got {got} laws for {count} states; "
            f"{name} takes a list of states"
        )


def _gaussian(name: str, given: Gaussian, count: int) -> NormalLaws:
    mean = np.asarray(_host(given.mean), np.float64)
    if mean.ndim not in (1, 2):
        raise ConfigurationError(
            f"Gaussian.mean must be numbers [n] or vectors [n, D]; {name} gave the shape "
            f"{mean.shape}; flatten outcomes of more axes"
        )
    _check_count(name, len(mean), count)
    try:
        std = np.broadcast_to(np.asarray(_host(given.std), np.float64), mean.shape)
    except ValueError:
        raise ConfigurationError(
            f"Gaussian.std must broadcast to mean's shape {mean.shape}; {name} gave the shape "
            f"{np.shape(given.std)}; give a number or an array of mean's shape"
        ) from None
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
        raise NumericalError(
            f"{name} must return finite means and standard deviations above 0; got means in "
            f"[{mean.min():.4g}, {mean.max():.4g}] and deviations in [{std.min():.4g}, "
            f"{std.max():.4g}]; a law without spread has no density: draw it as an outcome of V"
        )
    wide = mean.reshape(count, -1)
    return NormalLaws(wide, std.reshape(wide.shape), plain=mean.ndim == 1)


def _host(given: object) -> object:
    return given.detach().cpu().numpy() if isinstance(given, Tensor) else given


def joined(name: str, tables: Sequence[LawTable]) -> LawTable:
    """The laws of several calls of one function as one table."""
    if len(tables) == 1:
        return tables[0]
    wide = [table for table in tables if isinstance(table, Probabilities)]
    normal = [table for table in tables if isinstance(table, NormalLaws)]
    other = [table for table in tables if isinstance(table, DensityLaws)]
    if len(other) == len(tables):
        return DensityLaws([law for table in other for law in table.laws])
    kinds = sorted({described(table) for table in tables})
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{name} must return laws of one kind over the same outcomes; got "
            f"{' and '.join(kinds)}; return one kind for every state"
        )
    if wide:
        return Probabilities(torch.cat([table.probs_nV for table in wide]))
    means = np.concatenate([table.mean_nD for table in normal])
    stds = np.concatenate([table.std_nD for table in normal])
    return NormalLaws(means, stds, normal[0].plain)


def described(table: LawTable) -> str:
    """Over which outcomes these laws are, for messages."""
    if isinstance(table, Probabilities):
        return f"laws of {table.probs_nV.shape[1]} outcomes"
    if isinstance(table, DensityLaws):
        return "densities"
    return f"normal laws of {'numbers' if table.plain else f'{table.mean_nD.shape[1]} coordinates'}"


def check_alike(target: LawTable, draft: LawTable) -> None:
    """Refuse laws of f and g over different outcomes."""
    kinds = {type(target), type(draft)}
    if DensityLaws in kinds and Probabilities not in kinds:  # which do not say over what they are
        return
    if described(target) != described(draft):
        raise ConfigurationError(
            f"f and g must give laws over the same outcomes; got {described(target)} of f and "
            f"{described(draft)} of g; an outcome that one of them never has gets probability 0"
        )


# f and g on many states: in this process as one call, or in parts by an executor.

State = TypeVar("State")


class BatchedFunction(Generic[State]):
    """f or g, with the number of states it was asked about and of rounds it was asked in.

    executor         None: one call in this process; else `submit` of it is given parts
    states_per_call  states of a part
    timeout          seconds that a round may take in an executor; None: any
    """

    def __init__(
        self,
        name: str,
        function: Callable[[list[State]], object],
        executor: Executor | None = None,
        states_per_call: int = 1,
        timeout: float | None = None,
    ) -> None:
        if not callable(function):
            arguments.refuse(name, "a function of a list of states", function, "pass a callable")
        self.name, self.function = name, function
        self.executor, self.states_per_call, self.timeout = executor, states_per_call, timeout
        self.rounds = self.evaluations = 0

    def __call__(self, states: Sequence[State]) -> LawTable:
        """The laws of these states, in their order."""
        self.rounds += 1
        self.evaluations += len(states)
        if self.executor is None:
            return self._read(self._told(lambda: self.function(list(states)), len(states)), states)
        size = self.states_per_call
        parts = [list(states[at : at + size]) for at in range(0, len(states), size)]
        found: list[Future[object]] = []
        try:
            for part in parts:
                found.append(self.executor.submit(self.function, part))
            end = None if self.timeout is None else time.monotonic() + self.timeout
            return joined(
                self.name,
                [
                    self._read(self._told(self._waiting(one, end), len(part)), part)
                    for one, part in zip(found, parts, strict=True)
                ],
            )
        finally:
            for one in found:
                one.cancel()  # without effect on what is done, or runs already

    def _waiting(self, future: "Future[object]", end: float | None) -> Callable[[], object]:
        def wait() -> object:
            if end is None:
                return future.result()
            try:
                return future.result(max(end - time.monotonic(), 0))
            except TimeoutError:
                if future.done():  # the function's own
                    raise
                raise WorkerTimeout(
                    f"{self.name} did not answer within timeout={self.timeout:g} seconds in round "
                    f"{self.rounds}; raise the timeout, or give it fewer states_per_call "
                    f"({self.states_per_call} now). What runs in the executor goes on there"
                ) from None

        return wait

    def _read(self, given: object, states: Sequence[State]) -> LawTable:
        return read(self.name, given, len(states))

    def _told(self, call: Callable[[], object], count: int) -> object:
        """The call's result; what it raises is told where it comes from, and goes on."""
        try:
            return call()
        except Exception as error:
            error.add_note(f"raised by {self.name} in its round {self.rounds}, on {count} states")
            raise
