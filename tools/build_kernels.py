"""Compiles the kernels for every platform that wheels are made for, on any machine.

    python tools/build_kernels.py OUT [--platform linux-x86_64]...

Needs the extra `build` (ziglang, a C compiler that compiles for other systems). OUT/PLATFORM then
has a library for each level of `outrider.models.isa` that such processors have. The same sources
give the same bytes, on whatever machine. `make wheels` packs them, see `tools/hatch_wheel.py`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.models import isa
from outrider.models.cpu_kernels import build


@dataclass(frozen=True)
class Platform:
    """What a wheel is for."""

    system: str  #: as `sys.platform` has it
    family: str  #: of processors
    target: str  #: for zig
    levels: tuple[str, ...]  #: of `isa`
    links: tuple[str, ...] = ()


_ELF = ("-Wl,--build-id=none", "-Wl,-z,defs")  #: reproducible; what is called is there


PLATFORMS = {
    "linux-x86_64": Platform(
        "linux",
        "x86_64",
        "x86_64-linux-gnu.2.17",
        ("avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"),
        _ELF,
    ),
    "linux-aarch64": Platform("linux", "aarch64", "aarch64-linux-gnu.2.17", ("neon",), _ELF),
    "darwin-aarch64": Platform("darwin", "aarch64", "aarch64-macos.11.0", ("neon",)),
}


def options(level: isa.Level) -> list[str]:
    """A level's options as zig has them: features are added to the processor's name.

    >>> options(isa.Level("tiles", (), ("-march=x86-64-v4", "-mamx-tile", "-mprefer-x=5")))
    ['-mcpu=x86_64_v4+amx_tile', '-mprefer-x=5']
    """
    processor, others = "", []
    for option in level.options:
        name = option.removeprefix("-march=")
        if name != option:
            processor = "generic" if name.startswith("armv8") else name.replace("-", "_")
        elif option.startswith("-m") and "=" not in option:
            processor += "+" + option.removeprefix("-m").replace("-", "_")
        else:
            others.append(option)
    return [f"-mcpu={processor}", *others]


def library(platform: Platform, level: isa.Level, out: Path) -> Path:
    """Compile one. Raises CalledProcessError; the compiler's words are on standard error."""
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", platform.target]
    flags = [*build.FLAGS, *options(level), "-g0", "-Wno-unknown-pragmas", "-I."]
    with TemporaryDirectory(prefix="kernels-") as folder:
        for name, text in build.TEXTS.items():
            Path(folder, name).write_text(text)

        def run(*arguments: str) -> None:
            subprocess.run([*zig, *flags, *arguments], cwd=folder, check=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda name: run("-c", name, "-o", f"{name}.o"), build.SOURCES))
        run(
            *("-shared", "-s", *platform.links),
            *(f"{name}.o" for name in build.SOURCES),
            *("-o", "made.so", *build.LINKS),
        )
        made = Path(folder, "made.so").read_bytes()
    begins = build.shipped_stem(platform.system, platform.family, level, build.TEXTS, build.FLAGS)
    path = out / build.shipped_name(begins, made)
    path.write_bytes(made)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """All levels of the platforms that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--platform", action="append", choices=PLATFORMS)
    asked = parser.parse_args(arguments)
    for name in asked.platform or PLATFORMS:
        platform, folder = PLATFORMS[name], asked.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("kernels-*.so"):
            left.unlink()
        for level in isa.of_family(platform.family):
            if level.name in platform.levels:
                made = library(platform, level, folder)
                print(f"{made}  {made.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
