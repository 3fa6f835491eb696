"""The words of a window and when they are said."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.model_lock import alone, evaluating
from outrider.speech.result import Word
from outrider.speech.speech_model import WhisperModel
from outrider.speech.windows import DecodedWindow

# When each token of a text is said, from where the decoder looks while it reads the text.
#
# Some heads of the cross attention follow the sound. Their weights, smoothed and averaged, are a
# map of tokens by time; the path through it that never goes back and is heaviest tells where each
# token begins. One pass over the final text: nothing is kept while a window is decoded.


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


#: Languages that are written without blanks: every character may begin a word.
UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_BEFORE = "\"'“¿([{-"  #: belongs to the word behind it; the next to the one ahead
_BEHIND = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_ASCII = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


@dataclass
class _Group:
    """Tokens that are written as one."""

    text: str
    tokens: list[int]  #: their places in the window's text


def of_window(
    ear: WhisperModel, heard: DecodedWindow, prompt: Sequence[int], language: str | None
) -> list[tuple[Word, ...]]:
    """The words of each piece of a window."""
    text, window = heard.text, heard.window
    assert heard.inputs.encoded is not None
    heads = ear.vocabulary.alignment_heads or _upper(ear)
    ids = [*prompt, *text.tokens]
    seen = weights(ear.model, heard.inputs.encoded.states_BTE, ids, heads)
    own = seen[:, len(prompt) :, : window.count // ear.stride]
    at = begins(own, int(ear.model.config.median_filter_width))
    ends = [ear.seconds(window.first + ear.stride * int(state)) for state in at]
    starts = [ear.seconds(window.first), *ends]  # a token's query is where the next one is said
    found = []
    for piece in heard.pieces:
        places = range(piece.first, piece.last)
        groups = grouped(ear, [(at, text.tokens[at]) for at in places], language)
        found.append(
            tuple(
                Word(
                    group.text,
                    starts[group.tokens[0]],
                    ends[group.tokens[-1]],
                    sum(exp(text.logprobs[at]) for at in group.tokens) / len(group.tokens),
                )
                for group in groups
            )
        )
    return found


def _upper(ear: WhisperModel) -> list[tuple[int, int]]:
    """All heads of the upper half of the layers, for a model that names none."""
    config = ear.model.config
    layers, heads = int(config.decoder_layers), int(config.decoder_attention_heads)
    return [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]


def grouped(
    ear: WhisperModel, tokens: Sequence[tuple[int, int]], language: str | None
) -> list[_Group]:
    """(place, token) of a text as words; timestamps and special tokens are in none."""
    characters = _characters(ear, [(at, t) for at, t in tokens if t < ear.vocabulary.end_id])
    if language in UNSPACED:
        words = characters
    else:
        words = []
        for one in characters:
            fresh = one.text.startswith(" ") or one.text.strip() in _ASCII or not words
            if fresh:
                words.append(one)
            else:
                words[-1].text += one.text
                words[-1].tokens += one.tokens
    return _punctuated(words)


def _characters(ear: WhisperModel, tokens: Sequence[tuple[int, int]]) -> list[_Group]:
    """The fewest tokens in a row that are whole characters."""
    whole = ear.text([token for _, token in tokens])
    groups, waiting, behind = list[_Group](), list[tuple[int, int]](), 0
    for pair in tokens:
        waiting.append(pair)
        text = ear.text([token for _, token in waiting])
        broken = text.find("\ufffd")
        place = behind + broken
        if broken < 0 or place >= len(whole) or whole[place] == "\ufffd":
            groups.append(_Group(text, [at for at, _ in waiting]))
            behind, waiting = behind + len(text), []
    return groups


def _punctuated(words: list[_Group]) -> list[_Group]:
    """Punctuation goes to the word that it belongs to."""
    for before, behind in reversed(list(pairwise(range(len(words))))):
        mark = words[before]
        follower = next(words[at] for at in range(behind, len(words)) if words[at].tokens)
        if mark.text.startswith(" ") and mark.text.strip() in _BEFORE:
            follower.text, follower.tokens = (
                mark.text + follower.text,
                mark.tokens + follower.tokens,
            )
            mark.text, mark.tokens = "", []
    words = [word for word in words if word.tokens]
    merged: list[_Group] = []
    for word in words:
        if merged and not merged[-1].text.endswith(" ") and word.text in _BEHIND:
            merged[-1].text += word.text
            merged[-1].tokens += word.tokens
        else:
            merged.append(word)
    return merged
