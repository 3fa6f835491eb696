"""An epidemic, simulated by speculative execution with a surrogate: fewer rounds of the slow model.

    python examples/epidemic.py [--picture epidemic.svg]

300 people; whoever is infected passes it on for five days, some much more than others (gamma,
k = 0.8). How many are infected in a day is drawn from a law that the slow model integrates over
how infectious today's cases are; the surrogate takes a negative binomial law of the same mean. Both
are asked about all the days that the surrogate has run ahead at once. The outcomes have the slow
model's law, whatever the surrogate says: 400 epidemics of each are compared at the end.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import special, stats

import outrider

PEOPLE, DAYS, INFECTIOUS_DAYS = 300, 60, 5
RATE, SPREAD = 0.34, 0.8  # infections a day and case; k of the gamma law


class Day(NamedTuple):
    """Who is left, and how many fell ill on each of the last days."""

    susceptible: int
    recent: tuple[int, ...]


def next_day(day: Day, infected: int) -> Day:
    return Day(day.susceptible - infected, (*day.recent[1:], infected))


def over(day: Day) -> bool:
    return not any(day.recent)


COUNT = np.arange(PEOPLE + 1)
NODES = (np.arange(64) + 0.5) / 64  # quantiles of how infectious today's cases are
LOG_FACTORIAL = special.gammaln(COUNT + 1)


def slow(days: list[Day]) -> np.ndarray:
    """The law [n, PEOPLE + 1] of new infections, integrated over quantiles of the force."""
    laws = np.zeros((len(days), PEOPLE + 1))
    for law, day in zip(laws, days, strict=True):
        shape, left = SPREAD * sum(day.recent), day.susceptible
        force = special.gammaincinv(shape, NODES)[:, None] * RATE / SPREAD / PEOPLE
        count = COUNT[: left + 1]
        ways = LOG_FACTORIAL[left] - LOG_FACTORIAL[count] - LOG_FACTORIAL[left - count]
        chance = ways + count * np.log(-np.expm1(-force)) - (left - count) * force
        law[: left + 1] = np.exp(chance).mean(0)
    return laws / laws.sum(1, keepdims=True)


def surrogate(days: list[Day]) -> np.ndarray:
    """A negative binomial law with the same mean, cut where nobody is left."""
    left = np.array([day.susceptible for day in days])[:, None]
    cases = np.array([sum(day.recent) for day in days])[:, None]
    mean = left * (1 - np.exp(-RATE * cases / PEOPLE))
    law = stats.nbinom.pmf(COUNT, SPREAD * cases, 1 / (1 + mean / (SPREAD * cases)))
    law *= COUNT <= left
    return law / law.sum(1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", type=Path, help="an SVG or PNG to write")
    parser.add_argument("--epidemics", type=int, default=100)
    asked = parser.parse_args()
    start = [Day(PEOPLE - 4, (0, 0, 0, 2, 2))] * asked.epidemics
    runs = {}
    for name, guess in (("plain", None), ("speculative", surrogate)):
        begun = time.process_time()
        runs[name] = outrider.speculate(
            slow, guess, next_day, start, DAYS, until=over, num_speculative_outcomes=6, seed=1
        )
        seconds = time.process_time() - begun
        mean = np.mean(runs[name].rounds_of)
        print(
            f"{name:12} {runs[name].rounds:3} rounds of the slow model; of one epidemic {mean:.1f};"
            f" {runs[name].evaluations_f} laws, {seconds:.1f} s"
        )
    run, plain = runs["speculative"], runs["plain"]
    print(f"kept of what the surrogate proposed, by days ahead: {rounded(run)}")
    sizes = [[sum(row) for row in one.outcomes] for one in (run, plain)]
    print(f"total infected, two samples: KS p = {stats.ks_2samp(*sizes).pvalue:.3f}")
    if asked.picture:
        draw(plain, run, asked.picture)


def rounded(run: outrider.stochastic.Speculation) -> list[float]:
    return [round(share, 2) for share in run.acceptance_by_position]


def draw(plain, run, path: Path) -> None:
    """Cases a day in both, and what was kept of the surrogate's days."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 8})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7, 2.6), width_ratios=(2, 1))
    for name, one, colour in (("plain", plain, "C0"), ("speculative", run, "C1")):
        table = np.array([row + [0] * (DAYS - len(row)) for row in one.outcomes])
        low, middle, high = np.quantile(table, (0.1, 0.5, 0.9), axis=0)
        left.fill_between(range(DAYS), low, high, color=colour, alpha=0.2, lw=0)
        left.plot(table.mean(0), color=colour, label=f"{name}, {one.rounds} rounds")
        left.plot(middle, color=colour, lw=0.7, ls=":")
    left.set(xlabel="day", ylabel="new cases", title=f"{len(run.outcomes)} epidemics of each")
    left.legend(frameon=False)
    shares = run.acceptance_by_position
    right.bar(range(1, len(shares) + 1), shares, color="C1")
    right.set(xlabel="days ahead", ylim=(0, 1), title="kept of the surrogate's")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
