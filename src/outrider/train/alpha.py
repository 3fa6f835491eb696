"""How well a draft does on texts it was not trained on: the shares that a rule would accept.

alpha is the chance that a drafted token is kept by rejection (Leviathan et al. 2023), sum over
tokens of min(p, q) for the target's law p and the draft's q, here over the whole vocabulary. At
temperature 0 it is the share of places where both have the same likeliest token. Position k is the
k-th drafted token; the tokens before it are the text's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from outrider.train.features import TrainText, score
from outrider.train.students import Student
from outrider.types import LanguageModel

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
    sums = torch.zeros(len(TEMPERATURES), DEPTH, dtype=torch.float64)
    counts = torch.zeros(DEPTH, dtype=torch.float64)
    ids_K = student.ids_K
    for number, text in enumerate(texts):
        output = score(model, text, student.taps)
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
