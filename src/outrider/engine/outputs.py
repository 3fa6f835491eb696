"""What has become of a run's requests, and what steps emitted for them: from the device to those
who asked.

A step's tokens are read, counted for their requests, and made ready to be told. On CUDA the host
reads them while the next step runs; on a CPU there is nothing to wait for, and they are counted at
once. Tokens are not turned into text here, and stop strings are not looked for: that is
`outrider.text.output_text`.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider import arguments
from outrider.engine.request import Logprobs, LogprobsMode, Request
from outrider.engine.step import GraphedStep
from outrider.errors import ConfigurationError, NumericalError
from outrider.models.prefill import inference
from outrider.sampling.custom_processors import ProcessorError
from outrider.stats import RequestStats, Stats
from outrider.types import FAULT, REASONS, Draft, Scores, StepLists, StepTensors, Verdict

# Log-probabilities of what a step emitted, and of the likeliest tokens beside it.


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
    logs_BTV = _logprobs(scores, nodes_BT, asked.mode)
    vocab = logs_BTV.shape[-1]
    logs_BT = logs_BTV.gather(2, block.tokens_BT.clamp(max=vocab - 1)[..., None])[..., 0]
    top = logs_BTV.topk(min(asked.top, vocab), -1)
    return StepLogprobs(logs_BT, top.indices, top.values)


def _logprobs(scores: Scores, nodes_BT: Tensor, mode: LogprobsMode) -> Tensor:
    """Log-probabilities [B, T, V] of one mode at some nodes."""
    laws, raw = scores.laws, scores.raw_BNV
    logits_BNV = raw if mode == "raw" and raw is not None else laws.logits_BRV
    vocab = logits_BNV.shape[-1]
    logits = logits_BNV.gather(1, nodes_BT[..., None].expand(-1, -1, vocab)).float()
    if mode != "processed":
        return logits.log_softmax(-1)
    inverse = laws.inverse_temperature_B[:, None, None]
    inverse = torch.where(torch.isinf(inverse), 1.0, inverse)
    if laws.floor_BR is not None:
        floor = laws.floor_BR.gather(1, nodes_BT)[..., None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return (logits * inverse).log_softmax(-1)


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

    request_id: int  #: as `submit` returned it
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
    """A block on its way to the host: `send` it, unless it is there, and `read` it later."""

    block: StepTensors
    draft: Draft
    verdict: Verdict
    requests: list[int]
    traced: list[bool]  #: by row
    wanted: list[Logprobs | None]  #: by row
    logprobs: dict[Logprobs, StepLogprobs] = field(default_factory=dict)  #: what rows ask for
    seconds: float | None = None  #: what the step took of the host; None: it read prompts, too
    event: Any = None  #: behind the copies
    _block: Sequence[torch.Tensor] = ()
    _trace: Sequence[torch.Tensor] = ()

    def send(self) -> None:
        """Begin to copy the block, what was drafted and log-probabilities, if they are wanted."""
        b = self.block
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
        """The block that was sent, once it has arrived."""
        if self.event is not None:
            self.event.synchronize()
        tokens, counts, overlap = self._block
        emitted, reason, accepted, drafted, overlaps = counts.tolist()
        return StepLists(
            tokens.tolist(), emitted, reason, accepted, drafted, overlap.tolist(), overlaps
        )

    def explained(self, row: int, told: StepOutput) -> StepOutput:
        """What a row is told with what it asks for: log-probabilities, what was drafted."""
        asked = self.wanted[row]
        if asked is not None:
            count = len(told.token_ids)
            logs, ids, tops = (table[row, :count].tolist() for table in self.logprobs[asked])
            places = zip(ids, tops, strict=True) if asked.top else ()
            likeliest = [list(zip(*place, strict=True)) for place in places]
            told = replace(told, logprobs=logs, likeliest=likeliest if asked.top else None)
        return replace(told, trace=self._trace_of(row)) if self.traced[row] else told

    def _trace_of(self, row: int) -> Trace:
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


# What has become of the requests of a run: phases, counts, and blocks to be handed on. Host only.
#
# WAITING     in the queue, first come first served
# PREFILLING  its prompt is being read
# RUNNING     it has a row of the batch
# ENDED       a stop, its budget, the context, or a text that somebody ended (a stop string)
# CANCELLED   nobody wants it any more
# FAILED      an error of its own: `RequestState.error`


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"


OVER = (RequestStatus.ENDED, RequestStatus.CANCELLED, RequestStatus.FAILED)
#: What may follow what. A text that has ended by itself may still be cut: its last block can hold
#: a stop string, and then it ended there.
NEXT: dict[RequestStatus, tuple[RequestStatus, ...]] = {
    RequestStatus.WAITING: (RequestStatus.PREFILLING, RequestStatus.ENDED, RequestStatus.CANCELLED),
    RequestStatus.PREFILLING: (RequestStatus.RUNNING, *OVER),
    RequestStatus.RUNNING: OVER,
    RequestStatus.ENDED: (RequestStatus.ENDED, RequestStatus.CANCELLED),
    RequestStatus.CANCELLED: (),
    RequestStatus.FAILED: (),
}


@dataclass
class RequestState:
    """One request of a run."""

    request: Request
    stats: RequestStats
    length: int  #: committed tokens that the host knows of
    phase: RequestStatus = RequestStatus.WAITING
    reason: str | None = None  #: why it is over
    error: Exception | None = None
    cut: bool = False  #: ended from outside
    poisoned: bool = False  #: NaN or +inf came out of its row: its cache may hold some
    started: float = 0.0  #: when it got its row
    watched_V: Tensor | None = None  #: logits behind the watched place of its prompt
    over: bool = False  #: whether nothing more will come

    def watch(self, watched_BV: Tensor, row: int) -> None:
        """Its prompt has been read in this row of a group."""
        if self.request.watched is not None:
            self.watched_V = watched_BV[row].clone()

    def move(self, phase: RequestStatus, reason: str | None = None) -> None:
        """Go on to another phase, one that may follow."""
        assert phase in NEXT[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase, self.reason, self.over = phase, reason, reason is not None


@dataclass
class RequestTable:
    """The requests of a run by id, their counts and the run's, and what is to be told."""

    entries: dict[int, RequestState] = field(default_factory=dict)
    count: int = 0  #: requests so far, those that are forgotten included
    stats: Stats = field(default_factory=Stats)
    ready: deque[StepOutput] = field(default_factory=deque)
    left: int = 0  #: how many are not over
    forgotten: set[int] = field(default_factory=set)  #: to be dropped

    def add(self, request: Request) -> int:
        """A new request, waiting; its id."""
        size, request_id = len(request.prompt), self.count
        self.entries[request_id] = RequestState(request, RequestStats(prompt_tokens=size), size)
        self.stats.prompt_tokens += size
        self.left += 1
        self.count += 1
        return request_id

    def forget(self, request_id: int) -> RequestStats:
        """Keep nothing of a request that is over once nobody names it any more; its statistics."""
        self.check(request_id)
        entry = self.entries[request_id]
        if not entry.over:
            raise ConfigurationError(
                f"request {request_id} is not over; got forget({request_id}); end it first"
            )
        self.forgotten.add(request_id)
        return entry.stats

    def sweep(self, named: Sequence[int]) -> None:
        """Drop what is to be forgotten, but for requests that rows or prompts under way name."""
        for request_id in self.forgotten.difference(named):
            del self.entries[request_id]
        self.forgotten.intersection_update(named)

    def check(self, request_id: int) -> None:
        """Refuse an id that names no request: ConfigurationError."""
        if not arguments.is_whole(request_id) or request_id not in self.entries:
            raise ConfigurationError(
                f"no request {request_id!r}: this run has {len(self.entries)}; give an id that "
                "submit returned"
            )

    def check_end(self, request_id: int, reason: str) -> None:
        """Refuse to end what is not there, or was ended or failed before: ConfigurationError."""
        self.check(request_id)
        entry = self.entries[request_id]
        if entry.cut or entry.error is not None:
            raise ConfigurationError(
                f"request {request_id} is over already ({entry.reason}); got end({request_id}, "
                f"{reason!r}); end it once"
            )

    def end(self, request_id: int, reason: str, keep: int | None) -> None:
        """End a request from outside and count the tokens it keeps; what was not told is dropped.

        `keep=None` keeps all that were told.
        """
        entry = self.entries[request_id]
        told = entry.stats.new_tokens
        told -= sum(len(block.token_ids) for block in self.ready if block.request_id == request_id)
        if keep is not None:
            if not arguments.is_whole(keep) or not 0 <= keep <= told:
                raise ConfigurationError(
                    f"keep must be a number of tokens that request {request_id} has told, at most "
                    f"{told}; got {keep!r}; leave it out to keep them all"
                )
            told = keep
        self.ready = deque(block for block in self.ready if block.request_id != request_id)
        self.stats.new_tokens -= entry.stats.new_tokens - told
        entry.stats.new_tokens, entry.cut = told, True
        self._over(
            entry, RequestStatus.CANCELLED if reason == "cancelled" else RequestStatus.ENDED, reason
        )

    def fail(self, request_id: int, error: Exception) -> StepOutput:
        """Its own error, and nobody else's; its last block."""
        entry = self.entries[request_id]
        entry.error = error
        self._over(entry, RequestStatus.FAILED, "error")
        return StepOutput(request_id, [], 0, "error")

    def blame(self, request_id: int, error: ProcessorError) -> None:
        """Fail the request whose logits processor raised."""
        cause = error.__cause__
        assert isinstance(cause, Exception)
        length = self.entries[request_id].length
        cause.add_note(f"in a logits processor of request {request_id} after {length} tokens")
        self.ready.append(self.fail(request_id, cause))

    def _over(self, entry: RequestState, phase: RequestStatus, reason: str) -> None:
        if not entry.over:
            self.left -= 1
            if entry.started:
                entry.stats.seconds = time.perf_counter() - entry.started
        entry.move(phase, reason)
        if entry.request.inputs is not None:  # what it has read is large
            entry.request = replace(entry.request, inputs=None)

    def record(self, output: InFlightOutput) -> list[StepOutput]:
        """Read what a step emitted, count it for its requests, and make it ready."""
        block, blocks = output.block.lists or output.read(), []
        for at, request_id in enumerate(output.requests):
            entry = self.entries[request_id]
            fault = block.reason[at] == FAULT
            entry.poisoned = entry.poisoned or fault
            if entry.over:
                continue
            if fault:
                blocks.append(self.fail(request_id, _without_logprobs(request_id, entry)))
                continue
            ids = block.tokens[at][: block.emitted[at]]
            entry.length += len(ids)
            for record in (entry.stats, self.stats):
                record.steps += 1
                record.new_tokens += len(ids)
                record.drafted += block.drafted[at]
                record.accept(block.accepted[at])
                record.overlap += block.overlap[at]
                record.overlaps += block.overlaps[at]
            reason = REASONS[block.reason[at]] if block.reason[at] else None
            if reason is not None:
                self._over(entry, RequestStatus.ENDED, reason)
            accepted, drafted = min(block.accepted[at], len(ids)), block.drafted[at]
            told = StepOutput(request_id, ids, accepted, reason, drafted)
            if output.traced[at] or output.wanted[at] is not None:
                told = output.explained(at, told)
            blocks.append(told)
        self.ready += blocks
        return blocks


