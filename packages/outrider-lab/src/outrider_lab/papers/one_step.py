"""One decoding step as a picture: the tree that was drafted, both laws at it, and the verdict.

Jeon et al. 2024, figure 2 (the process) and figure 3 (the trees of RSD-C with branching 3-2-1 and
of RSD-S of width 3 and depth 3), on a real prompt, and our hub nodes with traversal beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import StopConditions, ops, verifiers
from outrider.drafters import Beam, DraftModel, HubTree
from outrider.engine import step
from outrider.engine.request import Request
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.prompts import encode
from outrider.text.speculator import Speculator
from outrider.types import LanguageModel
from outrider_lab import drawing
from outrider_lab.papers import record
from outrider_lab.papers.trees import TreeArm

ARMS = (
    TreeArm("RSD-C", "3-2-1", 3, lambda m: DraftModel(m, (3, 2, 1)), "rejection"),
    TreeArm("RSD-S", "3x3", 3, lambda m: Beam(m, 3, 3), "rejection"),
    TreeArm("hub + traversal", "3-2-1", 3, lambda m: HubTree(m, (3, 2, 1)), "traversal"),
)
COLOURS = {"kept": "#2a9d4a", "refused": "#c8553d", "not kept": "#999999", "next": "#3566b8"}


@dataclass(frozen=True)
class Node:
    """A drafted token: where it hangs, what both models gave it there, and what became of it.

    verdict   kept; refused: a sibling of a kept token, or a child of the last one, that came first;
              not kept: everything else
    """

    number: int
    parent: int
    depth: int
    text: str
    drafted: float | None  #: None for a placed token, which has no law
    target: float
    verdict: str


def taken(
    pair: Speculator, draft_model: LanguageModel, arm: TreeArm, prompt: str, how: SamplingParams
) -> tuple[list[Node], str]:
    """The nodes of one step behind a prompt, without the root, and the next token's text."""
    ids = encode(pair.tokenizer, prompt)
    drafter = arm.make(draft_model)
    request = Request(ids, how, StopConditions(arm.depth + 2))
    target = pair.engine.target
    room = drafter.shapes[0].max_nodes + arm.depth + 2
    batch = step.begin(target, drafter, [request], target.width(len(ids) + room))
    draft = step.propose(drafter, batch)
    scores = step.score(target, batch, draft)
    verdict = step.verify(verifiers.get(arm.rule), batch, draft, scores)
    law_NV = ops.probs(scores.laws)[0]
    guess_RV = None if draft.laws is None else ops.probs(draft.laws)[0]
    path = [0, *(node for node in verdict.path_BD[0].tolist() if node >= 0)]
    tokens, parents = draft.tokens_BN[0].tolist(), draft.tree.parent_BN[0].tolist()
    depths = draft.tree.depth_BN[0].tolist()
    tried = _tried(draft.draws_BNK[0].tolist(), path)
    rows = {
        kid: row
        for kids, row_K in zip(draft.draws_BNK[0].tolist(), draft.row_BNK[0].tolist(), strict=False)
        for kid, row in zip(kids, row_K, strict=True)
        if kid >= 0
    }
    nodes = []
    for number in sorted(rows):
        token, parent = tokens[number], parents[number]
        law = None if guess_RV is None or rows[number] < 0 else guess_RV[rows[number], token]
        fate = "kept" if number in path else "refused" if number in tried else "not kept"
        text = _visible(pair.tokenizer.decode([token]))
        seen = None if law is None else float(law)
        chance = float(law_NV[parent, token])
        nodes.append(Node(number, parent, depths[number], text, seen, chance, fate))
    following = _visible(pair.tokenizer.decode([int(verdict.next_B[0])]))
    return nodes, following


def _tried(draws: Sequence[Sequence[int]], path: Sequence[int]) -> set[int]:
    """Draws ahead of the kept one at every node of the path; all of them at its end."""
    found: set[int] = set()
    for node, kept in zip(path, [*path[1:], None], strict=True):
        for kid in draws[node] if node < len(draws) else ():
            if kid == kept:
                break
            if kid >= 0:
                found.add(kid)
    return found - set(path)


def _visible(text: str) -> str:
    """A token's text with its white space shown.

    >>> _visible("\\n  x")
    '↵··x'
    """
    return text.replace("\n", "↵").replace(" ", "·").replace("\t", "→").replace("$", r"\$")


