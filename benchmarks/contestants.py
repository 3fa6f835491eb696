"""Who is measured. Each contestant is a name and a function of `Inputs` that verifies them once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from inputs import Inputs
from transformers.generation.utils import _speculative_sampling

from outrider import ops, verifiers
from outrider.integrations.transformers import speculative_sampling
from outrider.ops.baselines import PAPER_EXACT, PAPER_SIGMOID

BASE = "transformers"


@dataclass(frozen=True)
class Contestant:
    """A verification; `graph` if it can be captured, because it reads nothing on the host."""

    name: str
    run: Callable[[Inputs], Any]
    exact: bool = True
    drafts: bool = True  #: whether it must read the draft's rows as well
    graph: bool = False
    single: bool = True  #: only one request at a time


def _gamma(x: Inputs) -> int:
    return x.draft_logits.shape[1]


def _function(function: Callable[..., Any]) -> Callable[[Inputs], Any]:
    def run(x: Inputs) -> Any:
        return function(x.ids, x.draft_logits.float(), _gamma(x), x.target_logits.float())

    return run


def _rule(backend: str, rule: str = "rejection", kept: bool = False) -> Callable[[Inputs], Any]:
    judge = verifiers.get(rule)

    def run(x: Inputs) -> Any:
        with ops.use(backend):
            return judge(x.draft if kept else x.cold, x.scores, x.draws)

    return run


def _chain(kept: bool) -> Callable[[Inputs], Any]:
    from outrider.ops.cpu.chain import chain

    def run(x: Inputs) -> Any:
        return chain(x.draft if kept else x.cold, x.scores, x.draws, overlap=False)

    return run


def on_cpu() -> list[Contestant]:
    """Contestants that run without a GPU."""
    return [
        Contestant(BASE, _function(_speculative_sampling)),
        Contestant("paper exact (PyTorch)", _function(PAPER_EXACT)),
        Contestant("paper sigmoid (PyTorch)", _function(PAPER_SIGMOID), exact=False),
        Contestant("reference", _rule("reference"), single=False),
        Contestant("cpu drop-in, cold", _function(speculative_sampling)),
        Contestant("cpu, cold", _chain(kept=False), single=False),
        Contestant("cpu, LSE kept", _chain(kept=True), drafts=False, single=False),
        Contestant("cpu with overlap", _rule("cpu"), single=False),
        Contestant("cpu block", _rule("cpu", "block"), single=False),
        Contestant("cpu match", _rule("cpu", "match"), drafts=False, single=False),
    ]


def _sync_free(x: Inputs) -> Any:
    """transformers' rule without a host read: the fair eager baseline, any batch."""
    p = x.target_logits.float().softmax(-1)
    q = x.draft_logits.float().softmax(-1)
    gamma, drafted = _gamma(x), x.ids[:, 1:, None]
    taken = p[:, :gamma].gather(2, drafted) / q.gather(2, drafted)
    keep = torch.rand_like(taken) <= taken
    n = keep[..., 0].long().cumprod(1).sum(1)
    at = n[:, None, None].expand(-1, 1, p.shape[-1])
    padded = torch.nn.functional.pad(q, (0, 0, 0, 1))
    left = (p.gather(1, at) - padded.gather(1, at)).clamp_(min=0)[:, 0]
    return n, (left / torch.empty_like(left).exponential_()).argmax(-1)


def on_gpu() -> list[Contestant]:
    """Contestants on a CUDA device."""
    from outrider.ops.baselines.ideal import ideal_sigmoid
    from outrider.ops.triton.one import chain_one_launch

    def one(kept: bool) -> Callable[[Inputs], Any]:
        return lambda x: chain_one_launch(x.draft if kept else x.cold, x.scores, x.draws)

    def greedy(x: Inputs) -> Any:
        hot = torch.full_like(x.scores.laws.inverse_temperature_B, torch.inf)
        laws = x.scores.laws._replace(inverse_temperature_B=hot, greedy="all")
        with ops.use("triton"):
            return ops.fused("match", x.cold, x.scores._replace(laws=laws), x.draws)

    def sample(x: Inputs) -> Any:
        laws = x.scores.laws
        one_row = laws._replace(logits_BRV=laws.logits_BRV[:, :1])
        with ops.use("triton"):
            return ops.sample(one_row, x.draws.seed_B[:, None])

    compiled = torch.compile(_speculative_sampling)
    ours = {"graph": True, "single": False}
    return [
        Contestant(BASE, _function(_speculative_sampling)),
        Contestant("transformers, compiled", _function(compiled)),
        Contestant("PyTorch, no host read", _sync_free, graph=True, single=False),
        Contestant("paper exact", _function(PAPER_EXACT)),
        Contestant("paper sigmoid", _function(PAPER_SIGMOID), exact=False),
        Contestant("ideal sigmoid", lambda x: ideal_sigmoid(x.cold, x.scores, x.draws),
                   exact=False, drafts=False, **ours),
        Contestant("drop-in", _function(speculative_sampling)),
        Contestant("two kernels, cold", _rule("triton"), **ours),
        Contestant("two kernels, LSE kept", _rule("triton", kept=True), drafts=False, **ours),
        Contestant("one kernel, cold", one(False), **ours),
        Contestant("one kernel, LSE kept", one(True), drafts=False, **ours),
        Contestant("block", _rule("triton", "block", kept=True), **ours),
        Contestant("match", _rule("triton", "match"), drafts=False, **ours),
        Contestant("match, greedy", greedy, drafts=False, **ours),
        Contestant("draft-step sampler", sample, drafts=False, **ours),
    ]  # fmt: skip
