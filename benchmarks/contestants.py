"""Who is measured. Each contestant is a name and a function of `Inputs` that verifies them once.

A contestant that cannot run here is listed with the reason (`absent`), never left out.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from inputs import Inputs
from transformers import TopKLogitsWarper, TopPLogitsWarper

from outrider import ops, verifiers
from outrider.engine import step
from outrider.sampling import sampling_params
from outrider.types import Verdict
from outrider_lab.baselines import PAPER_EXACT, PAPER_SIGMOID
from outrider_lab.baselines.assisted_generation import speculative_sampling, theirs

BASE = "transformers"
THEIRS = theirs()  #: as the installed version wants to be called


@dataclass(frozen=True)
class Contestant:
    """A verification; `graph` if it can be captured, because it reads nothing on the host."""

    name: str
    run: Callable[[Inputs], Any]
    exact: bool = True
    drafts: bool = True  #: whether it must read the draft's rows as well
    graph: bool = False
    single: bool = True  #: only one request at a time
    emits: bool = True  #: whether it ends in a token; filters and the like do not
    compiled: bool = False  #: by torch.compile: minutes before the first answer
    ragged: bool = False  #: takes drafts of different lengths in one batch


def first_token(found: Any, x: Inputs) -> torch.Tensor:
    """The first emitted token of each request [B], whatever shape a contestant answers in."""
    if isinstance(found, tuple) and isinstance(found[0], Verdict):  # and what else a kernel tells
        found = found[0]
    if isinstance(found, Verdict):
        return torch.where(found.count_B > 0, x.ids[:, 1], found.next_B)
    if isinstance(found, torch.Tensor):  # tokens [B, gamma + 1]
        return found[:, 0]
    one, other = found
    if one.dim() == 2:  # tokens [1, n + 1] and n
        return one[:, 0]
    return torch.where(one > 0, x.ids[:, 1], other)  # n and the next token


def _copied(function: Callable[..., Any]) -> Callable[[Inputs], Any]:
    """With the float32 copy and the stack of draft rows that assisted generation makes before."""

    def run(x: Inputs) -> Any:
        target = x.target_logits.to(torch.float32, copy=True)
        rows = [row.to(torch.float32, copy=True) for row in x.draft_logits.unbind(1)]
        return function(x.ids, torch.stack(rows, 1), _gamma(x), target.clone())

    return run


def _gamma(x: Inputs) -> int:
    return x.draft_logits.shape[1]


def _function(function: Callable[..., Any]) -> Callable[[Inputs], Any]:
    def run(x: Inputs) -> Any:
        return function(x.ids, x.draft_logits.float(), _gamma(x), x.target_logits.float())

    return run


def _rule(backend: str, rule: str = "rejection", kept: bool = False) -> Callable[[Inputs], Any]:
    chosen = verifiers.get(rule)

    def run(x: Inputs) -> Any:
        with ops.use(backend):
            return step.run_kernel(chosen, x.draft if kept else x.cold, x.scores, x.draws)

    return run


def _chain(kept: bool) -> Callable[[Inputs], Any]:
    from outrider.ops.cpu.rejection_walk import verify_chain

    def run(x: Inputs) -> Any:
        return verify_chain(x.draft if kept else x.cold, x.scores, x.draws, overlap=False)

    return run


def on_cpu() -> list[Contestant]:
    """Contestants that run without a GPU."""
    return [
        Contestant(BASE, _function(THEIRS)),
        Contestant("transformers and its copies", _copied(THEIRS)),
        *_compiled(),
        Contestant("PyTorch, no host read", _sync_free, single=False),
        Contestant("vLLM-like (PyTorch)", _vllm_like, single=False),
        Contestant("paper exact (PyTorch)", _function(PAPER_EXACT)),
        Contestant("paper sigmoid (PyTorch)", _function(PAPER_SIGMOID), exact=False),
        Contestant("reference", _rule("reference"), single=False),
        Contestant("cpu drop-in, cold", _function(speculative_sampling)),
        Contestant("cpu, cold", _chain(kept=False), single=False),
        Contestant("cpu, LSE kept", _chain(kept=True), drafts=False, single=False),
        Contestant("cpu with overlap", _rule("cpu"), single=False),
        Contestant("cpu block", _rule("cpu", "block"), single=False),
        Contestant("cpu match", _rule("cpu", "match"), drafts=False, single=False),
        Contestant("filters, transformers", _warpers, drafts=False, emits=False),
        Contestant("filters, cpu", _filters("cpu"), drafts=False, single=False, emits=False),
    ]


TOP_K, TOP_P = 50, 0.9


def _filters(backend: str) -> Callable[[Inputs], Any]:
    """Top-k 50 and top-p 0.9 of every target row as floors."""

    def run(x: Inputs) -> Any:
        batch = x.target_logits.shape[0]
        setting = sampling_params.SamplingParams(top_k=TOP_K, top_p=TOP_P, seed=0)
        limits = _limits(batch, str(x.target_logits.device), setting)
        with ops.use(backend):
            return ops.floors(x.target_logits, limits)

    return run


@lru_cache(maxsize=16)
def _limits(
    batch: int, device: str, setting: sampling_params.SamplingParams
) -> sampling_params.SamplingRows:
    return sampling_params.rows([setting] * batch, device)


def _warpers(x: Inputs) -> Any:
    """The same filters as assisted generation runs them: position by position, with sorts."""
    warp = [TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)]
    logits = x.target_logits.float().clone()
    for i in range(logits.shape[1]):
        for one in warp:
            logits[:, i] = one(x.ids, logits[:, i])
    return logits


def _compiled() -> list[Contestant]:
    """transformers' function and the one without host reads under torch.compile."""
    torch._dynamo.config.recompile_limit = 64
    found = [
        Contestant("transformers, compiled", _function(torch.compile(THEIRS)),
                   compiled=True),
        Contestant("no host read, compiled", torch.compile(_sync_free), single=False,
                   compiled=True),
    ]  # fmt: skip
    return found


