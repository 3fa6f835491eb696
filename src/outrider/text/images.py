"""Images as users give them: paths, bytes, data URLs, Pillow's own. Nothing is ever fetched."""

import base64
import binascii
import io
from pathlib import Path
from typing import Any

from outrider.errors import ConfigurationError, ImageError, OutriderError

MOST_BYTES = 32 << 20  #: of a file
MOST_PIXELS = 64_000_000  #: of a picture: some files of kilobytes hold billions


def open_image(given: object, most_pixels: int = MOST_PIXELS) -> Any:
    """A picture in RGB, of Pillow.

    given  a path, a file's bytes, a data URL (`data:image/png;base64,...`), or Pillow's own image

    Raises ImageError for what is missing, remote, too large or no picture, ConfigurationError
    without Pillow.

    >>> open_image("scan.png").size            # doctest: +SKIP
    (640, 480)
    """
    image, error = _pillow()
    if isinstance(given, image.Image):
        return _small(given, "an image", most_pixels).convert("RGB")
    what, data = _read(given)
    try:
        opened = _small(image.open(io.BytesIO(data)), what, most_pixels)
        return opened.convert("RGB")
    except ImageError:
        raise
    except (error, OSError, ValueError, SyntaxError, image.DecompressionBombError) as failed:
        raise ImageError(
            f"{what} is no picture that can be read ({type(failed).__name__}); got {len(data)} "
            "bytes; give a whole PNG, JPEG, WebP or another file that Pillow opens"
        ) from failed


def _small(opened: Any, what: str, most: int) -> Any:
    """A picture that was opened, before its pixels are read."""
    wide, high = opened.size
    if wide * high > most:
        raise ImageError(
            f"{what} has {wide} x {high} pixels; at most {most} are read; scale it down first"
        )
    return opened


def _read(given: object) -> tuple[str, bytes]:
    """What a picture is called, and its file."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        return "an image", _limited(bytes(given), "an image")
    if isinstance(given, str) and given.lower().startswith(("http:", "https:", "ftp:")):
        raise ImageError(
            f"remote images are not fetched; got {given[:80]!r}; download it and give the file, "
            "its bytes or a data URL"
        )
    if isinstance(given, str) and given.startswith("data:"):
        return "an image", _limited(data_url(given), "an image")
    if not isinstance(given, (str, Path)):
        raise ImageError(
            f"an image is a path, bytes, a data URL or an image of Pillow; got "
            f"{type(given).__name__}; give one of these"
        )
    path = Path(str(given).removeprefix("file://"))
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ImageError(_too_long(repr(str(path)), size))
        return repr(str(path)), path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(
            f"there is no image that can be read at {str(path)[:200]!r} ({type(error).__name__}); "
            "check the path"
        ) from error


def data_url(given: str) -> bytes:
    """What a data URL holds. Raises ImageError for one that is not in base64.

    >>> data_url("data:image/png;base64,aGk=")
    b'hi'
    """
    head, comma, body = given.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(
            f"a data URL holds its file in base64; got {head[:60]!r}; write "
            "data:image/png;base64,..."
        )
    if len(body) > 4 * MOST_BYTES // 3 + 4:
        raise ImageError(_too_long("a data URL", len(body)))
    return from_base64(body, "a data URL", ImageError)


def from_base64(text: str, what: str, refused: type[OutriderError]) -> bytes:
    """A file's bytes from their text. Raises an error of the type `refused`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(
            f"{what} has a file in base64; got {len(text)} characters that are none ({error}); "
            "encode the file's bytes"
        ) from error


def _limited(data: bytes, what: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise ImageError(_too_long(what, len(data)))
    return data


def _too_long(what: str, size: int) -> str:
    return f"{what} is too long: {size} bytes; at most {MOST_BYTES} are read; scale it down first"


def _pillow() -> tuple[Any, Any]:
    """Pillow's module, and the error that it raises for what is no picture."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ConfigurationError(
            "images need Pillow, which is not installed; got an image; run: pip install "
            "'outrider[images]'"
        ) from error
    return Image, UnidentifiedImageError
