"""What every model runner must do, on a tiny model of its family."""

import copy

import torch
from transformers import PreTrainedModel

from outrider import verifiers
from outrider.drafters import DraftModel, HubTree, Paths, PromptLookup, Root, StaticTree
from outrider.engine import step
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.models import TransformersRunner, TreeDecoder, load_checks
from outrider.models.prefill import ingest, of_tree
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing import checks
from outrider.testing.checks import CHECKS, SETTINGS, Case, Maker, expect
from outrider.testing.models import PROMPTS, VOCAB, llama, pair
from outrider.testing.runs import decode, p_value, text_law
from outrider.tree import from_parents
from outrider.types import Drafter, LanguageModel, Verifier

# What every verification rule must do, run with a drafter of each kind of draws.

#: Drafters of placed, drawn (one by one, several without replacement, several with, of one law or
#: two) and coupled tokens, and of placed ones beside a drawn one, in chains and trees.
DRAFTERS: dict[str, Maker] = {
    "placed": lambda small: PromptLookup(3),
    "placed tree": lambda small: StaticTree(small, (2, 2)),
    "chain": lambda small: DraftModel(small, (1, 1, 1)),
    "tree": lambda small: DraftModel(small, (2, 2)),
    "hub tree": lambda small: HubTree(small, (3, 2)),
    "paths": lambda small: Paths(small, 2, 2),
    "paths of two models": lambda small: Paths(small, 3, 2, more=(_another(small),)),
    "coupled chain": lambda small: DraftModel(small, (1, 1, 1), shared_noise=True),
    "coupled tree": lambda small: DraftModel(small, (2, 2), shared_noise=True),
}


def _another(small: LanguageModel) -> LanguageModel:
    """A draft model of another law beside this one."""
    return small if small.device.type == "meta" else pair(0.9)[1]


def check_rule(rule: Verifier) -> None:
    """Run every check on a rule."""
    kinds: dict[str, str] = {}  # of the drafts of each drafter that it does not verify
    for name, make in DRAFTERS.items():
        drafter = make(pair()[1])
        chain = all(shape.is_chain for shape in drafter.shapes)
        if not verifiers.supports(rule, drafter.kinds, chain):
            kinds[name] = " and ".join(sorted(kind.name for kind in drafter.kinds))
            continue
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
    expect(
        len(kinds) < len(DRAFTERS),
        f"rule {rule.name!r} verifies {', '.join(sorted(kind.name for kind in rule.kinds))}, and "
        f"none of {', '.join(f'{name} ({of})' for name, of in kinds.items())}; what draws places "
        "its tokens at temperature 0, so add FIXED to its kinds",
    )


def outcomes_are_laws(case: Case, rule: Verifier) -> None:
    """The chances to stop sum to one over nodes, and the next token's law to one at each of them.

    And what the rule did is something that its outcome says can be done.
    """
    target, drafter = pair()[0], case.drafter
    state = checks.batch(target, drafter, case)
    draft = step.propose(drafter, state)
    scores = step.score(target, state, draft, aux_layers=drafter.aux_layers)
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
    """The first two tokens of many seeds have the target's law if an exact rule verifies."""
    target, small = pair(0.4)
    law = text_law(llama(vocab_size=VOCAB), checks.PROMPT, 2)
    chance, _ = p_value(Engine(target, make(small), rule), law, checks.PROMPT, 2, checks.SEEDS)
    expect(
        chance > checks.CHANCE,
        f"the law ({name}): two tokens of {checks.SEEDS} seeds are not the target's (chi-square, "
        f"p = {chance:.1e}), and exact = True",
    )


CAPACITY = 128
#: A tree, or a chain where nodes may not branch, and what four rows keep of it in the first round.
_TREE = ([-1, 0, 0, 1, 1, 2, 3, 5], [[1, 3, 6], [2, 5, -1], [-1, -1, -1], [1, 4, -1]])
_CHAIN = ([-1, 0, 1, 2], [[1, 2, 3], [1, 2, -1], [-1, -1, -1], [1, -1, -1]])


