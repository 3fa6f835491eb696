"""Log-probabilities of what a step emitted, and of the likeliest tokens beside it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from outrider import arguments
from outrider.errors import UnknownName
from outrider.models.prefill import inference
from outrider.types import Scores, StepTensors, Verdict

ReportedProbs = Literal["processed", "shaped", "raw"]


@dataclass(frozen=True)
class Logprobs:
    """What a request wants to be told of its tokens.

    top  how many of the likeliest tokens at each place, with theirs
    law  "processed": the law that the token was emitted from, penalties, temperature and filters
         in (greedy requests, whose law is one-hot, are told of "shaped"); "shaped": penalties,
         biases and processors in, at temperature 1; "raw": the model's own

    Raises ConfigurationError for a number that is none, UnknownName for another law.

    >>> Logprobs(5, "raw").top
    5
    """

    top: int = 0
    law: ReportedProbs = "processed"

    def __post_init__(self) -> None:
        arguments.wholes(self, "use 0 for the emitted token alone", top=0)
        if self.law not in get_args(ReportedProbs):
            raise UnknownName("law of log-probabilities", self.law, get_args(ReportedProbs))


class StepLogprobs(NamedTuple):
    """Log-probabilities by row and place of a block."""

    logs_BT: Tensor  #: of the emitted tokens
    top_ids_BTK: Tensor  #: the likeliest tokens, the best first
    top_logs_BTK: Tensor


@inference
def gather_logprobs(
    scores: Scores, verdict: Verdict, block: StepTensors, asked: Logprobs
) -> StepLogprobs:
    """What is asked, for every row of a block; behind a row's end it says nothing of use."""
    root = torch.zeros_like(verdict.count_B)[:, None]
    nodes_BT = torch.cat([root, verdict.path_BD.clamp(min=0)], 1)
    logs_BTV = _law(scores, nodes_BT, asked.law)
    vocab = logs_BTV.shape[-1]
    logs_BT = logs_BTV.gather(2, block.tokens_BT.clamp(max=vocab - 1)[..., None])[..., 0]
    top = logs_BTV.topk(min(asked.top, vocab), -1)
    return StepLogprobs(logs_BT, top.indices, top.values)


def _law(scores: Scores, nodes_BT: Tensor, law: ReportedProbs) -> Tensor:
    """Log-probabilities [B, T, V] of a law at some nodes."""
    laws, raw = scores.laws, scores.raw_BNV
    logits_BNV = raw if law == "raw" and raw is not None else laws.logits_BRV
    vocab = logits_BNV.shape[-1]
    logits = logits_BNV.gather(1, nodes_BT[..., None].expand(-1, -1, vocab)).float()
    if law != "processed":
        return logits.log_softmax(-1)
    inverse = laws.inverse_temperature_B[:, None, None]
    inverse = torch.where(torch.isinf(inverse), 1.0, inverse)
    if laws.floor_BR is not None:
        floor = laws.floor_BR.gather(1, nodes_BT)[..., None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return (logits * inverse).log_softmax(-1)
