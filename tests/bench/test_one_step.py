"""The picture of one step: what it says of nodes is what the engine did."""

import pytest
import torch

import outrider
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.prompts import encode
from outrider_lab.papers import one_step, record

PROMPT = "def add(a, b):\n    return"


@pytest.mark.parametrize("arm", one_step.ARMS, ids=lambda arm: arm.method)
def test_laws_and_verdicts_are_the_steps(shipped, arm):
    how = SamplingParams(1.0, seed=5)
    nodes, following = one_step.taken(shipped, record.draft_of(shipped), arm, PROMPT, how)
    by_number = {node.number: node for node in nodes}
    kept = [node for node in nodes if node.verdict == "kept"]
    assert [node.depth for node in kept] == list(range(1, len(kept) + 1))
    for above, below in zip([0, *(node.number for node in kept)], kept, strict=False):
        assert below.parent == above
    for node in nodes:
        parent = by_number.get(node.parent)
        assert node.depth == (1 if parent is None else parent.depth + 1)
        if node.verdict == "refused":
            assert node.parent == 0 or by_number[node.parent].verdict == "kept"
    model = shipped.engine.target
    ids = encode(shipped.tokenizer, PROMPT)
    capacity = model.width(len(ids) + 4)
    batch = one_step.step.begin(
        model, outrider.Root(), [outrider.Request(ids, how, outrider.StopConditions(2))], capacity
    )
    plain = one_step.step.score(model, batch, one_step.step.propose(outrider.Root(), batch))
    law = one_step.ops.probs(plain.laws)[0, 0]
    first = [node for node in nodes if node.parent == 0]
    shown = sorted(node.target for node in first)
    some = torch.stack([(law - chance).abs().min() for chance in shown])
    assert some.max() < 2e-2
    assert following


def test_the_picture_and_its_table(shipped, tmp_path):
    pytest.importorskip("matplotlib")
    tables = one_step.run(
        shipped, [{"prompt": PROMPT}], tmp_path, SamplingParams(1.0, seed=1), True
    )
    trees = {row["tree"] for row in tables["nodes"]}
    assert trees == {"RSD-C 3-2-1", "RSD-S 3x3", "hub + traversal 3-2-1"}
    for row in tables["steps"]:
        mine = [one for one in tables["nodes"] if one["tree"] == row["tree"]]
        assert row["drafted"] == len(mine)
        assert row["kept"] == sum(one["verdict"] == "kept" for one in mine)
    assert (tmp_path / "tree.png").stat().st_size > 20_000


def test_what_is_tried_stands_ahead_of_what_is_kept():
    draws = [[1, 2, 3], [4, 5, -1], [-1, -1, -1], [-1] * 3, [-1] * 3, [-1] * 3]
    assert one_step._tried(draws, [0, 2]) == {1}
    assert one_step._tried(draws, [0, 1]) == {4, 5}
    assert one_step._tried(draws, [0]) == {1, 2, 3}
    assert one_step._tried(draws, [0, 1, 4]) == set()
