"""`outrider.speculate`: what it returns, where f runs, and what it says of what is wrong."""

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from walks import even_law, moved, slow_law

import outrider
from outrider.errors import (
    BackendUnavailable,
    ConfigurationError,
    NumericalError,
    UnknownName,
    WorkerTimeout,
)
from outrider.stochastic import Density, Gaussian, continuous
from outrider_ray import RayExecutor


def run(f=slow_law, g=even_law, step=moved, states=(0, 1), steps=12, seed=4, **options):
    return outrider.speculate(f, g, step, list(states), steps, seed=seed, **options)


def test_what_a_run_says_of_itself():
    seen = {"f": 0, "g": 0, "calls": 0}

    def f(states):
        seen["f"] += len(states)
        seen["calls"] += 1
        return slow_law(states)

    def g(states):
        seen["g"] += len(states)
        return even_law(states)

    found = run(f, g)
    assert [len(row) for row in found.outcomes] == [12, 12]
    assert found.rounds == seen["calls"] == max(found.rounds_of)
    assert (found.evaluations_f, found.evaluations_g) == (seen["f"], seen["g"])
    assert found.stats.new_tokens == 24
    assert found.stats.steps == sum(found.rounds_of)
    assert found.stats.accepted == 24 - found.stats.steps
    assert len(found.acceptance_by_position) == 4
    assert min(found.acceptance_by_position) > 0
    assert found.acceptance_by_position == sorted(found.acceptance_by_position, reverse=True)
    assert 0.8 < found.stats.alpha < 1
    assert run().outcomes == found.outcomes != run(seed=5).outcomes
    assert run(seed=None).outcomes != run(seed=None).outcomes


def test_a_perfect_g_takes_the_fewest_rounds():
    for ahead, rounds in ((1, 10), (4, 4), (19, 1), (30, 1)):
        found = run(g=slow_law, steps=20, num_speculative_outcomes=ahead)
        assert found.rounds == rounds
        assert found.stats.accepted == found.stats.drafted


def test_trees_are_asked_about_as_a_whole():
    asked = []

    def f(states):
        asked.append(len(states))
        return slow_law(states)

    run(f, states=[0], steps=30, branching=(3, 2, 1))
    assert asked[0] == 1 + 3 + 6 + 6


def test_without_g_it_is_plain_execution():
    found = run(g=None)
    assert found.rounds == 12
    assert found.evaluations_g == found.stats.drafted == 0
    assert run(num_speculative_outcomes=0).rounds == 12
    assert run(steps=0).outcomes == [[], []]
    assert run(states=[]).outcomes == []


def test_trajectories_end_where_they_are_told():
    def until(state):
        return abs(state) >= 2

    for options in ({}, {"branching": (3, 2)}, {"rule": "rejection"}):
        found = run(states=range(-3, 4), steps=60, until=until, **options)
        for begin, row, end in zip(range(-3, 4), found.outcomes, found.states, strict=True):
            path = begin + np.cumsum([0, *(value - 1 for value in row)])
            assert path[-1] == end
            assert all(map(until, path[-1:])) or len(row) == 60
            assert not any(map(until, path[:-1]))


def test_f_is_never_asked_about_an_end():
    def f(states):
        assert all(abs(state) < 2 for state in states)
        return slow_law(states)

    run(f, states=[0] * 20, steps=60, until=lambda state: abs(state) >= 2)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_pool_gives_the_same_outcomes(size):
    threads = set()

    def f(states):
        threads.add(threading.get_ident())
        assert len(states) <= size
        return slow_law(states)

    with ThreadPoolExecutor(2) as pool:
        found = run(f, executor=pool, states_per_call=size, timeout=60)
    assert threading.get_ident() not in threads
    assert found.outcomes == run().outcomes
    assert found.rounds == run().rounds


def test_a_pool_of_processes_gives_the_same_outcomes():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert run(executor=pool, states_per_call=5).outcomes == run().outcomes


