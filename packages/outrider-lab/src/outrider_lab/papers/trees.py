"""Methods and trees of RSD's experiments 1 and 2 (Jeon et al. 2024, C.3.1 and C.3.2).

SD, block verification, SpecInfer, SpecTr, RSD-C, RSD-S, and hub nodes with traversal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider import arguments, verifiers
from outrider.drafters import Beam, DraftModel, HubTree, Paths, Root
from outrider.types import Drafter, LanguageModel, Verifier

Counts = tuple[int, ...]
Groups = dict[int, list["TreeArm"]]


@dataclass(frozen=True)
class TreeArm:
    """A method with one of its trees."""

    method: str
    tree: str
    depth: int
    make: Callable[[LanguageModel], Drafter]
    rule: str


#: one token per target call, the unit of every speed-up
PLAIN = TreeArm("plain", "", 0, lambda m: Root(), "match")


def _chain(length: int, method: str, rule: str) -> TreeArm:
    return TreeArm(method, str(length), length, lambda m: DraftModel(m, (1,) * length), rule)


def _dashed(counts: Counts) -> str:
    return "-".join(map(str, counts))


def _arms(
    lengths: Sequence[int], paths: Sequence[tuple[int, int]], trees: Sequence[Counts]
) -> list[TreeArm]:
    found = []
    for length in lengths:
        found += [_chain(length, "SD", "rejection"), _chain(length, "block", "block")]
    for width, depth in paths:
        name = f"{width}x{depth}"
        for method, rule in (("SpecInfer", "multi_round"), ("SpecTr", "kseq")):
            made = lambda m, w=width, d=depth: Paths(m, w, d)  # noqa: E731
            found.append(TreeArm(method, name, depth, made, rule))
        beam = lambda m, w=width, d=depth: Beam(m, w, d)  # noqa: E731
        found.append(TreeArm("RSD-S", name, depth, beam, "rejection"))
        found.append(TreeArm("RSD-S + traversal", name, depth, beam, "traversal"))
    for counts in trees:
        name = _dashed(counts)
        drawn = lambda m, c=counts: DraftModel(m, c)  # noqa: E731
        found.append(TreeArm("RSD-C", name, len(counts), drawn, "rejection"))
        found.append(TreeArm("RSD-C + traversal", name, len(counts), drawn, "traversal"))
        hub = lambda m, c=counts: HubTree(m, c)  # noqa: E731
        found.append(TreeArm("hub + traversal", name, len(counts), hub, "traversal"))
    return found


def draft_lengths() -> Groups:
    """C.3.1: draft length L -> arms."""
    return {
        2: _arms([2], [(2, 2), (3, 2)], [(2, 2), (2, 1), (3, 1)]),
        3: _arms([3], [(3, 3), (4, 3)], [(2, 2, 2), (3, 1, 1), (4, 1, 1)]),
        4: _arms([4], [(5, 4), (7, 4)], [(2, 2, 2, 2), (5, 1, 1, 1), (7, 1, 1, 1)]),
        5: _arms([5], [(6, 5), (12, 5)], [(2,) * 5, (6, 1, 1, 1, 1), (12, 1, 1, 1, 1)]),
    }


def budgets() -> Groups:
    """C.3.2: tokens that the target scores in a call, the pending one left out -> arms."""
    return {
        6: _arms([6], [(2, 3), (3, 2)], [(2, 1, 1), (2, 2), (3, 1)]),
        10: _arms([10], [(2, 5), (5, 2)], [(2, 1, 1, 1, 1), (2, 2, 1), (5, 1)]),
        14: _arms([14], [(2, 7), (7, 2)], [(2,) + (1,) * 6, (2, 2, 2), (7, 1)]),
        21: _arms([21], [(3, 7), (7, 3)], [(3,) + (1,) * 6, (3, 2, 2), (7, 1, 1)]),
        30: _arms([30], [(5, 6), (6, 5)], [(2,) * 4, (5,) + (1,) * 5, (6, 1, 1, 1, 1)]),
    }


def with_rule(groups: Groups, rule: Verifier, model: LanguageModel) -> Groups:
    """The same, with an arm more for every tree that this rule can verify: "RSD-C + mine".

    Raises ConfigurationError if it can verify none of them.
    """
    label = verifiers.listed([rule])[0]
    found: Groups = {}
    verifies = False
    for group, arms in groups.items():
        there = {(_drawn(arm), arm.tree) for arm in arms if arm.rule == rule.name}
        more = {}
        for arm in arms:
            drafter = arm.make(model)
            chain = all(shape.is_chain for shape in drafter.shapes)
            if verifiers.supports(rule, drafter.kinds, chain):
                new = replace(arm, method=f"{_drawn(arm)} + {label}", rule=rule.name)
                more[_drawn(arm), arm.tree] = new
        found[group] = [*arms, *(new for key, new in more.items() if key not in there)]
        verifies = verifies or bool(more)
    if not verifies:
        kinds = ", ".join(sorted(kind.name.lower() for kind in rule.kinds))
        what, do = "one that verifies chains or drawn trees", f"give another; its kinds are {kinds}"
        arguments.refuse("--rule", what, rule.name, do)
    return found


def _drawn(arm: TreeArm) -> str:
    """The method whose tree this is, whatever verifies it."""
    drawn = arm.method.removesuffix(" + traversal")
    return {"block": "SD", "SpecTr": "SpecInfer"}.get(drawn, drawn)
