"""Another shape in every step: whatever is drafted, the text is the same."""

from functools import lru_cache
from itertools import pairwise

import pytest

from outrider import (
    ConfigurationError,
    Engine,
    Root,
    SamplingParams,
    StopConditions,
    ops,
    verifiers,
)
from outrider.engine import step
from outrider.types import DraftShape
from tiny import DRAFTERS, PROMPTS, Restless, begun, decode, pair

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
LIMITS, SLOW = StopConditions(24), pytest.mark.slow
SETTINGS = {
    "greedy": [SamplingParams(0)] * 3,
    "sampled": [SamplingParams(1.0, seed=row) for row in range(3)],
    "mixed": [
        SamplingParams(0),
        SamplingParams(0.7, top_p=0.9, seed=4),
        SamplingParams(1.2, seed=5),
    ],
    "penalised": [SamplingParams(0.9, repetition_penalty=1.3, seed=row) for row in range(3)],
}
#: Drafters that can draft in more than one shape.
SEVERAL = [name for name, make in DRAFTERS.items() if len(make(pair()[1]).shapes) > 1]


def test_all_drafters_but_the_root_have_several_shapes():
    assert set(DRAFTERS) - set(SEVERAL) == {"root"}


@lru_cache
def plain(how, backend):
    """The three texts without drafts."""
    with ops.use(backend):
        engine = Engine(pair()[0], Root(), verifiers.get("match"))
        return decode(engine, PROMPTS[:3], SETTINGS[how], LIMITS)[0]


#: By default the reference runs in one setting: what is drafted differs no further.
HOW = [
    pytest.param(how, backend, marks=[] if backend == "cpu" or how == "mixed" else [SLOW])
    for how in SETTINGS
    for backend in ("cpu", "reference")
]


@pytest.mark.one_in(10)
@pytest.mark.parametrize(("how", "backend"), HOW)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_random_shape_and_depth_in_every_step_leave_the_text(name, how, backend):
    """Under the rule that emits the target's own token, whose noise is shared with nobody else."""
    target, small = pair()
    with ops.use(backend):
        drafter = Restless(DRAFTERS[name](small), seed=len(name))
        engine = Engine(target, drafter, verifiers.get("match"))
        texts, run = decode(engine, PROMPTS[:3], SETTINGS[how], LIMITS)
    assert texts == plain(how, backend)
    assert len(drafter.seen) > 1
    assert run.stats.drafted > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_shapes_shrink_level_by_level(name):
    shapes = DRAFTERS[name](pair()[1]).shapes
    deepest = shapes[0].max_depth
    assert [shape.max_depth for shape in shapes] == list(range(deepest, deepest - len(shapes), -1))
    assert all(a.max_nodes >= b.max_nodes for a, b in pairwise(shapes))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_shape_that_is_not_declared_is_refused_with_those_that_are(name):
    target, small = pair()
    drafter = DRAFTERS[name](small)
    state = begun(target, drafter, PROMPTS[:1], [SamplingParams(0)])
    keys = ", ".join(str(shape.key) for shape in drafter.shapes)
    with pytest.raises(ConfigurationError, match=f"'{drafter.name}' declares.* 17, only {keys};"):
        step.propose(drafter, state, DraftShape(17, 99, 17, is_chain=True))
