"""Recordings as float32 samples in [-1, 1] at the rate that the model hears, one channel.

Arrays are taken as they are, WAV files of whole numbers are read here, everything else by
`soundfile`, if it is installed (the extra `audio`). Nothing is imported before it is needed.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from outrider import arguments
from outrider.errors import AudioError

Samples: TypeAlias = NDArray[np.float32]
#: A path, samples, or `{"array": samples, "sampling_rate": 44100}` as datasets have it.
Audio: TypeAlias = str | Path | NDArray[Any] | torch.Tensor | Mapping[str, Any]

SLOWEST, FASTEST = 100, 768_000  #: samples per second that a file may have
_ENDLESS = 1 << 40  #: frames that no file has
_BLOCK = 1 << 20  #: frames that are decoded at a time
LOUDEST = 32.0  #: samples beyond it were never scaled to [-1, 1]


@dataclass(frozen=True)
class Recording:
    """One recording that was asked for and looked at; `read` gives its samples."""

    name: str  #: what it is called in messages
    seconds: float
    given: Any
    sampling_rate: int  #: of what is given

    def read(self, rate: int) -> Samples:
        """Its samples at `rate`, [n], one channel.

        Raises AudioError for a file that turns out to be broken, or samples that are no numbers.
        """
        if isinstance(self.given, Path):
            samples = _file(self.given)
        else:
            samples = _array(self.name, self.given)
        return resampled(samples, self.sampling_rate, rate)


def look(
    given: Audio | Sequence[float], number: int, sampling_rate: int | None, usual: int
) -> Recording:
    """What is asked for, looked at but not read: the header of a file, the shape of an array.

    `number` names a recording that is no file. `sampling_rate` is what the caller says it is: of
    samples, which have `usual` if nothing is said; a file whose header says another is refused.

    Raises AudioError for what is missing, empty, or none of these.

    >>> look(np.zeros(16000, np.float32), 0, None, 16000).seconds
    1.0
    """
    if isinstance(given, Mapping):
        given, sampling_rate = _of_mapping(given, number, sampling_rate)
    if sampling_rate is not None:
        do = "give samples per second, such as 16000, or leave it out"
        sampling_rate = arguments.whole("sampling_rate", sampling_rate, do, least=1)
    if isinstance(given, (str, Path)):
        path = Path(arguments.at_home(given))
        rate, frames = _header(path)
        if sampling_rate not in (None, rate):
            raise AudioError(
                f"{path} has {rate} samples per second; got sampling_rate={sampling_rate}; leave "
                "it out for files"
            )
        if not frames:
            raise AudioError(f"{path} has no samples; got an empty recording; leave it out")
        if not SLOWEST <= rate <= FASTEST:
            raise AudioError(
                f"{path} must have {SLOWEST} to {FASTEST} samples per second; got {rate}, which no "
                "recorder writes; mend its header"
            )
        return Recording(str(path), frames / rate, path, rate)
    name = f"recording {number}"
    samples = _shaped(name, given)
    rate = usual if sampling_rate is None else sampling_rate
    if not len(samples):
        raise AudioError(f"{name} has no samples; got an empty array; leave it out")
    return Recording(name, len(samples) / rate, samples, rate)


def _of_mapping(
    given: Mapping[str, Any], number: int, sampling_rate: int | None
) -> tuple[Any, int | None]:
    """The samples and rate of a mapping as datasets and pipelines have them."""
    key = next((key for key in ("array", "raw", "path") if given.get(key) is not None), None)
    if key is None:
        raise AudioError(
            f"recording {number} is a mapping without samples; got the keys {sorted(given)}; give "
            '{"array": samples, "sampling_rate": rate}'
        )
    rate = given.get("sampling_rate", sampling_rate)
    if sampling_rate not in (None, rate):
        raise AudioError(
            f"recording {number} says sampling_rate={rate} itself; got sampling_rate="
            f"{sampling_rate}; leave one out"
        )
    return given[key], rate


def _shaped(name: str, given: Any) -> NDArray[Any]:
    """Samples as an array [n] of the caller's own numbers; [1, n] and [n, 1] are one channel."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().float().numpy()
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, (np.ndarray, Sequence)):
        raise AudioError(
            f"{name} must be a path or samples; got {arguments.shown(given)}; give a file name, or "
            "an array of floats in [-1, 1]"
        )
    try:
        samples = np.asarray(given)
    except ValueError as error:  # rows of unequal length
        raise AudioError(
            f"{name} must be one list of samples; got {arguments.shown(given)} ({error}); give an "
            "array of floats in [-1, 1]"
        ) from error
    if samples.dtype.kind not in "fiu":
        raise AudioError(
            f"{name} must have numbers as samples; got an array of {samples.dtype}; give floats in "
            "[-1, 1]"
        )
    if samples.ndim == 2 and 1 in samples.shape:
        samples = samples.reshape(-1)
    if samples.ndim != 1:
        raise AudioError(
            f"{name} must be one channel; got an array of shape {samples.shape}; average the "
            "channels first: samples.mean(axis)"
        )
    return samples


