"""workload.yaml, version 1: what to tune, for which device, with what budget.

`load` reads a file and reports all of its mistakes at once, each with file, line and column. docs/workload-file.md
describes the format; `json_schema` gives it to editors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from schedsearch.errors import Problem, UnknownOperatorError, UsageError, WorkloadError
from schedsearch.ops import Op, operator, operator_names, operators
from schedsearch.ops.params import MAX_INT
from schedsearch.ops.registry import RECORDED_ONLY
from schedsearch.target import Target
from schedsearch.task import Task, range_tasks
from schedsearch.typed import JsonMapping, JsonObject
from schedsearch.workload import RANGE_TEXT, Workload, WorkloadRange
from schedsearch.workload_file.limits import TASK_STEPS, values_in
from schedsearch.workload_file.schema import (
    AUTO,
    AUTO_DTYPES,
    KERNEL_OP,
    Budget,
    FileModel,
    KernelTask,
    MeasureOptions,
    TaskOptions,
    TunerChoice,
    mistakes,
    show,
    sizes,
    task_model,
)
from schedsearch.workload_file.yaml_source import PathKey, WorkloadFileError, YamlSource

_Model = TypeVar("_Model", bound=BaseModel)
# From "kernels:matmul" and its arguments by name to the workload. It raises UsageError.
Kernels: TypeAlias = Callable[[str, JsonMapping], Workload]

_DEVICES = {"cuda": "GPU", "cpu": "CPU"}
MAX_ARRAY_BYTES = 1 << 40  # no device can hold an argument of a TiB


class Places:
    """The places of one task's keys in the file: under the task itself or under `defaults`."""

    def __init__(self, task: PathKey) -> None:
        self._task = task
        self._places: dict[PathKey, PathKey] = {}

    def add(self, path: PathKey, place: PathKey) -> None:
        self._places[path] = place

    def find(self, path: PathKey) -> PathKey:
        """The path in the file that belongs to a path in the task. In the task, sizes are not below `shape`."""
        if path and path[:1] not in self._places and ("shape", path[0]) in self._places:
            path = ("shape", *path)
        for end in range(len(path), 0, -1):
            if path[:end] in self._places:
                return (*self._places[path[:end]], *path[end:])
        return (*self._task, *path)


