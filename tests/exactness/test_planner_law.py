"""What a planner may look at, enumerated: V = 4, the law of the first two tokens of a text.

Every way a draft can come to be, times the exact outcome of verifying it, continued by the target.
Decisions that look at tokens already drawn and left in, and at laws computed so far, keep the
target's law to rounding; those that look at a token that is then left out, or at another row's
verdict with the same noise, do not. docs/planner.md has the argument.
"""

from itertools import product

import numpy as np
import pytest
import torch

from outrider import verifiers
from outrider.tree import from_parents
from outrider.types import Draft, DrawKind, Laws, Scores

V = 4
RIGHT, WRONG = 1e-12, 1e-2
CHAINS, TREES = ("rejection", "block", "traversal"), ("rejection", "traversal")
_rng = np.random.default_rng(7)


def _law():
    return _rng.dirichlet(np.full(V, 0.7))


TARGET = {prefix: _law() for depth in range(3) for prefix in product(range(V), repeat=depth)}
DRAFT = {prefix: _law() for depth in range(3) for prefix in product(range(V), repeat=depth)}
OTHER = _law()  #: of another drafter at the root
TRUTH = np.array([[TARGET[()][a] * TARGET[a,][b] for b in range(V)] for a in range(V)])


def verified(rule, paths, root=None):
    """Law of one step's block: its paths in drawing order are a tree's nodes, BFS order."""
    number = {(): 0} | {path: n for n, path in enumerate(paths, start=1)}
    parents = [-1, *(number[path[:-1]] for path in paths)]
    tree = from_parents(tuple(parents))
    below = [
        [n for n, parent in enumerate(parents) if parent == node] for node in range(tree.nodes)
    ]
    most = max(tree.max_draws, 1)
    draws = torch.tensor([[kids + [-1] * (most - len(kids)) for kids in below]])
    laws = [DRAFT.get(path, OTHER) for path in number]
    laws[0] = DRAFT[()] if root is None else root
    node = torch.arange(tree.nodes)[None, :, None]
    draft = Draft(
        torch.tensor([[0, *(path[-1] for path in paths)]]),
        tree,
        draws,
        torch.full_like(draws, int(DrawKind.WITHOUT)),
        torch.where(draws >= 0, node, -1),
        _laws(laws),
        frozenset({DrawKind.WITHOUT}),
    )
    outcome = verifiers.get(rule).outcome(draft, Scores(_laws([TARGET[path] for path in number])))
    law = {}
    for path, n in number.items():
        for token in range(V):
            chance = float(outcome.stop_BN[0, n] * outcome.next_BNV[0, n, token])
            law[(*path, token)] = law.get((*path, token), 0.0) + chance
    return law


def _laws(rows):
    logits = torch.from_numpy(np.log(np.stack(rows)))[None]
    return Laws(logits, torch.ones(1, dtype=torch.float64), greedy="none")


def distance(ways):
    """Total variation between the first two tokens of such texts and the target's.

    `ways` are pairs of a chance and the law of a block; the target goes on behind a short one.
    """
    law = np.zeros((V, V))
    for chance, block in ways:
        for text, part in block.items():
            if len(text) > 1:
                law[text[:2]] += chance * part
            else:
                law[text[0]] += chance * part * TARGET[text]
    assert law.sum() == pytest.approx(1.0)
    return 0.5 * np.abs(law - TRUTH).sum()


def chain(rule, more, first=lambda x: True, second=lambda x, y: True):
    """A chain of at most two tokens: whether a second is drawn, and whether each one is left in."""
    for x in range(V):
        if not first(x):
            yield DRAFT[()][x], verified(rule, [])
        elif not more(x):
            yield DRAFT[()][x], verified(rule, [(x,)])
        else:
            for y in range(V):
                paths = [(x,), (x, y)] if second(x, y) else [(x,)]
                yield DRAFT[()][x] * DRAFT[x,][y], verified(rule, paths)


