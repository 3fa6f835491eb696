"""Kernels have the same bits on every processor: those of `kernel_digests.txt`.

A seeded text depends on them, so the digests change with a version that says so alone. To write
them anew: `python tests/models/test_lane_kernels.py`.
"""

import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from outrider.models import isa
from outrider.models.cpu_kernels import build

HERE, NATIVE = Path(__file__).parent, Path(build.__file__).parent
DIGESTS = HERE / "kernel_digests.txt"
KERNELS = ("thread_pool.c", "attend.c", "attend_tiles.c", "kernels.c", "cross.c", "int8.c")
#: By level: its family, a compiler for it elsewhere, and what runs its programs there.
LEVELS = {
    "avx2": ("x86_64", "x86_64-linux-gnu-gcc", None),  # an emulator would do, but costs minutes
    "avx512": ("x86_64", "x86_64-linux-gnu-gcc", None),
    "neon": ("aarch64", "aarch64-linux-gnu-gcc", "qemu-aarch64"),
}


def tools(name):
    """A compiler for this level and what runs its programs; None: not here."""
    family, cross, emulator = LEVELS[name]
    level = next(each for each in isa.of_family(family) if each.name == name)
    if isa.family() == family:
        return (["cc"], []) if level in isa.available() and shutil.which("cc") else None
    there = emulator and shutil.which(cross) and shutil.which(emulator)
    return ([cross, "-static"], [emulator]) if there else None


def digests(name, folder):
    """What the program says that was compiled for this level."""
    compiler, run = tools(name)
    level = next(each for each in isa.of_family(LEVELS[name][0]) if each.name == name)
    sources = [str(NATIVE / each) for each in KERNELS]
    command = [*compiler, "-std=gnu11", "-O0", "-ffp-contract=off", "-Wno-psabi", "-pthread"]
    command += level.options
    program = str(Path(folder, "digests"))
    command += [f"-I{NATIVE}", str(HERE / "kernel_digests.c"), *sources, "-o", program, "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    said = subprocess.run([*run, program], check=True, capture_output=True, text=True, timeout=300)
    return said.stdout


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LEVELS)
def test_bits_are_the_same_on_every_processor(name, tmp_path):
    if tools(name) is None:
        pytest.skip(f"{platform.machine()} neither runs nor emulates programs for {name}")
    assert digests(name, tmp_path) == DIGESTS.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        best = [name for name in LEVELS if tools(name) is not None][-1]
        DIGESTS.write_text(digests(best, folder))
