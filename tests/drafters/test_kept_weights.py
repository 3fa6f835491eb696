"""Trees drawn on a CPU: they declare what they drew from, and keep the right weights of it."""

import numpy as np
import pytest
import torch

from outrider import DraftModel, SamplingParams, ops, verifiers
from outrider.drafters import HubTree, SampledTree
from outrider.engine import step
from outrider.models.cache import SlotCache
from outrider.ops.cpu.law_slices import weights_of
from outrider.types import Output, Scores
from tiny import PROMPTS, begun, pair

SHAPE = (-1, 0, 0, 0, 1, 1, 2, 4)  # uneven: 3 children, then 2, 1, none, ...
MAKE = {
    "chain": lambda model: DraftModel(model, (1, 1, 1)),
    "tree": lambda model: DraftModel(model, (3, 2, 1)),
    "uneven": lambda model: SampledTree(model, parents=SHAPE),
    "hub": lambda model: HubTree(model, (3, 2, 1)),
    "uneven hub": lambda model: HubTree(model, parents=SHAPE),
}
SETTINGS = {
    "plain": SamplingParams(1.0, seed=3),
    "cold": SamplingParams(0.6, seed=3),
    "filtered": SamplingParams(0.9, top_k=4, seed=3),
    "nucleus": SamplingParams(1.2, top_p=0.5, seed=3),
}


def drafted(name, settings, batch, seed=0):
    target, small = pair()
    drafter = MAKE[name](small)
    how = [SamplingParams(**(vars(settings) | {"seed": 10 * seed + row})) for row in range(batch)]
    state = begun(target, drafter, PROMPTS[:batch], how)
    return target, drafter, state, step.propose(drafter, state)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("batch", [1, 4])
def test_weights_stand_for_the_tensors(name, settings, batch):
    target, drafter, state, draft = drafted(name, SETTINGS[settings], batch)
    kept = weights_of(draft.laws)
    assert kept is not None
    law = ops.probs(draft.laws)
    drawn = (draft.row_BNK >= 0) & (draft.draws_BNK >= 0)
    for b, n, k in drawn.expand(batch, -1, -1).nonzero().tolist():
        row = int(draft.row_BNK.expand(batch, -1, -1)[b, n, k])
        ours = torch.from_numpy(kept.values[row][b]) / kept.sums[row][b]
        torch.testing.assert_close(ours, law[b, row], atol=1e-6, rtol=1e-5)
        child = int(draft.draws_BNK.expand(batch, -1, -1)[b, n, k])
        assert law[b, row, draft.tokens_BN[b, child]] > 0
    scores = step.score(target, state, draft)
    bare = draft._replace(laws=draft.laws._replace(host=None))
    for rule in verifiers.VERIFIERS.values():
        if not verifiers.supports(rule, drafter.kinds, drafter.shapes[0].is_chain):
            continue
        ours, theirs = (step.verify(rule, state, d, scores) for d in (draft, bare))
        assert ours.path_BD.tolist() == theirs.path_BD.tolist()
        assert ours.next_B.tolist() == theirs.next_B.tolist()
        if ours.overlap_BD is not None:  # a chain's is summed from tables, the other row by row
            torch.testing.assert_close(ours.overlap_BD, theirs.overlap_BD, equal_nan=True)


def test_changed_laws_forget_what_was_kept_of_them():
    """A mistake planted in a tensor is seen: no weights hide it, whatever way it was planted."""
    _, _, _, draft = drafted("chain", SETTINGS["plain"], 1)
    laws = draft.laws
    assert weights_of(laws) is not None
    assert weights_of(laws._replace(logits_BRV=torch.zeros_like(laws.logits_BRV))) is None
    assert weights_of(laws._replace(floor_BR=torch.zeros(1, 3))) is None
    assert weights_of(laws._replace(inverse_temperature_B=torch.ones(1))) is None
    assert laws._replace(lse_BR=None).host is None
    assert ops.stack([laws, laws._replace(host=None)]).host is None
    twice = weights_of(ops.stack([laws, laws]))
    assert [len(twice.values), len(twice.sums)] == [6, 6]


def test_nan_is_told_and_a_masked_row_draws_nothing():
    from outrider.ops.cpu.batched_without_replacement import DrawsWithoutReplacement
    from outrider.types import Laws

    logits = torch.randn(1, 3, 200)
    logits[0, 1] = -torch.inf
    urns = DrawsWithoutReplacement(Laws(logits, torch.ones(1), greedy="none"))
    assert not urns.fault
    assert urns.sums[1] == 0
    _, mass = urns.draw(np.arange(3), 0)
    assert (mass > 0).tolist() == [True, False, True]
    one = DrawsWithoutReplacement(Laws(logits[:, 1:2], torch.ones(1), greedy="none"))
    assert one.draw_one(0, 0.4) == (0, 0.0)
    assert one.sums == [0.0]
    assert not one.fault
    logits[0, 2, 7] = torch.nan
    one = DrawsWithoutReplacement(Laws(logits[:, 2:], torch.ones(1), greedy="none"))
    assert one.draw_one(0, 0.4) == (0, 0.0)
    assert one.fault
    assert DrawsWithoutReplacement(Laws(logits, torch.ones(1), greedy="none")).fault