@dataclass(frozen=True)
class WorkloadFile:
    """The content of a workload file.

    Attributes:
        path: the path that was given, for messages.
        target: auto, cpu, cuda or cuda:N.
        db: path of the database of records, relative to the working directory.
    """

    path: str
    target: str
    budget: Budget
    tuner: TunerChoice
    measure: MeasureOptions
    db: str
    _tasks: Mapping[str, tuple[Task, ...]]  # by target kind; they are equal if no dtype is auto
    _source: YamlSource
    _places: tuple[Places, ...]  # of each task

    @classmethod
    def of_task(cls, name: str, task: Task, db: str) -> WorkloadFile:
        """The content of a file with one task and nothing else, for a task from elsewhere. Messages call it `name`."""
        return cls(
            path=name,
            target="auto",
            budget=Budget(),
            tuner=TunerChoice(),
            measure=MeasureOptions(),
            db=db,
            _tasks=dict.fromkeys(AUTO_DTYPES, (task,)),
            _source=YamlSource(name, "{}"),
            _places=(Places(()),),
        )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks in the order of the file.

        Raises:
            RuntimeError: a task's dtype is auto, and the file was not resolved for a target.
        """
        first, *others = self._tasks.values()
        if any(other != first for other in others):
            raise RuntimeError(f"{self.path} has a task with `dtype: auto`; call resolve(target) before reading tasks")
        return first

    def resolve(self, target: Target) -> WorkloadFile:
        """The same file with every `dtype: auto` replaced: float16 on a GPU, float32 on a CPU."""
        return dataclasses.replace(self, _tasks={target.kind: self._tasks[target.kind]})

    def where(self, task_index: int, *path: str | int) -> str:
        """The "file:line:column" of a key of a task, e.g. `where(0, "restrict", "bm")`, or of the nearest key around it."""
        span = self._source.span(self._locate(task_index, path), key=True)
        return f"{self.path}:{span.line}:{span.column}"

    def error(self, mistakes: Sequence[tuple[str, int, PathKey]]) -> WorkloadFileError:
        """An error of (message, index of the task, path to the key in it), for what only a template or a space can find."""
        for message, task_index, path in mistakes:
            self._source.report(self._locate(task_index, path), message, key=True)
        return WorkloadFileError(self._source.problems, self._source.lines)

    def _locate(self, task_index: int, path: PathKey) -> PathKey:
        return self._places[task_index].find(path)


def no_kernels(op: str, shape: Mapping[str, object]) -> Workload:
    """Raises UsageError: reading a file never runs another one that it names."""
    file = f"{op.partition(':')[0]}.py"
    raise UsageError(
        f"{op!r} is a kernel of your own in {file}; a Python file is run only if you name it: schedsearch tune ... "
        f"--kernels {file}"
    )


def load(
    path: str | Path, kernels: Kernels = no_kernels, look: Callable[[WorkloadFile], object] | None = None
) -> WorkloadFile:
    """Reads a workload file.

    Args:
        kernels: makes the workloads of tasks whose operator is a kernel of the user, such as "kernels:matmul".
        look: called if the file has mistakes, with a file of the tasks that have none, so that mistakes which only a
            template or a space can find (`WorkloadFile.error`) are listed with the others.

    Raises:
        WorkloadFileError: the file cannot be read, is not YAML, or asks for something impossible; the error lists all
            mistakes.
    """
    return _interpret(YamlSource.read(path), kernels, look)


def parse(text: str, name: str = "<text>", kernels: Kernels = no_kernels) -> WorkloadFile:
    """Reads the text of a workload file; messages call the file `name`.

    Raises:
        WorkloadFileError: as in `load`.
    """
    return _interpret(YamlSource(name, text), kernels)


def _interpret(source: YamlSource, kernels: Kernels, look: Callable[[WorkloadFile], object] | None = None) -> WorkloadFile:
    data = source.value
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else f"a workload file is a mapping, got {show(data)}"
        source.report((), f"{what}; it needs at least the key `tasks` with a list of tasks")
        source.raise_problems()
    model = _check(source, FileModel, data, Places(()))
    reader = _TaskReader(source, data.get("defaults"), kernels)
    tasks = data.get("tasks")
    for index, task in enumerate(tasks if isinstance(tasks, list) else []):
        reader.read(index, task)
    options = model or FileModel.model_construct()  # the defaults, to look at the tasks of a file that is wrong elsewhere
    file = WorkloadFile(
        path=source.name,
        target=options.target,
        budget=options.budget,
        tuner=options.tuner,
        measure=options.measure,
        db=options.db,
        _tasks={kind: tuple(tasks) for kind, tasks in reader.tasks.items()},
        _source=source,
        _places=tuple(reader.places_of_tasks),
    )
    if source.problems and look is not None and any(reader.tasks.values()):
        look(file)
    source.raise_problems()
    return file


def _check(source: YamlSource, model: type[_Model], data: object, places: Places, ops: tuple[Op, ...] = ()) -> _Model | None:
    """The model of some data; None if the data are wrong, after reporting the mistakes."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        for mistake in mistakes(model, error, ops):
            source.report(places.find(mistake.path), mistake.message, key=mistake.at_key)
        return None


def _check_sizes(workload: Workload) -> None:
    """Raises WorkloadError when an array is larger than any device. Sizes beyond 32 bits are reported elsewhere."""
    if any(isinstance(value, int) and value > MAX_INT for value in workload.params.values()):
        return
    for array in (*workload.signature, *workload.outputs):
        if array.nbytes > MAX_ARRAY_BYTES:
            took = f"{array.name}, {array.axes} = {'x'.join(map(str, array.shape))}, takes {_tebibytes(array.nbytes)}"
            raise WorkloadError([Problem("shape", f"{took}; an array of at most 1 TiB is possible")])


def _tebibytes(nbytes: int) -> str:
    whole = nbytes >> 40  # a product of many sizes is too large for a float
    return f"{nbytes / 2**40:.3g} TiB" if whole < 10**9 else "more than a billion TiB"


def _ranges(shape: object) -> dict[str, tuple[int, int]]:
    """The sizes that are written as a range, such as 1..64: name -> its bounds."""
    if not isinstance(shape, dict):
        return {}
    texts = {name: RANGE_TEXT.fullmatch(value) for name, value in shape.items() if isinstance(value, str)}
    return {name: (int(found[1]), int(found[2])) for name, found in texts.items() if found}