def check_runner(runner: type[TransformersRunner], model: PreTrainedModel) -> None:
    """Run every check on a class of runners."""
    expect(
        isinstance(runner, type) and issubclass(runner, TransformersRunner),
        f"a runner is a subclass of outrider.models.TransformersRunner; got {runner!r}",
    )
    numbers = torch.arange(20, device="cpu") * 7
    tokens_1Q = load_checks.ordinary(numbers, TreeDecoder(runner(model)).vocab_size)
    before = _own_logits(model, tokens_1Q[None])
    target = TreeDecoder(runner(model))
    load_checks.paths(target, "checked")
    worst = ragged_trees(model, target)
    expect(worst < 1e-4, f"ragged trees: logits are {worst:.2g} away from the model's own")
    shared_noise_text(target, TreeDecoder(runner(perturbed_copy(model))))
    same = torch.equal(before, _own_logits(model, tokens_1Q[None]))
    expect(same, "the model is as it was: its own forward gives other logits after the runner's")


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, tokens_1Q: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens_1Q, use_cache=False).logits
    return logits


@torch.inference_mode()
def ragged_trees(model: PreTrainedModel, target: TreeDecoder) -> float:
    """The largest difference of a tree's logits from the model's own forward of its paths.

    Four rows of different lengths and two rounds, with a path that is kept between them.
    """
    parents, kept = _TREE if target.trees else _CHAIN
    tree, random = from_parents(parents), torch.Generator().manual_seed(1)
    length = torch.tensor([21, 9, 15, 12], device="cpu")

    def drawn(*size: int) -> torch.Tensor:
        numbers = torch.randint(0, 1 << 20, size, generator=random, device="cpu")
        return load_checks.ordinary(numbers, target.vocab_size)

    texts = [drawn(int(count)) for count in length]
    tokens = torch.zeros(4, CAPACITY, dtype=torch.int64, device="cpu")
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    cache = target.open(4, CAPACITY)
    ingest(target, cache, tokens, int(length.max()), settled_B=length)
    leaves = sorted(set(range(len(parents))) - set(parents))
    worst = 0.0
    for path in (kept, [[-1] * 3] * 4):
        drafted = drawn(4, tree.nodes)
        scores = target.forward(cache, of_tree(drafted, tree, length, CAPACITY)).logits_BQV
        for row in range(4):
            for leaf in leaves:
                nodes = tree.ancestors_BNN[0, leaf].nonzero()[:, 0]
                whole = torch.cat([texts[row], drafted[row, nodes]])[None]
                own = _own_logits(model, whole)[0, len(texts[row]) :, : target.vocab_size]
                worst = max(worst, float((scores[row, nodes] - own).abs().max()))
        accepted = torch.tensor(path, device="cpu")
        cache.keep(length, accepted)
        for row in range(4):
            nodes = torch.tensor([0, *[node for node in path[row] if node >= 0]], device="cpu")
            texts[row] = torch.cat([texts[row], drafted[row, nodes]])
        length = length + (accepted >= 0).sum(1) + 1
    return worst


def perturbed_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a little noise on its matrices: a draft model that often agrees."""
    other, random = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                parameter += 0.01 * torch.randn(parameter.shape, generator=random, device="cpu")
    return other


def shared_noise_text(target: TreeDecoder, draft: TreeDecoder) -> None:
    """Two ragged rows, chain and tree: the text is plain decoding's, and drafts are accepted."""
    prompts = [[5, 9, 11, 4, 7, 8, 3, 12, 6, 10], [13, 2, 9]]
    how = [SamplingParams(0.8, seed=11), SamplingParams(1.0, top_k=40, seed=12)]

    def text(drafter: Drafter) -> tuple[list[list[int]], float]:
        engine = Engine(target, drafter, verifiers.get("match"))
        out, run = decode(engine, prompts, how, StopConditions(14))
        return out, run.stats.mean_acceptance_length

    plain, _ = text(Root())
    for counts in ((1, 1, 1), (2, 2)) if target.trees else ((1, 1, 1),):
        fast, accepted = text(DraftModel(draft, counts, shared_noise=True))
        expect(fast == plain, f"drafted text {counts} is plain decoding's: {fast} and {plain}")
        expect(accepted > 1, f"some of the drafts {counts} are accepted")


__all__ = ["check_runner", "perturbed_copy", "ragged_trees", "shared_noise_text"]
