"""The training loop: batches, steps, a checkpoint every few minutes, and one when interrupted."""

import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import ConfigurationError
from outrider.train.features import Features
from outrider.train.students import Student
from outrider.train.task import Plan

# What training lowers: the distance of the head's laws from the target's, round by round.

FADE = 0.8  #: weight of a round over that of the round before it


class TrainBatch(NamedTuple):
    """Texts side by side, right-padded; places with `counts` False are padding or prompt."""

    tokens_BT: Tensor
    states: tuple[Tensor, ...]  #: [B, T, E] for each aux layer
    top_ids_BTM: Tensor  #: numbers in the head's vocabulary; -1 for tokens outside
    top_logs_BTM: Tensor
    counts_BT: Tensor  #: whether the law behind this token is to be learnt

    @staticmethod
    def of(texts: Sequence[Features], aux_layers: int, number_V: Tensor) -> "TrainBatch":
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
        counts = [
            torch.arange(len(text.tokens_N), device="cpu") >= text.start - 1 for text in texts
        ]
        return TrainBatch(
            padded([text.tokens_N for text in texts], 0).long().to(place),
            padded([text.states_NF for text in texts], 0)
            .float()
            .to(place)
            .chunk(max(aux_layers, 1), -1),
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
        told = number + 1  # entry t of round r is compared with the law behind token t + 1 + r
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


@dataclass
class Progress:
    """Where a run is; kept in its checkpoint."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


Said = Callable[[Progress, Sequence[Losses]], None]


class Trainer:
    """A head with its optimisers, its texts and its checkpoint."""

    def __init__(
        self, student: Student, texts: Sequence[Features], vocab_size: int, plan: Plan, folder: Path
    ) -> None:
        self.student, self.plan, self.folder = student, plan, folder
        module = student.module
        self._device = next(module.parameters()).device
        self._texts = texts
        self.number_V = numbering(student.ids_K, vocab_size).to(self._device)
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        matrices = [weight for weight in self._weights if weight.dim() == 2]
        others = [weight for weight in self._weights if weight.dim() != 2]
        self._optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=plan.rate, weight_decay=0.01)
        ]
        if others:  # norms without weights leave none
            betas = (0.9, 0.95)
            adam = torch.optim.AdamW(others, lr=plan.norm_rate, betas=betas, weight_decay=0.0)
            self._optimisers.append(adam)
        self._rates = (plan.rate, plan.norm_rate)[: len(self._optimisers)]
        self.progress = Progress()

    @property
    def checkpoint(self) -> Path:
        """Where it is kept."""
        return self.folder / "state.pt"

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one. Raises ConfigurationError if it is broken."""
        if not self.checkpoint.exists():
            return False
        try:
            state = torch.load(self.checkpoint, map_location=self._device, weights_only=True)
            self.student.module.load_state_dict(state["weights"])
            for optimiser, kept in zip(self._optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(kept)
            self.progress = Progress(**state["progress"])
        except (pickle.UnpicklingError, RuntimeError, ValueError, LookupError, OSError) as error:
            raise ConfigurationError(
                f"cannot go on from the checkpoint; got {str(self.checkpoint)!r} "
                f"({type(error).__name__}: {str(error)[:160]}); give another --out, or delete it"
            ) from error
        return True

    def save(self) -> None:
        """Write the checkpoint; the one before it is there until the new one is whole."""
        state: dict[str, Any] = {
            "weights": self.student.module.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "progress": asdict(self.progress),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.checkpoint.with_suffix(".part")
        with unfinished.open("wb") as out:  # by its name, a full disk is no OSError
            torch.save(state, out)
        unfinished.replace(self.checkpoint)

    def train(self, said: Said) -> bool:
        """Train for what is left to do. False: interrupted, with the checkpoint written."""
        self.student.module.train()
        saved = time.monotonic()
        with _interrupts() as stopped:
            for batch in self._batches():
                spent = self.plan.spent(self.progress)
                if spent >= 1 or stopped:
                    break
                began = time.monotonic()
                sums = self._step(batch, spent)
                self.progress.step += 1
                self.progress.tokens += sums[0].places
                self.progress.seconds += time.monotonic() - began
                said(self.progress, sums)
                if time.monotonic() - saved > self.plan.save_seconds:
                    self.save()
                    saved = time.monotonic()
        self.save()
        return not stopped

    def _step(self, batch: TrainBatch, spent: float) -> list[Losses]:
        for optimiser, rate in zip(self._optimisers, self._rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * self.plan.scale(spent)
            optimiser.zero_grad()
        if self.student.aux_layers and self.plan.noise:
            batch = batch._replace(states=tuple(map(self._noisy, batch.states)))
        rounds = min(self.plan.rounds_at(spent), self.student.rounds)
        with torch.autocast(self._device.type, torch.bfloat16):
            sums = losses(self.student, batch, rounds)
        torch.autograd.backward(total(sums, self.plan.overlap))
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
        return [part.detached() for part in sums]

    def _noisy(self, states_BTE: Tensor) -> Tensor:
        return states_BTE + self.plan.noise * states_BTE.std() * torch.randn_like(states_BTE)

    def _batches(self) -> Iterator[TrainBatch]:
        """Endless; every text once before any twice. Texts of a batch are about equally long."""
        order = random.Random(f"{self.plan.seed} {self.progress.step}")
        aux_layers = len(self.student.aux_layers)
        while True:
            texts = sorted(
                self._texts, key=lambda text: len(text.tokens_N) * (1 + order.random() / 4)
            )
            groups: list[list[Features]] = [[]]
            for text in texts:
                if (len(groups[-1]) + 1) * len(text.tokens_N) > self.plan.batch and groups[-1]:
                    groups.append([])
                groups[-1].append(text)
            order.shuffle(groups)
            for group in groups:
                yield TrainBatch.of(group, aux_layers, self.number_V)


def numbering(ids_K: Tensor | None, vocab_size: int) -> Tensor:
    """The number [V] of every token in the head's vocabulary, -1 outside it."""
    if ids_K is None:
        return torch.arange(vocab_size, device="cpu")
    numbers = torch.full((vocab_size,), -1, device="cpu")
    numbers[ids_K.cpu()] = torch.arange(len(ids_K), device="cpu")
    return numbers


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Notes SIGINT in a list instead of raising: a step is never cut in two."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # signals go to that one
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
