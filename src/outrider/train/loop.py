"""The training loop: batches, steps, a checkpoint every few minutes, and one when interrupted."""

import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.train.features import Features
from outrider.train.loss import Batch, Losses, losses, total
from outrider.train.students import Student


@dataclass(frozen=True)
class Plan:
    """How a head is trained.

    minutes      wall-clock time of the steps, those before an interruption included
    steps        in place of a time: the same texts, seed and machine give the same draft
    rounds       how far it is unrolled in the end: the depth of drafts that it learns. It begins
                 with one and has one more after each equal share of the training
    batch        tokens of a step
    rate         peak of the learning rate of matrices (Muon)
    norm_rate    that of norms (Adam)
    warm, flat   shares of the training after which the rate has risen, and begins to fall
    overlap      weight of 1 - sum min(p, q) beside the cross entropy
    noise        deviation of what is added to the target's states, in deviations of theirs: a few
                 texts are else learnt by heart
    seed         of the order of texts
    """

    minutes: float = 50.0
    steps: int | None = None
    rounds: int = 3
    batch: int = 2048
    rate: float = 0.02
    norm_rate: float = 2e-3
    warm: float = 0.02
    flat: float = 0.5
    overlap: float = 1.0
    noise: float = 0.1
    seed: int = 0
    save_seconds: float = 120.0

    def spent(self, progress: "Progress") -> float:
        """The share of the training that is done."""
        if self.steps is not None:
            return progress.step / self.steps
        return progress.seconds / (self.minutes * 60)

    def scale(self, spent: float) -> float:
        """The learning rate after this share of the training, as a share of its peak.

        >>> [round(Plan().scale(share), 2) for share in (0.01, 0.3, 0.75, 1.0)]
        [0.5, 1.0, 0.5, 0.0]
        """
        return max(0.0, min(spent / self.warm, 1.0, (1.0 - spent) / (1.0 - self.flat)))

    def rounds_at(self, spent: float) -> int:
        """How far it is unrolled after this share of the training.

        >>> [Plan(rounds=3).rounds_at(share) for share in (0.0, 0.4, 0.9)]
        [1, 2, 3]
        """
        return min(1 + int(spent * self.rounds), self.rounds)


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
        self,
        student: Student,
        texts: Sequence[Features],
        vocab_size: int,
        plan: Plan,
        folder: Path,
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
        torch.save(state, unfinished)
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

    def _step(self, batch: Batch, spent: float) -> list[Losses]:
        for optimiser, rate in zip(self._optimisers, self._rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * self.plan.scale(spent)
            optimiser.zero_grad()
        if self.student.taps and self.plan.noise:
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

    def _batches(self) -> Iterator[Batch]:
        """Endless; every text once before any twice. Texts of a batch are about equally long."""
        order = random.Random(f"{self.plan.seed} {self.progress.step}")
        taps = len(self.student.taps)
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
                yield Batch.of(group, taps, self.number_V)


def numbering(ids_K: Tensor | None, vocab_size: int) -> Tensor:
    """The number [V] of every token in the head's vocabulary, -1 outside it."""
    if ids_K is None:
        return torch.arange(vocab_size)
    numbers = torch.full((vocab_size,), -1)
    numbers[ids_K.cpu()] = torch.arange(len(ids_K))
    return numbers


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Notes SIGINT in a list instead of raising: a step is never cut in two."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
