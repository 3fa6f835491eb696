"""Every legal pair of exact rule and drafter: which they are, and a run that can be resumed."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import verifiers
from outrider.certify.report import Report
from outrider.certify.run import Ids, Power, Progress, certify
from outrider.drafters import DRAFTERS
from outrider.engine import Engine
from outrider.sampling import Sampling
from outrider.types import Drafter, LanguageModel, Verifier

#: Shapes of drafters whose defaults do not cover what matters; others are tried as they come.
SHAPES: dict[str, tuple[dict[str, Any], ...]] = {
    "draft_model": (
        {"counts": (1, 1, 1, 1)},
        {"counts": (3, 2, 1)},
        {"counts": (1, 1, 1, 1), "coupled": True},
        {"counts": (3, 2, 1), "coupled": True},
    ),
    "dynamic_tree": ({}, {"coupled": True}),
}


@dataclass(frozen=True)
class Pair:
    """A drafter and an exact rule that can judge it."""

    label: str
    drafter: Drafter
    rule: Verifier

    @property
    def key(self) -> str:
        """Name in the results file."""
        return f"{self.label} / {self.rule.name}"


def drafters(draft: LanguageModel | None) -> dict[str, Drafter]:
    """Every registered drafter in the shapes to be certified; without a draft, model-free ones."""
    found: dict[str, Drafter] = {}
    for name, make in DRAFTERS.items():
        for shape in SHAPES.get(name, ({},)):
            label = " ".join([name, *(f"{k}={v}" for k, v in shape.items())])
            fields = getattr(make, "__dataclass_fields__", {})
            if "model" in fields:
                if draft is None:
                    continue
                found[label] = make(draft, **shape)
                continue
            if any(_required(f) for f in fields.values()):
                continue  # needs a file or a table that a default cannot give
            found[label] = make(**shape)
    return found


def _required(field: Any) -> bool:
    from dataclasses import MISSING

    return bool(field.init and field.default is MISSING and field.default_factory is MISSING)


def pairs(draft: LanguageModel | None) -> list[Pair]:
    """All legal pairs with rules that say they are exact, `root` with one rule only."""
    found = []
    for label, drafter in drafters(draft).items():
        for rule in verifiers.VERIFIERS.values():
            if not rule.exact or not verifiers.judges(rule, drafter.kinds, drafter.is_chain):
                continue
            if not drafter.kinds and rule.name not in ("match", "rejection"):
                continue
            found.append(Pair(label, drafter, rule))
    return found


def done(path: Path) -> dict[str, dict[str, Any]]:
    """Finished results by key."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {row["key"]: row for row in rows}


def run(
    target: LanguageModel,
    todo: Sequence[Pair],
    prompts: Sequence[Ids],
    sampling: Sampling,
    power: Power,
    path: Path,
    before: Callable[[Pair], Progress | None] | None = None,
) -> Iterator[tuple[Pair, dict[str, Any], bool]]:
    """Certify each pair that the results file does not hold yet, and append it.

    Yields the pair, its result and whether it was already there.
    """
    settings = f"{sampling} {power}"
    known = {k: v for k, v in done(path).items() if v.get("settings") == settings}
    for pair in todo:
        if pair.key in known:
            yield pair, known[pair.key], True
            continue
        progress = before(pair) if before is not None else None
        engine = Engine(target, pair.drafter, pair.rule)
        report: Report = certify(engine, prompts, sampling, power, progress=progress)
        row = {"key": pair.key, "settings": settings} | report.as_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        yield pair, row, False
