"""Where and how a measurement was made: what stands beside every figure."""

import datetime
import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from outrider.models import calibrate
from outrider_lab.certify.report import Row


def environment() -> Row:
    """Machine and versions."""
    import torch

    return {
        "machine": platform.machine(),
        "processor": calibrate.cpu_name().split(":")[-1].strip(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        **{name: version(name) for name in ("outrider", "torch", "transformers", "numpy")},
    }


def command() -> str:
    """What this process was started with, as one would type it."""
    program = Path(sys.argv[0])
    name = "outrider" if program.name in ("outrider", "__main__.py") else program.name
    return shlex.join([name, *sys.argv[1:]])


def today() -> str:
    """The date, as in 2026-11-21."""
    return datetime.date.today().isoformat()
