"""dyn_strided_slice: a strided slice whose positions are arrays on the device, such as the results of other operators.

The rules are those of strided_slice: a negative begin or end counts from the end of its dimension, what lies beyond the
dimension is cut to it, a negative stride goes backwards, and a slice may be empty. y has the strides of its bound; its
extents are an output of their own. TVM calls the operator dyn.strided_slice; ONNX's Slice is the same with mode end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, axis_numbers, axis_problems, extents, shown, too_large, whole_numbers
from schedsearch.ops.dependence import STRIDE, Dependence, ShapeFunction
from schedsearch.ops.dtypes import DTYPES as ALL_DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.movement import row_strides
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, ScalarSpec, Work
from schedsearch.ops.strided_slice import MODES
from schedsearch.typed import GivenParams

DTYPES = tuple(name for name, row in ALL_DTYPES.items() if row.nbytes in (1, 2, 4, 8))
INDEX_DTYPES = ("int64", "int32")
FAR = 1 << 40  # beyond every extent; strides are cut to it, so that their arithmetic stays within int64
_FAR_INDEX = 2**31 - 128  # the same of an int32 that is also a float32


@dataclass(frozen=True, eq=False, kw_only=True)
class DynStridedSliceParams(Params):
    """See `dyn_strided_slice`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them; upper bounds with dynamic"))
    entries: int = declared(
        Parameter("entries of begin, end and strides", {"type": "integer", "minimum": 1, "maximum": len(AXES)})
    )
    axes: tuple[int, ...] = declared(axis_numbers("dimensions that the entries are about; default: 0, 1, ...", default=()))
    mode: str = declared(
        Parameter.choice("what end means: end (a position) or size (a count, -1 for all that follow)", MODES)
    )
    strided: bool = declared(
        Parameter("whether there is an argument strides; default true", {"type": "boolean", "default": True})
    )
    bound: tuple[int, ...] = declared(
        Parameter(
            "upper bounds of the extents of y; default: those of x",
            {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": MAX_INT}, "maxItems": len(AXES)},
        )
    )
    dynamic: bool = declared(
        Parameter("whether x_extents holds the extents of x; default false", {"type": "boolean", "default": False})
    )
    dtype: str = declared(Parameter.choice("of x and y: any of 1, 2, 4 or 8 bytes; default float16", DTYPES, "float16"))
    index_dtype: str = declared(Parameter.choice("of begin, end and strides", INDEX_DTYPES))


# ---- the slice of one dimension, as shape functions and kernels compute it; all numbers are int64


def first_position(extent: Any, begin: Any, stride: Any) -> Any:
    """The first position, or where it would be: -1 or `extent` if there is none."""
    at = begin + extent if begin < 0 else begin
    if stride > 0:
        return min(max(at, 0), extent)
    return min(max(at, -1), extent - 1)


def count_to(extent: Any, begin: Any, end: Any, stride: Any) -> Any:
    """The number of positions from begin to before end; the stride is not 0."""
    step = min(max(stride, -FAR), FAR)
    first, last = first_position(extent, begin, step), first_position(extent, end, step)
    distance, size = last - first if step > 0 else first - last, abs(step)
    if size == 1:
        return max(0, distance)
    return max(0, (distance + size - 1) // size)


def count_of_size(extent: Any, begin: Any, size: Any) -> Any:
    """The number of positions in mode size."""
    left = extent - first_position(extent, begin, 1)
    return left if size < 0 else min(size, left)


class DynStridedSlice(Op[DynStridedSliceParams]):
    """y[i, j, ...] = x[begin[0] + i * strides[0], begin[1] + j * strides[1], ...], with positions on the device.

    Scalars: `x_stride_0` ... and `y_stride_0` ... are the distances in elements between neighbours along each dimension;
    by default those of contiguous arrays of the declared shapes. A caller who has allocated x or y of its true extents
    gives the strides of these.

    Where a stride is 0, a size is below -1 or y would exceed its bound, all extents of y become 0, and nothing is written.
    """

    params_type: ClassVar[type[Params]] = DynStridedSliceParams
    name: ClassVar[str] = "dyn_strided_slice"
    reference: ClassVar[str] = "schedsearch.templates.dyn_strided_slice.reference:DynStridedSliceReference"
    constructor: ClassVar[str] = "schedsearch:dyn_strided_slice"

    def defaults(self, params: GivenParams) -> GivenParams:
        x = tuple(params.get("x", ()))
        axes = params.get("axes") or ()
        found = {**super().defaults(params), "entries": len(axes) or len(x), "bound": x}
        if params.get("mode") == "size":
            found["strided"] = False
        return found

    def problems(self, params: DynStridedSliceParams) -> Iterable[Problem]:
        rank, axes, entries = len(params.x), params.axes, params.entries
        found = axis_problems("axes", axes, rank)
        if axes and entries != len(axes):
            found.append(Problem("entries", f"entries is {entries}, axes has {len(axes)}; give one entry for each of axes"))
        elif entries > rank:
            found.append(Problem("entries", f"entries is {entries}, but x has {rank} dimensions; give at most {rank}"))
        if len(params.bound) != rank:
            found.append(Problem("bound", f"bound has {len(params.bound)} extents, x has {rank}; give one for each"))
        if params.mode == "size" and params.strided:
            found.append(Problem("strided", "strided is true; mode size counts neighbours: give strided: false"))
        nbytes = dtype_of(params.dtype).nbytes
        return found or too_large("x", params.x, nbytes) or too_large("bound", params.bound, nbytes)

    def arguments(self, params: DynStridedSliceParams) -> tuple[ArgSpec, ...]:
        rank, dynamic = len(params.x), params.dynamic
        extents_of_x = "x_extents" if dynamic else ""
        found = [ArgSpec("x", AXES[:rank], params.x, params.dtype, extents=extents_of_x)]
        found += [ArgSpec("x_extents", "A", (rank,), "int64")] if dynamic else []
        names = ("begin", "end", "strides") if params.strided else ("begin", "end")
        return (*found, *(ArgSpec(name, "A", (params.entries,), params.index_dtype) for name in names))

    def outputs(self, params: DynStridedSliceParams) -> tuple[ArgSpec, ...]:
        rank = len(params.x)
        y = ArgSpec("y", AXES[:rank], params.bound, params.dtype, extents="y_extents")
        return y, ArgSpec("y_extents", "A", (rank,), "int64")

    def shape_functions(self, params: DynStridedSliceParams) -> Mapping[str, ShapeFunction]:
        return {"y": shape_function(sliced_by(params), params.mode, params.strided)}

    def scalars(self, params: DynStridedSliceParams) -> tuple[ScalarSpec, ...]:
        return tuple(
            ScalarSpec(f"{name}{STRIDE}{axis}", stride, dtype="int64")
            for name, shape in (("x", params.x), ("y", params.bound))
            for axis, stride in enumerate(row_strides(shape))
        )

    def work(self, params: DynStridedSliceParams) -> Work:
        """The largest possible slice, read and written."""
        arrays = {array.name: array for array in (*self.arguments(params), *self.outputs(params))}
        others = sum(array.nbytes for name, array in arrays.items() if name not in ("x", "y"))
        return Work(0, arrays["y"].nbytes + min(arrays["x"].nbytes, arrays["y"].nbytes) + others, least_bytes=0)

    def equality(self, params: DynStridedSliceParams) -> Literal["exact", "rounded"]:
        return "exact"

    def check_inputs(self, params: DynStridedSliceParams) -> Mapping[str, Domain]:
        """Slices with a few elements less than x, forwards; then others, backwards. Extents of x are cut to their bounds."""
        far = _FAR_INDEX
        to_end = params.mode == "end"
        found = {
            "x": whole_numbers(params.dtype),
            "x_extents": Domain((far, max(params.x) - 1)),
            "begin": Domain((0, 1), second=Domain((-1, -2))),
            "end": Domain((far, -1) if to_end else (-1, 3), second=Domain((-far,) if to_end else (2, far))),
            "strides": Domain((1, 2), second=Domain((-1, -2))),
        }
        return {argument.name: found[argument.name] for argument in self.arguments(params)}

    def timing_inputs(self, params: DynStridedSliceParams) -> Mapping[str, Domain]:
        """The whole x."""
        every = {"x_extents": _FAR_INDEX, "begin": 0, "end": _FAR_INDEX, "strides": 1}
        return {argument.name: Domain((every[argument.name],)) for argument in self.arguments(params)[1:]}

    def label(self, params: DynStridedSliceParams) -> str:
        axes = f" axes {','.join(map(str, params.axes))}" if params.axes else ""
        bound = "" if params.bound == params.x else f" to {shown(params.bound)}"
        mode = " size" if params.mode == "size" else ""
        return f"dyn_strided_slice {shown(params.x)}{axes}{mode}{bound} {dtype_of(params.dtype).short}"


DYN_STRIDED_SLICE = DynStridedSlice()


def sliced_by(params: DynStridedSliceParams) -> tuple[int, ...]:
    """For each dimension of x the entry of begin, end and strides that is about it, or -1."""
    rank = len(params.x)
    axes = [axis % rank for axis in params.axes] or range(params.entries)
    return tuple({axis: entry for entry, axis in enumerate(axes)}.get(axis, -1) for axis in range(rank))


@functools.cache
def shape_function(entry_of: tuple[int, ...], mode: str, strided: bool) -> ShapeFunction:
    """The extents of y; see `sliced_by`."""

    def to_end(axis: Any, x: Any, begin: Any, end: Any) -> Any:
        entry = entry_of[axis]
        return x[axis] if entry < 0 else count_to(x[axis], begin[entry], end[entry], 1)

    def to_end_by_strides(axis: Any, x: Any, begin: Any, end: Any, strides: Any) -> Any:
        entry = entry_of[axis]
        return x[axis] if entry < 0 else count_to(x[axis], begin[entry], end[entry], strides[entry])

    def by_size(axis: Any, x: Any, begin: Any, end: Any) -> Any:
        entry = entry_of[axis]
        return x[axis] if entry < 0 else count_of_size(x[axis], begin[entry], end[entry])

    def no_stride(x: Any, begin: Any, end: Any, strides: Any) -> Any:
        for entry in range(len(strides)):
            if strides[entry] == 0:
                return 1
        return 0

    def no_size(x: Any, begin: Any, end: Any) -> Any:
        for entry in range(len(end)):
            if end[entry] < -1:
                return 1
        return 0

    needs = {"x": Dependence.SHAPE, "begin": Dependence.VALUE, "end": Dependence.VALUE}
    if mode == "size":
        return ShapeFunction(
            needs, by_size, no_size, ("end has a size below -1; allowed: a count, or -1 for all that follow",)
        )
    if not strided:
        return ShapeFunction(needs, to_end)
    message = "strides has 0; allowed: positive numbers, or negative ones to go backwards"
    return ShapeFunction({**needs, "strides": Dependence.VALUE}, to_end_by_strides, no_stride, (message,))
