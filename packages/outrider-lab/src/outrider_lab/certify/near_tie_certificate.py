"""Certificates for runs whose every token is determined: greedy and coupled decoding.

Teacher-force the emitted text. Each token must maximise z (greedy) or z / T + Gumbel noise of its
position (coupled), up to a tolerance measured on the same model: twice the 99.99 % quantile of how
much its logits move when the same tokens are fed in blocks of another size. A near-tie within the
tolerance is explained by rounding; anything else is a mistake.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.models.prefill import causal
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import LanguageModel
from outrider_lab.certify.laws import CertifiedText, Scored, pad, read
from outrider_lab.certify.report import Test

QUANTILE, FACTOR = 0.9999, 2.0


@torch.inference_mode()
def tolerance(
    model: LanguageModel, texts: Sequence[CertifiedText], nodes: int, steps: int = 12
) -> float:
    """How far the model's logits move between blocks of one and of `nodes` tokens."""
    device = torch.device(model.device)
    tokens = pad(texts, SamplingParams(0), device).tokens_BL
    nodes = max(nodes, 2)
    steps = min(steps, tokens.shape[1] - 1)
    start = tokens.shape[1] - steps
    capacity = model.width(tokens.shape[1] + nodes)

    inputs = read(model, texts)

    def feed(sizes: list[int]) -> Tensor:
        cache, at, found = model.open(len(texts), capacity, inputs), 0, []
        for size in sizes:
            where = torch.arange(at, at + size, device=device)[None].expand(len(texts), -1)
            nodes = causal(tokens[:, at : at + size], where, capacity)
            found.append(model.forward(cache, nodes).logits_BQV.float())
            at += size
        return torch.cat(found[1:], 1)

    single = feed([start] + [1] * steps)
    block = [nodes] * (steps // nodes) + ([steps % nodes] if steps % nodes else [])
    gap = (single - feed([start, *block])).abs().flatten()
    whole = (single - feed([1, start - 1 + steps])[:, -steps:]).abs().flatten()
    gap = torch.cat([gap, whole])
    rank = max(int(gap.numel() * (1 - QUANTILE)), 1)
    return FACTOR * float(gap.topk(rank).values[-1])


def shortfall(scored: Scored, race_BTV: Tensor | None) -> Tensor:
    """[B, T]: by how much the emitted token misses the maximum; 0 where it is the maximum."""
    if race_BTV is None:
        merit = scored.laws.logits_BRV.float()
    else:
        merit = ops.scaled(scored.laws) - race_BTV.log()
    best = merit.amax(-1)
    gap = best - merit.gather(-1, scored.token_BT[..., None])[..., 0]
    return torch.where(scored.valid_BT, gap, 0.0)


def race(scored: Scored, seed_B: Tensor) -> Tensor:
    """The target's own noise at the emitted tokens' positions, [B, T, V]."""
    vocab = scored.laws.logits_BRV.shape[-1]
    keys = noise.stream(seed_B[:, None], scored.position_BT, noise.Purpose.TARGET)
    return noise.exponentials(keys, vocab)


def certificate(name: str, gaps: Sequence[Tensor], count: int, allowed: float) -> Test:
    """Passes if every shortfall is within the tolerance."""
    gap = torch.cat([g.flatten() for g in gaps])
    worst = float(gap.max()) if gap.numel() else 0.0
    tied = int(((gap > 0) & (gap <= allowed)).sum())
    wrong = int((gap > allowed).sum())
    detail = (
        f"{wrong} unexplained, {tied} explained by ties; worst {worst:.2g}, allowed {allowed:.2g}"
    )
    return Test(name, float(wrong), None, count, wrong == 0, detail)


def outside(scored: Scored, allowed: float) -> int:
    """How many emitted tokens lie outside the filtered support of their law."""
    floor = scored.laws.floor_BR
    logit = scored.laws.logits_BRV.gather(-1, scored.token_BT[..., None])[..., 0].float()
    out = logit == -torch.inf  # banned
    if floor is not None:
        out |= logit < floor - allowed
    return int((out & scored.valid_BT).sum())


def stretch(sampling: SamplingParams) -> float:
    """How much further apart penalties can move logits that differ by rounding.

    >>> stretch(SamplingParams(repetition_penalty=0.5))
    2.0
    """
    return max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
