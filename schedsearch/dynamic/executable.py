"""Dynamic graphs with their machine code and constants: what `schedsearch.build(..., dynamic=...)` makes and a file keeps.

The text of a file has the calls that made the graph (`DynamicGraph.recipe`), so that loading makes the same graph again,
with the shape functions of its operators. They are needed to say which sizes are impossible, and why. The kernels that
compute the sizes on the device come from the file, like all others: loading compiles nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from schedsearch.device import Device
from schedsearch.dynamic.bound import BoundNet
from schedsearch.dynamic.code import SizeCode, size_artifact
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.given import look
from schedsearch.dynamic.graph import RECIPE, Call, DynamicGraph, Program, Size, Value
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import DatabaseError, SchedsearchError, UnknownOperatorError, UsageError
from schedsearch.executable.check import ProgramError, readable, require
from schedsearch.executable.explain import check_text
from schedsearch.executable.fields import FieldError, check_object, read
from schedsearch.executable.net import Net, Times, check_repeat
from schedsearch.executable.ports import Port, in_order
from schedsearch.executable.program import DYNAMIC, Origin, seal
from schedsearch.executable.times import time_on_cpu_ns
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.ops.data_movement import AXES
from schedsearch.ops.dtypes import DTYPES
from schedsearch.ops.index_map import ByIndicesParams, index_map
from schedsearch.records import executables
from schedsearch.target import Target
from schedsearch.text import counted, quoted
from schedsearch.workload import Workload

Way = Literal["exact", "bounded"]
WAYS: tuple[Way, ...] = ("exact", "bounded")


@dataclass(frozen=True)
class Kernel:
    """The machine code of a workload, and where it comes from."""

    artifact: Artifact
    origin: Origin


@dataclass(frozen=True)
class DynamicParts:
    """Everything that a file of a dynamic graph holds.

    Attributes:
        target: key of the device that the code is for.
        model: name of the model's file, or "".
        way: how a call of the executable runs.
        kernels: workload -> its kernel.
        sizes: (number of a segment, whether the run is bounded) -> the kernel of its sizes.
        checked: as of an `executable.program.Program`.
    """

    target: str
    model: str
    way: Way
    graph: DynamicGraph
    kernels: Mapping[Workload, Kernel]
    sizes: Mapping[tuple[int, bool], Artifact]
    checked: str = ""

    @classmethod
    def of(
        cls,
        graph: DynamicGraph,
        target: Target,
        kernel: Callable[[Workload], Kernel],
        *,
        sizes: SizeCode | None = None,
        way: Way = "exact",
        model: str = "",
    ) -> DynamicParts:
        """The parts of a graph.

        Args:
            kernel: gives the kernel of a workload; it is called once for each distinct one.
            sizes: as of `machine_code`; default: compiled now.
        """
        program = graph.program()
        workloads = dict.fromkeys(call.workload for segment in program.segments for call in segment.calls)
        sizes = sizes or {
            (number, bounded): size_artifact(program, target, number, bounded)
            for number, segment in enumerate(program.segments)
            for bounded in (False, True)
            if segment.steps
        }
        return cls(target.key, model, way, graph, {each: kernel(each) for each in workloads}, sizes)

    @property
    def artifacts(self) -> list[Artifact]:
        return [*(each.artifact for each in self.kernels.values()), *self.sizes.values()]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file, signed by this machine. The same parts give the same bytes.

        Raises:
            UsageError: there is a file that is not an executable; it stays.
            DatabaseError: it cannot be written.
        """
        weights: dict[str, memoryview] = {}
        recipe = [[method, _plain(args, weights), _plain(named, weights)] for method, args, named in self.graph.recipe]
        text = canonical_json(
            {
                "kind": DYNAMIC, "target": self.target, "model": self.model, "way": self.way, "recipe": recipe,
                "checked": self.checked,
                "program": _digest(self.graph.program()),
                "kernels": [[each.json, one.artifact.sha256, asdict(one.origin)] for each, one in self.kernels.items()],
                "sizes": [[*place, artifact.sha256] for place, artifact in self.sizes.items()],
                "weights": list(weights),
            }
        )  # fmt: skip
        code = {each.sha256: (each.sha256, each.plan.to_json(), each.code) for each in self.artifacts}
        executables.write(Path(path), self.target, seal(text), code.values(), weights.items())


