"""The protocol of Wagner et al. (2024) in half precision, with kernels' time and memory.

The paper sums the profiler's device time within the verification function over a generation: the
items here give the wall clock around the function, the kernels' time of one call, and its memory.
"""

from functools import partial
from typing import Any

import torch

from gpu_stages.card import Card
from gpu_stages.plan import Item
from gpu_stages.verification import launches_of
from outrider_lab.papers import wagner, wagner_pairs, wagner_tables

VOCABULARIES = (32_000, 50_257, 51_864, 151_936)


def items(card: Card) -> list[Item]:
    """Both halves on the shipped pair, then calls by vocabulary and gamma."""
    found = [
        Item(f"protocol, {dtype}", lambda d=dtype: protocol(card, d), 200)
        for dtype in card.pick(("bfloat16", "float16"), ("float32",))
    ]
    for vocab in card.pick(VOCABULARIES, (40,)):
        found.append(Item(f"calls, V={vocab}", lambda v=vocab: calls(card, v), 60))
    return found


def protocol(card: Card, dtype: str) -> dict[str, Any]:
    """`outrider bench wagner` on the shipped pair in this dtype, and on a large vocabulary."""
    if card.rehearse:
        pair = wagner_pairs.tiny_pair(40)
        told = wagner_tables.run(pair, gammas=(2,), prompts=1, tokens=4, large=False)
    else:
        pair = wagner_pairs.shipped_pair(8, card.device, dtype=dtype)
        told = wagner_tables.run(pair, quick=True)
    settings, tables = told
    return settings | tables


def calls(card: Card, vocab: int) -> dict[str, Any]:
    """One call by method and gamma: wall time, the kernels' time and number, memory."""
    rows = []
    for gamma in card.pick((1, 3, 5, 10, 20), (2,)):
        target = torch.randn(1, gamma + 1, vocab, device=card.device)
        draft = target[:, :gamma] + torch.randn(1, gamma, vocab, device=card.device)
        ids = torch.zeros(1, gamma, dtype=torch.int64, device=card.device)
        for name, (verify, exact) in wagner.methods().items():
            call = partial(verify, ids, draft, gamma, target)
            told = launches_of(card, call)
            told["wall_us"] = 1e6 * card.seconds(call, 30)
            told["mb"] = wagner.allocated(verify, gamma, vocab, card.device)
            size = {"method": name, "exact": exact, "gamma": gamma, "vocab": vocab}
            rows.append(size | told)
    return {"rows": rows}
