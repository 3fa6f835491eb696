"""What a step emitted, on its way from the device to the host, and there."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from outrider import arguments
from outrider.errors import UnknownName
from outrider.models.prefill import inference
from outrider.types import Draft, Scores, StepLists, StepTensors, Verdict

# Log-probabilities of what a step emitted, and of the likeliest tokens beside it.

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


#: Log-probabilities of tokens, and of the likeliest beside each; None where nobody asked.
RowLogprobs = tuple[list[float] | None, list[list[tuple[int, float]]] | None]


@dataclass(frozen=True)
class Trace:
    """What was proposed in one step and what became of it, for one row."""

    tokens: list[int]  #: drafted tokens, node 1 first
    parents: list[int]  #: parent node of each, 0 is the pending token
    accepted: list[int]  #: accepted nodes from the root down
    next_is_bonus: bool  #: the next token follows a leaf: nothing was rejected on its way


@dataclass(frozen=True)
class StepOutput:
    """The tokens that one step emitted for one request; `finish_reason` if that was its last."""

    row: int  #: the request's number
    token_ids: list[int]
    accepted: int  #: how many of them were drafted; the last one of an uncut block is the target's
    finish_reason: str | None
    drafted: int = 0  #: children that the rule was offered
    trace: Trace | None = None
    logprobs: list[float] | None = None  #: of its tokens, if they were asked for
    #: the likeliest tokens at each place with theirs, the best first, if they were asked for
    likeliest: list[list[tuple[int, float]]] | None = None


@dataclass
class InFlightOutput:
    """A block on its way to the host."""

    block: StepTensors
    draft: Draft
    verdict: Verdict
    requests: list[int]
    traced: list[bool]  #: by row
    logprobs: dict[Logprobs, StepLogprobs] = field(default_factory=dict)  #: what rows ask for
    wanted: list[Logprobs | None] | None = None  #: by row
    seconds: float = 0.0  #: what the step took of the host
    _block: list[torch.Tensor] = field(init=False, default_factory=list)
    _trace: list[torch.Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        b = self.block
        self.event: Any = None
        parts: list[torch.Tensor] = []
        if b.lists is None:
            with torch.inference_mode():
                overlaps_B = b.overlaps_B.expand_as(b.emitted_B)
                counts = [b.emitted_B, b.reason_B, b.accepted_B, b.drafted_B, overlaps_B]
                parts += [b.tokens_BT, torch.stack(counts), b.overlap_B]
        if any(self.traced):
            d, v = self.draft, self.verdict
            parts += [d.tokens_BN, d.tree.parent_BN, d.draws_BNK, v.path_BD]
        for told in self.logprobs.values():
            parts += told
        if b.emitted_B.is_cuda:
            parts = [part.to("cpu", non_blocking=True) for part in parts]
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()
        for asked in reversed(self.logprobs):
            self.logprobs[asked] = StepLogprobs(*parts[-3:])
            del parts[-3:]
        if b.lists is None:
            self._block, parts = parts[:3], parts[3:]
        self._trace = parts

    def read(self) -> StepLists:
        """The block on the host, once it has arrived."""
        if self.block.lists is not None:
            return self.block.lists
        if self.event is not None:
            self.event.synchronize()
        tokens, counts, overlap = self._block
        emitted, reason, accepted, drafted, overlaps = counts.tolist()
        return StepLists(
            tokens.tolist(), emitted, reason, accepted, drafted, overlap.tolist(), overlaps
        )

    def logprobs_of(self, row: int, count: int) -> RowLogprobs:
        """Of a row's first tokens: their log-probabilities, and the likeliest beside them."""
        asked = None if self.wanted is None else self.wanted[row]
        if asked is None:
            return None, None
        logs, ids, tops = (table[row, :count].tolist() for table in self.logprobs[asked])
        if not asked.top:
            return logs, None
        return logs, [list(zip(*place, strict=True)) for place in zip(ids, tops, strict=True)]

    def trace_of(self, row: int) -> Trace | None:
        if not self.traced[row]:
            return None
        tokens, parents, draws, path = self._trace
        shared = 0 if parents.shape[0] == 1 else row
        table = draws[0 if draws.shape[0] == 1 else row]
        offered = {kid for kids in table.tolist() for kid in kids if kid >= 0}
        accepted = [n for n in path[row].tolist() if n >= 0]
        nodes = sorted(offered)
        number = {0: 0} | {node: i for i, node in enumerate(nodes, start=1)}
        parent = parents[shared].tolist()
        leaf = accepted[-1] if accepted else 0
        return Trace(
            [int(tokens[row, n]) for n in nodes],
            [number[parent[n]] for n in nodes],
            [number[n] for n in accepted],
            all(parent[n] != leaf for n in nodes),
        )
