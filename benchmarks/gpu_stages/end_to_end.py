"""Generation: plain, speculative and transformers' own, beside the time that reading the weights
takes at the measured bandwidth."""

from typing import Any

from gpu_stages import arms
from gpu_stages.card import Card
from gpu_stages.models import PAIRS, TEMPERATURE, Pairs, weight_bytes
from gpu_stages.plan import Item

BATCHES = (1, 8, 32)
#: name -> children per level, and whether its step is a CUDA graph
OURS = {
    "plain": ((), False), "chain": (arms.CHAIN, False), "chain, graphs": (arms.CHAIN, True),
    "tree": (arms.TREE, False),
}  # fmt: skip


def items(card: Card) -> list[Item]:
    """Batch 1 of every pair first, then wider ones."""
    pairs = Pairs(card)
    names = [*PAIRS, "shipped"]
    found = [
        Item(f"{name}: weights", lambda n=name: roofline(card, pairs, n), 90) for name in names
    ]
    for batch in card.pick(BATCHES, (1, 2)):
        for name in names:
            for arm in OURS:
                found.append(_item(card, pairs, name, arm, batch))
            found.append(_item(card, pairs, name, "transformers", batch))
            if batch == 1:
                found.append(_item(card, pairs, name, "transformers, assisted", batch))
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