def stored_parts(path: Path, text: str) -> DynamicParts:
    """The parts in a file of which the program's text was read, and is trusted.

    Raises:
        DatabaseError: code or weights are damaged, or another version of schedsearch or of an operator wrote the file.
        UnknownOperatorError: the package of an operator is not installed.
    """
    with readable(path), executables.ExecutableFile(path) as file:
        return _parts(json.loads(text), path, file)


def _parts(data: Any, path: Path, file: executables.ExecutableFile) -> DynamicParts:
    """Raises FieldError or ProgramError for what no builder writes, and the errors of `stored_parts`."""
    texts = dict.fromkeys(("kind", "target", "model", "way", "program"), str)
    check_object(
        data, {**texts, **dict.fromkeys(("recipe", "kernels", "sizes", "weights"), list)}, optional={"checked": str}
    )
    require(data["way"] in WAYS, f"way is {quoted(data['way'])}; allowed: {', '.join(WAYS)}")
    with _following("the graph"):
        graph = DynamicGraph()
        for method, args, named in data["recipe"]:
            require(method in RECIPE, f"{quoted(method)} does not make graphs; allowed: {', '.join(RECIPE)}")
            getattr(graph, method)(*_rich(args, file), **_rich(named, file))
        program = graph.program()
        digest = _digest(program)
    if digest != data["program"]:
        raise DatabaseError(
            f"{path} was built by another version of schedsearch or of an operator, whose graph has other sizes; build "
            f"it again: schedsearch build {data['model'] or 'MODEL.onnx'} --dynamic ..."
        )
    with _following("a kernel"):
        kernels = {
            Workload.from_json(workload): Kernel(_artifact(file, sha256), read(Origin, origin))
            for workload, sha256, origin in data["kernels"]
        }
        sizes = {(number, bounded): _artifact(file, sha256) for number, bounded, sha256 in data["sizes"]}
        for workload, kernel in kernels.items():
            kernel.artifact.plan.check(workload)
        wanted = {(n, way) for n, segment in enumerate(program.segments) if segment.steps for way in (False, True)}
        require(sizes.keys() == wanted, "its kernels of sizes are not those of its segments")
        called = {call.workload for segment in program.segments for call in segment.calls}
        require(called <= kernels.keys(), "a call has no kernel")
    return DynamicParts(data["target"], data["model"], data["way"], graph, kernels, sizes, data.get("checked", ""))


