"""Memory for the arrays of exact runs: pieces that later runs take again."""

from __future__ import annotations

import bisect

from schedsearch.device import Device

_GRAIN = 1 << 12


class Pool:
    """Pieces of a device's memory. A run takes pieces, and `restart` makes all of them free for the next run.

    Attributes:
        allocations: how often memory was allocated.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pieces: list[tuple[int, int]] = []  # (bytes, address), sorted
        self._free: list[tuple[int, int]] = []
        self.allocations = 0

    def restart(self) -> None:
        self._free = self._pieces.copy()

    def take(self, nbytes: int) -> int:
        """The address of a piece of at least so many bytes: the smallest free one, or a new one.

        Raises:
            DeviceError: there is no memory.
        """
        for number, (size, address) in enumerate(self._free):
            if size >= nbytes:
                del self._free[number]
                return address
        size = -(-max(nbytes, 1) // _GRAIN) * _GRAIN
        address = self._device.allocate(size)
        self.allocations += 1
        bisect.insort(self._pieces, (size, address))
        return address

    def close(self) -> None:
        while self._pieces:
            self._device.free(self._pieces.pop()[1])
        self._free = []
