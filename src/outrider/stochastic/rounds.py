"""`speculate`: rounds of g ahead, f on all states at once, a rule, and on."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from outrider import arguments, noise, verifiers
from outrider.errors import ConfigurationError
from outrider.models.config import found
from outrider.sampling.sampling_params import fresh_seed
from outrider.stats import RequestStats
from outrider.stochastic import continuous, laws, outcomes
from outrider.stochastic.laws import BatchedFunction
from outrider.stochastic.outcomes import Place, Proposal, RoundVerdict
from outrider.tree import branching as tree_of, children
from outrider.types import DrawKind, Verifier

State = TypeVar("State")


@dataclass(frozen=True)
class Speculation(Generic[State]):
    """What `speculate` has run, trajectory by trajectory, and what it took.

    outcomes          of each trajectory, in order
    states            in which each has ended
    rounds            calls of f, one after another; without g there are as many as outcomes in the
                      longest trajectory
    rounds_of         in how many of them each trajectory took part
    evaluations_f, evaluations_g   states that f and g were asked about
    stats             counts over trajectories: `new_tokens` are outcomes, `steps` rounds;
                      `mean_acceptance_length`, `accepted_per_position`, `alpha` (of continuous
                      outcomes an unbiased guess) and others
    drafted_per_position   rounds of a trajectory in which g proposed so far ahead
    exact             whether the rule keeps f's law
    """

    outcomes: list[list[Any]]
    states: list[State]
    rounds: int
    rounds_of: list[int]
    evaluations_f: int
    evaluations_g: int
    stats: RequestStats
    drafted_per_position: list[int] = field(default_factory=list)
    exact: bool = True

    @property
    def acceptance_by_position(self) -> list[float]:
        """How often what g proposed 1, 2, ... outcomes ahead was kept, where it proposed so far."""
        kept = self.stats.accepted_per_position
        kept = kept + [0] * (len(self.drafted_per_position) - len(kept))
        return [a / d if d else 0.0 for a, d in zip(kept, self.drafted_per_position, strict=True)]


@dataclass
class _Rules:
    """How proposals are verified: settled when the first law is seen."""

    rule: "str | Verifier | None"
    options: Mapping[str, object] | None
    shared: bool
    counts: tuple[int, ...]
    verifier: Verifier | None = None  #: of outcomes 0 .. V - 1

    def settle(self, table: laws.LawTable, drafts: bool) -> None:
        """Refuse what the rule cannot verify; find the usual rule where none is named."""
        chain = all(count == 1 for count in self.counts)
        if not isinstance(table, laws.Probabilities):
            if not chain or self.shared or self.options:
                raise ConfigurationError(
                    "outcomes of a continuum are drafted as a chain with noise of their own, by a "
                    f"rule without options; got branching={self.counts}, shared_noise="
                    f"{self.shared}, rule_options={self.options}; leave these out"
                )
            return
        kinds = frozenset({DrawKind.COUPLED if self.shared else DrawKind.WITHOUT})
        found = verifiers.chosen(self.rule, self.options, self.shared)
        self.verifier = found or verifiers.default(kinds if drafts else frozenset(), chain)
        if drafts:
            verifiers.check(self.verifier, kinds, chain, "g")

    def __call__(self, proposal: Proposal) -> RoundVerdict:
        if self.verifier is not None:
            return outcomes.verify(self.verifier, proposal, self.shared)
        name = self.rule if isinstance(self.rule, str) else found(self.rule, "name")
        return continuous.verify(name or "rejection", proposal)


class _Trajectories(Generic[State]):
    """All trajectories of one call of `speculate`, and the counts."""

    def __init__(
        self,
        f: BatchedFunction[State],
        g: BatchedFunction[State] | None,
        step: Callable[[State, Any], State],
        until: Callable[[State], bool] | None,
        rules: _Rules,
        seeds: torch.Tensor,
    ) -> None:
        self.f, self.g, self.step, self.until = f, g, step, until
        self.rules, self.seeds = rules, seeds
        self.stats, self.drafted_per_position = RequestStats(), [0] * len(rules.counts)
        self.settled = False

    def ended(self, state: State) -> bool:
        """Whether nothing comes behind a state."""
        return self.until is not None and bool(self.until(state))

    def propose(
        self, states: list[State], rows: list[int], starts: list[int], most: list[int]
    ) -> Proposal:
        """g runs ahead, `most` outcomes of each row at most; then f is asked about all states.

        One topology whatever the rows want: no trajectory's noise depends on another.
        """
        counts = self.rules.counts if self.g is not None else ()
        tree = tree_of(counts)
        kids = [[k for k in row if k >= 0] for row in children(counts)[0].tolist()]
        empty = [[None] * tree.nodes for _ in rows]
        here = Proposal(
            tree,
            counts,
            kids,
            [row.copy() for row in empty],
            [row.copy() for row in empty],
            [[False] * tree.nodes for _ in rows],
            [[False] * tree.nodes for _ in rows],
            self.seeds[rows],
            torch.tensor(starts, device="cpu"),
            [],
            [],
            laws.Probabilities(torch.empty(0, 0, dtype=torch.float64, device="cpu")),
        )
        for row, state in enumerate(states):
            here.states[row][0], here.there[row][0] = state, True
        for depth, count in enumerate(counts):
            self._guess(here, depth, count, most)
        here.asked = [
            (row, node)
            for row in range(len(rows))
            for node in range(tree.nodes)
            if here.there[row][node] and not here.ended[row][node]
        ]
        here.target = self.f([here.states[row][node] for row, node in here.asked])
        self._settle(here.target)
        for _, table in here.guesses:
            laws.check_alike(here.target, table)
        return here

    def _settle(self, table: laws.LawTable) -> None:
        if not self.settled:
            self.rules.settle(table, self.g is not None)
            self.settled = True

    def _guess(self, here: Proposal, depth: int, count: int, most: list[int]) -> None:
        """Draw the children of the nodes at one depth, and go to their states."""
        levels = here.tree.levels
        places: list[Place] = [
            (row, node)
            for row in range(here.rows)
            if depth < most[row]
            for node in range(levels[depth], levels[depth + 1])
            if here.there[row][node] and not here.ended[row][node]
        ]
        if not places:
            return
        assert self.g is not None
        table = self.g([here.states[row][node] for row, node in places])
        self._settle(table)
        here.guesses.append((places, table))
        rows, nodes = torch.tensor(places, device="cpu").T
        keys = outcomes.draft_keys(
            here.seeds_B[rows], here.starts_B[rows], nodes, depth, self.rules.shared
        )
        if isinstance(table, laws.Probabilities):
            drawn = outcomes.drawn(table, keys, count)
        else:
            drawn = [[outcome] for outcome in table.drawn(keys)]
        for (row, node), values in zip(places, drawn, strict=True):
            for kid, value in zip(here.children[node], values, strict=False):
                state = self.step(here.states[row][node], value)
                here.states[row][kid], here.outcomes[row][kid] = state, value
                here.there[row][kid], here.ended[row][kid] = True, self.ended(state)

    def count(self, here: Proposal, verdict: RoundVerdict) -> None:
        """Add a round to the statistics."""
        depth_of = here.tree.depth_BN[0].tolist()
        for row, path in enumerate(verdict.paths):
            self.stats.steps += 1
            self.stats.drafted += sum(here.there[row]) - 1
            self.stats.accept(len(path))
            for depth in {depth_of[n] for n, there in enumerate(here.there[row]) if there and n}:
                self.drafted_per_position[depth - 1] += 1
        self.stats.overlap += verdict.overlap
        self.stats.overlaps += verdict.overlaps


def speculate(
    f: Callable[[list[State]], object],
    g: Callable[[list[State]], object] | None,
    step: Callable[[State, Any], State],
    states: Sequence[State],
    steps: int,
    *,
    num_speculative_outcomes: int = 4,
    branching: Sequence[int] | None = None,
    rule: "str | Verifier | None" = None,
    rule_options: Mapping[str, object] | None = None,
    shared_noise: bool = False,
    until: Callable[[State], bool] | None = None,
    seed: int | None = None,
    executor: Executor | None = None,
    states_per_call: int = 1,
    timeout: float | None = None,
) -> Speculation[State]:
    """Run a stochastic process whose next outcome is drawn from f(state), in fewer rounds of f.

    f, g      a list of n states to the laws of their next outcomes: probabilities [n, V] (outcomes
              are 0 .. V - 1), a `stochastic.Gaussian`, or a list of n `stochastic.Density`. The
              outcomes follow f; g costs less, and what it is worth is how near it is.
              None for g: plain execution, one outcome a round
    step      (state, outcome) to the next state. It runs ahead on outcomes that may be refused, so
              it changes nothing that it is given, and draws nothing itself
    states    where trajectories begin, one each; f and g see those of all trajectories together
    steps     outcomes of a trajectory
    until     a state at which a trajectory ends before
    num_speculative_outcomes   how far g runs ahead; or `branching`: children of each node by depth,
              a tree, (3, 2) for instance, which f is asked about as a whole (V outcomes only)
    rule, rule_options         as for text: the usual one is block verification, in trees traversal;
              of a continuum "rejection"
    shared_noise   outcomes are a function of the seed, whatever g proposes (V outcomes only)
    executor  of `concurrent.futures`, or `outrider_ray.RayExecutor()`: f is called there with
              `states_per_call` states a call, and a round may take `timeout` seconds

    An outcome that g never proposes and f has comes from the residual; one that f never has is
    always refused. Laws are taken in float64, and divided by their sums.

    What f, g, step and until raise goes through, with a note. ConfigurationError: arguments, and f
    and g over different outcomes. NumericalError: laws that are none. WorkerTimeout: the executor.

    Source: Leviathan, Kalman and Matias 2023, "stochastic speculative execution".

    >>> import numpy as np
    >>> def f(states):  # a walk on 0 .. 4 that is pushed up, and looks it up slowly
    ...     return np.array([[0.2, 0.3, 0.5] for _ in states])
    >>> def g(states):
    ...     return np.full((len(states), 3), 1 / 3)
    >>> run = speculate(f, g, lambda s, move: min(max(s + move - 1, 0), 4), [2, 2], 20, seed=1)
    >>> len(run.outcomes), len(run.outcomes[0]), run.rounds < 20
    (2, 20, True)
    """
    do = "see outrider.speculate"
    steps = arguments.whole("steps", steps, do, least=0)
    if not isinstance(states, Sequence) or isinstance(states, (str, bytes)):
        arguments.refuse("states", "a list of states", states, "one for each trajectory")
    counts = _counts(num_speculative_outcomes, branching)
    size = arguments.whole("states_per_call", states_per_call, do, least=1)
    if timeout is not None and (executor is None or not timeout > 0):
        raise ConfigurationError(
            f"a timeout is of an executor, in seconds above 0; got timeout={timeout} and executor="
            f"{executor}; pass an executor, or leave the timeout out"
        )
    if executor is not None and not callable(found(executor, "submit")):
        arguments.refuse("executor", "an Executor", executor, "one of concurrent.futures")
    verifiers.chosen(rule, rule_options, shared_noise)
    key = fresh_seed() if seed is None else arguments.whole("seed", seed, do)
    signed = key - (1 << 64) if key >= 1 << 63 else key
    seeds = noise.words(torch.tensor(signed, device="cpu"), len(states))
    run = _Trajectories(
        BatchedFunction("f", f, executor, size, timeout),
        None if g is None else BatchedFunction("g", g),
        step,
        until,
        _Rules(rule, rule_options, shared_noise, counts),
        seeds,
    )
    return _finished(run, list(states), steps)


def _counts(ahead: int, branching: Sequence[int] | None) -> tuple[int, ...]:
    """Children of a node, by depth."""
    if branching is None:
        do = "0 drafts nothing"
        return (1,) * arguments.whole("num_speculative_outcomes", ahead, do, least=0)
    what, do = "whole numbers of at least 1", "write (3, 2)"
    return arguments.several("branching", branching, what, do, arguments.is_count)


def _finished(run: _Trajectories[State], states: list[State], steps: int) -> Speculation[Any]:
    """Rounds until every trajectory has ended."""
    found: list[list[Any]] = [[] for _ in states]
    rounds_of = [0] * len(states)
    active = [row for row, state in enumerate(states) if steps and not run.ended(state)]
    while active:
        most = [steps - len(found[row]) - 1 for row in active]
        starts = [len(found[row]) for row in active]
        here = run.propose([states[row] for row in active], active, starts, most)
        verdict = run.rules(here)
        run.count(here, verdict)
        for at, (row, path) in enumerate(zip(active, verdict.paths, strict=True)):
            rounds_of[row] += 1
            last = path[-1] if path else 0
            found[row] += [here.outcomes[at][node] for node in path]
            states[row] = here.states[at][last]
            if not here.ended[at][last]:
                found[row].append(verdict.following[at])
                states[row] = run.step(states[row], verdict.following[at])
        active = [row for row in active if len(found[row]) < steps and not run.ended(states[row])]
    run.stats.new_tokens = sum(map(len, found))
    return Speculation(
        found,
        states,
        run.f.rounds,
        rounds_of,
        run.f.evaluations,
        0 if run.g is None else run.g.evaluations,
        run.stats,
        run.drafted_per_position,
        run.rules.verifier is None or run.rules.verifier.exact,
    )
