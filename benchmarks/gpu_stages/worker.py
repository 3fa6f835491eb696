"""The process that does the work: item after item, until the time is up or the device is lost."""

import faulthandler
import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_stages import RESTART, Stage
from gpu_stages.plan import Failed, Item
from gpu_stages.record import DamagedFile, Record

SET_UP = "set-up"  #: stands for a stage whose items could not even be listed


def bind_to_parent() -> None:
    """End this process when the one that started it ends, so that nobody writes beside a second
    command (Linux; elsewhere the check between items has to do)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)
    except (OSError, AttributeError):
        pass


def lost(error: BaseException) -> bool:
    """Whether an error has taken the device with it: every later call would fail, too."""
    text = f"{type(error).__name__}: {error}"
    return "CUDA error" in text or "AcceleratorError" in text or "device-side assert" in text


def attempt(record: Record, item: Item, left: float) -> bool:
    """Run one item; whether the process may go on."""
    record.start(item.key, item.seconds)
    print(f"[{record.path.stem}] {item.key} ...", flush=True)
    faulthandler.dump_traceback_later(min(item.seconds, left), exit=True)
    start = time.perf_counter()
    result: dict[str, Any] | None = None
    problem: BaseException | None = None
    try:
        result = item.run()
    except (Exception, SystemExit) as error:  # a script's own refusal must not end the day either
        problem = error
        result = error.result if isinstance(error, Failed) else None
        traceback.print_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.perf_counter() - start
    why = "" if problem is None else f"{type(problem).__name__}: {problem}"[:2000]
    record.end(item.key, seconds, result, why)
    print(f"[{record.path.stem}] {item.key}: {why or 'done'} ({seconds:.1f} s)", flush=True)
    return problem is None or not lost(problem)


def work(
    stage: Stage,
    path: Path,
    items: Callable[[], Sequence[Item]],
    *,
    deadline: float,
    rehearse: bool = False,
    going: Callable[[], bool] = lambda: True,
) -> bool:
    """One stage: no item is begun behind its bound, and none outlasts the deadline. A stage that
    has ended is left alone. Returns whether the process may go on.

    Raises DamagedFile for a result file that cannot be read.
    """
    record = Record.read(path)
    if record.planned and record.rehearsal != rehearse:
        kind = "a rehearsal" if record.rehearsal else "a run on a card"
        raise DamagedFile(f"{path} is of {kind}; give another --out")
    record.rehearsal = rehearse
    if record.ended:
        print(f"[{stage.name}] is there already", flush=True)
        return True
    until = min(deadline, record.enter(deadline, time.time()) + stage.seconds)
    if time.time() >= until:
        return True
    try:
        every = list(items())
    except Exception as error:  # nothing of this stage can run; the next may
        traceback.print_exc()
        record.planned = [SET_UP]
        record.start(SET_UP, 0.0)
        record.end(SET_UP, 0.0, None, f"{type(error).__name__}: {error}"[:2000])
        return not lost(error)
    by_key = {item.key: item for item in every}
    for key in record.plan(list(by_key)):
        if time.time() >= until or not going():
            break
        if not attempt(record, by_key[key], deadline - time.time()):
            return False
        gc.collect()
    record.write()
    return True


def main(
    stages: Sequence[Stage], out: Path, deadline: float, rehearse: bool, parent: int,
    model: Path | None = None, draft: Path | None = None,
) -> int:  # fmt: skip
    """All stages in turn; the exit code says whether another process should go on."""
    bind_to_parent()
    print(f"worker {os.getpid()}", flush=True)
    card: list[Any] = []

    def items(stage: Stage) -> Sequence[Item]:
        if not card:
            from gpu_stages.card import Card

            card.append(Card(rehearse, model, draft))
        found: Sequence[Item] = import_module(f"gpu_stages.{stage.name}").items(card[0])
        return found

    for stage in stages:
        try:
            going = work(
                stage, out / f"{stage.name}.json", lambda stage=stage: items(stage),
                deadline=deadline, rehearse=rehearse, going=lambda: os.getppid() == parent,
            )  # fmt: skip
        except DamagedFile as error:
            print(f"[{stage.name}] {error}", flush=True)
            continue
        if not going:
            return RESTART
    return 0