def grown(rule, wider, deeper, dropped=lambda x: False):
    """A tree that grows by what is in it: a token and one below it, then a second child or not."""
    for x, y in product(range(V), repeat=2):
        chance = DRAFT[()][x] * DRAFT[x,][y]
        if not wider(x, y):
            yield chance, verified(rule, [(x,), (x, y)])
            continue
        for z in set(range(V)) - {x}:
            both = chance * DRAFT[()][z] / (1 - DRAFT[()][x])
            if dropped(z):
                yield both, verified(rule, [(x,), (x, y)])
            elif not deeper(x, y, z):
                yield both, verified(rule, [(x,), (z,), (x, y)])
            else:
                for w in range(V):
                    yield both * DRAFT[z,][w], verified(rule, [(x,), (z,), (x, y), (z, w)])


def likely(x):
    return DRAFT[()][x] >= 0.3


@pytest.mark.parametrize("rule", CHAINS)
def test_a_chain_may_end_by_the_law_ahead_of_a_draw(rule):
    assert len({DRAFT[x,].max() >= 0.6 for x in range(V)}) == 2
    assert distance(chain(rule, lambda x: DRAFT[x,].max() >= 0.6)) < RIGHT


@pytest.mark.parametrize("rule", CHAINS)
def test_a_chain_may_end_behind_a_token_that_stays_in(rule):
    assert len({likely(x) for x in range(V)}) == 2
    assert distance(chain(rule, likely)) < RIGHT
    assert distance(chain(rule, lambda x: x == 0)) < RIGHT


@pytest.mark.parametrize("rule", TREES)
def test_a_tree_may_grow_by_what_is_in_it(rule):
    assert distance(grown(rule, lambda x, y: y == 0, lambda *_: False)) < RIGHT
    assert distance(grown(rule, lambda x, y: y == 0, lambda x, y, z: x == 1 or z == 0)) < RIGHT


@pytest.mark.parametrize("rule", CHAINS)
def test_of_two_drafters_one_may_be_chosen_by_their_laws(rule):
    root = max((DRAFT[()], OTHER), key=max)
    assert distance((root[x], verified(rule, [(x,)], root)) for x in range(V)) < RIGHT


@pytest.mark.parametrize("rule", CHAINS)
def test_wrong_the_first_token_is_left_out_for_its_own_law(rule):
    assert distance(chain(rule, lambda x: True, first=likely)) > WRONG


@pytest.mark.parametrize("rule", CHAINS)
def test_wrong_the_second_token_is_left_out_for_its_own_law(rule):
    assert distance(chain(rule, lambda x: True, second=lambda x, y: DRAFT[x,][y] >= 0.3)) > WRONG


@pytest.mark.parametrize("rule", CHAINS)
def test_wrong_of_two_samples_the_one_its_own_law_likes_better(rule):
    def ways():
        for x, y in product(range(V), repeat=2):
            one = DRAFT[()][x] >= OTHER[y]
            root, token = (DRAFT[()], x) if one else (OTHER, y)
            yield DRAFT[()][x] * OTHER[y], verified(rule, [(token,)], root)

    assert distance(ways()) > WRONG


@pytest.mark.parametrize("rule", TREES)
def test_wrong_a_drawn_second_child_is_dropped(rule):
    everything = grown(rule, lambda x, y: True, lambda *_: False)
    assert distance(everything) < RIGHT
    wrong = grown(rule, lambda x, y: True, lambda *_: False, dropped=lambda z: not likely(z))
    assert distance(wrong) > WRONG


@pytest.mark.parametrize("rule", CHAINS)
def test_wrong_odds_pooled_over_rows_of_one_seed(rule):
    """Row B drafts where row A, with its prompt and noise, was accepted, and nowhere else.

    Then B's draft and test are A's, and accepted; where A was refused B draws a plain token by
    noise that A has not used. B's own finished steps may decide: then it drafts or not for all x.
    """
    pooled = []
    for x in range(V):
        block = verified(rule, [(x,)])
        kept = {text: part for text, part in block.items() if len(text) > 1}
        pooled.append((DRAFT[()][x], kept))
        pooled.append((DRAFT[()][x] * (1 - sum(kept.values())), verified(rule, [])))
    assert distance(pooled) > WRONG
    assert distance((DRAFT[()][x], verified(rule, [(x,)])) for x in range(V)) < RIGHT
    assert distance([(1.0, verified(rule, []))]) < RIGHT
