"""Runs a `Program`: exact, where the host reads the sizes of each segment, or bounded, where it reads nothing.

*Exact*: for each segment one kernel computes the sizes, one copy of 8 bytes an extent brings them to pinned memory, the host
waits once, and launches on arrays that it places. *Bounded*: every array has the memory of its bound, kernels read extents
from the device's memory, and the whole run is a chain of launches, on a GPU one CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from schedsearch.device import BoundKernel, Device, LoadedKernel, Workspaces
from schedsearch.device.memory import bytes_at
from schedsearch.dynamic.code import size_artifact
from schedsearch.dynamic.pool import Pool
from schedsearch.dynamic.program import Call, Program, Segment, Value
from schedsearch.errors import ArgumentError
from schedsearch.launch import Artifact
from schedsearch.ops import ArgSpec
from schedsearch.ops.data_movement import AXES
from schedsearch.ops.dependence import EXTENTS, STRIDE, SizeError, check_bound, evaluate
from schedsearch.ops.movement import row_strides
from schedsearch.ops.size_steps import KINDS, SIZES, Values, Words
from schedsearch.runtime import arrays
from schedsearch.runtime.streams import raw_stream
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice

Extents = tuple[int, ...]
_WORD = 8


@dataclass(frozen=True)
class Result:
    """An output of a bounded run: an array at its bound, and how much of it counts, both on the device.

    Attributes:
        array: of the bound's shape; elements beyond the extents are undefined.
        extents: an int64 array with a number for each dimension; None if all of the array counts.
    """

    array: Any
    extents: Any


class DynamicNet:
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
        program: Program,
        device: Device,
        kernels: Callable[[Workload], Artifact],
        size_kernels: Callable[[int, bool], Artifact] | None = None,
    ) -> None:
        self.program, self.device = program, device
        self._size_code = size_kernels or functools.partial(size_artifact, program, device.target)
        self._kind = (device.target.kind, device.target.ordinal if device.target.kind == "cuda" else 0)
        workloads = dict.fromkeys(call.workload for segment in program.segments for call in segment.calls)
        self.kernels: dict[Workload, LoadedKernel] = {each: device.load(kernels(each)) for each in workloads}
        self.views: dict[str, list[Value]] = {}
        for value in program.values.values():
            if value.view_of:
                self.views.setdefault(value.view_of, []).append(value)
        self.pool = Pool(device)
        nbytes = _WORD * program.words
        self.sizes, self._host = device.allocate(nbytes), device.pinned(nbytes)
        self._words = np.frombuffer(bytes_at(self._host, nbytes), np.int64)
        self._words[:] = 0
        self._sent = np.zeros(program.words, np.int64)  # not pinned: the next run may write it when this one was enqueued
        for words, extents in program.fixed:
            self._sent[words.first : words.first + words.count] = extents
        device.copy_in(self.sizes, self._sent.view(np.uint8).data)
        self.constants = {name: self._constant(numbers) for name, numbers in program.constants.items()}
        self._prepared = {call.name: self._prepare(call) for segment in program.segments for call in segment.calls}
        device.synchronize()
        self._exact: list[tuple[BoundKernel | None, list[BoundKernel]]] = []
        self._size_kernels: dict[tuple[int, bool], LoadedKernel] = {}

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
        """
        self.pool.restart()
        run = _Run(self, given, stream, self.pool)
        run.copy_staged(run.stream)
        self.send(run)
        if not self._exact:
            self._exact = [(self.bind_sizes(n, run, False), []) for n in range(len(self.program.segments))]
        for segment, (sizes, calls) in zip(self.program.segments, self._exact):
            if sizes is not None:
                for each in _values(segment):
                    sizes.set_pointer(each.buffer, run.places[each.buffer])
                sizes.launch(run.stream)
            if segment.fetched is not None:
                self._fetch(segment.fetched, run, segment)
            for number, call in enumerate(segment.calls):
                for name in call.outputs.values():
                    if name in self.program.values:
                        run.place(self.program.values[name])
                if number == len(calls):
                    calls.append(self.bind_call(call, run))
                else:
                    run.move(call, calls[number])
                calls[number].launch(run.stream)
        if self.program.last is not None:
            self._fetch(self.program.last, run, None)
        found = [run.sliced(name) for name in self.program.outputs]
        return found[0] if len(found) == 1 else tuple(found)

    def bind(self, *given: Any, overlapped: bool = False) -> BoundNet:
        """Prepares bounded runs on these arrays: on a GPU it captures one graph.

        Args:
            given: the inputs in order, as in a call. Later runs take other values from the same arrays.
            overlapped: sizes of a segment are computed while those of its first calls run that do not need them. This has no
                effect on a CPU.

        Raises:
            ArgumentError: an input has a wrong shape, dtype or device.
        """
        self.device.synchronize()  # what is done here does not wait for the caller's streams
        return BoundNet(self, _Run(self, given, 0, Pool(self.device)), overlapped)

    # ---- parts of runs

    def _constant(self, numbers: np.ndarray[Any, Any]) -> int:
        """The address of a constant on the device."""
        address = self.device.allocate(max(numbers.nbytes, 1))
        self.device.copy_in(address, numbers.reshape(-1).view(np.uint8).data)
        return address

    def send(self, run: _Run) -> None:
        """Writes the extents of the inputs to the block of sizes."""
        written = []
        for name in self.program.inputs:
            words = self.program.values[name].words
            if words is not None:
                self._sent[words.first : words.first + words.count] = run.extents[name]
                written.append(words)
        if written:
            first, last = written[0].first, written[-1].first + written[-1].count
            at = _WORD * first
            self.device.copy_from_host(self.sizes + at, self._sent.ctypes.data + at, _WORD * (last - first), run.stream)

    def bind_sizes(self, number: int, run: _Run, bounded: bool) -> BoundKernel | None:
        """The kernel of sizes of a segment, if there is anything to compute."""
        segment = self.program.segments[number]
        if not segment.steps:
            return None
        if (number, bounded) not in self._size_kernels:
            self._size_kernels[number, bounded] = self.device.load(self._size_code(number, bounded))
        buffers = {each.buffer: run.places.get(each.buffer, run.block) for each in _values(segment)}
        return self._size_kernels[number, bounded].bind({SIZES: run.block, **buffers}, {})

    def bind_call(self, call: Call, run: _Run, instead: Mapping[str, int] | None = None) -> BoundKernel:
        """`instead`: addresses of buffers that are not where the run has them."""
        buffers = {**run.buffers(call), **(instead or {})}
        return self.kernels[call.workload].bind(buffers, run.strides(call), self._prepared[call.name])

    def _prepare(self, call: Call) -> Workspaces | None:
        """What a call's kernel repacks of constants, once for all runs; None if it repacks anything else, or nothing."""
        kernel = self.kernels[call.workload]
        names = kernel.artifact.plan.constants
        if not names or not all(call.inputs[name] in self.constants for name in names):
            return None
        return kernel.prepare({name: self.constants[call.inputs[name]] for name in names})

    def _fetch(self, words: Words, run: _Run, segment: Segment | None) -> None:
        """Gets sizes in one copy, and waits once."""
        at = _WORD * words.first
        self.device.copy_to_host(self._host + at, self.sizes + at, _WORD * words.count, run.stream)
        self.device.wait(run.stream)
        stop = words.first + words.count
        for value in self.program.values.values():
            if value.words is None or not words.first <= value.words.first < stop:
                continue
            found = self.words_at(value.words)
            if min(found, default=0) < 0:
                self.explain_mistake(run, value.name)
            if value.counted:
                check_bound(found, value.shape, value.name)
            run.extents[value.name] = found

    def owner(self, value: Value) -> str:
        """The first value that has the extents of this one: calls that work element by element pass them on."""
        if value.words is None:
            return value.name
        return next(each.name for each in self.program.values.values() if each.words == value.words)

    def words_at(self, words: Words) -> Extents:
        """Extents that the host has."""
        return tuple(int(n) for n in self._words[words.first : words.first + words.count])

    def explain_mistake(self, run: _Run, name: str) -> None:
        """Raises the SizeError of the first value of a segment whose sizes are impossible, computed again on the host."""
        self.device.synchronize()
        for segment in self.program.segments:
            if name in segment.values:
                for value, step in zip(segment.values, segment.steps):
                    if step.bound is None:
                        continue
                    inputs = dict(zip(step.function.inputs, (self._read(each, run) for each in step.inputs)))
                    check_bound(evaluate(step.function, step.to.count, inputs, value), step.bound, value)
        raise SizeError(f"the sizes of {name} are impossible")

    def _read(self, each: Words | Values, run: _Run) -> list[int]:
        if isinstance(each, Values):
            numbers, address = np.empty(each.count, each.dtype), run.places[each.buffer]
        else:
            numbers, address = np.empty(each.count, np.int64), run.block + _WORD * each.first
        self.device.copy_out(numbers.view(np.uint8).data, address)
        return [int(number) for number in numbers]

    def read_words(self, run: _Run) -> None:
        """Brings the whole block to the host, in a run that may wait."""
        self.device.copy_to_host(self._host, run.block, _WORD * self.program.words)
        self.device.synchronize()

    def status(self, number: int) -> int:
        """Of a segment in a bounded run, after `read_words`."""
        return int(self._words[number])

    def close(self) -> None:
        """Waits for the runs, and frees the memory and the code; does nothing the second time."""
        if self.sizes:
            self.device.synchronize()
        for kernel in (*self.kernels.values(), *self._size_kernels.values()):
            kernel.close()
        self.kernels, self._size_kernels, self._exact = {}, {}, []
        self.pool.close()
        if self.sizes:
            for address in (self.sizes, *self.constants.values()):
                self.device.free(address)
            self.device.free_pinned(self._host)
            self.sizes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def independent_calls(program: Program, segment: Segment) -> int:
    """How many calls at a segment's beginning read nothing that its kernel of sizes writes."""
    written = {word for step in segment.steps for word in range(step.to.first, step.to.first + step.to.count)}
    for number, call in enumerate(segment.calls):
        read = {argument.name for argument in call.workload.signature}
        for mine, name in (*call.inputs.items(), *call.outputs.items()):
            value = program.values.get(name)
            if value is None or value.words is None or value.words.first not in written:
                continue
            if value.counted or value.numbers or f"{mine}{EXTENTS}" in read:
                return number
    return len(segment.calls)


