"""The checks of a drafter, one function each. Each is run by `check_drafter`, and by hand:

checks.drafts_are_well_formed(Case(make, "sampled", shape))
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import verifiers
from outrider.drafters import Root
from outrider.drafters.draft_model import model_of
from outrider.engine import step
from outrider.engine.batch import Batch
from outrider.engine.engine import Engine
from outrider.engine.request import Request, StopConditions
from outrider.errors import ConfigurationError
from outrider.models.cross_tokenizer_model import TranslatedModel
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing.models import PROMPTS, VOCAB, MetaModel, llama, pair
from outrider.testing.runs import Restless, begun, decode, finished, p_value, text_law
from outrider.types import (
    Draft,
    Drafter,
    DraftShape,
    DrawKind,
    LanguageModel,
    Scores,
    Verdict,
    Verifier,
)

# What a check is given and what it says when it fails: the check, the setting and the shape.

#: Makes the drafter under test for a draft model, the tiny one or one on the meta device.
Maker = Callable[[LanguageModel], Drafter]

#: Sampling of three rows.
SETTINGS = {
    "greedy": (SamplingParams(0),) * 3,
    "sampled": tuple(SamplingParams(1.0, seed=row) for row in range(3)),
    "mixed": (
        SamplingParams(0),
        SamplingParams(0.8, top_k=7, seed=1),
        SamplingParams(1.2, top_p=0.9, min_p=0.01, seed=2),
    ),
}


class Case(NamedTuple):
    """One run of a check."""

    make: Maker
    setting: str = "greedy"  #: a key of SETTINGS
    shape: DraftShape | None = None  #: None: the drafter's usual one
    rule: Verifier | None = None  #: None: the default for the drafter

    @property
    def drafter(self) -> Drafter:
        """A drafter with the tiny draft model."""
        return self.make(pair()[1])

    @property
    def sampling(self) -> tuple[SamplingParams, ...]:
        """The setting's rows."""
        return SETTINGS[self.setting]


class Check(NamedTuple):
    """A check of a drafter. Calling it raises an AssertionError that names it and the case."""

    name: str
    body: Callable[[Case], None]
    over: frozenset[str]  #: what it is run for each of: setting, shape, rule

    def __call__(self, case: Case) -> None:
        """Run it; whatever goes wrong has failed it."""
        try:
            self.body(case)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"{self.name} ({self._of(case)}): {kind}{error}") from error

    def cases(self, make: Maker) -> Iterator[Case]:
        """Every case of it for a drafter."""
        drafter = make(pair()[1])
        settings = list(SETTINGS) if "setting" in self.over else ["greedy"]
        shapes = drafter.shapes if "shape" in self.over else (None,)
        rules = verifiers_for(drafter) if "rule" in self.over else [None]
        for setting in settings:
            for shape in shapes:
                for rule in rules:
                    yield Case(make, setting, shape, rule)

    def _of(self, case: Case) -> str:
        parts = [f"setting {case.setting}"] if "setting" in self.over else []
        shape = "usual shape" if case.shape is None else f"shape {case.shape.key!r}"
        rule = [] if case.rule is None else [f"rule {case.rule.name}"]
        return ", ".join([*parts, shape, *rule])


#: Every check by name, in the order in which `check_drafter` runs them.
CHECKS: dict[str, Check] = {}


def check(*over: str) -> Callable[[Callable[[Case], None]], Check]:
    """Make a check of a function, run for each setting, shape or rule, and list it in CHECKS."""

    def listed(body: Callable[[Case], None]) -> Check:
        name = body.__name__.replace("_", " ")
        CHECKS[name] = Check(name, body, frozenset(over))
        return CHECKS[name]

    return listed


def verifiers_for(drafter: Drafter) -> list[Verifier]:
    """The rules that can verify a drafter."""
    chain = all(shape.is_chain for shape in drafter.shapes)
    rules = verifiers.VERIFIERS.values()
    return [rule for rule in rules if verifiers.supports(rule, drafter.kinds, chain)]


def usual_rule(drafter: Drafter) -> Verifier:
    """The rule of sampled rows if none is named."""
    return verifiers.default(drafter.kinds, all(shape.is_chain for shape in drafter.shapes))


def expect(true: bool, otherwise: str) -> None:
    """Fail unless it is true; unlike `assert`, under `python -O`, too."""
    if not true:
        raise AssertionError(otherwise)


MATCH = verifiers.get("match")
LENGTH = 24  #: tokens of the texts that are compared
SEEDS = 4000  #: texts of the law check
CHANCE = 1e-4  #: a drafter that is right fails the law check so rarely
PROMPT = (1, 3, 2)


