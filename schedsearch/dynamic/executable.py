"""Dynamic graphs with their machine code and constants: what `schedsearch.build(..., dynamic=...)` makes and a file keeps.

The text of a file has the calls that made the graph (`DynamicGraph.recipe`), so that loading makes the same graph again,
with the shape functions of its operators. They are needed to say which sizes are impossible, and why. The kernels that
compute the sizes on the device come from the file, like all others: loading compiles nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from schedsearch.device import Device
from schedsearch.dynamic.bound import BoundNet
from schedsearch.dynamic.code import SizeCode, size_artifact
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.graph import RECIPE, DynamicGraph, Program, Size
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import DatabaseError, SchedsearchError, UnknownOperatorError
from schedsearch.executable.check import ProgramError, readable, require
from schedsearch.executable.explain import check_text
from schedsearch.executable.fields import FieldError, check_object, read
from schedsearch.executable.ports import in_order
from schedsearch.executable.program import DYNAMIC, Origin, seal
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.ops.dtypes import DTYPES
from schedsearch.records import executables
from schedsearch.target import Target
from schedsearch.text import quoted
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


@dataclass(frozen=True)
class DynamicPort:
    """An input or output: a contiguous array.

    Attributes:
        shape: an extent is an integer, or for an input a `Size` that the caller chooses. Those of an output are bounds.
        exact: whether an output always has its whole shape.
    """

    name: str
    shape: tuple[int | Size, ...]
    dtype: str
    exact: bool = True

    def __str__(self) -> str:
        extents = (f"{each.name}={each.least}..{each.most}" if isinstance(each, Size) else str(each) for each in self.shape)
        return f"{self.name} {self.dtype} {'' if self.exact else 'up to '}[{', '.join(extents)}]"


class DynamicExecutable:
    """A dynamic graph that is ready to run on one device. It takes the device over: `close` closes it.

    Call it with the inputs, by position or name: contiguous arrays of the device. An exact call returns arrays of the shapes
    that the inputs lead to. A bounded one returns pairs (array, extents); it binds the first arrays that it gets, so that
    later calls with the same arrays copy nothing to the host, wait for nothing and allocate nothing. `bind` does the same
    and returns the run. Arrays in the host's memory are only for CPUs.

    Attributes:
        net: the graph on the device, for either way to run.
    """

    def __init__(self, parts: DynamicParts, device: Device) -> None:
        """Raises DeviceError if the device refuses the code, or has too little memory; the device is closed then."""
        self.parts, self._device = parts, device
        try:
            kernels = {workload: each.artifact for workload, each in parts.kernels.items()}
            self.net = DynamicNet(
                parts.graph.program(), device, kernels.__getitem__, lambda number, bounded: parts.sizes[number, bounded]
            )
        except BaseException:
            device.close()
            raise
        self._bound: BoundNet | None = None
        self._arrays: tuple[Any, ...] = ()

    @property
    def program(self) -> Program:
        return self.net.program

    @property
    def inputs(self) -> tuple[DynamicPort, ...]:
        values = [self.program.values[name] for name in self.program.inputs]
        return tuple(
            DynamicPort(each.name, tuple(each.sizes.get(axis, n) for axis, n in enumerate(each.shape)), each.dtype)
            for each in values
        )

    @property
    def outputs(self) -> tuple[DynamicPort, ...]:
        values = [self.program.values[name] for name in self.program.outputs]
        return tuple(
            DynamicPort(name, each.shape, each.dtype, each.words is None) for name, each in zip(self.program.called, values)
        )

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
            source = f"record {origin.record_id}" if origin.record_id is not None else origin.rung
            lines.append(f"  {workload.label}: {origin.template} ({source})")
        return "\n".join(lines)

    def __call__(self, *args: Any, stream: Any = None, **named: Any) -> Any:
        """Runs the graph in the way that it was built for.

        Args:
            args, named: the inputs in order, or by name.
            stream: as of `schedsearch.Kernel`.

        Raises:
            ArgumentError: an input is missing or unknown, or has a wrong shape, dtype or device.
            SizeError: inputs are impossible, or sizes exceed their bounds.
            IndexRangeError: an index of a gather or scatter is out of range. A bounded call raises neither of them, and an
                exact one on a GPU may not see a wrong index; ask `check()`.
        """
        given = in_order(self.program.inputs, self.inputs, args, named)
        if self.parts.way == "exact":
            return self.net(*given, stream=stream)
        if self._bound is None or any(one is not other for one, other in zip(given, self._arrays)):
            self._unbind()
            self._bound, self._arrays = self.net.bind(*given), tuple(given)
        found = tuple((each.array, each.extents) for each in self._bound.step(stream))
        return found[0] if len(found) == 1 else found

    def bind(self, *args: Any, **named: Any) -> BoundNet:
        """A bounded run on fixed arrays, whichever way the graph was built for. Raises ArgumentError as a call does."""
        return self.net.bind(*in_order(self.program.inputs, self.inputs, args, named))

    def check(self) -> None:
        """Waits for the calls. Raises SizeError for the last bounded one, as `BoundNet.check`, and IndexRangeError for those
        since the last check, as `DynamicNet.check`."""
        self.net.check()
        if self._bound is not None:
            self._bound.check()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the executable to a file; see `DynamicParts.save`."""
        self.parts.save(path)

    def close(self) -> None:
        """Frees memory and code, and closes the device. Do not use the executable afterwards."""
        self._unbind()
        self.net.close()
        self._device.close()

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.close()
            self._bound, self._arrays = None, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        ports = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"<DynamicExecutable {self.parts.model or 'without a file'}: {ports[0]} -> {ports[1]}>"


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
