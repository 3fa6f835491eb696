"""Products with packed weights: as exact as their type, and a row is the same in every call."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.models import isa
from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.packed_formats import FORMATS
from outrider.models.cpu_kernels.packed_linear import (
    PackedLinear,
    PackedWeight,
    unsupported_reason,
)

pytestmark = pytest.mark.skipif(build.unbuilt() is not None, reason=str(build.unbuilt()))

#: The largest whole number of an activation: AVX2, and AVX-512 without VNNI, have 7 bits.
VNNI = any("vnni" in option for option in isa.level().options)
MOST = 63 if isa.holds("avx2") and not VNNI else 127
DENSE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SIZES = [(16, 256), (40, 512), (90, 256), (336, 768)]  #: outputs that fill no tile, and no group


FILES = [*FORMATS]
#: Where a K format's block has scales in half precision, and its bytes.
HALVES = {"q4_k": ([0, 2], 144), "q5_k": ([0, 2], 176), "q6_k": ([208], 210)}


def blocks_of(format: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of a file: of random weights, as the `gguf` package quantises them, or of random bits
    with scales that are numbers."""
    random = np.random.default_rng(seed)
    if format in HALVES:
        places, size = HALVES[format]
        rows = random.integers(0, 256, (outputs, inputs // 256, size), dtype=np.uint8)
        for at in places:
            scale = random.uniform(0.01, 0.02, (outputs, inputs // 256, 1)).astype(np.float16)
            rows[..., at : at + 2] = scale.view(np.uint8)
        return rows.reshape(outputs, -1)
    weight = random.standard_normal((outputs, inputs), dtype=np.float32)
    if format in DENSE:
        dense = torch.from_numpy(weight).to(DENSE[format])
        return dense.view(torch.uint8).numpy()
    return gguf.quants.quantize(weight, _type(format))


def _type(format: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[format.upper()]


def dense_of(format: str, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(rows, _type(format)))


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_blocks_keep_their_bits_and_values(format: str, outputs: int, inputs: int) -> None:
    rows = blocks_of(format, outputs, inputs)
    weight = PackedWeight.from_blocks(torch.from_numpy(rows), format, inputs)
    assert torch.equal(weight.dequantize(), dense_of(format, rows))
    tiles = -(-outputs // 16) * 16
    assert weight.nbytes <= rows.nbytes * tiles / outputs * 1.02
    ids = torch.tensor([[outputs - 1, 0], [1, outputs // 2]])
    assert torch.equal(weight.rows(ids), dense_of(format, rows)[ids])


def bound_of(format: str, x: Tensor, dense: Tensor) -> Tensor:
    """How far from the exact product [rows, outputs] a sum may be: its error grows with its terms,
    not with what is left of them. Inputs of whole weights are rounded to 16 bits, by blocks, and
    those of bfloat16 ones to bfloat16 where the processor multiplies such numbers."""
    x, dense = x.double().abs(), dense.double().abs()
    bound = x @ dense.T * 2**-21
    if format == "bf16" and isa.has_bf16_products():
        bound = bound + x @ dense.T * 2**-9
    if format not in DENSE:
        blocks = x.unflatten(-1, (-1, 16 if format == "q6_k" else 32))
        half = (blocks.amax(-1, keepdim=True) / 32767 / 2).expand_as(blocks).flatten(-2)
        bound = bound + half @ dense.T * (1 + 2**-10)
    return bound


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_row_is_one_sum_near_the_exact_one_in_every_call(
    format: str, outputs: int, inputs: int
) -> None:
    rows = blocks_of(format, outputs, inputs)
    bias_O = torch.randn(outputs, generator=torch.Generator().manual_seed(1))
    run = PackedLinear(PackedWeight.from_blocks(torch.from_numpy(rows), format, inputs), bias_O)
    x = torch.randn(70, inputs, generator=torch.Generator().manual_seed(2))
    answer, weight = run(x), dense_of(format, rows).double()
    exact = x.double() @ weight.T + bias_O.double()
    bound = bound_of(format, x, weight) + bias_O.abs() * 2**-21
    assert ((answer.double() - exact).abs() <= bound).all()
    for count in (*range(1, 15), 31, 60, 65):
        assert torch.equal(run(x[:count]), answer[:count]), f"{count} rows"
        assert torch.equal(run(x[-count:]), answer[-count:]), f"the last {count} rows"


def test_bfloat16_inputs_are_rounded_only_where_they_are_multiplied() -> None:
    weight = torch.randn(90, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(2))
    packed, near = PackedWeight.from_dense(weight), x.bfloat16().double()
    if not isa.has_bf16_products():
        assert torch.equal(PackedLinear(packed)(x), PackedLinear(packed, None, "float32")(x))
        near = x.double()
    for activations, given in ((None, near), ("float32", x.double())):
        run = PackedLinear(packed, None, activations)
        answer, exact = run(x), given @ weight.double().T
        bound = x.double().abs() @ weight.double().abs().T * 2**-21
        assert ((answer.double() - exact).abs() <= bound).all()
        for count in (1, 2, 3, 4, 5, 6, 7, 13, 65):
            assert torch.equal(run(x[:count]), answer[:count]), f"{count} rows"


@pytest.mark.parametrize("format", FILES)
def test_threads_change_no_bit(format: str) -> None:
    rows = blocks_of(format, 1040, 512)
    run = PackedLinear(PackedWeight.from_blocks(torch.from_numpy(rows), format, 512))
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(3))
    answers, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            answers.append((run(x), run(x[:1])))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, answers[0][0]) and torch.equal(b, a[:1]) for a, b in answers)


@pytest.mark.parametrize("kind", DENSE)
def test_inputs_and_outputs_of_any_number(kind: str) -> None:
    weight = torch.randn(7, 45, generator=torch.Generator().manual_seed(4)).to(DENSE[kind])
    packed = PackedWeight.from_dense(weight)
    assert packed.format == kind
    assert torch.equal(packed.dequantize(), weight.float())
    x = torch.randn(3, 2, 45, generator=torch.Generator().manual_seed(5))
    found = PackedLinear(packed, None, "float32")(x)
    torch.testing.assert_close(found, x @ weight.float().T)
    near = (PackedLinear(packed)(x).double() - x.double() @ weight.double().T).abs()
    assert (near <= bound_of(kind, x, weight)).all()
    half = x.bfloat16()
    assert torch.equal(PackedLinear(packed)(half), PackedLinear(packed)(half.float()))


def test_several_weights_stand_side_by_side() -> None:
    formats = ["q4_k", "bf16", "q6_k"]
    parts = [
        PackedWeight.from_blocks(torch.from_numpy(blocks_of(one, count, 256, count)), one, 256)
        for one, count in zip(formats, (40, 16, 7), strict=True)
    ]
    bias_O = torch.arange(63.0)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(6))
    whole = PackedLinear(parts, bias_O)(x)
    each = [
        PackedLinear(one, bias) for one, bias in zip(parts, bias_O.split([40, 16, 7]), strict=True)
    ]
    assert torch.equal(whole, torch.cat([run(x) for run in each], -1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", FILES)
def test_what_is_not_finite_stays_so(format: str, bad: float) -> None:
    outputs, inputs = 20, 256
    if format in DENSE:
        weight = torch.ones(outputs, inputs)
        weight[3, 5] = bad
        packed = PackedWeight.from_dense(weight.to(DENSE[format]))
    else:
        rows = blocks_of(format, outputs, inputs)
        at = HALVES.get(format, ([0], 0))[0][0]
        rows[3, at : at + 2] = np.array([bad], dtype=np.float16).view(np.uint8)
        packed = PackedWeight.from_blocks(torch.from_numpy(rows), format, inputs)
    run = PackedLinear(packed)
    for count in (1, 5, 70):
        finite = run(torch.ones(count, inputs)).isfinite()
        assert not finite[:, 3].any()
        assert finite[:, :3].all()
        assert finite[:, 4:].all()


@pytest.mark.parametrize("format", FILES)
def test_inputs_that_are_not_finite_stay_in_their_row(format: str) -> None:
    rows = blocks_of(format, 20, 256)
    run = PackedLinear(PackedWeight.from_blocks(torch.from_numpy(rows), format, 256))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(10))
    clean = run(x)
    x[1, 7], x[3, 250] = float("nan"), -float("inf")
    answer = run(x)
    assert torch.equal(answer[::2], clean[::2])
    assert not answer[1::2].isfinite().any()


@pytest.mark.parametrize("format", [name for name in FILES if name not in DENSE])
def test_inputs_of_any_size_have_a_scale(format: str) -> None:
    rows = blocks_of(format, 20, 256)
    run = PackedLinear(PackedWeight.from_blocks(torch.from_numpy(rows), format, 256))
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(11))
    for power in (-60, 60):
        torch.testing.assert_close(run(x * 2.0**power), run(x) * 2.0**power)
    assert not run(torch.full((1, 256), 1e-40)).any()
    assert not run(torch.zeros(2, 256)).any()


@pytest.mark.parametrize("format", ["q8_0", "q4_1", "q6_k"])
def test_the_largest_whole_numbers_do_not_overflow(format: str) -> None:
    fill = {"q8_0": 0x80, "q4_1": 0xFF, "q6_k": 0xFF}[format]
    rows = np.full_like(blocks_of(format, 16, 256), fill)
    parts = rows.reshape(16, -1, FORMATS[format].block)
    places = {"q8_0": [0], "q4_1": [0, 2], "q6_k": [208]}[format]
    for at in places:
        parts[..., at : at + 2] = np.array([1.0], dtype=np.float16).view(np.uint8)
    run = PackedLinear(PackedWeight.from_blocks(torch.from_numpy(rows), format, 256))
    dense = dense_of(format, rows)
    for x in (torch.ones(1, 256), -torch.ones(1, 256)):
        torch.testing.assert_close(run(x), x @ dense.T)


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 64), (336, 768), (96, 544), (70, 1120)])
def test_rounded_activations_are_whole_sums_times_scales(outputs: int, inputs: int) -> None:
    rows = blocks_of("q8_0", outputs, inputs)
    weight = PackedWeight.from_blocks(torch.from_numpy(rows), "q8_0", inputs)
    bias_O = torch.randn(outputs, generator=torch.Generator().manual_seed(1))
    run = PackedLinear(weight, bias_O, activations="int8")
    x = torch.randn(43, inputs, generator=torch.Generator().manual_seed(9))
    x[3, :32] = 0
    blocks = x.view(43, -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / MOST
    near = (blocks / scale.clamp_min(1e-30)).round() * scale
    dense = weight.dequantize()
    exact = near.view(43, inputs).double() @ dense.double().T + bias_O.double()
    answer = run(x)
    # a tie may be rounded either way: one step of one activation
    bound = (x.double().abs() @ dense.double().abs().T + bias_O.abs()) * 2**-20
    step = scale.amax().double() * dense.abs().amax().double()
    assert ((answer.double() - exact).abs() <= bound + step).all()
    assert ((answer.double() - exact).abs() <= bound).double().mean() > 0.9
    for count in (1, 2, 5, 6, 7, 42):
        assert torch.equal(run(x[:count]), answer[:count]), f"{count} rows"
    assert torch.equal(run(x.repeat(4, 1))[129:], answer)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(x), answer)
    finally:
        torch.set_num_threads(before)
    x[7, 40] = float("inf")
    finite = run(x).isfinite()
    assert not finite[7].any()
    assert finite[:7].all()
    assert finite[8:].all()


def test_the_largest_numbers_do_not_overflow() -> None:
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0]).repeat(16)
    weight = PackedWeight.from_dense(torch.stack([signs, -signs, signs.abs(), 0 * signs]), "q8_0")
    x = torch.stack([signs, -signs, signs.abs(), -signs.abs()])
    exact = x.double() @ weight.dequantize().double().T
    answer = PackedLinear(weight, activations="int8")(x)
    torch.testing.assert_close(answer.double(), exact, rtol=1e-6, atol=1e-6)


