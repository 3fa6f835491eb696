"""Programs that a stage starts: their end is kept, and they never outlast their time."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_stages.card import ROOT
from gpu_stages.plan import Failed

TAIL = 6000  #: characters of output that a result keeps; log.txt has the rest


def command(
    argv: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a program in the repository's root: {command, code, tail}.

    Raises Failed if it takes longer than `seconds`.
    """
    told: dict[str, Any] = {"command": " ".join(argv)}
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=environment, timeout=seconds, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        print(text)
        raise Failed(f"took longer than {seconds:g} s", told | {"tail": text[-TAIL:]}) from error
    print(done.stdout)
    return told | {"code": done.returncode, "tail": done.stdout[-TAIL:]}
