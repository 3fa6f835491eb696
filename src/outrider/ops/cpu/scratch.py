"""Memory that the CPU rules write to and never give away: one of each kind in every thread.

Two requests may be decoded in two threads; a rule reads its rows again after it has written them.
"""

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

T = TypeVar("T")
_MOST = 8  #: of each kind, then the oldest goes: shapes change with the request

_own = threading.local()


def per_thread(make: Callable[..., T]) -> Callable[..., T]:
    """Remember what `make` made for its arguments, in the thread that asked.

    >>> room = per_thread(lambda size: [0] * size)
    >>> room(2) is room(2)
    True
    """

    @wraps(make)
    def made(*key: Hashable) -> T:
        try:
            kept: dict[Hashable, T] = _own.kept[made]
        except (AttributeError, KeyError):
            if not hasattr(_own, "kept"):
                _own.kept = {}
            kept = _own.kept.setdefault(made, {})
        found = kept.get(key)
        if found is None:
            if len(kept) >= _MOST:
                kept.pop(next(iter(kept)))
            found = kept[key] = make(*key)
        return found

    return made
