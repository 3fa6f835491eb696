"""Pictures of the target, of speculative decoding and of the draft: calls, laws, acceptance."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider import Engine, Root, SamplingParams, StopConditions
from outrider.cli.console import Show
from outrider.drafters import DraftModel
from outrider.models import LlamaRunner, TreeDecoder
from outrider.types import LanguageModel
from outrider_lab.images import digits, picture, training
from outrider_lab.images.guidance import GuidedModel
from outrider_lab.papers.record import Row, Store, Tables

ROWS = 64  #: pictures of a batch


@dataclass(frozen=True)
class PictureRequest:
    """What is asked for."""

    pictures: int
    ahead: int
    temperature: float
    guidance_scale: float
    seed: int
    quick: bool


@dataclass
class Written:
    """The pictures of one way to decode, and what it took."""

    texts: list[list[int]]
    calls: int  #: of the target, picture by picture
    accepted: NDArray[np.int64]  #: by pixel: drafted and kept
    examined: NDArray[np.int64]  #: by pixel: drafted, and all before it kept
    length: float  #: mean acceptance length


def written(engine: Engine, asked: PictureRequest, first_seed: int) -> Written:
    """`asked.pictures` pictures, of each class in turn."""
    found = Written([], 0, np.zeros(digits.PIXELS, int), np.zeros(digits.PIXELS, int), 0.0)
    kept = 0
    for begin in range(0, asked.pictures, ROWS):
        numbers = range(begin, min(begin + ROWS, asked.pictures))
        run = engine.run(
            [[digits.class_token(number % digits.CLASSES)] for number in numbers],
            [SamplingParams(asked.temperature, seed=first_seed + number) for number in numbers],
            StopConditions(digits.PIXELS),
        )
        texts: list[list[int]] = [[] for _ in numbers]
        for block in run:
            at = len(texts[block.request_id])
            found.accepted[at : at + block.accepted] += 1
            found.examined[at : at + min(block.accepted + 1, block.drafted)] += 1
            texts[block.request_id] += block.token_ids
        found.texts += texts
        found.calls += run.stats.steps
        kept += run.stats.accepted
    found.length = 1 + kept / found.calls
    return found


def engines(asked: PictureRequest, show: Show) -> dict[str, Engine]:
    """The target plain and with the draft, and the draft alone, whose law is another."""
    texts = digits.texts()
    few = 0.2 if asked.quick else 1.0
    sizes = [
        training.DecoderSize(one.name, one.hidden, one.layers, int(one.steps * few))
        for one in (training.TARGET, training.DRAFT)
    ]
    target, draft = (guided(training.decoder(size, texts, show), asked) for size in sizes)
    return {
        "plain": Engine(target, Root()),
        "speculative": Engine(target, DraftModel(draft, (1,) * asked.ahead)),
        "draft alone": Engine(draft, Root()),
    }


def guided(model: Any, asked: PictureRequest) -> LanguageModel:
    """A decoder, with guidance from the class if it was asked for."""
    plain = TreeDecoder(LlamaRunner(model, False))
    if asked.guidance_scale == 1:
        return plain
    null = {digits.class_token(label): digits.NULL for label in range(digits.CLASSES)}
    return GuidedModel(plain, asked.guidance_scale, null)


def energy_test(one: Written, other: Written, permutations: int = 999) -> float:
    """p-value of the energy distance between pictures, class by class (Székely and Rizzo 2004).

    Pictures of a class change sides in permutations; 0.001 is the least there is.
    """
    rng = np.random.default_rng(0)
    both = np.stack([np.array(one.texts, float), np.array(other.texts, float)], 1)
    count = len(both)
    flat = both.reshape(2 * count, -1)
    apart = np.sqrt(np.maximum(((flat[:, None] - flat) ** 2).sum(-1), 0))
    label = np.repeat(np.arange(count) % digits.CLASSES, 2)
    apart *= label[:, None] == label

    def distance(sign: NDArray[np.float64]) -> float:
        return -float(sign @ apart @ sign)

    side = np.tile([1.0, -1.0], count)
    observed, above = distance(side), 0
    for _ in range(permutations):
        shuffled = side.copy()
        for digit in range(digits.CLASSES):
            mine = (label == digit).nonzero()[0]
            shuffled[mine] = rng.permutation(side[mine])
        above += distance(shuffled) >= observed
    return (1 + above) / (1 + permutations)


def run(asked: PictureRequest, out: Path, show: Show, pictures: bool) -> Tables:
    """Everything, written to `out`."""
    found: dict[str, Written] = {}
    for name, engine in engines(asked, show).items():
        show(f"pictures, {name}", len(found), 3)
        found[name] = written(engine, asked, asked.seed + len(found) * asked.pictures)
    plain = found["plain"]
    rows: list[Row] = []
    for name, one in found.items():
        rows.append(
            {
                "decoding": name,
                "pictures": len(one.texts),
                "target calls": one.calls if name != "draft alone" else None,
                "plain's calls / its": plain.calls / one.calls if name == "speculative" else None,
                "mean acceptance length": one.length,
                "energy test against plain, p": None if one is plain else energy_test(plain, one),
            }
        )
    speculative = found["speculative"]
    shares = rate(speculative)
    tables: Tables = {
        "arms": rows,
        "by-row": [
            {
                "row of the picture": row + 1,
                "kept": ratio(speculative, np.s_[row * 8 : row * 8 + 8]),
                **{f"column {n + 1}": shares[row, n] for n in range(digits.SIDE)},
            }
            for row in range(digits.SIDE)
        ],
    }
    Store(out, "images", vars(asked) | {}).write(tables)
    if pictures:
        picture.draw(out, plain.texts, speculative.texts, shares)
    return tables


def ratio(one: Written, part: slice) -> float:
    """Kept of what was examined at these pixels."""
    return float(one.accepted[part].sum() / max(one.examined[part].sum(), 1))


def rate(one: Written) -> NDArray[np.float64]:
    """Kept of what was examined, [8, 8]."""
    shares = one.accepted / np.maximum(one.examined, 1)
    return shares.reshape(digits.SIDE, digits.SIDE)
