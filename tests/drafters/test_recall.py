"""The tree of copies and recycled successors: its order, its shape, and what it remembers."""

import random
from itertools import pairwise

import pytest
import torch

from outrider import Engine, Root, SamplingParams, StopConditions, drafters
from outrider.drafters import (
    DrafterParts,
    DraftOptions,
    Recall,
    automaton,
    deterministic_tree,
    make,
    recall,
)
from outrider.drafters.automaton import Automaton, Successors
from outrider.drafters.deterministic_tree import HostTree
from outrider.engine import step
from outrider.errors import ConfigurationError
from outrider.stats import STRENGTH, AcceptanceStats
from outrider.testing.models import MetaModel
from outrider.tree import from_parents
from outrider.types import DrawKind, Laws, Scores, Verdict
from tiny import PROMPTS, begun, decode, pair


def row(text, known):
    """A row of this text, with what is likely after (before, token)."""
    after = Successors()
    for (before, token), best in known.items():
        after.keep(before, token, best)
    copied = AcceptanceStats(recall.COPIED, STRENGTH, recall.KEEP)
    return recall.RecallRow(
        Automaton(text), after, copied, AcceptanceStats(recall.RECYCLED, STRENGTH, recall.KEEP)
    )


def some_row(seed):
    draws = random.Random(seed)
    text = [draws.randrange(8) for _ in range(40)]
    known = {
        (draws.randrange(8), token): draws.sample(range(8), draws.randrange(1, 8))
        for token in range(8)
    }
    return row(text, known)


def grow(row, most):
    """The whole tree and its gains."""
    grown = recall.GrowingTree(row, most)
    return grown.first(most.nodes), list(grown)


@pytest.mark.parametrize("seed", range(8))
def test_the_first_nodes_are_the_best_tree_of_so_many(seed, monkeypatch):
    monkeypatch.setattr(recall, "FLOOR", 0.004)  # large trees
    here = some_row(seed)
    tree, gains = grow(here, recall.Most(200, 200, chain=False))
    survivals = [b - a for a, b in pairwise(gains)]
    assert len(tree.tokens) == len(tree.parents) == len(gains) > 10
    assert all(parent < node for node, parent in enumerate(tree.parents))
    siblings = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)
    assert all(
        b <= a + 1e-9 for a, b in pairwise(survivals)
    )  # so no other nodes survive more often
    few, ahead = grow(here, recall.Most(9, 200, chain=False))
    assert (few, ahead) == (tree.first(9), gains[:10])


def test_depth_and_chain_are_limits():
    here = some_row(3)
    shallow, _ = grow(here, recall.Most(60, 2, chain=False))
    depths = [0]
    for parent in shallow.parents[1:]:
        depths.append(depths[parent] + 1)
    assert max(depths) == 2
    chain, _ = grow(here, recall.Most(6, 6, chain=True))
    assert chain.parents == list(range(-1, len(chain.tokens) - 1))


def test_copies_stand_beside_what_the_target_held_likely():
    here = row([5, 1, 2, 9, 1], {(9, 1): [7, 2], (1, 7): [4]})
    tree, _ = grow(here, recall.Most(8, 8, chain=False))
    below = {(tree.tokens[p], t) for p, t in zip(tree.parents[1:], tree.tokens[1:], strict=True)}
    assert {(1, 2), (1, 7), (2, 9), (7, 4)} <= below  # the copy 2 9, and 7 4 from what was likely
    assert [*zip(tree.parents, tree.tokens, strict=True)].count((0, 2)) == 1  # likely and copied


def test_two_tokens_are_asked_before_one_and_the_oldest_rows_go(monkeypatch):
    monkeypatch.setattr(automaton, "MOST", 2)
    after = Successors()
    for before, token in ((1, 2), (3, 2), (1, 4), (1, 5)):
        after.keep(before, token, [before])
    assert after.row(1, 5) == [1]
    assert after.row(3, 2) == after.row(1, 2) == ()  # gone
    assert after.row(9, 4) == [1]  # by the last token alone


def test_trees_of_rows_are_those_of_their_parents():
    rows = [
        HostTree([9, 1, 2, 3, 4], [-1, 0, 1, 0, 3]),
        HostTree([8, 5, 6], [-1, 0, 0]),
        HostTree([7], [-1]),
    ]
    draft = deterministic_tree.trees(rows, DrawKind.FIXED)
    for b, parents in enumerate(([-1, 0, 0, 1, 2], [-1, 0, 0], [-1])):
        wanted, size = from_parents(parents), len(parents)
        assert draft.tree.parent_BN[b, :size].tolist() == parents
        assert torch.equal(draft.tree.ancestors_BNN[b, :size, :size], wanted.ancestors_BNN[0])
        assert torch.equal(draft.tree.depth_BN[b, :size], wanted.depth_BN[0])
        assert int((draft.draws_BNK[b] >= 0).sum()) == size - 1
    assert draft.tokens_BN[0].tolist() == [9, 1, 3, 2, 4]
    assert deterministic_tree.bigrams(draft)[0] == [(None, 9), (9, 1), (9, 3), (1, 2), (3, 4)]
    assert deterministic_tree.bigrams(draft)[2] == [(None, 7)]


