"""What the planner's choices cost, to the last millisecond the same in every run.

    python benchmarks/charged.py MODEL [--costs FILE ...] [--each 4] [--tokens 64]

The lab's six kinds of prompts are answered greedily by MODEL with what `outrider.load` gives to
somebody who names nothing. Steps are not timed: each is charged what a table says of its size, and
the planner is told that it took so long. FILE is a table that a start has measured
(`speculator.engine.costs.write`), of this or of any other model: so it is seen what the planner
would do with these texts where drafts are dear, and no other work on the machine moves a figure.
Told is the speed of each prompt over plain decoding behind the prompt; the last lines say whether
the worst reaches 0.97, which is the exit status, too.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import outrider
from outrider import Engine, SamplingParams, StopConditions
from outrider.costs import Costs
from outrider.engine.speculation_policy import Adaptive, BatchView, PlanReport, StepReport
from outrider.types import DraftShape
from outrider_lab.tasks import prompts

LEAST = 0.97
FLAT = {1: 1.0, 6: 1.05, 17: 2.0}
STEEP = {1: 1.0, 2: 1.25, 3: 1.5, 6: 2.45, 17: 7.0}  #: Q4_K_M of 1.5 B on one AVX-512 core


@dataclass
class Charged:
    """A planner whose steps take what its costs say."""

    planner: Adaptive = field(default_factory=Adaptive)
    took: float = 0.0
    plain: float = 0.0
    sizes: dict[int, int] = field(default_factory=dict)

    def open(self, shapes: Sequence[DraftShape], costs: Costs | None) -> Any:
        """The planner's own."""
        return self.planner.open(shapes, costs)

    def plan(self, state: Any, view: BatchView) -> DraftShape:
        """The planner's choice."""
        return self.planner.plan(state, view)

    def learn(self, state: Any, step: StepReport) -> Any:
        """Charge the step, and say that it took so long."""
        rows = len(state.view.rows)
        took = state.costs.milliseconds(step.nodes, rows, state.context)
        self.took += took
        tokens = sum(len(block.token_ids) for block in step.blocks)
        self.plain += tokens / rows * state.costs.milliseconds(1, rows, state.context)
        self.sizes[step.nodes] = self.sizes.get(step.nodes, 0) + 1
        return self.planner.learn(state, step._replace(milliseconds=took))

    def report(self, state: Any) -> PlanReport:
        """The planner's own."""
        return self.planner.report(state)


def charged(base: Any, costs: Costs, tasks: Sequence[Any], asked: argparse.Namespace) -> float:
    """A line for each prompt; the worst speed over plain decoding."""
    planner = Charged()
    engine = Engine(base.engine.target, base.engine.drafter, None, planner, costs)
    ratios, took, plain = [], 0.0, 0.0
    for at in range(0, len(tasks), asked.rows):
        some = tasks[at : at + asked.rows]
        ids = [prompts.token_ids(base.tokenizer, task.turns) for task in some]
        planner.took, planner.plain, planner.sizes = 0.0, 0.0, {}
        ends = StopConditions(asked.tokens, base.eos_ids)
        how = [SamplingParams(asked.temperature, seed=task.question_id) for task in some]
        for _ in engine.run(ids, how, ends):
            pass
        ratios.append(planner.plain / planner.took)
        took, plain = took + planner.took, plain + planner.plain
        sizes = ", ".join(f"{nodes}: {planner.sizes[nodes]}" for nodes in sorted(planner.sizes))
        print(
            f"  {some[0].question_id:3d} {some[0].kind:8s} {ratios[-1]:.3f}  steps by size {sizes}"
        )
    below = sum(ratio < LEAST for ratio in ratios)
    print(
        f"  sum {plain / took:.3f}, median {statistics.median(ratios):.3f}, worst "
        f"{min(ratios):.3f}, {below} of {len(ratios)} below {LEAST}"
    )
    return min(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--costs", nargs="*", default=[], help="default: two made-up tables")
    parser.add_argument("--each", type=int, default=4, help="prompts of a kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1, help="prompts that are answered together")
    parser.add_argument("-t", "--temperature", type=float, default=0.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    base = outrider.load(asked.model, threads=1)
    tables = {name: Costs.read(name) for name in asked.costs} or {
        "flat": Costs.of(FLAT),
        "steep": Costs.of(STEEP),
    }
    tasks = prompts.tasks(asked.each)
    worst = 1.0
    for name, costs in tables.items():
        print(name, flush=True)
        worst = min(worst, charged(base, costs, tasks, asked))
    sys.exit(worst < LEAST)


if __name__ == "__main__":
    main()
