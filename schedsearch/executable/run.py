"""The code and weights of an executable on a device, and its calls bound to addresses."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from schedsearch.device import BoundKernel, Device, LoadedKernel, Workspaces, check_alignment
from schedsearch.errors import UsageError
from schedsearch.executable.onnx_runtime import BoundOnnxModel, OnnxModel, require
from schedsearch.executable.program import Call, Place, Program
from schedsearch.executable.segments import Segments
from schedsearch.launch import Artifact

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice

_KINDS = ("input", "output")  # of ports
_REPEATS_IN_GRAPH = 20  # launches of one call between two events, which take half a microsecond each


class Parts(Protocol):
    """What is copied to a device: an `assemble.Executable`, or an open file."""

    @property
    def program(self) -> Program: ...

    @property
    def artifacts(self) -> Mapping[str, Artifact]: ...

    @property
    def weights(self) -> Sequence[memoryview]: ...

    @property
    def models(self) -> Mapping[str, bytes]: ...


class Use(NamedTuple):
    """One use of an input or output by a call.

    Attributes:
        call: its number.
        name: of its argument or output.
        offset: bytes from the start of the input or output.
    """

    call: int
    name: str
    offset: int


class Weights:
    """Code and constants in a device's memory. All instances of a network share them.

    Attributes:
        ports: `input0`, ..., `output0`, ... -> where calls use it.

    Raises:
        DeviceError: the device refuses the code, or has too little memory.
        UsageError: nodes are for ONNX Runtime, which is not installed or cannot run them.
    """

    def __init__(self, parts: Parts, device: Device) -> None:
        self.device, self.program = device, parts.program
        self.ports = _ports(parts.program)
        self._users = 0
        self._lock = threading.Lock()
        self.kernels: dict[str, LoadedKernel] = {}
        self.models: dict[str, OnnxModel] = {}
        self._memory: list[int] = []
        try:
            self._load(parts)
        except BaseException:
            self._free()
            raise

    def _load(self, parts: Parts) -> None:
        program, device = self.program, self.device
        foreign = {call.artifact: call for call in program.calls if call.foreign is not None}
        if foreign:
            labels = "; ".join(call.label for call in foreign.values())
            require(f"{program.model or 'the network'} ({labels})")
            self.models = {sha256: OnnxModel(device, data, foreign[sha256]) for sha256, data in parts.models.items()}
        once_bytes = max((self._end(index) for index in program.constants if self._space(index) == "once"), default=0)
        self._memory.append(device.allocate(program.constant_bytes))
        once = device.allocate(once_bytes) if once_bytes else 0
        self._bases: dict[str, int] = {"constant": self._memory[0], "once": once}
        try:
            for index, data in zip(program.constants, parts.weights):
                device.copy_in(self._address(program.arrays[index].place), data)
            self.kernels = {sha256: device.load(artifact) for sha256, artifact in parts.artifacts.items()}
            self.prepared = [self._prepare(call) for call in program.calls]
            device.synchronize()
        finally:
            if once:
                device.free(once)

    def _space(self, index: int) -> str:
        return self.program.arrays[index].place.space

    def _end(self, index: int) -> int:
        return self.program.arrays[index].place.offset + self.program.arrays[index].nbytes

    def _address(self, place: Place, arena: int = 0, inputs: Sequence[int] = (), outputs: Sequence[int] = ()) -> int:
        if place.space == "arena":
            return arena + place.offset
        if place.space == "constant" or place.space == "once":
            return self._bases[place.space] + place.offset
        return (inputs if place.space == "input" else outputs)[place.number] + place.offset

    def _prepare(self, call: Call) -> Workspaces | None:
        """Runs the steps of a call that read constants only."""
        placed = {name: self._address(place) for name, place in call.workspaces.items() if place.space == "constant"}
        if not placed:
            return None
        arrays = self.program.arrays
        constants = {
            name: self._address(arrays[index].place)
            for name, index in call.buffers.items()
            if arrays[index].place.space in self._bases
        }
        return self.kernels[call.artifact].prepare(constants | placed)

    def _loaded(self, call: Call) -> LoadedKernel | OnnxModel:
        return self.kernels[call.artifact] if call.foreign is None else self.models[call.artifact]

    def bind(self, arena: int, inputs: Sequence[int], outputs: Sequence[int]) -> list[BoundKernel]:
        """Every call with its arguments packed.

        Raises:
            ArgumentError: an address lacks the alignment that a kernel needs.
        """
        arrays, bound = self.program.arrays, list[BoundKernel]()
        for call, prepared in zip(self.program.calls, self.prepared):
            places = {name: arrays[index].place for name, index in call.buffers.items()} | dict(call.workspaces)
            names = [name for name, place in places.items() if place.space != "once"]
            addresses = {name: self.address(call, name, arena, inputs, outputs) for name in names}
            bound.append(self._loaded(call).bind(addresses, call.scalars, prepared))
        return bound

    def check_address(self, number: int, name: str, address: int) -> None:
        """Raises ArgumentError if an address lacks the alignment that a call needs for an argument or output."""
        loaded = self._loaded(self.program.calls[number])
        if isinstance(loaded, OnnxModel):
            loaded.check_address(name, address)
        else:
            check_alignment(loaded.artifact.plan, name, address)

    def address(self, call: Call, name: str, arena: int, inputs: Sequence[int], outputs: Sequence[int]) -> int:
        """The address that a call gets for an argument, output or workspace."""
        place = call.workspaces[name] if name in call.workspaces else self.program.arrays[call.buffers[name]].place
        return self._address(place, arena, inputs, outputs) + call.offsets.get(name, 0)

    def copies(self, arena: int, inputs: Sequence[int], outputs: Sequence[int]) -> list[tuple[int, int, int]]:
        """What is copied after the calls: (to, from, bytes)."""
        arrays = self.program.arrays
        return [
            (
                self._address(arrays[to].place, arena, inputs, outputs),
                self._address(arrays[source].place, arena, inputs, outputs),
                arrays[to].nbytes,
            )
            for source, to in self.program.copies
        ]

    def take(self) -> Weights:
        """Counts one more user."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """Counts one user less; the last one frees everything, and the device."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._free()

    def _free(self) -> None:
        for kernel in self.kernels.values():
            kernel.close()
        while self._memory:
            self.device.free(self._memory.pop())
        self.device.close()


