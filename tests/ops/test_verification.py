"""Backends against the float64 twin: path, count and next token for the same keys."""

import pytest
import torch
from cases import Case, build, matrix, same, twin, with_race

from outrider import ops
from outrider.ops.cpu import BACKEND as CPU
from outrider.types import DrawKind, Scores

BRANCHING = ("tree", "traversal")  # operations that take more than chains
CASES = [pytest.param(op, case, id=f"{op}-{case.id}") for op, case in matrix()]


def interpreted():
    """By default every feature with one dtype and seed, and every dtype once: it is slow."""
    met = set()
    for op, case in matrix():
        again = case.seed > 1 or (case.dtype != "fp32" and (op, case.dtype) in met)
        met.add((op, case.dtype))
        marks = [pytest.mark.slow] if again else []
        yield pytest.param(op, case, id=f"{op}-{case.id}", marks=marks)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("op", "case"), list(interpreted()))
def test_kernel_equals_the_twin(kernels, op, case):
    draft, scores, draws = build(case)
    same(kernels.ops[f"verify:{op}"](draft, scores, draws), twin(op, draft, scores, draws))


@pytest.mark.parametrize(("op", "case"), CASES)
def test_cpu_equals_the_twin(op, case):
    draft, scores, draws = build(case)
    theirs = twin(op, draft, scores, draws)
    ours = CPU.ops[f"verify:{op}"](draft, scores, with_race(draws, scores))
    same(ours, theirs)
    if ours.overlap_BD is not None and theirs.overlap_BD is not None:
        torch.testing.assert_close(
            ours.overlap_BD.double(), theirs.overlap_BD, atol=1e-5, rtol=0, equal_nan=True
        )


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", [50, 9000])
def test_cpu_without_overlap_reads_less_and_says_the_same(seed, kept, vocab):
    """The draft's rows are read only where the walk stops, short rows and long ones."""
    from outrider.ops.cpu.rejection_walk import verify_chain

    draft, scores, draws = build(Case(seed=seed, kept=kept, vocab=vocab))
    ours = verify_chain(draft, scores, with_race(draws, scores), overlap=False)
    same(ours, twin("chain", draft, scores, draws))
    assert ours.overlap_BD is None


@pytest.mark.parametrize("op", ["chain", "tree", "block", "traversal"])
@pytest.mark.parametrize("seed", range(3))
def test_cpu_on_long_rows(op, seed):
    counts = (2, 2) if op in BRANCHING else (1, 1, 1)
    draft, scores, draws = build(Case(counts=counts, seed=seed, vocab=9001, spread=1.5))
    ours = CPU.ops[f"verify:{op}"](draft, scores, with_race(draws, scores))
    same(ours, twin(op, draft, scores, draws))


@pytest.mark.parametrize("op", ["chain", "tree", "block", "match", "traversal"])
@pytest.mark.parametrize("seed", range(5))
def test_cpu_path_needs_no_injected_race(op, seed):
    """Path and count equal with the CPU's own draw; its token has positive probability."""
    counts = (2, 2) if op in BRANCHING else (1, 1, 1)
    draft, scores, draws = build(Case(counts=counts, seed=seed, floor=True, vocab=3000))
    ours, theirs = CPU.ops[f"verify:{op}"](draft, scores, draws), twin(op, draft, scores, draws)
    assert ours.path_BD.tolist() == theirs.path_BD.tolist()
    law = ops.probs(scores.laws)
    for b in range(2):
        node = int(ours.path_BD[b, ours.count_B[b] - 1]) if ours.count_B[b] else 0
        assert law[b, node, ours.next_B[b]] > 0


def _forced(draft, scores, draws, value):
    shape = draft.draws_BNK.expand(scores.laws.logits_BRV.shape[0], -1, -1).shape
    return draws._replace(uniform_BNK=torch.full(shape, value))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("op", ["chain", "block", "tree", "traversal"])
def test_all_accepted(kernels, op):
    """Uniforms of 0 keep everything that the target can say; the bonus token follows."""
    draft, scores, draws = build(Case(counts=(1, 1, 1, 1)))
    draws = _forced(draft, scores, draws, 0.0)
    theirs = twin(op, draft, scores, draws)
    assert theirs.count_B.tolist() == [4, 4]
    same(kernels.ops[f"verify:{op}"](draft, scores, draws), theirs)
    same(CPU.ops[f"verify:{op}"](draft, scores, with_race(draws, scores)), theirs)


@pytest.mark.parametrize("op", ["chain", "block", "tree", "traversal"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2)])
def test_reject_at_once(kernels, op, counts):
    """Disjoint supports: nothing is kept and the token comes from the target."""
    if op not in BRANCHING and max(counts) > 1:
        counts = (1,)
    draft, scores, draws = build(Case(counts=counts, batch=1, vocab=33))
    scores.laws.logits_BRV[..., draft.tokens_BN.unique()] = -torch.inf
    theirs = twin(op, draft, scores, draws)
    assert theirs.count_B.tolist() == [0]
    same(kernels.ops[f"verify:{op}"](draft, scores, draws), theirs)
    same(CPU.ops[f"verify:{op}"](draft, scores, with_race(draws, scores)), theirs)


