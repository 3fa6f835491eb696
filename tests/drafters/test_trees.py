"""What tree drafters draw: laws, topologies, shapes."""

import inspect
import math
from collections import Counter
from functools import lru_cache
from itertools import permutations

import enumeration as e
import numpy as np
import own_trees
import pytest
import torch
from scipy.stats import chi2

from letters import translated
from outrider import ConfigurationError, SamplingParams, ops
from outrider.drafters import (
    DRAFTERS,
    Beam,
    DraftModel,
    DynamicTree,
    HubTree,
    Paths,
    Root,
    SampledTree,
    StaticTree,
    make,
    ngram_table,
    tree_drafting,
    trees,
)
from outrider.drafters.draft_model import SampledChildren
from outrider.drafters.recipes import DrafterParts, DraftOptions
from outrider.engine import step
from outrider.ops.reference.draws import truncated
from outrider.types import DrawKind, Output
from tiny import begun, pair

PROMPT, VOCAB, MANY = [1, 3, 2], 4, 8_000


def propose(drafter, settings, prompt=PROMPT):
    target, _ = pair(0.4, VOCAB)
    state = begun(target, drafter, [prompt] * len(settings), settings, 64, limit=64)
    return step.propose(drafter, state)


@lru_cache
def many(name: str, backend: str = "cpu"):
    """Many rows of one prompt, drawn by the CPU's code or by the portable one."""
    _, small = pair(0.4, VOCAB)
    drafter = {
        "beam": Beam(small, 2, 2),
        "branching": DraftModel(small, (2, 1)),
        "paths": Paths(small, 2, 2),
        "hub": HubTree(small, (3, 1)),
        "sampled": SampledTree(small, parents=(-1, 0, 0, 1)),
    }[name]
    with ops.use(backend):
        return propose(drafter, [SamplingParams(1.0, seed=i) for i in range(MANY)])


BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def root_law(draft) -> np.ndarray:
    """The declared law of the first row's root: the same prompt gives all rows the same."""
    return ops.probs(draft.laws)[0, 0].double().numpy()


def agrees(seen: Counter, law: dict) -> bool:
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    assert set(seen) <= {key for key, share in law.items() if share > 0}
    total = sum(seen.values())
    statistic = sum(
        (seen[key] - total * share) ** 2 / (total * share) for key, share in law.items()
    )
    return statistic < chi2.isf(1e-4, len(law) - 1)


@pytest.mark.one_in(6)
@BACKENDS
@pytest.mark.parametrize("name", ["sampled", "beam", "branching"])
def test_siblings_of_the_root_are_drawn_without_replacement(name, backend):
    draft = many(name, backend)
    q = root_law(draft)
    pairs = draft.tokens_BN.gather(1, draft.draws_BNK[:, 0, :2].expand(MANY, -1)).tolist()
    law = {(i, j): q[i] * q[j] / (1 - q[i]) for i, j in permutations(range(VOCAB), 2)}
    assert agrees(Counter(map(tuple, pairs)), law)


@pytest.mark.one_in(4)
@BACKENDS
def test_paths_are_independent(backend):
    draft = many("paths", backend)
    q = root_law(draft)
    pairs = draft.tokens_BN.gather(1, draft.draws_BNK[:, 0]).tolist()
    law = {(i, j): q[i] * q[j] for i in range(VOCAB) for j in range(VOCAB)}
    assert agrees(Counter(map(tuple, pairs)), law)
    same = draft.draws_BNK[:, 0, 0] == draft.draws_BNK[:, 0, 1]
    assert same.float().mean() == pytest.approx(float((q**2).sum()), abs=0.02)
    twice = draft.draws_BNK[same, 1]  # both paths go on from the shared node
    assert (twice >= 0).all()


@pytest.mark.one_in(4)
@BACKENDS
def test_the_drawn_child_of_a_hub_comes_from_the_rest(backend):
    draft = many("hub", backend)
    placed = draft.tokens_BN[:, 2:4]
    assert (placed == placed[0]).all()
    m = root_law(draft)
    assert m[placed[0].numpy()].sum() == 0
    law = {token: m[token] for token in range(VOCAB) if m[token] > 0}
    assert agrees(Counter(draft.tokens_BN[:, 1].tolist()), law)
    assert draft.kind_BNK[0, 0].tolist() == [DrawKind.WITHOUT, DrawKind.FIXED, DrawKind.FIXED]
    one = ops.probs(draft.laws)[0, 1]  # a node with one child draws it from the whole law
    assert (one > 0).all()


