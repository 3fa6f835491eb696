"""One model held by several processes: transformers cuts the weights, rank 0 decides everything.

Rank 0 has the engine, the drafter and the user's program. The other ranks have a part of the target
and of its cache, and follow orders: which rows come and go, what a call reads, which path was kept.
So no choice is made twice, and a difference in rounding between processes cannot fork a text.

    rpc.py    the processes, what rank 0 tells the others, and what is said when one is gone
    model.py  the model that the engine sees on rank 0, and what the other ranks do
"""

from outrider.models.distributed.model import ShardedModel, split
from outrider.models.distributed.rpc import Group, join

__all__ = ["Group", "ShardedModel", "join", "split"]
