"""Every operation that the server describes, with what fits its description and what does not."""

import pytest
import whispers
from hypothesis import HealthCheck, given, settings
from served import NAME, serving
from test_audio import written as wav

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

#: A schema does not say which token ids there are, or how long a prompt may be.
NOT_IN_A_SCHEMA = [positive_data_acceptance]


@pytest.fixture(scope="module")
def server(shipped):
    with serving(shipped, capacity=256, timeout=20.0) as running:
        yield running
        assert running.loop.alive


@pytest.fixture(scope="module")
def listening():
    with serving(whispers.loaded(), timeout=20.0) as running:
        yield running
        assert running.loop.alive


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return wav(tmp_path_factory.mktemp("talk") / "talk.wav", whispers.sound(1, 3)).read_bytes()


def check(server, label, examples, known):
    """Ask what its description allows, and what it does not; every answer must fit it.

    What is allowed is asked with the fields that are `known`, too: there are few models, and few
    bytes are a recording.
    """
    codes = set()
    schema = schemathesis.openapi.from_url(server.address + "/openapi.json")
    operation = next(o.ok() for o in schema.get_all_operations() if o.ok().label == label)
    modes = {
        schemathesis.GenerationMode.POSITIVE: [{}, known],
        schemathesis.GenerationMode.NEGATIVE: [{}],
    }
    for mode, added in modes.items():

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            for fields in added:
                if fields:
                    case.body |= fields
                answer = case.call_and_validate(
                    base_url=server.address, excluded_checks=NOT_IN_A_SCHEMA
                )
                codes.add(answer.status_code)

        run()
    assert {200, 400} <= codes


HEARD = "POST /v1/audio/transcriptions"
OPERATIONS = ["POST /v1/completions", "POST /v1/chat/completions"]


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_server_says_of_itself_holds(server, label):
    check(server, label, 4, {"model": NAME})


@pytest.mark.slow
@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_server_says_of_itself_holds_in_many_cases(server, label):
    check(server, label, 200, {"model": NAME})


def test_what_a_listening_server_says_of_itself_holds(listening, recording):
    check(listening, HEARD, 4, {"model": NAME, "file": recording})


@pytest.mark.slow
def test_what_a_listening_server_says_of_itself_holds_in_many_cases(listening, recording):
    check(listening, HEARD, 200, {"model": NAME, "file": recording})
