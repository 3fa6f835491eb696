"""The shipped libraries compute here and, on another processor, to the bit what kernels compiled
here do: calls are recorded and run again, for aarch64 by qemu's user mode."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_mixers as mixer
import torch
from recorded_calls import RecordedCalls
from test_bart import HEADS, made as made_bart
from test_cpu_kernels import BF16, call_of, filled, random_nodes
from test_decoder_layers import lean_llama, read
from test_packed_linear import FILES, blocks_of

from outrider.models import LlamaRunner, TreeDecoder, adapt, isa
from outrider.models.cpu_kernels import build, cross_attention, int8, mixers, tile_kernels
from outrider.models.cpu_kernels.packed_formats import FORMATS
from outrider.models.cpu_kernels.packed_linear import PackedLinear, PackedWeight
from outrider.models.prefill import causal

ROOT = Path(__file__).parents[2]
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
C_LIBRARY = Path("/usr/aarch64-linux-gnu")
WANTED = "needs ziglang (the extra 'build')"
WANTED_ELSEWHERE = (
    f"{WANTED} and qemu with aarch64's C library (Debian: qemu-user, libc6-arm64-cross)"
)
LEVELS = isa.of_family(isa.family())
needs_zig = pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason=WANTED)


@pytest.fixture(scope="session")
def tool():
    """tools/build_kernels.py."""
    spec = importlib.util.spec_from_file_location("build_kernels", ROOT / "tools/build_kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def recorded(monkeypatch, level="avx2"):
    """Calls of every kernel whose numbers are the same on all processors, made here by a level's
    instructions (on x86-64; others have one level and no products of bfloat16 numbers)."""
    with monkeypatch.context() as patch:
        if isa.family() == "x86_64":
            patch.setenv(isa.VARIABLE, level)
            patch.setattr(build, "_state", build._State())
            build.wait()
        if build.unbuilt():
            pytest.skip(f"there is nothing to compare with: {build.unbuilt()}")
        patch.setattr(tile_kernels, "unsupported_reason", lambda like: "not on every processor")
        calls = RecordedCalls(patch)
        torch.manual_seed(1)
        with torch.inference_mode():
            between_products()
            layers_with_states()
            products()
            whole_layers()
    return calls


def between_products():
    """Norm, rotation, cache, attention and gate of a Llama; attention over a window."""
    for kind in (BF16, torch.float32):
        for heads, kv_heads, size, batch, queries in ((9, 3, 64, 2, 5), (4, 1, 80, 1, 40)):
            nodes = random_nodes(batch, queries, True)
            call, _ = call_of(heads, kv_heads, size, nodes, kind)
            cache, _, _ = filled(batch, kv_heads, size, 300, kind)
            qkv = torch.randn(batch, queries, (heads + 2 * kv_heads) * size).to(kind)
            call.attend(qkv, *cache.layers)
            state = torch.randn(2, batch, queries, 512).to(kind)
            call.norm(*state, torch.randn(512).to(kind))
            call.gate(state[0])
        keys, values = torch.randn(2, 2, 3, 150, 20).to(kind)
        laid = cross_attention.laid_keys(keys), cross_attention.laid_values(values)
        some = torch.tensor([150, 90])
        cross_attention.attend(torch.randn(2, 7, 3, 20).to(kind), *laid, some, 150)


def layers_with_states():
    """Convolutions, norms with gates, Mamba-2's recurrence over a chain and a tree."""
    for dtype in (BF16, torch.float32):
        for taps in (3, 4):
            ring, x, weight, bias = mixer.convolution(dtype, 40, taps)
            mixers.convolve(ring, mixer.windows(2, 3, taps), x, weight, bias, "silu")
        state, inputs, steps, log = mixer.mixer(dtype)
        for origins in (mixer.TREE, torch.arange(5)[None]):
            mixer.scan(state, inputs, steps, log, origins)
    x, gate = torch.randn(2, 2, 3, 64)
    for ahead in (True, False):
        mixers.norm(x, torch.randn(64), 1e-5, 32, gate, ahead, True)


def products():
    """With weights in 8 bits, and in every format of files, of one row and of many."""
    weight, bias = torch.randn(40, 70), torch.randn(40)
    for dtype in (BF16, torch.float32):
        run = int8.Int8Product(weight.to(dtype), bias.to(dtype))
        for rows in (1, 4, 7):
            run(torch.randn(rows, 70).to(dtype))
    # how many tiles' units lie side by side is the vectors' width's affair: of two tiles, two do
    outputs = {name: 30 if name in ("bf16", "f16") else 90 for name in FILES}
    each = [
        PackedWeight.from_blocks(torch.from_numpy(blocks_of(name, outputs[name], 256)), name, 256)
        for name in FILES
    ]
    assert {one.format for one in each} == set(FORMATS)
    for packed in each:
        # not every processor has products of bfloat16 numbers
        product = PackedLinear(packed, torch.randn(packed.outputs), "float32")
        for rows in (1, 2, 3, 4, 5, 6, 7, 13, 30):
            product(torch.randn(rows, packed.inputs))
        packed.rows(torch.tensor([0, packed.outputs - 1, 3]))


