"""What the target makes of texts, kept on disk: training reads it instead of running the target.

A shard is a safetensors file of whole texts one behind the other: `tokens` [N], `lengths` and
`starts` [S], the target's states `states` [N, F] at the aux layers side by side, and the `most`
likely next tokens with their log-probabilities, `top_ids` and `top_logs` [N, most].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.models import tensor_file
from outrider.models.prefill import causal
from outrider.train.students import Student
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
def score(model: LanguageModel, text: TrainText, aux_layers: tuple[int, ...]) -> Output:
    """The target's logits [1, N, V] of a text, and its states at the aux layers."""
    tokens_1N = torch.tensor([text.tokens], device=model.device)
    count = tokens_1N.shape[1]
    at_1N = torch.arange(count, device=model.device)[None]
    cache = model.open(1, count + 4)
    return model.forward(cache, causal(tokens_1N, at_1N, count), aux_layers=aux_layers)


def record(
    model: LanguageModel,
    texts: Sequence[TrainText],
    aux_layers: tuple[int, ...],
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
            parts = [_features(model, text, aux_layers, most) for text in group]
            shard = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            tensor_file.write(shard, path)
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
    model: LanguageModel, text: TrainText, aux_layers: tuple[int, ...], most: int
) -> dict[str, Tensor]:
    output = score(model, text, aux_layers)
    states = [state[0] for state in output.hidden] or [
        output.logits_BQV.new_empty(len(text.tokens), 0, dtype=torch.float32)
    ]
    logs_NM, ids_NM = output.logits_BQV[0].float().log_softmax(-1).topk(most, -1)
    return {
        "tokens": torch.tensor(text.tokens, dtype=torch.int32, device="cpu"),
        "lengths": torch.tensor([len(text.tokens)], device="cpu"),
        "starts": torch.tensor([text.start], device="cpu"),
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


# How well a draft does on texts it was not trained on: the shares that a rule would accept.
#
# alpha is the chance that a drafted token is kept by rejection (Leviathan et al. 2023), sum over
# tokens of min(p, q) for the target's law p and the draft's q, here over the whole vocabulary. At
# temperature 0 it is the share of places where both have the same likeliest token. Position k is
# the k-th drafted token; the tokens before it are the text's own.

TEMPERATURES = (0.0, 0.7, 1.0)
DEPTH = 4


class Alpha(NamedTuple):
    """Means over the places of texts, by position of the drafted token."""

    by_temperature: dict[float, tuple[float, ...]]
    places: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"alpha": list(self.by_temperature.items()), "places": self.places}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Alpha":
        """From `as_dict`."""
        return cls({t: tuple(each) for t, each in given["alpha"]}, given["places"])

    def tokens(self, temperature: float, drafted: int) -> float:
        """Expected tokens of a target call behind a chain of this many drafted tokens.

        >>> Alpha({0.0: (0.5, 0.5)}, 9).tokens(0.0, 2)
        1.75
        """
        expected, chance = 1.0, 1.0
        for alpha in self.by_temperature[temperature][:drafted]:
            chance *= alpha
            expected += chance
        return expected


@torch.no_grad()
def alpha(
    model: LanguageModel,
    student: Student,
    texts: Sequence[TrainText],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Alpha:
    """The draft's alpha on these texts, from whole laws; the target runs once over each."""
    sums = torch.zeros(len(TEMPERATURES), DEPTH, dtype=torch.float64, device="cpu")
    counts = torch.zeros(DEPTH, dtype=torch.float64, device="cpu")
    ids_K = student.ids_K
    for number, text in enumerate(texts):
        output = score(model, text, student.aux_layers)
        tokens_1T = torch.tensor([text.tokens], device=ids_K.device)
        states = [state.float().clone() for state in output.hidden]
        read = student.read(tokens_1T, states, min(DEPTH, student.rounds))
        read += [read[-1]] * (DEPTH - len(read))  # the same law wherever it stands
        logits_TV = output.logits_BQV[0].clone()
        for position, states_1TE in enumerate(read):
            told = 1 + position if student.rounds > 1 else 1
            first = max(text.start - 1, told)
            if first >= len(text.tokens):
                continue
            places = slice(first - told, len(text.tokens) - told)
            z_MK, z_MV = student.logits(states_1TE[0, places]).float(), logits_TV[first:].float()
            counts[position] += len(z_MK)
            for row, temperature in enumerate(TEMPERATURES):
                if temperature == 0:
                    same = ids_K[z_MK.argmax(-1)] == z_MV.argmax(-1)
                    sums[row, position] += same.sum().item()
                    continue
                p_MK = (z_MV / temperature).softmax(-1)[:, ids_K]
                kept = torch.minimum(p_MK, (z_MK / temperature).softmax(-1))
                sums[row, position] += kept.sum().item()
        show(number + 1, len(texts))
    means = (sums / counts.clamp(min=1)).tolist()
    by = {t: tuple(row) for t, row in zip(TEMPERATURES, means, strict=True)}
    return Alpha(by, int(counts[0]))
