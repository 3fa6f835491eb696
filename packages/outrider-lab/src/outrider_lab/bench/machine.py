"""Where and how a measurement was made: what stands beside every figure."""

import datetime
import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models import isa
from outrider_lab.certify.report import Row

if TYPE_CHECKING:
    from outrider.text.speculator import Speculator


def environment() -> Row:
    """Machine and versions."""
    import torch

    return {
        "machine": platform.machine(),
        "processor": isa.processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        **{name: version(name) for name in ("outrider", "torch", "transformers", "numpy")},
    }


def load_to_measure(*models: Any, **options: Any) -> "Speculator":
    """`outrider.load` for what measures: it waits for kernels that are being compiled, as every
    later start has them."""
    from outrider.loading import load
    from outrider.models.cpu_kernels import build

    build.be_patient()
    return load(*models, **options)


def command() -> str:
    """What this process was started with, as one would type it."""
    program = Path(sys.argv[0])
    name = "outrider" if program.name in ("outrider", "__main__.py") else program.name
    return shlex.join([name, *sys.argv[1:]])


def today() -> str:
    """The date, as in 2026-11-21."""
    return datetime.date.today().isoformat()
