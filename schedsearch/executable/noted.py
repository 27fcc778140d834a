"""Indices out of range that the calls of a network noted; see `schedsearch.ops.wrong_index`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedsearch.device.index_notes import IndexNotes, notes_indices
from schedsearch.errors import IndexRangeError
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.executable.run import Weights


class NotedIndices:
    """Memory for the notes of a network's calls.

    Attributes:
        addresses: number of a call that reads indices -> where it notes one that is out of range.
    """

    def __init__(self, weights: Weights) -> None:
        self._program = weights.program
        plans = {sha256: kernel.artifact.plan for sha256, kernel in weights.kernels.items()}
        noting = {sha256 for sha256, plan in plans.items() if notes_indices(plan)}
        self._calls = [number for number, call in enumerate(self._program.calls) if call.artifact in noting]
        self._notes = IndexNotes(weights.device, len(self._calls))
        self.addresses = {call: self._notes.address(number) for number, call in enumerate(self._calls)}

    def check(self) -> None:
        """Raises IndexRangeError for the first call that noted an index since the last check. All calls must be complete."""
        if (found := self._notes.take()) is not None:
            number, place, index = found
            call, arrays = self._program.calls[self._calls[number]], self._program.arrays
            workload = Workload.from_json(call.workload)
            names = {argument: arrays[each].name for argument, each in call.buffers.items()}
            text = workload.definition.wrong_index(workload.params, place, index, names)
            raise IndexRangeError(f"node {call.name}: {text}. Give other inputs, or correct the model")

    def close(self) -> None:
        self._notes.close()