def run(
    pair: Speculator, prompts: Sequence[record.Row], out: Path, how: SamplingParams, pictures: bool
) -> record.Tables:
    """The nodes of every tree as a table, and the picture."""
    draft_model = record.draft_of(pair)
    prompt = prompts[0]["prompt"].rstrip()
    found = {f"{arm.method} {arm.tree}": taken(pair, draft_model, arm, prompt, how) for arm in ARMS}
    rows = [
        {
            "tree": name,
            "node": node.number,
            "below": node.parent,
            "depth": node.depth,
            "token": node.text,
            "draft's law": node.drafted,
            "target's law": node.target,
            "verdict": node.verdict,
        }
        for name, (nodes, _) in found.items()
        for node in nodes
    ]
    ends: list[record.Row] = [
        {
            "tree": name,
            "drafted": len(nodes),
            "kept": sum(node.verdict == "kept" for node in nodes),
            "next token": following,
        }
        for name, (nodes, following) in found.items()
    ]
    tables = {"nodes": rows, "steps": ends}
    settings = {"temperature": how.temperature, "seed": how.seed, "prompt": prompt}
    record.Store(out, "tree", settings | record.of_pair(pair.notes)).write(tables)
    if pictures:
        draw(found, prompt, how, out)
    return tables


def draw(
    found: dict[str, tuple[list[Node], str]], prompt: str, how: SamplingParams, out: Path
) -> None:
    """A panel a tree: levels downwards, kept tokens green, refused ones red, the next one blue."""
    plt = drawing.pyplot()
    figure, axes = plt.subplots(1, len(found), figsize=(6 * len(found), 6), layout="constrained")
    for axis, (name, (nodes, following)) in zip(axes, found.items(), strict=True):
        _panel(axis, nodes, following)
        axis.set_title(name, fontsize=11)
        axis.axis("off")
    last = _visible(prompt[-48:])
    figure.suptitle(
        f"one step behind {last!r}, T = {how.temperature:g}: each token with the draft's and the "
        "target's probability",
        fontsize=10,
    )
    handles = [plt.Line2D([], [], color=c, marker="s", linestyle="", label=n)
               for n, c in COLOURS.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    drawing.save(figure, out, "tree")
    plt.close(figure)


def _panel(axis: Any, nodes: Sequence[Node], following: str) -> None:
    at = _places(nodes)
    for node in nodes:
        colour = COLOURS[node.verdict]
        (x, y), (a, b) = at[node.number], at[node.parent]
        wide = 2.2 if node.verdict == "kept" else 0.9
        axis.plot([a, x], [b, y], color=colour, linewidth=wide, zorder=1)
        law = "placed" if node.drafted is None else _short(node.drafted)
        _box(axis, x, y, f"{node.text}\n{law} | {_short(node.target)}", colour)
    _box(axis, *at[0], "pending", "#444444")
    last = max((node for node in nodes if node.verdict == "kept"), key=lambda n: n.depth,
               default=None)  # fmt: skip
    x, y = at[0 if last is None else last.number]
    lowest = min(place[1] for place in at.values())
    axis.plot([x, x], [y, lowest - 0.8], color=COLOURS["next"], linestyle=":", zorder=0)
    _box(axis, x, lowest - 0.8, f"next: {following}", COLOURS["next"])
    axis.margins(0.12)


def _short(chance: float) -> str:
    """Two digits, or the power of ten of what is rarer.

    >>> _short(0.126), _short(1.4e-6)
    ('0.13', '1e-06')
    """
    return f"{chance:.2f}" if chance >= 0.005 else f"{chance:.0e}"


def _box(axis: Any, x: float, y: float, text: str, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour}
    axis.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box, zorder=2)


def _places(nodes: Sequence[Node]) -> dict[int, tuple[float, float]]:
    """Leaves side by side, a parent in the middle of its children, levels downwards."""
    kids: dict[int, list[int]] = {}
    for node in nodes:
        kids.setdefault(node.parent, []).append(node.number)
    found: dict[int, tuple[float, float]] = {}
    free = 0

    def place(number: int, depth: int) -> float:
        nonlocal free
        below = [place(kid, depth + 1) for kid in kids.get(number, [])]
        x = sum(below) / len(below) if below else float(free)
        free += not below
        found[number] = (x, -float(depth))
        return x

    place(0, 0)
    return found
