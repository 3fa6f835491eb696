"""A processor may leave nothing possible behind a drafted token that it forbids."""

from dataclasses import replace

import pytest
import torch

import outrider
from outrider import verifiers
from outrider.drafters import DraftModel, PromptLookup
from outrider.models import TreeDecoder
from outrider.ops import probs, use
from outrider.sampling import logits_processors
from outrider.sampling.timestamps import Timestamps
from outrider.types import Output
from tiny import DRAFTERS, decode, pair


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
        how = outrider.SamplingParams(temperature, seed=3, processors=(only_even,))
        run = engine.run([prompt], how, outrider.StopConditions(24))
        ids = [token for block in run for token in block.token_ids]
        assert len(ids) == 24
        assert all(token % 2 == 0 for token in ids)


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("ops", ["reference", None])
def test_every_rule_survives_rows_without_mass(name, ops):
    target, draft = pair()

    def forbid(ids, scores):  # the target alone forbids: the draft offers odd tokens
        return only_even(ids, scores)

    engine = outrider.Engine(target, DraftModel(draft, (1, 1, 1)), verifiers.get(name))
    how = outrider.SamplingParams(1.0, seed=5, processors=(forbid,))
    with use(ops):
        run = engine.run([[2, 4, 6]], how, outrider.StopConditions(24))
        assert all(t % 2 == 0 for block in run for t in block.token_ids)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("ops", ["reference", None])
@pytest.mark.parametrize("name", DRAFTERS)
def test_processors_see_no_place_that_the_filters_left_empty(name, ops):
    """With top-k 1 a tree is a chain with empty places; the text is the greedy one."""
    target, draft = pair()
    plain = outrider.SamplingParams(0, processors=(only_even,))
    ends = outrider.StopConditions(10)
    want, _ = decode(outrider.Engine(target, outrider.Root()), [[2, 4, 6]], plain, ends)
    engine = outrider.Engine(target, DRAFTERS[name](draft))
    how = outrider.SamplingParams(1.0, top_k=1, seed=1, processors=(only_even,))
    with use(ops):
        for sampling in (how, [how, plain]):
            rows, _ = decode(engine, [[2, 4, 6]] * 2, sampling, ends)
            assert rows == want * 2


