"""What a check is given and what it says when it fails: the check, the setting and the shape."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from outrider import verifiers
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing.models import pair
from outrider.types import Drafter, DraftShape, LanguageModel, Verifier

#: Makes the drafter under test for a draft model, the tiny one or one on the meta device.
Maker = Callable[[LanguageModel], Drafter]

#: Sampling of three rows.
SETTINGS = {
    "greedy": (SamplingParams(0),) * 3,
    "sampled": tuple(SamplingParams(1.0, seed=row) for row in range(3)),
    "mixed": (
        SamplingParams(0),
        SamplingParams(0.8, top_k=7, seed=1),
        SamplingParams(1.2, top_p=0.9, min_p=0.01, seed=2),
    ),
}


class Case(NamedTuple):
    """One run of a check."""

    make: Maker
    setting: str = "greedy"  #: a key of SETTINGS
    shape: DraftShape | None = None  #: None: the drafter's usual one
    rule: Verifier | None = None  #: None: the default for the drafter

    @property
    def drafter(self) -> Drafter:
        """A drafter with the tiny draft model."""
        return self.make(pair()[1])

    @property
    def sampling(self) -> tuple[SamplingParams, ...]:
        """The setting's rows."""
        return SETTINGS[self.setting]


class Check(NamedTuple):
    """A check of a drafter. Calling it raises an AssertionError that names it and the case."""

    name: str
    body: Callable[[Case], None]
    over: frozenset[str]  #: what it is run for each of: setting, shape, rule

    def __call__(self, case: Case) -> None:
        """Run it; whatever goes wrong has failed it."""
        try:
            self.body(case)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"{self.name} ({self._of(case)}): {kind}{error}") from error

    def cases(self, make: Maker) -> Iterator[Case]:
        """Every case of it for a drafter."""
        drafter = make(pair()[1])
        settings = list(SETTINGS) if "setting" in self.over else ["greedy"]
        shapes = drafter.shapes if "shape" in self.over else (None,)
        rules = judges(drafter) if "rule" in self.over else [None]
        for setting in settings:
            for shape in shapes:
                for rule in rules:
                    yield Case(make, setting, shape, rule)

    def _of(self, case: Case) -> str:
        parts = [f"setting {case.setting}"] if "setting" in self.over else []
        shape = "usual shape" if case.shape is None else f"shape {case.shape.key!r}"
        rule = [] if case.rule is None else [f"rule {case.rule.name}"]
        return ", ".join([*parts, shape, *rule])


#: Every check by name, in the order in which `check_drafter` runs them.
CHECKS: dict[str, Check] = {}


def check(*over: str) -> Callable[[Callable[[Case], None]], Check]:
    """Make a check of a function, run for each setting, shape or rule, and list it in CHECKS."""

    def listed(body: Callable[[Case], None]) -> Check:
        name = body.__name__.replace("_", " ")
        CHECKS[name] = Check(name, body, frozenset(over))
        return CHECKS[name]

    return listed


def judges(drafter: Drafter) -> list[Verifier]:
    """The rules that can judge a drafter."""
    chain = all(shape.is_chain for shape in drafter.shapes)
    rules = verifiers.VERIFIERS.values()
    return [rule for rule in rules if verifiers.judges(rule, drafter.kinds, chain)]


def usual_rule(drafter: Drafter) -> Verifier:
    """The rule of sampled rows if none is named."""
    return verifiers.default(drafter.kinds, all(shape.is_chain for shape in drafter.shapes))


def expect(true: bool, otherwise: str) -> None:
    """Fail unless it is true; unlike `assert`, under `python -O`, too."""
    if not true:
        raise AssertionError(otherwise)
