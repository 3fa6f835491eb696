"""torch and transformers as a program of ours imports them: without what no command ever calls.

Half of the processor time of `import transformers.modeling_utils` goes into packages that it needs
for a few names each: sharded tensors, the tracer of torch.compile, scipy's matching for losses of
object detection. Another part is spent on reading all of its own files, twice, for the names that
they export. On a slow core that is several seconds of every start.

So programs of ours (the commands, a server's engine) call `import_lean` first. While it imports,
transformers hears that torch was built without torch.distributed, which it then keeps to, as on
systems where that is so; a few modules are stand-ins, whose names import the real one when they are
called; and what its files export is read from the cache folder. Behind it all is as ever: others
that import these modules get the real ones. A process that is one of several (torchrun) and a
program that has imported transformers by itself are left alone, and so is whoever uses outrider as
a library.
"""

import functools
import hashlib
import importlib
import logging
import marshal
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider import lazy
from outrider.errors import first_line
from outrider.models import calibrate

_log = logging.getLogger(__name__)

#: What every model needs, and which of it imports what there are stand-ins for.
_IMPORTED = ("modeling_utils", "masking_utils", "generation", "models.llama.modeling_llama")
_EXPORTS = "transformers.utils.import_utils"  #: where exported names are looked for


_imported_lean = False  #: whether this process is a program of ours, and has called `import_lean`


@lazy.ended_by_interrupt()
def import_lean() -> None:
    """Import torch and what of transformers every model needs."""
    global _imported_lean
    if "transformers" in sys.modules or "WORLD_SIZE" in os.environ:
        return
    from torch import distributed  # torch itself has no part in what follows

    try:
        with lazy.uncollected(), ExitStack() as meanwhile:
            meanwhile.enter_context(_instead(distributed, "is_available", lambda: False))
            for name, names in _stand_ins().items():
                meanwhile.enter_context(_stands_in(name, names))
            meanwhile.enter_context(_exports_kept())
            _import_all()
        _imported_lean = True
    except Exception as error:  # whatever an installed package of somebody's asks for meanwhile
        for name in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        _import_all()
        _log.warning(
            "transformers was imported in full, which takes longer: %s: %s",
            type(error).__name__,
            first_line(error),
        )


def _import_all() -> None:
    for part in _IMPORTED:
        importlib.import_module(f"transformers.{part}")


def run_lean(entry: bytes, *given: object) -> None:
    """Import so, and only then unpickle a function and call it: for another process of a program,
    where finding the function by its module's name would import the usual way."""
    lazy.collect_seldom()
    import_lean()
    pickle.loads(entry)(*given)


#: Types of models whose layers compute nothing of weights while they are made.
_PLAINLY_MADE = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "whisper"})


