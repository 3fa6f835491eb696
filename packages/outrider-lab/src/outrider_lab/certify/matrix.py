"""Every legal pair of exact rule and drafter: which they are, and a run that can be resumed."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider import verifiers
from outrider.drafters import DRAFTERS
from outrider.drafters.ngram_table import count
from outrider.drafters.recipes import DrafterParts, DraftOptions
from outrider.engine.engine import Engine
from outrider.errors import ConfigurationError
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import Drafter, Inputs, LanguageModel, Verifier
from outrider_lab.certify.power import Power
from outrider_lab.certify.report import CertifyReport, Row
from outrider_lab.certify.run import CertifiedModel, certify
from outrider_lab.certify.runner import Ids, Progress

ORDER = 3  #: of the n-gram table
#: Shapes of drafters whose defaults do not cover what matters; others are tried as they come.
SHAPES: dict[str, tuple[DraftOptions, ...]] = {
    "draft_model": (
        DraftOptions(branching=(1, 1, 1, 1)),
        DraftOptions(branching=(3, 2, 1)),
        DraftOptions(branching=(1, 1, 1, 1), shared_noise=True),
        DraftOptions(branching=(3, 2, 1), shared_noise=True),
    ),
    "dynamic_tree": (DraftOptions(), DraftOptions(shared_noise=True)),
    "layer_skip": (DraftOptions(own={"exit": 1}),),
}


@dataclass(frozen=True)
class ModelPair:
    """A drafter and an exact rule that can verify it."""

    label: str
    drafter: Drafter
    rule: Verifier

    @property
    def key(self) -> str:
        """Name in the results file."""
        return f"{self.label} / {self.rule.name}"


def drafters(
    draft: LanguageModel | None,
    text: Sequence[int] = (),
    vocab_size: int = 0,
    target: LanguageModel | None = None,
) -> dict[str, Drafter]:
    """Every registered drafter in the shapes to be certified.

    `text` are tokens to count n-grams in. What needs a model or a text that is not given is left
    out: `missing` names it.
    """
    table = count(text, vocab_size, ORDER) if len(text) >= ORDER else None
    parts = DrafterParts(() if draft is None else (draft,), table, vocab_size, target)
    found: dict[str, Drafter] = {}
    for name, recipe in DRAFTERS.items():
        if not recipe.has(parts):
            continue
        for shape in SHAPES.get(name, (DraftOptions(),)):
            label = " ".join([name, *(f"{k}={v}" for k, v in shape.asked().items())])
            found[label] = recipe.make(parts, shape)
    return found


def missing(found: Collection[str]) -> list[str]:
    """Registered drafters that none of these labels names."""
    return sorted(set(DRAFTERS) - {label.split()[0] for label in found})


def pairs(made: Mapping[str, Drafter]) -> list[ModelPair]:
    """All legal pairs of these drafters with rules that say they are exact.

    Without a draft every rule draws from the target: `root` is paired with two of them only.
    """
    found = []
    for label, drafter in made.items():
        for rule in verifiers.VERIFIERS.values():
            if not rule.exact or not verifiers.supports(
                rule, drafter.kinds, drafter.shapes[0].is_chain
            ):
                continue
            if not drafter.kinds and rule.name not in ("match", "rejection"):
                continue
            found.append(ModelPair(label, drafter, rule))
    return found


def done(path: Path, sampling: SamplingParams, power: Power, about: str = "") -> dict[str, Row]:
    """Finished results under these settings, by key."""
    settings = _settings(sampling, power, about)
    return {row["key"]: row for row in read_results(path) if row.get("settings") == settings}


def read_results(path: Path) -> list[Row]:
    """Every result of a file, none if there is no file yet; ConfigurationError for any other."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:  # results will be appended
            file.seek(0)
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"results go to a file; got {str(path)!r}: {error}; give the path of a file that can "
            "be written"
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line or "{}")
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigurationError(
                f"line {number} of {str(path)!r} is no result; got {line[:60]!r}; remove the line, "
                "or give another file"
            )
        found.append(row)
    return [row for row in found if "key" in row]


def _settings(sampling: SamplingParams, power: Power, about: str) -> str:
    return f"{sampling} {power} {about}".rstrip()


def identity(models: Sequence[object], prompts: Sequence[Ids]) -> str:
    """What results depend on besides sampling and power: names of the models and the prompts."""
    text = json.dumps([list(ids) for ids in prompts])
    return f"{' '.join(map(str, models))} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def run(
    target: LanguageModel,
    todo: Sequence[ModelPair],
    prompts: Sequence[Ids],
    sampling: SamplingParams,
    power: Power,
    path: Path,
    before: Callable[[ModelPair], Progress | None] | None = None,
    about: str = "",
    inputs: Sequence[Inputs] | None = None,
) -> Iterator[tuple[ModelPair, Row, bool]]:
    """Certify each pair that the results file does not hold yet, and append it.

    `about` (see `identity`) tells results of other models or prompts apart. Yields the pair, its
    result and whether it was already there.
    """
    known, common = done(path, sampling, power, about), CertifiedModel()
    for pair in todo:
        if pair.key in known:
            yield pair, known[pair.key], True
            continue
        progress = before(pair) if before is not None else None
        engine = Engine(target, pair.drafter, pair.rule)
        report: CertifyReport = certify(
            engine, prompts, sampling, power, inputs=inputs, progress=progress, known=common
        )
        row = {"key": pair.key, "settings": _settings(sampling, power, about)} | report.as_dict()
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        yield pair, row, False
