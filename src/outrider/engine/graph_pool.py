"""Graphs of steps outlive the run that captured them, with the buffers that they read and write.

A captured step depends on where its tensors lie and on what the host knew when it was captured. The
`Form` of a batch says both but for the addresses: shapes, dtypes, devices and which tensors share
memory; and by value or identity all else that is in the stores. A later batch of the same form is
copied into the tensors of the first, and goes on in these with the graphs of that one.

    form = form_of(batch)                  # of the batch of another run, or of other rows
    batch = moved(batch, kept.tensors)     # the same batch, in the tensors of an equal form

That holds only if a graph reads nothing else that a run made for itself. Every tensor that captured
work reads must lie in the stores, or belong to what outlives runs: the models, the drafter, and
constants that modules keep (`lasting`). A graph that reads any other is dropped when its rows
change. Before a run takes a set over it is looked whether its models still hold what it reads.
"""

import gc
import sys
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.batch import Batch
from outrider.engine.step import GraphedStep
from outrider.models.config import found
from outrider.types import Context

SETS = 4  #: that no run has taken, at most
GRAPHS = 96  #: of all of these together
BYTES = 1 << 30  #: of their buffers, where nothing says how much memory there is
SHARE = 8  #: on a device: this part of its memory
#: Host constants that a captured step does not read: it is given others (`Graphed`), or none.
_GIVEN = {
    Context: {"bound", "hidden", "unread", "cache", "known", "least"},
    Batch: {"ended"},
}
_VALUES = (int, float, str, bytes, frozenset, range, torch.dtype, torch.device, type(None))
_LEAVES = (type, types.ModuleType, str, bytes, int, float, complex, torch.dtype, torch.device)
_CACHED = type(lru_cache(len))  #: functions that keep what they have returned
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


class Form(NamedTuple):
    """What a captured step depends on but for addresses, and the tensors that it is of."""

    key: tuple[Hashable, ...]
    tensors: list[Tensor]
    others: list[object]  #: what is compared by identity; held, so that no other takes its number


