"""Messages with recordings over HTTP, and images and sound in the Responses API."""

import base64
import sys
import zlib

import image_folder
import openai
import pytest
import sound_folder
from served import NAME, far, serving

import outrider
from outrider import SamplingParams, Stop
from outrider.costs import Costs
from outrider.server import media

SOUND = sound_folder.wav(sound_folder.samples(1))
OTHER = sound_folder.wav(sound_folder.samples(3, 0.4))


def loaded(folder):
    return outrider.load(
        str(folder),
        drafter="prompt_lookup",
        dtype="float32",
        threads=1,
        pack_weights=False,
        device="cpu",
        step_costs=Costs.of({1: 1.0, 2: 1.1, 8: 1.5}),
    )


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    return loaded(sound_folder.saved(tmp_path_factory.mktemp("hears")))


@pytest.fixture(scope="module")
def server(hearing):
    with serving(hearing, max_model_len=200) as running:
        yield running


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = image_folder.saved(tmp_path_factory.mktemp("sees"))
    with serving(loaded(folder), max_model_len=200) as running:
        yield running


def encoded(data):
    return base64.b64encode(data).decode()


def part(data, form="wav"):
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": form}}


def message(*parts, text="w20 w21"):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def asked(client, *parts, **options):
    more = {"model": NAME, "max_tokens": 8, "temperature": 0} | options
    return client.chat.completions.create(messages=message(*parts), **more)


