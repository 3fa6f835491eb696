"""Every operation that the server describes, with what fits its description and what does not."""

import pytest
import whispers
from hypothesis import HealthCheck, given, settings
from served import NAME, PROMPT, serving
from test_audio import written as wav

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
from schemathesis.specs.openapi.checks import (  # noqa: E402
    negative_data_rejection,
    positive_data_acceptance,
)

#: A schema does not say which token ids there are, or how long a prompt may be.
NOT_IN_A_SCHEMA = [positive_data_acceptance]


@pytest.fixture(scope="module")
def server(shipped):
    with serving(shipped, max_model_len=256, timeout=20.0) as running:
        yield running
        assert running.engine.alive


@pytest.fixture(scope="module")
def listening():
    with serving(whispers.loaded(), timeout=20.0) as running:
        yield running
        assert running.engine.alive


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return wav(tmp_path_factory.mktemp("talk") / "talk.wav", whispers.sound(1, 3)).read_bytes()


def check(server, label, examples, known):
    """Ask what its description allows, and what it does not; every answer must fit it.

    Few bodies of what is allowed are answered, as there are few models: each is asked once more
    with one of its fields alone beside those that are `known` to be answered. The codes of those.
    """
    schema = schemathesis.openapi.from_url(server.address + "/openapi.json")
    operation = next(o.ok() for o in schema.get_all_operations() if o.ok().label == label)
    codes = []
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        allowed = mode is schemathesis.GenerationMode.POSITIVE

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            case.call_and_validate(base_url=server.address, excluded_checks=NOT_IN_A_SCHEMA)
            if known and allowed:  # noqa: B023
                fields = sorted(case.body.keys() - known)
                one = fields[len(codes) % len(fields)] if fields else None
                case.body = known | {name: case.body[name] for name in fields if name == one}
                answer = case.call_and_validate(
                    base_url=server.address,  # a recording is bytes, which no JSON schema has
                    excluded_checks=[*NOT_IN_A_SCHEMA, negative_data_rejection],
                )
                codes.append(answer.status_code)

        run()
    return codes


COMPLETION = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "timeout": 20}
RECORDING = {"model": NAME, "timeout": 20}
HEARD = "POST /v1/audio/transcriptions"


@pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_what_the_server_says_of_completions_holds(server, examples):
    assert 200 in check(server, "POST /v1/completions", examples, COMPLETION)


@pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_what_the_server_says_of_chats_holds(server, examples):
    check(server, "POST /v1/chat/completions", examples, {})  # the pair has no chat template


@pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_what_the_server_says_of_responses_holds(server, examples):
    check(server, "POST /v1/responses", examples, {})


@pytest.mark.parametrize(
    ("route", "known"),
    [("POST /tokenize", {"prompt": PROMPT}), ("POST /detokenize", {"tokens": [4, 5]})],
)
@pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_what_the_server_says_of_tokens_holds(server, examples, route, known):
    assert 200 in check(server, route, examples, known)


@pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_what_the_server_says_of_recordings_holds(listening, recording, examples):
    assert 200 in check(listening, HEARD, examples, RECORDING | {"file": recording})
