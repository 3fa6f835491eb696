"""The loop: propose, score, verify, commit, emit. Tokens only, no text.

    for block in engine.run(prompts, ...):      # one HostBlock per running row and step
        ...

    run = Run(engine, seats=8)                  # requests come and go while others run
    number = run.submit(Request(prompt, ...))
    blocks = run.step()
    run.end(number, "cancelled")

Rows, seats and what becomes of a request: docs/rows-and-seats.md. On CUDA the host reads blocks one
step late, while the next step runs; on a CPU there is nothing to wait for.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider import arguments, tree, verifiers
from outrider.costs import Costs
from outrider.engine import graphs
from outrider.engine.batch import Batch
from outrider.engine.blocks import HostBlock, Pending
from outrider.engine.graphs import Capture, CudaCapture, Graphed, Made, verbs
from outrider.engine.ledger import Ledger, Phase
from outrider.engine.logprobs import Logprobs, Told, told
from outrider.engine.planner import Adaptive, Finished, Fixed, Planner, Row, View, measure, named
from outrider.engine.request import Limits, Request, capped, check, check_fit, spread, token_ids
from outrider.engine.seating import Seating
from outrider.errors import CapacityError, ConfigurationError, PromptError
from outrider.laws import shaping
from outrider.laws.processors import ProcessorError
from outrider.laws.sampling import Sampling, fresh_seed
from outrider.models.prefill import inference
from outrider.models.prefixes import Prefixes
from outrider.stats import Clock, RequestStats, Stats
from outrider.types import (
    PLAIN,
    Block,
    BlockLists,
    Draft,
    Drafter,
    Foreseeing,
    Inputs,
    LanguageModel,
    Scores,
    Shape,
    Verdict,
    Verifier,
)

T = TypeVar("T")
#: Called after every step with what the verbs made; rows name the requests of the batch's rows.
Observer = Callable[[Draft, Scores, Verdict, Block, list[int]], None]


class Engine:
    """A target, a drafter, a rule and a planner; no state is kept between runs.

    `rule=None` takes the default for what is being judged: match at temperature 0 and for point
    masses or coupled drafts, otherwise the best rule for drawn children. `planner` is one or the
    name of one; None drafts in the drafter's usual shape. `costs` are for the planner, which
    measures what it lacks of them before a run begins, unless they are given as they are to be;
    what was measured is told to `kept`. With
    `graphs` steps are captured and replayed as CUDA graphs (docs/gpu.md): the same text with less
    work for the host.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        rule: str | Verifier | None = None,
        planner: str | Planner[Any] | None = None,
        costs: Costs | None = None,
        graphs: bool = False,
        kept: Callable[[Costs], object] | None = None,
    ) -> None:
        if not hasattr(drafter, "propose") or isinstance(drafter, type):
            do = "make one, such as outrider.PromptLookup(); names are for load(drafter=...)"
            arguments.refuse("drafter", "a Drafter", drafter, do)
        tree.within(drafter.shapes[0].max_nodes, f"the drafter {drafter.name!r}")
        self.rule = verifiers.named(rule)
        self._chains = all(shape.is_chain for shape in drafter.shapes)
        if self.rule is not None:
            verifiers.check(self.rule, drafter.kinds, self._chains, drafter.name)
        if not self._chains and not target.trees:
            raise ConfigurationError(
                f"the target scores chains but not trees; got drafter {drafter.name!r}, which "
                "branches; use a chain (leave branching out)"
            )
        self.target, self.drafter = target, drafter
        on_host = torch.device(target.device).type == "cpu"
        self.foreseeing = drafter if on_host and isinstance(drafter, Foreseeing) else None
        self.shapes = drafter.shapes if PLAIN in drafter.shapes else (*drafter.shapes, PLAIN)
        drafts = any(shape.max_depth for shape in drafter.shapes)
        self.planner = named(planner) if drafts else Fixed()  # nothing to choose
        self.costs, self.kept = costs, kept
        self._given = costs is not None and kept is None
        device = torch.device(target.device)
        self.capture: Capture | None = CudaCapture(device) if graphs else None

    def choose_rule(self, greedy: str) -> Verifier:
        """The rule of a run whose rows are greedy: "all", "some" or "none"."""
        if self.rule is not None:
            return self.rule
        if greedy == "all":
            return verifiers.get("match")
        return verifiers.default(self.drafter.kinds, self._chains)

    def stepper(self) -> Callable[[Batch, Shape], Made]:
        """The verbs of a sampled step, one by one or as graphs."""
        rule = self.choose_rule("none")
        return self.graphed(rule) or (lambda b, s: verbs(self.target, self.drafter, rule, b, s))

    def graphed(self, rule: Verifier) -> Graphed | None:
        """The verbs as graphs, if that was asked for."""
        if self.capture is None:
            return None
        work = partial(verbs, self.target, self.drafter, rule)
        return Graphed(self.capture, work, self.shapes, self.target)

    def priced(self, seats: int) -> Costs | None:
        """The costs of steps of up to so many rows, for a planner that weighs them.

        What nobody has measured is measured now, on made-up text.
        """
        if not isinstance(self.planner, Adaptive) or self._given:
            return self.costs
        for rows in measure.upto(seats):
            if self.costs is None or rows not in self.costs.times:
                more = measure.measured(self, rows)
                self.costs = more if self.costs is None else self.costs.joined(more)
                if self.kept is not None:
                    self.kept(self.costs)
        return self.costs

    def alone(self) -> "Engine":
        """The same, but that a planner plans each row of a batch as if it were alone."""
        costs = self.priced(1) if isinstance(self.planner, Adaptive) else None
        if costs is None:
            return self
        graphs = self.capture is not None
        return Engine(
            self.target, self.drafter, self.rule, self.planner, costs.alone(), graphs=graphs
        )

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        limits: Limits | Sequence[Limits] | None = None,
        *,
        inputs: Sequence[Inputs | None] | None = None,
        references: Sequence[Sequence[int]] | None = None,
        capacity: int | None = None,
        trace: bool = False,
        logprobs: bool = False,
        observe: Observer | None = None,
    ) -> "Run":
        """An iterator of HostBlocks over these prompts, each decoded under its own settings.

        inputs      what each row reads besides its text, one row each: sources, audio
        references  tokens that each row's drafter may copy from; () for none but the source's

        Raises PromptError or CapacityError before any work is done.
        """
        texts = [token_ids(prompt, number) for number, prompt in enumerate(prompts)]
        settings = spread("sampling", sampling, Sampling(), len(texts))
        ends = spread("limits", limits, Limits(), len(texts))
        if not texts:
            raise PromptError("no prompt; got an empty batch; give at least one prompt")
        sources = _one_each("inputs", inputs, len(texts), None)
        copied = _one_each("references", references, len(texts), ())
        every = zip(texts, settings, ends, sources, copied, strict=True)
        wanted = Logprobs() if logprobs else None
        requests = [Request(*each, logprobs=wanted) for each in every]
        if capacity is None:
            longest = max(request.end(self.target.context)[0] for request in requests)
            capacity = longest + self.drafter.shapes[0].max_nodes
        run = Run(self, len(requests), capacity, trace=trace, observe=observe)
        run.submit_all(requests)
        run.close()
        return run


