"""Dynamic trees: which nodes are kept, per row, and that rules and caches can live with that."""

import pytest
import torch
from test_supports import inner_nodes, law_after

import tiny
from outrider import (
    ConfigurationError,
    Engine,
    SamplingParams,
    StopConditions,
    noise,
    verifiers,
)
from outrider.drafters import DynamicTree
from outrider.drafters.dynamic_tree import SURENESS
from outrider.engine import step
from outrider.tree import from_parents
from outrider.types import DrawKind
from tiny import PROMPTS, pair

TOTAL, DEPTH, FEW = 9, 4, 3
ROWS = PROMPTS[:3]


def begun(drafter, settings, prompts=ROWS):
    target, _ = pair(0.4)
    return tiny.begun(target, drafter, prompts, settings, limit=90)


def searched(model, prompt, how, coupled):
    """EAGLE-2 in plain Python: the kept paths and the log of their cumulative probabilities."""

    def shares(path):
        law, logits = law_after(model, [*prompt, *path], how, prompt)
        scores = logits if how.temperature == 0 else law.log()
        if coupled and how.temperature:
            at = torch.tensor([len(prompt) - 1 + len(path)])
            race = noise.target_race_at(torch.tensor([how.seed]), at, 1, len(law))[0, 0]
            scores = SURENESS * (scores - race.log())
        return scores.log_softmax(-1)

    level, found = {(): 0.0}, {}
    for _ in range(DEPTH):
        grown = {}
        for path, score in level.items():
            best = shares(path).topk(FEW)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if value > -torch.inf:
                    grown[(*path, token)] = score + value
        found |= grown
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[:FEW])
    return dict(sorted(found.items(), key=lambda item: -item[1])[:TOTAL])


SETTINGS = {
    "greedy": [SamplingParams(0)] * 3,
    "sampled": [SamplingParams(1.0, seed=i) for i in range(3)],
    "mixed": [
        SamplingParams(0),
        SamplingParams(0.8, top_k=4, seed=1),
        SamplingParams(1.2, top_p=0.8, seed=2),
    ],
}


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_most_probable_nodes_of_a_beam_are_kept(settings, coupled):
    _, small = pair(0.4)
    drafter = DynamicTree(small, TOTAL, DEPTH, FEW, coupled)
    draft = step.propose(drafter, begun(drafter, SETTINGS[settings]))
    shapes = set()
    for row, how in enumerate(SETTINGS[settings]):
        expected = searched(small, ROWS[row], how, coupled)
        paths = {}
        for node, path, kids in inner_nodes(draft, row):
            paths[node] = tuple(path)
            assert all(int(draft.tree.parent_BN[row, kid]) == node for kid in kids)
            assert int(draft.tree.depth_BN[row, node]) == len(path)
            above = draft.tree.ancestors_BNN[row, node].nonzero()[:, 0].tolist()
            assert [paths[n] for n in above] == [tuple(path[:d]) for d in range(len(path) + 1)]
            # siblings stand best first
            worth = [expected[*path, int(draft.tokens_BN[row, kid])] for kid in kids]
            assert worth == sorted(worth, reverse=True)
        assert set(paths.values()) == {(), *expected}
        assert list(paths) == sorted(paths)  # breadth first, parents first
        shapes.add(tuple(draft.tree.parent_BN[row].tolist()))
    assert len(shapes) > 1


RULES = [
    r
    for r in verifiers.VERIFIERS.values()
    if verifiers.supports(r, frozenset({DrawKind.FIXED}), False)
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_law_of_a_verdict_is_that_of_each_rows_own_tree(rule):
    """Rows of other shapes in the batch change nothing: `outcome`, row by row, as a shared tree."""
    target, small = pair(0.4)
    drafter = DynamicTree(small, TOTAL, DEPTH, FEW)
    settings = [SamplingParams(1.0, seed=i) for i in range(3)]
    state = begun(drafter, settings)
    draft = step.propose(drafter, state)
    scores = step.score(target, state, draft)
    together = rule.outcome(draft, scores)
    for row in range(3):
        own = draft._replace(
            tokens_BN=draft.tokens_BN[row : row + 1],
            tree=from_parents(draft.tree.parent_BN[row].tolist()),
            draws_BNK=draft.draws_BNK[row : row + 1],
        )
        laws = scores.laws
        alone = scores._replace(
            laws=laws._replace(
                logits_BRV=laws.logits_BRV[row : row + 1],
                inverse_temperature_B=laws.inverse_temperature_B[row : row + 1],
            )
        )
        found = rule.outcome(own, alone)
        torch.testing.assert_close(together.stop_BN[row], found.stop_BN[0])
        assert float(together.stop_BN[row].sum()) == pytest.approx(1, abs=1e-5)
        reached = found.stop_BN[0] > 1e-6
        torch.testing.assert_close(
            together.next_BNV[row][reached], found.next_BNV[0][reached], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("coupled", [False, True])
def test_a_draft_depends_on_the_text_and_not_on_how_it_was_reached(coupled):
    """After many steps the cache holds what a fresh one would: the same tree is proposed."""
    target, small = pair(0.12)
    drafter = DynamicTree(small, TOTAL, DEPTH, FEW, coupled)
    settings = [SamplingParams(0), SamplingParams(0.8, seed=1), SamplingParams(1.0, seed=2)]
    state = begun(drafter, settings)
    accepted = 0
    for _ in range(8):
        draft = step.propose(drafter, state)
        length = state.context.length_B.tolist()
        texts = [state.context.tokens_BL[row, :n].tolist() for row, n in enumerate(length)]
        fresh = step.propose(drafter, begun(drafter, settings, texts))
        assert torch.equal(draft.tokens_BN, fresh.tokens_BN)
        assert torch.equal(draft.draws_BNK, fresh.draws_BNK)
        scores = step.score(target, state, draft)
        verdict = step.verify(verifiers.get("match"), state, draft, scores)
        accepted += int(verdict.count_B.sum())
        state, _ = step.commit(target, drafter, state, draft, scores, verdict)
    assert accepted > 8


def test_more_nodes_may_be_run_than_proposed():
    """The draft's cache has room for them up to the last token of a full cache."""
    target, small = pair(0.12)
    drafter = DynamicTree(small, 6, 6, 8)
    run = Engine(target, drafter).run(
        [PROMPTS[0]], SamplingParams(0), StopConditions(114), capacity=128
    )
    assert sum(len(block.token_ids) for block in run) == 114
    assert run.stats.accepted > 0


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"top_k": 1}, "top_k must be .* at least 2; got 1; use the drafter 'draft_model'"),
        ({"depth": 0}, "depth must be .* at least 1"),
        ({"top_k": 33}, "vocabulary of 32"),
        ({"total_tokens": 4}, "between depth, 5, and the 68 candidates"),
        ({"total_tokens": 69}, "between depth, 5, and the 68 candidates"),
    ],
)
def test_shapes_that_cannot_be_are_refused(how, what):
    with pytest.raises(ConfigurationError, match=what):
        DynamicTree(pair()[1], **how)
