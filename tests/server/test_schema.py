"""Every operation that the server describes, with what fits its description and what does not."""

import pytest
from hypothesis import HealthCheck, given, settings
from served import serving

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

#: A schema does not say which token ids there are, or how long a prompt may be.
NOT_IN_A_SCHEMA = [positive_data_acceptance]


@pytest.fixture(scope="module")
def server(shipped):
    with serving(shipped, capacity=256, timeout=20.0) as running:
        yield running
        assert running.loop.alive


def check(server, label, examples):
    """Ask what its description allows, and what it does not; every answer must fit it."""
    schema = schemathesis.openapi.from_url(server.address + "/openapi.json")
    operation = next(o.ok() for o in schema.get_all_operations() if o.ok().label == label)
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    for mode in modes:

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            case.call_and_validate(base_url=server.address, excluded_checks=NOT_IN_A_SCHEMA)

        run()


OPERATIONS = ["POST /v1/completions", "POST /v1/chat/completions"]


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_server_says_of_itself_holds(server, label):
    check(server, label, 4)


@pytest.mark.slow
@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_server_says_of_itself_holds_in_many_cases(server, label):
    check(server, label, 200)
