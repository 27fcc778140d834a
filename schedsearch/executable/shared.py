"""Memory that the programs of several sizes of a network share."""

from __future__ import annotations

from schedsearch.device.contract import Device


class Shared:
    """Memory of a device that the programs of several sizes of a network share: constants by their content, what constant
    steps computed from them, and the memory in which programs compute, one at a time.

    Raises:
        DeviceError: the device has too little memory.
    """

    def __init__(self, device: Device, arena_bytes: int) -> None:
        self.device = device
        self._memory: list[int] = []
        self._found: dict[object, int] = {}
        self._new: list[object] = []  # that a program which is being loaded fills
        self.arena = self._allocate(arena_bytes) if arena_bytes else 0

    def address(self, content: object, nbytes: int) -> tuple[int, bool]:
        """The address of something, and whether it was there before; otherwise the caller fills it."""
        known = content in self._found
        if not known:
            self._found[content] = self._allocate(nbytes)
            self._new.append(content)
        return self._found[content], known

    def _allocate(self, nbytes: int) -> int:
        self._memory.append(self.device.allocate(max(nbytes, 1)))
        return self._memory[-1]

    def keep(self, filled: bool) -> None:
        """Says that a program was loaded, so that what it brought may be used, or that it was not."""
        for content in () if filled else self._new:
            del self._found[content]
        self._new.clear()

    def close(self) -> None:
        """Frees the memory. Every program must be closed."""
        while self._memory:
            self.device.free(self._memory.pop())
        self._found = {}
