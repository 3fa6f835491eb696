"""States that are updated element by element: selective scans, RG-LRU, RWKV.

There is no chunked form that would save anything: each token's state is made anyway, and texts are
read token by token as trees are, by the same operations.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.models.recurrent.call import NodeStates, Recurrence


class ElementwiseState(Recurrence):
    """A `Recurrence` said by its update: what is logged, how it is applied, what is read.

    Tables are [B, Q, ...] for nodes, and [B, ...] for one of them.
    """

    @abstractmethod
    def entries(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What is logged of the nodes with these inputs."""

    @abstractmethod
    def output(self, before: Tensor, behind: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """What is read at one node, of the states before it and behind it."""

    def over_nodes(self, nodes: NodeStates, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Node by node, each from its parent's state."""
        entries, outs = self.entries(*inputs), []
        for node in range(inputs[0].shape[1]):
            before = nodes.of_parent(node)
            behind = self.advance(before, _at(entries, node), None)
            outs.append(self.output(before, behind, _at(inputs, node)))
            nodes.place(node, behind)
        return torch.stack(outs, 1), entries

    def over_text(
        self, state: Tensor, ancestors_BQQ: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Token by token; what is no text is read behind the token before it, and forgotten."""
        entries, outs = self.entries(*inputs), []
        eye = torch.eye(ancestors_BQQ.shape[1], dtype=torch.bool, device=state.device)
        goes_on_BQ = (ancestors_BQQ & ~eye).any(1)
        last = int(goes_on_BQ.any(0).nonzero().max()) + 1 if bool(goes_on_BQ.any()) else 0
        for node in range(min(last + 1, inputs[0].shape[1])):
            entry = _at(entries, node)
            behind = self.advance(state, entry, None)
            outs.append(self.output(state, behind, _at(inputs, node)))
            if not bool(goes_on_BQ[:, node].all()):
                behind = self.advance(state, self.idle(entry, goes_on_BQ[:, node]), None)
            state = behind
        out = torch.stack(outs, 1)
        more = out.new_zeros(out.shape[0], inputs[0].shape[1] - len(outs), *out.shape[2:])
        return torch.cat([out, more], 1), entries

    def settle(
        self, state: Tensor, on_BQ: Tensor, entries: tuple[Tensor, ...], *inputs: Tensor
    ) -> Tensor:
        state = state.clone()
        for node, (some, every) in enumerate(
            zip(on_BQ.any(0).tolist(), on_BQ.all(0).tolist(), strict=True)
        ):
            if some:
                entry = _at(entries, node)
                self.advance(state, entry if every else self.idle(entry, on_BQ[:, node]), state)
        return state


def _at(tables: Sequence[Tensor], node: int) -> list[Tensor]:
    return [table[:, node] for table in tables]
