"""Recordings: WAV of every width and rate, arrays, and what cannot be read."""

import math
import struct
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.errors import AudioError
from outrider.speech import audio

RATE = 16000
TONE = (0.5 * np.sin(2 * np.pi * 220 * np.arange(RATE // 2) / RATE)).astype(np.float32)


def written(path, samples, rate=RATE, width=2, channels=1):
    """A WAV file of these samples in [-1, 1]."""
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        each = np.repeat(np.asarray(samples, np.float64), channels)
        if width == 1:
            raw = np.round(each * 127 + 128).astype(np.uint8).tobytes()
        elif width == 3:
            raw = b"".join(struct.pack("<i", int(x * (2**23 - 1)))[:3] for x in each)
        else:
            top = 2 ** (8 * width - 1) - 1
            raw = np.round(each * top).astype({2: "<i2", 4: "<i4"}[width]).tobytes()
        sound.writeframes(raw)
    return path


def read(given, sampling_rate=None):
    return audio.look(given, 0, sampling_rate, RATE).read(RATE)


@pytest.mark.parametrize(("width", "error"), [(1, 1e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_of_every_width(tmp_path, width, error, channels):
    path = written(tmp_path / "tone.wav", TONE, width=width, channels=channels)
    samples = read(path)
    assert samples.dtype == np.float32
    assert np.abs(samples - TONE).max() < error


@pytest.mark.parametrize("rate", [8000, 11025, 44100])
def test_other_rates_are_the_same_sound(tmp_path, rate):
    tone = 0.5 * np.sin(2 * np.pi * 220 * np.arange(rate // 2) / rate)
    samples = read(written(tmp_path / "tone.wav", tone, rate))
    assert abs(len(samples) - len(TONE)) <= 1
    inner = slice(500, -500)
    assert np.abs(samples[: len(TONE)][inner] - TONE[: len(samples)][inner]).max() < 2e-2


@pytest.mark.parametrize("rate", [8000, 11025, 24000, 44100, 48000, 44101, 768_000, 100])
@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_other_rates_are_as_scipy_converts_them(rate, seconds):
    signal = pytest.importorskip("scipy.signal")
    sound = np.random.default_rng(0).standard_normal(int(rate * seconds) or 1, np.float32)
    common = math.gcd(rate, 16000)
    expected = signal.resample_poly(sound, 16000 // common, rate // common)
    np.testing.assert_allclose(audio.resampled(sound, rate, 16000), expected, atol=3e-6)


def test_arrays_tensors_and_mappings_are_one_recording():
    whole = np.round(TONE * 32768).astype(np.int16)
    for given in (
        TONE,
        TONE.astype(np.float64),
        torch.tensor(TONE),
        TONE.tolist(),
        TONE[None],
        whole,
        {"array": TONE, "sampling_rate": RATE},
        {"raw": TONE, "sampling_rate": RATE},
    ):
        assert np.abs(read(given) - TONE).max() < 1e-4
    assert abs(len(read(TONE, 8000)) - 2 * len(TONE)) <= 2


def test_a_list_of_numbers_is_one_recording_and_of_arrays_several():
    assert not audio.several([0.1, 0.2])
    assert audio.several([TONE, "a.wav"])
    assert audio.several((Path("a"), Path("b")))
    assert audio.several(["a.wav"])


def _broken(folder):
    (folder / "noise.wav").write_bytes(b"RIFF....WAVEnothing here")
    (folder / "text.mp3").write_text("not a recording")
    (folder / "text.raw").write_text("not a recording")  # soundfile goes by this name: TypeError
    (folder / "empty.wav").write_bytes(b"")
    written(folder / "silent.wav", [])
    written(folder / "fine.wav", TONE)


@pytest.mark.parametrize(
    ("name", "rate", "message"),
    [
        ("missing.wav", None, "no such file.*check the path"),
        (".", None, "a directory"),
        ("empty.wav", None, "an empty file"),
        ("silent.wav", None, "has no samples"),
        ("noise.wav", None, "noise.wav.*(soundfile|WAV)"),
        ("text.mp3", None, "text.mp3.*(soundfile|WAV)"),
        ("text.raw", None, "text.raw.*(soundfile|WAV)"),
        ("fine.wav", 8000, "16000 samples per second; got sampling_rate=8000"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, rate, message):
    _broken(tmp_path)
    with pytest.raises(AudioError, match=message):
        audio.look(tmp_path / name, 0, rate, RATE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros(0), "empty array"),
        (np.zeros((2, 100)), "one channel"),
        (np.array(["a"]), "numbers as samples"),
        ([[0.1], [0.1, 0.2]], "one list of samples"),
        (object(), "a path or samples"),
        ({"sampling_rate": 16000}, "without samples"),
        (np.array([0.0, np.nan]), "NaN or infinity"),
        (np.array([0.0, 12345.0]), "divide by 32768"),
    ],
)
def test_what_is_no_recording_is_refused(given, message):
    with pytest.raises(AudioError, match=message):
        read(given)


@pytest.mark.parametrize("given", [[], b"abc", 5, None])
def test_no_recording_at_all(given):
    with pytest.raises(AudioError, match="no recording"):
        audio.several(given)


def test_a_file_that_breaks_off_is_heard_up_to_there(tmp_path):
    path = written(tmp_path / "tone.wav", TONE)
    path.write_bytes(path.read_bytes()[:-1001])
    samples = read(path)
    assert len(samples) == len(TONE) - 501
    assert np.abs(samples - TONE[: len(samples)]).max() < 1e-4


def test_formats_beyond_wav_need_soundfile(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    path = tmp_path / "talk.flac"
    path.write_bytes(b"fLaC and more")
    with pytest.raises(AudioError, match=r"needs? soundfile.*outrider\[audio\]"):
        audio.look(path, 0, None, RATE)


def test_flac_by_soundfile(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / "tone.flac"
    soundfile.write(str(path), np.stack([TONE, TONE], 1), RATE)
    assert np.abs(read(path) - TONE).max() < 1e-3
