"""Compile a kernel to a cubin without a GPU and read what it needs. Run as a script, prints JSON.

A process that runs the interpreter cannot compile, so the tests start this file in another one.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "kernels"))

import triton
from ideal_sigmoid import sigmoid_one
from one_launch import chain_one
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.ops.triton.block import block_reach, block_sums
from outrider.ops.triton.chain import chain_decide
from outrider.ops.triton.floors import (
    FloorLimits,
    FloorSearch,
    floor_count,
    floor_mass,
    floor_top,
)
from outrider.ops.triton.launch import LOOPS
from outrider.ops.triton.law_slices import Side, Slices, row_stats
from outrider.ops.triton.match import Winners, match_race, match_walk
from outrider.ops.triton.residual_race import Race, Stand, following
from outrider.ops.triton.sample import sample_rows
from outrider.ops.triton.tables import DeviceTables, NoiseKeys
from outrider.ops.triton.traversal import (
    NodePointers,
    traversal_begin,
    traversal_draw,
    traversal_race,
    traversal_walk,
)
from outrider.ops.triton.tree import tree_walk
from outrider_lab.baselines.kernels import paper_tile

I64, I32, F32 = "*i64", "*i32", "*fp32"


def side(dtype):
    return Side("*" + dtype, "i64", "i64", F32, F32, F32, I32, "i32", "i32")


TABLES = DeviceTables(I64, "i64", I64, "i64", I64, "i64", I64, "i64", "i32")
KEYS = NoiseKeys(I64, I64, F32, "i64", F32, "i64")
SLICES = Slices(F32, F32, I32, I32)
STAND = Stand(I64, I32, F32)
RACE = Race(F32, F32, I32, F32, I32, I32)
WINNERS = Winners(F32, I32)
NODES = NodePointers(F32, F32, F32, F32, "i32", "i32")
LIMITS = FloorLimits(I64, F32, F32)
SEARCH = FloorSearch(I64, "*fp64", "*fp64", F32, F32, F32, I32)


def signatures(dtype):
    """Argument types of every kernel by parameter name."""
    return {
        "target": side(dtype), "drafted": side(dtype), "side": side(dtype), "tables": TABLES,
        "keys": KEYS, "slices": SLICES, "stand": STAND, "race": RACE, "winners": WINNERS,
        "ticket": I32, "path": I64, "count": I64, "next_token": I64, "reach": F32, "partial": F32,
        "value": F32, "index": I32, "token": I64, "depths": I64, "depth_b": "i64", "vocab": "i32",
        "nodes": "i32", "depth": "i32", "NPROG": "i32", "MOST": "i32", "sub": F32, "tries": I32,
        "zp": "*" + dtype, "zq": "*" + dtype, "ratio": "*" + dtype, "rest": "*" + dtype,
        "limits": LIMITS, "search": SEARCH, "counts": I32, "masses": F32,
        "mass": F32, "alpha": "fp32", "beta": "fp32", "taken": F32, "state": NODES, "start": "i32",
        "k": "i32", "ancestors": "*i8", "ancestor_b": "i64", "hit": I32, "stop": I64,
    }  # fmt: skip


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        row_stats, sample_rows, chain_decide, following, block_reach, block_sums, match_race,
        match_walk, tree_walk, chain_one, floor_top, floor_count, floor_mass,
        traversal_begin, traversal_draw, traversal_walk, traversal_race,
        paper_tile, sigmoid_one,
    )
}  # fmt: skip


def usage(name, dtype, capability, warps, constants):
    """Registers, stack, local memory and vector loads of one configuration."""
    kernel = KERNELS[name]
    types = signatures(dtype)
    if name == "sample_rows":
        types["keys"] = I64
    signature, attributes = {}, {}
    for at, parameter in enumerate(kernel.arg_names):
        if parameter in constants:
            signature[parameter] = "constexpr"
            continue
        kind = types[parameter]
        signature[parameter] = kind
        if isinstance(kind, Side):
            for field in (0, 1, 2, 8):
                attributes[at, field] = [["tt.divisibility", 16]]
        elif kind[0] == "*":
            attributes[at,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    text = report.stdout + report.stderr
    found = {key: int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}
    fixed = [one.name for one in kernel.params if one.name in LOOPS and not one.do_not_specialize]
    found["fixed"] = [name for name in fixed if name not in constants]
    found["vectors"] = len(re.findall(r"ld\.global\S*\.v[248]", compiled.asm["ptx"]))
    return found


if __name__ == "__main__":
    print(json.dumps([usage(*case) for case in json.load(sys.stdin)]))
