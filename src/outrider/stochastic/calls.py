"""f and g on many states: in this process as one call, or in parts by an executor."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from outrider import arguments
from outrider.errors import WorkerTimeout
from outrider.stochastic import laws
from outrider.stochastic.laws import LawTable

State = TypeVar("State")


class BatchedFunction(Generic[State]):
    """f or g, with the number of states it was asked about and of rounds it was asked in.

    executor         None: one call in this process; else `submit` of it is given parts
    states_per_call  states of a part
    timeout          seconds that a round may take in an executor; None: any
    """

    def __init__(
        self,
        name: str,
        function: Callable[[list[State]], object],
        executor: Executor | None = None,
        states_per_call: int = 1,
        timeout: float | None = None,
    ) -> None:
        if not callable(function):
            arguments.refuse(name, "a function of a list of states", function, "pass a callable")
        self.name, self.function = name, function
        self.executor, self.states_per_call, self.timeout = executor, states_per_call, timeout
        self.rounds = self.evaluations = 0

    def __call__(self, states: Sequence[State]) -> LawTable:
        """The laws of these states, in their order."""
        self.rounds += 1
        self.evaluations += len(states)
        if self.executor is None:
            return self._read(self._told(lambda: self.function(list(states)), len(states)), states)
        size = self.states_per_call
        parts = [list(states[at : at + size]) for at in range(0, len(states), size)]
        found: list[Future[object]] = []
        try:
            for part in parts:
                found.append(self.executor.submit(self.function, part))
            end = None if self.timeout is None else time.monotonic() + self.timeout
            return laws.joined(
                self.name,
                [
                    self._read(self._told(self._waiting(one, end), len(part)), part)
                    for one, part in zip(found, parts, strict=True)
                ],
            )
        finally:
            for one in found:
                one.cancel()  # without effect on what is done, or runs already

    def _waiting(self, future: "Future[object]", end: float | None) -> Callable[[], object]:
        def wait() -> object:
            if end is None:
                return future.result()
            try:
                return future.result(max(end - time.monotonic(), 0))
            except TimeoutError:
                if future.done():  # the function's own
                    raise
                raise WorkerTimeout(
                    f"{self.name} did not answer within timeout={self.timeout:g} seconds in round "
                    f"{self.rounds}; raise the timeout, or give it fewer states_per_call "
                    f"({self.states_per_call} now). What runs in the executor goes on there"
                ) from None

        return wait

    def _read(self, given: object, states: Sequence[State]) -> LawTable:
        return laws.read(self.name, given, len(states))

    def _told(self, call: Callable[[], object], count: int) -> object:
        """The call's result; what it raises is told where it comes from, and goes on."""
        try:
            return call()
        except Exception as error:
            error.add_note(f"raised by {self.name} in its round {self.rounds}, on {count} states")
            raise
