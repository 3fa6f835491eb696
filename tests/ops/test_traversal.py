"""Traversal of a CPU and of kernels against the reference: same path, same next token."""

import enumeration as e
import own_trees
import pytest
import torch
from forests import same_as_reference

TREES = {
    "RSD-C": lambda w: e.without(w, (2, 2)),
    "RSD-S": lambda w: own_trees.beam(w, 3, 2),
    "hub": lambda w: e.hub(w, (3, 2)),
    "placed first": lambda w: e.hub(w, (2, 2), last=True),
    "mixed": lambda w: e.mixed(w, (3, 1)),
    "merged paths": lambda w: own_trees.merged(w, 3, 2),
    "placed": lambda w: e.placed(w, (2, 2)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["random", "zeros", "equal", "disjoint", "hot target"])
@pytest.mark.parametrize("scheme", TREES)
def test_paths_and_tokens_equal_the_references(scheme, case, dtype):
    same_as_reference("traversal", TREES[scheme](e.World(4, 2, 11, (case,))), dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", ["RSD-S", "hub", "merged paths"])
def test_kernels_equal_the_reference(kernels, scheme):
    forest = TREES[scheme](e.World(4, 2, 11, ("random", "zeros")))
    some = forest[:: len(forest) // 4]
    same_as_reference("traversal", some, torch.float32, "triton")
