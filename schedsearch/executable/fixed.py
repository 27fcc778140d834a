"""A network of fixed sizes: one program, in the caller's arrays or in its own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedsearch.device import Device
from schedsearch.device.memory import bytes_at
from schedsearch.errors import ArgumentError, UsageError
from schedsearch.executable.bound import Bound
from schedsearch.executable.controlled import untaken
from schedsearch.executable.net import Net, Times, check_repeat
from schedsearch.executable.noted import Notes, index_limits
from schedsearch.executable.ports import Port, in_order
from schedsearch.executable.program import Array, Call, Origin, Program
from schedsearch.executable.run import Bundle, Calls, Weights
from schedsearch.executable.shared import Shared
from schedsearch.executable.stored import save
from schedsearch.ops import ArgSpec, Layout
from schedsearch.ops.dtypes import decode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.runtime import arrays
from schedsearch.runtime.repeated import announce, tracked
from schedsearch.runtime.short_call import ShortCall, network_call
from schedsearch.runtime.streams import raw_stream
from schedsearch.text import counted

if TYPE_CHECKING:
    import numpy as np

_REPEATS_TO_EXPLAIN = 20  # launches of a subgraph of which the median is explained


class FixedNet(Net):
    """A `Net` whose arrays have fixed sizes.

    On a GPU a call only enqueues; arrays in the host's memory are copied there and back in every call, with a warning. An
    image in NHWC may also come as an NCHW array whose strides are those of NHWC: torch's `channels_last`. If the first
    input does, the outputs that are images in NHWC do as well.

    `instance` makes another net that shares the weights, for a second stream. Calls may come from any thread; a lock
    serialises them.

    A CUDA graph may capture calls, after one call with the same inputs that is not captured. It then uses the memory and the
    weights of the net: keep the net open for as long as the graph is replayed, and do not run both at once.

    Attributes:
        program: its calls, arrays and places.
    """

    def __init__(self, bundle: Bundle, device: Device, shared: Shared | None = None) -> None:
        """Takes the device over: `close` closes it, unless there is memory that is shared with other nets.

        Raises:
            DeviceError: the device refuses the code, or has too little memory.
            UsageError: nodes are for ONNX Runtime, which is not installed or cannot run them.
        """
        self._bundle = bundle
        try:
            weights = Weights(bundle, device, shared)
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
        self._is_complete = target.kind == "cpu"  # when a call returns
        self._ports = _ports(self.program, self.program.inputs), _ports(self.program, self.program.outputs)
        self._inputs = [_spec(self.program.arrays[index]) for index in self.program.inputs]
        self._outputs = [_spec(self.program.arrays[index]) for index in self.program.outputs]
        self._lock = threading.Lock()
        self._memory: list[int] = []
        self._notes = Notes(weights)
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
        self._short_call: ShortCall | None = None
        self._warned = False

    def instance(self) -> FixedNet:
        """Another net that shares code and weights with this one, for a second stream or thread."""
        other = FixedNet.__new__(FixedNet)
        other._bundle = self._bundle
        other._start(self._open_weights())
        return other

    @property
    def model(self) -> str:
        return self.program.model

    @property
    def target(self) -> str:
        return self.program.target

    @property
    def checked(self) -> str:
        return self.program.checked

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self._ports[0]

    @property
    def outputs(self) -> tuple[Port, ...]:
        return self._ports[1]

    @property
    def steps(self) -> tuple[Call, ...]:
        return self.program.calls

    @property
    def kernels(self) -> tuple[Origin, ...]:
        return tuple(call.origin for call in self.program.all_calls if call.is_kernel)

    @property
    def summary(self) -> str:
        from schedsearch.executable.explain import prediction

        calls = list(self.program.all_calls)
        others = [
            counted(sum(call.foreign is not None for call in calls), "subgraph") + " in ONNX Runtime",
            counted(sum(call.control is not None for call in calls), "branching"),
        ]
        others = [each for each in others if not each.startswith("0 ")]
        predicted = f", predicted to take {prediction(self.program)}" if self.program.predicted_ns else ""
        return " and ".join([counted(len(self.kernels), "kernel call"), *others]) + predicted

    def explain(self) -> str:
        """Every call with its kernel and layouts, conversions, and memory beside its lower bound. Calls of ONNX Runtime are
        measured for it.

        Raises:
            UsageError: the net has such calls and was closed.
            DeviceError: ONNX Runtime fails in one of them.
        """
        from schedsearch.executable.explain import SubgraphCost, explain_lines

        if all(call.foreign is None for call in self.program.calls):
            return "\n".join(explain_lines(self.program))
        with self._lock:
            loaded = self._open_weights().models
            calls = self._calls_on(*self._take_staged())
            try:
                times_ns = calls.subgraph_times_ns(_REPEATS_TO_EXPLAIN)
            finally:
                calls.close()
        models = (self.program.calls[number].artifact for number in times_ns)
        costs = {
            number: SubgraphCost(time_ns, loaded[sha256]) for (number, time_ns), sha256 in zip(times_ns.items(), models)
        }
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
            if self._short_call is not None and out is None and not named:
                try:
                    result = self._short_call(args, stream)
                except ArgumentError:  # an address lacks an alignment: the long path copies the array
                    result = None
                if result is not None:
                    if self._is_complete:
                        self._notes.check()
                    return result
            self._open_weights()
            given = self._split(args, named)
            views = self._checked_inputs(given)
            results, seen = self._checked_outputs(given, views, out)
            if out is not None:
                announce(_labelled(results))
            self._short_call = None  # it knows which addresses the calls had
            if self.device[0] == "cuda" and views[0].device[0] == "cpu":
                self._run_on_host_arrays(views, seen)
                self._notes.check()
            elif not self._run_in_place(views, seen, raw_stream(stream, views[0].library, self.device)):
                self._run_staged(views, seen, raw_stream(stream, views[0].library, self.device))
            else:
                self._short_call = network_call(self._calls, given, results, self.device)
            if self._is_complete:
                self._notes.check()
            return results[0] if len(results) == 1 else tuple(results)

    def check(self) -> None:
        """Waits for all calls, and looks whether an index of a gather or scatter was out of range since the last check.

        Kernels note such indices; calls on a GPU neither copy nor wait for that. They compute zeros for such an index, or
        leave an update out, and read and write nothing outside of the arrays. Calls on a CPU raise themselves.

        Raises:
            IndexRangeError: as `Net.check`.
        """
        with self._lock:
            self._open_weights()
            self._device.synchronize()
            self._notes.check()

    def bind(self, *args: object, out: object = None, **named: object) -> Bound:
        """As `Net.bind`. `out` is that of a call."""
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
            everything = calls, tuple(results), tuple(given), views[0].library, written
            return Bound(*everything, device=self.device, lock=self._lock, notes=self._notes, check=self.check)

    def evaluate(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the arrays are in the host's memory
            found = self(**inputs)
        several = found if isinstance(found, tuple) else (found,)
        return {port.name: array for port, array in zip(self.outputs, several)}

    def index_limits(self, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        return index_limits(self.program)

    @property
    def untaken(self) -> list[str]:
        """The branches that no call has taken yet."""
        return list(untaken(self.program, () if self._calls is None else self._calls.bound))

    def trace(self, *args: object, **named: object) -> dict[str, np.ndarray[Any, Any]]:
        return self.trace_some(dict(zip([port.name for port in self.inputs], self._split(args, named))), None)

    def trace_some(self, given: Mapping[str, object], wanted: Collection[str] | None) -> dict[str, np.ndarray[Any, Any]]:
        """As `trace`, of the values with these names; None: of all.

        Args:
            given: the inputs by name.
        """
        with self._lock:
            self._open_weights()
            self._stage(given)
            calls = self._calls_on(*self._take_staged())
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

    def measure(self, repeat: int = 100, inputs: Mapping[str, object] | None = None) -> Times:
        check_repeat(repeat)
        with self._lock:
            self._open_weights()
            if inputs is not None:
                self._stage(inputs)
            calls = self._calls_on(*self._take_staged())
            try:
                total, each = calls.times_ns(repeat)
            finally:
                calls.close()
            return Times(total, tuple(each))

    def mark_checked(self, by: str) -> None:
        self.program = replace(self.program, checked=by)

    def save(self, path: Any) -> None:
        save(self._bundle, path, self.checked)

    def close(self) -> None:
        """Waits for the calls and frees the memory; with the last instance also code, weights and device. Does nothing the
        second time."""
        with self._lock:
            if self._weights is None:
                return
            self._short_call = None
            self._device.synchronize()  # calls may be under way, and the driver need not wait before it frees
            if self._calls is not None:
                self._calls.close()
            while self._memory:
                self._device.free(self._memory.pop())
            self._notes.close()
            weights, self._weights = self._weights, None
            weights.release()

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

    def _split(self, args: tuple[object, ...], named: Mapping[str, object]) -> list[Any]:
        """The inputs in order."""
        return in_order([spec.name for spec in self._inputs], self.inputs, args, named)

    def _checked_inputs(self, given: list[Any]) -> list[arrays.ArrayView]:
        views = [arrays.as_numbers(arrays.view(array, spec.name), spec) for spec, array in zip(self._inputs, given)]
        for spec, seen in zip(self._inputs, views):
            on_host = self.device[0] == "cuda" and views[0].device == ("cpu", 0)
            arrays.check(spec, seen, ("cpu", 0) if on_host else self.device)
        return views

    def _checked_outputs(
        self, given: list[Any], views: list[arrays.ArrayView], out: object
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

    def _stage(self, given: Mapping[str, object]) -> None:
        """Copies arrays to the net's own inputs."""
        views = self._checked_inputs(self._split((), given))
        for address, spec, view in zip(self._take_staged()[0], self._inputs, views):
            self._copy_in(address, view, spec.nbytes, 0)

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


def _ports(program: Program, indices: Sequence[int]) -> tuple[Port, ...]:
    held = (program.arrays[index] for index in indices)
    return tuple(Port(each.name, each.stored, each.dtype, each.layout, each.axes) for each in held)


def _labelled(results: Sequence[object]) -> list[tuple[str, Any]]:
    return [(f"out[{number}]", array) for number, array in enumerate(results)]


def _spec(array: Array) -> ArgSpec:
    return ArgSpec(array.name, array.layout, array.stored, array.dtype)
