"""What a training is asked for: the draft, its texts, and how long and how fast it learns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigurationError

if TYPE_CHECKING:
    from outrider.train.trainer import Progress

KINDS = ("head", "layers")


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

    def progress(self, progress: "Progress") -> tuple[int, int]:
        """Steps, or seconds, that are done, and of how many."""
        if self.steps is not None:
            return min(progress.step, self.steps), self.steps
        total = max(round(self.minutes * 60), 1)
        return min(int(progress.seconds), total), total

    def reached(self, progress: "Progress") -> str:
        """The same in words.

        >>> from outrider.train.trainer import Progress
        >>> Plan(steps=400).reached(Progress(80)), Plan(2.0).reached(Progress(80, seconds=60.0))
        ('step 80 of 400', 'step 80, 1.0 of 2 minutes')
        """
        if self.steps is not None:
            return f"step {progress.step} of {self.steps}"
        return f"step {progress.step}, {progress.seconds / 60:.1f} of {self.minutes:g} minutes"

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


@dataclass(frozen=True)
class Task:
    """What is to be trained, and on what.

    target         what users call the target
    data, prompts  files or folders; prompts are answered by the target itself
    kind           "head": EAGLE-3, on the target's states; "layers": some layers of the target
    layers         those of kind "layers"; the first and the last if none are named
    vocab_size     most tokens that it proposes
    inner          width of the head's MLP; None: as the target's
    tokens         most tokens of an answer
    rows           answers written together
    alpha_texts    most held-out texts that alpha is measured on
    """

    target: str
    out: Path
    data: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()
    kind: str = "head"
    layers: tuple[int, ...] = ()
    vocab_size: int = 8192
    inner: int | None = None
    tokens: int = 224
    rows: int = 16
    alpha_texts: int = 40
    plan: Plan = field(default_factory=Plan)
    trust: bool = False  #: Python files of the target's folder may run

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(
                f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}; choose one of them"
            )
        if not self.data and not self.prompts:
            raise ConfigurationError(
                "there is nothing to train on; got neither data nor prompts; give files of text, "
                "or prompts that the target answers itself"
            )