def batch(target: LanguageModel, drafter: Drafter, case: Case) -> Batch:
    """Three rows of different lengths."""
    stops = ((3,), (), (4, 5))
    return begun(target, drafter, PROMPTS[:3], case.sampling, limit=40, stop_ids=stops)


@check()
def shapes_are_declared(case: Case) -> None:
    """Keys are unique, the first shape is the largest, kinds are kinds."""
    drafter = case.drafter
    shapes, keys = drafter.shapes, [shape.key for shape in drafter.shapes]
    expect(bool(shapes), "declare at least one shape; got none")
    expect(len(set(keys)) == len(keys), f"keys of shapes must be unique; got {keys}")
    for shape in shapes:
        expect(
            shape.max_nodes <= shapes[0].max_nodes and shape.max_depth <= shapes[0].max_depth,
            f"the first shape must be the largest; got {shapes[0]} ahead of {shape}",
        )
        expect(
            shape.max_depth < shape.max_nodes,
            f"the pending token counts as a node, so depth is less than nodes; got {shape}",
        )
    expect(drafter.kinds <= frozenset(DrawKind), f"kinds must be of DrawKind; got {drafter.kinds}")


@check()
def the_default_rule_is_exact_and_verifies_it(case: Case) -> None:
    """Whether its shape is known to be a chain or not."""
    drafter = case.drafter
    chain = drafter.shapes[0].is_chain
    for rule in (verifiers.default(drafter.kinds), usual_rule(drafter)):
        expect(rule.exact, f"the default rule {rule.name!r} is lossy")
        able = verifiers.supports(rule, drafter.kinds, chain)
        expect(able, f"the default rule {rule.name!r} cannot verify kinds {drafter.kinds}")


@check("setting", "shape")
def drafts_are_well_formed(case: Case) -> None:
    """Nodes, draws, kinds and law rows of two steps."""
    target, drafter = pair()[0], case.drafter
    state = batch(target, drafter, case)
    shape = case.shape or drafter.shapes[0]
    for _ in range(2):
        length = state.context.length_B[:, None]
        pending_B = state.context.tokens_BL.gather(1, length - 1)[:, 0]
        draft = step.propose(drafter, state, shape)
        _tree_is_declared(draft, drafter, shape)
        expect(
            torch.equal(draft.tokens_BN[:, 0], pending_B),
            f"node 0 is the pending token {pending_B.tolist()}; "
            f"got {draft.tokens_BN[:, 0].tolist()}",
        )
        _draws_are_children(draft)
        _laws_are_declared(draft, target.vocab_size)
        scores = step.score(target, state, draft, aux_layers=drafter.aux_layers)
        verdict = step.verify(usual_rule(drafter), state, draft, scores)
        state, _ = step.commit(target, drafter, state, draft, scores, verdict)


def _tree_is_declared(draft: Draft, drafter: Drafter, shape: DraftShape) -> None:
    tree = draft.tree
    expect(draft.kinds <= drafter.kinds, f"kinds {draft.kinds} beyond {drafter.kinds}")
    expect(
        tree.nodes <= shape.max_nodes and tree.max_depth <= shape.max_depth,
        f"{tree.nodes} nodes, {tree.max_depth} deep, beyond what was asked for: {shape}",
    )
    expect(int(tree.depth_BN.max()) <= shape.max_depth, f"a node lies deeper than {shape}")
    expect(tree.is_chain or not shape.is_chain, f"a tree that branches; asked for {shape}")


def _draws_are_children(draft: Draft) -> None:
    rows, nodes = draft.tokens_BN.shape
    expect(nodes == draft.tree.nodes, f"{nodes} tokens for {draft.tree.nodes} nodes")
    draws = draft.draws_BNK.expand(rows, -1, -1).tolist()
    parents = draft.tree.parent_BN.expand(rows, -1).tolist()
    kinds = draft.kind_BNK.expand(rows, -1, -1).tolist()
    for row in range(rows):
        for node in range(nodes):
            draws_K = zip(draws[row][node], kinds[row][node], strict=True)
            there = [(kid, kind) for kid, kind in draws_K if kid >= 0]
            kids = [kid for kid, _ in there]
            expect(
                all(kid < nodes and parents[row][kid] == node for kid in kids),
                f"draws {kids} at node {node} of row {row} are not its children",
            )
            found = {DrawKind(kind) for _, kind in there}
            expect(found <= draft.kinds, f"children of kinds {found}, declared {draft.kinds}")
            tokens = draft.tokens_BN[row, kids].tolist()
            expect(
                len(set(tokens)) == len(tokens) or DrawKind.WITH in draft.kinds,
                f"siblings {tokens} at node {node} of row {row} repeat without Kind.WITH",
            )


