"""What a stage is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Item:
    """One piece of a stage with a result of its own: what a killed stage loses at most."""

    key: str
    run: Callable[[], dict[str, Any]]
    seconds: float = 60.0  #: the process is ended if it takes longer, and the rest goes on anew


class Failed(Exception):
    """An item that ended and found something wrong; `result` is kept all the same."""

    def __init__(self, why: str, result: dict[str, Any]) -> None:
        super().__init__(why)
        self.result = result