def _array(name: str, samples: NDArray[Any]) -> Samples:
    """Samples as float32; whole numbers are scaled by what their type can hold."""
    if samples.dtype.kind in "iu":
        info = np.iinfo(samples.dtype)
        middle = 0.0 if samples.dtype.kind == "i" else (int(info.max) + 1) / 2
        scale = (int(info.max) - int(info.min) + 1) / 2
        return ((samples.astype(np.float64) - middle) / scale).astype(np.float32)
    plain = samples.astype(np.float32)
    if not np.isfinite(plain).all():
        raise AudioError(
            f"{name} must have finite samples; got NaN or infinity; clean it first: "
            "numpy.nan_to_num(samples)"
        )
    loudest = float(np.abs(plain).max())
    if loudest > LOUDEST:
        raise AudioError(
            f"{name} must have floats in [-1, 1]; got a sample of {loudest:g}; divide by 32768 if "
            "they come from 16 bits"
        )
    return plain


def _header(path: Path) -> tuple[int, int]:
    """Samples per second, and how many of each channel there are."""
    if not path.is_file():
        if path.exists() and not path.is_dir():
            what, do = "a pipe or a device", "give a file, or outrider transcribe - < it"
        else:
            what, do = "a directory" if path.is_dir() else "no such file", "check the path"
        raise AudioError(f"cannot read {path}; got {what}; {do}")
    if not path.stat().st_size:
        raise AudioError(f"{path} has no samples; got an empty file; leave it out")
    pcm = _pcm(path)
    if isinstance(pcm, Pcm):
        return pcm.rate, pcm.size // (pcm.channels * pcm.width)
    found = _soundfile(path, pcm).info(str(path))
    if 0 < found.frames < _ENDLESS:
        return int(found.samplerate), int(found.frames)
    return int(found.samplerate), len(_decoded(path, pcm))  # a stream whose length nobody wrote


def _file(path: Path) -> Samples:
    """A file's samples, its channels averaged."""
    pcm = _pcm(path)
    if not isinstance(pcm, Pcm):
        return _decoded(path, pcm)
    try:
        with path.open("rb") as file:
            file.seek(pcm.start)
            raw = file.read(pcm.size)
    except OSError as error:
        raise AudioError(f"cannot read {path}; got {error.strerror}; check the path") from error
    raw = raw[: len(raw) - len(raw) % (pcm.width * pcm.channels)]  # a file that was cut off
    if not raw:
        raise AudioError(f"{path} has no samples; got a header alone; leave it out")
    samples = _of_bytes(raw, pcm.width).reshape(-1, pcm.channels)
    return samples[:, 0] if pcm.channels == 1 else np.asarray(samples.mean(1), np.float32)


class Pcm(NamedTuple):
    """Where the samples of a WAV file are, and what they are."""

    rate: int
    channels: int
    width: int  #: bytes of a sample
    start: int
    size: int  #: bytes that are there, whatever the header says


def _pcm(path: Path) -> Pcm | str:
    """The layout of a WAV file of whole numbers, or why it is none.

    Who writes to a pipe, or is killed, leaves a length that is not so: 0, or more than is there.
    Then all that is there counts.
    """
    try:
        with path.open("rb") as file:
            whole = path.stat().st_size
            head = file.read(12)
            if head[:4] != b"RIFF" or head[8:] != b"WAVE":
                return "no RIFF header"
            form: tuple[int, ...] | None = None
            while len(chunk := file.read(8)) == 8:
                name, size = chunk[:4], int.from_bytes(chunk[4:], "little")
                if name == b"data":
                    if form is None:
                        return "no format ahead of the samples"
                    rate, channels, width = form
                    start = file.tell()
                    there = whole - start
                    if size == 0 and not _is_chunk(file.read(8), there):
                        size = there
                    return Pcm(rate, channels, width, start, min(size, there))
                body = file.read(min(size, 64)) if name == b"fmt " else b""
                if name == b"fmt ":
                    form = _format(body)
                    if form is None:
                        return "samples of another kind than whole numbers"
                file.seek(size + size % 2 - len(body), 1)
    except OSError as error:
        raise AudioError(f"cannot read {path}; got {error.strerror}; check the path") from error
    return "no samples"


def _format(body: bytes) -> tuple[int, int, int] | None:
    """Rate, channels and width of whole numbers, as a WAV header says; None for others."""
    if len(body) < 16:
        return None
    kind, channels, rate, _, block, bits = struct.unpack("<HHIIHH", body[:16])
    if kind == 0xFFFE and len(body) >= 26:  # extensible: the kind is ahead of a GUID
        kind = int.from_bytes(body[24:26], "little")
    width = (bits + 7) // 8
    if kind != 1 or not channels or width not in (1, 2, 3, 4) or block != channels * width:
        return None
    return rate, channels, width


