"""The calculators against enumeration through the rules, and against published tables."""

import doctest
import math

import enumeration as e
import numpy as np
import pytest

from outrider import verifiers
from outrider_lab import theory
from outrider_lab.theory import capacity, chains, length, node, price, transport
from outrider_lab.verifiers import lossy

DRAWN = np.random.default_rng(1)


def law(vocab: int, zeros: int = 0) -> np.ndarray:
    found = DRAWN.dirichlet(np.full(vocab, 0.7))
    found[DRAWN.permutation(vocab)[:zeros]] = 0
    return found / found.sum()


PAIRS = [(law(v, i % 3 == 1), law(v, i % 4 == 1)) for i, v in enumerate([2, 3, 4, 5] * 6)]


def enumerated(rule: str, scheme, p: np.ndarray, q: np.ndarray, counts) -> float:
    """Chance that something is kept at the root, through the production rule."""
    world = e.World(len(p), 1, 0, ("random",))
    world.target[:], world.draft[:] = p, q
    return float(e.emitted(verifiers.get(rule), scheme(world, counts))[1][0]) - 1


@pytest.mark.parametrize(
    "module", [capacity, chains, length, node, price, transport], ids=lambda m: m.__name__
)
def test_the_examples_in_the_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_every_module_is_named():
    assert set(theory.__all__) == {"capacity", "chains", "length", "node", "price", "transport"}


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_closed_forms_equal_enumeration(p, q):
    close = {"abs": 1e-12}
    one = (1,)
    assert node.single(p, q) == pytest.approx(
        enumerated("rejection", e.without, p, q, one), **close
    )
    assert node.match(p, q) == pytest.approx(enumerated("match", e.without, p, q, one), **close)
    assert node.non_iterative(p, q) == pytest.approx(
        enumerated("non_iterative", e.without, p, q, one), **close
    )
    assert node.total_variation(p, q) == pytest.approx(1 - node.single(p, q), **close)
    for k in range(2, min(len(p), 3) + 1):
        shape = (k,)
        assert node.multi_round(p, q, k) == pytest.approx(
            enumerated("multi_round", e.separate, p, q, shape), **close
        )
        assert node.k_seq(p, q, k) == pytest.approx(
            enumerated("kseq", e.separate, p, q, shape), **close
        )
        assert node.recursive(p, q, k) == pytest.approx(
            enumerated("rejection", e.without, p, q, shape), **close
        )
        assert node.top_k(p, q, k) == pytest.approx(
            enumerated("match", e.placed, p, q, shape), **close
        )
        assert node.hub(p, q, k) == pytest.approx(enumerated("hub", e.hub, p, q, shape), **close)
        assert enumerated("traversal", e.hub, p, q, shape) == pytest.approx(
            node.hub(p, q, k), **close
        )


@pytest.mark.parametrize(("p", "q"), PAIRS[:4])
def test_chains_by_enumeration(p, q):
    alpha = float(node.single(p, q))
    for gamma in (1, 2, 3):
        plain = length.expected_tokens(alpha, gamma)
        found = {
            name: chains.expected_tokens(verifiers.get(name), p, q, gamma)
            for name in ("rejection", "block", "traversal", "match", "non_iterative", "lenience")
        }
        assert found["rejection"] == pytest.approx(plain, abs=1e-12)
        assert found["block"] == pytest.approx(found["traversal"], abs=1e-12)
        assert found["block"] >= plain - 1e-12
        for name, kept in (
            ("match", node.match(p, q)),
            ("non_iterative", node.non_iterative(p, q)),
            ("lenience", node.lenient(p, q, 0.5)),
        ):
            expected = length.expected_tokens(min(float(kept), 1.0), gamma)
            assert found[name] == pytest.approx(expected, abs=1e-12)


