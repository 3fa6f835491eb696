"""Recordings of people with their texts, to measure on: `python -m training.whisper_recordings`.

    python -m training.whisper_recordings --model whisper-base --speech speech \\
        --out work/whisper/real

    python -m training.whisper_recordings --speech speech --files FOLDER

`--speech` is a folder into which Debian's `pocketsphinx-testdata` (LibriVox, BSD-2) and
`asterisk-core-sounds-{en,fr}` with `-wav` (CC BY-SA 3.0) were unpacked. The target's own greedy
transcripts and laws are recorded, without and with timestamps; nothing is trained on them. The
second form writes the English windows as sounds and texts, which `outrider bench peers` reads.
"""

from __future__ import annotations

import argparse
import gzip
import re
import wave
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from training.whisper_attention import NAME
from training.whisper_laws import Row, Target, record
from training.whisper_speech import RATE, Samples, read

VOICES = {"en": "en_US_f_Allison", "fr": "fr_CA_f_June"}
SHORTEST = 8  # words of a prompt
LONGEST = 28.5  # seconds of a window
PAUSE = 0.4  # seconds between prompts


class Recording(NamedTuple):
    """A sound and what is said in it."""

    samples: Samples
    text: str


def librivox(speech: Path) -> Iterator[Recording]:
    """Five utterances of a reader."""
    folder = speech / "usr/share/pocketsphinx/test/data/librivox"
    for line in (folder / "transcription").read_text().splitlines():
        if found := re.match(r"<s> (.*) </s> \((.*)\)", line.strip()):
            yield Recording(read(folder / f"{found[2]}.wav"), found[1])


def asterisk(speech: Path, language: str) -> Iterator[Recording]:
    """Prompts of a telephone exchange, of eight words or more."""
    texts = f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-{language}.txt.gz"
    with gzip.open(speech / texts, "rt", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, text = line.strip().partition(":")
            file = speech / f"usr/share/asterisk/sounds/{VOICES[language]}/{name}.wav"
            plain = not re.search(r"[\[(]", text) and not name.startswith(";")
            if plain and len(text.split()) >= SHORTEST and file.exists():
                yield Recording(read(file), text.strip())


def joined(recordings: Iterable[Recording]) -> Iterator[Recording]:
    """Windows of up to 28.5 s, prompts with pauses between them."""
    sounds: list[Samples] = []
    texts: list[str] = []
    pause = np.zeros(int(PAUSE * RATE), np.float32)
    for samples, text in recordings:
        if len(samples) > LONGEST * RATE:
            continue
        if texts and sum(map(len, sounds)) + len(samples) + len(pause) > LONGEST * RATE:
            yield Recording(np.concatenate(sounds), " ".join(texts))
            sounds, texts = [], []
        sounds += [samples, pause]
        texts.append(text)
    if texts:
        yield Recording(np.concatenate(sounds), " ".join(texts))


def write(recordings: Iterable[Recording], folder: Path) -> None:
    """Each as a sound of 16 bits and a text beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(recordings):
        samples = (one.samples.clip(-1, 1) * 32767).round().astype("<i2")
        with wave.open(str(folder / f"{number:02}.wav"), "wb") as out:
            out.setparams((1, 2, RATE, 0, "NONE", ""))
            out.writeframes(samples.tobytes())
        (folder / f"{number:02}.txt").write_text(one.text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="a Whisper's folder")
    parser.add_argument("--speech", type=Path, required=True, help="the unpacked packages")
    parser.add_argument("--out", type=Path, help="of what the model says")
    parser.add_argument("--files", type=Path, help="write windows there, and nothing else")
    args = parser.parse_args()
    if args.files is not None:
        write(joined(asterisk(args.speech, "en")), args.files)
        return
    if args.model is None or args.out is None:
        parser.error("give --model and --out, or --files")
    args.out.mkdir(parents=True, exist_ok=True)
    model = WhisperForConditionalGeneration.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation=NAME
    ).eval()
    extract = WhisperFeatureExtractor.from_pretrained(args.model)
    target = Target(model)
    sets = {
        "librivox-en": list(librivox(args.speech)),
        "asterisk-en": list(joined(asterisk(args.speech, "en"))),
        "asterisk-fr": list(joined(asterisk(args.speech, "fr"))),
    }
    for name, recordings in sets.items():
        for first in range(0, len(recordings), 8):
            part = recordings[first : first + 8]
            features = extract(
                [r.samples for r in part], sampling_rate=RATE, return_tensors="pt"
            ).input_features
            rows = [Row(target.prompt(name[-2:], ts), ts, 0.0) for ts in (False, True)]
            out = args.out / f"{name}-{first // 8:02}.safetensors"
            tokens = record(target, features, [rows] * len(part), out)
            print(f"{out.name}: {len(part)} windows, {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