def _is_chunk(head: bytes, there: int) -> bool:
    """Whether what follows empty samples is another part of the file, to its end."""
    size = int.from_bytes(head[4:8], "little")
    return len(head) == 8 and head[:4].isalnum() and 0 <= there - 8 - size <= 1


def _of_bytes(raw: bytes, width: int) -> Samples:
    """PCM of 8 (unsigned), 16, 24 or 32 bits, little endian."""
    if width == 1:
        return np.asarray((np.frombuffer(raw, np.uint8) - 128.0) / 128, np.float32)
    if width == 3:  # the three bytes above a low one of zeros
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
    kind = {2: "<i2", 4: "<i4"}[width]
    return (np.frombuffer(raw, kind) / 2.0 ** (8 * width - 1)).astype(np.float32)


def _soundfile(path: Path, why: str) -> Any:
    """The library for everything but plain WAV, once it has found that it knows this file."""
    try:
        import soundfile
    except ImportError as error:
        raise AudioError(
            f"cannot read {path} as PCM WAV ({why}); other formats need soundfile, which is not "
            "installed; pip install 'outrider[audio]', or convert it to WAV"
        ) from error
    try:
        soundfile.info(str(path))
    except (soundfile.LibsndfileError, TypeError) as error:
        # a TypeError is of a name that ends in .raw: samples of which nothing says how they lie.
        # What libsndfile says of another file goes by its name, too, and may not be so
        raise AudioError(
            f"cannot read {path}; got no format that soundfile knows; convert it to WAV or FLAC"
        ) from error
    return soundfile


def _decoded(path: Path, why: str) -> Samples:
    """A file's samples by soundfile, its channels averaged."""
    library = _soundfile(path, why)
    blocks: list[Samples] = []
    try:
        with library.SoundFile(str(path)) as sound:
            while len(block := sound.read(_BLOCK, dtype="float32", always_2d=True)):
                blocks.append(np.asarray(block.mean(1), np.float32))
    except (RuntimeError, ValueError, TypeError) as error:  # it breaks off, a codec is missing
        raise AudioError(f"cannot read {path}; got {error}; convert it to WAV or FLAC") from error
    if not blocks:
        raise AudioError(f"{path} has no samples; got a header alone; leave it out")
    samples = np.concatenate(blocks)
    if not np.isfinite(samples).all():
        raise AudioError(f"{path} must have finite samples; got NaN or infinity; clean it first")
    return samples


def look_at_all(given: Any, sampling_rate: int | None, usual: int) -> tuple[list[Recording], bool]:
    """Every recording of a call, looked at, and whether it gives a list of them."""
    is_list = several(given)
    each = given if is_list else [given]
    return [look(one, number, sampling_rate, usual) for number, one in enumerate(each)], is_list


def several(given: object) -> bool:
    """Whether a call gives a list of recordings; a list of numbers is one.

    Raises AudioError for no recording at all.

    >>> several("a.wav"), several(["a.wav", "b.wav"]), several([0.0, 0.1])
    (False, True, False)
    """
    if isinstance(given, (str, Path, np.ndarray, torch.Tensor, Mapping)):
        return False
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, Sequence):
        raise AudioError(
            f"no recording; got {arguments.shown(given)}; give a path, samples, or a list of them"
        )
    if not given:
        raise AudioError("no recording; got an empty list; give at least one")
    return not arguments.is_number(arguments.plain(given[0]))


_ZEROS = 10  #: of the filter's sine on each side, in samples of the lower rate
_BETA = 5.0  #: of the Kaiser window around it
_ROWS = 1 << 15  #: of windows that are multiplied at a time


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """The same sound with `wanted` samples per second: a polyphase filter, as
    `scipy.signal.resample_poly` makes by default.

    (Importing that takes as long as hearing half a minute; this is all of it that speech needs.)

    Between two samples `up - 1` zeros are put, all are filtered, and every `down`-th is kept; only
    those are computed. Kept samples that lie alike between two given ones see the same taps.

    >>> resampled(np.ones(400, np.float32), 8000, 16000)[400].item() > 0.99
    True
    """
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    if up == down or not len(samples):
        return samples
    half = _ZEROS * max(up, down)
    taps = np.sinc(np.arange(-half, half + 1) / max(up, down)) * np.kaiser(2 * half + 1, _BETA)
    taps *= up / taps.sum()
    made = np.empty(-(-len(samples) * up // down), np.float32)
    seen, before = 2 * half // up + 1, half // up
    padded = np.pad(samples.astype(np.float32, copy=False), (before, seen + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, seen)
    for phase in range(min(up, len(made))):
        first = -((half - phase * down) // up)  # given sample that the first of these sees
        at = half + phase * down - up * (first + np.arange(seen))
        own = np.where(at >= 0, taps[at.clip(0)], 0.0).astype(np.float32)
        of_phase = made[phase::up]
        rows = windows[first + before :: down][: len(of_phase)]
        for start in range(0, len(of_phase), _ROWS):
            of_phase[start : start + _ROWS] = rows[start : start + _ROWS] @ own
    return made
