"""WAV headers that are not so, files of all kinds: read by what is there, or one clear error."""

import json
import struct
import wave

import numpy as np
import pytest
import whispers
from test_transcribe_command import BRIEF, run

from outrider.errors import AudioError
from outrider.speech import audio

RATE = 16000
TONE = (8000 * np.sin(2 * np.pi * 220 * np.arange(RATE // 2) / RATE)).astype("<i2")
RAW = TONE.tobytes()
LIST = b"LIST" + struct.pack("<I", 4) + b"INFO"


def wav(path, size=None, rate=RATE, body=RAW, channels=1, bits=16, kind=1, ahead=b""):
    """A WAV file whose header says what it is told to say."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * block % 2**32, block, bits)
    size = len(body) if size is None else size
    path.write_bytes(
        b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", 16) + form
        + ahead + b"data" + struct.pack("<I", size) + body
    )  # fmt: skip
    return path


def read(path):
    return audio.look(path, 0, None, RATE).read(RATE)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFFFDB, 0, 10**6])
@pytest.mark.parametrize("ahead", [b"", LIST])
def test_a_length_that_is_not_so_is_what_is_there(tmp_path, size, ahead):
    path = wav(tmp_path / "a.wav", size, ahead=ahead)
    assert audio.look(path, 0, None, RATE).seconds == 0.5
    assert np.array_equal(read(path), TONE / np.float32(32768))


def test_a_length_that_is_less_ends_the_sound(tmp_path):
    path = wav(tmp_path / "a.wav", 2000, body=TONE.tobytes()[:2000] + LIST)
    assert len(read(path)) == 1000


def test_no_samples_ahead_of_another_part_are_none(tmp_path):
    with pytest.raises(AudioError, match="no samples"):
        read(wav(tmp_path / "a.wav", 0, body=LIST))


@pytest.mark.parametrize("rate", [0, 1, 2**32 - 1])
def test_a_rate_that_nothing_has_is_an_error_of_the_file(tmp_path, rate):
    with pytest.raises(AudioError, match=r"samples per second; got"):
        read(wav(tmp_path / "a.wav", rate=rate))


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 96000, 192000])
@pytest.mark.parametrize("bits", [8, 24])
def test_rates_and_widths_are_the_same_length(tmp_path, rate, bits):
    body = bytes(rate // 4 * bits // 8)
    path = wav(tmp_path / "a.wav", 0xFFFFFFFF, rate, body, bits=bits)
    assert abs(len(read(path)) - RATE // 4) <= 1


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"), ("WAV", "FLOAT")],
)
def test_other_formats_are_soundfile_s(tmp_path, kind, subtype):
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / "a.wav"  # the name says nothing
    tone = np.stack([TONE, TONE], 1) / 32768
    try:
        soundfile.write(str(path), tone, RATE, subtype, format=kind)
    except soundfile.LibsndfileError:
        pytest.skip(f"this soundfile writes no {kind}")
    samples = read(path)
    assert abs(len(samples) - len(TONE)) < 2000
    assert np.abs(samples).max() == pytest.approx(8000 / 32768, rel=0.2)


def headed(*form):
    """A WAV file of eight bytes, with this format."""
    head = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0" + struct.pack("<HHIIHH", *form)
    return head + b"data\x08\0\0\0abcdefgh"


BAD = {
    "text": b"this is no sound\n" * 20,
    "empty": b"",
    "header": b"RIFF\0\0\0\0WAVE",
    "half": b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0",
    "loop": b"RIFF\0\0\0\0WAVE" + b"JUNK\0\0\0\0" * 500,
    "m4a": b"\0\0\0\x20ftypM4A \0\0\0\0" + bytes(200),
    "channels": headed(1, 0, 1, 1, 0, 16),
    "wide": headed(1, 1, 8000, 1, 8, 64),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_recording_is_an_audio_error(tmp_path, name):
    path = tmp_path / f"{name}.wav"
    path.write_bytes(BAD[name])
    with pytest.raises(AudioError, match=name):
        read(path)


def test_not_a_number_is_none(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / "a.wav"
    soundfile.write(str(path), np.full(100, np.nan, np.float32), RATE, "FLOAT")
    with pytest.raises(AudioError, match="NaN"):
        read(path)


def test_the_other_files_of_a_command_are_transcribed(tmp_path, capsys, monkeypatch):
    model, folder = whispers.whisper(), tmp_path / "whisper"
    model.generation_config.max_length = 12
    model.save_pretrained(folder)
    whispers.tokenizer().save_pretrained(folder)
    whispers.extractor().save_pretrained(folder)
    bad = [wav(tmp_path / "zero.wav", rate=0)]
    for name, data in BAD.items():
        bad.append(tmp_path / f"{name}.wav")
        bad[-1].write_bytes(data)
    good = wav(tmp_path / "good.wav", 0xFFFFFFFF)
    files = [bad[0], good, *bad[1:]]
    out = tmp_path / "out"
    asked = (*files, "-m", folder, *BRIEF, "-f", "json", "-o", out)
    code, _, told = run(capsys, monkeypatch, *asked)
    assert code == 1
    assert json.loads((out / "good.json").read_text())
    assert f"{len(bad)} of {len(files)} recordings failed" in told
    for path in bad:
        assert f"failed: {path}" in told
    with wave.open(str(good), "rb") as sound:
        assert sound.getframerate() == RATE
