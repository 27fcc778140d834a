"""The memory of an emulated device: separate buffers, of which every access is checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from schedsearch.typed import Array

_GAP = 1 << 20  # unmapped bytes between buffers


class Memory:
    """A 64-bit address space of separate buffers."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, Array]] = []
        self._next = 1 << 40
        self.check: Callable[[int], None] = lambda start: None  # is told of each access the address of its buffer

    def add(self, array: Array) -> int:
        address, data = self._next, array.reshape(-1).view(np.uint8)
        self._buffers.append((address, data))
        self._next += (data.nbytes + _GAP) // 256 * 256 + 256
        return address

    def at(self, address: int, nbytes: int, alignment: int = 0) -> Array:
        """The bytes of an access; `alignment` is that of the address if it is not `nbytes`."""
        address = int(address) % 2**64
        for start, data in self._buffers:
            if start <= address and address + nbytes <= start + data.nbytes:
                aligned = (address - start) % (alignment or nbytes) == 0
                assert aligned, f"misaligned access of {nbytes} bytes at {address:#x}"
                self.check(start)
                return data[address - start : address - start + nbytes]
        raise AssertionError(f"access of {nbytes} bytes outside every buffer, at {address:#x}")