class Until:
    """Nothing is possible behind so many tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores):
        return scores if ids.shape[1] < self.length else torch.full_like(scores, -torch.inf)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("ops", ["reference", None])
@pytest.mark.parametrize("name", DRAFTERS)
def test_nothing_need_be_possible_behind_the_end(name, ops):
    """The last token of the budget, or a stop token, may leave no possible next one."""
    target, draft = pair()
    prompt = [3, 1, 4, 1, 5]
    whole = (Until(len(prompt) + 7),)
    plain = outrider.Engine(target, outrider.Root())
    want, _ = decode(plain, [prompt], outrider.SamplingParams(0), outrider.StopConditions(7))
    engine = outrider.Engine(target, DRAFTERS[name](draft))
    rows = [
        outrider.SamplingParams(0, processors=whole),
        outrider.SamplingParams(1.0, seed=2, processors=whole),
        outrider.SamplingParams(0, no_repeat_ngram_size=1),  # 28 tokens are left
    ]
    with use(ops):
        texts, _ = decode(
            engine, [prompt] * 3, rows, [outrider.StopConditions(n) for n in (7, 7, 28)]
        )
        assert [len(text) for text in texts] == [7, 7, 28]
        assert texts[0] == want[0]
        ended, run = decode(engine, [prompt], rows[:1], outrider.StopConditions(9, (want[0][6],)))
        assert ended[0] == want[0][: want[0].index(want[0][6]) + 1]
        assert run.reasons == ["stop"]


@pytest.mark.parametrize("ops", ["reference", None])
@pytest.mark.parametrize("name", ["n-gram table", "chain"])
def test_what_is_impossible_behind_the_end_does_not_change_the_law(name, ops):
    target, draft = pair(0.4)
    many, shared = 600, (Until(7),)
    rows = [outrider.SamplingParams(1.0, seed=i, processors=shared) for i in range(many)]
    engine = outrider.Engine(target, DRAFTERS[name](draft))
    laws = []
    plain = outrider.Engine(target, outrider.Root()).run(
        [[3, 1, 4, 1, 5, 9]],
        outrider.SamplingParams(1.0, seed=0),
        outrider.StopConditions(1),
        observe=lambda draft, scores, *rest: laws.append(probs(scores.laws)[0, 0]),
    )
    list(plain)
    with use(ops):
        texts, _ = decode(engine, [[3, 1, 4, 1, 5, 9]] * many, rows, outrider.StopConditions(1))
    found = torch.bincount(torch.tensor(texts)[:, 0], minlength=len(laws[0]))
    expected = laws[0] * many
    common = expected > 3
    distance = ((found - expected) ** 2 / expected)[common].sum()
    assert distance < common.sum() + 5 * (2 * common.sum()).sqrt()  # chi squared


def test_a_chain_ends_where_bans_leave_the_draft_nothing():
    """A draft model with a narrow output, and every token that it knows forbidden."""
    target, draft = pair()
    narrow = TreeDecoder(draft.runner, draft.vocab_size)

    def forward(*args, **kwargs):
        logits = draft.forward(*args, **kwargs).logits_BQV.clone()
        logits[..., 8:] = -torch.inf
        return Output(logits)

    narrow.forward = forward
    bans = dict.fromkeys(range(8), -torch.inf)
    for sampling in (
        outrider.SamplingParams(1.0, seed=1, logit_bias=bans),
        outrider.SamplingParams(0, logit_bias=bans),
    ):
        _, run = decode(outrider.Engine(target, DraftModel(narrow, (1, 1, 1))), [[9, 9]], sampling)
        assert run.stats.new_tokens == run.stats.steps
        assert run.stats.drafted == 0


def test_no_possible_token_at_all_is_a_fault():
    target, draft = pair()
    how = outrider.SamplingParams(
        0, processors=(lambda ids, scores: torch.full_like(scores, -torch.inf),)
    )
    every = outrider.SamplingParams(
        0, logit_bias=dict.fromkeys(range(target.vocab_size), -torch.inf)
    )
    engine = outrider.Engine(target, DraftModel(draft))
    for one in (how, every):
        with pytest.raises(
            outrider.NumericalError, match=r"^bans, rules or processors .* left no token.* loosen"
        ):
            list(engine.run([[2, 4]], one, outrider.StopConditions(4)))


def test_rows_that_share_processors_are_asked_together():
    """One call a depth for all rows of a length, however many settings name the processors."""
    target, draft = pair()
    calls = []

    def counted(ids, scores):
        calls.append(len(ids))
        return scores

    def count(rows):
        calls.clear()
        how = [outrider.SamplingParams(0, seed=row, processors=(counted,)) for row in range(rows)]
        engine = outrider.Engine(target, DraftModel(draft, (1, 1)))
        decode(engine, [[2, 4, 6]] * rows, how, outrider.StopConditions(6))
        return len(calls)

    assert count(6) <= count(1) + 2


def test_only_what_may_mask_everything_is_looked_at():
    bans, rule = dict.fromkeys, Timestamps(no_timestamps_id=4, end_id=3, max_initial=1)

    def masks(how, stops=()):
        return logits_processors.build([how], [[2]], [stops], 8, "cpu", sources=[[5]]).masks

    assert not masks(outrider.SamplingParams(logit_bias={3: 1.0}))
    assert not masks(outrider.SamplingParams(min_new_tokens=4), (1, 2))
    assert masks(outrider.SamplingParams(min_new_tokens=4), tuple(range(8)))
    assert not masks(outrider.SamplingParams(logit_bias={3: -torch.inf}))
    assert masks(outrider.SamplingParams(logit_bias=bans(range(8), -torch.inf)))
    early = outrider.SamplingParams(
        logit_bias=bans(range(4), -torch.inf), begin_suppress_tokens=(4, 5)
    )
    assert not masks(early)
    assert masks(replace(early, min_new_tokens=1), (6, 7))
    assert not masks(replace(early, min_new_tokens=1), (6, 5))
    assert not masks(outrider.SamplingParams(timestamps=rule, begin_suppress_tokens=(5,)))
    assert masks(outrider.SamplingParams(timestamps=rule, begin_suppress_tokens=(5, 6)))
    assert masks(outrider.SamplingParams(timestamps=rule, logit_bias={3: -torch.inf}))
    assert masks(outrider.SamplingParams(encoder_no_repeat_ngram_size=2))
    assert masks(outrider.SamplingParams(no_repeat_ngram_size=2))
    assert masks(outrider.SamplingParams(processors=(only_even,)))