@pytest.mark.one_in(2)
@BACKENDS
def test_beams_follow_the_enumeration(backend):
    """The tree of stochastic beam search has the law that Plackett-Luce orders give it."""
    draft = many("beam", backend)
    world = e.World(VOCAB, 2, 0, ("random",))
    laws = ops.probs(draft.laws).double().numpy()
    world.draft[0, 0] = laws[0, 0]
    for row in range(1500):
        for slot in (1, 2):
            world.draft[0, 1 + int(draft.tokens_BN[row, slot])] = laws[row, slot]
    forest = own_trees.beam(world, 2, 2)
    law: Counter = Counter()
    for weight, code in zip(forest.weight_R, forest.code_RN, strict=True):
        law[tuple(code.tolist())] += float(weight)
    parent, tokens = draft.tree.parent_BN, draft.tokens_BN
    code = torch.zeros_like(tokens)
    for node in range(1, draft.tree.nodes):
        code[:, node] = VOCAB * code.gather(1, parent[:, node, None])[:, 0] + 1 + tokens[:, node]
    seen = Counter(map(tuple, code.tolist()))
    rare = {key for key, share in law.items() if share * MANY < 8}
    merged = Counter({key: n for key, n in seen.items() if key not in rare})
    merged["rare"] = sum(seen[key] for key in rare)
    expected = {key: share for key, share in law.items() if key not in rare}
    expected["rare"] = sum(law[key] for key in rare)
    assert set(seen) <= set(law)
    assert agrees(merged, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: Beam(m, 4, 3),
        lambda m: Paths(m, 3, 3),
        lambda m: HubTree(m, (3, 2)),
        lambda m: StaticTree(m, (3, 2)),
        lambda m: SampledTree(m, (3, 2)),
    ],
)
def test_tokens_outside_the_filters_never_enter_a_tree(make):
    _, small = pair(0.4, VOCAB)
    draft = propose(make(small), [SamplingParams(1.0, top_k=2, seed=i) for i in range(50)])
    draws = draft.draws_BNK.expand(50, -1, -1)
    assert (draws[:, 0] >= 0).sum(1).unique().tolist() in ([2], [3])  # paths repeat theirs
    if draft.laws is not None:
        laws, row = ops.probs(draft.laws), draft.row_BNK.expand_as(draws)
        for b, n, k in ((draws >= 0) & (row >= 0)).nonzero().tolist():
            token = draft.tokens_BN[b, draws[b, n, k]]
            assert laws[b, row[b, n, k], token] > 0


class Silent:
    """A source that has no token to say after the first row's text."""

    def output(self, tree, level):
        logits_BnV = torch.zeros(2, level.stop - level.start, 8)
        logits_BnV[0] = -torch.inf if level.depth == 0 else 0.0
        return Output(logits_BnV)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("parents", [(-1, 0, 1, 1, 1), (-1, 0, 1, 1, 1, 2, 4), (-1, 0, 0, 2)])
def test_below_a_token_that_is_not_there_nothing_is(parents, backend):
    target, _ = pair()
    context = begun(target, Root(), [PROMPT] * 2, [SamplingParams(1.0, seed=1)] * 2).context
    layout = tree_drafting.shapes.fixed(parents, torch.device("cpu"))
    with ops.use(backend):
        draft = tree_drafting.grow([Silent()], context, layout, SampledChildren()).draft(
            SampledChildren.draw_kinds
        )
    assert (draft.draws_BNK[0] == -1).all()
    assert torch.equal(draft.draws_BNK[1], layout.draws_1NK[0])


def test_an_only_child_is_absent_with_its_own_parent():
    """The filter leaves one token at the root: its second child is not there, nor what hangs on."""
    target, _ = pair()
    context = begun(target, Root(), [PROMPT], [SamplingParams(1.0, seed=1, min_p=0.5)]).context
    layout = tree_drafting.shapes.fixed((-1, 0, 0, 2), torch.device("cpu"))

    class Sure:
        def output(self, tree, level):
            return Output(torch.arange(8.0).expand(1, level.stop - level.start, 8))

    draft = tree_drafting.grow([Sure()], context, layout, SampledChildren()).draft(
        SampledChildren.draw_kinds
    )
    assert draft.draws_BNK.tolist() == [[[1, -1], [-1, -1], [-1, -1], [-1, -1]]]


def test_one_child_at_every_node_is_a_chain():
    _, small = pair(0.4, VOCAB)
    for kind in (SampledTree, HubTree, StaticTree):
        drafter = kind(small, (1, 1, 1))
        assert drafter.shapes[0].is_chain
        assert propose(drafter, [SamplingParams(1.0, seed=0)]).tree.is_chain