def test_normal_laws_from_a_pool():
    def f(states):
        return Gaussian(np.tanh(states), 0.5)

    def g(states):
        return Gaussian(np.zeros(len(states)), 0.5)

    with ThreadPoolExecutor(2) as pool:
        found = run(f, g, lambda s, x: x, executor=pool)
    assert found.outcomes == run(f, g, lambda s, x: x).outcomes


def test_a_pool_that_is_too_slow():
    free = threading.Event()

    def f(states):
        free.wait(60)
        return slow_law(states)

    with ThreadPoolExecutor(1) as pool:
        try:
            with pytest.raises(
                WorkerTimeout, match=r"f did not answer within timeout=0.05 .*round 1"
            ):
                run(f, executor=pool, timeout=0.05)
        finally:
            free.set()


def test_a_timeout_of_f_itself_is_told_as_it_is():
    def f(states):
        raise TimeoutError("a socket")

    with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError, match="a socket") as told:
        run(f, executor=pool, timeout=60)
    assert not isinstance(told.value, WorkerTimeout)


@pytest.mark.parametrize("pooled", [False, True])
def test_what_f_raises_goes_through_with_a_note(pooled):
    def f(states):
        if max(map(abs, states)) > 2:
            raise KeyError("far out")
        return slow_law(states)

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError, match="far out") as told:
        run(f, states=[0] * 20, steps=50, executor=pool if pooled else None)
    assert "raised by f in its round" in told.value.__notes__[0]


def test_what_g_and_step_raise_goes_through():
    def wrong(states):
        raise ZeroDivisionError("in here")

    with pytest.raises(ZeroDivisionError) as told:
        run(g=wrong)
    assert "raised by g in its round 1, on 2 states" in told.value.__notes__
    with pytest.raises(TypeError):
        run(step=lambda state: state)


def constant(law):
    return lambda states: [law] * len(states)


@pytest.mark.parametrize("law", [[0.5, 0.3, 0.1], [0.5, 0.6, -0.1], [np.nan, 0.5, 0.5], [0, 0, 0]])
@pytest.mark.parametrize("name", ["f", "g"])
def test_laws_that_do_not_sum_to_one(law, name):
    with pytest.raises(NumericalError, match=rf"{name} must return probabilities that sum to 1"):
        run(**{name: constant(law)})


def test_laws_over_other_outcomes_or_of_other_states():
    with pytest.raises(ConfigurationError, match="laws of 2 outcomes of f and laws of 3 outcomes"):
        run(f=constant([0.5, 0.5]))
    with pytest.raises(ConfigurationError, match="normal laws of numbers of f and laws of 3"):
        run(f=lambda states: Gaussian(np.zeros(len(states))))
    with pytest.raises(ConfigurationError, match="normal laws of 2 coordinates of f and normal"):
        run(
            f=lambda states: Gaussian(np.zeros((len(states), 2))),
            g=lambda states: Gaussian(np.zeros(len(states))),
        )
    with pytest.raises(ConfigurationError, match="one law for each state; got 1 laws for 2 states"):
        run(g=lambda states: even_law(states[:1]))
    with pytest.raises(ConfigurationError, match=r"one row of probabilities .* shape \(3,\)"):
        run(g=lambda states: np.full(3, 1 / 3))
    with pytest.raises(ConfigurationError, match="what g returns must be probabilities"):
        run(g=lambda states: "even")


def test_a_g_that_is_zero_where_f_is_not():
    """What g never proposes comes from the residual; if it proposes nothing of f's, from f."""
    found = run(constant([0.2, 0.8, 0.0]), constant([0.0, 1.0, 0.0]), states=[0] * 200)
    assert np.mean(np.array(found.outcomes) == 0) == pytest.approx(0.2, abs=0.03)
    found = run(constant([1.0, 0.0, 0.0]), constant([0.0, 0.5, 0.5]), steps=9)
    assert found.outcomes == [[0] * 9] * 2
    assert found.rounds == 9
    assert found.acceptance_by_position == [0, 0, 0, 0]