def _one_each(name: str, given: Sequence[T] | None, rows: int, without: T) -> Sequence[T]:
    """What each row is given, if anything is."""
    if given is None:
        return [without] * rows
    if len(given) != rows:
        raise ConfigurationError(
            f"{name} are one for each prompt; got {len(given)} for {rows} prompts; give as many"
        )
    return given


class Run(Iterator[HostBlock]):
    """Requests being decoded: `submit` and `end` them while others run, `step`, or iterate.

    seats     how many rows run side by side; the others wait, first come first served
    capacity  slots of a row: prompt, budget and draft tree. None: the model's context
    prefixes  what is kept of prompts, for others that begin alike; runs of one thread may share it.
              Of models that read more than text, and for heads, nothing is kept

    Iterating ends when nothing is left to do. A request that failed raises its error there, once;
    the others go on if the iteration does.
    """

    def __init__(
        self,
        engine: Engine,
        seats: int = 8,
        capacity: int | None = None,
        *,
        trace: bool = False,
        observe: Observer | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.engine, self._trace, self._observe = engine, trace, observe
        self._size = engine.drafter.shapes[0].max_nodes
        if capacity is None:
            if engine.target.context >= 1 << 30:
                raise CapacityError(
                    "the model names no context to size rows by; got capacity=None; give capacity"
                )
            capacity = engine.target.context + self._size
        self.capacity = capacity
        room = engine.target.width(capacity)
        self.rule = engine.choose_rule("all")
        self._took = 0.0  # seconds of the step under way
        self._graphed: Graphed | None = None
        seats = arguments.whole("seats", seats, "give at least one", least=1)
        self._ledger = Ledger()
        self._seating = Seating(engine.target, engine.drafter, self._ledger, seats, room, prefixes)
        self._reads = engine.target.reads != "text"
        self._plan = engine.planner.open(engine.shapes, engine.priced(seats))
        self._closed = False
        self._device = torch.device(engine.target.device)
        self._clock, self._mark = Clock(self._device), 0.0
        self._lag = 1 if self._device.type == "cuda" else 0
        self._unread: deque[Pending] = deque()

    # ------------------------------------------------------------------ requests come and go

    def submit(self, request: Request) -> int:
        """Queue a request; its number. Raises its error at once if it cannot be decoded here."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[int]:
        """Queue several, or none of them if one is refused."""
        if self._closed:
            raise ConfigurationError(
                f"this run is closed; got {len(requests)} more; submit to another run"
            )
        target, entries = self.engine.target, self._ledger.entries
        for number, request in enumerate(requests, self._ledger.count):
            check(request, number, target, self._reads)
            check_fit(request, number, target.context, self._size, self.capacity)
            if self.engine.capture is not None:
                graphs.check(request.sampling, number)
        settings = shaping.admit(
            [request.sampling for request in requests],
            [request.prompt for request in requests],
            [request.limits.stop_ids for request in requests],
            target.vocab_size,
            self._device,
            self._ledger.count,
            [entry.request.sampling for entry in entries.values() if not entry.over],
        )
        numbers = []
        for request, sampling in zip(requests, settings, strict=True):
            if sampling.seed is None:
                sampling = replace(sampling, seed=fresh_seed())
            if sampling is not request.sampling:
                request = replace(request, sampling=sampling)
            numbers.append(self._ledger.add(request))
        self._seating.seats.waiting += numbers
        if any(sampling.temperature for sampling in settings):
            self.rule, self._graphed = self.engine.choose_rule("some"), None
        return numbers

    def close(self) -> None:
        """Take no more requests."""
        self._closed = True

    def end(self, number: int, reason: str = "cancelled", keep: int | None = None) -> None:
        """End a request from outside: a stop string, a closed connection.

        `keep` is how many of its tokens count, all that were told by default. One that ended by
        itself can still be cut, as its last block may hold a stop string. Raises ConfigurationError
        for a request that was ended from outside before, or failed, or is not there.
        """
        self._ledger.check_end(number, reason)
        waits = self._ledger.entries[number].phase is Phase.WAITING
        self._ledger.end(number, reason, keep)
        if waits:
            self._seating.seats.waiting.remove(number)
        if self.done:
            self._mark = 0.0

    def forget(self, number: int) -> RequestStats:
        """Keep nothing of a request that is over, for runs that never end; its statistics.

        Raises ConfigurationError for one that is not over, or not there.
        """
        stats = self._ledger.forget(number)
        if self.done:  # no turn will come
            self._read(0)
            self._seating.leave()
            self._sweep()
        return stats

    # ------------------------------------------------------------------ what has become of them

    @property
    def done(self) -> bool:
        """Whether every request is over."""
        return not self._ledger.left

    @property
    def batch(self) -> Batch | None:
        """The rows under way, for steps by hand and tests; None before the first step."""
        return self._seating.batch

    @property
    def phases(self) -> list[Phase]:
        """Where each request stands."""
        return [entry.phase for entry in self._ledger.entries.values()]

    @property
    def reasons(self) -> list[str | None]:
        """Why each request is over, None while it is not."""
        return [entry.reason for entry in self._ledger.entries.values()]

    def reason(self, number: int) -> str | None:
        """Why a request is over, None while it is not."""
        self._ledger.check(number)
        return self._ledger.entries[number].reason

    def cached(self, number: int) -> int:
        """How many tokens of a request's prompt were copied from one that was read before."""
        self._ledger.check(number)
        return self._ledger.entries[number].stats.cached_tokens

    @property
    def requests(self) -> list[RequestStats]:
        """Statistics of each request that is not forgotten."""
        return [entry.stats for entry in self._ledger.entries.values()]

    @property
    def errors(self) -> dict[int, Exception]:
        """The errors of requests that failed."""
        entries = self._ledger.entries.items()
        return {number: entry.error for number, entry in entries if entry.error is not None}

    def watched(self, number: int) -> Tensor | None:
        """The model's logits [V] behind the watched place of a request's prompt.

        They are told once, and are there from the first block on; None if it watches no place.
        """
        entry = self._ledger.entries[number]
        logits, entry.watched_V = entry.watched_V, None
        return logits

    @property
    def stats(self) -> Stats:
        """Totals up to the last step."""
        stats = self._ledger.stats
        report = self.engine.planner.report(self._plan)
        stats.predicted_ms, stats.why_plain = report
        if self.done or not self._lag:  # reading a device's events waits for it: at the end alone
            stats.clock(self._clock.read())
        return stats

    # ------------------------------------------------------------------ the loop

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> HostBlock:
        while not self._ledger.ready:
            if self.done:
                raise StopIteration
            self._turn()
        block = self._ledger.ready.popleft()
        error = self._ledger.entries[block.row].error
        if error is not None and block.finish_reason == "error":
            raise error
        return block

    def step(self) -> list[HostBlock]:
        """Seat who waits, read a piece of a prompt, one step of those who run; what it emitted.

        A request that failed has a last block with finish_reason "error"; `errors` says why.
        """
        if not self.done:
            self._turn()
        blocks = list(self._ledger.ready)
        self._ledger.ready.clear()
        return blocks

    @inference
    def _turn(self) -> None:
        self._mark = self._mark or time.perf_counter()
        if any(self._ledger.entries[number].cut for number in self._seating.rows):
            self._read(0)  # their unread blocks tell whether their seats are clean
        self._seating.leave()
        self._sweep()
        spent = self._seating.arrive()
        if self._seating.rows:
            self._advance()
        now, stats = time.perf_counter(), self._ledger.stats
        stats.seconds += now - self._mark - spent
        stats.prefill_ms += 1e3 * spent
        self._mark = 0.0 if self.done else now

    def _advance(self) -> None:
        """One step of all rows. A row whose own processors fail leaves, and the others step."""
        clock = self._clock
        while self._seating.rows:
            batch, self._took = self._bounded(), time.perf_counter()
            shape = self._shape(batch)
            clock.start()
            try:
                made = self._made(batch, shape)
                break
            except ProcessorError as error:
                self._blame(error)
        else:
            return
        draft, scores, verdict, batch, block = made
        rows = list(self._seating.rows)
        wanted = [self._ledger.entries[number].request.logprobs for number in rows]
        said = {
            asked: told(scores, verdict, block, asked)
            for asked in dict.fromkeys(wanted)
            if asked is not None
        }
        self._seating.batch = batch
        try:
            if self._observe is not None:
                with torch.inference_mode(False):  # an observer may differentiate copies
                    self._observe(draft, scores, verdict, block, rows)
                clock.start()
        finally:  # the batch has gone on: if the observer fails, its tokens are told nevertheless
            self._emit(made, rows, wanted, said)
        clock.lap("emit")
        self._ledger.stats.engine_steps += 1

    def _emit(
        self,
        made: Made,
        rows: list[int],
        wanted: list[Logprobs | None],
        said: dict[Logprobs, Told],
    ) -> None:
        """Tell the block of a step, or the one before it while this one is on its way."""
        block = made.block
        self._took = time.perf_counter() - self._took
        self._ledger.stats.count_size(made.draft.tree.nodes)
        traced = [self._trace or request.trace for request in self._seating.requests(rows)]
        if block.lists is not None and not (any(traced) or said or self._unread):
            self._tell(block.lists, rows, made.draft)  # on the host already: nothing to wait for
        else:
            pending = Pending(block, made.draft, made.verdict, rows, traced, said, wanted)
            self._unread.append(pending)
        self._read(0 if self._all_over() else self._lag)

    def _read(self, left: int) -> None:
        """Read blocks that are on their way, all but the last few."""
        while len(self._unread) > left:
            pending = self._unread.popleft()
            self._tell(pending.read(), pending.requests, pending.draft, pending)

    def _made(self, batch: Batch, shape: Shape) -> Made:
        """What the verbs make: one by one on the clock, or in one piece."""
        engine, clock, rule = self.engine, self._clock, self.rule
        if engine.capture is None:
            return verbs(engine.target, engine.drafter, rule, batch, shape, clock.lap)
        self._graphed = self._graphed or engine.graphed(rule)
        assert self._graphed is not None
        made = self._graphed(batch, shape)
        clock.lap("graph")
        return made

    def _bounded(self) -> Batch:
        """The batch with the length that no row exceeds: blocks that are unread count in full."""
        batch = self._seating.batch
        assert batch is not None
        longest = max(self._ledger.entries[number].length for number in self._seating.rows)
        ahead = len(self._unread) * self._size
        bound = min(longest + ahead, self._seating.capacity - self._size)
        return batch._replace(context=batch.context._replace(bound=bound))

    def _shape(self, batch: Batch) -> Shape:
        foreseeing, numbers = self.engine.foreseeing, self._seating.rows
        gains: Sequence[Sequence[float] | None] = [None] * len(numbers)
        if foreseeing is not None:
            gains = foreseeing.foresee(batch.memory, batch.context)
        entries = [self._ledger.entries[number] for number in numbers]
        rows = [
            Row(number, entry.request, entry.length, each)
            for number, entry, each in zip(numbers, entries, gains, strict=True)
        ]
        greedy = all(row.request.sampling.temperature == 0 for row in rows)
        free = verifiers.shares_noise(self.rule) or (self.rule.exact and greedy)
        view = View(rows, self._seating.seats.count, free, self._closed)
        shape = self.engine.planner.plan(self._plan, view)
        shapes = self.engine.shapes
        if (shape if shape.most_B is None else shape._replace(most_B=None)) not in shapes:
            raise ConfigurationError(
                f"the planner must choose one of the shapes of {self.engine.drafter.name!r}; got "
                f"{shape.key!r}; choose among {[shape.key for shape in shapes]}"
            )
        return capped(shape, [row.request for row in rows])

    def _blame(self, error: ProcessorError) -> None:
        """Fail the row whose processor raised. Nothing of the step has been committed."""
        number, cause = self._seating.rows[error.row], error.__cause__
        assert isinstance(cause, Exception)
        length = self._ledger.entries[number].length
        cause.add_note(f"in a logits processor of request {number} after {length} tokens")
        self._ledger.ready.append(self._ledger.fail(number, cause))
        self._seating.leave()

    def _sweep(self) -> None:
        """Drop what is forgotten, but for requests that blocks on their way still name."""
        on_their_way = [number for pending in self._unread for number in pending.requests]
        self._ledger.sweep(self._seating.named + on_their_way)

    def _all_over(self) -> bool:
        return all(self._ledger.entries[number].over for number in self._seating.rows)

    def _tell(
        self, block: BlockLists, numbers: list[int], draft: Draft, pending: Pending | None = None
    ) -> None:
        blocks = self._ledger.tell(block, numbers, pending)
        took = None if self._lag else 1e3 * self._took
        done = Finished(blocks, draft.tree.nodes, draft.tree.max_depth, took)
        self._plan = self.engine.planner.learn(self._plan, done)
