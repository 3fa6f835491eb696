"""What a training is asked for: the draft, its texts, how they are read, how long it learns."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.errors import ConfigurationError
from outrider.text.tokens import encode
from outrider.train.features import TrainText
from outrider.types import Tokenizer

if TYPE_CHECKING:
    from outrider.train.loop import Progress


# What a draft is trained on: files of texts, and prompts that the target answers itself.

#: What is read of a folder.
ENDINGS = {".txt", ".md", ".rst", ".py", ".json", ".jsonl"}
LENGTH = 256  #: tokens of a piece of a longer text
LEAST = 1024  #: tokens that training and held-out texts must have together
SHARE = 20  #: every so manieth text is held out, if none says so itself


class TextPiece(NamedTuple):
    """A text or prompt as it stands in a file."""

    prompt: str  #: what is not to be learnt, only read; "" for texts
    text: str  #: "" for prompts that wait for an answer
    held_out: bool | None = None  #: None: nothing is said


def read(paths: Sequence[Path], fields: tuple[str, ...]) -> list[TextPiece]:
    """The pieces of these files and folders. JSON lines must have the first of `fields`.

    Raises ConfigurationError for a file that is not there, cannot be read, or has nothing in it.
    """
    pieces = []
    for path in (each for given in paths for each in _files(given)):
        try:
            whole = path.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"cannot read training text; got {str(path)!r} ({error}); give UTF-8 files"
            ) from error
        found = (
            list(_rows(path, whole, fields))
            if path.suffix in (".json", ".jsonl")
            else _plain(whole, fields[0])
        )
        if not found:
            raise ConfigurationError(
                f"a training file has no text; got {str(path)!r}; leave it out, or fill it"
            )
        pieces += found
    return pieces


def _files(given: Path) -> list[Path]:
    if given.is_dir():
        files = sorted(path for path in given.rglob("*") if path.suffix in ENDINGS)
        if not files:
            raise ConfigurationError(
                f"the folder has no training text; got {str(given)!r}; put files of "
                f"{', '.join(sorted(ENDINGS))} there"
            )
        return files
    return [given]


def _plain(whole: str, field: str) -> list[TextPiece]:
    """A file of plain text: one text, or one prompt a line."""
    if field == "prompt":
        return [TextPiece(line.strip(), "") for line in whole.splitlines() if line.strip()]
    return [TextPiece("", whole)] if whole.strip() else []


def _rows(path: Path, whole: str, fields: tuple[str, ...]) -> Iterator[TextPiece]:
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            values = {field: row.get(field, "") for field in ("prompt", "text")}
            held = row.get("held_out")
            if not all(isinstance(value, str) for value in values.values()):
                raise ValueError("prompt and text must be strings")
            if not values[fields[0]].strip():
                raise ValueError(f"it has no {fields[0]}")
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"line {number} of {str(path)!r} is no JSON object with a {fields[0]!r} field; got "
                f"{line[:60]!r} ({error}); correct it"
            ) from error
        yield TextPiece(values["prompt"], values["text"], None if held is None else bool(held))


def tokenized(
    pieces: Sequence[TextPiece], tokenizer: Tokenizer
) -> list[tuple[TrainText, bool | None]]:
    """Texts in tokens, long ones in pieces, each with whether it is held out."""
    found = []
    for piece in pieces:
        prompt = encode(tokenizer, piece.prompt) if piece.prompt else []
        tokens = [*prompt, *encode(tokenizer, piece.text)]
        for first in range(0, len(tokens), LENGTH):
            part = tuple(tokens[first : first + LENGTH])
            start = max(1, len(prompt) - first)
            if len(part) > start + 8:
                found.append((TrainText(part, start), piece.held_out))
    return found


def split(
    texts: Sequence[tuple[TrainText, bool | None]],
) -> tuple[list[TrainText], list[TrainText]]:
    """Texts to train on, and texts held out. Raises ConfigurationError if there are too few."""
    said = any(held for _, held in texts)
    out = [bool(held) if said else n % SHARE == SHARE // 2 for n, (_, held) in enumerate(texts)]
    sides = (
        [text for (text, _), held in zip(texts, out, strict=True) if held == side]
        for side in (False, True)
    )
    learnt, held = sides
    count = sum(len(text.tokens) for text in (*learnt, *held))
    if count < LEAST or not learnt or not held:
        raise ConfigurationError(
            f"too little text to train on; got {count} tokens in {len(learnt)} pieces and "
            f"{len(held)} held out; give at least {LEAST} tokens in {SHARE} pieces, better some "
            "hundred thousand, or --prompts"
        )
    return learnt, held


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