def _laws_are_declared(draft: Draft, vocab: int) -> None:
    offered = draft.draws_BNK >= 0
    has_row = offered & (draft.row_BNK >= 0)
    placed = offered & (draft.kind_BNK == int(DrawKind.FIXED))
    drawn = offered & ~placed & (draft.kind_BNK != int(DrawKind.COUPLED))
    expect(not bool((placed & has_row).any()), "a child that was placed names a law row, not -1")
    expect(not bool((drawn & ~has_row).any()), "a child that was drawn names no law row")
    if draft.laws is None:
        expect(not bool(has_row.any()), "draws name law rows; the draft has no laws")
        return
    shape = tuple(draft.laws.logits_BRV.shape)
    expect(shape[::2] == (draft.tokens_BN.shape[0], vocab), f"laws of shape {shape}")
    expect(int(draft.row_BNK.max()) < shape[1], f"a draw names a law row beyond {shape[1]}")


@check("setting")
def verbs_read_no_device_value(case: Case) -> None:
    """A step in the largest and one in the smallest shape, on the meta device, where each rule that
    verifies the drafter (or the case's) has a verdict on the one draft.

    Not of a draft model with another tokenizer: it re-tokenises texts, which happens on the host.
    A drafter for hosts alone refuses other devices in `open`, by a ConfigurationError.
    """
    model = MetaModel()
    drafter = case.make(model)
    if isinstance(model_of(drafter), TranslatedModel):
        return
    rules = verifiers_for(drafter) if case.rule is None else [case.rule]
    try:
        state = batch(model, drafter, case)
    except ConfigurationError as error:
        expect("meta" in str(error), f"refused without a word of the device: {error}")
        return
    for shape in (drafter.shapes[0], drafter.shapes[-1]):
        draft = step.propose(drafter, state, shape)
        scores = step.score(model, state, draft, aux_layers=drafter.aux_layers)
        verdicts = [_verdict(rule, state, draft, scores) for rule in rules]
        state, block = step.commit(model, drafter, state, draft, scores, verdicts[0])
        lies = {draft.tokens_BN.device, block.tokens_BT.device, state.context.length_B.device}
        expect(lies == {torch.device("meta")}, f"tensors left the model's device: {lies}")


def _verdict(rule: Verifier, state: Batch, draft: Draft, scores: Scores) -> Verdict:
    """A rule's, on the model's device; the rule is named where it has none."""
    try:
        verdict = step.verify(rule, state, draft, scores)
    except Exception as error:
        raise AssertionError(f"rule {rule.name}: {type(error).__name__}: {error}") from error
    left = {table.device for table in (verdict.count_B, verdict.path_BD, verdict.next_B)}
    expect(left == {draft.tokens_BN.device}, f"rule {rule.name}: its verdict is on {left}")
    return verdict


@check("setting", "rule")
def rules_that_verify_it_run(case: Case) -> None:
    """Twelve tokens of three rows."""
    target, drafter = pair()[0], case.drafter
    engine = Engine(target, drafter, case.rule)
    texts, run = decode(engine, PROMPTS[:3], case.sampling, StopConditions(12))
    counts = [len(text) for text in texts]
    expect(counts == [12] * 3, f"12 tokens were asked for in each row; got {counts}")
    inside = all(0 <= token < target.vocab_size for text in texts for token in text)
    expect(inside, f"tokens outside the vocabulary of {target.vocab_size}: {texts}")
    expect(case.rule is None or run.rule is case.rule, f"verified by {run.rule.name!r}")


@check("setting", "rule")
def verdicts_are_well_formed(case: Case) -> None:
    """What is kept of its draft is a path of draws."""
    target, drafter = pair()[0], case.drafter
    state = batch(target, drafter, case)
    draft = step.propose(drafter, state)
    scores = step.score(target, state, draft, aux_layers=drafter.aux_layers)
    verdict = step.verify(case.rule or usual_rule(drafter), state, draft, scores)
    kinds = {table.dtype for table in (verdict.count_B, verdict.path_BD, verdict.next_B)}
    expect(kinds == {torch.int64}, f"counts, paths and tokens are int64; got {kinds}")
    wide = (3, draft.tree.max_depth)
    expect(verdict.path_BD.shape == wide, f"paths {tuple(verdict.path_BD.shape)}, not {wide}")
    draws = draft.draws_BNK.expand(3, -1, -1).tolist()
    for row, path in enumerate(verdict.path_BD.tolist()):
        count, here = int(verdict.count_B[row]), 0
        expect(path[count:] == [-1] * (len(path) - count), f"path {path} of {count} nodes")
        for node in path[:count]:
            expect(node in draws[row][here], f"node {node} of path {path} is no draw at {here}")
            here = node
    inside = (verdict.next_B >= 0) & (verdict.next_B < target.vocab_size)
    expect(bool(inside.all()), f"next tokens {verdict.next_B.tolist()}")


