"""The day on a card: checks, then measures, in stages of worth; each is bounded and resumable.

    python benchmarks/gpu_day.py --out DIR                     # half an hour; run it again to go on
    python benchmarks/gpu_day.py --out DIR --limit-s 560       # in pieces of ten minutes
    python benchmarks/gpu_day.py --out DIR --stage environment --stage correctness
    python benchmarks/gpu_day.py --out DIR --rehearse          # all of it, tiny, on a CPU

DIR gets one JSON file per stage, `summary.md` and `log.txt`: ten files of at most 16 MiB.
A stage that is there is skipped and a killed one goes on where it was. docs/gpu.md says more.

Exit code: 0 all there, 1 something failed, 3 nothing failed but time ran out (run it again).
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from gpu_stages import RESTART, STAGES, Stage, summary
from gpu_stages.record import DamagedFile, Record

FAILED, UNFINISHED = 1, 3
LOG_BYTES = 15 << 20
LAB = Path(__file__).resolve().parent.parent / "packages" / "outrider-lab" / "src"
WHOLE = 30 * 60  #: seconds of one command unless --limit-s says otherwise


def records(out: Path, stages: Sequence[Stage]) -> dict[str, Record | DamagedFile]:
    """What is on file, by stage."""
    found: dict[str, Record | DamagedFile] = {}
    for stage in stages:
        try:
            found[stage.name] = Record.read(out / f"{stage.name}.json")
        except DamagedFile as error:
            found[stage.name] = error
    return found


def verdict(found: dict[str, Record | DamagedFile]) -> int:
    """The exit code for these records."""
    if any(isinstance(record, DamagedFile) or record.failures for record in found.values()):
        return FAILED
    whole = all(isinstance(record, Record) and record.complete for record in found.values())
    return 0 if whole else UNFINISHED


def launch(given: argparse.Namespace, stages: Sequence[Stage], deadline: float) -> int:
    """One worker process from start to end; its exit code."""
    command = [sys.executable, __file__, "--out", str(given.out), "--worker", str(deadline)]
    command += [part for stage in stages for part in ("--stage", stage.name)]
    environment = dict(os.environ, PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
    path = filter(None, [str(LAB), os.environ.get("PYTHONPATH")])  # nothing need be installed
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment.setdefault("HF_HUB_OFFLINE", "1")
    for name, folder in (("--model", given.model), ("--draft", given.draft)):
        command += [name, str(folder)] if folder else []
    if given.rehearse:
        command.append("--rehearse")
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (given.out / "log.txt").open("ab") as log:
        worker = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        try:
            code = worker.wait(max(deadline - time.time(), 0) + 20)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            end_group(worker)
    return code


def end_group(worker: "subprocess.Popen[bytes]") -> None:
    """End the worker and whatever it started (a test run, a checker)."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


def shorten(log: Path) -> None:
    """Cut a long log in the middle: it has to be small enough to bring home."""
    size = log.stat().st_size
    if size > LOG_BYTES:
        text = log.read_bytes()
        half = LOG_BYTES // 2
        log.write_bytes(text[:half] + b"\n... cut ...\n" + text[-half:])


def conduct(given: argparse.Namespace, stages: Sequence[Stage]) -> None:
    """Workers until all is done or the time is up. One that dies is replaced."""
    deadline = time.time() + given.limit_s
    before = -1
    while time.time() < deadline:
        code = launch(given, stages, deadline)
        if code == 0:
            return
        known = [r for r in records(given.out, stages).values() if isinstance(r, Record)]
        now, at = time.time(), []
        for record in known:
            at += [f"{record.path.stem}: {key}" for key in record.interrupted(now)]
        if code != RESTART:
            print(f"a worker ended with code {code}; it was at: {', '.join(at) or 'no item'}")
        tries = sum(record.attempts(key) for record in known for key in record.items)
        if tries == before:
            print("It tried nothing, so another one would not, either; log.txt says why.")
            return
        before = tries


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages, print the table, return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--stage", action="append", choices=names, help="only these (repeatable)")
    parser.add_argument("--limit-s", type=float, default=WHOLE, help="seconds of this command")
    parser.add_argument("--model", type=Path, help="a trained model's folder; default: shipped")
    parser.add_argument("--draft", type=Path, help="its draft model or head")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--retry", action="store_true", help="try failed items anew")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    stages = [stage for stage in STAGES if given.stage is None or stage.name in given.stage]
    if given.worker is not None:
        from gpu_stages import worker

        asked = given.rehearse, os.getppid(), given.model, given.draft
        return worker.main(stages, given.out, given.worker, *asked)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.retry:
        for record in records(given.out, stages).values():
            if isinstance(record, Record):
                record.forget_failures()
    conduct(given, stages)
    shorten(given.out / "log.txt")
    every = records(given.out, STAGES)
    text = summary.text(every)
    (given.out / "summary.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return verdict({stage.name: every[stage.name] for stage in stages})


if __name__ == "__main__":
    sys.exit(main())
