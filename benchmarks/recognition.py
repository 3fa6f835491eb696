"""Word errors and equality of transcripts on recorded speech, against transformers' own.

    OUTRIDER_MODELS=models python -m benchmarks.recognition --arm plain --arm transformers
    python -m benchmarks.recognition --models models --dtype bfloat16 --arm plain --arm 0,5

The folder holds `whisper-base` and `speech`, into which Debian's asterisk-core-sounds-en and -wav
were unpacked: 34 windows of at most 28.5 s (`training.whisper_recordings`). Every arm hears all
windows in turn; the texts of the first are what the others are compared with.

    plain           transcribe, one window after another
    together        the same, eight windows at once
    files           the same windows as WAV files of one call, side by side
    default         transcribe with timestamps and fallback as it comes
    transformers    generate of transformers, without timestamps
    beams           transcribe with five beams
    beams copied    the same, copying from the first arm's text with every tenth word wrong
    transformers beams   generate of transformers with five beams
    reference       transcribe, copying from the first arm's text with every tenth word wrong
    0,5             layers of the model as its draft
    PATH            a draft folder
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from training.whisper_recordings import Recording, asterisk, joined
from training.whisper_speech import RATE

import outrider
from outrider.text.speculator import Speculator
from outrider_lab.papers.score import word_errors

GREEDY: dict[str, Any] = {"language": "en", "temperature": 0, "timestamps": False}
Heard = tuple[list[str], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=os.environ.get("OUTRIDER_MODELS"))
    parser.add_argument("--model", default="whisper-base")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--count", type=int, help="only the first so many windows")
    parser.add_argument("--arm", action="append")
    asked = parser.parse_args()
    if asked.models is None:
        parser.error("say where the models are: --models or OUTRIDER_MODELS")
    windows = list(joined(asterisk(Path(asked.models) / "speech", "en")))[: asked.count]
    rate = word_errors("en")
    first: list[str] = []
    for arm in asked.arm or ["plain", "transformers"]:
        started = time.thread_time()
        texts, told = ARMS.get(arm, drafted)(
            Path(asked.models) / asked.model, asked, windows, arm, first
        )
        spent = time.thread_time() - started
        first = first or texts
        same = sum(a == b for a, b in zip(first, texts, strict=True))
        errors = rate(texts, [window.text for window in windows])
        more = ", ".join(f"{name} {value:.2f}" for name, value in told.items())
        print(
            f"{arm:14s} {asked.dtype}: WER {100 * errors:.2f} %, {same} of {len(texts)} texts as "
            f"the first arm's; {spent:.1f} s of CPU ({more})",
            flush=True,
        )
        for number, (a, b) in enumerate(zip(first, texts, strict=True)):
            if a != b:
                print(f"  window {number}:\n    {a}\n    {b}", flush=True)


def loaded(path: Path, asked: Any, **more: Any) -> Speculator:
    return outrider.load(path, dtype=asked.dtype, threads=1, **more)


def told(transcripts: list[Any]) -> Heard:
    parts = {"encoder s": "encoder_ms", "decoder s": "decoder_ms"}
    sums = {
        name: sum(getattr(one.stats, part) for one in transcripts) / 1e3
        for name, part in parts.items()
    }
    tokens = sum(one.stats.decoded.new_tokens for one in transcripts)
    steps = sum(one.stats.decoded.steps for one in transcripts)
    return [one.text for one in transcripts], sums | {"tokens a step": tokens / steps}


def plain(path: Path, asked: Any, windows: list[Recording], arm: str, first: list[str]) -> Heard:
    ear = loaded(path, asked, drafter="none")
    return told([ear.transcribe(window.samples, **GREEDY) for window in windows])


def together(path: Path, asked: Any, windows: list[Recording], arm: str, first: list[str]) -> Heard:
    ear = loaded(path, asked, drafter="none")
    return told(ear.transcribe([window.samples for window in windows], **GREEDY))


def files(path: Path, asked: Any, windows: list[Recording], arm: str, first: list[str]) -> Heard:
    import wave

    ear = loaded(path, asked, drafter="none")
    with TemporaryDirectory() as folder:
        names = []
        for number, window in enumerate(windows):
            names.append(str(Path(folder) / f"{number}.wav"))
            with wave.open(names[-1], "wb") as sound:
                sound.setnchannels(1)
                sound.setsampwidth(4)
                sound.setframerate(RATE)
                scaled = window.samples.astype("float64") * (2**31 - 1)
                sound.writeframes(scaled.astype("<i4").tobytes())
        return told(ear.transcribe(names, **GREEDY))


def default(path: Path, asked: Any, windows: list[Recording], arm: str, first: list[str]) -> Heard:
    ear = loaded(path, asked, drafter="none")
    return told([ear.transcribe(window.samples, language="en") for window in windows])


def beams(path: Path, asked: Any, windows: list[Recording], arm: str, first: list[str]) -> Heard:
    ear = loaded(path, asked, drafter="reference_lookup" if "copied" in arm else "none")
    texts = [spoilt(text) for text in first] if "copied" in arm else [None] * len(windows)
    return told(
        [
            ear.transcribe(window.samples, reference=text, beam_size=5, **GREEDY)
            for window, text in zip(windows, texts, strict=True)
        ]
    )


def transformers(
    path: Path, asked: Any, windows: list[Recording], arm: str, first: list[str]
) -> Heard:
    more = {"num_beams": 5} if "beams" in arm else {}
    ear = loaded(path, asked, drafter="none")
    model, extractor = ear.hearing.model, ear.hearing.extractor
    texts = []
    for window in windows:
        made = extractor(window.samples, sampling_rate=RATE, return_tensors="pt")
        features = made["input_features"].to(model.dtype)
        with torch.inference_mode():
            out = model.generate(features, language="en", task="transcribe", **more)
        texts.append(ear.tokenizer.decode(out[0], skip_special_tokens=True).strip())
    return texts, {}


def spoilt(text: str) -> str:
    """The text with every tenth word wrong."""
    return " ".join("something" if at % 10 == 9 else word for at, word in enumerate(text.split()))


def reference(
    path: Path, asked: Any, windows: list[Recording], arm: str, first: list[str]
) -> Heard:
    ear = loaded(path, asked, drafter="reference_lookup")
    return told(
        [
            ear.transcribe(window.samples, reference=spoilt(text), **GREEDY)
            for window, text in zip(windows, first, strict=True)
        ]
    )


def drafted(path: Path, asked: Any, windows: list[Recording], arm: str, first: list[str]) -> Heard:
    layers = arm.replace(",", "").isdigit()
    more = {"draft_layers": [int(n) for n in arm.split(",")]} if layers else {"draft": arm}
    ear = loaded(path, asked, num_speculative_tokens=3, **more)
    return told([ear.transcribe(window.samples, **GREEDY) for window in windows])


ARMS: dict[str, Callable[..., Heard]] = {
    "plain": plain,
    "together": together,
    "files": files,
    "default": default,
    "beams": beams,
    "beams copied": beams,
    "transformers": transformers,
    "transformers beams": transformers,
    "reference": reference,
}

if __name__ == "__main__":
    main()
