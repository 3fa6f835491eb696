"""Types of models that the installed transformers has, and has right: others are skipped."""

import pytest
import transformers
from transformers import CONFIG_MAPPING

from outrider.models import unsupported


def lacking(kind):
    """Why tests of a type cannot run here; None: they can."""
    if kind not in CONFIG_MAPPING:
        return f"transformers {transformers.__version__} has no {kind!r}"
    return unsupported.too_old(kind)


def those(kinds):
    """The types that are there."""
    return [kind for kind in kinds if lacking(kind) is None]


def marks(kind):
    """A skip of what is not there, beside a test's other marks."""
    why = lacking(kind)
    return [] if why is None else [pytest.mark.skip(reason=why)]


def params(kinds):
    """Values for `parametrize`, skipped where they are not there."""
    return [pytest.param(kind, marks=marks(kind)) for kind in kinds]


def needed(kind):
    """Skip the test that asks, where a type is not there."""
    if (why := lacking(kind)) is not None:
        pytest.skip(why)
