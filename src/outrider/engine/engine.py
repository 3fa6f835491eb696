"""What decodes: a target, a drafter, a rule and a planner. Tokens only, no text.

    for block in engine.run(prompts, ...):      # one StepOutput per running row and step
        ...

`EngineRun` is the loop: propose, score, verify, commit, emit.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import log
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from outrider import arguments, tree, verifiers
from outrider.costs import Costs
from outrider.drafters.draft_model import model_of
from outrider.engine.batch import Batch
from outrider.engine.beam_search.lookahead import LookaheadDepths
from outrider.engine.draft_room import DraftRoom
from outrider.engine.engine_run import EngineRun, Observer
from outrider.engine.graph_pool import GraphPool, room_of
from outrider.engine.graphs import ROOM, Capture, CudaCapture, Graphed, refusal
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Logprobs, Request, StopConditions, broadcast_setting, token_ids
from outrider.engine.speculation_policy import Adaptive, FixedLength, Planner, measure, named
from outrider.engine.step import GraphedStep, ignores_drafts, spec_decode_step
from outrider.errors import ConfigurationError, PromptError, out_of_memory
from outrider.models import budget
from outrider.models.config import found
from outrider.models.prefill import causal, inference
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import (
    PLAIN,
    Drafter,
    DraftShape,
    Foreseeing,
    Inputs,
    LanguageModel,
    Mixed,
    MultiModalInputs,
    Verifier,
)
from outrider.verifiers.match import Match

# A draft model of which nothing is kept: said once, with the reason where one can be found.
#
# Text stays exact whatever is drafted, so a draft that is of no use shows in the time alone. The
# log says so, `Stats.why_plain` does, and a planner asks it no more for texts that cannot depend on
# that.

FEW_ROWS = 4  #: whose slots are a power of two where steps are captured
LOOKS = 32  #: drafted tokens looked at without one that was kept
TEXT = 64  #: tokens that the reason is looked for in
UNIFORM = 0.98  #: of the largest entropy there is: what no trained model comes to
AGREES = 0.2  #: of a text's tokens: what a draft that is of use says as its target does


class DraftWatch:
    """Counts drafted tokens that were verified, until one is kept or it is time to tell.

    >>> watch = DraftWatch()
    >>> refused = StepOutput(0, [5], 0, None, drafted=3)
    >>> [watch.observe([refused]) for _ in range(LOOKS)].index(True), watch.observe([refused])
    (31, False)
    """

    def __init__(self) -> None:
        self.looks = 0
        self.over = False  #: whether a token was kept, or it has been told that none was
        self.why = ""  #: what was told

    def observe(self, blocks: Sequence[StepOutput]) -> bool:
        """Count a step's blocks; whether none of all was kept and it is to be told now."""
        if self.over:
            return False
        self.looks += sum(block.drafted > 0 for block in blocks)
        kept = any(block.accepted for block in blocks)
        self.over = kept or self.looks >= LOOKS
        return self.over and not kept


@inference
def zero_reason(target: LanguageModel, draft: LanguageModel, ids: Sequence[int]) -> str:
    """Why nothing of this draft model is kept, by what both models say of a text of the target's.

    >>> from outrider.testing import pair
    >>> zero_reason(*pair(), [3, 1, 4, 1, 5, 9, 2, 6])[:33]
    'it agrees with the target where b'
    """
    if draft.aux_layers:
        return "it is a head: made for another target, or its weights were not read"
    if draft.reads != "text" or target.reads != "text":
        return "no reason was found; was it trained for this target?"
    tokens_1Q = torch.tensor([list(ids[-TEXT:])], device="cpu")
    said, wanted = (_laws(model, tokens_1Q) for model in (draft, target))
    if not bool(torch.isfinite(said.logsumexp(-1)).all()):
        return "its scores are no numbers; try dtype='float32'"
    chances = said.softmax(-1)
    entropy = float(torch.special.entr(chances).sum(-1).mean())
    if entropy > UNIFORM * log(said.shape[-1]):
        return "its law is all but uniform: its weights were not read, or never trained"
    guesses = said.argmax(-1)
    if len(guesses) > 1 and bool((guesses == guesses[0]).all()):
        return f"it says token {int(guesses[0])} whatever it reads: is its checkpoint whole?"
    agree = float((guesses == wanted.argmax(-1)).float().mean())
    if agree >= AGREES:
        return (
            f"it agrees with the target where both read the text ({agree:.0%} of its tokens), and "
            "yet not as a draft: a rule of your own may refuse it, else please report this"
        )
    return (
        f"it agrees with the target on {agree:.0%} of a text's tokens: it was trained for another "
        "model or other text, or its tokenizer is another one (then give draft_tokenizer)"
    )


