"""Recordings through OpenAI's client: formats, times, streams; what is refused, and by whom."""

import io
import urllib.request

import numpy as np
import openai
import pytest
import whispers
from served import NAME, asked, far, idle, serving
from test_audio import written as wav

BRIEF = {"model": NAME, "language": "en", "temperature": 0.4}  # by default others are tried, too


@pytest.fixture(scope="module")
def tiny():
    return whispers.loaded()


@pytest.fixture(scope="module")
def listening(tiny):
    with serving(tiny) as running:
        yield running


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    path = wav(tmp_path_factory.mktemp("talk") / "talk.wav", whispers.sound(3, 3))
    return ("talk.wav", path.read_bytes())


@pytest.fixture(scope="module")
def expected(tiny, talk, tmp_path_factory):
    path = tmp_path_factory.mktemp("again") / "talk.wav"
    path.write_bytes(talk[1])
    return tiny.transcribe(path, language="en", temperature=0.4, seed=0, word_timestamps=True)


def heard(server, talk, **options):
    return server.client().audio.transcriptions.create(file=talk, **BRIEF | options)


def test_every_format_has_the_libraries_transcript(listening, talk, expected):
    assert expected.text
    answer = heard(listening, talk)
    assert answer.text == expected.text
    assert answer.usage.seconds == 3
    assert heard(listening, talk, response_format="text").strip() == expected.text
    srt = heard(listening, talk, response_format="srt")
    assert srt.startswith("1\n00:00:0") or not expected.segments
    vtt = heard(listening, talk, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n")
    assert srt.count("-->") == vtt.count("-->") > 0
    verbose = heard(listening, talk, response_format="verbose_json")
    assert (verbose.text, verbose.language) == (expected.text, "english")
    assert verbose.duration == pytest.approx(3)
    assert verbose.words is None
    spans = [(one.start, one.end, one.tokens) for one in verbose.segments]
    assert spans == [(one.start, one.end, list(one.tokens)) for one in expected.segments]
    assert [one.seek for one in verbose.segments] == sorted(one.seek for one in verbose.segments)
    words = heard(listening, talk, response_format="verbose_json", timestamp_granularities=["word"])
    assert words.segments is None
    said = [(word.word, word.start) for word in words.words]
    told = [word for segment in expected.segments for word in segment.words]
    assert said == [(word.word.strip(), word.start) for word in told]


def test_a_recording_goes_through_a_pipe_to_another_process(tiny, talk, expected):
    with far(tiny) as server:
        verbose = heard(server, talk, response_format="verbose_json")
        assert verbose.text == expected.text
        assert [one.start for one in verbose.segments] == [one.start for one in expected.segments]
        page = urllib.request.urlopen(server.address + "/metrics").read().decode()
        assert 'outrider:audio_seconds_total{model_name="pair"} 3.0' in page


def test_settings_reach_the_model(listening, tiny, talk):
    told = {"prompt": "abc", "temperature": 0.7, "seed": 5}
    samples = np.asarray(whispers.sound(3, 3), np.float32)
    same = tiny.transcribe(samples, language="fr", initial_prompt="abc", temperature=0.7, seed=5)
    more = {"seed": told.pop("seed")}
    answer = heard(listening, talk, language="fr", extra_body=more, **told)
    assert answer.text == same.text
    usual = listening.client().audio.transcriptions.create(file=talk, model=NAME)
    assert usual.text == tiny.transcribe(samples).text != answer.text


def test_translations_are_the_librarys(listening, tiny, talk):
    samples = np.asarray(whispers.sound(3, 3), np.float32)
    same = tiny.transcribe(samples, language="fr", task="translate", temperature=0.4, seed=0)
    said = {"model": NAME, "temperature": 0.4, "extra_body": {"language": "fr"}}  # as vLLM's

    def translated(**more):
        with pytest.warns(DeprecationWarning, match="deprecated"):  # by OpenAI's client
            return listening.client().audio.translations.create(file=talk, **said | more)

    assert translated().text == same.text != heard(listening, talk, language="fr").text
    verbose = translated(response_format="verbose_json")
    assert (verbose.text, verbose.language) == (same.text, "english")
    assert "-->" in translated(response_format="vtt")


def test_a_model_of_english_alone_translates_nothing(talk):
    path = PATH.replace("transcriptions", "translations")
    body, headers = form([(b"model", NAME.encode())], talk[1])
    with serving(whispers.loaded(english=True)) as server:
        code, told = asked(server, body, path, headers)
    assert code == 400
    assert "does not translate" in told["error"]["message"]


def test_a_stream_has_the_same_text(listening, talk, expected):
    events = list(heard(listening, talk, stream=True))
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].type == "transcript.text.done"
    assert "".join(event.delta for event in events[:-1]).strip() == expected.text
    assert events[-1].text == expected.text


