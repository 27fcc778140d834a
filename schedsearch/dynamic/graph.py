"""Graphs of workloads whose sizes may be known only at run time, and their segments.

A *segment* is a run of calls whose sizes follow from what exists when the segment begins: extents, and the values of arrays
that earlier segments computed. One small kernel computes all sizes of a segment. A call whose shape function needs the
values of an array, or the counted extents of one, that its own segment would compute begins a new segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from schedsearch.errors import UsageError
from schedsearch.ops.declared_shapes import is_extents
from schedsearch.ops.dependence import EXTENTS, STRIDE, Dependence
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.sizes import SizeStep, Values, Words
from schedsearch.workload import Workload

POINTWISE = ("elementwise",)  # calls that compute whatever the buffer holds, at its bound


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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    words: Words | None = None
    sizes: Mapping[int, Size] = field(default_factory=dict)
    strided: bool = True
    counted: bool = False

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
    """A workload on values: argument -> value, output -> value."""

    name: str
    workload: Workload
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


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
    """

    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    segments: tuple[Segment, ...]
    words: int
    fixed: tuple[tuple[Words, tuple[int, ...]], ...]
    last: Words | None


class DynamicGraph:
    """Builds a `Program`: call `input`, `call` and `output`, then `program`.

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
        self._same: dict[str, str] = {}  # value -> the value whose extents it has

    def input(self, name: str, shape: Sequence[int | Size], dtype: str) -> str:
        """An array of the caller. Raises UsageError if the name is taken."""
        sizes = {axis: each for axis, each in enumerate(shape) if isinstance(each, Size)}
        self._add(Value(name, tuple(each.most if isinstance(each, Size) else each for each in shape), dtype, sizes=sizes))
        self._inputs.append(name)
        return name

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
            if array not in self._values:
                raise UsageError(f"{name} reads {array!r}, which nothing makes; allowed: {', '.join(self._values)}")
            value, spec = self._values[array], arguments[argument]
            if (value.shape, value.dtype) != (spec.shape, spec.dtype):
                is_, takes = f"{value.dtype} {list(value.shape)}", f"{spec.dtype} {list(spec.shape)}"
                raise UsageError(f"{name} takes {argument} as {takes}; {array} is {is_}")
        call = Call(name, workload, dict(zip(wanted, arrays)), {o.name: f"{name}.{o.name}" for o in workload.outputs})
        self._calls.append(call)
        for output in workload.outputs:
            if not is_extents(output.name, call.outputs):
                self._add(Value(call.outputs[output.name], output.shape, output.dtype))
        self._take_dynamic(call)
        return call.outputs[workload.outputs[0].name]

    def output(self, *names: str) -> None:
        """Raises UsageError if a value does not exist."""
        for name in names:
            if name not in self._values:
                raise UsageError(f"there is no value {name!r}; allowed: {', '.join(self._values)}")
        self._outputs += names

    def _add(self, value: Value) -> None:
        if value.name in self._values:
            raise UsageError(f"there are two values {value.name!r}; give each a name of its own")
        self._values[value.name] = value

    def _is_dynamic(self, name: str) -> bool:
        value = self._values[name]
        made = next((call for call in self._calls if name in call.outputs.values()), None)
        own = made is not None and any(made.outputs[output] == name for output in made.workload.shape_functions)
        return bool(value.sizes) or own or name in self._same

    def _take_dynamic(self, call: Call) -> None:
        """Checks that the call can take arrays whose extents are known at run time."""
        arguments = {argument.name for argument in call.workload.signature}
        for argument, array in call.inputs.items():
            if not self._is_dynamic(array) or f"{argument}{EXTENTS}" in arguments:
                continue
            output = call.workload.outputs[0]
            if call.workload.op not in POINTWISE or output.shape != self._values[array].shape:
                raise UsageError(
                    f"{call.name} ({call.workload.label}) takes {argument} of fixed extents; those of {array} are known at "
                    "run time only"
                )
            to = call.outputs[output.name]
            root = self._same.get(array, array)
            if self._same.setdefault(to, root) != root:
                raise UsageError(f"{call.name} reads {root} and {self._same[to]}, whose extents may differ")

    def program(self) -> Program:
        """The segments, and the places of all extents in the block of sizes.

        Raises:
            UsageError: there is no output.
        """
        if not self._outputs:
            raise UsageError("the graph has no output; name one by output(...)")
        return _Planner(self._values, self._inputs, self._outputs, self._calls, self._same).program()


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
                for output, function in call.workload.shape_functions.items():
                    if not function.counted:
                        at = self._place(call.outputs[output], at)
            fetched = Words(pending, at - pending) if at > pending else None
            pending = at
            for call in calls:
                for output, function in call.workload.shape_functions.items():
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
        own = {call.outputs[output] for call in self.calls for output in call.workload.shape_functions}
        for call in self.calls:
            for function in call.workload.shape_functions.values():
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
            for function in call.workload.shape_functions.values():
                for argument in function.inputs:
                    value = call.inputs[argument]
                    by_value = function.needs[argument] is Dependence.VALUE and not function.counted
                    waits |= value in made if by_value else self.same.get(value, value) in counted
            if waits:
                groups.append([])
                made, counted = set(), set()
            groups[-1].append(call)
            made |= set(call.outputs.values())
            counted |= {call.outputs[o] for o, function in call.workload.shape_functions.items() if function.counted}
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
        return self.words[root] if root in self.words else self.fixed[root]

    def _finished(self, name: str) -> Value:
        value = self.values[name]
        root = self.same.get(name, name)
        strided = True
        for call in self.calls:
            scalars = {scalar.name for scalar in call.workload.scalars}
            for mine, used in (*call.inputs.items(), *call.outputs.items()):
                strided &= used != name or f"{mine}{STRIDE}0" in scalars
        counted = any(
            call.outputs[output] == root and function.counted
            for call in self.calls
            for output, function in call.workload.shape_functions.items()
        )
        return replace(value, words=self.words.get(root), strided=strided, counted=counted)
