"""A step as a CUDA graph: its verbs are captured once per (rows, shape, width) and replayed.

A captured step reads and writes fixed addresses, so what a step makes anew has to come back to
where the graph reads it: the lengths and the reasons, copied at the end of the graph itself. All
else is written in place (tokens, caches, memories) or never changes while the rows stay (sampling,
limits). When rows come or go, or another run begins, a batch of a form that was captured before is
copied to where those graphs read it (`graph_pool`); one of another form is captured anew. A width
is roomier than a step needs, so that it seldom changes. Where captures were hardly replayed, the
next ones are made later.

The host reads as it does without graphs, one step late; what a step returns is overwritten by the
next one.

A step that turns out not to be capturable (an operator that reads a value on the host, no memory)
is run without a graph, and so are all steps after it.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine import step
from outrider.engine.batch import Batch
from outrider.engine.graph_pool import (
    GraphPool,
    GraphSet,
    Image,
    KeptGraph,
    address,
    form_of,
    lasting,
)
from outrider.engine.step import GraphedStep
from outrider.errors import ConfigurationError, out_of_memory
from outrider.models.model_wrapper import capturable
from outrider.models.prefill import inference, width
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import (
    Drafter,
    DraftShape,
    LanguageModel,
)

R = TypeVar("R")
_log = logging.getLogger("outrider")

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


class Recorded(NamedTuple, Generic[R]):
    """Work that can be done again without Python."""

    result: R  #: where its results will be
    replay: Callable[[], object]
    reads: Sequence[tuple[Tensor, str]]  #: what it reads and did not make, and who reads it


class Capture(Protocol):
    """Turns work into something that can be done again."""

    def memory(self) -> object:
        """What recorded works may share for what they make in between: never two at once."""

    def warm(self, run: Callable[[], R]) -> R:
        """Do the work once, as it will be recorded: compiles kernels, makes constants."""

    def record(self, run: Callable[[], R], memory: object) -> Recorded[R]:
        """Record the work without doing it."""


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

    def memory(self) -> object:
        """A pool of device memory."""
        return torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], R], memory: Any) -> Recorded[R]:
        """Record into a `torch.cuda.CUDAGraph`. Other threads may work on the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        held, current = CapturedInputs(), torch.cuda.current_stream(self.stream.device)
        try:
            with (
                torch.cuda.graph(
                    graph, memory, stream=self.stream, capture_error_mode="thread_local"
                ),
                held,
            ):
                result = run()
        finally:  # torch leaves the stream as it is if the capture cannot be ended
            torch.cuda.set_stream(current)

        def replay(_: object = held) -> None:  # lives as long as the graph can be replayed
            graph.replay()

        return Recorded(result, replay, held.reads)


class CapturedInputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the tensors that captured work reads but did not make: a graph knows their addresses
    alone, and a cache of small constants might let them go.

    Raises ConfigurationError ahead of an operator that would wait for the device: behind it the
    capture could not be ended properly.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside: dict[int, tuple[Tensor, str]] = {}
        self._inside: set[int] = set()

    @property
    def reads(self) -> list[tuple[Tensor, str]]:
        """The tensors, and the operator that read each first."""
        return list(self.outside.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args):
            raise ConfigurationError(
                f"a captured step reads no value on the host; got {func}, which does; leave graphs "
                "out"
            )
        fresh = func.overloadpacket.__name__ in ("lift", "lift_fresh", "lift_fresh_copy")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and _first(leaf) not in self._inside and not fresh:
                self.outside.setdefault(_first(leaf), (leaf, str(func)))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _first(leaf) not in self.outside:
                self._inside.add(_first(leaf))
        return result


def _first(tensor: Tensor) -> int:
    """Where a tensor's first element lies."""
    where = address(tensor)
    return where if where < 0 else tensor.data_ptr()


