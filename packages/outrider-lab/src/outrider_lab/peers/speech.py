"""Recordings by the same Whisper, engine by engine in turn: time for a minute, word error rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from outrider.cli.console import Show
from outrider.speech.audio import look
from outrider_lab.bench import intervals
from outrider_lab.certify.report import Row
from outrider_lab.papers.record import Store
from outrider_lab.papers.score import word_errors
from outrider_lab.peers.engines import FASTER_WHISPER, TRANSFORMERS, EngineGone, EngineProcess
from outrider_lab.peers.text import Arm, started
from outrider_lab.recordings import SpokenText

RATE = 16_000


@dataclass(frozen=True)
class SpeechRequest:
    """What is measured of one Whisper.

    model   its folder; `converted` the same in CTranslate2's format
    types   of CTranslate2
    """

    model: Path
    draft: str | None
    converted: Path | None
    own: str
    peer: str
    engines: tuple[str, ...]
    types: tuple[str, ...] = ("int8", "float32")
    beams: tuple[int, ...] = (1, 5)
    cores: tuple[int, ...] = (0,)
    dtype: str = "int8"


@dataclass
class SpeechFigures:
    """Rows of every arm by recording: cpu, wall, text, memory."""

    minutes: list[float]
    meant: list[str]
    rows: dict[str, list[Row]]
    left_out: dict[str, str]


def arms(asked: SpeechRequest) -> list[Arm]:
    """Every way that the engines which are there can transcribe."""
    usual: dict[str, Any] = {
        "model": str(asked.model),
        "threads": max(len(asked.cores), 1),
        "cores": list(asked.cores),
    }
    mine = usual | {"engine": "outrider, speech", "dtype": asked.dtype}
    mine |= {"draft": asked.draft} if asked.draft else {}
    found = []
    for beams in asked.beams:
        how = "greedy" if beams == 1 else f"{beams} beams"
        ask: dict[str, Any] = {"beams": beams}
        name = f"outrider {asked.dtype}"
        found.append(Arm(f"{name}, plain, {how}", asked.own, mine, ask | {"way": "plain"}))
        found.append(Arm(f"{name}, drafted, {how}", asked.own, mine, ask | {"way": "default"}))
        if FASTER_WHISPER.name in asked.engines and asked.converted is not None:
            words = usual | {"engine": FASTER_WHISPER.name, "model": str(asked.converted)}
            for kind in asked.types:
                arm = f"faster-whisper {kind}, {how}"
                found.append(Arm(arm, asked.peer, words | {"mode": kind}, ask))
        if TRANSFORMERS.name in asked.engines:
            words = usual | {"engine": "transformers, speech"}
            found.append(Arm(f"transformers float32, {how}", asked.own, words, ask))
    return found


def run(
    asked: SpeechRequest, recordings: Sequence[SpokenText], store: Store, progress: Show
) -> SpeechFigures:
    """Measure what the store does not have yet: recording by recording, arm by arm."""
    sounds = [look(one.file, 0, None, RATE).read(RATE) for one in recordings]
    minutes = [len(sound) / RATE / 60 for sound in sounds]
    found = SpeechFigures(minutes, [one.text for one in recordings], {}, {})
    processes: dict[str, EngineProcess] = {}
    title = asked.model.name
    try:
        with TemporaryDirectory() as folder:
            paths = [str(Path(folder) / f"{number}.npy") for number in range(len(sounds))]
            for path, sound in zip(paths, sounds, strict=True):
                np.save(path, sound)
            for arm in arms(asked):
                key = str(arm.words)
                try:
                    if key not in processes:
                        progress(f"{title}: {arm.name} starts", 0, 1)
                        processes[key] = started(arm)
                    processes[key].ask(path=paths[-1], **arm.ask)  # warm
                    found.rows[arm.name] = []
                except EngineGone as gone:
                    found.left_out[arm.name] = str(gone)
            here = [arm for arm in arms(asked) if arm.name in found.rows]
            for number, path in enumerate(paths):
                for place, arm in enumerate(here):
                    done = number * len(here) + place
                    progress(f"{title}: {arm.name}", done, len(paths) * len(here))
                    key = f"{title}: {arm.name}, {recordings[number].file.name}"
                    process = processes[str(arm.words)]
                    row = store.get(key, process.ask, path=path, **arm.ask)
                    found.rows[arm.name].append(row)
    finally:
        for process in processes.values():
            process.close()
    return found


def table(found: SpeechFigures, language: str = "en") -> list[Row]:
    """A row for each arm: seconds of processor time for a minute of sound, and word errors."""
    rate = word_errors(language)
    minutes = sum(found.minutes)
    rows: list[Row] = []
    for name, its in found.rows.items():
        plain = found.rows.get(name.replace("drafted", "plain"), its)
        same = sum(a["text"] == b["text"] for a, b in zip(its, plain, strict=True))
        how = name.rpartition(", ")[2]
        row: Row = {
            "engine": name,
            "CPU s a minute": sum(one["cpu"] for one in its) / minutes,
            "wall": sum(one["wall"] for one in its) / minutes,
            "peak MB": max(one["memory"] for one in its),
            "word errors, %": 100 * rate([one["text"] for one in its], found.meant),
            "texts as plain": f"{same} of {len(its)}",
        }
        other = found.rows.get(f"faster-whisper int8, {how}")
        if other is not None:
            ratio = intervals.quotient(
                [one["cpu"] for one in its], [one["cpu"] for one in other], intervals.LOG
            )
            row["of faster-whisper int8's CPU"] = f"{ratio.value:.2f} {ratio.text(2)}".rstrip()
        rows.append(row)
    return rows