class _TaskReader:
    """Tasks in the order of the file. Each is merged with the defaults, checked, and made once for every kind of target."""

    def __init__(self, source: YamlSource, defaults: object, kernels: Kernels) -> None:
        self._kernels = kernels
        self.tasks: dict[str, list[Task]] = {kind: [] for kind in AUTO_DTYPES}
        self.places_of_tasks: list[Places] = []  # a range has several tasks of one place
        self._source = source
        self._defaults: JsonObject = defaults if isinstance(defaults, dict) else {}
        self._first: dict[
            tuple[str, str | Workload], int
        ] = {}  # name, or target kind and workload -> index of the first such task
        places = Places(("defaults",))
        self._all = tuple(operators()[0].values())
        _check(source, task_model(*self._all, named=False), self._defaults, places, self._all)

    def read(self, index: int, task: Any) -> None:
        """Appends one task to `tasks`, or reports its mistakes."""
        base: PathKey = ("tasks", index)
        places = Places(base)
        if not isinstance(task, dict):
            self._source.report(base, f"a task must be a mapping with the keys op and shape, got {show(task)}")
            return
        given = task.get("op", self._defaults.get("op"))
        if isinstance(given, str) and re.fullmatch(KERNEL_OP, given):
            self._read_kernel(index, task, places)
            return
        op, complaint = self._operator(given)
        ops = self._all if op is None else (op,)
        model = task_model(*ops)
        merged = self._merge(task, base, places, model, op)
        ranges = _ranges(merged.get("shape"))
        if ranges:
            merged = {**merged, "shape": {**merged["shape"], **{name: high for name, (_, high) in ranges.items()}}}
        self._source.take(TASK_STEPS + values_in(merged), base)
        options = _check(self._source, model, merged, places, ops)
        if op is None:
            self._source.report(places.find(("op",)), complaint)
        elif "shape" not in merged:
            meanings = ", ".join(f"{name} ({op.parameters()[name].doc})" for name in sizes(op))
            self._source.report(base, f"shape is missing; it must be a mapping of {meanings}")
        elif isinstance(merged["shape"], dict):
            workloads = self._workloads(op, merged, places)
            if options is not None and workloads:
                self._append(index, options, workloads, places, ranges)

    def _read_kernel(self, index: int, task: JsonObject, places: Places) -> None:
        """Appends a task with a kernel of the user. Of the defaults it takes everything but the sizes."""
        base: PathKey = ("tasks", index)
        merged = {key: value for key, value in self._defaults.items() if key in KernelTask.model_fields}
        merged = {**{key: value for key, value in merged.items() if key not in ("name", "shape")}, **task}
        for key in merged:
            places.add((key,), (*base, key) if key in task else ("defaults", key))
        for size in task["shape"] if isinstance(task.get("shape"), dict) else ():
            places.add(("shape", size), (*base, "shape", size))
        self._source.take(TASK_STEPS + values_in(merged), base)
        options = _check(self._source, KernelTask, merged, places)
        if options is None:
            return
        try:
            workload = self._kernels(merged["op"], options.shape or {})
            _check_sizes(workload)
        except WorkloadError as error:
            for problem in error.problems:
                self._source.report(places.find(("shape",)), problem.message)
        except UsageError as error:
            self._source.report(places.find(("op",)), str(error))
        else:
            self._append(index, options, dict.fromkeys(AUTO_DTYPES, workload), places)

    @staticmethod
    def _operator(given: object) -> tuple[Op | None, str]:
        """The operator that a task names; None after reporting why there is none."""
        allowed = f"allowed: {', '.join(sorted(operator_names()))}"
        if given is None:
            return None, f"op is missing; {allowed}"
        if not isinstance(given, str):
            return None, f"unknown operator {show(given)}; {allowed}"
        if given in RECORDED_ONLY:
            return None, f"operator {given!r} can be in records only; {allowed}"
        try:
            return operator(given), ""
        except UnknownOperatorError as error:
            return None, "; ".join(problem.message for problem in error.problems)

    def _merge(self, task: JsonObject, base: PathKey, places: Places, model: type[TaskOptions], op: Op | None) -> JsonObject:
        """A task merged with those defaults that are keys or sizes of its operator."""
        merged = {key: value for key, value in self._defaults.items() if key in model.model_fields}
        merged.pop("name", None)
        if op is not None and isinstance(merged.get("shape"), dict):
            others = {name for other in self._all for name in sizes(other)} - set(sizes(op))
            merged["shape"] = {name: value for name, value in merged["shape"].items() if name not in others}
        for key in merged:
            places.add((key,), ("defaults", key))
        for key, value in task.items():
            if key == "shape" and isinstance(value, dict) and isinstance(merged.get("shape"), dict):
                for size in merged["shape"]:
                    places.add(("shape", size), ("defaults", "shape", size))
                merged["shape"] = {**merged["shape"], **value}
            else:
                merged[key] = value
            places.add((key,), (*base, key))
            for size in value if key == "shape" and isinstance(value, dict) else ():
                places.add(("shape", size), (*base, "shape", size))
        return merged

    def _workloads(self, op: Op, merged: JsonObject, places: Places) -> dict[str, Workload]:
        """The workload for each kind of target; empty after reporting mistakes."""
        params = {**merged, **merged["shape"]}
        params = {name: params[name] for name in op.parameters() if name in params}
        auto = params.get("dtype") == AUTO
        workloads: dict[str, Workload] = {}
        for kind, dtype in AUTO_DTYPES.items():
            try:
                workload = Workload(op.name, {**params, "dtype": dtype} if auto else params)
                _check_sizes(workload)
                workloads[kind] = workload
            except WorkloadError as error:
                optional = op.defaults({})
                given = [problem for problem in error.problems if problem.key not in optional or problem.key in params]
                for problem in given or error.problems:  # without those that a default inherited, as out_dtype from dtype
                    inside = problem.key in sizes(op)
                    path = ("shape", problem.key) if inside else (problem.key, *problem.path)
                    dtype_matters = auto and problem.key in ("dtype", "out_dtype", "shape")
                    note = f" (dtype auto is {dtype} on a {_DEVICES[kind]})" if dtype_matters else ""
                    self._source.report(places.find(path), problem.message + note, key=problem.at_key)
        return workloads if len(workloads) == len(AUTO_DTYPES) else {}

    def _of_range(self, workload: Workload, ranges: Mapping[str, tuple[int, int]], places: Places) -> WorkloadRange | None:
        """The range of a task; None if it has none, or after reporting what is wrong with it."""
        if len(ranges) > 1:
            self._source.report(
                places.find(("shape", list(ranges)[1])),
                f"{' and '.join(ranges)} are ranges; only one size of a task may be a range",
            )
            return None
        for name, (low, high) in ranges.items():
            try:
                return workload.with_dynamic(name, low, high)
            except WorkloadError as error:
                for problem in error.problems:
                    self._source.report(places.find(("shape", name)), f"with {name} = {low}: {problem.message}")
            except UsageError as error:
                self._source.report(places.find(("shape", name)), str(error))
        return None

    def _append(
        self,
        index: int,
        options: TaskOptions,
        workloads: dict[str, Workload],
        places: Places,
        ranges: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        name: str | None = getattr(options, "name")  # noqa: B009  # a field of the model made for the operator
        if name is not None and (first := self._first.setdefault(("name", name), index)) != index:
            self._source.report(places.find(("name",)), f"task {first + 1} has the name {name!r} too; names must differ")
        for kind, workload in workloads.items():
            if (first := self._first.setdefault((kind, workload), index)) != index:
                message = (
                    f"this task is the same workload as task {first + 1}; keep one (`weight` gives it more of the budget)"
                )
                self._source.report(("tasks", index), message)
            task = Task(
                workload=workload,
                weight=options.weight,
                restrict={knob: tuple(values) for knob, values in options.restrict.items()},
                templates=None if options.templates is None else tuple(options.templates),
                name=name or "",
            )
            if not ranges:
                self.tasks[kind].append(task)
                if len(self.places_of_tasks) < len(self.tasks[kind]):
                    self.places_of_tasks.append(places)
            elif (of_range := self._of_range(workload, ranges, places)) is not None:
                several = range_tasks(of_range, task)
                self.tasks[kind] += several
                missing = len(self.tasks[kind]) - len(self.places_of_tasks)
                self.places_of_tasks += [places] * max(0, missing)
