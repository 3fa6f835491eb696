"""Checks at load: one vocabulary, one device, and trees that score as their paths do."""

from typing import Any

import torch

from outrider.errors import UnsupportedModel, VocabularyMismatch
from outrider.tree import branching, visible
from outrider.types import LanguageModel


def vocabulary(target_tokenizer: Any, draft_tokenizer: Any, sizes: dict[str, int]) -> int:
    """The common vocabulary size: both outputs are cut to the tokenizer's.

    Output layers are often padded beyond the tokenizer (to multiples of 64, differently for each
    model of a family); the padding is never a token. Raises VocabularyMismatch and names the first
    difference.
    """
    if target_tokenizer is None:
        if len(set(sizes.values())) > 1:
            raise VocabularyMismatch(
                f"output sizes differ: {sizes}; without a tokenizer it is unknown which ids are "
                "real; pass tokenizer=..."
            )
        return next(iter(sizes.values()))
    known = target_tokenizer.get_vocab()
    if draft_tokenizer is not None:
        other = draft_tokenizer.get_vocab()
        if other != known:
            raise VocabularyMismatch(_difference(known, other))
    real: int = max(known.values()) + 1
    for name, size in sizes.items():
        if name != "target" and size < real:
            raise VocabularyMismatch(
                f"the {name} model has {size} outputs, but the tokenizer has {real} tokens; use a "
                "draft model trained with the target's tokenizer"
            )
    return min(real, sizes["target"])


def _difference(target: dict[str, int], draft: dict[str, int]) -> str:
    only = sorted(target.keys() ^ draft.keys(), key=lambda t: (target.get(t, draft.get(t, 0)), t))
    moved = [t for t in target.keys() & draft.keys() if target[t] != draft[t]]
    parts = [f"the target has {len(target)} tokens, the draft model {len(draft)}"]
    if only:
        token = only[0]
        owner = "target" if token in target else "draft model"
        parts.append(f"{len(only)} tokens exist on one side only, first {token!r} ({owner})")
    if moved:
        token = min(moved, key=lambda t: target[t])
        parts.append(
            f"{len(moved)} tokens have different ids, first {token!r}: "
            f"{target[token]} against {draft[token]}"
        )
    advice = "use a draft model with the target's tokenizer, or drafter='prompt_lookup'"
    return f"target and draft model use different vocabularies: {'; '.join(parts)}; {advice}"


@torch.inference_mode()
def trees(model: LanguageModel, name: str, tolerance: float | None = None) -> float:
    """Compare a small tree's scores with one forward per path; UnsupportedModel if they differ.

    Catches models that ignore the mask or the positions without any error. Returns the largest
    difference relative to the largest logit.
    """
    device = torch.device(model.device)
    tree = branching((2, 2))
    half = getattr(model, "dtype", torch.float32) in (torch.bfloat16, torch.float16)
    tolerance = tolerance or (0.1 if half else 1e-3)
    vocab, prefix = model.vocab_size, 6
    steps = torch.arange(prefix + tree.nodes, device=device)
    tokens = (steps * 7 + 3)[None] % vocab
    capacity = 128
    slots = torch.arange(capacity, device=device)

    def fill() -> Any:
        cache = model.open(1, capacity)
        at = steps[None, :prefix]
        model.forward(cache, tokens[:, :prefix], at, at, slots <= at[..., None], last=1)
        return cache

    first = torch.tensor([prefix], device=device)
    drafted = tokens[:, prefix:]
    seen = visible(tree.ancestors_BNN.to(device), first, 0, tree.nodes, capacity)
    at = first[:, None] + tree.depth_BN.to(device)
    whole = model.forward(fill(), drafted, at, first[:, None] + steps[: tree.nodes], seen)
    worst = 0.0
    for leaf in range(tree.levels[-2], tree.nodes):
        path = tree.ancestors_BNN[0, leaf].nonzero()[:, 0].to(device)
        line = prefix + torch.arange(len(path), device=device)[None]
        single = model.forward(fill(), drafted[:, path], line, line, slots <= line[..., None])
        gap = (whole[:, path].float() - single.float()).abs().max()
        worst = max(worst, float(gap / single.float().abs().max().clamp(min=1e-6)))
    if not worst <= tolerance:
        raise UnsupportedModel(
            f"the {name} model does not score trees as paths: relative difference {worst:.3g}, "
            f"allowed {tolerance:.3g}; its attention ignores the tree's mask or positions; use a "
            "chain drafter with another attention implementation, or another model"
        )
    return worst