def extents_written_twice(call: Call) -> dict[str, int]:
    """Extents that a call writes and the kernel of sizes, too, with their dimensions. What a call counts only it writes."""
    counted = {name for name, function in call.shape_functions.items() if function.counted}
    outputs = (each for each in call.workload.outputs if each.extents and each.name not in counted)
    return {output.extents: len(output.shape) for output in outputs}


def _launch_all(kernels: Sequence[BoundKernel], stream: int) -> None:
    for kernel in kernels:
        kernel.launch(stream)


class BoundNet:
    """A bounded run on fixed arrays: it copies nothing to the host, waits for nothing and allocates nothing.

    `step()` runs it, `results` are its outputs, `check()` reports mistakes, and `sliced()` gives what counts of the outputs.
    """

    def __init__(self, net: DynamicNet, run: _Run, overlapped: bool = False) -> None:
        self._net, self._run = net, run
        on_cuda = net.device.target.kind == "cuda"
        program = net.program
        net.send(run)
        block = run.new("sizes", (program.words,), "int64")
        run.block = arrays.view(block, "sizes").address
        net.device.copy(run.block, net.sizes, _WORD * program.words)
        for value in program.values.values():
            if value.name not in run.places and not value.numbers:
                run.place_at_bound(value)
        # for each segment the kernel of sizes, the calls that run beside it, and the others
        self._stages: list[tuple[BoundKernel | None, list[BoundKernel], list[BoundKernel]]] = []
        for number, segment in enumerate(program.segments):
            sizes = net.bind_sizes(number, run, True)
            free = independent_calls(program, segment) if overlapped and on_cuda and sizes is not None else 0
            beside = [net.bind_call(call, run, self._unread_extents(call)) for call in segment.calls[:free]]
            self._stages.append((sizes, beside, [net.bind_call(call, run) for call in segment.calls[free:]]))
        self.results = tuple(run.result(name, block) for name in program.outputs)
        net.device.synchronize()
        self._graph: Any = None
        self._branch: Any = None
        if on_cuda:
            cuda: CudaDevice = net.device  # type: ignore[assignment]
            if any(beside for _, beside, _ in self._stages):
                self._branch = cuda.create_branch()
            stream = cuda.create_stream()
            try:
                self._graph = cuda.capture(stream, self.enqueue)
            finally:
                cuda.destroy_stream(stream)

    def enqueue(self, stream: int) -> None:
        """Enqueues one kernel after the other, for a caller who captures a graph of more."""
        self._run.copy_staged(stream)
        for sizes, beside, others in self._stages:
            if sizes is not None and beside:
                self._branch.enqueue(stream, sizes.launch, functools.partial(_launch_all, beside))
            elif sizes is not None:
                sizes.launch(stream)
            _launch_all(others, stream)

    def _unread_extents(self, call: Call) -> dict[str, int]:
        """Other places for the extents that a call beside the kernel of sizes writes as well as that."""
        return {name: self._run.pool.take(_WORD * rank) for name, rank in extents_written_twice(call).items()}

    def step(self, stream: Any = None) -> tuple[Result, ...]:
        """Enqueues a run; on a CPU it returns when the results are complete."""
        handle = raw_stream(stream, self._run.library, self._net._kind)
        if self._graph is not None:
            self._graph.launch(handle)
        else:
            self.enqueue(handle)
        return self.results

    def check(self) -> None:
        """Waits for the last run.

        Raises:
            SizeError: an input of the run was impossible, or sizes exceeded their bounds. Nothing was written outside of the
                arrays; the extents of impossible results are 0.
        """
        net = self._net
        net.device.synchronize()
        net.read_words(self._run)
        for number, segment in enumerate(net.program.segments):
            if code := net.status(number):
                net.explain_mistake(self._run, segment.values[code // KINDS - 1])
        for value in net.program.values.values():
            if value.counted and value.words is not None:
                check_bound(net.words_at(value.words), value.shape, value.name)

    def sliced(self) -> tuple[Any, ...]:
        """What counts of each output, after `check`: views."""
        self.check()
        found = []
        for name, result in zip(self._net.program.outputs, self.results):
            words = self._net.program.values[name].words
            extents = self._net.words_at(words) if words is not None else tuple(result.array.shape)
            found.append(result.array[tuple(map(slice, extents))])
        return tuple(found)

    def close(self) -> None:
        if self._graph is not None:
            cuda: CudaDevice = self._net.device  # type: ignore[assignment]
            cuda.synchronize()
            with cuda.current():
                self._graph.close()
                if self._branch is not None:
                    self._branch.close()
            self._graph = self._branch = None
        self._run.pool.close()


class _Run:
    """Where the arrays of one run are, and the extents that the host knows.

    Attributes:
        block: address of the block of sizes.
        places: value -> address.
        shapes: value -> the shape whose strides the array has.
    """

    def __init__(self, net: DynamicNet, given: tuple[Any, ...], stream: Any, pool: Pool) -> None:
        program = net.program
        if len(given) != len(program.inputs):
            raise ArgumentError(f"{len(given)} arrays; the graph takes {len(program.inputs)}: {', '.join(program.inputs)}")
        self.net, self.given, self.pool, self.block = net, given, pool, net.sizes
        self.views = [arrays.view(array, name) for array, name in zip(given, program.inputs)]
        self.library = self.views[0].library
        self.stream = raw_stream(stream, self.library, net._kind)
        self.places: dict[str, int] = {}
        self.shapes: dict[str, Extents] = {}
        self.extents: dict[str, Extents] = {}
        self._made: dict[str, Any] = {}
        self._staged: list[tuple[int, int, int]] = []  # to, from, bytes
        for name, view in zip(program.inputs, self.views):
            value = program.values[name]
            self._check(value, view)
            self.places[name], self.shapes[name], self.extents[name] = view.address, view.shape, view.shape
            if view.shape != value.shape and not value.strided:
                self._stage(value, view)
            self._place_views(name)
        for name, address in net.constants.items():
            self.places[name], self.shapes[name] = address, program.values[name].shape
            self._place_views(name)
        sizes = self._chosen_sizes()
        for value in program.values.values():
            if value.known is not None and value.words is not None:
                self.extents[value.name] = tuple(sizes[n] if isinstance(n, str) else n for n in value.known)

    def _check(self, value: Value, view: arrays.ArrayView) -> None:
        if len(view.shape) != len(value.shape):
            raise ArgumentError(f"{value.name} has shape {list(view.shape)}; allowed: {len(value.shape)} dimensions")
        for axis, (extent, most) in enumerate(zip(view.shape, value.shape)):
            size = value.sizes.get(axis)
            if not (size.least <= extent <= most if size else extent == most):
                allowed = f"{size.name}={size.least}..{size.most}" if size else str(most)
                raise ArgumentError(f"{value.name} has shape {list(view.shape)}; allowed in dimension {axis}: {allowed}")
        dense = ArgSpec(value.name, AXES[: len(view.shape)], view.shape, value.dtype)
        arrays.check(dense, view, self.net._kind)

    def _chosen_sizes(self) -> dict[str, int]:
        """The caller's sizes by name. Inputs with sizes of the same name must agree."""
        chosen: dict[str, tuple[str, int]] = {}
        for name in self.net.program.inputs:
            for axis, size in self.net.program.values[name].sizes.items():
                extent = self.extents[name][axis]
                first, before = chosen.setdefault(size.name, (name, extent))
                if before != extent:
                    raise ArgumentError(f"{size.name} is {before} in {first} and {extent} in {name}; give arrays that agree")
        return {name: extent for name, (_, extent) in chosen.items()}

    def _stage(self, value: Value, view: arrays.ArrayView) -> None:
        """Copies an input to an array of its bound, for kernels that read all of it."""
        if view.shape[1:] != value.shape[1:]:
            raise ArgumentError(
                f"{value.name} has shape {list(view.shape)}, and calls that read it need the strides of "
                f"{list(value.shape)}; give sizes to the first dimension only"
            )
        self.place_at_bound(value)
        self._staged.append((self.places[value.name], view.address, value.bytes_of(view.shape)))

    def copy_staged(self, stream: int) -> None:
        """Copies the inputs that kernels read at their bounds."""
        for to, source, nbytes in self._staged:
            self.net.device.copy(to, source, nbytes, stream)

    def place(self, value: Value) -> None:
        """Places an output of a call in an exact run."""
        exact = value.strided and not value.counted and value.name in self.extents
        shape = self.extents[value.name] if exact else value.shape
        self._place_of(value, shape)

    def place_at_bound(self, value: Value) -> None:
        self._place_of(value, value.shape)

    def _place_of(self, value: Value, shape: Extents) -> None:
        self.shapes[value.name] = shape
        names = {value.name, *(each.name for each in self.net.views.get(value.name, ()))}
        if not names.isdisjoint(self.net.program.outputs):
            array = self.new(value.name, shape, value.dtype)
            self._made[value.name] = array
            self.places[value.name] = arrays.view(array, value.name).address
        else:
            self.places[value.name] = self.pool.take(value.bytes_of(shape))
        self._place_views(value.name)

    def _place_views(self, name: str) -> None:
        for value in self.net.views.get(name, ()):
            self.places[value.name], self.shapes[value.name] = self.places[name], value.shape

    def new(self, name: str, shape: Extents, dtype: str) -> Any:
        spec = ArgSpec(name, AXES[: len(shape)], shape, dtype)
        return arrays.empty_like(self.given[0], self.views[0], spec, arrays.forms(spec)[0])

    def buffers(self, call: Call) -> dict[str, int]:
        """Address of each argument and output; extents are words of the block of sizes."""
        found = {}
        for mine, name in (*call.inputs.items(), *call.outputs.items()):
            if (value := self.net.program.values.get(name)) is not None and value.numbers and value.words is not None:
                found[mine] = self.block + _WORD * value.words.first
            if name not in self.places:
                continue
            found[mine] = self.places[name]
            value = self.net.program.values[name]
            if (words := value.words or value.fixed) is not None:
                found[f"{mine}{EXTENTS}"] = self.block + _WORD * words.first
        return found

    def strides(self, call: Call) -> dict[str, float]:
        """The call-time scalars: strides of arrays where the workload takes them."""
        found = {scalar.name: scalar.default for scalar in call.workload.scalars} | dict(call.scalars)
        for mine, name in (*call.inputs.items(), *call.outputs.items()):
            if f"{mine}{STRIDE}0" in found:
                found |= {f"{mine}{STRIDE}{axis}": n for axis, n in enumerate(row_strides(self.shapes[name]))}
        return found

    def move(self, call: Call, bound: BoundKernel) -> None:
        """Gives a bound call the arrays of this run."""
        for mine, address in self.buffers(call).items():
            bound.set_pointer(mine, address)
        for name, value in self.strides(call).items():
            bound.set_scalar(name, value)

    def sliced(self, name: str) -> Any:
        """An output of an exact run."""
        value = self.net.program.values[name]
        if value.view_of:
            return _seen(self.sliced(value.view_of), value)
        if name not in self._made:
            return self.given[self.net.program.inputs.index(name)]
        array = self._made[name]
        extents = self.extents.get(self.net.owner(value), self.shapes[name])
        return array if extents == self.shapes[name] else array[tuple(map(slice, extents))]

    def result(self, name: str, block: Any) -> Result:
        """An output of a bounded run; its extents are a view of the block of sizes."""
        value = self.net.program.values[name]
        source = value.view_of or name
        array = self._made[source] if source in self._made else self.given[self.net.program.inputs.index(source)]
        array = _seen(array, value) if value.view_of else array
        if value.words is None:
            return Result(array, None)
        return Result(array, block[value.words.first : value.words.first + value.words.count])


def _seen(array: Any, value: Value) -> Any:
    """An array as a view that keeps the first axis if that is known at run time only."""
    return array.reshape((int(array.shape[0]), *value.shape[1:]) if value.words is not None else value.shape)


def _values(segment: Segment) -> list[Values]:
    """The arrays whose values a segment's kernel of sizes reads."""
    found = {each.buffer: each for step in segment.steps for each in step.inputs if isinstance(each, Values)}
    return list(found.values())
