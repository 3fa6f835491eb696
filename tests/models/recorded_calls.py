"""Calls of kernels as they are made here, with the memory that they read and leave, so that the
same calls can be made elsewhere (`kernel_driver.c`) and what is left can be compared."""

import ctypes
import struct
from pathlib import Path

import torch

from outrider.models.cpu_kernels import build


class RecordedCalls:
    """Records what `build.function` hands out, from its making on."""

    def __init__(self, monkeypatch):
        self.calls = []  #: name, buffers before [(bytes, alignment)], arguments, buffers after
        self._known = {}  #: address: size, and what keeps it there
        point, where, find = torch.Tensor.data_ptr, ctypes.addressof, build.function

        def data_ptr(tensor):
            lies = tensor.untyped_storage()
            self._known[lies.data_ptr()] = lies.nbytes(), lies
            return point(tensor)

        def addressof(structure):
            self._known[where(structure)] = ctypes.sizeof(structure), structure
            return where(structure)

        def function(name, types):
            return self._recorded(name, types, find(name, types))

        monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
        monkeypatch.setattr(ctypes, "addressof", addressof)
        monkeypatch.setattr(build, "function", function)

    def _recorded(self, name, types, run):
        def call(*given):
            buffers, arguments = {}, []
            for value, kind in zip(given, types, strict=True):
                if kind is ctypes.c_float:
                    arguments.append((1, struct.unpack("<i", struct.pack("<f", value))[0]))
                elif kind is ctypes.c_void_p and value:
                    at = self._holds(value)
                    number = buffers.setdefault(at, len(buffers))
                    arguments.append((2, number, value - at))
                else:
                    arguments.append((0, int(value or 0)))
            before = [(self._bytes(at), at % 64) for at in buffers]
            result = run(*given)
            self.calls.append((name, before, arguments, [self._bytes(at) for at in buffers]))
            return result

        return call

    def _holds(self, address):
        for at, (size, _) in reversed(self._known.items()):
            if at <= address < at + max(size, 1):
                return at
        raise AssertionError(f"nobody has asked for the address {address:#x}")

    def _bytes(self, at):
        return ctypes.string_at(at, self._known[at][0])

    def write(self, path: Path) -> None:
        """As the driver reads them."""
        with path.open("wb") as file:

            def number(x):
                file.write(struct.pack("<q", x))

            number(len(self.calls))
            for name, before, arguments, _ in self.calls:
                number(len(name))
                file.write(name.encode())
                number(len(before))
                for content, alignment in before:
                    number(len(content))
                    number(alignment)
                    file.write(content)
                number(len(arguments))
                for argument in arguments:
                    for x in argument:
                        number(x)

    def compared(self, path: Path) -> dict[str, int]:
        """How many bytes each function has left, all told; raises AssertionError if what the
        driver wrote is not what was left here."""
        left, at, counts = path.read_bytes(), 0, {}
        for number, (name, _, arguments, after) in enumerate(self.calls):
            for i, content in enumerate(after):
                there = left[at : at + len(content)]
                wrong = sum(a != b for a, b in zip(content, there, strict=True))
                assert not wrong, (
                    f"call {number}, {name}{arguments}: buffer {i} of {len(content)} bytes "
                    f"differs in {wrong}"
                )
                at += len(content)
                counts[name] = counts.get(name, 0) + len(content)
        assert at == len(left)
        return counts
