"""What the other ranks do: they follow rank 0's orders until it ends, and never come back."""

import sys
from typing import NoReturn

import torch
from torch import distributed

from outrider.errors import ShardLost
from outrider.models.decoder import TreeDecoder
from outrider.models.distributed.group import Group
from outrider.models.distributed.model import ShardedModel
from outrider.models.distributed.rpc import Broadcaster, Shard


def split(own: TreeDecoder, group: Group) -> ShardedModel:
    """On rank 0 the model that calls the others along. The others stay here, and leave with it.

    All calls are padded as rank 0's are, whatever processor the others run on.
    """
    told: list[object] = [own.rounding]
    with group.together():
        distributed.broadcast_object_list(told, 0, group=group.orders)
    own.rounding = told[0]  # type: ignore[assignment]
    if group.rank == 0:
        return ShardedModel(own, group)
    serve(own, group)


@torch.inference_mode()
def serve(own: TreeDecoder, group: Group) -> NoReturn:
    """Follow orders. Leaves by SystemExit: 0 once rank 0 says so, 1 if a process is gone."""
    wire, shard = Broadcaster(group), Shard(own)
    try:
        while True:
            for order, tensors in wire.receive():
                with group.together():
                    order.run(shard, tensors)
    except SystemExit:
        distributed.destroy_process_group()
        raise
    except ShardLost as error:
        sys.stderr.write(f"rank {group.rank} of {group.size} leaves: {error}\n")
        raise SystemExit(1) from None