@contextmanager
def made_lean(model_type: str) -> Iterator[None]:
    """In here models of common types are made without torch's tracer, if it is not imported yet.

    transformers makes layers of tensors without memory and reads weights into them. Drawing such a
    tensor, or dividing positions, which have no memory either then, is done in Python by torch,
    and imports the tracer and sympy: nothing is drawn where there is no memory, and positions are
    numbers. In programs of ours alone: threads of others may count on torch's functions meanwhile.
    """
    import torch
    from torch import Tensor, nn

    if not _imported_lean or model_type not in _PLAINLY_MADE or "torch._dynamo" in sys.modules:
        yield
        return

    def drawn(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(draw)
        def unless_meta(tensor: Tensor, *given: object, **more: object) -> Tensor:
            return tensor if tensor.is_meta else draw(tensor, *given, **more)

        return unless_meta

    counts = torch.arange

    @functools.wraps(counts)
    def here(*given: Any, **more: Any) -> Tensor:
        return counts(*given, **{"device": "cpu"} | more)

    with ExitStack() as meanwhile:
        for name in ("normal_", "uniform_", "kaiming_uniform_"):
            meanwhile.enter_context(_instead(nn.init, name, drawn(getattr(nn.init, name))))
        meanwhile.enter_context(_instead(torch, "arange", here))
        yield


def _stand_ins() -> dict[str, dict[str, object]]:
    """Modules by name, and all that transformers asks of them while it is imported."""
    tracing = "torch._dynamo._trace_wrapped_higher_order_op"
    return {
        # Marks for torch.compile on functions for cards, which no command compiles.
        "torch._dynamo": dict.fromkeys(
            ("allow_in_graph", "assume_constant_result", "disable"), _unmarked
        ),
        tracing: {"TransformGetItemToIndex": _later(tracing, "TransformGetItemToIndex")},
        "scipy.optimize": {
            "linear_sum_assignment": _later("scipy.optimize", "linear_sum_assignment")
        },
    }


def _unmarked(function: Any = None, *_: object, **__: object) -> Any:
    """A decorator that leaves functions as they are, with or without options.

    >>> _unmarked(len) is len, _unmarked(recursive=False)(len) is len
    (True, True)
    """
    return _unmarked if function is None else function


def _later(module: str, name: str) -> Callable[..., object]:
    """A function that imports another when it is called.

    >>> _later("math", "sqrt")(9.0)
    3.0
    """

    def call(*given: object, **more: object) -> object:
        return getattr(importlib.import_module(module), name)(*given, **more)

    return call


@contextmanager
def _stands_in(name: str, names: Mapping[str, object]) -> Iterator[None]:
    """In here this module has these names; who asks for another gets the real module's.

    >>> with _stands_in("tabnanny", {"check": 1}):
    ...     import tabnanny
    ...     tabnanny.check, tabnanny.NannyNag.__name__
    (1, 'NannyNag')
    """
    if name in sys.modules:  # it is there: nothing is saved
        yield
        return
    module = ModuleType(name)
    vars(module).update(names)

    def real(asked: str) -> object:
        if asked.startswith("__"):
            raise AttributeError(asked)
        leave()
        return getattr(importlib.import_module(name), asked)

    def leave() -> None:
        if sys.modules.get(name) is module:
            del sys.modules[name]
        if parts in sys.meta_path:
            sys.meta_path.remove(parts)

    vars(module).update(__getattr__=real, __path__=[])
    parts = _RealParts(name, leave)
    sys.meta_path.insert(0, parts)
    sys.modules[name] = module
    try:
        yield
    finally:
        leave()


class _RealParts(MetaPathFinder, Loader):
    """Finds a part of a package that has a stand-in: the real package's, as it imports it."""

    def __init__(self, package: str, leave: Callable[[], None]) -> None:
        self._package, self._leave = package, leave
        self._part, self._spec = ModuleType(package), ModuleSpec(package, None)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of the first part that is asked for: from then on the real package is there."""
        if not name.startswith(f"{self._package}."):
            return None
        self._leave()
        importlib.import_module(self._package)
        self._part = importlib.import_module(name)
        self._spec = self._part.__spec__ or self._spec
        self._part.__spec__ = ModuleSpec(name, self)  # or it would be loaded a second time
        return self._part.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The part, which is there."""
        return self._part

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do but to say where it came from."""
        module.__spec__ = self._spec


@contextmanager
def _instead(of: ModuleType, name: str, value: object) -> Iterator[None]:
    """In here this name of a module is another thing."""
    before = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, before)


@contextmanager
def _exports_kept() -> Iterator[None]:
    """In here what transformers' folders export is looked up in a file, which is written behind it
    where there is none yet."""
    place = _place()
    if place is None:
        yield
        return
    known = _read(place)
    before = len(known)
    finder = _Keeping(known)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
    if len(known) != before:
        _write(place, known)


class _Keeping(MetaPathFinder, Loader):
    """Finds the module that reads folders, as others do, and has its function keep what it read."""

    def __init__(self, known: dict[str, object]) -> None:
        self._known = known
        self._real: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of that one module."""
        if name != _EXPORTS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        self._real, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader does; then its function is wrapped, if there is still one."""
        self._real.exec_module(module)
        read = getattr(module, "create_import_structure_from_path", None)
        if read is None:
            return

        @functools.wraps(read)
        def kept(path: str | os.PathLike[str]) -> object:
            text = os.fspath(path)
            folder = os.path.dirname(text) if text.endswith(".py") else text
            if folder not in self._known:
                self._known[folder] = read(path)
            return self._known[folder]

        vars(module)["create_import_structure_from_path"] = kept


def _place() -> Path | None:
    """Where that is kept: by version, place and time of installation. None: it may change."""
    try:
        version = metadata.version("transformers")
        spec = PathFinder.find_spec("transformers")
        if spec is None or spec.origin is None or "dev" in version:
            return None
        folder = Path(spec.origin).parent
        times = [Path(folder, name).stat().st_mtime_ns for name in ("__init__.py", "models")]
    except (metadata.PackageNotFoundError, OSError):
        return None
    about = (version, str(folder), times, sys.version_info[:3], marshal.version)
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return calibrate.cache_dir() / f"exports-{digest}.bin"


def _read(place: Path) -> dict[str, object]:
    """What is kept; nothing where there is none, or where it is damaged."""
    try:
        whole = place.read_bytes()
        if hashlib.sha256(whole[32:]).digest() == whole[:32]:
            known: dict[str, object] = marshal.loads(whole[32:])
            return known
    except (OSError, ValueError, EOFError, TypeError):
        pass
    return {}


def _write(place: Path, known: dict[str, object]) -> None:
    """Whole, where that can be written."""
    with suppress(OSError, ValueError):
        said = marshal.dumps(known)
        scratch = place.with_name(f"{place.name}.{os.getpid()}.tmp")
        scratch.write_bytes(hashlib.sha256(said).digest() + said)
        scratch.replace(place)
