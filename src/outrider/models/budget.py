"""How long a start may measure: processor seconds for all that is tried before the first prompt.

What is measured under a budget looks at it between two looks at the clock, and estimates what it
has no time for. A measurement that takes longer than TELLS says what it does.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

SECONDS = 5.0  #: for models of up to so many parameters:
SMALL = 200_000_000
LEAST, SHARE = 2.0, 0.02  #: for larger ones: so many seconds, or this share of the time to load
TELLS = 2.0  #: seconds of measuring, by the clock on the wall, before it says what it does

_log = logging.getLogger(__name__)


@cache
def _line(said: str) -> None:
    _log.warning("%s", said)  # once: several engines of a process may measure alike


_SAID = "measuring this machine once: {}"
_teller: ContextVar[Callable[[str], object]] = ContextVar("_teller", default=_line)


class Budget:
    """Processor seconds of this process that measuring may take; without an end if none are given.

    >>> allowed = Budget(5.0)
    >>> with allowed.measuring("what steps cost"):
    ...     allowed.over()
    False
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._began = time.process_time()
        self._spent = 0.0
        self._since: float | None = None  #: when what runs now began
        self._ceiling = math.inf  #: what a part of it may spend to
        self._looked = 0.0  #: seconds of `looking`

    def allow(self, parameters: int) -> None:
        """Set it for a model of this size, which is loaded by now; one without an end stays so, and
        one that was closed."""
        if 0 < self.seconds < math.inf:
            loading = time.process_time() - self._began - self.spent
            large = max(LEAST, SHARE * loading)
            self.seconds = SECONDS if parameters <= SMALL else large

    @property
    def spent(self) -> float:
        """Seconds that are gone."""
        now = 0.0 if self._since is None else time.process_time() - self._since
        return self._spent + now

    @property
    def left(self) -> float:
        """Seconds that are left; none are when it is overdrawn."""
        return max(min(self.seconds, self._ceiling) - self.spent, 0.0)

    @property
    def limited(self) -> bool:
        """Whether it ends."""
        return min(self.seconds, self._ceiling) < math.inf

    def close(self) -> None:
        """Nothing more is spent: all is estimated from one look at it."""
        self.seconds = 0.0

    def over(self) -> bool:
        """Whether there is nothing left of it."""
        return self.left <= 0.0

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """In here only this share of what is left may be spent."""
        before = self._ceiling
        if self.limited:
            self._ceiling = self.spent + share * self.left
        try:
            yield
        finally:
            self._ceiling = before

    @contextmanager
    def looking(self, what: str) -> Iterator[None]:
        """One piece of a measurement that goes on later; all of them are told of when they have
        taken long, once."""
        if self._since is not None:
            yield
            return
        self._since = time.process_time()
        try:
            yield
        finally:
            before, spent = self._spent, self.spent
            self._spent, self._since = spent, None
            self._looked, looked = self._looked + spent - before, self._looked
            if looked < TELLS <= self._looked:
                _teller.get()(_SAID.format(what))

    @contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """In here time is spent on measuring; long work is told of, once."""
        if self._since is not None:  # a part of a measurement
            yield
            return
        said = _SAID.format(what)
        timer = threading.Timer(TELLS, _teller.get(), (said,))
        timer.daemon = True
        timer.start()
        self._since = time.process_time()
        try:
            yield
        finally:
            timer.cancel()
            self._spent, self._since = self.spent, None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In here time is not measuring's: what has to be done whatever it takes."""
        if self._since is None:
            yield
            return
        self._spent, self._since = self.spent, None
        try:
            yield
        finally:
            self._since = time.process_time()


_current: ContextVar[Budget | None] = ContextVar("_current", default=None)


def current() -> Budget:
    """The budget that measurements are under; without an end where nobody set one."""
    return _current.get() or Budget()


def unspent() -> Budget:
    """The budget that measurements are under, or one for a small model."""
    return _current.get() or Budget(SECONDS)


@contextmanager
def under(budget: Budget) -> Iterator[Budget]:
    """In here measurements are under this budget."""
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)


_postponed: ContextVar[bool] = ContextVar("_postponed", default=False)


def postponed() -> bool:
    """Whether what steps cost is to be measured later, by whoever said so."""
    return _postponed.get()


@contextmanager
def postponing() -> Iterator[None]:
    """In here what steps cost is not measured. For a server, which does it while nobody asks."""
    token = _postponed.set(True)
    try:
        yield
    finally:
        _postponed.reset(token)


@contextmanager
def reporting(teller: Callable[[str], object]) -> Iterator[None]:
    """In here long measurements are told to this, instead of a log."""
    token = _teller.set(teller)
    try:
        yield
    finally:
        _teller.reset(token)
