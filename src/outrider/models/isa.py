"""Which instructions our compiled kernels may use: what the processor has, capped by OUTRIDER_ISA.

A level holds all that the levels before it of its family hold, but for `avx2_vnni`: that is of
processors without AVX-512, and of some with it. `auto`, the default, is the highest that the
processor has; a lower name caps it, so that a test, or a comparison, runs what a plainer processor
would. oneDNN, whose products torch runs, has a cap of its own (ONEDNN_MAX_CPU_ISA); we
choose no bfloat16 products where either cap leaves their instructions out.
"""

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from outrider.errors import ConfigurationError

AUTO = "auto"
VARIABLE = "OUTRIDER_ISA"


@dataclass(frozen=True)
class Level:
    """A set of instructions, and how a compiler is told of it."""

    name: str
    flags: tuple[str, ...]  #: all that it needs, as /proc/cpuinfo calls it
    options: tuple[str, ...]  #: of GCC and clang


_V3 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_V4_VNNI = (*_V4, "avx512_vnni")
_V4_BF16 = (*_V4_VNNI, "avx512_bf16")
_AS_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_BF16 = ("-mavx512bf16", "-mavx512vnni")
_TILES = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
_PLAIN = "-DOUTRIDER_GENERIC"  #: no instructions by name: plain C alone

#: By family of processors, the least first. Explicit, not -march=native: a library that was made
#: on another machine of this level, or shipped, is right on this one.
LEVELS = {
    "x86_64": (
        Level("generic", (), ("-march=x86-64", _PLAIN)),
        Level("avx2", _V3, ("-march=x86-64-v3",)),
        Level("avx2_vnni", (*_V3, "avx_vnni"), ("-march=x86-64-v3", "-mavxvnni")),
        Level("avx512", _V4, _AS_V4),
        Level("avx512_vnni", _V4_VNNI, (*_AS_V4, "-mavx512vnni")),
        Level("avx512_bf16", _V4_BF16, (*_AS_V4, *_BF16)),
        Level("amx", (*_V4_BF16, "amx_tile", "amx_bf16", "amx_int8"), (*_AS_V4, *_BF16, *_TILES)),
    ),
    "aarch64": (
        Level("generic", (), ("-march=armv8-a", _PLAIN)),
        Level("neon", ("asimd",), ("-march=armv8-a",)),
    ),
}
_OTHER = (Level("generic", (), (_PLAIN,)),)
_SAME = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}  #: other systems' names
_ALIASES = {"scalar": "generic"}
#: Of ONEDNN_MAX_CPU_ISA: what leaves out products with bfloat16 factors.
_WITHOUT_BF16 = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"),
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)
#: torch's names of flags that are called otherwise.
_TORCH = {"fma3": "fma", "bmi": "bmi1", "lzcnt": "abm"}


def family() -> str:
    """The family of this machine's processor, by the name that Linux has for it."""
    name = platform.machine().lower()
    return _SAME.get(name, name)


def of_family(name: str) -> tuple[Level, ...]:
    """The levels of a family of processors, the least first.

    >>> [level.name for level in of_family("aarch64")]
    ['generic', 'neon']
    """
    return LEVELS.get(name, _OTHER)


@lru_cache(maxsize=1)
def flags() -> frozenset[str]:
    """What this processor has, by Linux's names; read once."""
    told = cpuinfo("flags", "Features")  # ARM calls them features
    return _flags_by_torch() if told is None else frozenset(told.partition(":")[2].split())


def cpuinfo(*names: str) -> str | None:
    """The first line of /proc/cpuinfo that begins with one of these, "" if none does; None: there
    is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith(names)), "")


def processor() -> str:
    """The processor's name; on x86 with its family and model, as behind a hypervisor processors of
    several kinds have one name: "AMD EPYC (family 26, model 2)"."""
    name, family_, model = (
        (cpuinfo(line) or "").partition(":")[2].strip()
        for line in ("model name", "cpu family", "model\t")
    )
    which = f" (family {family_}, model {model})" if family_ else ""
    return f"{name}{which}" if name else platform.machine()


def _flags_by_torch() -> frozenset[str]:
    """The same where there is no /proc: what torch has asked the processor."""
    import torch  # on few systems

    if family() == "aarch64":
        return frozenset({"asimd"})  # no such processor is without
    ask = getattr(torch.cpu, "get_capabilities", dict)
    names = [name for name, value in ask().items() if value is True]
    spelt = [name.replace("avx512_", "avx512") for name in names]  # avx512_bw: avx512bw
    return frozenset([*names, *spelt, *(_TORCH[name] for name in names if name in _TORCH)])


def available() -> tuple[Level, ...]:
    """The levels that this processor has, whatever caps them; the least first."""
    return tuple(one for one in of_family(family()) if flags().issuperset(one.flags))


def level() -> Level:
    """The level that compiled kernels use here.

    Raises ConfigurationError for an OUTRIDER_ISA that is misspelt or that this processor lacks.

    >>> os.environ["OUTRIDER_ISA"] = "scalar"
    >>> level().name
    'generic'
    """
    given = os.environ.get(VARIABLE, "") or AUTO
    have = {one.name: one for one in available()}
    asked = given.strip().lower().replace("-", "_")
    asked = _ALIASES.get(asked, asked)
    if asked == AUTO:
        return available()[-1]
    if asked not in have:
        known = {one.name for levels in LEVELS.values() for one in levels}
        what = "instructions that this processor has"
        why = "it does not have them" if asked in known else "no instructions are called so"
        raise ConfigurationError(
            f"{VARIABLE} must name {what}; got {given!r}, and {why}; use "
            f"{', '.join([AUTO, *have])}, or leave it out"
        )
    return have[asked]


def up_to(level: Level) -> tuple[Level, ...]:
    """The levels that this processor has up to this one."""
    have = available()
    return have[: have.index(level) + 1]


def capped() -> str | None:
    """The name of the level where OUTRIDER_ISA leaves out what the processor has; else None."""
    chosen = level()
    return None if chosen == available()[-1] else chosen.name


def holds(name: str) -> bool:
    """Whether the level in use holds that of this name, such as "avx2"."""
    return name in (one.name for one in up_to(level()))


def has_bf16_products() -> bool:
    """Whether products of bfloat16 factors have instructions of their own here, by AVX-512 or AMX,
    and neither OUTRIDER_ISA nor ONEDNN_MAX_CPU_ISA leaves them out.

    Elsewhere torch computes such products by a fallback whose cost grows with each row.
    """
    caps = [os.environ.get(f"{name}_MAX_CPU_ISA", "") for name in ("ONEDNN", "DNNL")]
    if any(cap.strip().upper() in _WITHOUT_BF16 for cap in caps):
        return False
    return holds("avx512_bf16")


def has_tiles() -> bool:
    """Whether these products are done in tiles (AMX), and no cap leaves them out."""
    return has_bf16_products() and holds("amx")
