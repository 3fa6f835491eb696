"""What f and g have returned, read: laws in tables, or one sentence of what is wrong with it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider import arguments
from outrider.errors import ConfigurationError, NumericalError
from outrider.stochastic.laws import (
    Density,
    DensityLaws,
    Gaussian,
    LawTable,
    NormalLaws,
    Probabilities,
)

SLACK = 1e-5  #: a law may miss 1 by so much, as rounded numbers do; it is divided by its sum


def read(name: str, given: object, count: int) -> LawTable:
    """What f or g (`name`) returned for `count` states.

    Raises ConfigurationError for another number of laws or something that is no law, NumericalError
    for probabilities and parameters that are none.
    """
    if isinstance(given, Gaussian):
        return _gaussian(name, given, count)
    if isinstance(given, Sequence) and given and all(isinstance(law, Density) for law in given):
        _counted(name, len(given), count)
        return DensityLaws(tuple(given))
    try:
        table = torch.as_tensor(_plain(given)).detach().to("cpu", torch.float64)
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
    _counted(name, len(table), count)
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
    """Lists of arrays as one array; tensors as they are."""
    return given if isinstance(given, Tensor) else np.asarray(given, np.float64)


def _counted(name: str, got: int, count: int) -> None:
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
    _counted(name, len(mean), count)
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