def form(fields, data=b"", name="talk.wav"):
    """A form of several parts by hand: body and header."""
    edge, out = b"edge", io.BytesIO()
    for key, value in fields:
        out.write(b'--%s\r\ncontent-disposition: form-data; name="%s"\r\n\r\n' % (edge, key))
        out.write(value + b"\r\n")
    head = b'--%s\r\ncontent-disposition: form-data; name="file"; filename="%s"\r\n\r\n'
    out.write(head % (edge, name.encode()) + data + b"\r\n--%s--\r\n" % edge)
    return out.getvalue(), {"content-type": "multipart/form-data; boundary=edge"}


PATH = "/v1/audio/transcriptions"


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("chunking_strategy", b"auto", "not supported"),
        ("include[]", b"logprobs", "not supported"),
        ("temperature", b"2", "less than or equal"),
        ("response_format", b"doc", "srt"),
        ("language", b"klingon", "language"),
        ("timestamp_granularities[]", b"word", "verbose_json"),
        ("timeout", b"-1", "greater"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(listening, talk, field, value, word):
    body, headers = form([(b"model", NAME.encode()), (field.encode(), value)], talk[1])
    code, told = asked(listening, body, PATH, headers)
    assert code == 400
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert word in told["error"]["message"]
    assert field.rstrip("[]") in str(told["error"]["param"]) + told["error"]["message"]


def test_what_is_no_recording(listening, talk):
    for data, word in ((b"", "empty"), (b"noise" * 9, "soundfile"), (talk[1][:40], "recording")):
        body, headers = form([(b"model", NAME.encode())], data)
        code, told = asked(listening, body, PATH, headers)
        assert (code, told["error"]["param"]) == (400, "file"), told
        assert word in told["error"]["message"]
        assert "/tmp" not in told["error"]["message"]
    body, headers = form([(b"model", b"other")], talk[1])
    assert asked(listening, body, PATH, headers)[0] == 404
    code, told = asked(listening, {"model": NAME}, PATH)
    assert code == 400
    assert (
        "recording comes in a form; got content type 'application/json'" in told["error"]["message"]
    )
    body, headers = form([(b"model", NAME.encode())], b"x" * (26 << 20))
    assert asked(listening, body, PATH, headers)[0] == 413
    assert heard(listening, talk).text


def test_texts_and_recordings_have_their_own_models(listening, server, talk):
    for path in ("/v1/completions", "/v1/chat/completions"):
        code, told = asked(listening, {"model": NAME, "prompt": "x"}, path)
        assert code == 400
        assert PATH in told["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="need a Whisper"):
        heard(server, talk)
    code, told = asked(server, {"model": NAME}, PATH.replace("transcriptions", "translations"))
    assert code == 400
    assert "need a Whisper" in told["error"]["message"]


@pytest.mark.parametrize("name", ["talk.raw", "talk.mp3", "talk"])
def test_a_name_of_another_format_is_no_fault_of_the_server(listening, name):
    body, headers = form([(b"model", NAME.encode())], b"no sound at all " * 200, name)
    code, told = asked(listening, body, PATH, headers)
    assert (code, told["error"]["param"]) == (400, "file"), told
    assert "no format" in told["error"]["message"]


def test_a_listener_that_goes_away_and_a_deadline(listening, tiny, tmp_path):
    long = wav(tmp_path / "long.wav", whispers.sound(60, 3))
    talk = ("long.wav", long.read_bytes())
    stream = heard(listening, talk, stream=True)
    next(iter(stream))
    stream.close()
    assert idle(listening, 5)
    with pytest.raises(openai.InternalServerError, match="deadline"):
        heard(listening, talk, extra_body={"timeout": 0.2})
    assert idle(listening, 5)
    page = urllib.request.urlopen(listening.address + "/metrics").read().decode()
    assert 'audio_seconds_total{model_name="pair"}' in page