def test_what_the_target_held_likely_at_any_node_is_kept():
    target, drafter = pair()[0], Recall(8)
    state = begun(target, drafter, [[1, 2, 3]], [SamplingParams(0)], limit=40)
    draft = step.propose(drafter, state)
    scores = step.score(target, state, draft)
    verdict = step.verify(Engine(target, drafter).choose_rule("all"), state, draft, scores)
    step.commit(target, drafter, state, draft, scores, verdict)
    best = int(scores.laws.logits_BRV[0, 0].argmax())
    state.memory.rows[0].settle()
    assert state.memory.rows[0].after.row(2, 3)[0] == best


def laws(*best):
    """Laws [1, N, 32] whose likeliest tokens are these, the best first."""
    logits = torch.full((1, len(best), 32), -20.0)
    for node, tokens in enumerate(best):
        for place, token in enumerate(tokens):
            logits[0, node, token] = -0.5 * place
    return Scores(Laws(logits, torch.tensor([torch.inf])))


@pytest.mark.parametrize(("kept", "instead"), [(0, [4, 3]), (1, [])])
def test_behind_a_new_token_is_what_was_likely_behind_a_refused_one(kept, instead):
    target, drafter = pair()[0], Recall(8)
    state = begun(target, drafter, [[1, 2, 3]], [SamplingParams(0)], limit=40)
    draft = deterministic_tree.chains([[3, 8]], DrawKind.FIXED)
    path = torch.tensor([[1 if kept else -1]])
    verdict = Verdict(path, torch.tensor([kept]), torch.tensor([9]))
    drafter.commit(state.memory, state.context, draft, verdict, laws([8, 9], [4, 3]))
    (here,) = state.memory.rows
    assert here.text.tokens == [1, 2, 3, *([8] * kept), 9]
    assert list(here.instead) == instead
    most = recall.Most(8, 8, chain=False)
    tree, gains = grow(here, most)
    below = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if not parent]
    assert below == instead
    here.read([4])  # what was drafted so is learnt from, and holds for one token
    assert here.instead == ()
    again = row([1, 2, 3, 9], {})
    again.recycled, again.instead = here.recycled, [4, 3]
    after = grow(again, most)[1]
    assert not instead or after[1] > gains[1]


def test_earlier_requests_are_remembered_and_change_no_text():
    target, how = pair()[0], SamplingParams(0.9, seed=3)
    plain, _ = decode(Engine(target, Root(), "match"), PROMPTS[:1], [how], StopConditions(24))
    engine = Engine(target, Recall(8, earlier=200))
    counts = []
    for _ in range(2):
        texts, run = decode(engine, PROMPTS[:1], [how], StopConditions(24))
        assert texts == plain
        counts.append(run.requests[0].steps)
    assert counts[1] < counts[0]
    with pytest.raises(ConfigurationError, match="cannot verify"):
        Engine(target, Recall(8, earlier=200), "rejection")


class Chains(MetaModel):
    """A target that does not score trees."""

    trees, device = False, torch.device("cpu")


class Coarse(MetaModel):
    """One whose trees round otherwise than a row does."""

    trees_alike, device = False, torch.device("cpu")


def test_by_name_it_suits_the_target():
    here, away = DrafterParts(target=pair()[0]), DrafterParts(target=MetaModel())
    assert not make("recall", here).shapes[0].is_chain
    assert [s.key for s in make("recall", here, DraftOptions(4)).shapes] == [4, 3, 2, 1]
    with pytest.raises(ConfigurationError, match="drafter='suffix'"):
        make("recall", away)
    for target in (Chains(), Coarse()):
        assert make("recall", DrafterParts(target=target)).shapes[0].is_chain
    asked = DraftOptions(own={"chain": False})
    assert not make("recall", DrafterParts(target=Coarse()), asked).shapes[0].is_chain
    with pytest.raises(ConfigurationError, match="chain must be"):
        Recall(chain=1)


def test_who_names_no_drafter():
    assert drafters.usual(None) == "recall"
    assert drafters.usual(None, device="cuda") == "suffix"
    assert drafters.usual(None, options=DraftOptions(ngram=(1, 2))) == "prompt_lookup"
    assert drafters.usual(None, reads=True) == "reference_lookup"


def test_steps_without_a_draft_that_are_read_at_once_tell_the_same():
    draws, late, soon = random.Random(1), row([1, 2, 3], {}), row([1, 2, 3], {})
    most = recall.Most(8, 8, chain=False)
    for at in range(60):
        token, likely = draws.randrange(6), draws.sample(range(6), 3)
        for each in (late, soon):
            each.follows(token, 1, [[[]], [likely]].__getitem__)
        soon.settle()
        assert len(late.unread) < recall.UNREAD
        if at % 5 == 4:
            assert list(late.foresee(most)) == list(soon.foresee(most))
            assert late.foresee(most).first(8) == soon.foresee(most).first(8)
    assert late.copy().text.tokens == soon.copy().text.tokens
