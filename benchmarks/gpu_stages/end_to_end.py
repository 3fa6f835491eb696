"""Generation: plain, speculative and transformers' own, beside the time that reading the weights
takes at the measured bandwidth."""

from typing import Any

from gpu_stages import arms
from gpu_stages.card import Card
from gpu_stages.models import PAIRS, TEMPERATURE, Pairs, weight_bytes
from gpu_stages.plan import Item

BATCHES = (1, 8, 32)
#: name -> children per level, and whether its steps are CUDA graphs
OURS = {
    "plain": ((), False), "plain, graphs": ((), True), "chain": (arms.CHAIN, False),
    "chain, graphs": (arms.CHAIN, True), "tree": (arms.TREE, False),
    "tree, graphs": (arms.TREE, True),
}  # fmt: skip


def items(card: Card) -> list[Item]:
    """Pairs of random weights at batches 1 and 8; assisted generation and the rest behind them."""
    pairs = Pairs(card)
    names = [*PAIRS, "shipped"]
    found = [
        Item(f"{name}: weights", lambda n=name: roofline(card, pairs, n), 90) for name in names
    ]
    batches = card.pick(BATCHES, (1, 2))
    each = [*OURS, "transformers"]
    first = [(name, arm, batch) for batch in batches[:2] for name in PAIRS for arm in each]
    assisted = [(name, "transformers, assisted", 1) for name in names]
    rest = [(name, arm, batch) for batch in batches for name in names for arm in each]
    for name, arm, batch in dict.fromkeys([*first, *assisted, *rest]):
        found.append(_item(card, pairs, name, arm, batch))
    return found


def _item(card: Card, pairs: Pairs, name: str, arm: str, batch: int) -> Item:
    tokens = card.pick(128, 6)
    temperature = 1.0 if name == "shipped" else TEMPERATURE

    def run() -> dict[str, Any]:
        pair = pairs.get(name)
        size = {"pair": name, "arm": arm, "batch": batch, "temperature": temperature}
        if arm in OURS:
            counts, graphs = OURS[arm]
            if graphs and card.rehearse:
                return size | {"absent": "graphs need a CUDA device"}
            return size | arms.ours(card, pair, counts, batch, tokens, temperature, graphs)
        assisted = arm != "transformers"
        return size | arms.theirs(card, pair, assisted, batch, tokens, temperature)

    return Item(f"{name}: {arm}, B={batch}", run, 90)


def roofline(card: Card, pairs: Pairs, name: str) -> dict[str, Any]:
    """Least milliseconds of a forward: the weights once, at the bandwidth of a copy."""
    pair = pairs.get(name)
    speed = card.bandwidth()
    sizes = {"target": weight_bytes(pair.target), "draft": weight_bytes(pair.draft)}
    least = {f"{part}_least_ms": 1e3 * size / speed for part, size in sizes.items()}
    return {"bandwidth_tb_s": speed / 1e12} | {f"{k}_gb": v / 1e9 for k, v in sizes.items()} | least
