"""A processor may leave nothing possible behind a drafted token that it forbids."""

import pytest
import torch

import outrider
from outrider import verifiers
from outrider.drafters import DraftModel, PromptLookup
from tiny import pair


def only_even(ids, scores):
    """Odd tokens are impossible; behind an odd token everything is."""
    out = scores.clone()
    out[:, 1::2] = -torch.inf
    out[ids[:, -1] % 2 == 1] = -torch.inf
    return out


def drafters(draft):
    yield PromptLookup(4)
    yield DraftModel(draft, (1, 1, 1))
    yield DraftModel(draft, (2, 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_draft_token_is_no_fault(temperature):
    target, draft = pair()
    prompt = [2, 4, 3, 6, 2, 4, 3, 6, 2, 4]  # prompt lookup drafts the odd 3, which is forbidden
    for drafter in drafters(draft):
        engine = outrider.Engine(target, drafter)
        how = outrider.Sampling(temperature, seed=3, processors=(only_even,))
        run = engine.run([prompt], how, outrider.Limits(24))
        ids = [token for block in run for token in block.token_ids]
        assert len(ids) == 24
        assert all(token % 2 == 0 for token in ids)


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("ops", ["reference", None])
def test_every_rule_survives_rows_without_mass(name, ops):
    from outrider.ops import use

    target, draft = pair()

    def forbid(ids, scores):  # the target alone forbids: the draft offers odd tokens
        return only_even(ids, scores)

    engine = outrider.Engine(target, DraftModel(draft, (1, 1, 1)), verifiers.get(name))
    how = outrider.Sampling(1.0, seed=5, processors=(forbid,))
    with use(ops):
        run = engine.run([[2, 4, 6]], how, outrider.Limits(24))
        assert all(t % 2 == 0 for block in run for t in block.token_ids)


def test_no_possible_token_at_all_is_a_fault():
    target, draft = pair()
    how = outrider.Sampling(
        0, processors=(lambda ids, scores: torch.full_like(scores, -torch.inf),)
    )
    with pytest.raises(outrider.OutriderError, match="masked every token"):
        list(outrider.Engine(target, DraftModel(draft)).run([[2, 4]], how, outrider.Limits(4)))
