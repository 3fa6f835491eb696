"""Sampling from a diffusion model whose steps are normal laws: fewer rounds of the slow denoiser.

    python examples/diffusion.py [--picture diffusion.svg]

Data: 2,000 points of two spirals. Their exact denoiser (the mean of the point behind a noisy one,
over all the points) is the slow f; the cheap g takes the mean over a twentieth of them. Each of 100
steps back from noise (DDPM, Ho et al. 2020) is a normal law, with one covariance for both, so that
a refused step is reflected, not drawn again. The samples have the slow denoiser's law.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

import outrider
from outrider.stochastic import Gaussian, Speculation

STEPS = 100


class Noisy(NamedTuple):
    """A point on its way back from noise, with so many steps to go."""

    point: np.ndarray
    left: int


def spirals(count: int, rng: np.random.Generator) -> np.ndarray:
    turn = 3 * np.pi * np.sqrt(rng.random(count))
    side = rng.choice([-1, 1], count)
    points = np.stack([turn * np.cos(turn), turn * np.sin(turn)], 1) * side[:, None] / 6
    return points + 0.03 * rng.standard_normal(points.shape)


KEPT = np.cumprod(1 - np.linspace(1e-3, 0.12, STEPS))  # of the data's variance, by steps of noise


def denoiser(data: np.ndarray) -> Callable[[list[Noisy]], Gaussian]:
    """The law of one step back, with the mean of `data` behind each noisy point."""

    def law(states: list[Noisy]) -> Gaussian:
        points = np.stack([state.point for state in states])
        at = np.array([state.left for state in states]) - 1
        kept, before = KEPT[at], np.where(at > 0, KEPT[at - 1], 1.0)
        step = kept / before
        apart = ((points[:, None] - np.sqrt(kept)[:, None, None] * data) ** 2).sum(-1)
        weight = -apart / (2 * (1 - kept)[:, None])
        weight = np.exp(weight - weight.max(1, keepdims=True))
        clean = weight @ data / weight.sum(1, keepdims=True)
        mean = (
            np.sqrt(before) * (1 - step) / (1 - kept) * clean.T
            + np.sqrt(step) * (1 - before) / (1 - kept) * points.T
        ).T
        spread = np.sqrt((1 - step) * np.maximum((1 - before) / (1 - kept), 0.02))
        return Gaussian(mean, spread[:, None])

    return law


def back(state: Noisy, point: np.ndarray) -> Noisy:
    return Noisy(point, state.left - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", type=Path, help="an SVG or PNG to write")
    parser.add_argument("--samples", type=int, default=300)
    asked = parser.parse_args()
    rng = np.random.default_rng(0)
    data = spirals(2000, rng)
    start = [Noisy(rng.standard_normal(2), STEPS) for _ in range(asked.samples)]
    slow, cheap = denoiser(data), denoiser(data[::20])
    runs = {}
    for name, guess in (("plain", None), ("speculative", cheap)):
        begun = time.process_time()
        runs[name] = outrider.speculate(
            slow, guess, back, start, STEPS, num_speculative_outcomes=8, seed=1
        )
        seconds, mean = time.process_time() - begun, np.mean(runs[name].rounds_of)
        print(
            f"{name:12} {runs[name].rounds:3} rounds of the slow denoiser; "
            f"of one sample {mean:.1f}; {seconds:.1f} s"
        )
    run, plain = runs["speculative"], runs["plain"]
    kept = [round(share, 2) for share in run.acceptance_by_position]
    print(f"kept of what the cheap one proposed, by steps ahead: {kept}")
    for axis, name in enumerate("xy"):
        both = [[state.point[axis] for state in one.states] for one in (run, plain)]
        print(f"{name} of the samples, two samples: KS p = {stats.ks_2samp(*both).pvalue:.3f}")
    if asked.picture:
        draw(plain, run, asked.picture)


def draw(plain: Speculation, run: Speculation, path: Path) -> None:
    """Samples of both, and what was kept."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 8})
    figure, axes = pyplot.subplots(1, 3, figsize=(7, 2.5))
    for name, one, axis in (("plain", plain, axes[0]), ("speculative", run, axes[1])):
        points = np.array([state.point for state in one.states])
        axis.plot(*points.T, ".", ms=2.5, color="C0" if one is plain else "C1")
        axis.set(title=f"{name}: {one.rounds} rounds", xticks=(), yticks=(), aspect="equal")
    shares = run.acceptance_by_position
    axes[2].bar(range(1, len(shares) + 1), shares, color="C1")
    axes[2].set(xlabel="steps ahead", ylim=(0, 1), title="kept of the cheap one's")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
