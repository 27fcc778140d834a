"""Memory in which kernels note indices that are out of range; see `schedsearch.ops.wrong_index`.

It is pinned memory of the host, which a GPU reaches at the same address. So a note needs no copy, and looking for one costs
nothing but the wait for the kernels. A kernel only writes there if an index is out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from schedsearch.device.contract import Memory
from schedsearch.device.memory import bytes_at
from schedsearch.errors import IndexRangeError
from schedsearch.launch import LaunchPlan
from schedsearch.ops.wrong_index import WRONG_INDEX, WRONG_INDEX_WORDS

_BYTES = 8 * WRONG_INDEX_WORDS
_Call = TypeVar("_Call")


def notes_indices(plan: LaunchPlan) -> bool:
    """Whether a kernel notes indices that are out of range."""
    return any(WRONG_INDEX in step.buffers for step in plan.steps)


class IndexNotes(Generic[_Call]):
    """Words for some calls. The caller closes it before the device.

    Args:
        calls: those whose kernels note indices, in their order.
        describe: `describe(call, place, index)` says what is wrong with an index; see `Op.wrong_index`.
    """

    def __init__(self, device: Memory, calls: Sequence[_Call], describe: Callable[[_Call, int, int], str]) -> None:
        self._device, self._calls, self._describe = device, tuple(calls), describe
        nbytes = _BYTES * len(self._calls)
        self._address = device.pinned(nbytes) if nbytes else 0
        self._words = np.frombuffer(bytes_at(self._address, nbytes) if nbytes else b"", np.int64).reshape(-1, 2)
        if nbytes:
            self._words[:] = 0
        self._buffers = {call: {WRONG_INDEX: self._address + _BYTES * n} for n, call in enumerate(self._calls)}

    def buffers(self, call: _Call) -> Mapping[str, int]:
        """The buffer to bind for a call: where it notes an index; none for a call that is not among `calls`."""
        return self._buffers.get(call, {}) if self._buffers else {}

    def check(self) -> None:
        """Looks for a note that was made since the last check. The calls must be complete.

        Raises:
            IndexRangeError: an index was out of range, of the first call that noted one. All notes are forgotten then.
        """
        if not self._calls or not self._words[:, 0].any():
            return
        number = int(np.flatnonzero(self._words[:, 0])[0])
        place, index = map(int, self._words[number])
        self._words[:] = 0
        raise IndexRangeError(self._describe(self._calls[number], place - 1, index))

    def close(self) -> None:
        """Does nothing the second time. No call may use it any more."""
        if self._address:
            self._calls, self._words = (), np.zeros((0, WRONG_INDEX_WORDS), np.int64)
            self._device.free_pinned(self._address)
            self._address = 0
