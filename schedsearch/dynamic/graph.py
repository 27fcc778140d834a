"""Graphs of workloads whose sizes may be known only at run time, and their segments.

A *segment* is a run of calls whose sizes follow from what exists when the segment begins: extents, and the values of arrays
that earlier segments computed. One small kernel computes all sizes of a segment. A call whose shape function needs the
values of an array, or the counted extents of one, that its own segment would compute begins a new segment.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from schedsearch.dynamic.dims import Dim, Unknown, followed, same_dims, traced
from schedsearch.errors import UsageError
from schedsearch.ops.declared_shapes import is_extents
from schedsearch.ops.dependence import STRIDE, Dependence, ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.size_steps import SizeStep, Values, Words
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Size:
    """An extent that a caller chooses, from `least` to `most`.

    Raises:
        UsageError: the limits are reversed or negative.
    """

    name: str
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise UsageError(f"{self.name}={self.least}..{self.most}; allowed: LEAST..MOST with 0 <= LEAST <= MOST")


@dataclass(frozen=True)
class Value:
    """An array of the graph.

    Attributes:
        shape: its bound; with `words` None its shape.
        words: where its extents are in the block of sizes.
        sizes: of an input: axis -> the size that the caller chooses.
        strided: whether all calls that use it take its strides, so that it may have exactly its extents in memory.
        counted: the kernel that makes it counts its extents.
        view_of: the value whose memory it has; empty if it has memory of its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    words: Words | None = None
    sizes: Mapping[int, Size] = field(default_factory=dict)
    strided: bool = True
    counted: bool = False
    view_of: str = ""

    @property
    def nbytes(self) -> int:
        return self.bytes_of(self.shape)

    def bytes_of(self, extents: Sequence[int]) -> int:
        size = dtype_of(self.dtype).nbytes
        for extent in extents:
            size *= extent
        return size


@dataclass(frozen=True)
class Call:
    """A workload on values: argument -> value, output -> value.

    Attributes:
        shape_functions: output -> its shape function: the operator's own, or that of its rows.
    """

    name: str
    workload: Workload
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    shape_functions: Mapping[str, ShapeFunction]


@dataclass(frozen=True)
class Segment:
    """Attributes:
    steps: what its kernel of sizes computes, none if there is nothing to compute.
    values: for each step the name of the value.
    fetched: the words that the host reads before it can launch the calls in an exact run, if any.
    """

    calls: tuple[Call, ...]
    steps: tuple[SizeStep, ...]
    values: tuple[str, ...]
    fetched: Words | None


