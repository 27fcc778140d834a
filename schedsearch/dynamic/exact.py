"""Exact runs of a dynamic graph: the host reads the sizes of each segment, and places the arrays that depend on them.

Most arrays are where they were in the run before: those that have the memory of their bound, and that no caller holds. Calls
on such arrays alone are bound once. On a GPU those that follow one another are one CUDA graph.

The GPU idles while the host looks at sizes, so little is left to do then: what follows from shapes and dtypes of the inputs
is kept for later runs on such inputs, and of the packed arguments only those are written that have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from schedsearch.device import BoundKernel
from schedsearch.dynamic.given import look
from schedsearch.dynamic.loaded import LoadedProgram
from schedsearch.dynamic.noted import index_notes
from schedsearch.dynamic.pool import Pool
from schedsearch.dynamic.program import DynamicCall, DynamicProgram, DynamicValue
from schedsearch.dynamic.run import Extents, Run, values_read
from schedsearch.ops.dependence import STRIDE
from schedsearch.ops.movement import row_strides

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice

_LEAST_GRAPH = 3  # launches that take the host longer than the launch of a graph
_MOST_KEPT = 256  # runs for combinations of shapes and dtypes


def moving_values(program: DynamicProgram) -> set[str]:
    """Values that another run may have elsewhere: inputs, results, and what is placed by extents that the host reads."""
    values = program.values
    held = {values[name].view_of or name for name in (*program.inputs, *program.outputs)}
    held |= {value.name for value in values.values() if value.strided and not value.counted and value.words is not None}
    return held | {value.name for value in values.values() if value.view_of in held}


class ExactRuns:
    """What the exact runs of a net share: the arrays that never move, and the bound calls."""

    def __init__(self, net: LoadedProgram) -> None:
        self._net, self._moving = net, moving_values(net.program)
        self._still, self._pool = Pool(net.device), Pool(net.device)
        self.notes = index_notes(net.program, net.device, net.kernels)
        self._places: dict[str, int] = {}
        self._shapes: dict[str, Extents] = {}
        for segment in net.program.segments:
            for call in segment.calls:
                self._place_still(call)
        self._segments: list[tuple[_Sizes | None, list[_Chain | _Moving]]] = []
        self._kept: dict[Hashable, Run] = {}

    def _place_still(self, call: DynamicCall) -> None:
        program = self._net.program
        for name in call.outputs.values():
            if (value := program.values.get(name)) is None or name in self._moving or value.view_of:
                continue
            address = self._still.take(value.bytes_of(value.shape))
            for each in (value, *self._net.views.get(name, ())):
                self._places[each.name], self._shapes[each.name] = address, each.shape

    def run(self, given: tuple[Any, ...], stream: Any) -> Run:
        """A run on the caller's arrays, enqueued; see `DynamicNet.__call__`."""
        net, program = self._net, self._net.program
        run = self._run_on(given, stream)
        try:
            if run.staged:
                run.copy_staged(run.stream)
            run.send()
            if not self._segments:
                self._segments = [self._bind(number, run) for number in range(len(program.segments))]
            for segment, (sizes, steps) in zip(program.segments, self._segments):
                if sizes is not None:
                    sizes.launch(run)
                if segment.fetched is not None:
                    run.fetch(segment.fetched)
                for step in steps:
                    step.launch(run)
            if program.last is not None:
                run.fetch(program.last)
            if net.device.target.kind == "cpu":
                self.notes.check()
        except BaseException:
            run.release()
            raise
        return run

    def _run_on(self, given: tuple[object, ...], stream: object) -> Run:
        """A new run, or an earlier one on arrays of the same shapes and dtypes, with these arrays."""
        looks = [look(array, name) for array, name in zip(given, self._net.program.inputs)]
        key = (len(given), *(each for each, _ in looks))
        self._pool.restart()
        run = self._kept.get(key)
        if run is not None:
            run.renew(given, [address for _, address in looks], stream)
            return run
        run = Run(self._net, given, stream, self._pool, self.notes)
        run.places.update(self._places)
        run.shapes.update(self._shapes)
        if len(self._kept) == _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = run
        return run

    def _bind(self, number: int, run: Run) -> tuple[_Sizes | None, list[_Chain | _Moving]]:
        net, segment = self._net, self._net.program.segments[number]
        steps: list[_Chain | _Moving] = []
        for call in segment.calls:
            outputs = [net.program.values[name] for name in call.outputs.values() if name in net.program.values]
            if self._moving.intersection((*call.inputs.values(), *call.outputs.values())):
                placed = [value for value in outputs if value.name in self._moving and not value.view_of]
                steps.append(_Moving(net, call, placed, self._moving))
            elif steps and isinstance(steps[-1], _Chain):
                steps[-1].kernels.append(run.bind_call(call))
            else:
                steps.append(_Chain(net, [run.bind_call(call)]))
        sizes = run.bind_sizes(number, False)
        if sizes is None:
            return None, steps
        read = [each.buffer for each in values_read(segment) if each.buffer in self._moving]
        return _Sizes(sizes, _Pointers(sizes, {name: name for name in read}, run)), steps

    @property
    def allocations(self) -> int:
        return self._still.allocations + self._pool.allocations

    def close(self) -> None:
        """The device must have finished."""
        for _, steps in self._segments:
            for step in steps:
                step.close()
        self._segments = []
        self._kept.clear()
        self._still.close()
        self._pool.close()
        self.notes.close()