@check("setting")
def rows_come_and_go(case: Case) -> None:
    """Memory's take, put and narrow: texts and what is accepted are those of each request alone."""
    drafter = case.drafter
    rule = None if case.setting == "greedy" else usual_rule(drafter)
    engine = Engine(pair()[0], drafter, rule)
    settings = [SETTINGS[case.setting][number % 3] for number in range(6)]
    requests = [
        Request(prompt, how, StopConditions(5 + 7 * number % 19))
        for number, (prompt, how) in enumerate(zip([*PROMPTS, [9, 9, 2]], settings, strict=True))
    ]
    together = _told(engine, 3, requests)
    for number, request in enumerate(requests):
        alone = _told(engine, 1, [request])[0]
        expect(
            together[number] == alone,
            f"request {number} beside others (text, steps, accepted): {together[number]}; "
            f"alone: {alone}; look at take, put and narrow of the memory",
        )


def _told(
    engine: Engine, max_num_seqs: int, requests: list[Request]
) -> list[tuple[list[int], int, int]]:
    """Text, steps and accepted tokens of each request."""
    texts, run = finished(engine, max_num_seqs, requests)
    counts = [(stats.steps, stats.accepted) for stats in run.requests]
    return [(text, *count) for text, count in zip(texts, counts, strict=True)]


@check()
def greedy_text_is_plain_decodings(case: Case) -> None:
    """In the usual shape, and in a random shape and depth in every step."""
    target, drafter = pair()[0], case.drafter
    expected, _ = decode(Engine(target, Root()), PROMPTS, SamplingParams(0), StopConditions(LENGTH))
    _same_text(Engine(target, drafter), [SamplingParams(0)] * len(PROMPTS), expected, "usual shape")
    restless = Engine(target, Restless(drafter))
    _same_text(restless, [SamplingParams(0)] * len(PROMPTS), expected, "random shapes and depths")


@check()
def matched_text_depends_on_the_seed_alone(case: Case) -> None:
    """Under `match`, which emits the target's own token: what is drafted leaves no trace."""
    target, drafter = pair()[0], case.drafter
    chain = all(shape.is_chain for shape in drafter.shapes)
    if not verifiers.supports(MATCH, drafter.kinds, chain):
        return
    rows = [SamplingParams(0.9, seed=100 + row) for row in range(len(PROMPTS))]
    expected, _ = decode(Engine(target, Root(), MATCH), PROMPTS, rows, StopConditions(LENGTH))
    _same_text(Engine(target, drafter, MATCH), rows, expected, "usual shape")
    restless = Engine(target, Restless(drafter), MATCH)
    _same_text(restless, rows, expected, "random shapes and depths")


def _same_text(
    engine: Engine, settings: list[SamplingParams], expected: list[list[int]], how: str
) -> None:
    texts, _ = decode(engine, PROMPTS, settings, StopConditions(LENGTH))
    for row, (text, plain) in enumerate(zip(texts, expected, strict=True)):
        expect(text == plain, f"{how}, row {row}: {text}; plain decoding gives {plain}")


@check()
def the_law_is_the_targets(case: Case) -> None:
    """The first two tokens of many seeds under the default rule, if it draws.

    Text of what is placed or coupled is compared token by token elsewhere.
    """
    target, small = pair(0.4)
    drafter = case.make(small)
    if not drafter.kinds & {DrawKind.WITHOUT, DrawKind.WITH}:
        return
    chance, _ = p_value(Engine(target, drafter), _law(), PROMPT, 2, SEEDS)
    expect(
        chance > CHANCE,
        f"two tokens of {SEEDS} seeds are not the target's (chi-square, p = {chance:.1e}): a draw "
        "must carry the law that it was really drawn from",
    )


@lru_cache
def _law() -> Tensor:
    return text_law(llama(vocab_size=VOCAB), PROMPT, 2)
