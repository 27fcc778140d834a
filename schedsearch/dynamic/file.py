"""Files of dynamic graphs: what `schedsearch.build(..., dynamic=...)` makes of a graph, and how a file keeps it.

The text of a file is the program as data: values, calls, and the steps that compute sizes, with the fields of
`schedsearch.dynamic.program`. A shape function is named by the workload that it belongs to, or by a rule of
`schedsearch.dynamic.numbers` with its parameters. It only says which sizes are impossible, and why: the kernels that compute
the sizes on the device come from the file, like all others. Loading compiles nothing and builds no graph.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from schedsearch.dynamic.check import check
from schedsearch.dynamic.code import SizeCode, size_artifact
from schedsearch.dynamic.numbers import RULES, function
from schedsearch.dynamic.program import DynamicProgram
from schedsearch.errors import DatabaseError, SchedsearchError, UnknownOperatorError
from schedsearch.executable.check import ProgramError, readable, require
from schedsearch.executable.program import DYNAMIC, ChosenKernel, Origin, seal
from schedsearch.fields import Codec, FieldError, check_object
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.ops.dependence import ShapeFunction
from schedsearch.ops.dtypes import DTYPES
from schedsearch.records import executables
from schedsearch.target import Target
from schedsearch.text import quoted
from schedsearch.typed import Array, JsonMapping
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.dynamic.graph import DynamicGraph

RunMode = Literal["exact", "bounded"]
RUN_MODES: tuple[RunMode, ...] = ("exact", "bounded")


@dataclass(frozen=True)
class DynamicBundle:
    """Everything that a file of a dynamic graph holds.

    Attributes:
        target: key of the device that the code is for.
        model: name of the model's file, or "".
        run_mode: how a call of the executable runs.
        program: of the graph.
        kernels: workload -> its kernel.
        sizes: (number of a segment, whether the run is bounded) -> the kernel of its sizes.
        checked: as of an `executable.program.Program`.
    """

    target: str
    model: str
    run_mode: RunMode
    program: DynamicProgram
    kernels: Mapping[Workload, ChosenKernel]
    sizes: Mapping[tuple[int, bool], Artifact]
    checked: str = ""

    @classmethod
    def of(
        cls,
        graph: DynamicGraph,
        target: Target,
        kernel: Callable[[Workload], ChosenKernel],
        *,
        sizes: SizeCode | None = None,
        run_mode: RunMode = "exact",
        model: str = "",
    ) -> DynamicBundle:
        """The bundle of a graph, whose kernels are there.

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
        return cls(target.key, model, run_mode, program, {each: kernel(each) for each in workloads}, sizes)

    @property
    def artifacts(self) -> list[Artifact]:
        return [*(each.artifact for each in self.kernels.values()), *self.sizes.values()]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file, signed by this machine. The same contents give the same bytes.

        Raises:
            UsageError: there is a file that is not an executable; it stays.
            DatabaseError: it cannot be written.
        """
        weights: dict[str, memoryview] = {}
        text = canonical_json(
            {
                "kind": DYNAMIC, "target": self.target, "model": self.model, "way": self.run_mode, "checked": self.checked,
                "workloads": [each.json for each in self.kernels],
                "kernels": [[one.artifact.sha256, asdict(one.origin)] for one in self.kernels.values()],
                "sizes": [[*place, artifact.sha256] for place, artifact in self.sizes.items()],
                "program": _writer(self.program, list(self.kernels), weights).write(self.program),
            }
        )  # fmt: skip
        code = {each.sha256: (each.sha256, each.plan.to_json(), each.code) for each in self.artifacts}
        executables.write(Path(path), self.target, seal(text), code.values(), weights.items())


def stored_bundle(path: Path, data: Any) -> DynamicBundle:
    """The bundle in a file of which the program's text was read, and is trusted.

    Raises:
        DatabaseError: code or weights are damaged, or the file has an older form.
        UnknownOperatorError: the package of an operator is not installed.
    """
    if "recipe" in data:
        raise DatabaseError(_outdated(path, data))
    with readable(path), executables.ExecutableFile(path) as file, _following():
        return _bundle(data, file)


def _bundle(data: Any, file: executables.ExecutableFile) -> DynamicBundle:
    """Raises FieldError or ProgramError for what no builder writes, and the errors of `stored_bundle`."""
    texts, lists = dict.fromkeys(("kind", "target", "model", "way", "checked"), str), ("workloads", "kernels", "sizes")
    check_object(data, {**texts, **dict.fromkeys(lists, list), "program": dict})
    require(data["way"] in RUN_MODES, f"way is {quoted(data['way'])}; allowed: {', '.join(RUN_MODES)}")
    workloads = [Workload.from_json(each) for each in data["workloads"]]
    program = _reader(workloads, file).read(DynamicProgram, data["program"])
    kernels = {
        workload: ChosenKernel(_artifact(file, sha256), Codec().read(Origin, origin))
        for workload, (sha256, origin) in zip(workloads, data["kernels"], strict=True)
    }
    sizes = {(number, bounded): _artifact(file, sha256) for number, bounded, sha256 in data["sizes"]}
    check(program, {workload: kernel.artifact.plan for workload, kernel in kernels.items()}, sizes.keys())
    return DynamicBundle(data["target"], data["model"], data["way"], program, kernels, sizes, data["checked"])


def _outdated(path: Path, data: JsonMapping) -> str:
    """What to do with a file of versions up to 5, which have the calls that made the graph."""
    sizes: dict[str, str] = {}
    with contextlib.suppress(ValueError, TypeError, LookupError):  # it only makes the command complete
        for method, args, _ in data["recipe"]:
            for each in args[1] if method == "input" else ():
                if isinstance(each, dict):
                    name, least, most = each["size"]
                    sizes[str(name)] = f"{name}={least}..{most}"
    dynamic = f" --dynamic {','.join(sizes.values())}" if sizes else ""
    return (
        f"{path} was built by an earlier version of schedsearch, which kept graphs in another form; build it again: "
        f"schedsearch build {data.get('model') or 'MODEL.onnx'}{dynamic} --run-mode {data.get('way')} -o {path}"
    )


@contextlib.contextmanager
def _following() -> Iterator[None]:
    """Turns what wrong data in fields of the right types leads to into ProgramError."""
    try:
        yield
    except (DatabaseError, UnknownOperatorError, FieldError, ProgramError):
        raise
    except (SchedsearchError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ProgramError(f"{type(error).__name__}: {error}") from error


# ---- the leaves of a program: workloads, shape functions and arrays


def _writer(program: DynamicProgram, workloads: list[Workload], weights: dict[str, memoryview]) -> Codec:
    """Writes programs. Workloads are numbers of a list, and the bytes of arrays go to `weights`."""
    numbers = {workload: number for number, workload in enumerate(workloads)}
    calls = [call for segment in program.segments for call in segment.calls]
    own = {id(each): (call.workload, name) for call in calls for name, each in call.shape_functions.items()}

    def of_function(each: ShapeFunction) -> Any:
        if each.made_by is not None:
            rule, params = each.made_by
            return {"rule": rule, "params": dict(params)}
        workload, output = own[id(each)]
        return {"workload": numbers[workload], "output": output}

    def of_array(array: Array) -> Any:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        sha256 = sha256_hex(bytes(data))
        weights[sha256] = data
        return {"sha256": sha256, "dtype": array.dtype.name, "shape": list(array.shape)}

    return Codec({Workload: numbers.__getitem__, ShapeFunction: of_function, np.ndarray: of_array})


def _reader(workloads: list[Workload], file: executables.ExecutableFile) -> Codec:
    """Inverse of `_writer`."""

    def workload(data: Any) -> Workload:
        require(type(data) is int and 0 <= data < len(workloads), f"there is no workload {quoted(data)}")
        found: Workload = workloads[data]
        return found

    def function_of(data: Any) -> ShapeFunction:
        if not isinstance(data, dict) or "rule" not in data:
            check_object(data, {"workload": int, "output": str})
            return workload(data["workload"]).shape_functions[data["output"]]
        check_object(data, {"rule": str, "params": dict})
        if data["rule"] not in RULES:
            raise FieldError(f"there is a rule {quoted(data['rule'])}, which this version does not know", later=True)
        return function(data["rule"], data["params"])

    def array(data: Any) -> Array:
        check_object(data, {"sha256": str, "dtype": str, "shape": list})
        return _array(data, file)

    return Codec({Workload: workload, ShapeFunction: function_of, np.ndarray: array})


def _digest(value: object) -> str:
    """A digest in a program. Raises ProgramError if it is not text."""
    require(isinstance(value, str), f"a digest is {quoted(value)}; allowed: a sha256")
    return str(value)


def _artifact(file: executables.ExecutableFile, sha256: Any) -> Artifact:
    plan, code = file.code(_digest(sha256))
    return Artifact(code, LaunchPlan.from_json(plan))


def _array(value: JsonMapping, file: executables.ExecutableFile) -> Array:
    name, shape = value["dtype"], value["shape"]
    try:
        dtype = np.dtype(name)
    except TypeError:  # a dtype that NumPy lacks
        import ml_dtypes

        found = getattr(ml_dtypes, DTYPES[name].library if name in DTYPES else name, None)
        require(found is not None, f"an array has the dtype {quoted(name)}, which there is not")
        dtype = np.dtype(found)
    data = file.weight(_digest(value["sha256"]), math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)
