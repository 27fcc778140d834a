"""A loaded network that takes arrays."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from schedsearch.device import Device
from schedsearch.device.memory import bytes_at
from schedsearch.errors import ArgumentError, UsageError
from schedsearch.executable.noted import index_notes
from schedsearch.executable.ports import in_order
from schedsearch.executable.program import Array, Call
from schedsearch.executable.run import Calls, Parts, Shared, Weights
from schedsearch.ops import ArgSpec, Layout
from schedsearch.ops.dtypes import decode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.runtime import arrays
from schedsearch.runtime.repeated import announce, tracked
from schedsearch.runtime.streams import current_stream, raw_stream
from schedsearch.runtime.torch_call import TorchCall

if TYPE_CHECKING:
    import numpy as np

_REPEATS_TO_EXPLAIN = 20  # launches of a part of which the median is explained


@dataclass(frozen=True)
class Port:
    """An input or output of a network: a contiguous array.

    Attributes:
        shape: of the array in memory.
        layout: what each dimension of `shape` is: NCHW or NHWC of an image; the letters ABC... of other arrays have no
            meaning.
        axes: the same letters in the model's order, e.g. NCHW.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    axes: str

    def __str__(self) -> str:
        layout = "" if self.layout == self.axes else f" {self.layout}"
        return f"{self.name} {self.dtype} {list(self.shape)}{layout}"

    def in_model_order(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """An array of `shape` with its dimensions in the model's order: a view."""
        return array.transpose([self.layout.index(axis) for axis in self.axes])


@dataclass(frozen=True)
class Times:
    """Measured times.

    Attributes:
        total_ns: of the whole network.
        calls_ns: of each of `Net.steps`, run alone again and again, so that its arrays are in the cache.
    """

    total_ns: float
    calls_ns: tuple[float, ...]


class Net:
    """A network that is ready to run on one device.

    Call it with the inputs, by position or name. On a CPU it takes arrays of NumPy or torch. On a GPU it takes device arrays
    of torch, CuPy or any library with DLPack or `__cuda_array_interface__`, and only enqueues; arrays in the host's memory
    are copied there and back in every call, with a warning. It returns the output, or a tuple of several, in arrays of the
    first input's library.

    `inputs` and `outputs` say what the arrays look like. An image in NHWC may also come as an NCHW array whose strides are
    those of NHWC: torch's `channels_last`. If the first input does, the outputs that are images in NHWC do as well.

    A net has memory of its own for what it computes: do not run it on two streams at once. `instance` makes another one that
    shares the weights. Calls may come from any thread; a lock serialises them.

    A CUDA graph may capture calls, after one call with the same inputs that is not captured. It then uses the memory and the
    weights of the net: keep the net open for as long as the graph is replayed, and do not run both at once.

    Example:
        >>> net = schedsearch.load("model.ssx")
        >>> y = net(x)
    """

    def __init__(self, parts: Parts, device: Device, shared: Shared | None = None) -> None:
        """Takes the device over: `close` closes it, unless there is memory that is shared with other nets.

        Raises:
            DeviceError: the device refuses the code, or has too little memory.
            UsageError: nodes are for ONNX Runtime, which is not installed or cannot run them.
        """
        self._parts = parts
        try:
            weights = Weights(parts, device, shared)
        except BaseException:
            if shared is None:
                device.close()
            raise
        self._start(weights)

    def _start(self, weights: Weights) -> None:
        self._weights: Weights | None = weights.take()
        self._device, self.program = weights.device, weights.program
        target = self._device.target
        self.device = (target.kind, target.ordinal if target.kind == "cuda" else 0)
        self._inputs = [_spec(self.program.arrays[index]) for index in self.program.inputs]
        self._outputs = [_spec(self.program.arrays[index]) for index in self.program.outputs]
        self._lock = threading.Lock()
        self._memory: list[int] = []
        self._notes = index_notes(weights)
        try:
            if weights.shared is not None:
                self._arena = weights.shared.arena
            else:
                self._arena = self._allocate(self.program.arena_bytes) if self.program.arena_bytes else 0
        except BaseException:
            self._notes.close()
            weights.release()
            raise
        self._calls: Calls | None = None
        self._staged: tuple[list[int], list[int]] | None = None
        self._torch_call: TorchCall | None = None
        self._warned = False

    def instance(self) -> Net:
        """Another net that shares code and weights with this one, for a second stream or thread."""
        other = Net.__new__(Net)
        other._parts = self._parts
        other._start(self._open_weights())
        return other

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self._ports(self.program.inputs)

    @property
    def outputs(self) -> tuple[Port, ...]:
        return self._ports(self.program.outputs)

    def _ports(self, indices: Sequence[int]) -> tuple[Port, ...]:
        held = (self.program.arrays[index] for index in indices)
        return tuple(Port(each.name, each.stored, each.dtype, each.layout, each.axes) for each in held)

    @property
    def steps(self) -> tuple[Call, ...]:
        """The kernel calls in the order in which they run."""
        return self.program.calls

    def explain(self) -> str:
        """The plan in words: every call with its kernel and layouts, conversions, and memory beside its lower bound.
        Calls of ONNX Runtime are measured for it.

        Raises:
            UsageError: the net has such calls and was closed.
            DeviceError: ONNX Runtime fails in one of them.
        """
        from schedsearch.executable.explain import PartCost, explain_lines

        if all(call.foreign is None for call in self.program.calls):
            return "\n".join(explain_lines(self.program))
        with self._lock:
            loaded = self._open_weights().models
            calls = self._calls_on(*self._take_staged())
            try:
                times_ns = calls.part_times_ns(_REPEATS_TO_EXPLAIN)
            finally:
                calls.close()
        models = (self.program.calls[number].artifact for number in times_ns)
        costs = {number: PartCost(time_ns, loaded[sha256]) for (number, time_ns), sha256 in zip(times_ns.items(), models)}
        return "\n".join(explain_lines(self.program, costs))

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """Computes the outputs.

        Args:
            args, named: the inputs in order, or by name.
            out: arrays for the outputs: one, or a tuple in the order of `outputs`; allocated by default.
            stream: a CUDA stream: an integer handle, or a torch or CuPy stream; default: the library's current one.

        Raises:
            ArgumentError: an input is missing or unknown, or has a wrong dtype, shape, strides or device.
            IndexRangeError: on a CPU, or with arrays in the host's memory: an index of a gather or scatter is out of range.
                With arrays on a GPU `check` says so.
            DeviceError: the launch failed.
        """
        with self._lock:
            if self._torch_call is not None and out is None and not named:
                try:
                    result = self._torch_call(args, stream)
                except ArgumentError:  # an address lacks an alignment: the long path copies the array
                    result = None
                if result is not None:
                    self._check_if_complete()
                    return result
            self._open_weights()
            given = self._split(args, named)
            views = self._checked_inputs(given)
            results, seen = self._checked_outputs(given, views, out)
            if out is not None:
                announce(_labelled(results))
            self._torch_call = None  # it knows which addresses the calls had
            if self.device[0] == "cuda" and views[0].device[0] == "cpu":
                self._run_on_host_arrays(views, seen)
                self._notes.check()
            elif not self._run_in_place(views, seen, raw_stream(stream, views[0].library, self.device)):
                self._run_staged(views, seen, raw_stream(stream, views[0].library, self.device))
            elif all(each.library == "torch" for each in (*views, *seen)):
                self._torch_call = self._short_path(given, results)
            self._check_if_complete()
            return results[0] if len(results) == 1 else tuple(results)

    def check(self) -> None:
        """Waits for all calls, and looks whether an index of a gather or scatter was out of range since the last check.

        Kernels note such indices; calls on a GPU neither copy nor wait for that. They compute zeros for such an index, or
        leave an update out, and read and write nothing outside of the arrays. Calls on a CPU raise themselves.

        Raises:
            IndexRangeError: an index was out of range. The message names node, index, its place, and what is allowed.
        """
        with self._lock:
            self._open_weights()
            self._device.synchronize()
            self._notes.check()

    def _check_if_complete(self) -> None:
        if self.device[0] == "cpu":
            self._notes.check()

    def bind(self, *args: Any, out: Any = None, **named: Any) -> Bound:
        """Fixes the arrays once, so that a launch copies nothing; on a GPU it captures a graph on their addresses.

        Returns:
            A callable `step(stream=None)` that runs the network and returns its outputs, always the same arrays.

        Raises:
            ArgumentError: as a call does; or an array is not on the network's device, or an address lacks an alignment that
                a kernel needs.
        """
        with self._lock:
            self._open_weights()
            given = self._split(args, named)
            views = self._checked_inputs(given)
            for spec, view in zip(self._inputs, views):
                arrays.check(spec, view, self.device)
            results, seen = self._checked_outputs(given, views, out)
            calls = self._calls_on([each.address for each in views], [each.address for each in seen])
            outputs = dict(_labelled(results))
            written = tracked(outputs, () if out is None else outputs)
            return Bound(self, calls, tuple(results), tuple(given), views[0].library, written)

    def trace(self, *args: Any, **named: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The values that the calls compute, by name, in the model's order of axes: NumPy arrays that hold their numbers
        exactly. Values inside a fused call do not exist."""
        return self.trace_some(dict(zip([port.name for port in self.inputs], self._split(args, named))), None)

    def trace_some(self, given: Mapping[str, Any], wanted: Collection[str] | None) -> dict[str, np.ndarray[Any, Any]]:
        """As `trace`, of the values with these names; None: of all.

        Args:
            given: the inputs by name.
        """
        with self._lock:
            self._open_weights()
            views = self._checked_inputs(self._split((), given))
            inputs, outputs = self._take_staged()
            for address, spec, view in zip(inputs, self._inputs, views):
                self._copy_in(address, view, spec.nbytes, 0)
            calls = self._calls_on(inputs, outputs)
            found: dict[str, np.ndarray[Any, Any]] = {}

            def keep(number: int) -> None:
                call = self.program.calls[number]
                for name in () if call.is_conversion else call.outputs:
                    array = self.program.arrays[call.buffers[name]]
                    if wanted is None or array.name in wanted:
                        found[array.name] = self._read(array)

            try:
                calls.each(keep)
            finally:
                calls.close()
            return found

    def measure(self, repeat: int = 100) -> Times:
        """The time of the whole and of each call, on inputs of zeros if the net was not called before.

        Raises:
            UsageError: `repeat`, the number of runs, is not an integer of at least 1.
        """
        if not isinstance(repeat, int) or repeat < 1:
            raise UsageError(f"repeat {repeat!r} is not possible; allowed: an integer, 1 or more")
        with self._lock:
            self._open_weights()
            calls = self._calls_on(*self._take_staged())
            try:
                total, each = calls.times_ns(repeat)
            finally:
                calls.close()
            return Times(total, tuple(each))

    def take(self, parts: Parts) -> None:
        """Takes the parts that the net was made of with another description of them."""
        self._parts, self.program = parts, parts.program

    def save(self, path: Any) -> None:
        """Writes the executable to a file; see `schedsearch.load`. Raises UsageError or DatabaseError if it cannot."""
        from schedsearch.executable.file import save

        save(self._parts, path)

    def close(self) -> None:
        """Waits for the calls and frees the memory; with the last instance also code, weights and device. Does nothing the
        second time."""
        with self._lock:
            if self._weights is None:
                return
            self._torch_call = None
            self._device.synchronize()  # calls may be under way, and the driver need not wait before it frees
            if self._calls is not None:
                self._calls.close()
            while self._memory:
                self._device.free(self._memory.pop())
            self._notes.close()
            weights, self._weights = self._weights, None
            weights.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        ports = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return (
            f"<Net {self.program.model or 'without a file'} on {self.device[0]}:{self.device[1]}: {ports[0]} -> {ports[1]}>"
        )

    def _open_weights(self) -> Weights:
        """Raises UsageError if the net was closed."""
        if self._weights is None:
            raise UsageError("the net was closed; load it again")
        return self._weights

    def _calls_on(self, inputs: Sequence[int], outputs: Sequence[int]) -> Calls:
        return Calls(self._open_weights(), self._arena, inputs, outputs, self._notes)

    def _allocate(self, nbytes: int) -> int:
        self._memory.append(self._device.allocate(nbytes))
        return self._memory[-1]

    def _split(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
        """The inputs in order."""
        return in_order([spec.name for spec in self._inputs], self.inputs, args, named)

    def _checked_inputs(self, given: list[Any]) -> list[arrays.ArrayView]:
        views = [arrays.view(array, spec.name) for spec, array in zip(self._inputs, given)]
        for spec, seen in zip(self._inputs, views):
            on_host = self.device[0] == "cuda" and views[0].device == ("cpu", 0)
            arrays.check(spec, seen, ("cpu", 0) if on_host else self.device)
        return views

    def _checked_outputs(
        self, given: list[Any], views: list[arrays.ArrayView], out: Any
    ) -> tuple[list[Any], list[arrays.ArrayView]]:
        if out is None:
            held = arrays.form_of(self._inputs[0], views[0].shape, views[0].strides) or arrays.forms(self._inputs[0])[0]
            results = [
                arrays.empty_like(given[0], views[0], spec, arrays.output_form(spec, held.name)) for spec in self._outputs
            ]
            return results, [arrays.view(array, spec.name) for spec, array in zip(self._outputs, results)]
        results = list(out) if isinstance(out, tuple | list) else [out]
        if len(results) != len(self._outputs):
            raise ArgumentError(
                f"out holds {len(results)} arrays; the network has {len(self._outputs)} outputs: "
                f"{', '.join(map(str, self.outputs))}"
            )
        seen = [arrays.view(array, f"out[{number}]") for number, array in enumerate(results)]
        taken = list(zip([spec.name for spec in self._inputs], views, self._inputs))
        for number, (spec, view) in enumerate(zip(self._outputs, seen)):
            label = f"out[{number}]"
            arrays.check(spec, view, views[0].device, label)
            if view.readonly:
                raise ArgumentError(f"{label} is read-only; give a writable array")
            for name, other, other_spec in taken:
                if arrays.overlap(view, spec.nbytes, other, other_spec.nbytes):
                    raise ArgumentError(f"{label} overlaps {name}; give each array memory of its own")
            taken.append((label, view, spec))
        return results, seen

    def _run_in_place(self, views: list[arrays.ArrayView], seen: list[arrays.ArrayView], stream: int) -> bool:
        """Computes in the caller's memory, or returns False: an address lacks an alignment that a kernel needs."""
        try:
            calls = self._moved([each.address for each in views], [each.address for each in seen])
        except ArgumentError:
            return False
        calls.launch(stream)
        return True

    def _run_staged(self, views: list[arrays.ArrayView], seen: list[arrays.ArrayView], stream: int) -> None:
        """Computes in memory of the net: copies the inputs there, and the outputs from there."""
        inputs, outputs = self._take_staged()
        for address, spec, view in zip(inputs, self._inputs, views):
            self._copy_in(address, view, spec.nbytes, stream)
        self._moved(inputs, outputs).launch(stream)
        for address, spec, view in zip(outputs, self._outputs, seen):
            if view.device[0] == "cpu":
                self._device.copy_out(bytes_at(view.address, spec.nbytes), address)
            else:
                self._device.copy(view.address, address, spec.nbytes, stream)

    def _moved(self, inputs: Sequence[int], outputs: Sequence[int]) -> Calls:
        """The net's calls on these addresses. Raises ArgumentError if one lacks the alignment that a kernel needs."""
        if self._calls is None:
            self._calls = self._calls_on(inputs, outputs)
        self._calls.move(inputs, outputs)
        return self._calls

    def _short_path(self, given: Sequence[Any], results: Sequence[Any]) -> TorchCall:
        """The path of calls with torch tensors that look like these, which were checked."""
        assert self._calls is not None
        inputs = {f"input{number}": tensor for number, tensor in enumerate(given)}
        outputs = {f"output{number}": tensor for number, tensor in enumerate(results)}
        return TorchCall(self._calls, inputs, outputs, self.device)

    def _run_on_host_arrays(self, views: list[arrays.ArrayView], seen: list[arrays.ArrayView]) -> None:
        if not self._warned:
            self._warned = True
            names = ", ".join(spec.name for spec in self._inputs)
            warnings.warn(
                f"{names}: in the host's memory, so that every call copies them to the GPU and waits; give device arrays",
                stacklevel=3,
            )
        self._run_staged(views, seen, 0)

    def _take_staged(self) -> tuple[list[int], list[int]]:
        """Addresses of the net's own inputs and outputs."""
        if self._staged is None:
            inputs = [self._allocate(spec.nbytes) for spec in self._inputs]
            for address, spec in zip(inputs, self._inputs):
                self._device.fill(address, 0, spec.nbytes)
            self._device.synchronize()  # the first call may come on a stream that does not wait for the default stream
            self._staged = inputs, [self._allocate(spec.nbytes) for spec in self._outputs]
        return self._staged

    def _copy_in(self, address: int, view: arrays.ArrayView, nbytes: int, stream: int) -> None:
        if view.device[0] == "cpu":
            self._device.copy_in(address, bytes_at(view.address, nbytes))
        else:
            self._device.copy(address, view.address, nbytes, stream)

    def _read(self, array: Array) -> np.ndarray[Any, Any]:
        import numpy as np

        assert self._staged is not None
        bases = {"arena": [self._arena], "input": self._staged[0], "output": self._staged[1]}
        raw = np.empty(array.nbytes, np.uint8)
        self._device.copy_out(raw.data, bases[array.place.space][array.place.number] + array.place.offset)
        values = decode(raw.view(dtype_of(array.dtype).storage).reshape(array.stored), array.dtype)
        sizes = dict(zip(array.axes, array.shape))
        return np.array(Layout.parse(array.layout).unpack(values, sizes, array.axes))


class Bound:
    """A network on fixed arrays.

    Attributes:
        outputs: the arrays that it writes.
    """

    def __init__(
        self,
        net: Net,
        calls: Calls,
        outputs: tuple[Any, ...],
        inputs: tuple[Any, ...],
        library: str,
        written: Sequence[tuple[str, Any]],
    ) -> None:
        self._net, self._calls, self._library = net, calls, library
        self._current_stream = current_stream(library, net.device)
        self.outputs = outputs
        self._result = outputs[0] if len(outputs) == 1 else outputs
        self._inputs = inputs  # keeps the memory alive
        self._written = written  # the outputs whose changes PyTorch tracks

    def __call__(self, stream: Any = None) -> Any:
        """Runs the network on a stream (default: the library's current one) and returns its outputs.

        Raises:
            IndexRangeError: as a call of the network; on a GPU ask `Net.check`.
            ArgumentError: PyTorch refuses that an output is written.
        """
        if self._written:
            announce(self._written)
        handle = self._current_stream() if stream is None else raw_stream(stream, self._library, self._net.device)
        with self._net._lock:
            self._calls.launch(handle)
            self._net._check_if_complete()
        return self._result

    def close(self) -> None:
        """Frees the graph. The net must still be open."""
        self._calls.close()


def _labelled(results: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"out[{number}]", array) for number, array in enumerate(results)]


def _spec(array: Array) -> ArgSpec:
    return ArgSpec(array.name, array.layout, array.stored, array.dtype)
