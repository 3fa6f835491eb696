"""What the target makes of texts, kept on disk: training reads it instead of running the target.

A shard is a safetensors file of whole texts one behind the other: `tokens` [N], `lengths` and
`starts` [S], the target's states `states` [N, F] at the taps side by side, and the `most` likely
next tokens with their log-probabilities, `top_ids` and `top_logs` [N, most].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.models.tree_inputs import causal
from outrider.types import LanguageModel, Output

SHARD = 16384  #: tokens of a shard, about


@dataclass(frozen=True)
class TrainText:
    """Tokens, of which those from `start` on count: the target's answer behind its prompt."""

    tokens: tuple[int, ...]
    start: int = 1


@dataclass(frozen=True)
class Features:
    """A text with what the target made of it. Row n of a tensor is of token n."""

    tokens_N: Tensor
    start: int
    states_NF: Tensor
    top_ids_NM: Tensor
    top_logs_NM: Tensor


@torch.inference_mode()
def score(model: LanguageModel, text: TrainText, taps: tuple[int, ...]) -> Output:
    """The target's logits [1, N, V] of a text, and its states at the taps."""
    tokens_1N = torch.tensor([text.tokens], device=model.device)
    count = tokens_1N.shape[1]
    at_1N = torch.arange(count, device=model.device)[None]
    cache = model.open(1, count + 4)
    return model.forward(cache, causal(tokens_1N, at_1N, count), taps=taps)


def record(
    model: LanguageModel,
    texts: Sequence[TrainText],
    taps: tuple[int, ...],
    folder: Path,
    *,
    most: int = 32,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write shards of these texts. What is there already from a run that was stopped is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = list(_grouped(texts))
    for number, group in enumerate(groups):
        path = folder / f"{number:05}.safetensors"
        if not path.exists():
            parts = [_features(model, text, taps, most) for text in group]
            shard = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            unfinished = path.with_suffix(".part")
            save_file(shard, unfinished)
            unfinished.rename(path)
        show(number + 1, len(groups))


def _grouped(texts: Sequence[TrainText]) -> Iterator[list[TrainText]]:
    group: list[TrainText] = []
    for text in texts:
        group.append(text)
        if sum(len(each.tokens) for each in group) >= SHARD:
            yield group
            group = []
    if group:
        yield group


def _features(
    model: LanguageModel, text: TrainText, taps: tuple[int, ...], most: int
) -> dict[str, Tensor]:
    output = score(model, text, taps)
    states = [state[0] for state in output.hidden] or [torch.empty(len(text.tokens), 0)]
    logs_NM, ids_NM = output.logits_BQV[0].float().log_softmax(-1).topk(most, -1)
    return {
        "tokens": torch.tensor(text.tokens, dtype=torch.int32),
        "lengths": torch.tensor([len(text.tokens)]),
        "starts": torch.tensor([text.start]),
        "states": torch.cat(states, -1).bfloat16().cpu(),
        "top_ids": ids_NM.int().cpu(),
        "top_logs": logs_NM.half().cpu(),
    }


def read(folder: Path, names: str = "*.safetensors") -> list[Features]:
    """All texts of a folder of shards. Tensors stay in their files until they are used."""
    found = []
    for path in sorted(folder.glob(names)):
        shard = load_file(path)
        lengths: list[int] = shard["lengths"].tolist()
        parts = ("tokens", "states", "top_ids", "top_logs")
        starts: list[int] = shard["starts"].tolist()
        pieces = (torch.split(shard[part], lengths) for part in parts)
        for start, *tensors in zip(starts, *pieces, strict=True):
            tokens_N, states_NF, ids_NM, logs_NM = tensors
            found.append(Features(tokens_N, start, states_NF, ids_NM, logs_NM))
    return found