class _Chain:
    """Calls one after the other whose arrays never move."""

    def __init__(self, net: LoadedProgram, kernels: list[BoundKernel]) -> None:
        self.kernels, self._device = kernels, net.device
        self._graph: Any = None
        self._launch: Callable[[int], None] | None = None

    def launch(self, run: Run) -> None:
        if self._launch is None:
            self._launch = self._prepared()
        self._launch(run.stream)

    def _prepared(self) -> Callable[[int], None]:
        if self._device.target.kind != "cuda" or len(self.kernels) < _LEAST_GRAPH:
            return self._launch_all
        cuda: CudaDevice = self._device  # type: ignore[assignment]
        stream = cuda.create_stream()
        try:
            self._graph = cuda.capture(stream, self._launch_all)
        finally:
            cuda.destroy_stream(stream)
        return self._graph.launch  # type: ignore[no-any-return]

    def _launch_all(self, stream: int) -> None:
        for kernel in self.kernels:
            kernel.launch(stream)

    def close(self) -> None:
        if self._graph is not None:
            cuda: CudaDevice = self._device  # type: ignore[assignment]
            with cuda.current():
                self._graph.close()
        self._graph = self._launch = None


class _Pointers:
    """Buffers of a bound kernel that other runs have elsewhere.

    Args:
        buffers: buffer -> value of the graph.
        run: the one that the kernel was bound for.
    """

    def __init__(self, bound: BoundKernel, buffers: Mapping[str, str], run: Run) -> None:
        self._bound = bound
        self._buffers = [(buffer, name) for buffer, name in buffers.items() if name in run.places]
        self._addresses = [run.places[name] for _, name in self._buffers]

    def move(self, run: Run) -> None:
        places, addresses = run.places, self._addresses
        for number, (buffer, name) in enumerate(self._buffers):
            address = places[name]
            if address != addresses[number]:
                self._bound.set_pointer(buffer, address)
                addresses[number] = address


class _Sizes:
    """The kernel of sizes of a segment."""

    def __init__(self, kernel: BoundKernel, pointers: _Pointers) -> None:
        self._kernel, self._pointers = kernel, pointers

    def launch(self, run: Run) -> None:
        self._pointers.move(run)
        self._kernel.launch(run.stream)


class _Moving:
    """A call that gets the arrays of each run.

    Args:
        outputs: those to place for each run.
        moving: the values that another run may have elsewhere.
    """

    def __init__(self, net: LoadedProgram, call: DynamicCall, outputs: list[DynamicValue], moving: set[str]) -> None:
        self._net, self._call, self._outputs = net, call, outputs
        arrays = {**call.inputs, **call.outputs}
        self._arrays = {mine: name for mine, name in arrays.items() if name in moving}
        scalars = {scalar.name for scalar in call.workload.scalars}
        self._strided = [(mine, name) for mine, name in self._arrays.items() if f"{mine}{STRIDE}0" in scalars]
        self._shapes: list[Extents] = []
        self._strides: list[tuple[int, ...]] = []
        self._pointers: _Pointers | None = None
        self._bound: BoundKernel | None = None

    def launch(self, run: Run) -> None:
        for value in self._outputs:
            run.place(value)
        if self._bound is None or self._pointers is None:
            self._bound = run.bind_call(self._call)
            self._pointers = _Pointers(self._bound, self._arrays, run)
            self._shapes = [run.shapes[name] for _, name in self._strided]
            self._strides = [tuple(row_strides(shape)) for shape in self._shapes]
        else:
            self._pointers.move(run)
            for number, (mine, name) in enumerate(self._strided):
                shape = run.shapes[name]
                if shape != self._shapes[number]:
                    self._shapes[number] = shape
                    self._set_strides(self._bound, number, mine, tuple(row_strides(shape)))
        self._bound.launch(run.stream)

    def _set_strides(self, bound: BoundKernel, number: int, mine: str, strides: tuple[int, ...]) -> None:
        for axis, (stride, before) in enumerate(zip(strides, self._strides[number])):
            if stride != before:
                bound.set_scalar(f"{mine}{STRIDE}{axis}", stride)
        self._strides[number] = strides

    def close(self) -> None:
        self._bound = self._pointers = None
