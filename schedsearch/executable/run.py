"""The code and weights of an executable on a device, and its calls bound to addresses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from schedsearch.device.contract import BoundKernel, Device, LoadedKernel, Workspaces
from schedsearch.errors import UsageError
from schedsearch.executable.branches import Order, ordered, works_of
from schedsearch.executable.controlled import BoundControl, bound_control, placed
from schedsearch.executable.onnx_runtime import BoundOnnxModel, OnnxModel, require
from schedsearch.executable.program import ARENA, Call, Place, Program, Reference
from schedsearch.executable.segments import Segments, captured, chained
from schedsearch.executable.shared import Shared
from schedsearch.executable.times import cpu_device, cuda_device, time_on_cpu_ns, time_on_gpu_ns, time_one_on_gpu_ns
from schedsearch.executable.uses import KINDS, Uses, by_port
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.launch import Artifact

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice
    from schedsearch.executable.noted import Notes

EARLY_LAUNCH = "SCHEDSEARCH_EARLY_LAUNCH"  # "0" in the environment when a network is loaded: no kernel begins early
BRANCHES = "SCHEDSEARCH_BRANCHES"  # "0" in the environment when a network is loaded: no kernels run side by side


class Bundle(Protocol):
    """What is copied to a device: an `assemble.Executable`, or an open file."""

    @property
    def program(self) -> Program: ...

    @property
    def artifacts(self) -> Mapping[str, Artifact]: ...

    @property
    def weights(self) -> Sequence[memoryview]: ...

    @property
    def models(self) -> Mapping[str, bytes]: ...

    @property
    def references(self) -> Mapping[str, Reference]:
        """sha256 of a weight -> where it lies outside of the file that `stored.save` writes."""
        ...

    def bodies(self, number: int) -> Sequence[Bundle]:
        """The bundles of the programs inside of the call of this number, of those that can run."""
        ...


class Weights:
    """Code and constants in a device's memory. All instances of a network share them.

    Args:
        shared: where constants are looked for and kept; then neither they nor the device are closed with the weights.
        inside: of a program inside of another one, whose weights close these and the device.

    Attributes:
        bodies: number of a call -> the weights of the programs inside of it.
        uses: where calls use inputs and outputs.
        order: of the calls on a GPU; on a CPU they run one after another.

    Raises:
        DeviceError: the device refuses the code, or has too little memory.
        UsageError: nodes are for ONNX Runtime, which is not installed or cannot run them.
        DatabaseError: the arrays of such nodes are not those of their models.
    """

    def __init__(self, bundle: Bundle, device: Device, shared: Shared | None = None, *, inside: bool = False) -> None:
        self.device, self.program, self.shared, self._inside = device, bundle.program, shared, inside
        self.bodies: dict[int, list[Weights]] = {}
        self._apart: dict[int, int] = {}  # with `shared`: offset among the constants -> address
        self._once: dict[int, int] = {}  # the same of those that are only read at load
        self._early = os.environ.get(EARLY_LAUNCH, "1") != "0"
        self._users = 0
        self._lock = threading.Lock()
        self.kernels: dict[str, LoadedKernel] = {}
        self.models: dict[str, OnnxModel] = {}
        self._memory: list[int] = []
        try:
            if shared is None:
                self._load(bundle)
            else:
                self._load_shared(bundle, shared)
            for number, call in enumerate(self.program.calls):
                for body in () if call.control is None else bundle.bodies(number):
                    self.bodies.setdefault(number, []).append(Weights(body, device, shared, inside=True))
            inside_of = {number: [body.uses for body in several] for number, several in self.bodies.items()}
            self.uses: Uses = Uses(self.program, self.kernels, self.models, inside_of)
            self.order = self._ordered() if device.target.kind == "cuda" else Order((), ())
        except BaseException:
            self._free()
            raise

    def _load(self, bundle: Bundle) -> None:
        program, device = self.program, self.device
        foreign = {call.artifact: call for call in program.calls if call.foreign is not None}
        if foreign:
            labels = "; ".join(call.label for call in foreign.values())
            require(f"{program.model or 'the network'} ({labels})")
            self.models = {sha256: OnnxModel(device, data, foreign[sha256]) for sha256, data in bundle.models.items()}
            for call in program.calls:
                if call.foreign is not None:
                    sizes = {name: program.arrays[index].nbytes for name, index in call.buffers.items()}
                    self.models[call.artifact].check_sizes(sizes)
        once_bytes = max((self._end(index) for index in program.constants if self._space(index) == "once"), default=0)
        self._memory.append(device.allocate(program.constant_bytes))
        once = device.allocate(once_bytes) if once_bytes else 0
        self._bases: dict[str, int] = {"constant": self._memory[0], "once": once}
        try:
            for index, data in zip(program.constants, bundle.weights):
                device.copy_in(self._address(program.arrays[index].place), data)
            self.kernels = {sha256: device.load(artifact) for sha256, artifact in bundle.artifacts.items()}
            self.prepacked = [self._prepare(call) for call in program.calls]
            device.synchronize()
        finally:
            if once:
                device.free(once)

    def _load_shared(self, bundle: Bundle, shared: Shared) -> None:
        """Takes constants from `shared`, and brings there what is missing."""
        program, device = self.program, self.device
        self.kernels = {sha256: device.load(artifact) for sha256, artifact in bundle.artifacts.items()}
        self._bases = {"constant": 0, "once": 0}
        missing = [call for call in program.calls if not self._place_prepacked(call, shared)]
        sha256_of = dict(zip(program.constants, program.weights))
        read_now = {index for call in missing for index in call.buffers.values()}
        once: list[int] = []
        filled = False
        try:
            for number, index in enumerate(program.constants):
                array, known = program.arrays[index], False
                if array.place.space == "constant":
                    address, known = shared.address(sha256_of[index], array.nbytes)
                    self._apart[array.place.offset] = address
                elif index in read_now:
                    address = device.allocate(max(array.nbytes, 1))
                    once.append(address)
                    self._once[array.place.offset] = address
                else:
                    continue
                if not known:
                    device.copy_in(address, bundle.weights[number])
            for call in missing:
                self._prepare(call)
            self.prepacked = [self._known_workspaces(call) for call in program.calls]
            device.synchronize()
            filled = True
        finally:
            shared.keep(filled)
            for address in once:
                device.free(address)

    def _place_prepacked(self, call: Call, shared: Shared) -> bool:
        """Finds what the constant steps of a call make; returns whether it was made before."""
        kept = {name: place for name, place in call.workspaces.items() if place.space == "constant"}
        if not kept:
            return True
        artifact = self.kernels[call.artifact].artifact
        plan = artifact.plan
        constants = {name: self.program.arrays[index] for name, index in call.buffers.items()}
        sha256_of = dict(zip(self.program.constants, self.program.weights))
        read = tuple(sorted((name, sha256_of[call.buffers[name]]) for name in plan.constants if name in constants))
        steps = canonical_json([asdict(step) for step in plan.steps if step.constant])
        content = (sha256_hex(artifact.code), steps, read)
        made = True
        for name, place in kept.items():
            address, known = shared.address((*content, name), plan.workspaces[name])
            self._apart[place.offset] = address
            made &= known
        return made

    def _known_workspaces(self, call: Call) -> Workspaces | None:
        placed = {name: self._address(place) for name, place in call.workspaces.items() if place.space == "constant"}
        if not placed:
            return None
        return Workspaces(self.device, self.kernels[call.artifact].artifact.plan.constant_workspaces, placed)

    def _space(self, index: int) -> str:
        return self.program.arrays[index].place.space

    def _end(self, index: int) -> int:
        return self.program.arrays[index].place.offset + self.program.arrays[index].nbytes

    def _address(self, place: Place, arena: int = 0, inputs: Sequence[int] = (), outputs: Sequence[int] = ()) -> int:
        if place.space == "arena":
            return arena + place.offset
        if place.space == "constant" or place.space == "once":
            apart = self._apart if place.space == "constant" else self._once
            return apart[place.offset] if self.shared else self._bases[place.space] + place.offset
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

    def bind(self, arena: int, inputs: Sequence[int], outputs: Sequence[int], notes: Notes) -> list[BoundKernel]:
        """Every call with its arguments packed.

        Args:
            notes: where calls note indices that are out of range.

        Raises:
            ArgumentError: an address lacks the alignment that a kernel needs.
        """
        arrays, bound = self.program.arrays, list[BoundKernel]()
        for number, (call, prepacked) in enumerate(zip(self.program.calls, self.prepacked)):
            places = {name: arrays[index].place for name, index in call.buffers.items()} | dict(call.workspaces)
            names = [name for name, place in places.items() if place.space != "once"]
            addresses = {name: self.address(call, name, arena, inputs, outputs) for name in names}
            addresses |= notes.buffers(number)
            if call.control is not None:
                bound.append(self._bind_control(number, addresses, notes))
                continue
            early = self._may_begin_early(number, {name for name, place in places.items() if place.space == "constant"})
            bound.append(self._loaded(call).bind(addresses, call.scalars, prepacked, early=early))
        return bound

    def _bind_control(self, number: int, addresses: Mapping[str, int], notes: Notes) -> BoundControl:
        call, arena = self.program.calls[number], addresses[ARENA]
        made = [
            Calls(self.bodies[number][body], arena, inputs, outputs, notes.bodies[number][body])
            for body, inputs, outputs in placed(call, addresses)
        ]
        return bound_control(self.device, call, addresses, made)

    def _may_begin_early(self, number: int, constants: Collection[str]) -> bool:
        """Whether a GPU may begin with a call while the one before it still runs: what it reads ahead must be among the
        buffers that nothing writes. Not with the first call: what stands before it in the stream is not known."""
        calls = self.program.calls
        if not self._early or number == 0 or not (calls[number].is_kernel and calls[number - 1].is_kernel):
            return False
        steps = self.kernels[calls[number].artifact].artifact.plan.steps
        needed = (step for step in steps if not (step.constant and self.prepacked[number]))
        return all(name in constants for step in needed for name in step.ahead)

    def _ordered(self) -> Order:
        calls = self.program.calls
        plans = [self.kernels[call.artifact].artifact.plan if call.is_kernel else None for call in calls]
        ready = [prepacked is not None for prepacked in self.prepacked]
        alone = os.environ.get(BRANCHES, "1") == "0"
        return ordered(works_of(self.program, plans, ready, self.device.target.sms), 0 if alone else self.device.target.sms)

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
        for body in (each for several in self.bodies.values() for each in several):
            body._free()
        for kernel in self.kernels.values():
            kernel.close()
        while self._memory:
            self.device.free(self._memory.pop())
        if self.shared is None and not self._inside:
            self.device.close()

    @property
    def waits(self) -> bool:
        """Whether a run waits for the device in between, so that nothing can capture it."""
        return bool(self.models or self.bodies)


class Calls:
    """The calls of a network on fixed memory, and inputs and outputs that may move. On a GPU they are one graph, on a CPU
    one chain of steps.

    A stream that a CUDA graph captures cannot take another graph; that graph gets the kernels. A graph that captured them
    uses the memory, the code and the weights of these calls for as long as it is replayed. Calls of ONNX Runtime stand
    between several graphs, and nothing can capture them.

    A *port* is an input or output: `input0`, `input1`, ..., `output0`, ...

    Args:
        arena: address of the memory that the calls share, or 0 if they need none.
        inputs, outputs: addresses, in the network's order.
        notes: as of `Weights.bind`.

    Raises:
        ArgumentError: an address lacks the alignment that a kernel needs.
        DeviceError: the device refuses the calls; of the graphs the first launch says so.
    """

    def __init__(
        self,
        weights: Weights,
        arena: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        notes: Notes,
    ) -> None:
        self.weights, self._arena = weights, arena
        self.bound = weights.bind(arena, inputs, outputs, notes)
        self._addresses = by_port(inputs, outputs)
        self._set_copies()
        self._gpu = cuda_device(weights.device) if weights.device.target.kind == "cuda" else None
        self._graph: Segments | None = None  # made by the first launch that is not captured
        self._changed: set[int] = set()  # calls whose arguments the graph does not know yet
        self._chain = chained(cpu_device(weights.device), self.bound) if self._gpu is None else None
        self._ready: Callable[[int], object] | None = None  # a launch on the default stream, while nothing changes

    def move(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Takes other memory for inputs and outputs.

        Raises:
            ArgumentError: an address lacks the alignment that a kernel needs; the ports before it have moved.
        """
        for port, address in by_port(inputs, outputs).items():
            self.set_pointer(port, address)

    def set_pointer(self, port: str, address: int) -> None:
        """Moves one port.

        Raises:
            ArgumentError: the address lacks the alignment that a kernel needs; then the port stays.
        """
        if self._addresses[port] == address:
            return
        self.weights.uses.check(port, address)
        self._addresses[port] = address
        for number, name, offset in self.weights.uses.of[port]:
            self.bound[number].set_pointer(name, address + offset)
            self._changed.add(number)
        if self._copies:
            self._set_copies()

    def _set_copies(self) -> None:
        inputs, outputs = ([self._addresses[name] for name in self._addresses if name.startswith(kind)] for kind in KINDS)
        self._copies = self.weights.copies(self._arena, inputs, outputs)

    def launch(self, stream: int = 0) -> None:
        """Runs everything: on a GPU it enqueues the graph, on a CPU it returns when the outputs are complete."""
        if self._ready is None or stream:
            self._launch(stream)
        else:  # nothing can capture the default stream
            if self._changed:
                self._update()
            self._ready(stream)

    def _launch(self, stream: int) -> None:
        is_captured = self._gpu is not None and self._gpu.is_capturing(stream)
        if is_captured and self.weights.waits:
            raise UsageError(
                "a CUDA graph cannot capture a network with nodes for ONNX Runtime, or with branches, which wait for "
                "results; call the network outside of the capture"
            )
        if self._gpu is None:
            assert self._chain is not None
            self._chain(stream)
            self._ready = None if self._copies else self._chain
        elif is_captured:
            self._capture(stream)
        else:
            graph = self._current_graph(self._gpu)
            graph.launch(stream)
            self._ready = None if self._copies else graph.launch_on_default_stream
        for to, source, nbytes in self._copies:
            self.weights.device.copy(to, source, nbytes, stream)

    def _capture(self, stream: int) -> None:
        """Brings the kernels into the graph that captures a stream."""
        if self.weights.order.is_chain:
            for each in self.bound:
                each.launch(stream)
            return
        assert self._gpu is not None
        captured(self._gpu, stream, self.bound, self.weights.order.after)

    def _current_graph(self, device: CudaDevice) -> Segments:
        """The graphs, with the arguments that the calls have now."""
        if self._graph is None:
            self._graph = Segments(device, self.bound, self.weights.order.after)
            self._changed.clear()
        self._update()
        return self._graph

    def _update(self) -> None:
        """Tells the graph of arguments that have changed; a chain of a CPU reads them itself."""
        if self._graph is not None:
            for number in self._changed:
                self._graph.update(number)
        self._changed.clear()

    def close(self) -> None:
        self._ready = None
        for each in self.bound:
            if isinstance(each, BoundControl):
                each.close()
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
        whole = time_on_cpu_ns(self.launch, repeat) if gpu is None else time_on_gpu_ns(gpu, self.launch, repeat)
        return whole, [self._time_ns(each, repeat) for each in self.bound]

    def subgraph_times_ns(self, repeat: int) -> dict[int, float]:
        """The median time of each call of ONNX Runtime, by its number."""
        self.launch(0)
        self.weights.device.synchronize()
        subgraphs = [number for number, each in enumerate(self.bound) if isinstance(each, BoundOnnxModel)]
        return {number: time_on_cpu_ns(self.bound[number].launch, repeat) for number in subgraphs}

    def _time_ns(self, bound: BoundKernel, repeat: int) -> float:
        if self._gpu is None or isinstance(bound, BoundOnnxModel):  # it returns when its results are there
            return time_on_cpu_ns(bound.launch, repeat)
        if isinstance(bound, BoundControl):
            return time_on_gpu_ns(self._gpu, bound.launch, repeat)
        return time_one_on_gpu_ns(self._gpu, bound.launch, repeat)
