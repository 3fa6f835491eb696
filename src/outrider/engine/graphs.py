"""A step as a CUDA graph: its verbs are captured once per (rows, shape, width) and replayed.

A captured step reads and writes fixed addresses, so what a step makes anew has to come back to
where the graph reads it: the lengths and the reasons, copied at the end of the graph itself. All
else is written in place (tokens, caches, memories) or never changes while the rows stay (sampling,
limits). When rows come or go, or another width begins, buffers may have moved: the graphs are
dropped and captured anew. A width is roomier than a step needs, so that it seldom changes. Where
graphs were dropped before they were replayed often, the next ones are captured later.

The host reads as it does without graphs, one step late; what a step returns is overwritten by the
next one.

A step that turns out not to be capturable (an operator that reads a value on the host, no memory)
is run without a graph, and so are all steps after it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine import step
from outrider.engine.batch import Batch
from outrider.engine.step import GraphedStep
from outrider.errors import ConfigurationError
from outrider.models.model_wrapper import capturable
from outrider.models.prefill import inference, width
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import (
    Drafter,
    DraftShape,
    LanguageModel,
)

R = TypeVar("R")

ROOM = 512  #: slots by which the width of a row that is alone grows; that of n rows by an n-th
PAYS = 4  #: replays of a graph for which capturing it was worth while
LATEST = 16  #: steps of a kind that are run before it is captured, at most
#: Operators that wait for a value of the device.
READS = frozenset({"item", "_local_scalar_dense", "nonzero", "masked_select", "_unique2"})

Did = Literal["ran", "captured", "replayed"]


def refusal(target: LanguageModel, drafter: Drafter) -> str | None:
    """Why no step of these can be captured, as far as they say; None: nothing is known against it.

    Models and drafters whose steps read values on the host say so: their `capturable` is False.
    """
    device = torch.device(target.device)
    if device.type != "cuda":
        return f"graphs are captured on a CUDA device; got a target on {device}"
    if not capturable(target):
        return f"steps of a {type(target).__name__} are made by several processes"
    if not capturable(drafter):
        return (
            f"drafter {drafter.name!r} reads values on the host in every step, which no CUDA graph "
            "can replay"
        )
    return None


def check(sampling: SamplingParams, number: int) -> None:
    """Raise ConfigurationError for a request that no replayed step can serve."""
    if sampling.processors:
        raise ConfigurationError(
            f"graphs replay no functions of Python; got {len(sampling.processors)} processors of "
            f"request {number}; leave graphs or processors out"
        )


class Capture(Protocol):
    """Turns work into something that can be done again without Python."""

    def warm(self, run: Callable[[], R]) -> R:
        """Do the work once, as it will be recorded: compiles kernels, makes constants."""

    def record(self, run: Callable[[], R]) -> tuple[R, Callable[[], object]]:
        """Record the work without doing it: where its results will be, and how to do it."""


class CudaCapture:
    """Capture on a CUDA device, on a stream of its own. Raises ConfigurationError elsewhere."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigurationError(
                f"graphs are captured on a CUDA device; got {device}; leave graphs out"
            )
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm(self, run: Callable[[], R]) -> R:
        """Run on the capture's stream, so that what belongs to a stream is made for this one."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = run()
        current.wait_stream(self.stream)
        return result

    def record(self, run: Callable[[], R]) -> tuple[R, Callable[[], object]]:
        """Record into a `torch.cuda.CUDAGraph`. Other threads may work on the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        held, current = _Held(), torch.cuda.current_stream(self.stream.device)
        try:
            with (
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"),
                held,
            ):
                result = run()
        finally:  # torch leaves the stream as it is if the capture cannot be ended
            torch.cuda.set_stream(current)

        def replay(_: object = held) -> None:  # lives as long as the graph can be replayed
            graph.replay()

        return result, replay


class _Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the tensors that captured work reads but did not make: a graph knows their addresses
    alone, and a cache of small constants might let them go.

    Raises ConfigurationError ahead of an operator that would wait for the device: behind it the
    capture could not be ended properly.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside: dict[int, Tensor] = {}
        self._inside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args):
            raise ConfigurationError(
                f"a captured step reads no value on the host; got {func}, which does; leave graphs "
                "out"
            )
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.data_ptr() not in self._inside:
                self.outside.setdefault(leaf.data_ptr(), leaf)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.data_ptr() not in self.outside:
                self._inside.add(leaf.data_ptr())
        return result


