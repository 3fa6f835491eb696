"""Ray as an executor of `concurrent.futures`: what is submitted runs on a cluster's workers."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from outrider.errors import BackendUnavailable

T = TypeVar("T")


def _call(function: Callable[..., T], *args: object, **keywords: object) -> T:
    return function(*args, **keywords)


class RayExecutor(Executor):
    """Submits calls as tasks of Ray, for `outrider.speculate(..., executor=RayExecutor())`.

    options  of `ray.remote`: num_cpus, num_gpus, resources, max_retries and so on

    A function travels to the cluster once. Ray is started, or joined, as `ray.init` would; it is
    left running. Raises BackendUnavailable without Ray.

    >>> outrider.speculate(f, g, step, states, 100, executor=RayExecutor())    # doctest: +SKIP
    """

    def __init__(self, **options: object) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise BackendUnavailable(
                f"RayExecutor needs Ray, and {error.name} is not installed; pip install "
                "outrider-ray, or use a pool of concurrent.futures"
            ) from None
        self._ray = ray
        self._task = ray.remote(**options)(_call) if options else ray.remote(_call)
        self._sent: dict[int, tuple[Callable[..., object], object]] = {}  # by identity, kept alive

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> "Future[T]":
        """A future of the call."""
        if id(fn) not in self._sent:
            self._sent[id(fn)] = fn, self._ray.put(fn)
        sent = self._sent[id(fn)][1]
        future: Future[T] = self._task.remote(sent, *args, **kwargs).future()
        return future