def test_greedy_rows_of_a_beam_keep_the_best_paths():
    """At the root these are the top tokens, like a greedy branching draft's."""
    _, small = pair(0.4, VOCAB)
    draft = propose(Beam(small, 3, 2), [SamplingParams(0)])
    assert draft.kinds == {DrawKind.FIXED}
    assert draft.laws is None
    first = draft.tokens_BN[0, 1:4].tolist()
    assert len(set(first)) == 3
    other = propose(DraftModel(small, (3,)), [SamplingParams(0)])
    assert first == other.tokens_BN[0, 1:4].tolist()


def naive(psi, perturbed):
    top = perturbed.max()
    return -np.log(np.exp(-psi) - np.exp(-top) + np.exp(-perturbed))


def test_truncated_scores_equal_the_naive_form_and_survive_where_it_does_not():
    rng = np.random.default_rng(0)
    for _ in range(50):
        perturbed, psi = rng.normal(size=6) - 2, rng.normal() - 2
        found = truncated(
            torch.tensor([[psi]], dtype=torch.float64), torch.tensor(perturbed)[None, None]
        )
        np.testing.assert_allclose(found[0, 0], naive(psi, perturbed), atol=1e-9)
        assert float(found.max()) == pytest.approx(psi, abs=1e-12)
    far = torch.tensor(rng.normal(size=6) - 900, dtype=torch.float32)
    found = truncated(torch.tensor([[-905.0]]), far[None, None])[0, 0]
    assert found.isfinite().all()
    assert (found.argsort() == far.argsort()).all()
    dead = truncated(torch.tensor([[-torch.inf]]), torch.full((1, 1, 3), -torch.inf))
    assert (dead == -torch.inf).all()


# Shapes


def best_by_dynamic_programming(a, nodes, depth):
    @lru_cache(None)
    def tree(m, levels):
        return 0.0 if m == 0 else 1.0 if m == 1 or levels == 0 else 1 + kids(0, m - 1, levels)

    @lru_cache(None)
    def kids(k, m, levels):
        if m == 0 or k == len(a):
            return 0.0
        return max(
            (a[k] * tree(i, levels - 1) + kids(k + 1, m - i, levels) if i else 0.0)
            for i in range(m + 1)
        )

    return max(tree(m, depth) for m in range(1, nodes + 1))


def expected(parents, a):
    """Tokens of a call: the sum over nodes of the product of acceptances on their paths."""
    reach, seen = [1.0], Counter()
    for parent in parents[1:]:
        reach.append(reach[parent] * a[seen[parent]])
        seen[parent] += 1
    return sum(reach)


@pytest.mark.parametrize("a", [(0.7, 0.12, 0.05, 0.02), (0.5, 0.3, 0.1, 0.05), (0.9, 0.05, 0.01)])
@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 14])
@pytest.mark.parametrize("depth", [2, 4, 14])
def test_the_heap_finds_the_best_tree(a, nodes, depth):
    parents = trees.optimal(a, nodes, depth)
    assert len(parents) == nodes or depth == 2  # three children at most: a full tree has 13
    assert expected(parents, a) == pytest.approx(
        best_by_dynamic_programming(a, nodes, depth), abs=1e-12
    )


def test_shapes_are_checked():
    for bad in ((), (0.2, 0.5), (1.5,)):
        with pytest.raises(ConfigurationError, match="acceptances"):
            trees.optimal(bad, 4, 2)
    assert trees.optimal((1.0, 0.0), 4, 3) == (-1, 0, 1, 2)
    assert math.isclose(expected((-1, 0, 0, 1), (0.5, 0.2)), 1.95)


@pytest.mark.parametrize(
    "make",
    [lambda m: Beam(m, 1, 3), lambda m: Paths(m, 1, 3), lambda m: HubTree(m, ())],
)
def test_shapes_that_draft_nothing_are_refused(make):
    with pytest.raises(ConfigurationError, match=r"use (the drafter '|drafter=)"):
        make(pair(0.4, VOCAB)[1])


def test_more_children_than_tokens_are_refused_at_set_up():
    _, small = pair(0.4, VOCAB)
    with pytest.raises(ConfigurationError, match="vocabulary of 4; use smaller factors"):
        DraftModel(small, (2, VOCAB + 1))
    assert DraftModel(small, (VOCAB,)).shapes[0].max_nodes == 1 + VOCAB


def with_model(name, model, **how):
    return make(name, DrafterParts((model,)), DraftOptions(**how))


