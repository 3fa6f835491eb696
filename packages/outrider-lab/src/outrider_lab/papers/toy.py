"""RSD figure 1: acceptance of two drafts of a coin, by the draft's and the target's bias."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from outrider_lab import drawing
from outrider_lab.papers import published, record
from outrider_lab.theory import node, transport
from outrider_lab.theory.node import Array

#: One draft, or two, at one node. At one node `block` and `traversal` accept what `rejection` does.
METHODS: dict[str, Callable[[Array, Array], Array | float]] = {
    "one: match": node.match,
    "one: non-iterative": node.non_iterative,
    "one: coupled": node.coupled,
    "one: rejection, block (SD)": node.single,
    "two iid: multi-round (SpecInfer)": lambda p, q: node.multi_round(p, q, 2),
    "two iid: K-SEQ (SpecTr)": lambda p, q: node.k_seq(p, q, 2),
    "two iid: OTM, the bound (SpecTr)": lambda p, q: transport.independent(p, q, 2),
    "two without: recursive, traversal (RSD)": lambda p, q: _each(
        p, q, lambda a, b: node.recursive(a, b, 2)
    ),
    "two without: transport bound": transport.pair_without_replacement,
    "hub, traversal": lambda p, q: node.hub(p, q, 2),
    "top 2: match": lambda p, q: node.top_k(p, q, 2),
    "one: lenience 0.5 (lossy)": lambda p, q: node.lenient(p, q, 0.5),
}


_SURE = published.stated("jeon", "figure 1: recursive rejection accepts")

#: What the paper says of figure 1, which prints no numbers: its four methods, two drafts.
PUBLISHED = {
    "two iid: multi-round (SpecInfer)": "falls as the laws part",
    "two iid: K-SEQ (SpecTr)": "falls as the laws part",
    "two iid: OTM, the bound (SpecTr)": "falls as the laws part; the best with replacement",
    "two without: recursive, traversal (RSD)": f"{_SURE:.0f} %, however the laws part",
}


def _each(target: Array, draft: Array, one: Callable[[Array, Array], float]) -> Array:
    shape = np.broadcast_shapes(target.shape, draft.shape)
    p, q = np.broadcast_to(target, shape), np.broadcast_to(draft, shape)
    vocab = shape[-1]
    flat = [one(a, b) for a, b in zip(p.reshape(-1, vocab), q.reshape(-1, vocab), strict=True)]
    return np.asarray(flat).reshape(shape[:-1])


def maps(points: int = 101) -> dict[str, Array]:
    """Acceptance of each method on a grid [target bias, draft bias]."""
    bias = np.linspace(0, 1, points)
    coin = np.stack([1 - bias, bias], -1)
    return {name: np.asarray(rule(coin[:, None], coin[None])) for name, rule in METHODS.items()}


def run(out: Path, points: int = 101, pictures: bool = True) -> list[record.Row]:
    """Heat maps, their means, and a CSV of the whole grid."""
    if pictures:
        drawing.pyplot()
    found = maps(points)
    here = round(0.4 * (points - 1)), round(0.3 * (points - 1))
    rows: list[record.Row] = [
        {
            "method": name,
            "mean acceptance": float(grid.mean()),
            "least": float(grid.min()),
            "at draft .3, target .4": float(grid[here]),
            "share of grid at 1": float((grid > 1 - 1e-9).mean()),
            "published": PUBLISHED.get(name, ""),
        }
        for name, grid in found.items()
    ]
    store = record.Store(out, "toy", {"points": points})
    bias = np.linspace(0, 1, points)
    cells = [
        {"target": float(t), "draft": float(d)} | {n: float(g[i, j]) for n, g in found.items()}
        for i, t in enumerate(bias)
        for j, d in enumerate(bias)
    ]
    store.write({"means": rows, "grid": cells})
    if pictures:
        _draw(found, out)
    return rows


def _draw(found: dict[str, Array], out: Path) -> None:
    figure, axes = drawing.panels(3, 4, (15, 11))
    every = [axis for line in axes for axis in line]
    for axis, (name, grid) in zip(every, found.items(), strict=True):
        image = axis.imshow(grid, origin="lower", extent=(0, 1, 0, 1), vmin=0, vmax=1)
        axis.set_title(f"{name}\nmean {grid.mean():.3f}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("draft P(1)")
    for axis, *_ in axes:
        axis.set_ylabel("target P(1)")
    figure.colorbar(image, ax=every, label="acceptance", shrink=0.8)
    drawing.save(figure, out, "toy")
