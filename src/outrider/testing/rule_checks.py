"""What every verification rule must do, run with a drafter of each kind of draws."""

from outrider import verifiers
from outrider.drafters import Paths, PromptLookup, Root
from outrider.drafters.draft_model import DraftModel
from outrider.engine import step
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing import checks
from outrider.testing.case import CHECKS, SETTINGS, Case, Maker, expect
from outrider.testing.law import p_value, text_law
from outrider.testing.models import PROMPTS, VOCAB, llama, pair
from outrider.testing.runs import decode
from outrider.types import Verifier

#: Drafters of placed, drawn (one by one, several without replacement, several with) and coupled
#: tokens, in chains and trees.
DRAFTERS: dict[str, Maker] = {
    "placed": lambda small: PromptLookup(3),
    "chain": lambda small: DraftModel(small, (1, 1, 1)),
    "tree": lambda small: DraftModel(small, (2, 2)),
    "paths": lambda small: Paths(small, 2, 2),
    "coupled chain": lambda small: DraftModel(small, (1, 1, 1), shared_noise=True),
    "coupled tree": lambda small: DraftModel(small, (2, 2), shared_noise=True),
}


def check_rule(rule: Verifier) -> None:
    """Run every check on a rule."""
    ran = 0
    for name, make in DRAFTERS.items():
        drafter = make(pair()[1])
        chain = all(shape.is_chain for shape in drafter.shapes)
        if not verifiers.judges(rule, drafter.kinds, chain):
            continue
        ran += 1
        for setting in SETTINGS:
            case = Case(make, setting, rule=rule)
            for check in CHECKS.values():
                if "rule" in check.over:
                    check(case)
            try:
                outcomes_are_laws(case, rule)
            except AssertionError as error:
                raise AssertionError(f"outcomes are laws ({setting}, {name}): {error}") from error
        if rule.exact:
            greedy_text(make, rule, name)
            sampled_text(make, rule, name)
    expect(ran > 0, f"rule {rule.name!r} judges none of {', '.join(DRAFTERS)}; look at its kinds")


def outcomes_are_laws(case: Case, rule: Verifier) -> None:
    """The chances to stop sum to one over nodes, and the next token's law to one at each of them.

    And what the rule did is something that its outcome says can be done.
    """
    target, drafter = pair()[0], case.drafter
    state = checks.batch(target, drafter, case)
    draft = step.propose(drafter, state)
    scores = step.score(target, state, draft, taps=drafter.taps)
    told = rule.outcome(draft, scores)
    stops = told.stop_BN.double().sum(-1)
    expect(bool((stops - 1).abs().max() < 1e-4), f"chances to stop sum to {stops.tolist()}")
    reached = told.stop_BN > 0
    sums = told.next_BNV.double().sum(-1)[reached]
    expect(bool((sums - 1).abs().max() < 1e-4), f"laws of the next token sum to {sums.tolist()}")
    verdict = step.verify(rule, state, draft, scores)
    for row, count in enumerate(verdict.count_B.tolist()):
        node = int(verdict.path_BD[row, count - 1]) if count else 0
        chance = float(told.stop_BN[row, node] * told.next_BNV[row, node, verdict.next_B[row]])
        expect(chance > 0, f"row {row} stopped at node {node}, which its outcome says cannot be")


def greedy_text(make: Maker, rule: Verifier, name: str) -> None:
    """At temperature 0 an exact rule gives plain decoding's text."""
    target, small = pair()
    length = StopConditions(checks.LENGTH)
    expected, _ = decode(Engine(target, Root()), PROMPTS, SamplingParams(0), length)
    found, _ = decode(Engine(target, make(small), rule), PROMPTS, SamplingParams(0), length)
    expect(found == expected, f"greedy text ({name}): {found}; plain decoding gives {expected}")


def sampled_text(make: Maker, rule: Verifier, name: str) -> None:
    """The first two tokens of many seeds have the target's law if an exact rule judges."""
    target, small = pair(0.4)
    law = text_law(llama(vocab_size=VOCAB), checks.PROMPT, 2)
    chance, _ = p_value(Engine(target, make(small), rule), law, checks.PROMPT, 2, checks.SEEDS)
    expect(
        chance > checks.CHANCE,
        f"the law ({name}): two tokens of {checks.SEEDS} seeds are not the target's (chi-square, "
        f"p = {chance:.1e}), and exact = True",
    )
