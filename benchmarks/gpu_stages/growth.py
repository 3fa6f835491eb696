"""What grows: a step with its context, with the drafted tokens and with the vocabulary.

Steps are graphs, as they are for a user; without them a step is launches, whatever it reads.
"""

from typing import Any

from gpu_stages import arms
from gpu_stages.card import Card
from gpu_stages.models import TEMPERATURE, Pairs
from gpu_stages.plan import Item

PAIR = "1B + 70M"
CONTEXTS = (128, 512, 1024, 2048, 4096, 8064)
GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16, 20)
VOCABULARIES = (32_000, 65_536, 128_256, 151_936, 262_144)


def items(card: Card) -> list[Item]:
    """Context first: it is what a cache and a mask cost."""
    pairs = Pairs(card)
    found = []
    for context in card.pick(CONTEXTS, (8, 140)):
        for arm, counts in (("plain", ()), ("chain", arms.CHAIN)):
            found.append(_item(card, pairs, f"context {context}, {arm}", counts, context=context))
    for gamma in card.pick(GAMMAS, (1, 3)):
        found.append(_item(card, pairs, f"gamma {gamma}", (1,) * gamma))
    for vocab in card.pick(VOCABULARIES, (64, 96)):
        found.append(_item(card, pairs, f"vocabulary {vocab}", arms.CHAIN, vocab=vocab))
    return found


def _item(
    card: Card, pairs: Pairs, key: str, counts: tuple[int, ...], context: int = 0, vocab: int = 0
) -> Item:
    prompt = context or card.pick(128, 8)

    def run() -> dict[str, Any]:
        pair = pairs.get(PAIR, vocab, card.pick(8192, 256), prompt)
        size = {"context": prompt, "gamma": len(counts), "vocab": vocab or card.pick(32_000, 64)}
        tokens, graphs = card.pick((64, True), (4, False))
        return size | arms.ours(card, pair, counts, 1, tokens, TEMPERATURE, graphs)

    return Item(key, run, 60)