def test_rounded_activations_want_weights_of_8_bits() -> None:
    weight = PackedWeight.from_dense(torch.ones(2, 32))
    with pytest.raises(ConfigurationError, match="'int8' with q8_0 weights; got 'int8' with f32"):
        PackedLinear(weight, activations="int8")


def test_rounding_is_that_of_files() -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(7))
    weight[2, :32] = 0
    for format, one in FORMATS.items():
        if one.quantize is not None:
            rows = gguf.quants.quantize(weight.numpy(), _type(format))
            packed = PackedWeight.from_dense(weight, format)
            assert torch.equal(packed.dequantize(), dense_of(format, rows)), format


def test_what_cannot_be_is_said() -> None:
    assert "no format 'q9_9'" in str(unsupported_reason("q9_9", 16, 32, "cpu"))
    assert "blocks of 32 inputs" in str(unsupported_reason("q8_0", 16, 40, "cpu"))
    assert "CPU" in str(unsupported_reason("q8_0", 16, 32, "meta"))
    assert unsupported_reason("bf16", 7, 5, "cpu") is None
    with pytest.raises(ConfigurationError, match="float64 is in no format"):
        PackedWeight.from_dense(torch.ones(2, 32).double())
    with pytest.raises(ConfigurationError, match="bytes each; got"):
        PackedWeight.from_blocks(torch.zeros(2, 35, dtype=torch.uint8), "q8_0", 32)
    packed = PackedWeight.from_dense(torch.ones(2, 32), "q8_0")
    with pytest.raises(ConfigurationError, match="32 inputs are wanted"):
        PackedLinear(packed)(torch.ones(1, 31))
    with pytest.raises(ConfigurationError, match="a bias of 2 outputs"):
        PackedLinear(packed, torch.ones(3))
    with pytest.raises(IndexError, match="outside the weight's 2 rows"):
        packed.rows(torch.tensor([2]))


@pytest.mark.parametrize("format", FILES)
def test_no_rows_are_no_product(format):
    blocks = torch.from_numpy(blocks_of(format, 40, 256))
    run = PackedLinear(PackedWeight.from_blocks(blocks, format, 256))
    assert run(torch.zeros(2, 0, 256)).shape == (2, 0, 40)