def _waits(func: Any, args: Any) -> bool:
    """Whether an operator on a device waits for a value of it."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):  # a mask's true places are counted first
        return any(
            part is not None and part.is_cuda and part.dtype == torch.bool for part in args[1]
        )
    return name in READS and any(x.is_cuda for x in tree_leaves(args) if isinstance(x, Tensor))


class Graphed:
    """The verbs of a run's steps, replayed from the second step of a kind on, or from the first.

    `spec_decode_step(batch, shape)` makes one step of the target; `shapes` are all that it may be
    asked for. `lost` is told once why steps cannot be captured, if they cannot. `did` says how the
    last step was made. Graphs are kept in `pool`, for batches of the same form and the same `work`.

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
        pool: GraphPool | None = None,
        work: Hashable = None,
    ) -> None:
        self._capture, self._verbs, self._target = capture, verbs, target
        self._tell, self._lost = lost, False
        self.did: Did = "ran"
        self._most = max(shape.max_nodes for shape in shapes)
        self._pool, self._work = GraphPool() if pool is None else pool, work
        self._set: GraphSet | None = None
        self._given_back: Callable[[], object] = lambda: None
        self._image = Image()
        self._early = 1  # steps of a kind ahead of its capture
        self._stores: tuple[object, ...] = ()
        self._came: tuple[object, ...] = ()  # the stores of a batch that goes on in others
        self._here: Batch | None = None
        self._wide = 0

    @inference
    def __call__(self, batch: Batch, shape: DraftShape) -> GraphedStep:
        """One step. Its tensors hold until the next one."""
        self.did = "ran"
        if self._lost:
            return self._verbs(batch, shape)
        batch = self._settled(batch)
        if batch.context.unread and shape.max_depth:  # how much a draft model reads differs
            return self._verbs(self._widened(batch, shape), shape)
        key = (shape.key, shape.sizes, shape.most_B is None)
        image = self._image
        if key not in image.graphs and image.seen[key] < self._early:
            image.seen[key] += 1
            return self._capture.warm(lambda: self._verbs(self._widened(batch, shape), shape))
        if not image.graphs:
            image.length_B = batch.context.length_B.clone()
            image.reason_B = batch.reason_B.clone()
        self._read(batch)
        self.did = "replayed"
        if key not in image.graphs:
            try:
                self._record(key, batch, shape)
            except Exception as error:  # whatever it is: the text does not need graphs
                return self._without(error, batch, shape)
            self.did = "captured"
        graph = image.graphs[key]
        image.replays += 1
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

    def change(self, verbs: Callable[[Batch, DraftShape], GraphedStep], work: Hashable) -> None:
        """Make other steps of the same rows from here on."""
        self._verbs, self._work, self._stores, self._came = verbs, work, (), ()

    def release(self) -> None:
        """Let other runs have the graphs, and the buffers of the batch with them: this one is over.

        It happens by itself when nobody holds this object any more.
        """
        self._given_back()
        self._set, self._image, self._here = None, Image(), None
        self._stores, self._came = (), ()

    def _without(self, error: BaseException, batch: Batch, shape: DraftShape) -> GraphedStep:
        """The step as it is made without graphs; recording has changed nothing."""
        self.release()
        self._pool.close()
        self._lost, self.did = True, "ran"
        while error.__context__ is not None:  # torch's own, of the capture's end, hide the first
            error = error.__context__
        self._tell(f"{type(error).__name__}: {error}")
        return self._verbs(batch, shape)

    def _settled(self, batch: Batch) -> Batch:
        """The batch where graphs of its form read it, if there are some.

        Other rows, another width or another run: what was captured for those is not replayed.
        """
        wide, stores = self._roomy(batch), _stores(batch)
        same = wide == self._wide and _alike(stores, self._stores)
        if not same and wide == self._wide and self._here is not None:
            if _alike(stores, self._came):  # the one that was moved is given again
                batch, same = _with_lengths(self._here, batch), True
        if same and self._image.graphs:
            return batch
        if not same:
            self._leave()
            self._stores, self._wide, self._came, self._here = stores, wide, (), None
        form = form_of(batch)
        found = self._found((form.key, wide, self._work))
        if found is not None:
            batch = found.adopt(batch, form)
            self._image, self._came = found, stores
            self._stores, self._here = _stores(batch), batch
        return batch

    def _leave(self) -> None:
        """Other rows come: graphs that read what belongs to these alone go."""
        image = self._image
        if image.graphs:
            paid = image.replays >= PAYS * len(image.graphs)
            self._early = 1 if paid else min(2 * self._early, LATEST)
        for key in [key for key, graph in image.graphs.items() if graph.stranger]:
            del image.graphs[key]
        self._image = Image()

    def _found(self, key: Hashable) -> Image | None:
        """Graphs of this run, or else of one that is over; None: there are none."""
        if self._set is None:
            self._set = self._pool.take(key)
            if self._set is None:
                return None
            for one in self._set.images.values():  # constants may have been let go meanwhile
                one.seen &= Counter(dict.fromkeys(one.graphs, LATEST))
            self._given_back = weakref.finalize(self, self._set.release)
        image = self._set.images.get(key)
        if image is None or not image.graphs:
            return None
        self._set.images.move_to_end(key)
        return image

    def _roomy(self, batch: Batch) -> int:
        """The visible width of graphs for such rows: up to an eighth or `ROOM` more than needed."""
        capacity: int = batch.cache.capacity
        least = width(self._target, batch.context.bound, self._most, capacity)
        step = max(ROOM // batch.rows, (1 << least.bit_length() - 1) // 8)
        return min(self._target.width(-(-least // step) * step), capacity)

    def _read(self, batch: Batch) -> None:
        """Bring the batch to where graphs read it, unless it is there."""
        image = self._image
        if batch.context.length_B is not image.length_B:
            image.length_B.copy_(batch.context.length_B)
        if batch.reason_B is not image.reason_B:
            image.reason_B.copy_(batch.reason_B)

    def _record(self, key: Hashable, batch: Batch, shape: DraftShape) -> None:
        image, most_B = self._image, None
        if shape.most_B is not None:
            most_B = shape.most_B.to(image.length_B.device).clone()
        fixed = self._widened(self._fixed(batch, batch.context.bound), shape)

        def run() -> GraphedStep:
            made = self._verbs(fixed, shape._replace(most_B=most_B))
            block = made.block._replace(start_B=image.length_B.clone())
            image.length_B.copy_(made.batch.context.length_B)
            image.reason_B.copy_(made.batch.reason_B)
            return made._replace(block=block)

        if self._set is None:
            self._set = self._pool.begun()
            self._given_back = weakref.finalize(self, self._set.release)
        if self._set.memory is None:
            self._set.memory = self._capture.memory()
        try:
            made = self._capture.record(run, self._set.memory)
        except Exception as error:
            if not (out_of_memory(error) and self._pool.drop()):
                raise
            made = self._capture.record(run, self._set.memory)
        self._keep_graph(key, batch, made, most_B)

    def _keep_graph(
        self, key: Hashable, batch: Batch, made: Recorded[GraphedStep], most_B: Tensor | None
    ) -> None:
        """Keep a graph of this batch, and find out whether other batches may be moved to it."""
        image, form, of_run = self._image, form_of(self._fixed(batch, 0)), self._set
        assert of_run is not None
        stores = {address(tensor) for tensor in form.tensors}
        if most_B is not None:
            stores.add(address(most_B))
        outside = {address(tensor): (tensor, who) for tensor, who in made.reads}
        outside = {where: read for where, read in outside.items() if where not in stores}
        held = lasting(self._pool.roots, constants=False)
        strange, why = outside.keys() - held, ""
        if strange:
            strange -= lasting(())
        if strange:
            tensor, who = outside[min(strange)]
            what = f"{list(tensor.shape)} ({tensor.dtype}, {tensor.device})"
            why = f"{who} reads a tensor {what} that a run made for itself"
            self._pool.why = why
            _log.info("graphs are not kept for other rows: %s", why)
        if image.form is not None:
            there = {tensor.data_ptr() for tensor in form.tensors}
            if not all(tensor.data_ptr() in there for tensor in image.form.tensors):
                image.graphs.clear()  # some buffer has grown meanwhile
            of_run.images.pop((image.form.key, self._wide, self._work), None)
        image.form = form
        image.reads |= outside.keys() & held
        image.graphs[key] = KeptGraph(made.result, made.replay, most_B, why)
        of_run.images[form.key, self._wide, self._work] = image

    def _fixed(self, batch: Batch, bound: int) -> Batch:
        image = self._image
        context = batch.context._replace(length_B=image.length_B, bound=bound)
        return batch._replace(context=context, reason_B=image.reason_B, ended=True)  # any time

    def _widened(self, batch: Batch, shape: DraftShape) -> Batch:
        """The batch with the bounds of its width: what a replay at any lengths needs."""
        bound = self._wide - shape.max_nodes
        return batch._replace(context=batch.context._replace(bound=bound, least=0))


def _stores(batch: Batch) -> tuple[object, ...]:
    """What is another object when rows come or go."""
    return batch.cache, batch.memory, batch.context.sampling, batch.context.tokens_BL


def _alike(some: tuple[object, ...], others: tuple[object, ...]) -> bool:
    """Whether both are the same objects."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _with_lengths(here: Batch, batch: Batch) -> Batch:
    """A batch that was moved, as long as it is said to be now."""
    now = batch.context
    context = here.context._replace(
        length_B=now.length_B, bound=now.bound, unread=now.unread, least=now.least
    )
    return here._replace(context=context, reason_B=batch.reason_B, ended=batch.ended)
