"""Graphs of workloads whose sizes may be known only at run time; see `schedsearch.dynamic.program`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from schedsearch.dynamic.dims import Dim, Meeting, Unknown, followed, same_dims, traced
from schedsearch.dynamic.follow import Along, Margin, margin
from schedsearch.dynamic.numbers import MOST
from schedsearch.dynamic.numbers import function as rule_of
from schedsearch.dynamic.program import (
    DynamicCall,
    DynamicProgram,
    DynamicValue,
    Formula,
    Numbers,
    Segment,
    Shown,
    Size,
    axes_of_view,
)
from schedsearch.dynamic.segments import Segmentation
from schedsearch.errors import UsageError
from schedsearch.ops.declared_shapes import is_extents
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.typed import Array, GivenParams
from schedsearch.workload import Workload

__all__ = ["DynamicCall", "DynamicGraph", "DynamicProgram", "DynamicValue", "Segment", "Size"]


class DynamicGraph:
    """Builds a `DynamicProgram`: call `input`, `call` and `output`, then `program`.

    Examples:
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
        self._values: dict[str, DynamicValue] = {}
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._called: list[str] = []  # names of the outputs
        self._steps: list[DynamicCall | Numbers] = []
        self._same: dict[str, str] = {}  # value -> the value whose extents it has; a view has the first of them
        self._dims: dict[str, tuple[Dim, ...]] = {}
        self._sizes: dict[str, tuple[Size, Unknown]] = {}
        self._constants: dict[str, Array] = {}
        self._elements: dict[str, tuple[Dim, ...]] = {}  # of numbers and short constants
        self._margins: dict[str, dict[tuple[str, Margin, bool], str]] = {}  # memory -> what it has been filled with
        self.shows: dict[str, Shown] = {}  # value of the model that the graph was made from -> where its numbers are

    def input(self, name: str, shape: Sequence[int | Size], dtype: str) -> str:
        """An array of the caller.

        Sizes of the same name are one size: a run checks that all inputs agree on it.

        Raises:
            UsageError: the name is taken, or a size of that name has other limits.
        """
        sizes = {axis: each for axis, each in enumerate(shape) if isinstance(each, Size)}
        for size in sizes.values():
            known, _ = self._sizes.setdefault(size.name, (size, Unknown(size.name, chosen=True)))
            if known != size:
                raise UsageError(
                    f"size {size.name} of {name} is {size.least}..{size.most}; before it was {known.least}..{known.most}"
                )
        dims = [self._sizes[each.name][1] if isinstance(each, Size) else each for each in shape]
        self._add(
            DynamicValue(name, tuple(each.most if isinstance(each, Size) else each for each in shape), dtype, sizes=sizes),
            dims,
        )
        self._inputs.append(name)
        return name

    def constant(self, name: str, numbers: Array, dtype: str = "") -> str:
        """An array that the graph brings along, e.g. a weight.

        Args:
            dtype: its dtype where NumPy's array only has the bits; default: that of the array.

        Raises:
            UsageError: the name is taken.
            WorkloadError: no operator computes with such numbers.
        """
        array = np.array(numbers, order="C")  # a copy: later changes of the caller's array do not count
        self._add(DynamicValue(name, array.shape, dtype or dtype_of(array.dtype.name).name), array.shape)
        self._constants[name] = array
        if array.dtype.kind == "i" and array.size <= MOST:
            self._elements[name] = tuple(map(int, array.reshape(-1)))
        return name

    def numbers(self, name: str, count: int, rule: str, inputs: Sequence[str], params: GivenParams | None = None) -> str:
        """A row of int64 numbers that shapes are made of, such as the extents of an array or twice these.

        The kernel that computes sizes computes them too, so that they cost neither a call nor a copy to the host. Calls read
        them as an array, and shape functions by their values.

        Args:
            rule: one of `schedsearch.dynamic.numbers.RULES`, e.g. "extents".
            inputs: the values that it is computed from: an array, or other numbers.
            params: of the rule.

        Raises:
            UsageError: the name is taken, or a value does not exist.
        """
        function = rule_of(rule, params or {})
        given = dict(zip(function.inputs, inputs, strict=True))
        for value in inputs:
            self._value(value, name)
        if not 1 <= count <= MOST:
            raise UsageError(f"{name} has {count} numbers; allowed: 1 to {MOST}")
        self._add(DynamicValue(name, (count,), "int64", numbers=True), (count,))
        self._steps.append(Numbers(name, function, given))
        self._elements[name] = traced(name, "", function, *self._known(given), (count,) * count)
        return name

    def elements(self, name: str) -> tuple[Dim, ...] | None:
        """What is known of each of the numbers; None of an array of which nothing is."""
        return self._elements.get(name)

    def dims(self, name: str) -> tuple[Dim, ...]:
        """What is known of the extents of a value."""
        return self._dims[name]

    def view(self, array: str, shape: Sequence[int], name: str = "") -> str:
        """The same elements in another shape, without a copy.

        An array of which only the first extent is known at run time keeps this axis. One of which others are keeps all axes
        but those of extent 1.

        Raises:
            UsageError: there is no such array, or the shape does not fit it.
        """
        value, shape = self._value(array, "a view"), tuple(shape)
        dims = self._dims[array]
        fixed = not any(isinstance(each, Unknown) for each in dims)
        places = axes_of_view(value.shape, shape, [isinstance(each, Unknown) for each in dims])
        if math.prod(shape) != math.prod(value.shape) or not (fixed or places) or value.numbers:
            raise UsageError(
                f"{array} of {list(dims)} cannot be seen as {list(shape)}; allowed: as many elements, and of an array with "
                "extents that are known at run time only: with the same first axis, if the others are known, or with all "
                "axes but those of extent 1"
            )
        name = name or f"{array}.view{len(self._values)}"
        source = value.view_of or array
        places = places or (-1,) * len(shape)
        seen = [dims[place] if place >= 0 else extent for place, extent in zip(places, shape)]
        self._add(DynamicValue(name, shape, value.dtype, view_of=source), shape if fixed else seen)
        if not fixed and len(shape) == 1:
            self._same[name] = self._same.get(array, array)
        elif not fixed:
            self._steps.append(Numbers(name, rule_of("view", {"shape": list(shape), "places": list(places)}), {"x": array}))
        return name

    def call(
        self,
        workload: Workload,
        *arrays: str,
        name: str = "",
        scalars: Mapping[str, float] | None = None,
        source: str = "",
    ) -> str:
        """Adds a call of a workload with one value for each argument, but none for arguments `NAME_extents`.

        Args:
            scalars: call-time scalars whose values are not the defaults.
            source: what the call stands for, such as "node pick (Gather)", for messages.

        Returns:
            The name of its first output.

        Raises:
            UsageError: values are missing or have a wrong shape or dtype, or the workload cannot take an array whose extents
                are known at run time.
        """
        name = name or f"{workload.op}{len(self._steps)}"
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
        if (read := margin(workload)) is not None:
            inputs["x"] = self._with_margin(inputs["x"], read, f"margin of {name}", source)
        outputs = {output.name: f"{name}.{output.name}" for output in workload.outputs}
        functions = dict(workload.shape_functions)
        dims = {argument: self._dims[array] for argument, array in inputs.items()}
        what = source or name
        meetings: list[Meeting] = []
        same = same_dims(what, workload, dims, meetings)
        if same is not None:
            root = inputs[same]
            self._same[outputs[workload.outputs[0].name]] = self._same.get(root, root)
        elif rows := followed(what, workload, dims, meetings):
            functions[workload.outputs[0].name] = rows
        for one, other, axes in meetings:
            columns = {name: [getattr(along, name) for _, along in axes] for name in Along._fields}
            params = {"place": [place for place, _ in axes], **columns}
            self.numbers(self.unused(f"{what}: {one} and {other}"), 1, "agree", [inputs[one], inputs[other]], params)
        self._steps.append(DynamicCall(name, workload, inputs, outputs, functions, dict(scalars or {}), source))
        for output in workload.outputs:
            if is_extents(output.name, outputs):
                continue
            value = DynamicValue(outputs[output.name], output.shape, output.dtype)
            if output.name in functions:
                self._add(value, traced(value.name, workload.op, functions[output.name], *self._known(inputs), output.shape))
            else:
                self._add(value, output.shape if same is None else dims[same])
        return outputs[workload.outputs[0].name]

    def filled(self, array: str, axes: Sequence[int], value: str = "zero", *, source: str = "") -> str:
        """The array up to its bound along some axes, with one number in all that lies beyond its extents there.

        Args:
            value: "zero" or "lowest", as of `schedsearch.fill_margin`.
            source: as of `call`.
        """
        bound = self._value(array, "filled").shape
        width = tuple(extent if axis in axes else 0 for axis, extent in enumerate(bound))
        return self._with_margin(array, Margin(width, value), f"{array} filled", source, whole=axes)

    def _with_margin(self, array: str, read: Margin, name: str, source: str, whole: Sequence[int] = ()) -> str:
        """The array with numbers beyond its extents that stand for padding, in its own memory if nothing else is there.

        Args:
            whole: axes along which the result counts up to the bound.
        """
        unknown = [isinstance(each, Unknown) for each in self._dims[array]]
        width = tuple(n if open_ else 0 for n, open_ in zip(read.width, unknown))
        if not any(width):
            return array
        value = self._value(array, name)
        memory = value.view_of or array
        made, wanted = self._margins.setdefault(memory, {}), (array, Margin(width, read.value), bool(whole))
        if wanted not in made:
            params = {"x": value.shape, "margin": width, "value": read.value, "dtype": value.dtype}
            workload, name = Workload("fill_margin", params), self.unused(name)
            in_place = all(other.value == read.value for _, other, _ in made)
            y = DynamicValue(f"{name}.y", value.shape, value.dtype, view_of=memory if in_place else "")
            left = tuple(-1 if axis in whole else axis for axis in range(len(value.shape)))
            dims = [self._dims[array][axis] if axis >= 0 else extent for axis, extent in zip(left, value.shape)]
            counts = whole and any(isinstance(each, Unknown) for each in dims)
            view = {"shape": list(value.shape), "places": list(left)}
            functions = {"y": rule_of("view", view)} if counts else {}
            self._steps.append(DynamicCall(name, workload, {"x": array}, {"y": y.name}, functions, {}, source))
            if not whole:
                self._same[y.name] = self._same.get(array, array)
            self._add(y, dims)
            made[wanted] = y.name
        return made[wanted]

    def output(self, *names: str, called: str = "") -> None:
        """Values that a run returns.

        Args:
            called: what executables call the output, if it is one; default: the value's name.

        Raises:
            UsageError: a value does not exist, or is no array that an input or a call makes.
        """
        for name in names:
            value = self._value(name, "the output")
            if (value.view_of or name) in self._constants or value.numbers:
                what = "a row of numbers" if value.numbers else "a constant"
                raise UsageError(f"{name} is {what}; name an input, what a call makes, or a view of these")
        self._outputs += names
        self._called += [called or name for name in names]

    def unused(self, name: str) -> str:
        """The name, or the name with a number, that no value and no call has."""
        used = {*self._values, *(step.name for step in self._steps)}
        return next(each for each in (name, *(f"{name}.{n}" for n in range(2, len(used) + 3))) if each not in used)

    def bound(self, name: str) -> DynamicValue:
        """A value as it was added: its shape is its bound. Raises UsageError if it does not exist."""
        return self._value(name, "a reader")

    @property
    def constants(self) -> Mapping[str, Array]:
        """The arrays that the graph brings along."""
        return self._constants

    def is_dynamic(self, name: str) -> bool:
        """Whether extents of a value are known at run time only."""
        return any(isinstance(each, Unknown) for each in self._dims[name])

    def _host_knows(self) -> dict[str, tuple[int | Formula, ...]]:
        """The extents that follow from those of the inputs: a run need not fetch them."""
        formulas = {name: [self._formula(each) for each in dims] for name, dims in self._dims.items()}
        return {name: tuple(found) for name, found in formulas.items() if None not in found}  # type: ignore[arg-type]

    def _formula(self, dim: Dim) -> int | Formula | None:
        """What an extent is at given sizes; None if it does not follow from them."""
        if not isinstance(dim, Unknown):
            return dim
        base: str | int | Formula | None = next((size.name for size, each in self._sizes.values() if each is dim.base), None)
        if base is None and dim.base is not dim:
            base = self._formula(dim.base)
        return Formula(base, *dim.line) if isinstance(base, str | Formula) else None

    def _known(self, inputs: Mapping[str, str]) -> tuple[dict[str, Sequence[Dim]], dict[str, Sequence[Dim]]]:
        """What is known of the extents of each input, and of its elements."""
        elements: dict[str, Sequence[Dim]] = {
            each: self._elements[value] for each, value in inputs.items() if value in self._elements
        }
        return {each: self._dims[value] for each, value in inputs.items()}, elements

    def _value(self, name: str, reader: str) -> DynamicValue:
        if name not in self._values:
            raise UsageError(f"{reader} reads {name!r}, which nothing makes; allowed: {', '.join(self._values)}")
        return self._values[name]

    def _add(self, value: DynamicValue, dims: Sequence[Dim]) -> None:
        if value.name in self._values:
            raise UsageError(f"there are two values {value.name!r}; give each a name of its own")
        self._values[value.name] = value
        # An extent below its bound is open even if its number is known: what lies beyond it is undefined.
        self._dims[value.name] = tuple(
            dim if isinstance(dim, Unknown) or dim == most else Unknown(f"{value.name}:{axis}")
            for axis, (dim, most) in enumerate(zip(dims, value.shape, strict=True))
        )

    def program(self) -> DynamicProgram:
        """The segments, and the places of all extents in the block of sizes.

        Raises:
            UsageError: there is no output.
        """
        if not self._outputs:
            raise UsageError("the graph has no output; name one by output(...)")
        program = Segmentation(
            self._values, self._inputs, self._outputs, self._steps, self._same, self._host_knows()
        ).program()
        shows = {name: each for name, each in self.shows.items() if each.name in program.values}
        return replace(program, constants=dict(self._constants), called=tuple(self._called), shows=shows)