def whole_layers():
    """Of Llama's like, with biases and norms of heads, and of decoders with cross attention."""
    for kind, dtype in (("qwen2", "int8"), ("qwen3", "bfloat16")):
        model = TreeDecoder(LlamaRunner(lean_llama(kind, dtype), False))
        assert model.runner.whole is not None
        read(model, [9, 1], rows=2)
    lean = adapt(made_bart("bart", **HEADS), packed=True)
    assert lean.runner.whole is not None
    at = torch.arange(5).expand(3, -1)
    lean.forward(lean.open(3, 64, lean.probe(3)), causal(at + 5, at, 64), aux_layers=(0, -1))


def zig(*arguments):
    subprocess.run([sys.executable, "-m", "ziglang", "cc", *map(str, arguments)], check=True)


def made(tool, tmp_path, platform, level):
    """The shipped library of this level, and the driver of recorded calls beside it."""
    found = next(one for one in isa.of_family(platform.family) if one.name == level)
    library, driver = tool.library(platform, found, tmp_path), tmp_path / "driver"
    source = Path(__file__).with_name("kernel_driver.c")
    zig("-target", platform.target, "-O1", source, "-o", driver, "-ldl")
    return library, driver


def again(made_here, tmp_path, library, driver, *through):
    """Run the calls and compare; all kernels are among them."""
    calls, out = tmp_path / "calls", tmp_path / "out"
    made_here.write(calls)
    subprocess.run([*map(str, (*through, driver, library, calls, out))], check=True)
    counts = made_here.compared(out)
    each = "nodes attend norm gate cross int8 packed_layout packed_linear packed_rows"
    each += " llama decoder short_conv gated_norm ssd"
    assert set(counts) == {f"outrider_{name}" for name in each.split()}
    assert all(counts.values())


@pytest.fixture
def zig_cache(monkeypatch, tmp_path):
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, str(tmp_path / "zig")))


@pytest.mark.slow
@needs_zig
@pytest.mark.skipif(not QEMU or not C_LIBRARY.is_dir(), reason=WANTED_ELSEWHERE)
@pytest.mark.usefixtures("zig_cache")
def test_the_library_for_aarch64_has_the_bits_of_the_one_here(tool, monkeypatch, tmp_path):
    library, driver = made(tool, tmp_path, tool.PLATFORMS["linux-aarch64"], "neon")
    again(recorded(monkeypatch), tmp_path, library, driver, QEMU, "-L", C_LIBRARY)


@pytest.mark.slow
@needs_zig
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or isa.family() != "x86_64", reason="of Linux on x86-64"
)
@pytest.mark.usefixtures("zig_cache")
def test_shipped_libraries_have_the_bits_of_the_one_made_here(tool, monkeypatch, tmp_path):
    """Each level's of its own: how many tiles lie side by side is the vectors' width's affair."""
    here = {level.name for level in isa.available()} - {"amx"}  # whose attention rounds otherwise
    platform = tool.PLATFORMS["linux-x86_64"]
    for level in here.intersection(platform.levels):
        again(recorded(monkeypatch, level), tmp_path, *made(tool, tmp_path, platform, level))


@pytest.mark.skipif(not shutil.which("cc"), reason="needs cc")
@pytest.mark.parametrize(
    "level",
    [*(pytest.param(each, marks=pytest.mark.exhaustive) for each in LEVELS[:-1]), LEVELS[-1]],
)
def test_every_level_is_accepted_by_a_compiler_whatever_this_processor_has(level, tmp_path):
    for name, text in build.TEXTS.items():
        (tmp_path / name).write_text(text)
    command = ["cc", *build.FLAGS, *level.options, "-Werror", "-fsyntax-only", *build.SOURCES]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not said.returncode, said.stderr


@needs_zig
def test_options_of_a_level_are_told_to_zig_in_its_words(tool):
    found = {level.name: tool.options(level) for level in isa.of_family("x86_64")}
    assert found["avx2"] == ["-mcpu=x86_64_v3"]
    assert found["avx512_bf16"] == [
        "-mcpu=x86_64_v4+avx512bf16+avx512vnni",
        "-mprefer-vector-width=512",
    ]
    assert found["amx"][0].endswith("+amx_tile+amx_bf16+amx_int8")
    assert tool.options(isa.of_family("aarch64")[-1]) == ["-mcpu=generic"]
