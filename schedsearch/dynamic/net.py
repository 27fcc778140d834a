"""Runs a `DynamicProgram`: exact, where the host reads the sizes of each segment, or bounded, where it reads nothing.

*Exact*: for each segment one kernel computes the sizes, one copy of 8 bytes an extent brings them to pinned memory, the host
waits once, and launches on arrays that it places. *Bounded*: every array has the memory of its bound, kernels read extents
from the device's memory, and the whole run is a chain of launches, on a GPU one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from schedsearch.closing import Closing
from schedsearch.device import Device
from schedsearch.dynamic.bound import BoundNet
from schedsearch.dynamic.exact import ExactRuns
from schedsearch.dynamic.loaded import LoadedProgram
from schedsearch.dynamic.noted import index_notes
from schedsearch.dynamic.pool import Pool
from schedsearch.dynamic.program import DynamicProgram
from schedsearch.dynamic.run import Run
from schedsearch.errors import UsageError
from schedsearch.launch import Artifact
from schedsearch.typed import Array
from schedsearch.workload import Workload


class DynamicNet(Closing):
    """A graph that is ready to run on one device: call it for an exact run, or `bind` it for bounded ones.

    A net has memory of its own: do not run it on two streams at once.

    Args:
        program: of `DynamicGraph.program`.
        device: stays open.
        kernels: gives the machine code of each workload, e.g. that of `schedsearch.compile(workload).artifact`.
        size_kernels: gives the machine code that computes the sizes of a segment, by its number, and whether the run is
            bounded; None: it is compiled when it is first needed. `schedsearch.dynamic.code.machine_code` compiles all code
            of some programs at once.
    """

    def __init__(
        self,
        program: DynamicProgram,
        device: Device,
        kernels: Callable[[Workload], Artifact],
        size_kernels: Callable[[int, bool], Artifact] | None = None,
    ) -> None:
        self.program, self.device = program, device
        self._loaded = LoadedProgram(program, device, kernels, size_kernels)
        self._exact: ExactRuns | None = None

    def __call__(self, *given: Any, stream: Any = None) -> Any:
        """Runs exactly: the outputs have the shapes that the inputs lead to.

        Args:
            given: the inputs in order: contiguous arrays of the device whose shapes fit the declared sizes.
            stream: as of `schedsearch.Kernel`.

        Returns:
            The output, or a tuple of several, of the first input's library. Outputs of operators that only work at their
            bound are views of larger arrays.

        Raises:
            ArgumentError: an input has a wrong shape, dtype or device.
            SizeError: inputs are impossible, or sizes exceed their bounds; the message names call and sizes.
            IndexRangeError: an index of a gather or scatter is out of range. On a GPU a run sees this when it waits for
                sizes; otherwise `check` does.
        """
        run = (self._exact or self._exact_runs()).run(given, stream)
        found = [run.sliced(name) for name in self.program.outputs]
        run.release()
        return found[0] if len(found) == 1 else tuple(found)

    def _exact_runs(self) -> ExactRuns:
        self._check_open()
        self._exact = ExactRuns(self._loaded)
        return self._exact

    def trace(self, names: Iterable[str], *given: object) -> dict[str, Array]:
        """Runs exactly, and returns what values inside hold, whose extents must follow from those of the inputs: NumPy
        arrays that hold their numbers exactly. Raises as a call does."""
        run = (self._exact or self._exact_runs()).run(given, None)
        self.device.synchronize()
        found = {name: run.numbers(name) for name in names}
        run.release()
        return found

    def bind(self, *given: object, overlapped: bool = False) -> BoundNet:
        """Prepares bounded runs on these arrays: on a GPU it captures one graph.

        Args:
            given: the inputs in order, as in a call. Later runs take other values from the same arrays.
            overlapped: sizes of a segment are computed while those of its first calls run that do not need them. This has no
                effect on a CPU.

        Raises:
            ArgumentError: an input has a wrong shape, dtype or device.
        """
        self._check_open()
        self.device.synchronize()  # what is done here does not wait for the caller's streams
        notes = index_notes(self.program, self.device, self._loaded.kernels)
        return BoundNet(self._loaded, Run(self._loaded, given, 0, Pool(self.device), notes), overlapped)

    def _check_open(self) -> None:
        if not self._loaded.sizes:
            raise UsageError("the net was closed; load it again")

    def check(self) -> None:
        """Waits for the exact runs.

        Raises:
            IndexRangeError: an index of a gather or scatter was out of range in a run since the last check. The message
                names call, index, its place, and what is allowed. Nothing outside of an array was read or written.
        """
        self.device.synchronize()
        if self._exact is not None:
            self._exact.notes.check()

    @property
    def allocations(self) -> int:
        """How often exact runs have allocated memory."""
        return self._exact.allocations if self._exact else 0

    def close(self) -> None:
        """Waits for the runs, and frees the memory and the code; does nothing the second time."""
        if self._loaded.sizes:
            self.device.synchronize()
        if self._exact is not None:
            self._exact.close()
            self._exact = None
        self._loaded.close()
