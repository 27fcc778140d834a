"""Exact runs of a dynamic graph: the host reads the sizes of each segment, and places the arrays that depend on them.

Most arrays are where they were in the run before: those that have the memory of their bound, and that no caller holds. Calls
on such arrays alone are bound once. On a GPU those that follow one another are one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from schedsearch.device import BoundKernel
from schedsearch.dynamic.noted import index_notes
from schedsearch.dynamic.pool import Pool
from schedsearch.dynamic.program import Call, Program, Segment
from schedsearch.dynamic.run import Extents, Run
from schedsearch.ops.size_steps import Values

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice
    from schedsearch.dynamic.net import DynamicNet

_LEAST_GRAPH = 3  # launches that take the host longer than the launch of a graph


def moving_values(program: Program) -> set[str]:
    """Values that another run may have elsewhere: inputs, results, and what is placed by extents that the host reads."""
    values = program.values
    held = {values[name].view_of or name for name in (*program.inputs, *program.outputs)}
    held |= {value.name for value in values.values() if value.strided and not value.counted and value.words is not None}
    return held | {value.name for value in values.values() if value.view_of in held}


class ExactRuns:
    """What the exact runs of a net share: the arrays that never move, and the bound calls."""

    def __init__(self, net: DynamicNet) -> None:
        self._net, self._moving = net, moving_values(net.program)
        self._still, self._pool = Pool(net.device), Pool(net.device)
        self.notes = index_notes(net.program, net.device, net.kernels)
        self._places: dict[str, int] = {}
        self._shapes: dict[str, Extents] = {}
        for segment in net.program.segments:
            for call in segment.calls:
                self._place_still(call)
        self._segments: list[tuple[BoundKernel | None, list[Values], list[_Chain | _Moving]]] = []

    def _place_still(self, call: Call) -> None:
        program = self._net.program
        for name in call.outputs.values():
            if (value := program.values.get(name)) is None or name in self._moving:
                continue
            address = self._still.take(value.bytes_of(value.shape))
            for each in (value, *self._net.views.get(name, ())):
                self._places[each.name], self._shapes[each.name] = address, each.shape

    def run(self, given: tuple[Any, ...], stream: Any) -> Run:
        """A run on the caller's arrays, enqueued; see `DynamicNet.__call__`."""
        net, program = self._net, self._net.program
        self._pool.restart()
        run = Run(net, given, stream, self._pool, self.notes)
        run.places.update(self._places)
        run.shapes.update(self._shapes)
        run.copy_staged(run.stream)
        net.send(run)
        if not self._segments:
            self._segments = [self._bind(number, run) for number in range(len(program.segments))]
        for segment, (sizes, read, steps) in zip(program.segments, self._segments):
            if sizes is not None:
                for each in read:
                    sizes.set_pointer(each.buffer, run.places[each.buffer])
                sizes.launch(run.stream)
            if segment.fetched is not None:
                net.fetch(segment.fetched, run)
            for step in steps:
                step.launch(run)
        if program.last is not None:
            net.fetch(program.last, run)
        if net.device.target.kind == "cpu":
            self.notes.check()
        return run

    def _bind(self, number: int, run: Run) -> tuple[BoundKernel | None, list[Values], list[_Chain | _Moving]]:
        net, segment = self._net, self._net.program.segments[number]
        steps: list[_Chain | _Moving] = []
        for call in segment.calls:
            outputs = [net.program.values[name] for name in call.outputs.values() if name in net.program.values]
            if self._moving.intersection((*call.inputs.values(), *call.outputs.values())):
                steps.append(_Moving(net, call, [value for value in outputs if value.name in self._moving]))
            elif steps and isinstance(steps[-1], _Chain):
                steps[-1].kernels.append(net.bind_call(call, run))
            else:
                steps.append(_Chain(net, [net.bind_call(call, run)]))
        read = [each for each in values_read(segment) if each.buffer in self._moving]
        return net.bind_sizes(number, run, False), read, steps

    @property
    def allocations(self) -> int:
        return self._still.allocations + self._pool.allocations

    def close(self) -> None:
        """The device must have finished."""
        for _, _, steps in self._segments:
            for step in steps:
                step.close()
        self._segments = []
        self._still.close()
        self._pool.close()
        self.notes.close()


class _Chain:
    """Calls one after the other whose arrays never move."""

    def __init__(self, net: DynamicNet, kernels: list[BoundKernel]) -> None:
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


class _Moving:
    """A call that gets the arrays of each run."""

    def __init__(self, net: DynamicNet, call: Call, outputs: list[Any]) -> None:
        self._net, self._call, self._outputs = net, call, outputs
        self._bound: BoundKernel | None = None

    def launch(self, run: Run) -> None:
        for value in self._outputs:
            run.place(value)
        if self._bound is None:
            self._bound = self._net.bind_call(self._call, run)
        else:
            run.move(self._call, self._bound)
        self._bound.launch(run.stream)

    def close(self) -> None:
        self._bound = None


def values_read(segment: Segment) -> list[Values]:
    """The arrays whose values a segment's kernel of sizes reads."""
    found = {each.buffer: each for step in segment.steps for each in step.inputs if isinstance(each, Values)}
    return list(found.values())