@pytest.mark.parametrize(
    ("name", "how", "kind", "nodes"),
    [
        ("draft_model", {}, DraftModel, 5),
        ("draft_model", {"num_speculative_tokens": 6}, DraftModel, 7),
        ("draft_model", {"branching": (2, 1)}, DraftModel, 5),
        ("draft_model", {"branching": (2, 1), "num_speculative_tokens": 2}, DraftModel, 5),
        ("beam", {"width": 2}, Beam, 9),
        ("beam", {"width": 2, "num_speculative_tokens": 3}, Beam, 7),
        ("paths", {}, Paths, 13),
        ("hub_tree", {"branching": (3, 2)}, DraftModel, 10),
        ("static_tree", {}, DraftModel, 34),
        ("static_tree", {"num_speculative_tokens": 2}, DraftModel, 10),
        ("static_tree", {"num_speculative_tokens": 5}, DraftModel, 46),
        ("sampled_tree", {"branching": (2,)}, DraftModel, 3),
        ("sampled_tree", {"tree_acceptance": (0.6, 0.2), "total_tokens": 7}, DraftModel, 8),
        ("dynamic_tree", {"width": 3}, DynamicTree, 17),
        ("dynamic_tree", {"width": 2, "num_speculative_tokens": 2}, DynamicTree, 7),
        ("dynamic_tree", {"width": 4, "num_speculative_tokens": 18}, DynamicTree, 19),
        ("dynamic_tree", {"width": 2, "total_tokens": 6, "num_speculative_tokens": 3,
                          "shared_noise": True}, DynamicTree, 7),
    ],
)  # fmt: skip
def test_drafters_by_name(name, how, kind, nodes):
    made = with_model(name, pair(0.4, VOCAB)[1], **how)
    assert type(made) is kind
    assert made.name == name
    assert made.shapes[0].max_nodes == nodes


def test_the_depth_of_trees_by_name():
    _, small = pair(0.4, VOCAB)
    for name in ("hub_tree", "static_tree", "sampled_tree", "beam", "paths", "dynamic_tree"):
        draft = propose(
            with_model(
                name, small, num_speculative_tokens=3, **({"width": 2} if "dyn" in name else {})
            ),
            [SamplingParams(0)],
        )
        assert draft.tree.max_depth == 3, name
    best = with_model(
        "static_tree", small, tree_acceptance=(0.9, 0.1), total_tokens=6, num_speculative_tokens=4
    )
    assert best.parents == trees.optimal((0.9, 0.1), 7, 4)


@pytest.mark.parametrize(
    ("name", "how", "what"),
    [
        ("beam", {"branching": (2,)}, "branching"),
        ("hub_tree", {"width": 2}, "width"),
        ("paths", {"shared_noise": True}, "shared_noise"),
        ("draft_model", {"total_tokens": 8}, "total_tokens"),
        ("beam", {"tree_acceptance": (0.5,)}, "acceptance"),
        ("dynamic_tree", {"branching": (2,)}, "branching"),
        ("draft_model", {"branching": (2, 2), "num_speculative_tokens": 4}, "leave num_spec"),
        ("static_tree", {"branching": (2, 2), "num_speculative_tokens": 3}, "leave num_spec"),
        ("static_tree", {"total_tokens": 8}, "give both"),
        ("static_tree", {"tree_acceptance": (0.5,)}, "give both"),
        (
            "hub_tree",
            {"tree_acceptance": (0.5,), "total_tokens": 4, "branching": (2,)},
            "give both",
        ),
        ("dynamic_tree", {"total_tokens": 3, "width": 2}, "between num_speculative_tokens, 5, and"),
    ],
)
def test_options_that_a_drafter_cannot_use_or_that_disagree_are_refused(name, how, what):
    with pytest.raises(ConfigurationError, match=what):
        with_model(name, pair(0.4, VOCAB)[1], **how)


#: Options that a drafter cannot do without.
OWN = {"layer_skip": {"exit": 1}}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_option_that_a_recipe_takes_reaches_its_drafter(name):
    """A name that the function behind it does not know would end in a TypeError."""
    recipe = DRAFTERS[name]
    known = inspect.signature(recipe.build).parameters
    assert set(recipe.takes) | set(recipe.needs) <= set(known)
    small = translated(pair()[1]) if "translated" in recipe.needs else pair(0.4, VOCAB)[1]
    models = (small,) if recipe.wants("draft") else ()
    table = ngram_table.count([0, 1, 2, 3] * 4, VOCAB) if recipe.wants("table") else None
    parts = DrafterParts(models, table, VOCAB, pair(0.4, VOCAB)[0])
    own = OWN.get(name)
    assert make(name, parts, DraftOptions(own=own)).name == name
    if recipe.wants("num_speculative_tokens"):
        two, four = (make(name, parts, DraftOptions(depth, own=own)) for depth in (2, 4))
        assert two.shapes != four.shapes
