"""Requests being decoded: they come and go while others run, one step of all after another.

    run = EngineRun(engine, max_num_seqs=8)
    request_id = run.submit(Request(prompt, ...))
    blocks = run.step()
    run.end(request_id, "cancelled")

The loop, as long as a request is not over:

    schedule   rows that are over leave, prompts are read, newcomers get a row   scheduler.py
    plan       what to draft in this step: a chain, a tree, nothing             speculation_policy/
    propose    the drafter's tokens                                             step.py
    score      the target's laws at each of them, in one call
    verify     which are kept, and the token behind them
    commit     the kept path becomes text; the rest is forgotten
    process    what was emitted is counted and made ready to be told            outputs.py
    learn      the planner sees what was kept, and what it took

Rows, and what becomes of a request: docs/requests-and-rows.md.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import arguments
from outrider.engine import graphs
from outrider.engine.batch import Batch, read_rest
from outrider.engine.graphs import Graphed
from outrider.engine.outputs import (
    OutputProcessor,
    ReadOutput,
    RequestState,
    RequestStatus,
    RequestTable,
    StepOutput,
)
from outrider.engine.request import Request, check, clip_shape
from outrider.engine.scheduler import Scheduler
from outrider.engine.speculation_policy import (
    AdaptiveState,
    BatchView,
    FixedLength,
    PlannedRow,
    StepReport,
)
from outrider.engine.step import GraphedStep, ignores_drafts, spec_decode_step
from outrider.errors import CapacityError, ConfigurationError
from outrider.models.prefill import inference
from outrider.models.prefix_cache import PrefixCache
from outrider.sampling import logits_processors
from outrider.sampling.custom_processors import ProcessorError
from outrider.sampling.sampling_params import fresh_seed
from outrider.stats import Clock, RequestStats, Stats
from outrider.types import PLAIN, Draft, DraftShape, Scores, StepTensors, Verdict

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

#: Called after every step with what the verbs made; rows name the requests of the batch's rows.
#: What it is shown may be kept, but not written to.
Observer = Callable[[Draft, Scores, Verdict, StepTensors, list[int]], None]


class EngineRun(Iterator[StepOutput]):
    """Requests being decoded: `submit` and `end` them while others run, `step`, or iterate.

    max_num_seqs  how many rows run side by side; others wait, first come first served
    capacity      slots of a row: prompt, budget and draft tree. None: the model's context
    prefixes      what is kept of prompts, for others that begin alike; runs of one thread may
                  share it. Of models that read more than text, and for heads, nothing is kept

    Iterating ends when nothing is left to do. A request that failed raises its error there, once;
    the others go on if the iteration does.
    """

    def __init__(
        self,
        engine: "Engine",
        max_num_seqs: int = 8,
        capacity: int | None = None,
        *,
        trace: bool = False,
        observe: Observer | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.engine, self._observe = engine, observe
        self._size = engine.drafter.shapes[0].max_nodes
        if capacity is None:
            if engine.target.context >= 1 << 30:
                raise CapacityError(
                    "the model names no context to size rows by; got capacity=None; give capacity"
                )
            capacity = engine.target.context + self._size
        self.capacity = capacity
        arguments.whole("max_num_seqs", max_num_seqs, "give at least one", least=1)
        room = engine.slots(max_num_seqs, capacity)
        self.rule, self._device = engine.choose_rule("all"), torch.device(engine.target.device)
        self._graphed: Graphed | None = None
        self._requests = RequestTable()
        #: Of each request that is not forgotten.
        self.states: Collection[RequestState] = self._requests.entries.values()
        self._scheduler = Scheduler(
            engine.target, engine.drafter, self._requests, max_num_seqs, room, prefixes,
            at_once=engine.capture is None and self._device.type == "cpu",
        )  # fmt: skip
        self._reads = engine.target.reads != "text"
        self._plan = engine.planner.open(engine.shapes, engine.priced(max_num_seqs))
        #: Whether the planner is not asked ahead of the step under way; steps it has not been told.
        self._rests, self._untold = False, list[StepReport]()
        self._planned: list[int] = []  #: the rows that it was asked of last
        self._closed = False
        self._clock, self._mark = Clock(self._device), 0.0
        lag = int(self._device.type == "cuda")
        #: What steps are timed with: as those that were measured (`measure`).
        self._seconds = time.thread_time if self._device.type == "cpu" else time.perf_counter
        self._outputs = OutputProcessor(self._requests, lag, trace)

    # ------------------------------------------------------------------ requests come and go

    def submit(self, request: Request) -> int:
        """Queue a request; its id. Raises its error at once if it cannot be decoded here."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[int]:
        """Queue several, or none of them if one is refused."""
        if self._closed:
            raise ConfigurationError(
                f"this run is closed; got {len(requests)} more; submit to another run"
            )
        target, shaped = self.engine.target, False
        for request_id, request in enumerate(requests, self._requests.count):
            check(request, request_id, target, self._reads)
            limit, size = request.end(target.context)[0], len(request.prompt)
            if limit + self._size > self.capacity:
                raise CapacityError(
                    f"prompt {request_id} needs {size} tokens + budget {limit - size} + "
                    f"{self._size} tree nodes, but capacity={self.capacity}; raise capacity or "
                    "lower max_new_tokens"
                )
            if self.engine.graphs is True:
                graphs.check(request.sampling, request_id)
            shaped = shaped or request.sampling.shapes
        if shaped:
            requests = self._validated(requests)
        request_ids = []
        for request in requests:
            sampling = request.sampling
            if sampling.temperature:
                rule, self.rule = self.rule, self.engine.choose_rule("some")
                if self._graphed is not None and rule != self.rule:
                    self._graphed = self.engine.graphed(self.rule, self._graphed)
            if sampling.seed is None:
                request = replace(request, sampling=replace(sampling, seed=fresh_seed()))
            request_ids.append(self._requests.add(request))
        self._scheduler.queue.waiting += request_ids
        return request_ids

    def _validated(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with logits processors as they can be called at tree nodes."""
        settings = logits_processors.validate(
            [request.sampling for request in requests],
            [request.prompt for request in requests],
            [request.limits.stop_ids for request in requests],
            self.engine.target.vocab_size,
            self._device,
            self._requests.count,
            [entry.request.sampling for entry in self.states if not entry.over],
        )
        each = zip(requests, settings, strict=True)
        return [replace(request, sampling=sampling) for request, sampling in each]

    def close(self) -> None:
        """Take no more requests."""
        self._closed = True

    def end(self, request_id: int, reason: str = "cancelled", keep: int | None = None) -> None:
        """End a request from outside: a stop string, a closed connection.

        `keep` is how many of its tokens count, all that were told by default. One that ended by
        itself can still be cut, as its last block may hold a stop string. Raises ConfigurationError
        for a request that was ended from outside before, or failed, or is not there.
        """
        self._requests.check_end(request_id, reason)
        waits = self._requests.entries[request_id].phase is RequestStatus.WAITING
        self._requests.end(request_id, reason, keep)
        if waits:
            self._scheduler.queue.waiting.remove(request_id)
        if self.done:
            self._mark = 0.0

    def release(self, request_id: int) -> RequestStats:
        """Keep nothing of a request that is over, for runs that never end; its statistics.

        Raises ConfigurationError for one that is not over, or not there.
        """
        stats = self._requests.forget(request_id)
        if self.done:  # no turn will come
            self._learn(self._outputs.read())
            self._scheduler.leave()
            self._requests.sweep(self._scheduler.named + self._outputs.named)
        return stats

    # ------------------------------------------------------------------ what has become of them

    @property
    def done(self) -> bool:
        """Whether every request is over."""
        return not self._requests.left

    @property
    def batch(self) -> Batch | None:
        """The rows under way, for steps by hand and tests; None before the first step."""
        return self._scheduler.batch

    @property
    def phases(self) -> list[RequestStatus]:
        """Where each request stands."""
        return [entry.phase for entry in self._requests.entries.values()]

    @property
    def reasons(self) -> list[str | None]:
        """Why each request is over, None while it is not."""
        return [entry.reason for entry in self._requests.entries.values()]

    def reason(self, request_id: int) -> str | None:
        """Why a request is over, None while it is not."""
        self._requests.check(request_id)
        return self._requests.entries[request_id].reason

    def cached(self, request_id: int) -> int:
        """How many tokens of a request's prompt were copied from one that was read before."""
        self._requests.check(request_id)
        return self._requests.entries[request_id].stats.cached_tokens

    @property
    def requests(self) -> list[RequestStats]:
        """Statistics of each request that is not forgotten."""
        return [entry.stats for entry in self._requests.entries.values()]

    @property
    def errors(self) -> dict[int, Exception]:
        """The errors of requests that failed."""
        entries = self._requests.entries.items()
        return {request_id: entry.error for request_id, entry in entries if entry.error is not None}

    def prompt_logits(self, request_id: int) -> Tensor | None:
        """The model's logits [V] behind the watched place of a request's prompt.

        They are told once, and are there from the first block on; None if it watches no place.
        """
        entry = self._requests.entries[request_id]
        logits, entry.watched_V = entry.watched_V, None
        return logits

    @property
    def stats(self) -> Stats:
        """Totals up to the last step."""
        stats, self._rests = self._requests.stats, False
        self._learn(())
        stats.predicted_ms, stats.why_plain = self.engine.planner.report(self._plan)
        if not isinstance(self.engine.planner, FixedLength):
            stats.why_dropped = self.engine.watch.why
        stats.why_eager = self.engine.eager
        if not (self._requests.left and self._outputs.lag):  # events are waited for at the end
            stats.clock(self._clock.read())
        return stats

    # ------------------------------------------------------------------ the loop

    def __next__(self) -> StepOutput:
        while not self._requests.ready:
            if not self._requests.left:
                raise StopIteration
            self._turn()
        block = self._requests.ready.popleft()
        error = self._requests.entries[block.request_id].error
        if error is not None and block.finish_reason == "error":
            raise error
        return block

    def step(self) -> list[StepOutput]:
        """Schedule, make one step of those who run, and return what was emitted.

        A request that failed has a last block with finish_reason "error"; `errors` says why.
        """
        if not self.done:
            self._turn()
        blocks = list(self._requests.ready)
        self._requests.ready.clear()
        return blocks

    @inference
    def _turn(self) -> None:
        """Rows that are over leave, prompts are read, newcomers get a row, and all make a step."""
        self._mark = self._mark or time.perf_counter()
        entries, rows = self._requests.entries, self._scheduler.rows
        if self._outputs.lag and any(entries[request_id].cut for request_id in rows):
            self._learn(self._outputs.read())  # what is unread tells whether their rows are clean
        self._scheduler.leave()
        if self._requests.forgotten:
            self._requests.sweep(self._scheduler.named + self._outputs.named)
        rests = not isinstance(self.engine.planner, FixedLength)
        ignores_drafts = self._ignores_drafts if rests else None
        try:
            reading = self._scheduler.arrive(ignores_drafts)
        except (MemoryError, RuntimeError) as error:
            if not self.engine.spare(error):
                raise
            reading = self._scheduler.arrive(ignores_drafts)
        if self._scheduler.rows:
            self._step()
        over = not self._requests.left
        if self._closed and over and self._graphed is not None:
            self._scheduler.leave()  # a step that is still on its way is waited for by nobody
            self._scheduler.batch = None
            self._graphed.release()  # its buffers, and the graphs over them, to runs that come
        now, stats = time.perf_counter(), self._requests.stats
        stats.seconds += now - self._mark - reading
        stats.prefill_ms += 1e3 * reading
        self._mark = 0.0 if over else now

    def _step(self) -> None:
        """One step of all rows. A row whose own processors fail leaves, and the others step."""
        read = 0.0  # seconds of it that went to the ends of prompts
        while self._scheduler.rows:
            batch = self._scheduler.bounded(len(self._outputs.in_flight), self._size)
            started = self._seconds()
            shape = self._draft_shape(batch)
            if shape.max_depth and batch.context.prompt_rest:  # it may read the target's cache
                begun = time.perf_counter()
                batch = self._scheduler.batch = read_rest(self.engine.target, batch)
                read = time.perf_counter() - begun
            rest = batch.context.prompt_rest
            scored = self._clock.read().get("score", 0.0) if rest else 0.0
            try:
                self._clock.start()
                made = self._made(batch, shape)
                break
            except ProcessorError as error:  # nothing of the step has been committed
                failing = self._scheduler.rows[error.row]
                entry = self._requests.entries[failing]
                if shape.max_depth and entry.request.num_speculative_tokens != 0:
                    # what it fails on may only be drafted: from here on nothing is, for this row
                    entry.request = replace(entry.request, num_speculative_tokens=0)
                    continue
                self._requests.blame(failing, error)
                self._scheduler.leave()
            except (MemoryError, RuntimeError) as error:
                if not (self.engine.spare(error) or self.engine.room.lost(shape, error)):
                    raise
        else:
            return
        rows = list(self._scheduler.rows)
        if rest:  # its part of the call: products take time by the node
            read = 1e-3 * (self._clock.read()["score"] - scored) * rest / (rest + 1)
            self._clock.lap("score", -read)
        if read:
            self._requests.stats.prefill_ms += 1e3 * read
            self._mark += read
            for request_id in rows:
                self._requests.entries[request_id].started += read
        output = self._outputs.collect(made, rows)
        self._scheduler.batch = made.batch
        try:
            if self._observe is not None:
                with torch.inference_mode(False):  # an observer may differentiate copies
                    self._observe(made.draft, made.scores, made.verdict, made.block, rows)
                self._clock.start()
        finally:  # the batch has gone on: if the observer fails, its tokens are told nevertheless
            seconds = None if read else self._seconds() - started
            self._learn(self._outputs.process(output, seconds))
        self._clock.lap("emit")
        self._requests.stats.sizes[made.draft.tree.nodes] += 1
        self._requests.stats.engine_steps += 1

    def _learn(self, steps: Sequence[ReadOutput]) -> None:
        """What the planner learns from finished steps; whether their drafts are of no use.

        While it rests several steps are told at once, as one by one costs several times as much.
        """
        late = bool(self._outputs.lag)
        for output, blocks in steps:  # none of its tensors is held until the planner is told
            tree, took = output.draft.tree, None
            if output.seconds is not None and not late:
                took = 1e3 * output.seconds
            self._untold.append(StepReport(blocks, tree.nodes, tree.max_depth, took, late))
        if self._rests and not any(block.finish_reason for _, each in steps for block in each):
            return
        untold, self._untold = self._untold, []
        watch, batch = self.engine.watch, self._scheduler.batch
        for step in untold:
            if not watch.over and batch is not None:
                watched = step.blocks
                if self.engine.mixed is not None:  # what a draft model may have drafted, no copies
                    asked = self.engine.mixed.by_model(batch.memory)
                    each = zip(self._scheduler.rows, asked, strict=True)
                    rows = {request_id for request_id, by_model in each if by_model}
                    watched = [block for block in watched if block.request_id in rows]
                if watch.observe(watched):
                    context, row = batch.context, 0
                    self.engine.note_zero(context.tokens_BL[row, : context.length_B[row]].tolist())
            self._plan = self.engine.planner.learn(self._plan, step)

    def _made(self, batch: Batch, shape: DraftShape) -> GraphedStep:
        """What the verbs make: one by one on the clock, or in one piece."""
        engine, clock, rule = self.engine, self._clock, self.rule
        shaping = batch.context.sampling.shaping
        # Python is needed for a row's own processors, and for an observer, who may keep tensors:
        # who asks for graphs by name is told of the one, and knows the other
        by_hand = self._observe is not None or (shaping is not None and shaping.processed)
        if engine.capture is None or (by_hand and engine.graphs is not True):
            return spec_decode_step(engine.target, engine.drafter, rule, batch, shape, clock.lap)
        self._graphed = self._graphed or engine.graphed(rule)
        assert self._graphed is not None
        made, stats = self._graphed(batch, shape), self._requests.stats
        did = self._graphed.did
        clock.lap("graph" if did == "replayed" else "capture")
        stats.captures += did == "captured"
        stats.replays += did == "replayed"
        return made

    def _ignores_drafts(self, requests: Sequence[Request]) -> bool:
        """Whether no text of these can depend on what is drafted."""
        greedy = True
        for request in requests:
            greedy = greedy and request.sampling.temperature == 0
        return ignores_drafts(self.rule, greedy)

    def _draft_shape(self, batch: Batch) -> DraftShape:
        """What the planner has drafted in this step."""
        request_ids, planner = self._scheduler.rows, self.engine.planner
        if type(planner) is FixedLength:  # whoever the rows are
            shape = self.engine.room.fitting(planner.plan(self._plan, BatchView(())))
            return clip_shape(shape, self._scheduler.requests(request_ids))
        plan = self._plan if self._planned == request_ids else None
        self._rests = False
        if isinstance(plan, AdaptiveState) and plan.rest:
            plan.rest -= 1
            self._rests = True
            return PLAIN
        self._planned = list(request_ids)
        self._learn(())
        foreseeing, mixed = self.engine.foreseeing, self.engine.mixed
        foresee: Callable[[], Sequence[float]] | None = None
        if foreseeing is not None:
            all_rows = cache(partial(foreseeing.foresee, batch.memory, batch.context))
        rows, requests, limited = [], [], False
        for at, request_id in enumerate(request_ids):
            entry = self._requests.entries[request_id]
            if foreseeing is not None:
                foresee = partial(lambda at: all_rows()[at], at)
            requests.append(entry.request)
            limited = limited or entry.request.num_speculative_tokens is not None
            rows.append(PlannedRow(request_id, entry.request, entry.length, foresee))
        ignores_drafts = self._ignores_drafts(requests)
        queue, unread = self._scheduler.queue, batch.context.unread
        closed, dropped = self._closed and not queue.waiting, bool(self.engine.watch.why)
        if mixed is not None:  # copies go on without the model
            if dropped:
                alone = [at for at, row in enumerate(rows) if self._ignores_drafts([row.request])]
                mixed.drop(batch.memory, alone)
            unread, dropped = mixed.reads(batch.memory), False
        view = BatchView(rows, queue.max_num_seqs, ignores_drafts, closed, unread, dropped)
        shape = planner.plan(self._plan, view)
        shapes = self.engine.shapes
        if shape not in shapes and shape._replace(most_B=None, sizes=None) not in shapes:
            raise ConfigurationError(
                f"the planner must choose one of the shapes of {self.engine.drafter.name!r}; got "
                f"{shape.key!r}; choose among {[shape.key for shape in shapes]}"
            )
        if self.engine.room.most is not None:
            shape = self.engine.room.fitting(shape)
        return clip_shape(shape, requests) if limited else shape
