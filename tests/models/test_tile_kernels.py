"""Products in tiles: what they compute, rows alike in every call, what is refused."""

import re

import pytest
import torch
from torch.nn import functional as F

from outrider.models import linear
from outrider.models.cpu_kernels import build, tile_kernels
from outrider.models.cpu_kernels.tile_kernels import TileProduct

WHY = tile_kernels.unsupported_reason(torch.zeros(1).bfloat16())
needs_tiles = pytest.mark.skipif(bool(WHY), reason=f"no tiles: {WHY}")


def shaped(outputs, inputs, rows=200):
    torch.manual_seed(outputs)
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    return weight, bias, torch.randn(rows, inputs).bfloat16()


@needs_tiles
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (16, 32), (33, 32), (50, 70), (96, 576), (300, 1000)]
)
@torch.inference_mode()
def test_products_are_products_and_rows_are_alike(outputs, inputs):
    weight, bias, x = shaped(outputs, inputs)
    run = TileProduct(weight, bias)
    alone = torch.cat([run(row) for row in x.split(1)])
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(alone.double(), expected, rtol=2**-7, atol=1e-4 * inputs)
    counts = [*range(2, 70), 95, 96, 97, 128, 199, 200]
    assert all(torch.equal(run(x[:count]), alone[:count]) for count in counts)
    assert torch.equal(run(x.view(2, 4, 25, inputs)).view(200, outputs), alone)
    assert run(x[:0]).shape == (0, outputs)


@needs_tiles
@pytest.mark.parametrize("outputs", [1, 17, 32, 49, 96])
@torch.inference_mode()
def test_wide_answers_are_the_sums_that_others_round(outputs):
    weight, bias, x = shaped(outputs, 96, rows=70)
    run, wide = TileProduct(weight, bias), TileProduct(weight, bias, wide=True)
    for count in (1, 16, 17, 70):
        out = wide(x[:count])
        assert out.dtype == torch.float32
        assert torch.equal(out.bfloat16(), run(x[:count]))
        expected = x[:count].double() @ weight.double().T + bias.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@needs_tiles
@torch.inference_mode()
def test_threads_change_no_bit():
    weight, bias, x = shaped(1100, 96)
    run, threads = TileProduct(weight, bias), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append([run(x), run(x[:9])])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_tiles
@torch.inference_mode()
def test_what_is_not_a_number_stays_in_its_row():
    weight, bias, whole = shaped(70, 96, rows=40)
    run = TileProduct(weight, bias)
    for rows in (8, 24, 40):
        x = whole[:rows].clone()
        clean = run(x)
        x[4, 2] = torch.nan
        assert run(x)[4].isnan().all()
        rest = [row for row in range(rows) if row != 4]
        assert torch.equal(run(x)[rest], clean[rest])


@needs_tiles
@torch.inference_mode()
def test_a_bias_of_another_kind_is_a_bias():
    weight, bias, x = shaped(64, 64)
    expected = TileProduct(weight, bias)(x)
    assert torch.equal(TileProduct(weight, bias.float())(x), expected)
    apart = torch.stack([bias, bias], 1)[:, 0]
    assert torch.equal(tile_kernels.multiply(x, weight, apart), expected)
    empty = linear.product(torch.zeros(8, 0).bfloat16(), bias[:8])
    assert torch.equal(empty(x[:, :0]), bias[:8].expand(200, 8))


@needs_tiles
@torch.inference_mode()
def test_torchs_own_products_go_on_beside_them():
    """oneDNN sets tiles up for itself; neither must find the other's set-up."""
    weight, bias, x = shaped(320, 256)
    run, square = TileProduct(weight, bias), torch.randn(256, 256).bfloat16()
    theirs = F.linear(x, square), F.linear(x[:5], square)
    for _ in range(3):
        ours = run(x[:5]), run(x)
        assert torch.equal(F.linear(x, square), theirs[0])
        assert torch.equal(F.linear(x[:5], square), theirs[1])
        assert torch.equal(ours[1][:5], ours[0])


@needs_tiles
def test_weights_are_read_as_they_lie_packed_or_not():
    weight, bias, x = shaped(64, 64)
    for packed in (True, False):
        run = linear.product(weight, bias, packed=packed)
        assert isinstance(run, TileProduct)
        assert run.weight.data_ptr() == weight.data_ptr()
        assert not isinstance(linear.product(weight.float(), None, packed=packed), TileProduct)
    for wrong in (x[:, 1:], x.float(), x[:, :32], x.to("meta")):
        with pytest.raises(ValueError, match="64 inputs in bfloat16 are wanted on a CPU"):
            run(wrong)
    narrow = TileProduct(weight[:, :50], bias)  # no whole steps: a copy
    for wrong in (x, x[:, :49], x[:, :50].float()):
        with pytest.raises(ValueError, match="50 inputs in bfloat16 are wanted on a CPU"):
            narrow(wrong)


@needs_tiles
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 130), (1056, 40), (2080, 128)])
@torch.inference_mode()
def test_many_rows_by_many_inputs_are_added_up_in_the_same_order(inputs, outputs):
    """More than are multiplied at once, of rows and of inputs: few rows are the truth."""
    weight, bias, x = shaped(outputs, inputs, rows=1100)
    run = TileProduct(weight, bias, wide=True)
    few = torch.cat([run(some) for some in x.split(16)])
    assert torch.equal(run(x), few)
    assert torch.equal(run(x[:530]), few[:530])
    assert torch.equal(run(x[:33]), few[:33])


def test_without_tiles_nothing_is_laid_in_them(monkeypatch):
    assert "bfloat16" in tile_kernels.unsupported_reason(torch.zeros(1))
    monkeypatch.setattr(build, "unbuilt", lambda: "no compiler")
    weight, bias, x = shaped(64, 64)
    assert tile_kernels.unsupported_reason(weight) == "no compiler"
    with pytest.raises(RuntimeError, match="no compiler"):
        TileProduct(weight, bias)
    if linear.can_pack(torch.bfloat16):
        torch.testing.assert_close(
            linear.product(weight, bias, packed=True)(x), F.linear(x, weight, bias)
        )


def test_what_python_knows_of_the_kernels_is_what_they_say():
    """Sizes of the room that it makes for them."""
    text = build.TEXTS["tiles.h"] + build.TEXTS["tiles.c"]
    known = dict(re.findall(r"^#define (\w+) ([^/\n]+?)\s*(?:/\*.*)?$", text, re.MULTILINE))
    sizes = {name: int(known[name]) for name in ("TILE", "STEP", "WIDE", "DEEP", "TALL")}
    assert (tile_kernels.TILE, tile_kernels.STEP, tile_kernels.FEW) == (
        sizes["TILE"],
        sizes["STEP"],
        2 * sizes["TILE"],
    )
    assert eval(known["ROOM"], {}, sizes) == tile_kernels.ROOM