def _ports(program: Program) -> dict[str, list[Use]]:
    found: dict[str, list[Use]] = {port: [] for port in _by_port([0] * len(program.inputs), [0] * len(program.outputs))}
    for number, call in enumerate(program.calls):
        for name, index in call.buffers.items():
            place = program.arrays[index].place
            if place.space in _KINDS:
                found[f"{place.space}{place.number}"].append(Use(number, name, place.offset + call.offsets.get(name, 0)))
    return found


class Calls:
    """The calls of a network on fixed memory, and inputs and outputs that may move. On a GPU they are one graph.

    A stream that a CUDA graph captures cannot take another graph; it gets the kernels one by one. A graph that captured them
    uses the memory, the code and the weights of these calls for as long as it is replayed. Calls of ONNX Runtime stand
    between several graphs, and nothing can capture them.

    A *port* is an input or output: `input0`, `input1`, ..., `output0`, ...

    Args:
        arena: address of the memory that the calls share, or 0 if they need none.
        inputs, outputs: addresses, in the network's order.

    Raises:
        ArgumentError: an address lacks the alignment that a kernel needs.
        DeviceError: the device refuses the calls; of the graphs the first launch says so.
    """

    def __init__(self, weights: Weights, arena: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.weights, self._arena = weights, arena
        self.bound = weights.bind(arena, inputs, outputs)
        self._addresses = _by_port(inputs, outputs)
        self._set_copies()
        self._gpu = _cuda(weights.device) if weights.device.target.kind == "cuda" else None
        self._graph: Segments | None = None  # made by the first launch that is not captured
        self._changed: set[int] = set()  # calls whose arguments the graph does not know yet

    def move(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Takes other memory for inputs and outputs.

        Raises:
            ArgumentError: an address lacks the alignment that a kernel needs; the ports before it have moved.
        """
        for port, address in _by_port(inputs, outputs).items():
            self.set_pointer(port, address)

    def set_pointer(self, port: str, address: int) -> None:
        """Moves one port.

        Raises:
            ArgumentError: the address lacks the alignment that a kernel needs; then the port stays.
        """
        if self._addresses[port] == address:
            return
        uses = self.weights.ports[port]
        for use in uses:
            self.weights.check_address(use.call, use.name, address + use.offset)
        self._addresses[port] = address
        for use in uses:
            self.bound[use.call].set_pointer(use.name, address + use.offset)
        self._changed.update(use.call for use in uses)
        if self._copies:
            self._set_copies()

    def _set_copies(self) -> None:
        inputs, outputs = ([self._addresses[name] for name in self._addresses if name.startswith(kind)] for kind in _KINDS)
        self._copies = self.weights.copies(self._arena, inputs, outputs)

    def launch(self, stream: int = 0) -> None:
        """Runs everything: on a GPU it enqueues the graph, on a CPU it returns when the outputs are complete."""
        captured = self._gpu is not None and self._gpu.is_capturing(stream)
        if captured and self.weights.models:
            raise UsageError(
                "a CUDA graph cannot capture a network with nodes for ONNX Runtime, which waits for its results; call the "
                "network outside of the capture"
            )
        if self._gpu is None or captured:
            for each in self.bound:
                each.launch(stream)
        else:
            self._current_graph(self._gpu).launch(stream)
        for to, source, nbytes in self._copies:
            self.weights.device.copy(to, source, nbytes, stream)

    def _current_graph(self, device: CudaDevice) -> Segments:
        """The graphs, with the arguments that the calls have now."""
        if self._graph is None:
            self._graph = Segments(device, self.bound)
        else:
            for number in self._changed:
                self._graph.update(number)
        self._changed.clear()
        return self._graph

    def close(self) -> None:
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def each(self, after: Callable[[int], None]) -> None:
        """Runs the calls one at a time. `after(number)` is called when a call is complete."""
        for number, each in enumerate(self.bound):
            each.launch(0)
            self.weights.device.synchronize()
            after(number)

    def times_ns(self, repeat: int) -> tuple[float, list[float]]:
        """The median time of the whole, and that of each call, over `repeat` runs."""
        self.launch(0)
        self.weights.device.synchronize()
        gpu = self._gpu
        whole = _time_on_cpu(self.launch, repeat) if gpu is None else _time_on_gpu(gpu, self.launch, repeat)
        return whole, [self._time_ns(each, repeat) for each in self.bound]

    def part_times_ns(self, repeat: int) -> dict[int, float]:
        """The median time of each call of ONNX Runtime, by its number."""
        self.launch(0)
        self.weights.device.synchronize()
        parts = [number for number, each in enumerate(self.bound) if isinstance(each, BoundOnnxModel)]
        return {number: _time_on_cpu(self.bound[number].launch, repeat) for number in parts}

    def _time_ns(self, bound: BoundKernel, repeat: int) -> float:
        if self._gpu is None or isinstance(bound, BoundOnnxModel):  # it returns when its results are there
            return _time_on_cpu(bound.launch, repeat)
        return _time_one_on_gpu(self._gpu, bound.launch, repeat)


def _by_port(inputs: Sequence[int], outputs: Sequence[int]) -> dict[str, int]:
    return {f"{kind}{number}": each for kind, some in zip(_KINDS, (inputs, outputs)) for number, each in enumerate(some)}


def _time_on_cpu(run: Callable[[], None], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return float(statistics.median(times))


def _time_on_gpu(device: Device, launch: Callable[[int], None], repeat: int) -> float:
    """The median time of a launch among `repeat` launches that follow one another."""
    cuda = _cuda(device)
    stream = cuda.create_stream()
    try:
        return _between_events(cuda, stream, launch, repeat)
    finally:
        cuda.destroy_stream(stream)


def _time_one_on_gpu(device: Device, launch: Callable[[int], None], repeat: int) -> float:
    """The median time of one call in a graph of several."""
    cuda = _cuda(device)
    stream = cuda.create_stream()

    def several(stream: int) -> None:
        for _ in range(_REPEATS_IN_GRAPH):
            launch(stream)

    graph = cuda.capture(stream, several)
    try:
        return _time_on_gpu(device, graph.launch, max(repeat // _REPEATS_IN_GRAPH, 3)) / _REPEATS_IN_GRAPH
    finally:
        cuda.synchronize()
        with cuda.current():
            graph.close()
        cuda.destroy_stream(stream)


def _between_events(device: CudaDevice, stream: int, launch: Callable[[int], None], repeat: int) -> float:
    from schedsearch.device.cuda import Event

    with device.current(), contextlib.ExitStack() as stack:
        events = []
        for _ in range(repeat + 1):
            events.append(Event())
            stack.callback(events[-1].close)
        launch(stream)
        events[0].record(stream)
        for event in events[1:]:
            launch(stream)
            event.record(stream)
        events[-1].synchronize()
        times_ms = [before.elapsed_ms(after) for before, after in itertools.pairwise(events)]
    return statistics.median(times_ms) * 1e6


def _cuda(device: Device) -> CudaDevice:
    from schedsearch.device.cuda import CudaDevice

    assert isinstance(device, CudaDevice)
    return device