def graph_breaks(x: Inputs) -> int:
    """How often torch.compile falls back to Python within transformers' function."""
    told = torch._dynamo.explain(THEIRS)(
        x.ids, x.draft_logits.float(), _gamma(x), x.target_logits.float()
    )
    torch._dynamo.reset()
    return int(told.graph_break_count)


def _vllm_like(x: Inputs) -> Any:
    """The pipeline that vLLM's first rejection sampler describes, in PyTorch; tokens, -1 padded.

    Probabilities of both sides in float32, float64 uniforms, one row of Exp(1) noise a request, a
    recovered token for *every* drafted row, the bonus token by a sampler of its own, then the
    accept tests. vLLM has kernels for the last two; its own code cannot be imported here.
    """
    gamma, drafted = _gamma(x), x.ids[:, 1:]
    q = x.draft_logits.float().softmax(-1)
    p = x.target_logits[:, :gamma].float().softmax(-1)
    bonus_law = x.target_logits[:, gamma].float().softmax(-1)
    bonus = (bonus_law / torch.empty_like(bonus_law).exponential_()).argmax(-1)
    uniform = torch.rand(drafted.shape, dtype=torch.float64, device=p.device)
    race = torch.empty_like(bonus_law).exponential_()[:, None]
    recovered = ((p - q).clamp(min=0) / race).argmax(-1)
    owed, drawn = (law.gather(2, drafted[..., None])[..., 0] for law in (p, q))
    n = ((drawn > 0) & (owed / drawn >= uniform)).long().cumprod(1).sum(1)
    at = torch.arange(gamma + 1, device=p.device)
    last = torch.cat([recovered, bonus[:, None]], 1)
    kept = torch.nn.functional.pad(drafted, (0, 1))
    n = n[:, None]
    return torch.where(at < n, kept, torch.where(at == n, last, -1))


def _flashinfer(x: Inputs) -> Any:
    from flashinfer.sampling import chain_speculative_sampling

    q = x.draft_logits.float().softmax(-1)
    p = x.target_logits.float().softmax(-1)
    return chain_speculative_sampling(q, x.ids[:, 1:].int(), p)[0]


def absent() -> dict[str, str]:
    """Contestants that cannot run on this machine, and why."""
    found = {}
    if find_spec("flashinfer") is None:
        found["FlashInfer chain"] = "not installed"
    elif not torch.cuda.is_available():
        found["FlashInfer chain"] = "needs a CUDA device"
    if not torch.cuda.is_available():
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            why = "torch.compile needs a C++ compiler on a CPU"
            found |= {one.name: why for one in _compiled()}
        found |= dict.fromkeys(("kernels of outrider", "ideal sigmoid"), "needs a CUDA device")
    return found


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
    from kernels.ideal_sigmoid import ideal_sigmoid
    from kernels.one_launch import chain_one_launch

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

    ours = {"graph": True, "single": False, "ragged": True}
    return [
        Contestant(BASE, _function(THEIRS)),
        Contestant("transformers and its copies", _copied(THEIRS)),
        *_compiled(),
        Contestant("transformers, reduce-overhead", _function(
            torch.compile(THEIRS, mode="reduce-overhead")), compiled=True),
        Contestant("PyTorch, no host read", _sync_free, graph=True, single=False),
        Contestant("vLLM-like (PyTorch)", _vllm_like, graph=True, single=False),
        Contestant("FlashInfer chain", _flashinfer, graph=True, single=False),
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
        Contestant("filters, transformers", _warpers, drafts=False, emits=False),
        Contestant("filters, kernels", _filters("triton"), drafts=False, emits=False, **ours),
        Contestant("match, greedy", greedy, drafts=False, emits=False, **ours),
        Contestant("draft-step sampler", sample, drafts=False, emits=False, **ours),
    ]  # fmt: skip
