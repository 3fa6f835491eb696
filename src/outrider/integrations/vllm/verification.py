"""A rule's verdict on the drafts of vLLM's rows, from and to the tables that vLLM has.

vLLM lays the drafted tokens of all rows one behind another and has drawn the token behind each
row's last one already. A rule that comes to the end of a draft draws from the target's law there,
so that token is as good as its own, and stands for it.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider import verifiers
from outrider.row_params import Greedy
from outrider.tree import branching, children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores, Verifier

_MOST_SEED = 1 << 62


class VllmSampling(Protocol):
    """What is read of vLLM's `SamplingMetadata`."""

    temperature: Tensor | None  #: [B], 0 for greedy rows; None if all are
    all_greedy: bool
    all_random: bool
    generators: dict[int, torch.Generator]  #: of rows with a seed


class VllmDraft(NamedTuple):
    """The drafts of B rows, T tokens in all."""

    tokens_T: Tensor  #: one row's behind another's; below 0: none, and none behind it
    counts: list[int]  #: of each row
    logits_TV: Tensor  #: the target's, divided by temperatures, filtered
    probs_TV: Tensor | None  #: the laws that the tokens were drawn from; None: they were placed
    bonus_B1: Tensor  #: the token behind a draft that is kept whole


def judged(rule: Verifier, drafted: VllmDraft, sampling: VllmSampling) -> Tensor:
    """[B, most + 1], int32: the kept tokens of each row and one more, then -1."""
    device = drafted.logits_TV.device
    counts_B1 = torch.tensor(drafted.counts, device=device)[:, None]
    rows, depth = len(drafted.counts), max(drafted.counts)
    step_D = torch.arange(depth, device=device)
    inside_BD = step_D < counts_B1
    place_BD = torch.where(inside_BD, counts_B1.cumsum(0) - counts_B1 + step_D, 0)
    tokens_BD = drafted.tokens_T.long()[place_BD]
    there_BD = (inside_BD & (tokens_BD >= 0)).long().cumprod(1).bool()
    tokens_BD = torch.where(there_BD, tokens_BD, 0)

    # behind a row's draft any law will do: what is drawn there is drawn already
    logits_BDV = drafted.logits_TV[place_BD].masked_fill(~inside_BD[..., None], 0.0)
    logits_BNV = torch.nn.functional.pad(logits_BDV, (0, 0, 0, 1))
    laws = Laws(logits_BNV, _inverse(sampling, rows, device), greedy=_greedy(sampling))
    guess = None if drafted.probs_TV is None else drafted.probs_TV[place_BD]
    draft = _draft(tokens_BD, there_BD, guess)
    draws = Draws(_seeds(drafted.counts, sampling, device), counts_B1.new_zeros(rows))
    verdict = verifiers.run_kernel(rule, draft, Scores(laws), draws)

    count_B1 = verdict.count_B[:, None]
    whole_B1 = count_B1 == counts_B1
    last_B1 = torch.where(whole_B1, drafted.bonus_B1.long(), verdict.next_B[:, None])
    kept_BD = torch.where(step_D < count_B1, tokens_BD, -1)
    found_BN = torch.nn.functional.pad(kept_BD, (0, 1), value=-1)
    return found_BN.scatter(1, count_B1, last_B1).int()


def _draft(tokens_BD: Tensor, there_BD: Tensor, guess_BDV: Tensor | None) -> Draft:
    """Chains of these tokens below pending ones, which no rule reads."""
    rows, depth = tokens_BD.shape
    ones, device = (1,) * depth, tokens_BD.device
    kind = DrawKind.FIXED if guess_BDV is None else DrawKind.WITHOUT
    there_BN1 = torch.nn.functional.pad(there_BD, (0, 1))[..., None]
    draws_BN1 = torch.where(there_BN1, children(ones, device), -1)
    none_BN1 = torch.full_like(draws_BN1, -1)
    at_N1 = torch.arange(depth + 1, device=device)[:, None]
    row_BN1 = none_BN1 if guess_BDV is None else torch.where(there_BN1, at_N1, -1)
    laws = None
    if guess_BDV is not None:
        laws = Laws(guess_BDV.log(), torch.ones(rows, device=device), greedy="none")
    return Draft(
        torch.nn.functional.pad(tokens_BD, (1, 0)),
        branching(ones, device),
        draws_BN1,
        torch.full_like(none_BN1, int(kind)),
        row_BN1,
        laws,
        frozenset({kind}),
    )


def _inverse(sampling: VllmSampling, rows: int, device: torch.device) -> Tensor:
    """Logits are divided by temperatures already; a greedy row takes the first of the largest."""
    if sampling.temperature is None or sampling.all_greedy:
        return torch.full((rows,), torch.inf, device=device)
    ones = torch.ones(rows, device=device)
    return ones.masked_fill(sampling.temperature == 0, torch.inf)


def _greedy(sampling: VllmSampling) -> Greedy:
    return "all" if sampling.all_greedy else "none" if sampling.all_random else "some"


def _seeds(counts: list[int], sampling: VllmSampling, device: torch.device) -> Tensor:
    """[B]: of this step's noise, from a row's own generator if it has one and a draft."""
    seeds = torch.randint(_MOST_SEED, (len(counts),), device=device)
    for row, generator in sampling.generators.items():
        if counts[row]:
            seeds[row : row + 1].random_(0, _MOST_SEED, generator=generator)
    return seeds
