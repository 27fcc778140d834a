"""Memory in which kernels note indices that are out of range; see `schedsearch.ops.wrong_index`.

It is pinned memory of the host, which a GPU reaches at the same address. So a note needs no copy, and looking for one costs
nothing but the wait for the kernels. A kernel only writes there if an index is out of range.
"""

from __future__ import annotations

import numpy as np

from schedsearch.device import Device
from schedsearch.device.memory import bytes_at
from schedsearch.launch import LaunchPlan
from schedsearch.ops.wrong_index import WRONG_INDEX, WRONG_INDEX_WORDS

_BYTES = 8 * WRONG_INDEX_WORDS


def notes_indices(plan: LaunchPlan) -> bool:
    """Whether a kernel notes indices that are out of range."""
    return any(WRONG_INDEX in step.buffers for step in plan.steps)


class IndexNotes:
    """Words for some calls, numbered from 0. The caller closes it before the device."""

    def __init__(self, device: Device, count: int) -> None:
        self._device, self._address = device, device.pinned(_BYTES * count) if count else 0
        data = bytes_at(self._address, _BYTES * count) if count else b""
        self._words = np.frombuffer(data, np.int64).reshape(count, WRONG_INDEX_WORDS)
        if count:
            self._words[:] = 0

    def address(self, number: int) -> int:
        """Where the kernel of a call notes."""
        return self._address + _BYTES * number

    def take(self) -> tuple[int, int, int] | None:
        """The first call that has noted an index since the last time, the place of the index in its array, and the index;
        everything is forgotten then. The calls must be complete."""
        if not self._words[:, 0].any():
            return None
        number = int(np.flatnonzero(self._words[:, 0])[0])
        place, index = map(int, self._words[number])
        self._words[:] = 0
        return number, place - 1, index

    def close(self) -> None:
        """Does nothing the second time. No call may use it any more."""
        if self._address:
            self._words = np.zeros((0, WRONG_INDEX_WORDS), np.int64)
            self._device.free_pinned(self._address)
            self._address = 0