def test_chains_with_laws_by_position_equal_the_worlds_enumeration():
    """Against the machinery of tests/exactness, which draws drafts another way."""
    world = e.World(3, 2, 5, ("random",))
    for depth in range(3):
        level = world.level(depth)
        world.target[:, level] = world.target[:, level.start : level.start + 1]
        world.draft[:, level] = world.draft[:, level.start : level.start + 1]
    firsts = [world.level(depth).start for depth in range(3)]
    p, q = world.target[0, firsts], world.draft[0, firsts[:2]]
    for name in ("rejection", "block", "traversal", "typical", "sigmoid"):
        rule = verifiers.get(name)
        _, tokens = e.emitted(rule, e.without(world, (1, 1)))
        found = chains.expected_tokens(rule, p, q, 2)
        assert found == pytest.approx(float(tokens[0]), abs=1e-12), name


def test_chains_that_are_too_many_are_refused():
    with pytest.raises(ValueError, match="use fewer"):
        chains.expected_tokens(verifiers.get("block"), np.full(10, 0.1), np.full(10, 0.1), 6)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_no_rule_beats_the_transport_bound(p, q):
    for k in (2, 3):
        bound = float(transport.independent(p, q, k))
        brute = transport.by_subsets(p, lambda h, k=k: q[list(h)].sum() ** k)
        assert bound == pytest.approx(brute, abs=1e-12)
        assert node.multi_round(p, q, k) <= bound + 1e-12
        assert node.k_seq(p, q, k) <= bound + 1e-12
    if (q > 0).sum() >= 2:

        def both(h):
            return sum(
                q[i] * q[j] / (1 - q[i]) for i in h for j in h if i != j and q[i] > 0 and q[j] > 0
            )

        bound = float(transport.pair_without_replacement(p, q))
        assert bound == pytest.approx(transport.by_subsets(p, both), abs=1e-12)
        assert node.recursive(p, q, 2) <= bound + 1e-12
    assert transport.independent(p, q, 1) == pytest.approx(float(node.single(p, q)), abs=1e-12)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_coupled_lies_between_its_bounds(p, q):
    distance, found = float(node.total_variation(p, q)), float(node.coupled(p, q))
    assert (1 - distance) / (1 + distance) - 1e-12 <= found <= 1 - distance + 1e-12
    assert node.match(p, q) <= found + 1e-12
    if len(p) == 2:
        assert found == pytest.approx(1 - distance, abs=1e-12)


def test_coupled_formula_by_simulation():
    p, q = np.array([0.1, 0.6, 0.3]), np.array([0.3, 0.3, 0.4])
    race = np.random.default_rng(5).exponential(size=(400_000, 3))
    same = ((p / race).argmax(1) == (q / race).argmax(1)).mean()
    assert same == pytest.approx(float(node.coupled(p, q)), abs=5 * 0.5 / math.sqrt(400_000))


# The two-token toy (Jeon et al. 2024, figure 1): d = draft P(1), t = target P(1), two drafts.
TOY = [
    (0.50, 0.50, 1, 1, 1, 1, 1),
    (0.30, 0.40, 0.900000, 0.930000, 0.960000, 1, 1),
    (0.10, 0.50, 0.600000, 0.640000, 0.658443, 0.690000, 1),
    (0.20, 0.80, 0.400000, 0.520000, 0.536205, 0.560000, 1),
    (0.50, 0.90, 0.600000, 0.800000, 0.815037, 0.850000, 1),
    (0.90, 0.10, 0.200000, 0.280000, 0.284582, 0.290000, 1),
    (0.05, 0.95, 0.100000, 0.145000, 0.146201, 0.147500, 1),
    (0.70, 0.20, 0.500000, 0.650000, 0.671852, 0.710000, 1),
    (0.00, 0.50, 0.500000, 0.500000, 0.500000, 0.500000, 0.500000),
]


