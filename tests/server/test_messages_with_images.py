"""Messages with images over HTTP; what is remote is fetched where that is allowed alone."""

import contextlib
import json
import socket
import time
import urllib.request

import openai
import pytest
from image_folder import picture, png, saved, url
from served import NAME, far, serving

import outrider
from outrider import ImageError, SamplingParams, Stop
from outrider.costs import Costs
from outrider.server import media
from outrider.server.engine_factory import fingerprint


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return outrider.load(
        str(saved(tmp_path_factory.mktemp("llava"))),
        drafter="prompt_lookup",
        dtype="float32",
        threads=1,
        pack_weights=False,
        device="cpu",
        step_costs=Costs.of({1: 1.0, 2: 1.1, 8: 1.5}),
    )


@pytest.fixture(scope="module")
def server(seeing):
    with serving(seeing, max_model_len=200) as running:
        yield running


def message(image, text="w20 w21"):
    part = {"type": "image_url", "image_url": {"url": image}}
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


def asked(client, image, **options):
    more = {"model": NAME, "max_tokens": 8, "temperature": 0} | options
    return client.chat.completions.create(messages=message(image), **more)


def test_an_image_is_answered_as_by_the_library(seeing, server):
    right = seeing.generate(message(url(png(picture(1)))), SamplingParams(0), Stop(8)).texts[0]
    client = server.client()
    assert asked(client, url(png(picture(1)))).choices[0].message.content == right
    streamed = asked(client, url(png(picture(1))), stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    assert "".join(parts) == right
    assert asked(client, url(png(picture(2)))).choices[0].message.content != right


def test_the_processors_own_template_is_in_the_fingerprint(seeing, monkeypatch):
    own = fingerprint(seeing)
    assert fingerprint(seeing) == own
    monkeypatch.setattr(seeing.media.processor, "chat_template", "<image>{{ messages }}")
    assert fingerprint(seeing) != own


def test_a_second_question_copies_the_image(seeing, server):
    client, image = server.client(), url(png(picture(4)))
    first = asked(client, image)
    again = asked(client, image)
    assert again.choices[0].message.content == first.choices[0].message.content
    copied = again.usage.prompt_tokens_details.cached_tokens
    assert copied == again.usage.prompt_tokens - 1


def test_a_stream_with_an_image_goes_on_elsewhere(seeing, server):
    """Killed and resumed: another server, whose loop is behind a pipe, writes the rest."""
    body = {
        "model": NAME,
        "messages": message(url(png(picture(3)))),
        "max_tokens": 10,
        "temperature": 0.8,
        "seed": 5,
        "return_token_ids": True,
        "ignore_eos": True,
        "stream": True,
    }

    def told(running, **more):
        request = urllib.request.Request(
            running.address + "/v1/chat/completions",
            json.dumps(body | more).encode(),
            {"content-type": "application/json"},
        )
        ids = []
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    for one in json.loads(line[6:])["choices"]:
                        ids += one.get("token_ids") or []
        return ids

    whole = told(server)
    assert len(whole) == 10
    sent = [{"token_ids": whole[:4], "finish_reason": None}]
    with far(seeing, max_model_len=200) as other:
        assert told(other, resume=sent) == whole[4:]


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("https://example.org/a.png", "--allow-remote-media"),
        ("file:///etc/passwd", "data URL"),
        ("/etc/passwd", "data URL"),
        ("data:image/png;base64,aGk=", "no picture"),
        ("data:image/png;base64,?", "base64"),
    ],
)
def test_images_that_cannot_be_read_are_refused(server, image, said):
    with pytest.raises(openai.BadRequestError, match=said):
        asked(server.client(), image)


def test_too_many_images_and_wrong_places_are_refused(server):
    client, image = server.client(), url(png(picture(1)))
    part = {"type": "image_url", "image_url": {"url": image}}
    for messages, said in [
        ([{"role": "user", "content": [part] * 17}], "at most 16"),
        ([{"role": "system", "content": [part]}], "a user's"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content"),
    ]:
        with pytest.raises(openai.BadRequestError, match=said):
            client.chat.completions.create(model=NAME, messages=messages)


def test_a_model_of_text_refuses_images(shipped, monkeypatch):
    words = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", words)
    with serving(shipped) as running, pytest.raises(openai.BadRequestError, match="text alone"):
        asked(running.client(), url(png(picture(1))))


@pytest.fixture
def elsewhere(monkeypatch):
    """A web server of this machine under a public address, as far as the library can tell."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            paths = {"/a.png": png(picture(1)), "/long": bytes(3000)}
            if self.path in ("/away", "/round"):
                self.send_response(302)
                self.send_header("Location", "/a.png" if self.path == "/away" else "/round")
                self.end_headers()
                return
            if self.path == "/private":
                self.send_response(302)
                self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
                return
            self.send_response(200 if self.path in {*paths, "/drip"} else 404)
            self.end_headers()
            self.wfile.write(paths.get(self.path, b""))
            if self.path == "/drip":
                with contextlib.suppress(OSError):  # the reader hangs up
                    for _ in range(40):
                        self.wfile.write(b"1")
                        time.sleep(0.05)

        def log_message(self, *_):
            pass

    site = HTTPServer(("127.0.0.1", 0), Site)
    thread = Thread(target=site.serve_forever, daemon=True)
    thread.start()
    port = site.server_address[1]
    right = media.public_address

    def address(host, asked):
        return "127.0.0.1" if host == "images.example" else right(host, asked)

    monkeypatch.setattr(media, "public_address", address)
    yield f"http://images.example:{port}"
    site.shutdown()
    site.server_close()
    thread.join()


def test_images_are_fetched_where_that_is_allowed(seeing, elsewhere):
    right = seeing.generate(message(url(png(picture(1)))), SamplingParams(0), Stop(8)).texts[0]
    with serving(seeing, max_model_len=200, allow_remote_media=True) as running:
        client = running.client()
        for path in ("/a.png", "/away"):
            assert asked(client, elsewhere + path).choices[0].message.content == right
        for path, said in (("/none", "404"), ("/round", "redirects"), ("/private", "private")):
            with pytest.raises(openai.BadRequestError, match=said):
                asked(client, elsewhere + path)


def test_what_is_fetched_has_limits(elsewhere, monkeypatch):
    monkeypatch.setattr(media, "MOST_BYTES", 2000)
    with pytest.raises(ImageError, match="more than 2000 bytes"):
        media.fetch(elsewhere + "/long", time.monotonic() + 5)
    with pytest.raises(ImageError, match="TimeoutError"):
        media.fetch(elsewhere + "/a.png", time.monotonic() - 1)
    with pytest.raises(ImageError, match="TimeoutError"):  # no wait for a byte is long
        media.fetch(elsewhere + "/drip", time.monotonic() + 0.5)


def test_a_link_that_ends_with_its_time_is_one_that_took_too_long(monkeypatch):
    """What was hung up on may look like a reset from inside."""

    def reset(asked, until):
        time.sleep(max(until - time.monotonic(), 0))
        raise ConnectionResetError

    monkeypatch.setattr(media, "_one", reset)
    with pytest.raises(ImageError, match="TimeoutError"):
        media.fetch("http://images.example/a.png", time.monotonic() + 0.01)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "localhost"]
)
def test_no_address_of_a_private_network_is_asked(host):
    with pytest.raises(ImageError, match="private network"):
        media.public_address(host, 80)


def test_a_public_address_is_asked_as_it_was_looked_up(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert media.public_address("example.org", 80) == "93.184.216.34"
