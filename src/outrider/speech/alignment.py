"""When each token of a text is said, from where the decoder looks while it reads the text.

Some heads of the cross attention follow the sound. Their weights, smoothed and averaged, are a map
of tokens by time; the path through it that never goes back and is heaviest tells where each token
begins. One pass over the final text: nothing is kept while a window is decoded.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.model_lock import alone, evaluating


@torch.no_grad()
def weights(
    model: PreTrainedModel,
    states_1TE: Tensor,
    tokens: Sequence[int],
    heads: Sequence[tuple[int, int]],
) -> Tensor:
    """How much each token's query looks at each state, [heads, tokens, T], float32.

    The decoder reads the text once; the heads' products are done beside it, so that it does not
    matter by which kernel the model attends.
    """
    chosen: dict[int, list[int]] = defaultdict(list)
    for layer, head in heads:
        chosen[layer].append(head)
    found: dict[tuple[int, int], Tensor] = {}

    def listen(layer: int) -> Any:
        def hook(attention: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            hidden = args[0] if args else given["hidden_states"]
            shape = (1, -1, attention.num_heads, attention.head_dim)
            q = (attention.q_proj(hidden) * attention.scaling).view(shape).transpose(1, 2)
            k = attention.k_proj(given["key_value_states"]).view(shape).transpose(1, 2)
            for head in chosen[layer]:
                found[layer, head] = (q[0, head] @ k[0, head].mT).float().softmax(-1)

        return hook

    decoder: Any = model.get_decoder()
    hooks = [
        decoder.layers[layer].encoder_attn.register_forward_pre_hook(
            listen(layer), with_kwargs=True
        )
        for layer in chosen
    ]
    ids = torch.tensor([list(tokens)], device=model.device)
    try:
        with alone(model), evaluating(model):
            decoder(
                input_ids=ids, encoder_hidden_states=states_1TE.to(model.dtype), use_cache=False
            )
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([found[place] for place in heads])


def begins(weights_HNT: Tensor, width: int) -> NDArray[np.int64]:
    """The state at which each of N tokens begins, [N].

    `width` states are smoothed by their median; the states given are those of the sound alone.
    """
    if not weights_HNT.shape[2]:
        return np.zeros(weights_HNT.shape[1], np.int64)
    std = torch.std(weights_HNT, dim=-2, keepdim=True, unbiased=False)
    mean = torch.mean(weights_HNT, dim=-2, keepdim=True)
    scaled = (weights_HNT - mean) / torch.where(std > 0, std, 1.0)
    matrix = median(scaled, width).mean(0)
    rows, columns = path(-matrix.double().cpu().numpy())
    first = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
    return np.asarray(columns[first], np.int64)


def median(x: Tensor, width: int) -> Tensor:
    """The median over `width` (odd) neighbours along the last dimension, mirrored at the ends.

    >>> median(torch.tensor([[[1.0, 9.0, 2.0, 3.0]]]), 3).tolist()
    [[[9.0, 2.0, 3.0, 2.0]]]
    """
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = torch.nn.functional.pad(x, (half, half, 0, 0), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., half]


def path(cost_NT: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cheapest way from the first to the last cell, by steps down, right or both.

    Dynamic time warping, a diagonal at a time: cells of one diagonal do not depend on each other.
    Among equal ways a step right comes first.

    >>> rows, columns = path(np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    >>> rows.tolist(), columns.tolist()
    ([0, 1, 1], [0, 1, 2])
    """
    n, m = cost_NT.shape
    total = np.full((n + 1, m + 1), np.inf, np.float32)
    total[0, 0] = 0
    trace = np.full((n + 1, m + 1), 2, np.int8)
    trace[:, 0], trace[0, :] = 1, 2
    for diagonal in range(2, n + m + 1):
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < down) & (both < right), 0, 2)
        step = np.where((down < both) & (down < right), 1, step)
        before = np.choose(step, [both, down, right])
        total[i, j] = cost_NT[i - 1, j - 1] + before
        trace[i, j] = step
    rows, columns = [], []
    i, j = n, m
    while i > 0 or j > 0:
        rows.append(i - 1)
        columns.append(j - 1)
        way = trace[i, j]
        i, j = i - (way < 2), j - (way != 1)
    return np.array(rows[::-1]), np.array(columns[::-1])
