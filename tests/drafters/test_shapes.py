"""Another shape in every step: whatever is drafted, the text is the same."""

from itertools import pairwise

import pytest

from outrider import ConfigurationError, Engine, Limits, Root, Sampling, ops, verifiers
from outrider.types import Context, Shape
from tiny import DRAFTERS, PROMPTS, Restless, decode, pair

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
SETTINGS = {
    "greedy": [Sampling(0)] * 3,
    "sampled": [Sampling(1.0, seed=row) for row in range(3)],
    "mixed": [Sampling(0), Sampling(0.7, top_p=0.9, seed=4), Sampling(1.2, seed=5)],
    "penalised": [Sampling(0.9, repetition_penalty=1.3, seed=row) for row in range(3)],
}
#: Drafters that can draft in more than one shape.
SEVERAL = [name for name, make in DRAFTERS.items() if len(make(pair()[1]).shapes) > 1]


def test_all_drafters_but_the_root_have_several_shapes():
    assert set(DRAFTERS) - set(SEVERAL) == {"root"}


@BACKENDS
@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_random_shape_and_depth_in_every_step_leave_the_text(name, how, backend):
    """Under the rule that emits the target's own token, whose noise is shared with nobody else."""
    target, small = pair()
    settings, limits = SETTINGS[how], Limits(24)
    match = verifiers.get("match")
    with ops.use(backend):
        plain, _ = decode(Engine(target, Root(), match), PROMPTS[:3], settings, limits)
        drafter = Restless(DRAFTERS[name](small), seed=len(name))
        texts, run = decode(Engine(target, drafter, match), PROMPTS[:3], settings, limits)
    assert texts == plain
    assert len(drafter.seen) > 1
    assert run.stats.drafted > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_shapes_shrink_and_are_kept_to(name):
    target, small = pair()
    drafter = DRAFTERS[name](small)
    shapes = drafter.shapes
    assert len({shape.key for shape in shapes}) == len(shapes)
    deepest = shapes[0].max_depth
    assert [shape.max_depth for shape in shapes] == list(range(deepest, deepest - len(shapes), -1))
    assert all(a.max_nodes >= b.max_nodes for a, b in pairwise(shapes))
    for shape in shapes:
        run = Engine(target, Only(drafter, shape)).run(
            PROMPTS[:3], [Sampling(1.0, seed=row) for row in range(3)], Limits(6)
        )
        list(run)


class Only(Restless):
    """A drafter held to one of its shapes, whose drafts are looked at."""

    def __init__(self, drafter, shape):
        super().__init__(drafter)
        self.only = shape

    def propose(self, memory, context, shape):
        draft = self.drafter.propose(memory, context, self.only)
        assert draft.tree.max_depth <= self.only.max_depth
        assert draft.tree.nodes <= self.only.max_nodes
        assert draft.tree.is_chain or not self.only.is_chain
        assert (draft.tree.depth_BN <= self.only.max_depth).all()
        return draft


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_shape_that_is_not_declared_is_refused(name):
    drafter = DRAFTERS[name](pair()[1])
    unknown = Shape(17, 99, 17, is_chain=True)
    state = Asked(drafter, unknown)
    keys = ", ".join(str(shape.key) for shape in drafter.shapes)
    with pytest.raises(ConfigurationError, match=f"'{drafter.name}' declares.* 17, only {keys};"):
        list(Engine(pair()[0], state).run(PROMPTS[:1], Sampling(0), Limits(4)))


class Asked(Restless):
    """A drafter that is asked for one shape, declared or not."""

    def __init__(self, drafter, shape):
        super().__init__(drafter)
        self.shape = shape

    def propose(self, memory, context: Context, shape):
        return self.drafter.propose(memory, context, self.shape)
