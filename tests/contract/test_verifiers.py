"""Every registered rule: verdicts follow its declared law; it is pure and blind to its batch."""

from dataclasses import fields
from itertools import pairwise

import enumeration as e
import numpy as np
import own_trees
import pytest
import torch
from scipy.stats import chi2

from outrider import ops, verifiers
from outrider.errors import ConfigurationError, UnknownName
from outrider.tree import chain as chain_tree
from outrider.types import Draft, DrawKind, Draws, Laws, Scores, Verdict
from outrider.verifiers.tree_walk import AliasedVerifier
from outrider_lab.verifiers import lossy

RULES = list(verifiers.VERIFIERS.values())
ROWS = 30_000
F, WO, WI, CO = DrawKind.FIXED, DrawKind.WITHOUT, DrawKind.WITH, DrawKind.COUPLED

SCHEMES = {
    "bare root": lambda w: e.placed(w, ()),
    "chain": lambda w: e.without(w, (1, 1, 1)),
    "placed chain": lambda w: e.placed(w, (1, 1, 1)),
    "ragged chain": lambda w: e.stopped(w, 3, 0.4),
    "RSD-C": lambda w: e.without(w, (2, 2)),
    "RSD-S": lambda w: own_trees.beam(w, 3, 2),
    "placed tree": lambda w: e.placed(w, (2, 2)),
    "hub": lambda w: e.hub(w, (2, 2)),
    "hub, placed first": lambda w: e.hub(w, (2, 2), last=True),
    "mixed": lambda w: e.mixed(w, (3, 1)),
    "merged paths": lambda w: own_trees.merged(w, 3, 2),
}


@pytest.fixture(autouse=True)
def _reference():
    with ops.use("reference"):
        yield


def forest(scheme: str, vocab: int = 3, case: str = "random") -> e.Forest:
    return SCHEMES[scheme](e.World(vocab, 3, 11, (case,)))


def legal(rule, trees: e.Forest) -> bool:
    return verifiers.supports(rule, trees.kinds, trees.tree.is_chain)


PAIRS = [
    pytest.param(rule, scheme, id=f"{rule.name}-{scheme}")
    for rule in RULES
    for scheme in SCHEMES
    if legal(rule, forest(scheme))
]


def single(laws: Laws | None) -> Laws | None:
    if laws is None:
        return None
    return laws._replace(
        logits_BRV=laws.logits_BRV.float(),
        inverse_temperature_B=laws.inverse_temperature_B.float(),
    )


def batch(trees: e.Forest) -> tuple[Draft, Scores]:
    """All drafts of a forest in float32."""
    draft, scores = trees.draft(), trees.scores()
    return draft._replace(laws=single(draft.laws)), scores._replace(laws=single(scores.laws))


def repeated(trees: e.Forest, row: int, times: int) -> tuple[Draft, Scores]:
    """One draft of a forest, `times` times, in float32."""
    part = trees[row : row + 1]
    draft, scores = batch(part)

    def wide(table):
        return table.expand(times, *table.shape[1:]).contiguous()

    def wider(laws):
        return laws and laws._replace(
            logits_BRV=wide(laws.logits_BRV),
            inverse_temperature_B=wide(laws.inverse_temperature_B),
        )

    tree = draft.tree
    if tree.parent_BN.shape[0] == len(trees):
        tree = tree._replace(
            parent_BN=wide(tree.parent_BN),
            depth_BN=wide(tree.depth_BN),
            ancestors_BNN=wide(tree.ancestors_BNN),
        )
    return (
        draft._replace(
            tokens_BN=wide(draft.tokens_BN),
            tree=tree,
            draws_BNK=wide(draft.draws_BNK),
            kind_BNK=wide(draft.kind_BNK),
            row_BNK=wide(draft.row_BNK),
            laws=wider(draft.laws),
        ),
        scores._replace(laws=wider(scores.laws)),
    )


def keys(rows: int, start: int = 100) -> Draws:
    return Draws(torch.arange(rows) * 7919, torch.full((rows,), start))


def stops(draft: Draft, verdict: Verdict) -> torch.Tensor:
    """The node where each walk stood."""
    path = torch.cat([torch.zeros_like(verdict.count_B[:, None]), verdict.path_BD], 1)
    return path.gather(1, verdict.count_B[:, None])[:, 0]


