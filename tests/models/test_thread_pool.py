"""Work that is shared between threads of ours: right whoever takes part, and after a fork."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.packed_linear import PackedLinear, PackedWeight

pytestmark = pytest.mark.skipif(build.unbuilt() is not None, reason=str(build.unbuilt()))


@pytest.fixture
def product():
    """A product large enough to be shared, with three threads."""
    weight = torch.randn(1040, 512, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield PackedLinear(PackedWeight.from_dense(weight.bfloat16()), None, "float32")
    torch.set_num_threads(before)


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(3, 512, generator=torch.Generator().manual_seed(seed))


def test_callers_at_the_same_time_have_their_own_answers(product) -> None:
    alone = [product(inputs(seed)) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(25):
            answers = list(pool.map(lambda seed: product(inputs(seed)), range(8)))
            assert all(map(torch.equal, answers, alone))


def test_helpers_that_have_fallen_asleep_are_no_loss(product) -> None:
    right = product(inputs(0))
    for pause in (0, 1e-4, 3e-4, 2e-3) * 10:
        time.sleep(pause)
        assert torch.equal(product(inputs(0)), right)


FORKS = """
import os, torch
from outrider.models.cpu_kernels.packed_linear import PackedLinear, PackedWeight
torch.set_num_threads(3)
weight = torch.randn(1040, 512, generator=torch.Generator().manual_seed(1))
run = PackedLinear(PackedWeight.from_dense(weight.bfloat16()), None, "float32")
x = torch.ones(2, 512)
before = run(x)
child = os.fork()
after = run(x)
if not child:
    os._exit(0 if torch.equal(after, before) else 3)
assert torch.equal(after, before)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_after_a_fork_both_processes_go_on() -> None:
    words = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0"], done.stderr
