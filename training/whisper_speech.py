"""Synthetic speech that is not too clean: three synthesisers, many voices, rooms, telephones.

The programs are Debian's `espeak-ng`, `flite` and `pico2wave` (`libttspico-utils`, of the non-free
component: its voices are Apache-2.0 but come without their source). What they say is spoilt as
recordings are: other speeds and pitches, an echoing room, a telephone's band, hiss, level.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.signal import butter, fftconvolve, resample_poly, sosfilt

RATE = 16_000
Samples = NDArray[np.float32]

#: How often a language is spoken.
SHARES = {"en": 0.68, "fr": 0.24, "de": 0.08}

_PICO = {"en": ("en-US", "en-GB"), "fr": ("fr-FR",), "de": ("de-DE",)}
_FLITE = ("slt", "rms", "awb", "kal16")
_ESPEAK = {"en": ("en-us", "en-gb", "en-gb-scotland"), "fr": ("fr-fr", "fr-be"), "de": ("de",)}
_ESPEAK_VARIANTS = ("", "+m1", "+m3", "+m5", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5")


class Said(NamedTuple):
    """A sentence and when it begins and ends, in seconds."""

    text: str
    start: float
    end: float


class Window(NamedTuple):
    """At most 30 s of somebody speaking."""

    samples: Samples
    language: str
    said: list[Said]


class Voice(NamedTuple):
    """A synthesiser and its settings."""

    program: str
    name: str
    speed: int
    pitch: int


def windows(texts: dict[str, list[str]], seed: int) -> Iterator[Window]:
    """Windows without end: one voice, room and telephone each, sentences with pauses between."""
    dice = random.Random(seed)
    places = {language: dice.randrange(len(lines)) for language, lines in texts.items()}
    while True:
        language = dice.choices(list(SHARES), list(SHARES.values()))[0]
        voice = choose_voice(language, dice)
        # Most windows of a long recording are full; a command or a question is short.
        seconds = dice.uniform(22, 29) if dice.random() < 0.85 else dice.uniform(2, 18)
        # A voice of another size: speed and pitch together, in per cent.
        size = dice.randint(88, 112) if dice.random() < 0.6 else 100
        spoken: list[Samples] = []
        said: list[Said] = []
        while True:
            sentence = texts[language][places[language] % len(texts[language])]
            places[language] += 1
            sound = resample_poly(say(sentence, voice), 100, size)
            start = sum(map(len, spoken)) / RATE
            end = start + len(sound) / RATE
            if said and end > seconds:
                break
            pause = np.zeros(int(dice.uniform(0.1, 0.9) * RATE), np.float32)
            spoken += [sound, pause]
            said.append(Said(sentence, start, end))
        samples = np.concatenate(spoken)[: 30 * RATE]
        yield Window(spoil(samples, dice), language, said)


def choose_voice(language: str, dice: random.Random) -> Voice:
    """A voice; the more natural ones more often."""
    programs = {"pico2wave": 6, "espeak-ng": 2} | ({"flite": 5} if language == "en" else {})
    program = dice.choices(list(programs), list(programs.values()))[0]
    if program == "pico2wave":
        return Voice(
            program, dice.choice(_PICO[language]), dice.randint(80, 125), dice.randint(75, 130)
        )
    if program == "flite":
        return Voice(program, dice.choice(_FLITE), dice.randint(80, 125), dice.randint(80, 220))
    name = dice.choice(_ESPEAK[language]) + dice.choice(_ESPEAK_VARIANTS)
    return Voice(program, name, dice.randint(130, 190), dice.randint(25, 75))


def say(text: str, voice: Voice) -> Samples:
    """A sentence at 16 kHz."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run(_command(text, voice, file.name), check=True, capture_output=True)
        return read(Path(file.name))


def _command(text: str, voice: Voice, file: str) -> list[str]:
    program, name, speed, pitch = voice
    if program == "pico2wave":
        marked = f"<speed level='{speed}'><pitch level='{pitch}'>{text}</pitch></speed>"
        return [program, "-l", name, "-w", file, marked]
    if program == "flite":
        settings = [
            "--setf",
            f"duration_stretch={100 / speed}",
            "--setf",
            f"int_f0_target_mean={pitch}",
        ]
        return [program, "-voice", name, *settings, "-t", text, "-o", file]
    return [program, "-v", name, "-s", str(speed), "-p", str(pitch), "-w", file, text]


def read(file: Path) -> Samples:
    """A WAV file of one channel and 16 bits as float32 at 16 kHz."""
    with wave.open(str(file)) as sound:
        rate = sound.getframerate()
        samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16) / 32768
    if rate != RATE:
        step = int(np.gcd(rate, RATE))
        samples = resample_poly(samples, RATE // step, rate // step)
    return samples.astype(np.float32)


def spoil(samples: Samples, dice: random.Random) -> Samples:
    """What happens to a voice between a mouth and a file, each part of it some of the time."""
    noise = np.random.default_rng(dice.getrandbits(32))
    if dice.random() < 0.4:  # a room
        length = int(dice.uniform(0.05, 0.4) * RATE)
        echo = noise.standard_normal(length) * np.exp(-7 * np.arange(length) / length)
        echo *= dice.uniform(0.02, 0.15) / np.abs(echo).max()
        echo[0] = 1
        samples = fftconvolve(samples, echo)[: len(samples)]
    if dice.random() < 0.4:  # a colour: more or less of the high frequencies
        tilt = dice.uniform(-0.6, 0.6)
        samples = samples - tilt * np.concatenate([[0], samples[:-1]])
    if dice.random() < 0.6:  # a telephone
        band = butter(
            4, [dice.uniform(80, 300), dice.uniform(3000, 3900)], "band", fs=RATE, output="sos"
        )
        samples = sosfilt(band, samples)
        if dice.random() < 0.5:  # 8,000 samples a second: nothing at all above 4 kHz
            samples = resample_poly(resample_poly(samples, 1, 2), 2, 1)[: len(samples)]
    samples = samples / (np.abs(samples).max() + 1e-6) * dice.uniform(0.1, 0.95)
    if dice.random() < 0.6:  # hiss
        hiss = noise.standard_normal(len(samples))
        if dice.random() < 0.5:
            hiss = np.cumsum(hiss - hiss.mean())
            hiss -= np.convolve(hiss, np.ones(64) / 64, "same")
        level = samples.std() * 10 ** (-dice.uniform(20, 50) / 20)
        samples = samples + hiss / (hiss.std() + 1e-6) * level
    return np.clip(samples, -1, 1).astype(np.float32)