@dataclass(frozen=True)
class Program:
    """Attributes:
    words: of the block of sizes. The first are the statuses of the segments in bounded runs.
    fixed: words with extents that never change.
    last: counted extents of outputs that the host reads at the end of an exact run.
    constants: value -> its numbers.
    """

    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    segments: tuple[Segment, ...]
    words: int
    fixed: tuple[tuple[Words, tuple[int, ...]], ...]
    last: Words | None
    constants: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def _noted(build: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method that adds to a graph note its call in `DynamicGraph.recipe`, unless another such method calls it."""

    @functools.wraps(build)
    def noting(self: DynamicGraph, *args: Any, **named: Any) -> Any:
        outer, self._inside = self._inside, True
        try:
            result = build(self, *args, **named)
        finally:
            self._inside = outer
        if not outer:
            self.recipe.append((build.__name__, args, named))
        return result

    return noting


class DynamicGraph:
    """Builds a `Program`: call `input`, `call` and `output`, then `program`.

    Attributes:
        recipe: the calls that made the graph: method, arguments, named arguments. The same calls make the same graph.

    Example:
        >>> from schedsearch import dyn_strided_slice
        >>> graph = DynamicGraph()
        >>> x = graph.input("x", (64, 1024), "float16")
        >>> positions = [graph.input(name, (2,), "int64") for name in ("begin", "end", "strides")]
        >>> y = graph.call(dyn_strided_slice(x=(64, 1024)), x, *positions)
        >>> graph.output(y)
        >>> len(graph.program().segments)
        1
    """

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._calls: list[Call] = []
        self._same: dict[str, str] = {}  # value -> the value whose extents it has; a view has the first of them
        self._dims: dict[str, tuple[Dim, ...]] = {}
        self._sizes: dict[str, tuple[Size, Unknown]] = {}
        self._constants: dict[str, np.ndarray[Any, Any]] = {}
        self.recipe: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._inside = False

    @_noted
    def input(self, name: str, shape: Sequence[int | Size], dtype: str) -> str:
        """An array of the caller.

        Sizes of the same name are one size: a run checks that all inputs agree on it.

        Raises:
            UsageError: the name is taken, or a size of that name has other limits.
        """
        sizes = {axis: each for axis, each in enumerate(shape) if isinstance(each, Size)}
        for size in sizes.values():
            known, _ = self._sizes.setdefault(size.name, (size, Unknown(size.name)))
            if known != size:
                raise UsageError(
                    f"size {size.name} of {name} is {size.least}..{size.most}; before it was {known.least}..{known.most}"
                )
        dims = [self._sizes[each.name][1] if isinstance(each, Size) else each for each in shape]
        self._add(
            Value(name, tuple(each.most if isinstance(each, Size) else each for each in shape), dtype, sizes=sizes), dims
        )
        self._inputs.append(name)
        return name

    @_noted
    def constant(self, name: str, numbers: np.ndarray[Any, Any]) -> str:
        """An array that the graph brings along, e.g. a weight. Its format is that of NumPy's array.

        Raises:
            UsageError: the name is taken.
            WorkloadError: no operator computes with such numbers.
        """
        array = np.array(numbers, order="C")  # a copy: later changes of the caller's array do not count
        self._add(Value(name, array.shape, dtype_of(array.dtype.name).name), array.shape)
        self._constants[name] = array
        return name

    @_noted
    def view(self, array: str, shape: Sequence[int], name: str = "") -> str:
        """The same elements in another shape, without a copy: of an array whose extents never change any shape.

        An array of which only the first extent is known at run time may lose axes of extent 1, until one axis is left.

        Raises:
            UsageError: there is no such array, or the shape does not fit it.
        """
        value, shape = self._value(array, "a view"), tuple(shape)
        dims = self._dims[array]
        fixed = not any(isinstance(each, Unknown) for each in dims)
        squeezed = shape == value.shape[:1] and all(not isinstance(each, Unknown) and each == 1 for each in dims[1:])
        if math.prod(shape) != math.prod(value.shape) or not (fixed or squeezed):
            raise UsageError(
                f"{array} of {list(dims)} cannot be seen as {list(shape)}; allowed: as many elements, and of an array with "
                "extents that are known at run time only: its first axis, if all others are 1"
            )
        name = name or f"{array}.view{len(self._values)}"
        source = value.view_of or array
        self._add(Value(name, shape, value.dtype, view_of=source), shape if fixed else dims[:1])
        if not fixed:
            self._same[name] = self._same.get(array, array)
        return name

    @_noted
    def call(self, workload: Workload, *arrays: str, name: str = "") -> str:
        """Adds a call of a workload with one value for each argument, but none for arguments `NAME_extents`.

        Returns:
            The name of its first output.

        Raises:
            UsageError: values are missing or have a wrong shape or dtype, or the workload cannot take an array whose extents
                are known at run time.
        """
        name = name or f"{workload.op}{len(self._calls)}"
        arguments = {argument.name: argument for argument in workload.signature}
        wanted = [argument for argument in arguments if not is_extents(argument, arguments)]
        if len(arrays) != len(wanted):
            raise UsageError(f"{name} gets {len(arrays)} arrays; it takes {len(wanted)}: {', '.join(wanted)}")
        for argument, array in zip(wanted, arrays):
            value, spec = self._value(array, name), arguments[argument]
            if (value.shape, value.dtype) != (spec.shape, spec.dtype):
                is_, takes = f"{value.dtype} {list(value.shape)}", f"{spec.dtype} {list(spec.shape)}"
                raise UsageError(f"{name} takes {argument} as {takes}; {array} is {is_}")
        inputs = dict(zip(wanted, arrays))
        outputs = {output.name: f"{name}.{output.name}" for output in workload.outputs}
        functions = dict(workload.shape_functions)
        dims = {argument: self._dims[array] for argument, array in inputs.items()}
        same = same_dims(name, workload, dims)
        if same is not None:
            root = inputs[same]
            self._same[outputs[workload.outputs[0].name]] = self._same.get(root, root)
        elif rows := followed(name, workload, dims):
            functions[workload.outputs[0].name] = rows
        self._calls.append(Call(name, workload, inputs, outputs, functions))
        for output in workload.outputs:
            if is_extents(output.name, outputs):
                continue
            value = Value(outputs[output.name], output.shape, output.dtype)
            if output.name in functions:
                self._add(value, traced(value.name, workload.op, functions[output.name], dims, output.shape))
            else:
                self._add(value, output.shape if same is None else dims[same])
        return outputs[workload.outputs[0].name]

    @_noted
    def output(self, *names: str) -> None:
        """Raises UsageError if a value does not exist, or has no memory of its own."""
        for name in names:
            if self._value(name, "the output").view_of or name in self._constants:
                raise UsageError(f"{name} is a {'constant' if name in self._constants else 'view'}; name what a call makes")
        self._outputs += names

    def bound(self, name: str) -> Value:
        """A value as it was added: its shape is its bound. Raises UsageError if it does not exist."""
        return self._value(name, "a reader")

    def is_dynamic(self, name: str) -> bool:
        """Whether extents of a value are known at run time only."""
        return any(isinstance(each, Unknown) for each in self._dims[name])

    def _value(self, name: str, reader: str) -> Value:
        if name not in self._values:
            raise UsageError(f"{reader} reads {name!r}, which nothing makes; allowed: {', '.join(self._values)}")
        return self._values[name]

    def _add(self, value: Value, dims: Sequence[Dim]) -> None:
        if value.name in self._values:
            raise UsageError(f"there are two values {value.name!r}; give each a name of its own")
        self._values[value.name] = value
        self._dims[value.name] = tuple(dims)

    def program(self) -> Program:
        """The segments, and the places of all extents in the block of sizes.

        Raises:
            UsageError: there is no output.
        """
        if not self._outputs:
            raise UsageError("the graph has no output; name one by output(...)")
        program = _Planner(self._values, self._inputs, self._outputs, self._calls, self._same).program()
        return replace(program, constants=dict(self._constants))


class _Planner:
    def __init__(
        self,
        values: Mapping[str, Value],
        inputs: Sequence[str],
        outputs: Sequence[str],
        calls: Sequence[Call],
        same: Mapping[str, str],
    ) -> None:
        self.values, self.inputs, self.outputs, self.calls, self.same = dict(values), inputs, outputs, calls, same
        self.words: dict[str, Words] = {}
        self.fixed: dict[str, Words] = {}
        self.bounds = {name: value.shape for name, value in values.items()}

    def program(self) -> Program:
        groups = self._groups()
        at = len(groups)  # behind the statuses
        for name in self.inputs:
            if self.values[name].sizes:
                at = self._place(name, at)
        at = self._place_fixed(at)
        segments, pending = [], at
        for calls in groups:
            steps, values = [], []
            for call in calls:
                for output, function in call.shape_functions.items():
                    if not function.counted:
                        at = self._place(call.outputs[output], at)
            fetched = Words(pending, at - pending) if at > pending else None
            pending = at
            for call in calls:
                for output, function in call.shape_functions.items():
                    name = call.outputs[output]
                    if function.counted:
                        at = self._place(name, at)
                    else:
                        given = tuple(self._given(call, each, function.needs[each]) for each in function.inputs)
                        steps.append(SizeStep(function, given, self.words[name], self.values[name].shape))
                        values.append(name)
            segments.append(Segment(tuple(calls), tuple(steps), tuple(values), fetched))
        for name in list(self.values):
            self.values[name] = self._finished(name)
        last = Words(pending, at - pending) if at > pending else None
        fixed = tuple((words, self.values[name].shape) for name, words in self.fixed.items())
        return Program(self.values, tuple(self.inputs), tuple(self.outputs), tuple(segments), max(at, 1), fixed, last)

    def _place_fixed(self, at: int) -> int:
        """Places the extents of arrays whose shape is needed and never changes."""
        own = {call.outputs[output] for call in self.calls for output in call.shape_functions}
        for call in self.calls:
            for function in call.shape_functions.values():
                for argument in () if function.counted else function.inputs:
                    name = call.inputs[argument]
                    known = self.values[name].sizes or name in own or name in self.same or name in self.fixed
                    if function.needs[argument] is Dependence.SHAPE and not known:
                        self.fixed[name] = Words(at, len(self.values[name].shape))
                        at += len(self.values[name].shape)
        return at

    def _groups(self) -> list[list[Call]]:
        """The calls of each segment."""
        groups: list[list[Call]] = [[]]
        made: set[str] = set()  # by the current segment
        counted: set[str] = set()
        for call in self.calls:
            waits = False
            for function in call.shape_functions.values():
                for argument in function.inputs:
                    value = call.inputs[argument]
                    by_value = function.needs[argument] is Dependence.VALUE and not function.counted
                    source = self.values[value].view_of or value
                    waits |= source in made if by_value else self.same.get(value, value) in counted
            if waits:
                groups.append([])
                made, counted = set(), set()
            groups[-1].append(call)
            made |= set(call.outputs.values())
            counted |= {call.outputs[o] for o, function in call.shape_functions.items() if function.counted}
        return groups

    def _place(self, name: str, at: int) -> int:
        rank = len(self.bounds[name])
        self.words[name] = Words(at, rank)
        return at + rank

    def _given(self, call: Call, argument: str, need: Dependence) -> Words | Values:
        value = self.values[call.inputs[argument]]
        if need is Dependence.VALUE:
            count = 1
            for extent in value.shape:
                count *= extent
            return Values(value.name, value.dtype, count)
        root = self.same.get(value.name, value.name)
        return self._cut(root, value) or self.fixed[root]

    def _cut(self, root: str, value: Value) -> Words | None:
        """The words of a value with the extents of another, or of a view with the first of them."""
        return Words(self.words[root].first, len(value.shape)) if root in self.words else None

    def _finished(self, name: str) -> Value:
        value = self.values[name]
        root = self.same.get(name, name)
        strided, names = True, {name, *(each.name for each in self.values.values() if each.view_of == name)}
        for call in self.calls:
            scalars = {scalar.name for scalar in call.workload.scalars}
            for mine, used in (*call.inputs.items(), *call.outputs.items()):
                strided &= used not in names or f"{mine}{STRIDE}0" in scalars
        counted = any(
            call.outputs[output] == root and function.counted and not value.view_of
            for call in self.calls
            for output, function in call.shape_functions.items()
        )
        return replace(value, words=self._cut(root, value), strided=strided, counted=counted)
