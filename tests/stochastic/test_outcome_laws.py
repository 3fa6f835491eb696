"""Outcomes 0 .. V - 1 under `speculate` have f's law: by enumeration, and end to end."""

from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy import stats
from walks import even_law, moved, slow_law

import outrider
from outrider.stochastic import outcomes
from outrider.stochastic.laws import BatchedFunction
from outrider.stochastic.rounds import _Rules, _Trajectories

V = 3


class Toy:
    """Context-dependent laws over V outcomes; a state is the number of a script and what came."""

    def __init__(self, seed, zeros=True):
        self.rng, self.zeros = np.random.default_rng(seed), zeros
        self.tables = {"f": {}, "g": {}}

    def law(self, name, prefix):
        if prefix not in self.tables[name]:
            law = self.rng.dirichlet(np.full(V, 0.7))
            if self.zeros and self.rng.random() < 0.4:
                law[self.rng.integers(V)] = 0
            self.tables[name][prefix] = law / law.sum()
        return self.tables[name][prefix]

    def ended(self, prefix):
        return len(prefix) > 0 and prefix[-1] == V - 1

    def truth(self, length, prefix=()):
        """Probability of every text of f, cut where it ends."""
        if len(prefix) == length or self.ended(prefix):
            return {prefix: 1.0}
        found = {}
        for value, p in enumerate(self.law("f", prefix)):
            for text, q in self.truth(length, (*prefix, value)).items():
                found[text] = found.get(text, 0) + p * q
        return found


def scripts(toy, counts, prefix=()):
    """Every (children by prefix, probability) that g can draw below a prefix."""
    if not counts or toy.ended(prefix):
        return [({}, 1.0)]
    law, found = toy.law("g", prefix), []
    some = [v for v in range(V) if law[v] > 0]
    for drawn in permutations(some, min(counts[0], len(some))):
        chance, left = 1.0, 1.0
        for value in drawn:
            chance *= law[value] / left
            left -= law[value]
        below = [scripts(toy, counts[1:], (*prefix, value)) for value in drawn]
        for parts in product(*below):
            script = {prefix: list(drawn)}
            for part, _ in parts:
                script |= part
            found.append((script, chance * float(np.prod([p for _, p in parts]))))
    return found


def emitted(toy, rule, counts, monkeypatch, wrong=False):
    """The law of len(counts) + 1 outcomes that begin with one round of the real code."""
    known = scripts(toy, counts)
    stash = []

    def g(states):
        stash[:] = states
        return np.array([toy.law("f" if wrong else "g", prefix) for _, prefix in states])

    monkeypatch.setattr(
        outcomes, "drawn", lambda table, keys, count: [known[i][0][pre] for i, pre in stash]
    )
    run = _Trajectories(
        BatchedFunction("f", lambda states: np.array([toy.law("f", pre) for _, pre in states])),
        BatchedFunction("g", g),
        lambda state, value: (state[0], (*state[1], value)),
        lambda state: toy.ended(state[1]),
        _Rules(rule, None, False, counts),
        torch.zeros(len(known), dtype=torch.int64),
    )
    states = [(number, ()) for number in range(len(known))]
    rows = list(range(len(known)))
    here = run.propose(states, rows, [0] * len(rows), [len(counts)] * len(rows))
    lengths = {len(here.states[row][node][1]) for row, node in here.asked}
    assert lengths == set(range(len(counts) + 1)), "drafted to the last level"
    outcome = run.rules.verifier.outcome(*outcomes.as_draft(here, False))
    found, length = {}, len(counts) + 1
    for row, (_, weight) in enumerate(known):
        for node, there in enumerate(here.there[row]):
            stop = weight * float(outcome.stop_BN[row, node])
            if not there or not stop:
                assert abs(stop) < 1e-15
                continue
            prefix = here.states[row][node][1]
            behind = [prefix] if toy.ended(prefix) else [(*prefix, v) for v in range(V)]
            for text in behind:
                share = stop * (
                    1 if text == prefix else float(outcome.next_BNV[row, node, text[-1]])
                )
                for whole, rest in toy.truth(length, text).items():
                    found[whole] = found.get(whole, 0) + share * rest
    return found


def error(found, truth):
    return max(abs(found.get(text, 0) - truth.get(text, 0)) for text in {*found, *truth})


SHAPES = [((1, 1), None), ((1, 1, 1), "block"), ((1, 1), "rejection"), ((2, 1), None)]
SHAPES += [((2, 2), "rejection"), ((3,), "traversal"), ((1,), "non_iterative")]


@pytest.mark.parametrize(("counts", "rule"), SHAPES)
def test_every_draft_enumerated(counts, rule, monkeypatch):
    for seed in range(4):
        toy = Toy(seed)
        truth = toy.truth(len(counts) + 1)
        assert error(emitted(toy, rule, counts, monkeypatch), truth) < 1e-12


def test_enumeration_sees_what_is_wrong(monkeypatch):
    toy = Toy(1, zeros=False)
    truth = toy.truth(3)
    assert error(emitted(toy, "lenience", (1, 1), monkeypatch), truth) > 1e-3
    assert error(emitted(toy, None, (1, 1), monkeypatch, wrong=True), truth) > 1e-3


def walked(many, **options):
    return outrider.speculate(slow_law, even_law, moved, [0] * many, 4, **options)


def surprise(run):
    """p-value of the outcomes of four steps against their exact law."""
    texts = list(product(range(3), repeat=4))
    law = []
    for text in texts:
        state, chance = 0, 1.0
        for value in text:
            chance *= slow_law([state])[0, value]
            state = moved(state, value)
        law.append(chance)
    number = {text: at for at, text in enumerate(texts)}
    seen = np.bincount([number[tuple(row)] for row in run.outcomes], minlength=len(texts))
    return stats.chisquare(seen, np.array(law) * seen.sum()).pvalue


@pytest.mark.parametrize("options", [{}, {"branching": (2, 1)}, {"shared_noise": True}])
def test_outcomes_of_whole_runs(options):
    run = walked(6000, seed=3, **options)
    assert surprise(run) > 1e-3
    assert run.exact
    assert run.stats.steps < run.stats.new_tokens
    assert [sum(row) - len(row) for row in run.outcomes] == run.states


def test_outcomes_of_a_lossy_rule_are_seen():
    run = walked(6000, seed=3, rule="lenience", rule_options={"lenience": 0.3})
    assert not run.exact
    assert surprise(run) < 1e-6


def test_shared_noise_makes_outcomes_a_function_of_the_seed():
    plain = outrider.speculate(slow_law, None, moved, [0] * 9, 40, seed=5, shared_noise=True)
    for options in ({}, {"num_speculative_outcomes": 7}, {"branching": (3, 2)}):
        run = outrider.speculate(
            slow_law, even_law, moved, [0] * 9, 40, seed=5, shared_noise=True, **options
        )
        assert run.outcomes == plain.outcomes
        assert run.rounds < plain.rounds == 40


@pytest.mark.parametrize("options", [{}, {"branching": (1, 3, 2)}, {"rule": "rejection"}])
def test_a_trajectory_does_not_depend_on_its_neighbours(options):
    many = outrider.speculate(slow_law, even_law, moved, list(range(8)), 21, seed=5, **options)
    few = outrider.speculate(slow_law, even_law, moved, [0, 1, 2], 21, seed=5, **options)
    assert few.outcomes == many.outcomes[:3]
    assert few.rounds_of == many.rounds_of[:3]