@pytest.mark.parametrize(("d", "t", "one", "multi", "kseq", "otm", "rsd"), TOY)
def test_the_toy_table_to_six_digits(d, t, one, multi, kseq, otm, rsd):
    p, q = np.array([1 - t, t]), np.array([1 - d, d])
    found = (
        float(node.single(p, q)),
        float(node.multi_round(p, q, 2)),
        float(node.k_seq(p, q, 2)),
        float(transport.independent(p, q, 2)),
        node.recursive(p, q, 2),
    )
    assert [round(x, 6) for x in found] == [one, multi, kseq, otm, rsd]


def test_the_toy_means_over_a_grid():
    grid = np.linspace(0, 1, 101)
    t, d = (side.ravel() for side in np.meshgrid(grid, grid))
    p, q = np.stack([1 - t, t], -1), np.stack([1 - d, d], -1)
    means = (
        node.single(p, q).mean(),
        node.multi_round(p, q, 2).mean(),
        node.k_seq(p, q, 2).mean(),
        transport.independent(p, q, 2).mean(),
        np.mean([node.recursive(a, b, 2) for a, b in zip(p, q, strict=True)]),
    )
    assert [round(float(x), 4) for x in means] == [0.6634, 0.7467, 0.7630, 0.7957, 0.9901]


def test_the_toy_closed_forms_on_a_grid():
    for d in np.linspace(0, 1, 21):
        for t in np.linspace(0, 1, 21):
            p, q = np.array([1 - t, t]), np.array([1 - d, d])
            low, high = (d, t) if t >= d else (1 - d, 1 - t)
            g = ((2 - low) + math.sqrt((2 - low) ** 2 - 4 * (1 - high))) / 2
            assert node.k_seq(p, q, 2) == pytest.approx(
                1 if abs(t - d) < 1e-15 else low * g + 1 - high, abs=1e-9
            )
            assert transport.independent(p, q, 2) == pytest.approx(
                min(1, 1 + t - d * d, 2 - t - (1 - d) ** 2), abs=1e-9
            )
            assert node.hub(p, q, 2) == pytest.approx(1 if 0 < d < 1 else 1 - abs(d - t), abs=1e-12)


def test_the_root_of_k_seq():
    factor = node.division_factor(np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), 2)
    assert factor == pytest.approx(1.4568, abs=5e-5)  # Sun et al. 2023


# Leviathan et al. 2023

TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


@pytest.mark.parametrize(("alpha", "gamma", "work", "speed"), TABLE_1)
def test_leviathan_table_1(alpha, gamma, work, speed):
    assert length.operations(alpha, gamma) == pytest.approx(work, abs=0.006)
    assert length.speedup(alpha, gamma, 0) == pytest.approx(speed, abs=0.006)


