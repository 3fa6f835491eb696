"""OUTRIDER_ISA caps what compiled kernels use, and what is measured under it is kept apart."""

import itertools
import platform

import pytest

import outrider
from outrider.cli import main
from outrider.errors import ConfigurationError
from outrider.models import calibrate, isa
from outrider.models.cpu_kernels import build

ZEN_3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
SKYLAKE_X = f"{ZEN_3} avx512f avx512bw avx512cd avx512dq avx512vl"
ICE_LAKE = f"{SKYLAKE_X} avx512_vnni"
ZEN_4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_tile amx_bf16 amx_int8"
ALDER_LAKE = f"{ZEN_3} avx_vnni"


@pytest.fixture
def processor(monkeypatch):
    """Makes this machine one of the given family with the given flags, nothing capped."""
    for name in ("OUTRIDER_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)

    def is_(flags, family="x86_64"):
        monkeypatch.setattr(platform, "machine", lambda: family)
        monkeypatch.setattr(isa, "flags", lambda: frozenset(flags.split()))

    return is_


def test_processors_of_one_name_are_told_apart(monkeypatch):
    """Zen 4 and Zen 5 are both "AMD EPYC" behind a hypervisor; ARM tells no name, macOS nothing."""
    told = {"model name": "AMD EPYC", "cpu family": "26", "model\t": "2"}

    def cpuinfo(name, *_):
        return f"{name} : {told[name]}" if name in told else ""

    monkeypatch.delenv("OUTRIDER_ISA", raising=False)
    monkeypatch.setattr(isa, "cpuinfo", cpuinfo)
    monkeypatch.setattr(isa, "flags", lambda: frozenset(ZEN_4.split()))
    assert isa.processor() == "AMD EPYC (family 26, model 2)"
    zen_5 = calibrate.key(about="x")
    assert calibrate.key(about="x") == zen_5
    told["cpu family"], told["model\t"] = "25", "17"
    assert calibrate.key(about="x") != zen_5
    told.clear()
    assert isa.processor() == platform.machine()


@pytest.mark.parametrize(
    ("flags", "family", "names"),
    [
        ("sse2", "x86_64", ["generic"]),
        ("avx2 f16c bmi1 bmi2 abm movbe", "x86_64", ["generic"]),  # without fma: not a v3
        (ZEN_3, "AMD64", ["generic", "avx2"]),
        (ALDER_LAKE, "x86_64", ["generic", "avx2", "avx2_vnni"]),
        (SKYLAKE_X, "x86_64", ["generic", "avx2", "avx512"]),
        (ICE_LAKE, "x86_64", ["generic", "avx2", "avx512", "avx512_vnni"]),
        (ZEN_4, "x86_64", ["generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]),
        (f"{SKYLAKE_X} avx_vnni", "x86_64", ["generic", "avx2", "avx2_vnni", "avx512"]),
        (
            SAPPHIRE_RAPIDS,
            "x86_64",
            ["generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"],
        ),
        ("sse2 avx_vnni amx_tile amx_bf16 amx_int8", "x86_64", ["generic"]),
        ("fp asimd bf16", "arm64", ["generic", "neon"]),
        ("", "riscv64", ["generic"]),
    ],
)
def test_levels_are_those_whose_instructions_the_processor_has(processor, flags, family, names):
    processor(flags, family)
    assert [level.name for level in isa.available()] == names
    assert isa.level().name == names[-1]
    assert isa.capped() is None


def test_the_switch_caps_and_what_is_measured_under_a_cap_is_kept_apart(processor, monkeypatch):
    processor(SAPPHIRE_RAPIDS)
    monkeypatch.setattr(build, "identity", lambda: "the same")
    keys, names = set(), []
    for name in ("auto", "AMX", "avx512-bf16", "avx512", "avx2", "generic", "scalar", ""):
        monkeypatch.setenv("OUTRIDER_ISA", name)
        keys.add(calibrate.key())
        names.append(isa.level().name)
    assert names == ["amx", "amx", "avx512_bf16", "avx512", "avx2", "generic", "generic", "amx"]
    assert len(keys) == 5
    monkeypatch.setenv("OUTRIDER_ISA", "avx512")
    assert isa.capped() == "avx512"
    assert isa.holds("avx2")
    assert isa.holds("avx512")
    assert not isa.holds("amx")


@pytest.mark.parametrize(
    ("flags", "given", "said"),
    [
        (
            ZEN_3,
            "avx-2",
            "got 'avx-2', and no instructions are called so; use auto, generic, avx2, or",
        ),
        (ZEN_3, "amx", "got 'amx', and it does not have them; use auto, generic, avx2, or"),
        (ZEN_4, "neon", "got 'neon', and it does not have them; use auto, generic, avx2, avx512, "),
    ],
)
def test_what_the_processor_lacks_or_nobody_knows_is_refused(
    processor, monkeypatch, capsys, flags, given, said
):
    processor(flags)
    monkeypatch.setenv("OUTRIDER_ISA", given)
    for attempt in (isa.level, outrider.load, calibrate.key):
        with pytest.raises(ConfigurationError, match="OUTRIDER_ISA must name") as caught:
            attempt()
        assert said in str(caught.value)
    monkeypatch.setattr("sys.argv", ["outrider", "plan"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "OUTRIDER_ISA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "name", "value", "has"),
    [
        (ZEN_3, "OUTRIDER_ISA", "auto", False),
        (ZEN_4, "OUTRIDER_ISA", "auto", True),
        (ZEN_4, "OUTRIDER_ISA", "avx512", False),
        (SAPPHIRE_RAPIDS, "OUTRIDER_ISA", "avx512_bf16", True),
        (SAPPHIRE_RAPIDS, "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", True),
        (SAPPHIRE_RAPIDS, "ONEDNN_MAX_CPU_ISA", "avx512_core_vnni", False),
        (SAPPHIRE_RAPIDS, "DNNL_MAX_CPU_ISA", "AVX2", False),
    ],
)
def test_bfloat16_products_need_their_instructions_and_no_cap(
    processor, monkeypatch, flags, name, value, has
):
    processor(flags)
    monkeypatch.setenv(name, value)
    assert isa.has_bf16_products() is has


def test_tiles_are_of_amx_and_left_out_by_caps(processor, monkeypatch):
    for flags, cap, has in (
        (ZEN_4, "auto", False),
        (SAPPHIRE_RAPIDS, "auto", True),
        (SAPPHIRE_RAPIDS, "avx512_bf16", False),
    ):
        processor(flags)
        monkeypatch.setenv("OUTRIDER_ISA", cap)
        assert isa.has_tiles() is has
    monkeypatch.setenv("OUTRIDER_ISA", "auto")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert not isa.has_tiles()


def test_this_processor_says_what_it_is_and_torch_agrees():
    for levels in isa.LEVELS.values():
        for less, more in itertools.pairwise(levels):
            assert set(less.flags) < set(more.flags) or less.name == "avx2_vnni"
    if isa.family() == "x86_64" and isa._flags_by_torch():
        asked = {flag for level in isa.of_family("x86_64") for flag in level.flags} - {"movbe"}
        assert isa.flags() & asked == isa._flags_by_torch() & asked
