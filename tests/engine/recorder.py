"""A capture that needs no device: every operator call is recorded and can be done again.

It stands for a CUDA graph: recorded work has no effect, reads and writes fixed tensors when it is
replayed, runs no Python, and a read of a value on the host is an error.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine.graphs import CapturedInputs, Recorded


class HostRead(AssertionError):
    """A value was read while recording; a CUDA graph could not be captured."""


#: Operators that wait for a value; tolist() and numpy() show as the last one alone.
READS = {
    torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default, torch.ops.aten.resolve_neg.default,
}  # fmt: skip


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.before = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in READS:
            raise HostRead(str(func))
        schema = func._schema
        for value, argument in zip(args, schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.append((value, value.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


class Recorder:
    """A `Capture` on the CPU. `replays` counts."""

    def __init__(self):
        self.replays = self.records = self.warmed = 0

    def warm(self, run):
        self.warmed += 1
        return run()

    def memory(self):
        return None

    def record(self, run, memory=None):
        self.records += 1
        tape, held = _Tape(), CapturedInputs()
        with tape, held:
            result = run()
        for value, before in reversed(tape.before):  # recording does nothing
            value.copy_(before)

        def replay():
            self.replays += 1
            for func, args, kwargs, old in tape.calls:
                new = func(*args, **kwargs)
                for there, value in zip(tree_leaves(old), tree_leaves(new), strict=True):
                    if isinstance(there, torch.Tensor) and there.data_ptr() != value.data_ptr():
                        there.copy_(value)

        return Recorded(result, replay, held.reads)