def _without_logprobs(request_id: int, entry: RequestState) -> NumericalError:
    """What may have left a request without a law, the likeliest first."""
    models = "the target or draft model returned NaN or +inf, or masked every token"
    where, do = f"request {request_id} after {entry.length} tokens", "check weights and dtype"
    if entry.request.sampling.shapes:
        models = f"bans, rules or processors of its sampling left no token, or {models}"
        do = f"loosen those, or {do}"
    return NumericalError(f"{models}, for {where}; {do}")


#: A step that has been read, and what it emitted for each request.
ReadOutput = tuple[InFlightOutput, list[StepOutput]]


@dataclass
class OutputProcessor:
    """Reads what steps emitted, `lag` steps late, and tells the table of requests.

    trace  of every request, not of those alone that ask
    """

    requests: RequestTable
    lag: int
    trace: bool = False
    in_flight: deque[InFlightOutput] = field(init=False, default_factory=deque)

    @property
    def named(self) -> list[int]:
        """The requests that outputs on their way still name."""
        return [request_id for output in self.in_flight for request_id in output.requests]

    def collect(self, made: GraphedStep, request_ids: Sequence[int]) -> InFlightOutput:
        """What a step emitted for these requests, its rows, on its way to the host."""
        wanted, traced = [], []
        logprobs: dict[Logprobs, StepLogprobs] = {}
        for request_id in request_ids:
            request = self.requests.entries[request_id].request
            asked = request.logprobs
            if asked is not None and asked not in logprobs:
                logprobs[asked] = gather_logprobs(made.scores, made.verdict, made.block, asked)
            wanted.append(asked)
            traced.append(self.trace or request.trace)
        output = InFlightOutput(
            made.block, made.draft, made.verdict, list(request_ids), traced, wanted, logprobs
        )
        if output.block.lists is None or logprobs or any(traced):
            output.send()
        return output

    def process(self, output: InFlightOutput, seconds: float | None) -> list[ReadOutput]:
        """A step is done, in so many seconds (None: not counted): read it, or the one before it
        while it is running."""
        output.seconds = seconds
        self.in_flight.append(output)
        if self.lag and all(
            self.requests.entries[request_id].over for request_id in output.requests
        ):
            return self.read()
        return self.read(self.lag)

    def read(self, left: int = 0) -> list[ReadOutput]:
        """Read what is on its way, all but the last few steps: each is told once."""
        done = []
        while len(self.in_flight) > left:
            output = self.in_flight.popleft()
            done.append((output, self.requests.record(output)))
        return done
