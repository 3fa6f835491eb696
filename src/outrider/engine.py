"""The loop: propose, score, verify, commit, emit until every row has ended. Tokens only, no text.

    for block in engine.run(prompts, ...):      # one HostBlock per running row and step
        ...

On CUDA the host reads blocks one step late, while the next step runs; on a CPU there is nothing to
wait for and it reads them at once. Rows that ended leave the batch when half of it is done.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from outrider import arguments, shaping, step, tree, verifiers
from outrider import sampling as _sampling
from outrider.blocks import HostBlock, Pending
from outrider.errors import ConfigurationError, NumericalError
from outrider.request import Limits, plan, spread, token_ids
from outrider.sampling import Sampling
from outrider.stats import Meter, RequestStats, Stats
from outrider.step import REASONS, Block, BlockLists, State
from outrider.types import Draft, Drafter, LanguageModel, Scores, Verdict, Verifier

#: Called after every step with what the verbs made; rows name the requests of the batch's rows.
Observer = Callable[[Draft, Scores, Verdict, Block, list[int]], None]


class Engine:
    """A target, a drafter and a rule; no state is kept between runs.

    `rule=None` takes the default for what is being judged: match at temperature 0 and for point
    masses or coupled drafts, otherwise the best rule for drawn children.
    """

    def __init__(
        self, target: LanguageModel, drafter: Drafter, rule: str | Verifier | None = None
    ) -> None:
        if not hasattr(drafter, "propose") or isinstance(drafter, type):
            do = "make one, such as outrider.PromptLookup(); names are for load(drafter=...)"
            arguments.refuse("drafter", "a Drafter", drafter, do)
        tree.within(drafter.shapes[0].max_nodes, f"the drafter {drafter.name!r}")
        self.rule = verifiers.named(rule)
        if self.rule is not None:
            verifiers.check(self.rule, drafter.kinds, drafter.shapes[0].is_chain, drafter.name)
        if not drafter.shapes[0].is_chain and not target.trees:
            raise ConfigurationError(
                f"the target scores chains but not trees; got drafter {drafter.name!r}, which "
                "branches; use a chain (leave branching out)"
            )
        self.target, self.drafter = _apart(target, drafter), drafter

    def choose_rule(self, greedy: str) -> Verifier:
        """The rule of a run whose rows are greedy: "all", "some" or "none"."""
        if self.rule is not None:
            return self.rule
        if greedy == "all":
            return verifiers.get("match")
        return verifiers.default(self.drafter.kinds, self.drafter.shapes[0].is_chain)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        limits: Limits | Sequence[Limits] | None = None,
        *,
        capacity: int | None = None,
        trace: bool = False,
        logprobs: bool = False,
        observe: Observer | None = None,
    ) -> "Run":
        """An iterator of HostBlocks over a batch of prompts, each decoded under its own settings.

        Raises PromptError or CapacityError before any work is done.
        """
        prompts = [token_ids(prompt, number) for number, prompt in enumerate(prompts)]
        settings = spread("sampling", sampling, Sampling(), len(prompts))
        ends = spread("limits", limits, Limits(), len(prompts))
        return Run(self, prompts, settings, ends, capacity, trace, logprobs, observe)


class Run(Iterator[HostBlock]):
    """One batch being decoded: iterate it; `halt` ends a row early; `stats` is always readable."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[Sampling],
        ends: Sequence[Limits],
        capacity: int | None,
        trace: bool,
        logprobs: bool = False,
        observe: Observer | None = None,
    ) -> None:
        self.engine, self.trace = engine, trace
        self._logprobs, self._observe = logprobs, observe
        limits, reasons, room = plan(
            engine.target, engine.drafter.shapes[0].max_nodes, prompts, ends, capacity
        )
        device = torch.device(engine.target.device)
        rows = _sampling.rows(settings, device)
        stops = [end.stop_ids for end in ends]
        vocab = engine.target.vocab_size
        rows = rows._replace(shaping=shaping.build(settings, prompts, stops, vocab, device))
        self.rule = engine.choose_rule(rows.greedy)
        self.requests = [RequestStats(prompt_tokens=len(p)) for p in prompts]
        self._stats = Stats(prompt_tokens=sum(map(len, prompts)))
        self.reasons: list[str | None] = [None] * len(prompts)
        self._verify = Meter(device)
        self._counted = False
        self._lag = 1 if device.type == "cuda" else 0
        self._unread: deque[Pending] = deque()
        self._ready: deque[HostBlock] = deque()
        self._rows = list(range(len(prompts)))  # batch row -> request
        self._lengths = [len(p) for p in prompts]

        started = time.perf_counter()
        self.state: State = step.begin(
            engine.target,
            engine.drafter,
            prompts,
            rows,
            limits=limits,
            limit_reasons=reasons,
            stop_ids=[end.stop_ids for end in ends],
            capacity=room,
        )
        self._stats.prefill_ms = (time.perf_counter() - started) * 1e3
        self._started = self._now = time.perf_counter()
        self._base = (_seconds(engine.target), engine.drafter.draft_seconds)

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> HostBlock:
        while not self._ready:
            if self.done:
                raise StopIteration
            self._step()
        return self._ready.popleft()

    @property
    def done(self) -> bool:
        """Whether every row has ended."""
        return all(reason is not None for reason in self.reasons)

    def halt(self, request: int, reason: str = "stop") -> None:
        """End a request from outside (a stop string, a closed connection)."""
        if self.reasons[request] is None:
            self.reasons[request] = reason
            self.requests[request].seconds = time.perf_counter() - self._started
            if request in self._rows:
                with torch.inference_mode():
                    self.state.reason_B[self._rows.index(request)] = step.STOP
        self._ready = deque(b for b in self._ready if b.row != request)

    @step.inference
    def _step(self) -> None:
        self._retire()
        if self.done:
            self._end()
            return
        engine, state = self.engine, self.state
        draft = step.propose(engine.drafter, state)
        scores = step.score(engine.target, state, draft)
        with self._verify:
            verdict = step.verify(self.rule, state, draft, scores)
        self.state, block = step.commit(
            engine.target, engine.drafter, state, draft, scores, verdict
        )
        logs = step.log_probabilities(scores, verdict, block) if self._logprobs else None
        if self._observe is not None:
            with torch.inference_mode(False):  # an observer may differentiate copies
                self._observe(draft, scores, verdict, block, list(self._rows))
        if block.lists is not None and not self.trace and logs is None and not self._unread:
            self._tell(block.lists, self._rows)  # on the host already: nothing to wait for
        else:
            pending = Pending(block, draft, verdict, list(self._rows), self.trace, logs)
            self._unread.append(pending)
        while len(self._unread) > self._lag or (self._unread and self._idle()):
            self._read(self._unread.popleft())
        size = engine.drafter.shapes[0].max_nodes
        ahead = len(self._unread) * size
        bound = max(self._lengths[r] for r in self._rows) + ahead
        capacity = self.state.context.tokens_BL.shape[1]
        self.state = self.state._replace(
            context=self.state.context._replace(bound=min(bound, capacity - size))
        )
        self._stats.engine_steps += 1
        if self.done:
            self._end()
        else:
            self._now = time.perf_counter()

    def _end(self) -> None:
        self._now = time.perf_counter()
        self._count()

    def _idle(self) -> bool:
        return self.done

    def _read(self, pending: "Pending") -> None:
        self._tell(pending.read(), pending.requests, pending)

    def _tell(
        self, block: BlockLists, requests: list[int], pending: "Pending | None" = None
    ) -> None:
        tokens, emitted, codes, accepted, drafted, overlap, overlaps = block
        now = time.perf_counter() - self._started
        for at, request in enumerate(requests):
            if self.reasons[request] is not None:
                continue
            if codes[at] == step.FAULT:
                raise NumericalError(
                    "the target or draft model returned NaN or +inf, or masked every token, for "
                    f"request {request} after {self._lengths[request]} tokens; check weights and "
                    "dtype"
                )
            ids = tokens[at][: emitted[at]]
            self._lengths[request] += len(ids)
            for record in (self.requests[request], self._stats):
                record.steps += 1
                record.new_tokens += len(ids)
                record.drafted += drafted[at]
                record.accept(accepted[at])
                record.overlap += overlap[at]
                record.overlaps += overlaps[at]
            reason = REASONS[codes[at]] if codes[at] else None
            if reason is not None:
                self.reasons[request] = reason
                self.requests[request].seconds = now
            kept = min(accepted[at], len(ids))
            logs = None if pending is None else pending.logs_of(at, len(ids))
            trace = None if pending is None else pending.trace_of(at)
            self._ready.append(HostBlock(request, ids, kept, reason, trace, logs))

    def _retire(self) -> None:
        """Drop ended rows once they are half of the batch: a coarse host decision between steps.

        What is unread is read first, so that every retirement waits for the device once.
        """
        if 2 * len(self._running()) > len(self._rows):
            return
        while self._unread:
            self._read(self._unread.popleft())
        alive = self._running()
        if not alive:
            return
        state, device = self.state, self.state.reason_B.device
        with torch.inference_mode():
            index = torch.tensor(alive, device=device)
            context = state.context
            self.state = State(
                context._replace(
                    tokens_BL=context.tokens_BL[index],
                    length_B=context.length_B[index],
                    sampling=context.sampling.take(index),
                ),
                state.cache.take(alive),
                state.memory.take(alive),
                state.limit_B[index],
                state.limit_reason_B[index],
                state.stop_BS[index],
                state.reason_B[index],
            )
        self._rows = [self._rows[at] for at in alive]

    def _running(self) -> list[int]:
        return [at for at, request in enumerate(self._rows) if self.reasons[request] is None]

    @property
    def stats(self) -> Stats:
        """Totals up to the last step."""
        if not self._counted:
            self._count()
        return self._stats

    def _count(self) -> None:
        """Read the clocks: when somebody asks, and for good when the last row has ended."""
        self._counted = self.done
        if self._lag and not self.done:
            return  # device events are read once, at the end: reading them waits for the device
        stats, total = self._stats, self._now - self._started
        target = _seconds(self.engine.target) - self._base[0]
        draft = self.engine.drafter.draft_seconds - self._base[1]
        stats.seconds = total
        stats.target_ms, stats.draft_ms = target * 1e3, draft * 1e3
        stats.verify_ms = self._verify.seconds * 1e3
        stats.host_ms = total * 1e3 - stats.target_ms - stats.draft_ms - stats.verify_ms


def _apart(target: LanguageModel, drafter: Drafter) -> LanguageModel:
    """The target, or a view of it with its own clock where the same object drafts, too.

    One clock would count the time of drafting as the target's and the target's as drafting.
    """
    drafting = getattr(drafter, "models", (getattr(drafter, "model", None),))
    if "meter" not in getattr(target, "__dict__", {}) or all(m is not target for m in drafting):
        return target
    view = copy.copy(target)
    view.__dict__["meter"] = Meter(target.device)
    return view


def _seconds(model: LanguageModel | Drafter) -> float:
    meter = getattr(model, "meter", None)
    return float(meter.seconds) if meter is not None else 0.0