TABLE_4 = [
    (7, 0.75, 0.02, 3.2),
    (7, 0.80, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
    (3, 0.56, 0.11, 1.6),
]


@pytest.mark.parametrize(("gamma", "alpha", "cost", "speed"), TABLE_4)
def test_leviathan_table_4(gamma, alpha, cost, speed):
    """Within the rounding of the printed inputs: alpha and c have two digits, the speed has one."""
    least = length.speedup(alpha - 0.005, gamma, cost + 0.005)
    most = length.speedup(alpha + 0.005, gamma, cost - 0.005)
    assert least - 0.05 <= speed <= most + 0.05


@pytest.mark.parametrize(("alpha", "speed"), [(0.62, 2.5), (0.71, 3.1), (0.76, 3.6), (0.84, 5.0)])
def test_leviathan_lenience_speeds_are_above_the_formula(alpha, speed):
    """Section A.5 prints 4 to 8 % more than its own formula gives at the best gamma."""
    best = length.best_length(alpha, 0.015)
    assert 1.03 < speed / length.speedup(alpha, best, 0.015) < 1.09


@pytest.mark.parametrize(("alpha", "speed"), [(0.75, 3.3), (0.80, 3.9), (0.87, 4.9)])
def test_leviathan_argmax_lenience_speeds(alpha, speed):
    assert length.speedup(alpha, 8, 0.015) == pytest.approx(speed, abs=0.06)


def test_a_bigram_drafter_as_in_section_3_6():
    assert length.speedup(0.2, 3, 0) == pytest.approx(1.25, abs=0.005)


# Lengths


@pytest.mark.parametrize("cost", [0.005, 0.01, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("alpha", np.linspace(0, 0.98, 15))
def test_best_length_is_the_argmax(alpha, cost):
    best = length.best_length(alpha, cost)
    speeds = [length.speedup(alpha, gamma, cost) for gamma in range(400)]
    assert speeds[best] == pytest.approx(max(speeds), abs=1e-12)
    assert (best >= 1) == (alpha > cost)
    if best:
        assert speeds[best] >= (1 + alpha) / (1 + cost) - 1e-12


def test_lengths_agree_with_each_other():
    alpha, gamma = 0.7, 4
    tokens = length.expected_tokens(alpha, gamma)
    assert length.draft_acceptance_rate(alpha, gamma) == pytest.approx((tokens - 1) / gamma)
    assert length.expected_tokens(1, 6) == 7
    chance = np.array([alpha**i * (1 - alpha) for i in range(gamma)] + [alpha**gamma])
    assert (chance * np.arange(1, gamma + 2)).sum() == pytest.approx(tokens)
    assert math.isnan(length.draft_acceptance_rate(alpha, 0))


def test_mbsu_is_the_right_way_up():
    """A smaller draft model must give a larger memory-bound speed-up."""
    assert length.memory_bound_speedup(3, 5, 0.01) > length.memory_bound_speedup(3, 5, 0.1)
    assert length.memory_bound_speedup(3, 5, 0.1) == pytest.approx(2.0)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="alpha"):
        length.expected_tokens(1.2, 3)
    with pytest.raises(ValueError, match="sum to one"):
        node.single(np.array([0.5, 0.2]), np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="one pair"):
        node.recursive(np.full((2, 3), 1 / 3), np.full((2, 3), 1 / 3), 2)


# Prices


CHAIN_RULES = [
    rule for rule in verifiers.VERIFIERS.values() if rule.name != "coupled"
]  # coupled verifies nothing that was drawn


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=lambda rule: rule.name)
def test_exact_rules_are_free_and_lossy_ones_are_not(rule):
    p = np.stack([a for a, _ in PAIRS if len(a) == 4])
    q = np.stack([b for _, b in PAIRS if len(b) == 4])
    cost = price.price(rule, p, q)
    if rule.exact:
        assert cost.total_variation < 1e-12
        assert cost.largest_ratio == pytest.approx(1, abs=1e-9)
        assert cost.acceptance <= cost.exact_acceptance + 1e-12
    else:
        assert cost.total_variation > 0.01
        assert cost.largest_ratio > 1.1


@pytest.mark.parametrize("lenience", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(("p", "q"), PAIRS[:8])
def test_lenience_keeps_its_promise_and_loses_no_more_than_it_must(p, q, lenience):
    cost = price.price(lossy.Lenience(lenience), p, q)
    assert cost.acceptance == pytest.approx(float(node.lenient(p, q, lenience)), abs=1e-12)
    assert cost.largest_ratio <= 1 / lenience + 1e-9
    least = np.maximum(np.minimum(p / lenience, q) - p, 0).sum()
    assert cost.total_variation == pytest.approx(least, abs=1e-12)


def test_the_sigmoid_rule_with_published_scales_follows_the_draft():
    rng = np.random.default_rng(3)
    z = rng.normal(size=1000) * 3
    p, q = np.exp(z), np.exp(z + rng.normal(size=1000))
    p, q = p / p.sum(), q / q.sum()
    cost = price.price(verifiers.get("sigmoid"), p, q)
    distance = float(node.total_variation(p, q))
    assert cost.acceptance > 0.97 > 0.85 > cost.exact_acceptance
    assert cost.total_variation == pytest.approx(distance, abs=0.02)