@contextlib.contextmanager
def _following(what: str) -> Iterator[None]:
    """Turns whatever a wrong recipe leads to into ProgramError: it can call any method of a graph with any arguments."""
    try:
        yield
    except (DatabaseError, UnknownOperatorError, FieldError, ProgramError):
        raise
    except (SchedsearchError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ProgramError(f"{what} cannot be made again: {type(error).__name__}: {error}") from error


class CallStep(NamedTuple):
    """A call of a graph, as `executable.net.Step`."""

    name: str
    label: str
    origin: Origin


class DynamicExecutable(Net):
    """A `Net` whose sizes are computed in the run. It takes the device over: `close` closes it.

    Inputs are contiguous arrays of the device; arrays in the host's memory are only for CPUs. An exact call returns arrays
    of the shapes that the inputs lead to. A bounded one returns pairs (array, extents); it binds the first arrays that it
    gets, so that later calls with the same arrays copy nothing to the host, wait for nothing and allocate nothing. `bind`
    does the same, whichever way the graph was built for.

    Attributes:
        net: the graph on the device, for either way to run.
    """

    def __init__(self, parts: DynamicParts, device: Device) -> None:
        """Raises DeviceError if the device refuses the code, or has too little memory; the device is closed then."""
        self.parts, self._device = parts, device
        self.device = (device.target.kind, device.target.ordinal if device.target.kind == "cuda" else 0)
        try:
            kernels = {workload: each.artifact for workload, each in parts.kernels.items()}
            self.net = DynamicNet(
                parts.graph.program(), device, kernels.__getitem__, lambda number, bounded: parts.sizes[number, bounded]
            )
        except BaseException:
            device.close()
            raise
        values, program = self.program.values, self.program
        self._inputs = tuple(_port(name, values[name]) for name in program.inputs)
        self._outputs = tuple(_port(called, values[name]) for called, name in zip(program.called, program.outputs))
        self._bound: BoundNet | None = None
        self._looks: list[tuple[Hashable, int]] = []  # of the arrays that it is bound to
        self._closed = False

    @property
    def program(self) -> Program:
        return self.net.program

    @property
    def model(self) -> str:
        return self.parts.model

    @property
    def target(self) -> str:
        return self.parts.target

    @property
    def checked(self) -> str:
        return self.parts.checked

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        return self._outputs

    @property
    def steps(self) -> tuple[CallStep, ...]:
        calls = (call for segment in self.program.segments for call in segment.calls)
        return tuple(CallStep(each.name, each.workload.label, self.parts.kernels[each.workload].origin) for each in calls)

    @property
    def kernels(self) -> tuple[Origin, ...]:
        return tuple(each.origin for each in self.parts.kernels.values())

    @property
    def summary(self) -> str:
        return f"{counted(len(self.steps), 'call')}, runs {self.parts.way}"

    def explain(self) -> str:
        """What each call needs from whom, bytes to the host, waits and allocations; and the kernel of each workload."""
        lines = [
            f"{self.parts.model or 'graph'} on {self.parts.target}, runs {self.parts.way}",
            check_text(self.parts.checked),
            explain(self.program),
            "kernels:",
        ]
        for workload, kernel in self.parts.kernels.items():
            origin = kernel.origin
            source = f"record {origin.record_id}" if origin.record_id is not None else origin.level
            lines.append(f"  {workload.label}: {origin.template} ({source})")
        return "\n".join(lines)

    def __call__(self, *args: Any, stream: Any = None, **named: Any) -> Any:
        """Runs the graph in the way that it was built for; as `Net.__call__`.

        Raises:
            IndexRangeError: an index of a gather or scatter is out of range. A bounded call raises neither this nor
                SizeError, and an exact one on a GPU may not see a wrong index; ask `check()`.
        """
        given = in_order(self.program.inputs, self._inputs, args, named)
        if self.parts.way == "exact":
            return self.net(*given, stream=stream)
        looks = [look(array, name) for array, name in zip(given, self.program.inputs)]
        if self._bound is None or looks != self._looks:
            self._unbind()
            self._bound, self._looks = self.net.bind(*given), looks
        return self._bound(stream)

    def bind(self, *args: Any, **named: Any) -> BoundNet:
        """A bounded run on fixed arrays, whichever way the graph was built for; as `Net.bind`."""
        return self.net.bind(*in_order(self.program.inputs, self._inputs, args, named))

    def check(self) -> None:
        """As `BoundNet.check` for the last bounded call, and as `DynamicNet.check` for those since the last check."""
        self.net.check()
        if self._bound is not None:
            self._bound.check()

    def evaluate(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        found = self.net(*self._on_device(inputs))
        self.net.check()
        several = found if isinstance(found, tuple) else (found,)
        return {port.name: _on_host(array) for port, array in zip(self.outputs, several)}

    def _on_device(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> list[Any]:
        """Arrays of the device in the order of the inputs. Raises UsageError if that needs PyTorch, which is missing."""
        given = in_order(self.program.inputs, self._inputs, (), inputs)
        if self.device[0] == "cpu":
            return given
        try:
            import torch
        except ImportError as error:
            raise UsageError(
                "running on a GPU needs arrays of a library there; install PyTorch: pip install torch"
            ) from error
        return [torch.from_numpy(array).cuda(self.device[1]) for array in given]

    def index_limits(self, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        chosen = self._chosen(sizes or {})
        found: dict[str, int] = {}
        for call in (call for segment in self.program.segments for call in segment.calls):
            for spec in call.workload.signature:
                value = self.program.values.get(call.inputs.get(spec.name, ""))
                if spec.below is None or value is None or (name := value.view_of or value.name) not in self.program.inputs:
                    continue
                found[name] = min(spec.below, *self._extents_in_use(call, chosen), found.get(name, spec.below))
        return found

    def _extents_in_use(self, call: Call, sizes: Mapping[str, int]) -> list[int]:
        """The extents that indices count along, if the call reads them and they follow from the sizes of inputs; at least
        1 each."""
        if not call.workload.params.get("dynamic_x") or (known := self.program.values[call.inputs["x"]].known) is None:
            return []
        extents = [known[axis] for axis in index_map(ByIndicesParams.of(call.workload.params)).axes]
        return [max(1, n if isinstance(n, int) else n.at(sizes)) for n in extents]

    def trace(self, *args: Any, **named: Any) -> dict[str, np.ndarray[Any, Any]]:
        raise UsageError("a network whose sizes are computed in the run cannot be traced; compare its outputs yourself")

    def measure(self, repeat: int = 100, inputs: Mapping[str, np.ndarray[Any, Any]] | None = None) -> Times:
        check_repeat(repeat)
        if inputs is None:
            raise UsageError("times depend on the inputs, by which sizes are computed; give them: measure(repeat, inputs)")
        arrays = self._on_device(inputs)
        bound = self.net.bind(*arrays)
        runs: dict[str, Callable[[], object]] = {"exact": lambda: self.net(*arrays), "bounded": bound.step}

        def complete(run: Callable[[], object]) -> None:
            run()
            self._device.synchronize()

        try:
            for run in runs.values():
                complete(run)  # prepares what later runs use again
            bound.check()
            found = {way: time_on_cpu_ns(functools.partial(complete, run), repeat) for way, run in runs.items()}
        finally:
            bound.close()
        return Times(found[self.parts.way], ways_ns=found)

    def save(self, path: str | os.PathLike[str]) -> None:
        self.parts.save(path)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._unbind()
            self.net.close()
            self._device.close()

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.close()
            self._bound, self._looks = None, []


def _port(name: str, value: Value) -> Port:
    """A value as callers see it."""
    shape, axes = tuple(value.sizes.get(axis, n) for axis, n in enumerate(value.shape)), AXES[: len(value.shape)]
    return Port(name, shape, value.dtype, axes, axes, bool(value.sizes) or value.words is None)


def _on_host(array: Any) -> Any:
    return array.cpu().numpy() if hasattr(array, "cpu") else array


def _artifact(file: executables.ExecutableFile, sha256: str) -> Artifact:
    plan, code = file.code(sha256)
    return Artifact(code, LaunchPlan.from_json(plan))


def _digest(program: Program) -> str:
    """sha256 of everything about a program's sizes that its compiled kernels rely on."""
    segments = [
        [[call.name for call in each.calls], [[repr(step.inputs), repr(step.to), step.bound] for step in each.steps]]
        for each in program.segments
    ]
    values = [[repr(replace(each, sizes={})), repr(dict(each.sizes))] for each in program.values.values()]
    return sha256_hex(canonical_json([segments, values, program.words, repr(program.fixed), repr(program.last)]))


def _plain(value: Any, weights: dict[str, memoryview]) -> Any:
    """An argument of a recipe as JSON. Arrays go to `weights`."""
    if isinstance(value, Workload):
        return {"workload": value.json}
    if isinstance(value, Size):
        return {"size": [value.name, value.least, value.most]}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        sha256 = sha256_hex(bytes(data))
        weights[sha256] = data
        return {"array": sha256, "dtype": value.dtype.name, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"named": {name: _plain(each, weights) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(each, weights) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _rich(value: Any, file: executables.ExecutableFile) -> Any:
    """Inverse of `_plain`."""
    if isinstance(value, list):
        return [_rich(each, file) for each in value]
    if not isinstance(value, dict):
        return value
    if "workload" in value:
        return Workload.from_json(value["workload"])
    if "size" in value:
        return Size(*value["size"])
    if "array" in value:
        return _array(value, file)
    return {name: _rich(each, file) for name, each in value["named"].items()}


def _array(value: Mapping[str, Any], file: executables.ExecutableFile) -> np.ndarray[Any, Any]:
    name, shape = value["dtype"], value["shape"]
    try:
        dtype = np.dtype(name)
    except TypeError:  # a format that NumPy lacks
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, DTYPES[name].library if name in DTYPES else name))
    data = file.weight(value["array"], math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)
