"""Kernels compile to cubins for real cards without one, and none of them spills registers."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

OLD = tuple(map(int, version("triton").split(".")[:2])) < (3, 7)
#: Bytes of a thread: the ptxas of Triton 3.6 spills two registers of one kernel, later ones none.
SPILLED = {"traversal_draw": 8} if OLD else {}
BARE = {"TARGET_FLOOR": False, "DRAFT_FLOOR": False}
CHAIN = {"HAS_DRAFT": True, "INJECTED": False, **BARE}
ONE = {"NTRY": 16, "NROUND": 4, **CHAIN}


def _list(large):
    """(kernel, dtype, capability, warps, constants): the shapes that `launch` chooses."""
    found = []
    for capability in (80, 90):
        wide = {"BLOCK": 4096, "NPROG_P2": 64}
        fine = {"BLOCK": 2048, "NPROG_P2": 128}
        found += [
            ("row_stats", "bf16", capability, 4, {"HAS_FLOOR": False, **wide}),
            ("sample_rows", "bf16", capability, 4, {"HAS_FLOOR": True, **fine}),
            ("chain_decide", "bf16", capability, 4, {"DEPTH_P2": 8, **CHAIN, **wide}),
            ("following", "bf16", capability, 4, CHAIN | fine),
            ("match_race", "bf16", capability, 4,
             {"BLOCK": 2048, "HAS_FLOOR": False, "INJECTED": False}),
            ("block_sums", "bf16", capability, 4, {"DEPTH_P2": 8, **CHAIN, **wide}),
            ("tree_walk", "bf16", capability, 8,
             {"CHUNK": 2048, "DEPTH_P2": 8, "HAS_DRAFT": True, "UNIFORMS": False, "RACE": False,
              **BARE}),
            ("traversal_draw", "bf16", capability, 4, {"HAS_DRAFT": True, **BARE, **wide}),
            ("traversal_race", "bf16", capability, 4, CHAIN | fine),
            ("traversal_walk", "bf16", capability, 4,
             {"PART": 16, "NODES_P2": 64, "MOST_P2": 4, "DEPTH_P2": 8, "INJECTED": False}),
            ("chain_one", "bf16", capability, 4,
             {"NB": 32, "SUB": 128, "NPROG_P2": 64, "DEPTH_P2": 8, **ONE}),
        ]  # fmt: skip
        floor = {"BLOCK": 2048, "HAS_MIN": True}
        for dtype, half in (("bf16", True), ("fp32", False)):
            found += [
                ("floor_count", dtype, capability, 4,
                 {"SHIFT": 0, "FIRST": False, "HALF": half, "HAS_P": False, **floor}),
                ("floor_mass", dtype, capability, 4,
                 {"SHIFT": 0, "FIRST": False, "HALF": half, "HAS_K": True, "NPROG_P2": 128,
                  **floor}),
            ]  # fmt: skip
        if not large:
            few = ("chain_decide", "following", "traversal_draw", "chain_one", "floor_mass")
            found = [case for case in found if case[2] == 90 or case[0] in few]
            continue
        for dtype, half, size, warps in (
            ("bf16", True, 2048, 8), ("fp16", True, 2048, 4), ("fp32", False, 2048, 8),
        ):  # fmt: skip
            for first, shift in ((True, 12), (False, 4)):
                shape = {"SHIFT": shift, "FIRST": first, "HALF": half, "BLOCK": size}
                found += [
                    ("floor_count", dtype, capability, warps,
                     {"HAS_P": True, "HAS_MIN": False, **shape}),
                    ("floor_mass", dtype, capability, warps,
                     {"HAS_K": False, "HAS_MIN": False, "NPROG_P2": 128, **shape}),
                ]  # fmt: skip
            found.append(
                ("floor_top", dtype, capability, warps,
                 {"HAS_K": False, "HAS_P": True, "HAS_MIN": True, "NPROG_P2": 128,
                  "BLOCK": size}))  # fmt: skip
        found += [
            ("block_reach", "bf16", capability, 4, {**BARE, "HAS_DRAFT": True, **wide}),
            ("traversal_begin", "bf16", capability, 4, {"NODES_P2": 64}),
            ("traversal_walk", "bf16", capability, 4,
             {"PART": 16, "NODES_P2": 256, "MOST_P2": 8, "DEPTH_P2": 16, "INJECTED": False}),
            ("match_walk", "bf16", capability, 1, {"NPROG_P2": 128, "MOST_P2": 4, "DEPTH_P2": 8}),
            ("sigmoid_one", "bf16", capability, 4,
             {"DEPTH_P2": 8, "INJECTED": False, **BARE, **fine}),
            ("paper_tile", "fp32", capability, 32, {"TILE": 1024, "SIGMOID": True}),
            ("chain_one", "fp32", capability, 4,
             {"NB": 16, "SUB": 128, "NPROG_P2": 128, "DEPTH_P2": 8, **ONE}),
            ("chain_one", "fp16", capability, 8,
             {"NB": 32, "SUB": 256, "NPROG_P2": 32, "DEPTH_P2": 32, **ONE}),
        ]  # fmt: skip
        filtered = {"TARGET_FLOOR": True, "DRAFT_FLOOR": True, "HAS_DRAFT": True, "INJECTED": False}
        for dtype in ("fp32", "fp16"):
            for depth, slices in ((8, 128), (32, 128)):
                shape = {"BLOCK": 2048, "NPROG_P2": slices}
                found += [
                    (
                        "chain_decide",
                        dtype,
                        capability,
                        4,
                        {"DEPTH_P2": depth, **filtered, **shape},
                    ),
                    ("block_sums", dtype, capability, 4, {"DEPTH_P2": depth, **filtered, **shape}),
                    ("following", dtype, capability, 4, filtered | shape),
                    ("traversal_race", dtype, capability, 4, filtered | shape),
                ]
    return found


def _check(cases):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compiling.py"))],
        input=json.dumps(cases),
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for case, used in zip(cases, json.loads(run.stdout.splitlines()[-1]), strict=True):
        assert used["LOCAL"] == 0, (case, used)
        # where ptxas puts spilled registers
        assert used["STACK"] <= SPILLED.get(case[0], 0), (case, used)
        assert used["REG"] <= 168, (case, used)
        assert not used["fixed"], (case, used)  # a bound of 1 would make the loop a dead one
        if case[0] in ("row_stats", "chain_decide", "chain_one"):
            assert used["vectors"] >= 2, (case, used)  # the streaming pass loads 16 bytes a time


@pytest.mark.exhaustive
def test_main_configurations_do_not_spill():
    _check(_list(large=False))


@pytest.mark.slow
def test_all_configurations_do_not_spill():
    _check(_list(large=True))
