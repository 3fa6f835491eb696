"""The experiments of a book, each its own command in a process of its own.

Those that measure no times run first, two at once with a thread each; those with times run one
after the other, with nothing beside them. A run's results lie in a folder of its own below the
book's; `runs.json` there says what was run and how it ended. What has ended well is not run again;
what was stopped goes on where it stopped, as the experiments do by themselves.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from outrider.errors import ConfigurationError
from outrider_lab.bench import machine
from outrider_lab.book.plan import BookRun
from outrider_lab.certify.report import Row
from outrider_lab.papers.record import folder

RECORD = "runs.json"
LOG = "log.txt"
LANES = 2  #: runs without times at once


class Record:
    """What was run and how it ended, kept after every run."""

    def __init__(self, out: Path, quick: bool) -> None:
        self.path = folder(out) / RECORD
        self.document: Row = {"book": "quick" if quick else "full", "runs": {}, "absent": {}}
        if self.path.exists():
            before = json.loads(self.path.read_text("utf-8"))
            if before["book"] != self.document["book"]:
                raise ConfigurationError(
                    f"{str(out)!r} holds the {before['book']} book; got --"
                    f"{self.document['book']}; give another --out"
                )
            self.document = before

    def done(self, run: BookRun) -> bool:
        """Whether this very command has ended well."""
        row = self.document["runs"].get(run.name, {})
        return (row.get("words"), row.get("code")) == (run.words, 0)

    def keep(self, run: BookRun, code: int, seconds: float, said: str) -> None:
        """How a run ended; what it `said` last, if it ended badly."""
        row = {"words": run.words, "code": code, "seconds": seconds, "date": machine.today()}
        self.document["runs"][run.name] = row | ({"said": said} if code else {})
        self.write()

    def write(self) -> None:
        """As it is now."""
        text = json.dumps(self.document, indent=1) + "\n"
        self.path.write_text(text, encoding="utf-8")


def start(run: BookRun, log: Path) -> int:
    """The command in a process of its own, which ends with this one; its words go to its log."""
    set_ = {"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ)
    if not run.timed:
        set_ |= {"OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "outrider_lab.book.child", str(os.getpid()), *run.words]
        done = subprocess.run(command, stdout=out, stderr=out, env=set_)
    return done.returncode


def run_all(
    runs: Sequence[BookRun],
    record: Record,
    say: Callable[[str], None],
    start: Callable[[BookRun, Path], int] = start,
) -> list[str]:
    """Run what has not ended well yet; the names of those that ended badly.

    One that fails does not stop the others.
    """
    left = []
    for run in runs:
        if record.done(run):
            say(f"{run.name}: done before")
        else:
            left.append(run)
    began, ended, failed = time.monotonic(), 0, []

    def tried(run: BookRun) -> tuple[int, float]:
        log = folder(record.path.parent / run.name) / LOG
        started = time.monotonic()
        return start(run, log), time.monotonic() - started

    def told(run: BookRun, code: int, seconds: float) -> None:
        nonlocal ended
        ended += 1
        log = record.path.parent / run.name / LOG
        last = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
        record.keep(run, code, seconds, *last or [""])
        how = "done" if code == 0 else f"failed, see {log},"
        whole = time.monotonic() - began
        say(f"    {run.name}: {how} in {seconds:.0f} s; {ended} of {len(left)} in {whole:.0f} s")
        if code:
            failed.append(run.name)

    for some, lanes in (
        ([r for r in left if not r.timed], LANES),
        ([r for r in left if r.timed], 1),
    ):
        waiting, going = list(some), dict[Future[tuple[int, float]], BookRun]()
        with ThreadPoolExecutor(lanes) as pool:
            while waiting or going:
                while waiting and len(going) < lanes:
                    run = waiting.pop(0)
                    say(f"{run.name}: outrider {' '.join(run.words)}")
                    going[pool.submit(tried, run)] = run
                for future in wait(going, return_when=FIRST_COMPLETED).done:
                    told(going.pop(future), *future.result())
    return failed