@pytest.mark.parametrize("op", ["chain", "tree"])
def test_empty_residual_falls_back_to_the_target(kernels, op):
    """p = q and a forced refusal: the residual has no mass, so the target's law is drawn from."""
    counts = (1, 1) if op == "chain" else (2,)
    draft, scores, draws = build(Case(counts=counts, batch=1, vocab=33, spread=0.0))
    draws = _forced(draft, scores, draws, 2.0)
    for verify in (kernels.ops[f"verify:{op}"], CPU.ops[f"verify:{op}"]):
        found = verify(draft, scores, with_race(draws, scores))
        assert found.count_B.tolist() == [0]
        law = ops.probs(scores.laws)[0, 0]
        race = with_race(draws, scores).race_BV[0]
        if op == "chain":
            assert int(found.next_B) == int((law / race).argmax())
        assert 0 <= int(found.next_B) < 33


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("op", ["chain", "block"])
def test_a_smaller_draft_vocabulary(kernels, op, kept):
    """Tokens the draft does not know have probability 0 there and enter through the residual."""
    for seed in range(3):
        case = Case(vocab=70, seed=seed, kept=kept, kind=DrawKind.WITH)
        draft, scores, draws = build(case)
        few = 40
        full = draft.laws.logits_BRV.clone()
        full[..., few:] = -torch.inf
        wide = draft.laws._replace(logits_BRV=full, lse_BR=None)
        tokens = draft.tokens_BN % few
        wide_draft = draft._replace(laws=wide, tokens_BN=tokens)
        narrow = wide._replace(logits_BRV=full[..., :few])
        if kept:
            narrow = narrow._replace(lse_BR=ops.scaled(narrow).logsumexp(-1))
        theirs = twin(op, wide_draft, scores, draws)
        small = draft._replace(laws=narrow, tokens_BN=tokens)
        same(kernels.ops[f"verify:{op}"](small, scores, draws), theirs)
        same(CPU.ops[f"verify:{op}"](small, scores, with_race(draws, scores)), theirs)


def test_match_takes_an_injected_race(kernels):
    draft, scores, draws = build(Case(counts=(2, 1), kind=DrawKind.FIXED))
    race = torch.rand(2, 3, 65).exp()
    draws = draws._replace(target_race_BDV=race)
    theirs = twin("match", draft, scores, draws)
    same(kernels.ops["verify:match"](draft, scores, draws), theirs)
    same(CPU.ops["verify:match"](draft, scores, draws), theirs)


def test_shared_topology_broadcasts(kernels):
    draft, scores, draws = build(Case())
    shared = draft._replace(
        draws_BNK=draft.draws_BNK[:1], kind_BNK=draft.kind_BNK[:1], row_BNK=draft.row_BNK[:1]
    )
    for op in ("chain", "block", "match"):
        theirs = twin(op, draft, scores, draws)
        same(kernels.ops[f"verify:{op}"](shared, scores, draws), theirs)
        same(CPU.ops[f"verify:{op}"](shared, scores, with_race(draws, scores)), theirs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("op", ["chain", "block", "match"])
def test_slices_and_batch_order_change_nothing(kernels, op):
    from outrider.ops.triton import launch

    draft, scores, draws = build(Case(vocab=97, batch=2))
    once = kernels.ops[f"verify:{op}"](draft, scores, draws)
    launch._forced.append((128, 4))
    same(kernels.ops[f"verify:{op}"](draft, scores, draws), once)
    launch._forced.pop()
    order = torch.tensor([1, 0])

    def turn(laws):
        return laws._replace(
            logits_BRV=laws.logits_BRV[order],
            inverse_temperature_B=laws.inverse_temperature_B[order],
        )

    turned = kernels.ops[f"verify:{op}"](
        draft._replace(
            tokens_BN=draft.tokens_BN[order],
            draws_BNK=draft.draws_BNK[order],
            row_BNK=draft.row_BNK[order],
            kind_BNK=draft.kind_BNK[order],
            laws=turn(draft.laws),
        ),
        Scores(turn(scores.laws)),
        draws._replace(seed_B=draws.seed_B[order], start_B=draws.start_B[order]),
    )
    assert turned.path_BD[order].tolist() == once.path_BD.tolist()
    assert turned.next_B[order].tolist() == once.next_B.tolist()


@pytest.mark.parametrize("vocab", [64, 9000])
def test_a_vanishing_reach_keeps_nothing(vocab):
    """Block verification divides by the reach, which may be as small as a float gets."""
    from outrider import verifiers
    from outrider.engine import step
    from outrider.tree import chain, children
    from outrider.types import Draft, DrawKind, Draws, Laws, Scores

    target = torch.zeros(1, 3, vocab)
    target[0, 0, 0] = -95.0
    guess = torch.full((1, 2, vocab), -torch.inf)  # filtered: only two tokens are left
    guess[0, :, :2] = torch.tensor([5.0, 0.0])
    draws = children((1, 1))
    draft = Draft(
        torch.zeros(1, 3, dtype=torch.int64),
        chain(2),
        draws,
        torch.full_like(draws, int(DrawKind.WITHOUT)),
        torch.where(draws >= 0, torch.arange(3)[None, :, None], -1),
        Laws(guess, torch.ones(1), greedy="none"),
        frozenset({DrawKind.WITHOUT}),
    )
    scores = Scores(Laws(target, torch.ones(1), greedy="none"))
    uniform = torch.full((1, 3, 1), 0.5)
    start = torch.zeros(1, dtype=torch.int64)
    draws = Draws(start, start, uniform_BNK=uniform)
    verdict = step.run_kernel(verifiers.get("block"), draft, scores, draws)
    assert verdict.count_B.tolist() == [0]