def _laws(model: LanguageModel, tokens_1Q: Tensor) -> Tensor:
    """A model's logits [Q, V] of a text."""
    tokens_1Q = tokens_1Q.to(torch.device(model.device))
    size = tokens_1Q.shape[1]
    wide = model.width(size)
    cache = model.open(1, wide)
    at_1Q = torch.arange(size, device=tokens_1Q.device)[None]
    logits: Tensor = model.forward(cache, causal(tokens_1Q, at_1Q, wide)).logits_BQV
    return logits[0].float().cpu()


T = TypeVar("T")
_log = logging.getLogger("outrider")


class Engine:
    """A target, a drafter, a rule and a planner; between runs it keeps what steps cost, and graphs.

    `rule=None` takes the default for what is being verified: match at temperature 0 and for point
    masses or coupled drafts, otherwise the best rule for drawn children. `planner` is one or the
    name of one; None drafts in the drafter's usual shape. `costs` are for the planner, which
    measures what it lacks of them before a run begins, unless they are given as they are to be;
    what was measured is told to `kept`. With
    `graphs` steps are captured and replayed as CUDA graphs (docs/gpu.md): the same text with less
    work for the host. "auto" does so on a CUDA device where nothing is known against it, and
    `eager` says why steps are run without; True raises ConfigurationError instead.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        rule: str | Verifier | None = None,
        planner: str | Planner[Any] | None = None,
        costs: Costs | None = None,
        graphs: bool | Literal["auto"] = "auto",
        kept: Callable[[Costs], object] | None = None,
    ) -> None:
        if not found(drafter, "propose") or isinstance(drafter, type):
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
        self.mixed = drafter if on_host and isinstance(drafter, Mixed) else None
        self.shapes = drafter.shapes if PLAIN in drafter.shapes else (*drafter.shapes, PLAIN)
        drafts = any(shape.max_depth for shape in drafter.shapes)
        self.planner = named(planner) if drafts else FixedLength()  # nothing to choose
        self.costs, self.kept = costs, kept
        self.watch = DraftWatch()  #: whether anything of a draft model is kept
        self.watch.over = not drafts
        self.room = DraftRoom(self.shapes)  #: how many nodes there is memory for
        self.paces = LookaheadDepths()  #: of beam searches
        #: What measuring may take: what is left of a load's, or as much as a load has.
        self.budget = budget.unspent()
        self._given = costs is not None and kept is None
        self._priced = 0  # up to so many rows all that is measured is known
        #: Rows of earlier measurements that are not to be relied on yet.
        self._doubted = set(costs.doubted) if costs is not None and kept is not None else set()
        self._estimated = False  # whether the costs are from a look, and are measured yet
        if graphs not in (True, False, "auto"):
            arguments.refuse("graphs", "True, False or 'auto'", graphs, "leave it out")
        self.graphs = graphs
        #: Why steps are run without CUDA graphs, "" where they are captured.
        self.eager = "graphs=False" if not graphs else refusal(target, drafter) or ""
        if graphs is True and self.eager:
            raise ConfigurationError(f"{self.eager}; leave graphs out")
        self.capture: Capture | None = None
        #: graphs that outlive runs
        self.pool = GraphPool((target, drafter), room_of(torch.device(target.device)))
        if not self.eager:
            self.capture = CudaCapture(torch.device(target.device))
            _log.info("steps of drafter %r run as CUDA graphs", drafter.name)
        elif graphs and not on_host:
            _log.info("steps run without CUDA graphs: %s", self.eager)

    def choose_rule(self, greedy: str) -> Verifier:
        """The rule of a run whose rows are greedy: "all", "some" or "none"."""
        if self.rule is not None:
            return self.rule
        if greedy == "all":
            return Match()
        return verifiers.default(self.drafter.kinds, self._chains)

    def stepper(self) -> Callable[[Batch, DraftShape], GraphedStep]:
        """The verbs of a sampled step, one by one or as graphs."""
        rule = self.choose_rule("none")
        return self.graphed(rule) or (
            lambda b, s: spec_decode_step(self.target, self.drafter, rule, b, s)
        )

    def graphed(self, rule: Verifier, before: Graphed | None = None) -> Graphed | None:
        """The verbs as graphs, if that was asked for: `before`, if given, with another rule."""
        if self.capture is None:
            return None
        verbs = partial(spec_decode_step, self.target, self.drafter, rule)
        if before is not None:
            before.change(verbs, _work(rule))
            return before
        return Graphed(
            self.capture, verbs, self.shapes, self.target, self._lose, self.pool, _work(rule)
        )

    def slots(self, rows: int, capacity: int) -> int:
        """The slots that so many rows are given where each needs `capacity`.

        Where steps are captured these are of a few sizes, so that graphs fit the rows of other
        runs: twice as many as needed at most for a few rows, and a quarter more for many.
        """
        if self.capture is not None:
            power = 1 << max(capacity - 1, 1).bit_length()
            step = power if rows <= FEW_ROWS else max(power // 8, 1)
            step = max(step, ROOM)
            capacity = -(-capacity // step) * step
        return self.target.width(capacity)

    def spare(self, error: Exception) -> bool:
        """Whether memory was missing and some is free now: of graphs that no run has."""
        return out_of_memory(error) and self.pool.drop()

    def _lose(self, why: str) -> None:
        """No step is captured from here on."""
        self.capture, self.eager = None, why
        _log.warning("steps go on without CUDA graphs, as they cannot be captured: %s", why)

    def priced(self, max_num_seqs: int, again: bool = False) -> Costs | None:
        """The costs of steps of up to so many rows, for a planner that weighs them.

        What nobody has measured is measured now, on made-up text, as far as the budget goes: one
        row always is, and more are estimated from fewer where it is over. Nothing is where that is
        postponed. What an earlier start measured of several rows and this one is to confirm is
        measured anew by the first batch that needs it, of one row where somebody asks `again`.
        """
        missing = self._unpriced(max_num_seqs, again)
        if missing and not budget.postponed() and not (missing[0] > 1 and self.budget.over()):
            with self.budget.measuring("what steps cost"):
                deque(self._pricing(missing), maxlen=0)
        return self.costs

    def pricing(self, max_num_seqs: int) -> Iterator[bool]:
        """The same for who has other things to do: it stops behind every look at the clock, and
        says whether that has measured steps of some number of rows."""
        yield from self._pricing(self._unpriced(max_num_seqs, again=True))

    def estimate_costs(self) -> None:
        """Take one look at a few steps, for who cannot wait until they are measured."""
        if self.costs is None and self._unpriced(1):
            with budget.under(budget.Budget(0.0)):
                self.costs, self._estimated = measure.whole(measure.measured(self, 1)), True

    @contextmanager
    def estimated(self, sampling: SamplingParams | None = None) -> Iterator[None]:
        """In here somebody waits for a text: a look has to do, and what is better comes later.

        A text of this sampling that depends on what is drafted waits until all is measured: its
        seed is to give it again, with the costs that are kept.
        """
        if sampling is not None and sampling.temperature:
            if not ignores_drafts(self.choose_rule("none"), greedy=False):
                self.priced(1)
        self.estimate_costs()
        with budget.postponing():
            yield

    def _unpriced(self, max_num_seqs: int, again: bool = False) -> list[int]:
        """The numbers of rows, up to so many, that are to be measured yet, or anew."""
        done = max_num_seqs <= self._priced and not (again and self._doubted)
        if not isinstance(self.planner, Adaptive) or self._given or done:
            return []
        known = set() if self.costs is None or self._estimated else {*self.costs.times}
        known -= self._doubted if again else self._doubted - {1}
        missing = [rows for rows in measure.upto(max_num_seqs) if rows not in known]
        if not missing:
            self._priced = max_num_seqs
        return missing

    def _pricing(self, missing: Sequence[int]) -> Iterator[bool]:
        """One table after the other, each with its part of what is left of the budget."""
        for left, rows in enumerate(missing):
            if (rows > 1 or rows in self._doubted) and self.budget.over():
                break
            with self.budget.part(1 / (len(missing) - left)):
                work = measure.measured(self, rows)
                while (more := self._look(work)) is None:
                    yield False
            known = None if self._estimated else self.costs
            self._doubted.discard(rows)
            self.costs, self._estimated = more if known is None else known.merged(more), False
            if self.kept is not None:
                self.kept(self.costs)
            yield True

    @inference
    def _look(self, work: measure.Looks[Costs]) -> Costs | None:
        """Go on with a measurement until its next stop; what it has found at its end."""
        with budget.under(self.budget) as allowed, allowed.looking("what steps cost"):
            try:
                next(work)
            except StopIteration as end:
                found: Costs = end.value
                return found
        return None

    def note_zero(self, ids: Sequence[int]) -> None:
        """Say once that nothing of the draft model is kept, and why; `ids` is a text of late."""
        model = model_of(self.drafter) if self.mixed is None else self.mixed.asked
        if model is None:
            return
        try:
            reason = zero_reason(self.target, model, ids)
        except (RuntimeError, ValueError) as error:  # a reason is no reason to stop
            reason = f"the reason cannot be looked for ({error})"
        looks = self.watch.looks
        self.watch.why = f"none of the first {looks} drafted tokens looked at was kept: {reason}"
        _log.warning("the draft of %r is of no use here: %s", self.drafter.name, self.watch.why)

    def alone(self) -> "Engine":
        """The same, but that a planner plans each row of a batch as if it were alone."""
        costs = self.priced(1) if isinstance(self.planner, Adaptive) else None
        if costs is None:
            return self
        return Engine(
            self.target, self.drafter, self.rule, self.planner, costs.alone(), graphs=self.graphs
        )

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        limits: StopConditions | Sequence[StopConditions] | None = None,
        *,
        inputs: Sequence[Inputs | MultiModalInputs | None] | None = None,
        references: Sequence[Sequence[int]] | None = None,
        adapters: Sequence[str | None] | None = None,
        capacity: int | None = None,
        trace: bool = False,
        logprobs: bool = False,
        observe: Observer | None = None,
    ) -> "EngineRun":
        """An iterator of HostBlocks over these prompts, each decoded under its own settings.

        inputs      what each row reads besides its text, one row each: sources, audio, images
        references  tokens that each row's drafter may copy from; () for none but the source's
        adapters    of each row, by name; None for the target alone

        Raises PromptError or CapacityError before any work is done.
        """
        count = len(prompts)
        settings = broadcast_setting("sampling", sampling, SamplingParams(), count)
        ends = broadcast_setting("limits", limits, StopConditions(), count)
        sources = _one_each("inputs", inputs, count, None)
        copied = _one_each("references", references, count, ())
        names = _one_each("adapters", adapters, count, None)
        wanted = Logprobs() if logprobs else None
        every = zip(prompts, settings, ends, sources, copied, names, strict=True)
        requests = []
        for number, (prompt, setting, end, source, reference, name) in enumerate(every):
            ids = token_ids(prompt, number)
            requests.append(
                Request(ids, setting, end, source, reference, logprobs=wanted, lora_name=name)
            )
        return self.decode(requests, capacity=capacity, trace=trace, observe=observe)

    def decode(
        self,
        requests: Sequence[Request],
        *,
        capacity: int | None = None,
        trace: bool = False,
        observe: Observer | None = None,
    ) -> "EngineRun":
        """A run of these requests and no others, a row for each: iterate over it, or `step`.

        `capacity` are the slots of a row; None: as many as the longest needs. Raises PromptError or
        CapacityError before any work is done.
        """
        if not requests:
            raise PromptError("no prompt; got an empty batch; give at least one prompt")
        if capacity is None:
            longest = 0
            for request in requests:
                longest = max(longest, request.end(self.target.context)[0])
            capacity = longest + self.drafter.shapes[0].max_nodes
        run = EngineRun(self, len(requests), capacity, trace=trace, observe=observe)
        run.submit_all(requests)
        run.close()
        return run


def _work(rule: Verifier) -> Hashable:
    """What tells a rule's steps from another's: equal rules are one."""
    try:
        return hash(rule), cast("Hashable", rule)
    except TypeError:
        return object()


def _one_each(name: str, given: Sequence[T] | None, rows: int, without: T) -> Sequence[T]:
    """What each row is given, if anything is."""
    if given is None:
        return [without] * rows
    if len(given) != rows:
        raise ConfigurationError(
            f"{name} are one for each prompt; got {len(given)} for {rows} prompts; give as many"
        )
    return given
