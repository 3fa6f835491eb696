"""Drafts that memory has no room for are made smaller from then on, and the log says so.

A tree takes room beside the text: entries of its nodes, scores over the vocabulary, and in layers
that keep a state the state behind each node. Where the system has none left the step is made again
with the next smaller shape of the drafter, at last with none: what was written at the nodes' slots
is written over, as rejected nodes are.
"""

import logging
from collections.abc import Sequence

from outrider.errors import first_line, out_of_memory
from outrider.types import PLAIN, DraftShape

_log = logging.getLogger("outrider")


class DraftRoom:
    """How many nodes of a step there is memory for, the pending token included; None: nobody knows.

    >>> shapes = [DraftShape(n, 1 + n, n, is_chain=True) for n in (8, 4, 2)]
    >>> room = DraftRoom(shapes)
    >>> room.lost(shapes[0], MemoryError("no room")), room.fitting(shapes[0]).max_nodes
    (True, 5)
    """

    def __init__(self, shapes: Sequence[DraftShape]) -> None:
        self._shapes = sorted((*shapes, PLAIN), key=lambda shape: shape.max_nodes)
        self.most: int | None = None

    def fitting(self, shape: DraftShape) -> DraftShape:
        """The shape, or the largest one that there is memory for."""
        if self.most is None or shape.max_nodes <= self.most:
            return shape
        smaller = [own for own in self._shapes if own.max_nodes <= self.most][-1]
        if not smaller.max_depth:
            return smaller
        sizes = shape.sizes
        if sizes is not None:
            sizes = tuple(min(size, smaller.max_nodes - 1) for size in sizes)
        return smaller._replace(most_B=shape.most_B, sizes=sizes)

    def lost(self, shape: DraftShape, error: Exception) -> bool:
        """Whether a step of this shape failed for want of memory, and a smaller one may do.

        Says so, and at most how many nodes are drafted from now on.
        """
        if not shape.max_depth or not out_of_memory(error):
            return False
        smaller = [own.max_nodes for own in self._shapes if own.max_nodes < shape.max_nodes]
        self.most = smaller[-1]
        left = f"at most {self.most - 1}" if self.most > 1 else "none"
        _log.warning(
            "no memory for %d drafted tokens a step (%s): from now on %s",
            shape.max_nodes - 1,
            first_line(error),
            left,
        )
        return True