def _waits(func: Any, args: Any) -> bool:
    """Whether an operator on a device waits for a value of it."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):  # a mask's true places are counted first
        return any(
            part is not None and part.is_cuda and part.dtype == torch.bool for part in args[1]
        )
    return name in READS and any(x.is_cuda for x in tree_leaves(args) if isinstance(x, Tensor))


class _Graph(NamedTuple):
    made: GraphedStep
    replay: Callable[[], object]
    most_B: Tensor | None


class Graphed:
    """The verbs of a run's steps, replayed from the second step of a kind on.

    `spec_decode_step(batch, shape)` makes one step of the target; `shapes` are all that it may be
    asked for. `lost` is told once why steps cannot be captured, if they cannot. `did` says how the
    last step was made.

    >>> graphed = Graphed(CudaCapture(device), spec_decode_step, shapes, target)    # doctest: +SKIP
    >>> draft, scores, verdict, batch, block = graphed(batch, shape)     # doctest: +SKIP
    """

    def __init__(
        self,
        capture: Capture,
        verbs: Callable[[Batch, DraftShape], GraphedStep],
        shapes: Sequence[DraftShape],
        target: LanguageModel,
        lost: Callable[[str], object] = lambda why: None,
    ) -> None:
        self._capture, self._verbs, self._target = capture, verbs, target
        self._tell, self._lost = lost, False
        self.did: Did = "ran"
        self._most = max(shape.max_nodes for shape in shapes)
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._early, self._replays = 1, 0  # steps of a kind ahead of its capture; replays of late
        self._stores: tuple[object, ...] = ()
        self._wide = 0
        self._length_B, self._reason_B = torch.empty(0), torch.empty(0)

    @inference
    def __call__(self, batch: Batch, shape: DraftShape) -> GraphedStep:
        """One step. Its tensors hold until the next one."""
        self.did = "ran"
        if self._lost:
            return self._verbs(batch, shape)
        self._settle(batch)
        if batch.context.unread and shape.max_depth:  # how much a draft model reads differs
            return self._verbs(self._widened(batch, shape), shape)
        key = (shape.key, shape.most_B is None)
        if key not in self._graphs and self._seen[key] < self._early:
            self._seen[key] += 1
            return self._capture.warm(lambda: self._verbs(self._widened(batch, shape), shape))
        self._read(batch)
        self.did = "replayed"
        if key not in self._graphs:
            try:
                self._graphs[key] = self._record(batch, shape)
            except Exception as error:  # whatever it is: the text does not need graphs
                return self._without(error, batch, shape)
            self.did = "captured"
        graph = self._graphs[key]
        self._replays += 1
        if graph.most_B is not None and shape.most_B is not None:
            graph.most_B.copy_(shape.most_B)
        graph.replay()
        context = batch.context
        grown = context.bound + graph.made.block.tokens_BT.shape[1]
        after = self._fixed(batch, min(grown, context.tokens_BL.shape[1]))
        unread = step.unread(context, graph.made.draft)
        return graph.made._replace(
            batch=after._replace(context=after.context._replace(unread=unread))
        )

    def _without(self, error: BaseException, batch: Batch, shape: DraftShape) -> GraphedStep:
        """The step as it is made without graphs; recording has changed nothing."""
        self._graphs.clear()
        self._lost, self.did = True, "ran"
        while error.__context__ is not None:  # torch's own, of the capture's end, hide the first
            error = error.__context__
        self._tell(f"{type(error).__name__}: {error}")
        return self._verbs(batch, shape)

    def _settle(self, batch: Batch) -> None:
        """Drop what was captured over other rows or another width."""
        context = batch.context
        stores = (batch.cache, batch.memory, context.sampling, context.tokens_BL)
        wide = self._roomy(batch)
        same = len(stores) == len(self._stores) and wide == self._wide
        if same and all(a is b for a, b in zip(stores, self._stores, strict=True)):
            return
        if self._graphs:
            paid = self._replays >= PAYS * len(self._graphs)
            self._early = 1 if paid else min(2 * self._early, LATEST)
        self._graphs.clear()
        self._seen.clear()
        self._replays = 0
        self._stores, self._wide = stores, wide
        self._length_B = context.length_B.clone()
        self._reason_B = batch.reason_B.clone()

    def _roomy(self, batch: Batch) -> int:
        """The visible width of graphs for such rows: up to an eighth or `ROOM` more than needed."""
        capacity: int = batch.cache.capacity
        least = width(self._target, batch.context.bound, self._most, capacity)
        step = max(ROOM // batch.rows, (1 << least.bit_length() - 1) // 8)
        return min(self._target.width(-(-least // step) * step), capacity)

    def _read(self, batch: Batch) -> None:
        """Bring the batch to where graphs read it, unless it is there."""
        if batch.context.length_B is not self._length_B:
            self._length_B.copy_(batch.context.length_B)
        if batch.reason_B is not self._reason_B:
            self._reason_B.copy_(batch.reason_B)

    def _record(self, batch: Batch, shape: DraftShape) -> _Graph:
        most_B = None if shape.most_B is None else shape.most_B.to(self._length_B.device).clone()
        fixed = self._widened(self._fixed(batch, batch.context.bound), shape)

        def run() -> GraphedStep:
            made = self._verbs(fixed, shape._replace(most_B=most_B))
            block = made.block._replace(start_B=self._length_B.clone())
            self._length_B.copy_(made.batch.context.length_B)
            self._reason_B.copy_(made.batch.reason_B)
            return made._replace(block=block)

        made, replay = self._capture.record(run)
        return _Graph(made, replay, most_B)

    def _fixed(self, batch: Batch, bound: int) -> Batch:
        context = batch.context._replace(length_B=self._length_B, bound=bound)
        return batch._replace(context=context, reason_B=self._reason_B, ended=True)  # any time

    def _widened(self, batch: Batch, shape: DraftShape) -> Batch:
        """The batch with the largest bound of its width: what a replay at any bound needs."""
        bound = self._wide - shape.max_nodes
        return batch._replace(context=batch.context._replace(bound=bound))