def _members(part: Any) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a store by name, None if it is none."""
    if isinstance(part, dict):
        return part.items()
    if isinstance(part, (list, tuple)):
        given, names = _GIVEN.get(type(part), ()), found(part, "_fields") or range(len(part))
        return [each for each in zip(names, part, strict=True) if each[0] not in given]
    store = all(found(part, verb) for verb in ("take", "put", "narrow"))
    if found(part, "__dict__") is not None and (
        store or (is_dataclass(part) and not isinstance(part, type))
    ):
        derived = found(part, "derived") or ()
        return [each for each in vars(part).items() if each[0] not in derived]
    return None


def form_of(part: Any) -> Form:
    """The form of a batch, or of any store.

    >>> one, other = torch.zeros(2), torch.ones(2)
    >>> form_of((one, 3)).key == form_of((other, 3)).key
    True
    >>> form_of((one, one)).key == form_of((one, other)).key
    False
    """
    form, storages = Form((), [], []), dict[int, int]()
    key: list[Hashable] = []

    def walk(part: Any) -> None:
        if isinstance(part, Tensor):
            where = storages.setdefault(address(part), len(storages))
            shape, stride = tuple(part.shape), part.stride()
            if any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)):
                form.others.append(part)  # cannot be written to
                key.append(id(part))
            key.append((where, part.storage_offset(), shape, stride, part.dtype, part.device))
            form.tensors.append(part)
            return
        members = _members(part)
        if members is not None:
            key.append(id(type(part)))
            for name, member in members:
                key.append(name)
                walk(member)
        elif isinstance(part, _VALUES):
            key.append((type(part), part))
        else:
            form.others.append(part)
            key.append(id(part))

    walk(part)
    return form._replace(key=tuple(key))


def moved(part: Any, tensors: Sequence[Tensor]) -> Any:
    """The same store with these tensors, in the order of its form. What can change is changed."""
    return _moved(part, iter(tensors))


def _moved(part: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(part, Tensor):
        return next(tensors)
    members = _members(part)
    if members is None:
        return part
    new = {name: _moved(member, tensors) for name, member in list(members)}
    if isinstance(part, tuple):
        named = found(part, "_replace")
        return tuple(new.values()) if named is None else named(**new)
    if isinstance(part, (dict, list)):
        for name, member in new.items():
            part[name] = member
        return part
    made = found(part, "__dataclass_params__")
    if made is not None and made.frozen:
        return replace(part, **new)
    for name, member in new.items():
        setattr(part, name, member)
    if found(part, "derived") is not None:
        part.derive()
    return part


def address(tensor: Tensor) -> int:
    """Where the memory of a tensor, and of all its views, begins. What wraps others has none of its
    own: a number that no address is."""
    storage = tensor.untyped_storage()
    try:
        return storage.data_ptr()
    except RuntimeError:
        number: int = storage._cdata
        return -number


def lasting(roots: Iterable[object], constants: bool = True) -> set[int]:
    """Addresses of the memory of all tensors that these objects hold, however deep.

    With `constants` of those that our modules keep as well, as what was made once by `lru_cache`.
    """
    addresses, seen, held = set[int](), set[int](), list[object]()
    todo = list(roots)
    if constants:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0].startswith("outrider"):
                todo += [each for each in vars(module).values() if _keeps(each)]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, _LEAVES):
            continue
        seen.add(id(one))
        held.append(one)  # so that its number is not given to another one meanwhile
        if isinstance(one, Tensor):
            if one.layout == torch.strided and one.device.type != "meta":
                addresses.add(address(one))
            todo += (found(one, "__dict__") or {}).values()
        elif isinstance(one, types.FunctionType):  # not its globals, which lead everywhere
            todo += [*(one.__closure__ or ()), *(one.__defaults__ or ())]
        else:
            todo += gc.get_referents(one)
    return addresses


def _keeps(value: object) -> bool:
    """Whether a module's name may stand for constants. Its type says so: a class of transformers
    whose package is missing raises when it is asked for an attribute."""
    return isinstance(value, (_CACHED, Tensor, dict, list, tuple))


class KeptGraph(NamedTuple):
    """A captured step: what it makes, and how it is done again."""

    made: GraphedStep
    replay: Callable[[], object]
    most_B: Tensor | None
    stranger: str = ""  #: what it reads that belongs to one run alone, if it does


@dataclass
class Image:
    """Steps that were captured over one batch, and the tensors of that batch."""

    form: Form | None = None
    graphs: dict[Hashable, KeptGraph] = field(default_factory=dict)
    seen: Counter[Hashable] = field(default_factory=Counter)
    replays: int = 0
    length_B: Tensor = _NOTHING
    reason_B: Tensor = _NOTHING
    reads: set[int] = field(default_factory=set)  #: addresses of what models and drafters hold

    def adopt(self, batch: Batch, form: Form) -> Batch:
        """A batch of this form in the tensors of this image."""
        assert self.form is not None
        for mine, its in zip(self.form.tensors, form.tensors, strict=True):
            if mine.data_ptr() != its.data_ptr():
                mine.copy_(its)
        taken: Batch = moved(batch, self.form.tensors)
        return taken


class GraphSet:
    """Images that one run has at a time: their tensors may be the same."""

    def __init__(self) -> None:
        self.images: OrderedDict[Hashable, Image] = OrderedDict()
        self.taken = True
        self.memory: object = None  #: of what graphs make in between, shared by all of them

    def release(self) -> None:
        """The run that had them has no use for them any more."""
        self.taken = False

    @property
    def graphs(self) -> int:
        return sum(len(image.graphs) for image in self.images.values())

    @property
    def bytes(self) -> int:
        """What the buffers take."""
        sizes = {}
        for image in self.images.values():
            for tensor in () if image.form is None else image.form.tensors:
                sizes[address(tensor)] = tensor.untyped_storage().nbytes()
        return sum(sizes.values())


class GraphPool:
    """The sets of graphs of an engine. Several runs may ask it at once.

    `roots` are what outlives runs: models, drafter. Sets that no run has are few; those of the last
    use stay.
    """

    def __init__(self, roots: Sequence[object] = (), most_bytes: int = BYTES) -> None:
        self.roots, self.most_bytes = roots, most_bytes
        self.why = ""  #: why graphs were not kept, of the last that were not
        self._sets: list[GraphSet] = []
        self._lock = threading.RLock()  # a run may be collected while another asks

    def begun(self) -> GraphSet:
        """A set of no graphs for a run."""
        made = GraphSet()
        with self._lock:
            self._sets.append(made)
            self._trim()
        return made

    def take(self, key: Hashable) -> GraphSet | None:
        """A set with such an image that no run has, if there is one; it is the caller's now."""
        with self._lock:
            self._trim()
            for one in reversed(self._sets):
                if one.taken or key not in one.images:
                    continue
                reads = set[int]().union(*(image.reads for image in one.images.values()))
                if not reads <= lasting(self.roots, constants=False):
                    self.why = "what a model or drafter holds has been replaced"
                    self._sets.remove(one)
                    return None
                one.taken = True
                self._sets.remove(one)
                self._sets.append(one)
                return one
        return None

    def drop(self) -> bool:
        """Keep nothing that no run has, for want of memory; whether there was something."""
        with self._lock:
            before = len(self._sets)
            self._sets = [one for one in self._sets if one.taken]
            return len(self._sets) < before

    def close(self) -> None:
        """Keep nothing from here on: steps cannot be captured."""
        with self._lock:
            self._sets.clear()

    def _trim(self) -> None:
        """Drop those of the longest ago until the rest is few enough."""
        free = [one for one in self._sets if not one.taken]
        while free and (
            len(free) > SETS
            or sum(one.graphs for one in free) > GRAPHS
            or sum(one.bytes for one in free) > self.most_bytes
        ):
            self._sets.remove(free.pop(0))


def room_of(device: torch.device) -> int:
    """How many bytes may be kept on a device."""
    if device.type != "cuda":
        return BYTES
    return int(torch.cuda.get_device_properties(device).total_memory) // SHARE