def surprise(rule, law_of, trees: e.Forest) -> tuple[float, float]:
    """Chi-square of the verdicts on one draft against an outcome, and its 1e-4 critical value."""
    outcome = law_of.outcome(trees.draft(), trees.scores())
    spread = (outcome.stop_BN * (1 - outcome.stop_BN)).sum(1).numpy()
    row = int(spread.argmax())  # the draft whose verdict is most uncertain
    draft, scores = repeated(trees, row, ROWS)
    verdict = rule(draft, scores, keys(ROWS))
    cell = stops(draft, verdict) * trees.world.vocab + verdict.next_B
    expected = (outcome.stop_BN[row, :, None] * outcome.next_BNV[row]).flatten().numpy() * ROWS
    seen = np.bincount(cell.numpy(), minlength=len(expected)).astype(float)
    assert seen[expected == 0].sum() == 0
    big = expected >= 5
    seen = np.append(seen[big], seen[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    keep = expected > 0
    statistic = ((seen - expected)[keep] ** 2 / expected[keep]).sum()
    return float(statistic), float(chi2.isf(1e-4, max(keep.sum() - 1, 1)))


@pytest.mark.parametrize(("rule", "scheme"), PAIRS)
def test_verdicts_follow_the_declared_law(rule, scheme):
    statistic, critical = surprise(rule, rule, forest(scheme))
    assert statistic <= critical


@pytest.mark.parametrize("scheme", ["chain", "RSD-C", "RSD-S"])
def test_that_comparison_tells_two_exact_rules_apart(scheme):
    rule, other = verifiers.get("rejection"), verifiers.get("traversal")
    statistic, critical = surprise(rule, other, forest(scheme))
    assert statistic > critical


@pytest.mark.parametrize(("rule", "scheme"), PAIRS)
def test_paths_are_paths(rule, scheme):
    draft, scores = batch(forest(scheme))
    rows = draft.tokens_BN.shape[0]
    verdict = rule(draft, scores, keys(rows))
    assert verdict.path_BD.shape == (rows, draft.tree.max_depth)
    assert ((verdict.path_BD >= 0).sum(1) == verdict.count_B).all()
    for b in range(min(rows, 200)):
        count = int(verdict.count_B[b])
        path = [0, *verdict.path_BD[b, :count].tolist()]
        assert all(kid in draft.draws_BNK[b, node] for node, kid in pairwise(path))
        assert (verdict.path_BD[b, count:] == -1).all()
    if verdict.overlap_BD is not None:
        told = ~verdict.overlap_BD.isnan()
        assert told.sum(1).le(verdict.count_B + 1).all()
        assert ((verdict.overlap_BD[told] >= 0) & (verdict.overlap_BD[told] <= 1 + 1e-6)).all()
    drawn = draft.laws is not None and draft.kinds != {F} and draft.tree.max_depth
    if drawn and rule.name not in ("match", "typical"):
        assert verdict.overlap_BD is not None


@pytest.mark.parametrize(("rule", "scheme"), PAIRS)
def test_a_rule_is_a_pure_function(rule, scheme):
    draft, scores = batch(forest(scheme))
    before = [table.clone() for table in _tensors(draft, scores)]
    draws = keys(draft.tokens_BN.shape[0])
    first, again = rule(draft, scores, draws), rule(draft, scores, draws)
    rule.outcome(draft, scores)
    for one, two in zip(first, again, strict=True):
        assert one is two is None or torch.equal(one.nan_to_num(-1), two.nan_to_num(-1))
    assert all(torch.equal(a, b) for a, b in zip(before, _tensors(draft, scores), strict=True))


def _tensors(*parts) -> list[torch.Tensor]:
    found = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, tuple):
            found += _tensors(*part)
    return found


@pytest.mark.parametrize(("rule", "scheme"), PAIRS)
def test_rows_do_not_see_each_other(rule, scheme):
    """A row alone has the verdict it has in a batch with rows of other lengths and shapes."""
    trees = forest(scheme)
    draft, scores = batch(trees)
    rows = draft.tokens_BN.shape[0]
    together = rule(draft, scores, keys(rows))
    for row in range(0, rows, max(1, rows // 8)):
        one, one_scores = batch(trees[row : row + 1])
        part = Draws(keys(rows).seed_B[row : row + 1], keys(rows).start_B[row : row + 1])
        alone = rule(one, one_scores, part)
        assert torch.equal(alone.path_BD[0], together.path_BD[row])
        assert alone.next_B[0] == together.next_B[row]


@pytest.mark.parametrize(("rule", "scheme"), PAIRS)
def test_no_value_is_read_from_the_device(rule, scheme):
    draft, scores = batch(forest(scheme))

    def away(part):
        if isinstance(part, torch.Tensor):
            return part.to("meta")
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(away, part))
        return part

    verdict = rule(away(draft), away(scores), away(keys(draft.tokens_BN.shape[0])))
    assert verdict.next_B.is_meta
    assert verdict.path_BD.shape == (draft.tokens_BN.shape[0], draft.tree.max_depth)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_shared_topology_broadcasts(rule):
    """Tables with a leading 1 mean the same as tables repeated for every row."""
    for scheme in ("chain", "RSD-C", "placed tree"):
        trees = forest(scheme)
        if not legal(rule, trees):
            continue
        draft, scores = batch(trees)
        shared = draft._replace(
            draws_BNK=draft.draws_BNK[:1],
            kind_BNK=draft.kind_BNK[:1],
            row_BNK=draft.row_BNK[:1],
        )
        draws = keys(draft.tokens_BN.shape[0])
        one, two = rule(draft, scores, draws), rule(shared, scores, draws)
        assert torch.equal(one.path_BD, two.path_BD)
        assert torch.equal(one.next_B, two.next_B)
        left, right = rule.outcome(draft, scores), rule.outcome(shared, scores)
        torch.testing.assert_close(left.stop_BN, right.stop_BN)


@pytest.mark.parametrize(
    "rule", [r for r in RULES if legal(r, forest("chain"))], ids=lambda rule: rule.name
)
def test_a_padded_row_is_a_shorter_draft(rule):
    trees = forest("chain", 4)
    draft, scores = batch(trees)
    rows, generator = len(trees), torch.Generator().manual_seed(0)
    uniform = torch.rand(rows, 4, 1, generator=generator)
    race = torch.empty(rows, 4).exponential_(generator=generator)
    target_race = torch.empty(rows, 4, 4).exponential_(generator=generator)
    for length in range(3):
        padded = draft._replace(draws_BNK=draft.draws_BNK.where(draft.draws_BNK <= length, -1))
        table = chain_tree(length)
        short = draft._replace(
            tokens_BN=draft.tokens_BN[:, : length + 1],
            tree=table,
            draws_BNK=padded.draws_BNK[:, : length + 1],
            kind_BNK=draft.kind_BNK[:, : length + 1],
            row_BNK=draft.row_BNK[:, : length + 1],
        )
        laws = scores.laws._replace(logits_BRV=scores.laws.logits_BRV[:, : length + 1])
        base = keys(rows)
        wide = rule(
            padded,
            scores,
            base._replace(uniform_BNK=uniform, race_BV=race, target_race_BDV=target_race),
        )
        tight = rule(
            short,
            Scores(laws),
            base._replace(
                uniform_BNK=uniform[:, : length + 1],
                race_BV=race,
                target_race_BDV=target_race[:, : length + 1],
            ),
        )
        assert torch.equal(wide.count_B, tight.count_B)
        assert torch.equal(wide.next_B, tight.next_B)


EXACT_ON_TREES = [r for r in RULES if r.exact]


@pytest.mark.parametrize("rule", EXACT_ON_TREES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("scheme", ["chain", "RSD-C", "merged paths", "hub"])
def test_greedy_rows_beside_sampled_rows(rule, scheme):
    """A greedy row follows the argmax whatever its draft says; a sampled row does not notice it."""
    trees = forest(scheme)
    if not legal(rule, trees):
        pytest.skip("refused at set-up")
    draft, scores = batch(trees)
    rows = draft.tokens_BN.shape[0]
    hot = torch.arange(rows) % 2 == 0

    def heat(laws, greedy="some"):
        return laws._replace(
            inverse_temperature_B=torch.where(hot, torch.inf, laws.inverse_temperature_B),
            greedy=greedy,
        )

    for placed in (False, True):
        some = draft
        if placed:  # what drafters do at temperature 0: declare the greedy rows' children as placed
            some = draft._replace(
                kind_BNK=torch.where(hot[:, None, None], int(F), draft.kind_BNK),
                kinds=draft.kinds | {F},
            )
            if not verifiers.supports(rule, some.kinds, some.tree.is_chain):
                continue
        draws = keys(rows)
        verdict = rule(some, scores._replace(laws=heat(scores.laws)), draws)
        best = scores.laws.logits_BRV.argmax(-1)
        path, _, node = ops.follow(draft, best)
        assert torch.equal(verdict.path_BD[hot], path[hot])
        assert torch.equal(verdict.next_B[hot], best.gather(1, node[:, None])[hot, 0])
        alone = rule(draft, scores, draws)
        assert torch.equal(verdict.path_BD[~hot], alone.path_BD[~hot])
        assert torch.equal(verdict.next_B[~hot], alone.next_B[~hot])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_bare_root_is_plain_sampling(rule):
    trees = forest("chain", 4)
    _, scores = repeated(trees, 0, 20_000)
    laws = scores.laws._replace(logits_BRV=scores.laws.logits_BRV[:, :1])
    none = torch.full((1, 1, 1), -1)
    draft = Draft(
        torch.zeros(20_000, 1, dtype=torch.int64),
        chain_tree(0),
        none,
        torch.zeros_like(none),
        none,
        None,
        frozenset(),
    )
    verdict = rule(draft, Scores(laws), keys(20_000))
    assert verdict.path_BD.shape == (20_000, 0)
    assert not verdict.count_B.any()
    law = laws.logits_BRV[0, 0].softmax(-1)
    if rule.exact:
        seen = torch.bincount(verdict.next_B, minlength=4) / 20_000
        assert (seen - law).abs().max() < 4 * 0.5 / 20_000**0.5
    outcome = rule.outcome(draft, Scores(laws))
    assert (outcome.stop_BN == 1).all()


def test_extreme_uniforms_never_accept_an_impossible_token():
    """u = 0 must not keep a token of zero target probability (strict tests)."""
    trees = forest("chain", 4, "disjoint")
    draft, scores = batch(trees)
    rows = len(trees)
    zero = Draws(*keys(rows)[:2], torch.zeros(rows, 4, 1), torch.ones(rows, 4))
    for rule in RULES:
        if rule.exact and legal(rule, trees):
            assert not rule(draft, scores, zero).count_B.any(), rule.name


# Set-up


@pytest.mark.parametrize(
    ("name", "kinds", "is_chain"),
    [
        ("block", {WO}, False),
        ("non_iterative", {WO}, False),
        ("kseq", {WO}, False),
        ("multi_round", {F, WO}, False),
        ("rejection", {CO}, True),
        ("traversal", {F, CO}, False),
        ("coupled", {WO}, True),
        ("lenience", {WO}, False),
    ],
)
def test_a_rule_that_cannot_verify_a_draft_is_refused(name, kinds, is_chain):
    with pytest.raises(ConfigurationError, match="rules that can: ") as error:
        verifiers.check(verifiers.get(name), frozenset(kinds), is_chain, "some_drafter")
    assert name not in str(error.value).split("rules that can:")[1].replace(" ", "").split(",")


@pytest.mark.parametrize("kinds", [{F}, {WO}, {WI}, {CO}, {F, WO}, {F, WI}, {F, CO}, set()])
@pytest.mark.parametrize("is_chain", [True, False])
def test_the_default_is_exact_and_able(kinds, is_chain):
    rule = verifiers.default(frozenset(kinds), is_chain)
    assert rule.exact
    verifiers.check(rule, frozenset(kinds), is_chain, "some_drafter")


def test_defaults_by_kind():
    def name(kinds, is_chain):
        return verifiers.default(frozenset(kinds), is_chain).name

    assert name({F}, True) == name({F}, False) == name({F, CO}, False) == name((), True) == "match"
    assert name({F, WO}, True) == name({WI}, True) == "block"
    assert name({F, WO}, False) == name({WO}, False) == "traversal"
    assert name({WI}, False) == "kseq"


def test_on_a_chain_with_and_without_replacement_are_the_same():
    verifiers.check(verifiers.get("kseq"), frozenset({F, WO}), True, "draft_model")
    verifiers.check(verifiers.get("multi_round"), frozenset({WO}), True, "draft_model")


def test_an_unknown_rule_suggests_a_known_one():
    with pytest.raises(UnknownName, match="traversal"):
        verifiers.get("travesal")


@pytest.mark.parametrize(
    "make",
    [
        lambda: lossy.Lenience(0),
        lambda: lossy.LenienceArgmax(1.5),
        lambda: lossy.Typical(epsilon=-1),
        lambda: lossy.Sigmoid(scale=0),
    ],
)
def test_lossy_parameters_are_checked(make):
    with pytest.raises(ConfigurationError):
        make()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_a_rule_is_cannot_be_set(rule):
    """Nobody may call a rule exact that is not: only parameters are arguments."""
    if isinstance(rule, AliasedVerifier):
        assert rule.kinds < rule.rule.kinds
        assert (rule.exact, rule.chain_only) == (rule.rule.exact, rule.rule.chain_only)
    else:
        told = {"name", "exact", "kinds", "chain_only"}
        assert not told & {field.name for field in fields(rule)}
