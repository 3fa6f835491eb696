"""Verdict tests: given its draft, does the rule draw what its `outcome` says it draws?

A rule's `outcome` is the exact law of its verdict once the draft is known: the probability of
stopping at each node and the law of the next token there. It holds only if the rule's noise is
fresh. Noise that is used twice leaves the emitted text nearly right where refusals are rare, but
given the draft it shows. Two sums over steps, both martingales:

    kept   the number of kept tokens, against its mean and variance under `outcome`:
           finds accept tests that share noise, or that the rule's formula does not describe
    next   w(y) of the next token y where a drawn child was refused, against sum_v r(v) w(v), with
           r its law and w(v) = q(v) / (q(v) + r(v)): finds residuals that share the draft's noise

Why this w. Let the drafted token be the first arrival of a race in which v arrives at rate q(v). Up
to that time M no other v has arrived, so in a second race over r with the same noise v may win only
from M q(v) / r(v) on. Tokens late in that sense win too rarely; w grows with the lateness and stays
between 0 and 1.

Both tests read the draft and its laws, so they exist for our engines alone: of a foreign generator
only the text is known. Coupled drafts share noise with the target on purpose; their verdict is
certified token by token instead.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider import ops
from outrider.types import Draft, DrawKind, Scores, StepTensors, Verdict, Verifier
from outrider_lab.certify.report import Test
from outrider_lab.certify.statistics import Surplus

KEPT, NEXT = NAMES = ("kept, given draft", "next, given draft")


@dataclass
class Verdicts:
    """Sums over the steps of runs; an observer of the engine."""

    rule: Verifier
    kept: Surplus = field(default_factory=Surplus)
    following: Surplus = field(default_factory=Surplus)

    @torch.inference_mode()
    def __call__(
        self, draft: Draft, scores: Scores, verdict: Verdict, block: StepTensors, rows: list[int]
    ) -> None:
        """Count one step of the rows that still run."""
        if draft.tree.max_depth == 0 or DrawKind.COUPLED in draft.kinds:
            return
        outcome = self.rule.outcome(draft, scores)
        running = block.emitted_B > 0
        self._kept(draft, outcome.stop_BN[running], verdict.count_B[running], running)
        if draft.laws is None:
            return
        batch = torch.arange(len(rows), device=running.device)
        last = (verdict.count_B - 1).clamp(min=0)
        node = verdict.path_BD.gather(1, last[:, None])[:, 0].clamp(min=0)
        row = draft.row_BNK.expand(len(rows), -1, -1)[batch, node].amax(-1)
        verified = running & (row >= 0)
        at = batch[verified]
        left = outcome.next_BNV[at, node[verified]]
        guess = ops.probs(draft.laws)[at, row[verified]].to(left.dtype)
        self._next(left, guess, verdict.next_B[verified])

    def _kept(self, draft: Draft, stop_BN: Tensor, count_B: Tensor, running_B: Tensor) -> None:
        depth = draft.tree.depth_BN
        if depth.shape[0] > 1:
            depth = depth[running_B]
        stop, depth = stop_BN.double(), depth.double()
        stop = stop / stop.sum(-1, keepdim=True)
        mean = (stop * depth).sum(-1)
        self.kept.add(count_B, mean, (stop * (depth - mean[:, None]).square()).sum(-1))

    def _next(self, left_BV: Tensor, guess_BV: Tensor, token_B: Tensor) -> None:
        both = guess_BV + left_BV
        late = torch.where(both > 0, guess_BV / torch.where(both > 0, both, 1.0), 0.0)
        mean = (left_BV * late).sum(-1)
        variance = (left_BV * (late - mean[:, None]).square()).sum(-1)
        self.following.add(late.gather(1, token_B[:, None])[:, 0], mean, variance)

    def results(self, level: float, power: float) -> list[Test]:
        """Both tests, each at this level."""
        return [
            self.kept.test(KEPT, level, power, "step"),
            self.following.test(NEXT, level, power, "refusal"),
        ]
