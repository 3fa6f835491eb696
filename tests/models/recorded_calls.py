"""Calls of kernels as they are made here, with the memory that they read and leave, so that the
same calls can be made elsewhere (`kernel_driver.c`) and what is left can be compared."""

import ctypes
import struct
from pathlib import Path

import torch

from outrider.models.cpu_kernels import build

LARGE = 1 << 22  #: bytes of memory that tensors share


def _extent(tensor):
    """Bytes from its first number to behind its last."""
    each = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in each)) * tensor.element_size()


class RecordedCalls:
    """Records what `build.function` hands out, from its making on."""

    def __init__(self, monkeypatch):
        #: name, buffers before [(bytes, alignment)], addresses in them [(buffer, place, buffer,
        #: place)], arguments, buffers after
        self.calls = []
        self._known = {}  #: address: size, and what keeps it there
        self._tables = set()  #: of these the ones in which addresses may lie
        point, where, find = torch.Tensor.data_ptr, ctypes.addressof, build.function

        def data_ptr(tensor):
            lies = tensor.untyped_storage()
            at, size = lies.data_ptr(), lies.nbytes()
            if size > LARGE:  # one of many tensors there
                at, size = point(tensor), _extent(tensor)
            self._known[at] = max(size, self._known.get(at, (0,))[0]), lies
            if tensor.dtype == torch.int64:
                self._tables.add(at)
            return point(tensor)

        def addressof(structure):
            self._known[where(structure)] = ctypes.sizeof(structure), structure
            self._tables.add(where(structure))
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
                elif kind is ctypes.c_void_p and isinstance(value, ctypes.Array):
                    at = ctypes.addressof(value)
                    arguments.append((2, buffers.setdefault(at, len(buffers)), 0))
                elif kind is ctypes.c_void_p and value:
                    at = self._holds(value)
                    assert at is not None, f"nobody has asked for the address {value:#x}"
                    number = buffers.setdefault(at, len(buffers))
                    arguments.append((2, number, value - at))
                else:
                    arguments.append((0, int(value or 0)))
            inside = self._inside(buffers)
            before = [(self._bytes(at), at % 64) for at in buffers]
            result = run(*given)
            after = [self._bytes(at) for at in buffers]
            self.calls.append((name, before, inside, arguments, after))
            return result

        return call

    def _inside(self, buffers):
        """Addresses that lie in buffers; what they point to is added to these."""
        found, left = [], list(buffers)
        while left:
            at = left.pop()
            words = self._bytes(at) if at in self._tables else b""
            for place, (word,) in enumerate(struct.iter_unpack("<Q", words[: len(words) // 8 * 8])):
                to = self._holds(word) if word >= 1 << 20 else None
                if to is not None:
                    if to not in buffers:
                        buffers[to] = len(buffers)
                        left.append(to)
                    found.append((buffers[at], 8 * place, buffers[to], word - to))
        return found

    def _holds(self, address):
        for at, (size, _) in reversed(self._known.items()):
            if at <= address < at + max(size, 1):
                return at
        return None

    def _bytes(self, at):
        return ctypes.string_at(at, self._known[at][0])

    def write(self, path: Path) -> None:
        """As the driver reads them."""
        with path.open("wb") as file:

            def number(x):
                file.write(struct.pack("<q", x))

            number(len(self.calls))
            for name, before, inside, arguments, _ in self.calls:
                number(len(name))
                file.write(name.encode())
                number(len(before))
                for content, alignment in before:
                    number(len(content))
                    number(alignment)
                    file.write(content)
                number(len(inside))
                for one in inside:
                    for x in one:
                        number(x)
                number(len(arguments))
                for argument in arguments:
                    for x in argument:
                        number(x)

    def compared(self, path: Path) -> dict[str, int]:
        """How many bytes each function has left, all told; raises AssertionError if what the
        driver wrote is not what was left here."""
        left, at, counts = path.read_bytes(), 0, {}
        for number, (name, _, _, arguments, after) in enumerate(self.calls):
            for i, content in enumerate(after):
                there = left[at : at + len(content)]
                wrong = content != there and sum(map(int.__ne__, content, there))
                assert len(there) == len(content), "the driver has written too little"
                assert not wrong, (
                    f"call {number}, {name}{arguments}: buffer {i} of {len(content)} bytes "
                    f"differs in {wrong}"
                )
                at += len(content)
                counts[name] = counts.get(name, 0) + len(content)
        assert at == len(left)
        return counts
