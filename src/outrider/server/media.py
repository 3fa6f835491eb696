"""Images and recordings in messages: data URLs, and remote ones where the server allows them.

What is remote is fetched with limits: https or http, no address of this machine or of a private
network (each redirect is looked at anew, and the address that was looked at is the one that is
asked), so many bytes, so many seconds. Nothing is fetched unless the server was told that it may.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from outrider.errors import ConfigurationError, ImageError
from outrider.server.messages import JsonObject
from outrider.text.images import MOST_BYTES
from outrider.text.media_processor import MediaProcessor, audio_bytes
from outrider.types import MultiModalInputs

MOST_IMAGES = 16  #: images and recordings of one request
SECONDS = 10.0  #: for everything that one request has fetched
_REDIRECTS = 3
_CHUNK = 1 << 16


def media_prompt(
    media: MediaProcessor | None,
    turns: Sequence[JsonObject],
    template: Mapping[str, object],
    remote: bool = False,
) -> tuple[list[int], MultiModalInputs]:
    """Token ids of a conversation and its images. Raises the library's errors for what is refused.

    turns   messages as chat templates read them, with parts as OpenAI's clients write them
    remote  whether images may be fetched from other machines
    """
    if media is None:
        raise ConfigurationError(
            "this model reads text alone; got a message with images or sound; leave them out, or "
            "serve an image-text or audio language model"
        )
    parts = [part for turn in turns for part in turn["content"] if isinstance(part, dict)]
    several = [part for part in parts if part["type"] != "text"]
    if len(several) > MOST_IMAGES:
        raise ImageError(
            f"a request has at most {MOST_IMAGES} images and recordings; got {len(several)}; ask "
            "about fewer at once"
        )
    until = time.monotonic() + SECONDS
    read = [turn | {"content": _read(turn["content"], remote, until)} for turn in turns]
    return media.conversation(read, template=template)


def _read(content: Any, remote: bool, until: float) -> Any:
    """The parts of a message with what they hold."""
    if not isinstance(content, list):
        return content
    parts: list[JsonObject] = []
    for part in content:
        if part["type"] == "image_url":
            image = image_bytes(part["image_url"]["url"], remote, until)
            parts.append({"type": "image", "image": image})
        elif part["type"] == "input_audio":
            sound = audio_bytes(part["input_audio"]["data"], MOST_BYTES)
            parts.append({"type": "audio", "audio": sound})
        elif part["type"] == "text":
            parts.append({"type": "text", "text": part["text"]})
    return parts


def image_bytes(url: str, remote: bool, until: float) -> str | bytes:
    """A data URL as it is, or what is fetched from another one, if that may be done."""
    if url.startswith("data:"):
        return url
    scheme = urlsplit(url).scheme.lower() if url.isprintable() else ""
    if scheme not in ("http", "https"):
        raise ImageError(
            f"an image_url is a data URL, or http(s) where the server allows it; got {url[:60]!r}; "
            "write data:image/png;base64,..."
        )
    if not remote:
        raise ImageError(
            f"this server fetches nothing; got {url[:80]!r}; send the image itself, "
            "data:image/png;base64,..., or start the server with --allow-remote-media"
        )
    return fetch(url, until)


def fetch(url: str, until: float) -> bytes:
    """A file from another machine. Raises ImageError.

    until  `time.monotonic()` at which it must be there
    """
    for _ in range(_REDIRECTS + 1):
        asked = urlsplit(url)
        if asked.scheme.lower() not in ("http", "https") or not asked.hostname:
            raise _unfetched(url, "only http and https are fetched")
        try:
            found = _one(asked, until)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, ImageError):
                raise
            late = time.monotonic() >= until  # whatever hanging up looks like from inside
            kind = TimeoutError if late else type(error)
            raise _unfetched(url, kind.__name__) from error
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise _unfetched(url, f"more than {_REDIRECTS} redirects")


def _one(asked: SplitResult, until: float) -> str | bytes:
    """What is there, or where it says that it is."""
    assert asked.hostname is not None
    port = asked.port or (443 if asked.scheme.lower() == "https" else 80)
    address = public_address(asked.hostname, port)
    link = socket.create_connection((address, port), timeout=_left(until))
    # each wait has a limit of its own; a sender of a byte at a time is stopped by the clock
    alarm = threading.Timer(_left(until), lambda: _hang_up(link))
    alarm.daemon = True
    alarm.start()
    try:
        if asked.scheme.lower() == "https":
            link = ssl.create_default_context().wrap_socket(
                link, server_hostname=asked.hostname, do_handshake_on_connect=False
            )
            link.do_handshake()
        talk = http.client.HTTPConnection(asked.hostname, port, timeout=_left(until))
        talk.sock = link
        path = (asked.path or "/") + (f"?{asked.query}" if asked.query else "")
        talk.request("GET", path, headers={"User-Agent": "outrider", "Accept": "image/*"})
        reply = talk.getresponse()
        if reply.status in (301, 302, 303, 307, 308) and reply.headers.get("Location"):
            return str(reply.headers["Location"])
        if reply.status != 200:
            raise _unfetched(asked.geturl(), f"status {reply.status}")
        data = b""
        while part := reply.read(_CHUNK):
            data += part
            if len(data) > MOST_BYTES:
                raise _unfetched(asked.geturl(), f"more than {MOST_BYTES} bytes")
        _left(until)  # what was cut off by the clock may look like its end
        return data
    finally:
        alarm.cancel()
        link.close()


def _hang_up(link: socket.socket) -> None:
    """End whatever waits for the other side."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def public_address(host: str, port: int) -> str:
    """An address of that name that is of no private network. Raises ImageError."""
    for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        address = str(found[4][0])
        if ipaddress.ip_address(address.partition("%")[0]).is_global:
            return address
    raise ImageError(
        f"images are not fetched from this machine or a private network; got {host!r}; send the "
        "image itself, data:image/png;base64,..."
    )


def _left(until: float) -> float:
    """Seconds that are left."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _unfetched(url: str, why: str) -> ImageError:
    return ImageError(
        f"cannot fetch an image; got {url[:80]!r} ({why}); send the image itself, "
        "data:image/png;base64,..."
    )