def streamed(client, *parts, **options):
    chunks = asked(client, *parts, stream=True, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.fixture(scope="module")
def right(hearing):
    """The library's own answer."""
    parts = [
        {"type": "audio", "audio": sound_folder.samples(1)},
        {"type": "text", "text": "w20 w21"},
    ]
    given = [{"role": "user", "content": parts}]
    return hearing.generate(given, SamplingParams(0), Stop(8)).texts[0]


def test_a_recording_is_answered_as_by_the_library(hearing, server, right):
    client = server.client()
    assert asked(client, part(SOUND)).choices[0].message.content == right
    assert streamed(client, part(SOUND)) == right
    assert asked(client, part(OTHER)).choices[0].message.content != right
    seeded = {"temperature": 0.9, "seed": 5}
    drawn = asked(client, part(SOUND), **seeded).choices[0].message.content
    assert streamed(client, part(SOUND), **seeded) == drawn
    with far(hearing, max_model_len=200) as other:
        assert streamed(other.client(), part(SOUND), **seeded) == drawn


def test_a_second_question_about_a_recording_runs_no_encoder(hearing, server):
    """Counted: what is copied is not heard again, whatever is asked of it."""
    client, calls = server.client(), []
    before = {"type": "text", "text": " ".join(f"w{at}" for at in range(50, 66))}
    encoder = hearing.engine.target.runner.model.get_submodule("model.audio_tower")
    handle = encoder.register_forward_hook(lambda *_: calls.append(1))

    def told(seed, text):
        sound = part(sound_folder.wav(sound_folder.samples(seed)))
        messages = message(before, sound, text=text)
        more = {"model": NAME, "max_tokens": 8, "temperature": 0}
        return messages, client.chat.completions.create(messages=messages, **more)

    try:
        told(9, "w20 w21")
        told(9, "w20 w21")
        messages, other = told(9, "w30 w31 w32")
        assert len(calls) == 1
        told(10, "w20 w21")
        assert len(calls) == 2  # another recording is heard
    finally:
        handle.remove()
    assert other.usage.prompt_tokens_details.cached_tokens > 20  # beyond the recording
    alone = hearing.generate(messages, SamplingParams(0), Stop(8))
    assert other.choices[0].message.content == alone.texts[0]


def truncated():
    """The beginning of a FLAC file."""
    return b"fLaC" + zlib.compress(bytes(100))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part(b"no sound")], "the recording"),
        ([part(truncated())], "the recording"),
        ([part(b"")], "the recording has no samples"),
        ([part(SOUND[:44])], "no samples"),
        ([part(sound_folder.wav(sound_folder.samples(1, 1.5)))], "1.5 s of sound; at most 1 s"),
        ([{"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}], "base64"),
        ([{"type": "input_audio", "input_audio": {"data": "aGk="}}], "format"),
        ([part(SOUND)] * 17, "at most 16"),
        ([part(SOUND), {"type": "image_url", "image_url": {"url": "x"}}], "data URL"),
        (
            [
                {
                    "type": "image_url",
                    "image_url": {
                        "url": image_folder.url(image_folder.png(image_folder.picture(1)))
                    },
                }
            ],
            "image",
        ),
    ],
)
def test_what_cannot_be_heard_is_refused_and_the_server_lives_on(server, right, parts, said):
    client = server.client()
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            asked(client, *parts, stream=stream)
        assert "outrider-" not in str(caught.value)  # no path of this machine
        assert "Traceback" not in str(caught.value)
    assert asked(client, part(SOUND)).choices[0].message.content == right


def test_recordings_have_limits(server, right, monkeypatch):
    client = server.client()
    monkeypatch.setattr(media, "MOST_BYTES", 1000)
    with pytest.raises(openai.BadRequestError, match="at most 1000 bytes"):
        asked(client, part(SOUND))
    monkeypatch.undo()
    assert asked(client, part(SOUND)).choices[0].message.content == right


def test_a_package_that_is_missing_is_one_sentence(server, right, monkeypatch):
    client = server.client()
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(openai.BadRequestError, match=r"soundfile.*outrider\[audio\]"):
        asked(client, part(truncated(), "flac"))
    assert asked(client, part(SOUND)).choices[0].message.content == right


def test_without_pillow_an_image_is_refused_by_a_sentence(seeing, monkeypatch):
    image = image_folder.url(image_folder.png(image_folder.picture(1)))
    client = seeing.client()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(openai.BadRequestError, match=r"Pillow.*outrider\[images\]"):
        asked(client, {"type": "image_url", "image_url": {"url": image}})
    monkeypatch.undo()
    assert asked(client, {"type": "image_url", "image_url": {"url": image}}).choices


def test_sound_for_other_models_is_refused(seeing, shipped, monkeypatch):
    with pytest.raises(openai.BadRequestError, match=r"sound|audio"):
        asked(seeing.client(), part(SOUND))
    words = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", words)
    with serving(shipped) as running, pytest.raises(openai.BadRequestError, match="text alone"):
        asked(running.client(), part(SOUND))


# ---------------------------------------------------------------------- /v1/responses


def respond(client, *parts, text="w20 w21", **options):
    content = [*parts, {"type": "input_text", "text": text}]
    more = {"model": NAME, "max_output_tokens": 8, "temperature": 0} | options
    return client.responses.create(input=[{"role": "user", "content": content}], **more)


def test_a_response_hears_as_a_chat_does(server, right):
    client = server.client()
    assert respond(client, part(SOUND)).output_text == right
    events = list(respond(client, part(SOUND), stream=True))
    assert events[-1].response.output_text == right
    deltas = (one.delta for one in events if one.type == "response.output_text.delta")
    assert "".join(deltas) == right


def test_a_response_sees_as_a_chat_does_and_goes_on(seeing):
    client = seeing.client()
    image = image_folder.url(image_folder.png(image_folder.picture(1)))
    seen = {"type": "input_image", "image_url": image, "detail": "auto"}
    first = respond(client, seen)
    ask = {"model": NAME, "max_tokens": 8, "temperature": 0}
    turns = message({"type": "image_url", "image_url": {"url": image}})
    chat = client.chat.completions.create(messages=turns, **ask)
    assert first.output_text == chat.choices[0].message.content
    again = respond(client, text="w40", previous_response_id=first.id)
    turns += [
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "w40"},
    ]
    chat = client.chat.completions.create(messages=turns, **ask)
    assert again.output_text == chat.choices[0].message.content


@pytest.mark.parametrize(
    ("parts", "role", "said"),
    [
        (
            [{"type": "input_image", "image_url": "https://example.org/a.png"}],
            "user",
            "allow-remote",
        ),
        (
            [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}],
            "user",
            "no picture",
        ),
        ([{"type": "input_image", "file_id": "file-1"}], "user", "input_image"),
        ([{"type": "input_image", "image_url": "x"}], "system", "a user's"),
        ([part(SOUND)], "assistant", "a user's"),
        ([{"type": "input_file", "file_id": "file-1"}], "user", "type"),
    ],
)
def test_what_a_response_cannot_read_is_refused(seeing, parts, role, said):
    client = seeing.client()
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(model=NAME, input=[{"role": role, "content": parts}])
    assert respond(client, text="w20").output_text