def test_densities_that_are_none():
    def same(states):
        return [Density(lambda rng, n: rng.random(n), np.zeros_like) for _ in states]

    def saying(value):
        law = Density(lambda rng, n: rng.random(n), lambda x: np.full(len(x), value))
        return lambda states: [law] * len(states)

    for value in (np.nan, np.inf):
        with pytest.raises(NumericalError, match="f's log-density must be finite or -inf"):
            run(saying(value), same, lambda s, x: x)
    with pytest.raises(NumericalError, match="g's log-density must be finite at what was drawn"):
        run(same, saying(-np.inf), lambda s, x: x)
    with pytest.raises(NumericalError, match="finite means and standard deviations above 0"):
        run(lambda states: Gaussian(np.zeros(len(states)), 0.0), None, lambda s, x: x)
    with pytest.raises(ConfigurationError, match=r"Density.draw\(rng, 1\) must return one outcome"):
        run(lambda s: [Density(lambda rng, n: np.zeros(3), len)] * len(s), None, lambda s, x: x)


def test_densities_that_do_not_integrate_to_one(monkeypatch):
    monkeypatch.setattr(continuous, "MOST_TRIALS", 1 << 12)

    def unit(scale):
        law = Density(lambda rng, n: rng.random(n), lambda x: np.full(len(x), np.log(scale)))
        return lambda states: [law] * len(states)

    with pytest.raises(NumericalError, match="check that log_density of both integrates to 1"):
        run(unit(0.5), unit(1.0), lambda s, x: x)


def gaussians(states):
    return Gaussian(np.zeros(len(states)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": -1}, "steps must be a whole number of at least 0"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"num_speculative_outcomes": -1}, "num_speculative_outcomes must be"),
        ({"branching": (2, 0)}, "branching must be whole numbers of at least 1"),
        ({"branching": (99, 99)}, "a tree has at most"),
        ({"timeout": 3}, "a timeout is of an executor"),
        ({"executor": 3}, "executor must be an Executor"),
        ({"states_per_call": 0}, "states_per_call must be"),
        ({"rule": "no"}, "unknown rule"),
        ({"rule": "block", "branching": (2, 2)}, "cannot verify a tree"),
        ({"rule": "kseq", "branching": (2, 2)}, "cannot verify a tree"),
        ({"rule": "block", "shared_noise": True}, "cannot verify coupled drafts"),
        ({"f": 3}, "f must be a function"),
        ({"f": gaussians, "g": gaussians, "branching": (2,)}, "drafted as a chain"),
        ({"f": gaussians, "g": gaussians, "shared_noise": True}, "drafted as a chain"),
        ({"f": gaussians, "g": gaussians, "rule": "traversal"}, "cannot verify outcomes of a cont"),
    ],
)
def test_what_cannot_be_asked_for(options, words):
    with pytest.raises(ConfigurationError, match=words) as told:
        run(**options)
    assert options != {"rule": "no"} or isinstance(told.value, UnknownName)


def test_states_must_be_a_list():
    with pytest.raises(ConfigurationError, match="states must be a list of states"):
        outrider.speculate(slow_law, even_law, moved, 0, 3)


def test_ray_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(BackendUnavailable, match=r"pip install outrider-ray"):
        RayExecutor()


def test_ray_gives_the_same_outcomes():
    ray = pytest.importorskip("ray")
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # f is of a module that lies beside this file
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": path},
    )
    try:
        found = run(executor=RayExecutor(num_cpus=1), states_per_call=5, timeout=60)
        assert found.outcomes == run().outcomes
    finally:
        ray.shutdown()


def test_laws_that_cannot_be_written_are_read():
    def shut(states):
        table = np.array(slow_law(states))
        table.setflags(write=False)  # as what comes from a cluster
        return table

    assert run(f=shut).outcomes == run().outcomes