@pytest.mark.parametrize("rule", ["block", "rejection"])
@pytest.mark.parametrize("scale", [1.0, 60.0, 400.0])
def test_chains_are_verified_by_kept_weights_as_from_logits(rule, scale):
    """Also where exp(z) leaves float32, tokens are masked, or nothing of the target is left."""
    paths = set()
    for seed in range(40):
        _, _, state, draft = drafted("chain", SETTINGS["plain"], 1, seed)
        noise = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(seed))
        logits = torch.cat([draft.laws.logits_BRV, draft.laws.logits_BRV[:, -1:]], 1) + noise
        logits = scale * logits
        logits[..., seed % 32] = -torch.inf
        scores = Scores(ops.warp(logits, state.context.sampling))
        ours = step.verify(verifiers.get(rule), state, draft, scores)
        bare = draft._replace(laws=draft.laws._replace(host=None))
        theirs = step.verify(verifiers.get(rule), state, bare, scores)
        assert ours.path_BD.tolist() == theirs.path_BD.tolist()
        assert ours.next_B.tolist() == theirs.next_B.tolist()
        torch.testing.assert_close(ours.overlap_BD, theirs.overlap_BD, equal_nan=True)
        paths.add(int(ours.count_B))
    assert len(paths) > 1


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("vocab", [5, 128, 300])
def test_urns_give_every_token_once(count, vocab):
    from outrider.ops.cpu.batched_without_replacement import DrawsWithoutReplacement
    from outrider.types import Laws

    logits = torch.randn(1, count, vocab, generator=torch.Generator().manual_seed(0)) * 4
    urns = DrawsWithoutReplacement(Laws(logits, torch.ones(1), greedy="none"))
    seen = [set() for _ in range(count)]
    for k in range(min(vocab, 40)):
        token, mass = urns.draw(np.arange(count), k)
        assert (mass > 0).all()
        for row, one in enumerate(token.tolist()):
            assert one not in seen[row]
            assert one < vocab
            seen[row].add(one)
        urns.take(token)


class Fixed:
    """A language model whose every law is the same row of logits."""

    def __init__(self, row, dtype=torch.float32):
        self.row, self.vocab_size, self.context = torch.tensor(row, dtype=dtype), len(row), 64
        self.device, self.dtype, self.trees = torch.device("cpu"), dtype, True
        self.reads, self.aux_layers = "text", ()

    def width(self, slots):
        return slots

    def open(self, rows, capacity, inputs=None):
        return SlotCache(1, rows, capacity)

    def forward(self, cache, nodes, *, last=None, aux_layers=()):
        rows, queries = nodes.tokens_BQ.shape
        count = queries if last is None else min(last, queries)
        return Output(self.row.expand(rows, count, -1).clone())

    def keep(self, cache, first_B, path_BD):
        """There is nothing in the cache."""

    def probe(self, rows):
        """It reads text alone."""


PEAKED = [0.0, 95.0, 94.0, 2.0, 0.0, -1.0]
MANY = 4000


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["hub_tree", "sampled_tree"])
@pytest.mark.parametrize("rule", ["hub", "rejection", "traversal"])
def test_a_draft_that_is_almost_certain_leaves_the_targets_law(name, rule):
    """The draft without its best tokens is 1e-41 of itself, and has a law all the same."""
    from outrider import Engine, StopConditions
    from outrider.drafters import DrafterParts, DraftOptions, make

    drafter = make(name, DrafterParts((Fixed(PEAKED),)), DraftOptions(branching=(3,)))
    engine = Engine(Fixed([0.0] * 6), drafter, verifiers.get(rule))
    how = [SamplingParams(1.0, seed=seed) for seed in range(MANY)]
    first = torch.zeros(6)
    for block in engine.run([[1, 2]] * MANY, how, StopConditions(1)):
        first[block.token_ids[0]] += 1
    chi2 = float(((first - MANY / 6) ** 2 / (MANY / 6)).sum())
    assert chi2 < 25.7, first  # 5 degrees of freedom, p = 1e-4


def test_half_precision_logits_of_any_model_do():
    from outrider.drafters import DrafterParts, DraftOptions, make

    drafter = make(
        "hub_tree", DrafterParts((Fixed(PEAKED, torch.bfloat16),)), DraftOptions(branching=(2, 1))
    )
    state = begun(Fixed([0.0] * 6), drafter, [[1, 2]], [SamplingParams(1.0, seed=1)], 32, limit=9)
    draft = step.propose(drafter, state)
    assert draft.laws.logits_BRV[0, 0].isinf().sum() == 1


def test_a_sibling_drawn_with_replacement_follows_one_drawn_without():
    """Traversal verifies the second one against the whole law again, as its `outcome` says."""
    from outrider.tree import branching, children
    from outrider.types import Draft, DrawKind, Draws, Laws, Scores

    q, p = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.05, 0.36, 0.59])
    many = 4000
    laws = Laws(q.log().expand(many, 1, 3), torch.ones(many), greedy="none")
    draft = Draft(
        torch.tensor([[0, 0, 1]]).expand(many, -1),
        branching((2,)),
        children((2,)),
        torch.tensor([[[int(DrawKind.WITHOUT), int(DrawKind.WITH)]] + [[0, 0]] * 2]),
        torch.tensor([[[0, 0]] + [[-1, -1]] * 2]),
        laws,
        frozenset({DrawKind.WITHOUT, DrawKind.WITH}),
    )
    scores = Scores(Laws(p.log().expand(many, 3, 3), torch.ones(many), greedy="none"))
    rule = verifiers.get("traversal")
    law = rule.outcome(draft, scores).stop_BN[0]
    draws = Draws(torch.arange(many), torch.zeros(many, dtype=torch.int64))
    verdict = step.run_kernel(rule, draft, scores, draws)
    stops = torch.stack([(verdict.path_BD[:, 0] == n).float().mean() for n in (-1, 1, 2)])
    torch.testing.assert_close(stops, law, atol=0.03, rtol=0)
