"""What training lowers: the distance of the head's laws from the target's, round by round."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.train.features import Features
from outrider.train.students import Student

FADE = 0.8  #: weight of a round over that of the round before it


class TrainBatch(NamedTuple):
    """Texts side by side, right-padded; places with `counts` False are padding or prompt."""

    tokens_BT: Tensor
    states: tuple[Tensor, ...]  #: [B, T, E] for each tap
    top_ids_BTM: Tensor  #: numbers in the head's vocabulary; -1 for tokens outside
    top_logs_BTM: Tensor
    counts_BT: Tensor  #: whether the law behind this token is to be learnt

    @staticmethod
    def of(texts: Sequence[Features], taps: int, number_V: Tensor) -> "TrainBatch":
        """Texts of one batch. `number_V` says which number a token has in the head's vocabulary."""
        longest = max(len(text.tokens_N) for text in texts)

        def padded(tensors: list[Tensor], value: float) -> Tensor:
            gaps = [longest - len(tensor) for tensor in tensors]
            return torch.stack(
                [
                    F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, gap), value=value)
                    for tensor, gap in zip(tensors, gaps, strict=True)
                ]
            )

        place = number_V.device
        counts = [torch.arange(len(text.tokens_N)) >= text.start - 1 for text in texts]
        return TrainBatch(
            padded([text.tokens_N for text in texts], 0).long().to(place),
            padded([text.states_NF for text in texts], 0).float().to(place).chunk(max(taps, 1), -1),
            number_V[padded([text.top_ids_NM for text in texts], 0).long().to(place)],
            padded([text.top_logs_NM for text in texts], 0).float().to(place),
            padded(counts, 0).to(place),
        )


class Losses(NamedTuple):
    """Sums over the places of one round."""

    entropy: Tensor  #: cross entropy of the head's law under the target's
    overlap: Tensor  #: sum of min(p, q) over the target's likeliest tokens
    agreement: Tensor  #: places where both have the same likeliest token
    places: int

    def detached(self) -> "Losses":
        """Without the graph, for reports."""
        return self._replace(entropy=self.entropy.detach(), overlap=self.overlap.detach())


def losses(student: Student, batch: TrainBatch, rounds: int) -> list[Losses]:
    """The sums of each round, over the places whose law the batch wants learnt."""
    sums = []
    for number, read_BTE in enumerate(student.read(batch.tokens_BT, batch.states, rounds)):
        told = number + 1  # entry t of round r is judged by the law behind token t + 1 + r
        wanted = batch.counts_BT[:, told:]
        chosen_ME = read_BTE[:, : wanted.shape[1]][wanted]
        logs_MK = student.logits(chosen_ME).float().log_softmax(-1)
        ids, p = batch.top_ids_BTM[:, told:][wanted], batch.top_logs_BTM[:, told:][wanted].exp()
        known = ids >= 0
        q_logs = logs_MK.gather(-1, ids.clamp(min=0)).masked_fill(~known, 0.0)
        p_known = p * known
        overlap = torch.minimum(p_known, q_logs.exp() * known).sum(-1)
        sums.append(
            Losses(
                -(p_known * q_logs).sum(),
                overlap.sum(),
                (logs_MK.argmax(-1) == ids[:, 0]).sum(),
                len(ids),
            )
        )
    return sums


def total(sums: Sequence[Losses], overlap: float) -> Tensor:
    """The mean loss of a place: cross entropy, and `overlap` times what laws do not share."""
    weights = [FADE**number for number in range(len(sums))]
    each = [
        weight * (part.entropy + overlap * (part.places - part.overlap)) / max(part.places, 1)
        for weight, part in zip(weights, sums, strict=True)
    ]
    return torch.stack(each).sum() / sum(weights)
