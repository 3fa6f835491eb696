"""Stochastic speculative execution of any process, not of text alone (Leviathan et al. 2023).

    while a trajectory is not at its end:
        outcome = a draw from f(state)      # f: slow, but it takes several states at once
        state = step(state, outcome)

`speculate` runs g, which is cheap, some outcomes ahead, asks f about all the states on the way in
one call, and keeps what the rules of `outrider.verifiers` (or, for densities, of
`outrider.stochastic.continuous`) keep. The outcomes have the law that f alone would give them.

outcomes        what g has run ahead, and outcomes out of 0 .. V - 1 by the rules of tokens
continuous      outcomes out of a continuum: rejection and block verification by densities
laws            f and g on many states, here or in an executor; what they return, checked
rounds          `speculate`, the loop
"""

from typing import TYPE_CHECKING

from outrider import lazy

if TYPE_CHECKING:
    from outrider.stochastic.laws import Density, Gaussian
    from outrider.stochastic.rounds import Speculation, speculate

__all__ = ["Density", "Gaussian", "Speculation", "speculate"]

_EXPORTS = {
    "Density": "outrider.stochastic.laws",
    "Gaussian": "outrider.stochastic.laws",
    "Speculation": "outrider.stochastic.rounds",
    "speculate": "outrider.stochastic.rounds",
}

__getattr__, __dir__ = lazy.exports(__name__, _EXPORTS)
