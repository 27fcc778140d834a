"""pad: y is x with elements of one value before and after it, along any dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.data_movement import (
    AXES,
    DTYPE,
    DataMovement,
    MovementParams,
    axis_numbers,
    axis_problems,
    extents,
    shown,
    too_large,
)
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.dtypes import encode
from schedsearch.ops.movement import Box, Factor, Movement, Ragged, row_strides
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.slices import SLICE_OF, slice_words, sliced
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import Array, ParamsByName


def _counts(doc: str) -> Parameter:
    one = {"type": "integer", "minimum": -MAX_INT, "maximum": MAX_INT}
    return Parameter(doc, {"type": "array", "items": one, "maxItems": len(AXES), "default": []})


@dataclass(frozen=True, eq=False, kw_only=True)
class PadParams(MovementParams):
    """See `pad`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them"))
    before: tuple[int, ...] = declared(_counts("elements before x along each dimension; negative ones cut x; default 0"))
    after: tuple[int, ...] = declared(_counts("elements after x along each dimension; negative ones cut x; default 0"))
    axes: tuple[int, ...] = declared(
        axis_numbers("dimensions that before and after are about; default: 0, 1, ...", default=())
    )
    value: float = declared(Parameter("of the new elements, rounded to the dtype", {"type": "number", "default": 0}))
    dtype: str = declared(DTYPE)
    slice_of: tuple[int, ...] = declared(SLICE_OF)


class Pad(DataMovement[PadParams]):
    """As ONNX's Pad with constant inputs and mode constant, and as TVM's pad.

    Workloads keep `before` and `after` of all dimensions, so that equal paddings have equal ids.
    """

    params_type: ClassVar[type[Params]] = PadParams
    name: ClassVar[str] = "pad"
    constructor: ClassVar[str] = "schedsearch:pad"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        found, problems = super().normalise(params)
        if problems:
            return found, problems
        found["before"], found["after"] = _padding(self.typed(found))
        found["axes"] = ()
        value = found["value"]
        found["value"] = float(value) + 0.0 if dtype_of(found["dtype"]).is_float else int(value)  # no -0.0
        return found, []

    def problems(self, params: PadParams) -> Iterable[Problem]:
        rank, axes = len(params.x), params.axes
        found = axis_problems("axes", axes, rank)
        for name in ("before", "after"):
            count = len(params[name])
            if axes and count not in (len(axes), 0):
                found.append(Problem(name, f"{name} has {count} entries, axes has {len(axes)}; give one for each of axes"))
            elif count > rank:
                found.append(Problem(name, f"{name} has {count} entries, but x has {rank} dimensions; give at most {rank}"))
        found += _value_problems(params)
        if found:
            return found
        before, after = _padding(params)
        for axis, (low, extent, high) in enumerate(zip(before, params.x, after)):
            if not 0 <= low + extent + high <= MAX_INT:
                text = f"y has {low} + {extent} + {high} = {low + extent + high} along dimension {axis}"
                return [Problem("before" if low < 0 else "after", f"{text}; allowed: 0 to {MAX_INT}")]
        return too_large("x", self._shape(params), dtype_of(params.dtype).nbytes)

    def _shape(self, params: PadParams) -> tuple[int, ...]:
        return tuple(low + extent + high for low, extent, high in zip(_padding(params)[0], params.x, _padding(params)[1]))

    def arguments(self, params: PadParams) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype),)

    def outputs(self, params: PadParams) -> tuple[ArgSpec, ...]:
        shape = self._shape(params)
        return (sliced(ArgSpec("y", AXES[: len(shape)], shape, params.dtype), params),)

    def work(self, params: PadParams) -> Work:
        """Elements of x that are in y are read once, and y is written. Elements that are cut need not be read."""
        element_bytes, kept = dtype_of(params.dtype).nbytes, 1
        for low, extent, high in zip(params.before, params.x, params.after):
            kept *= max(extent + min(low, 0) + min(high, 0), 0)
        nbytes = kept * element_bytes + self.outputs(params)[0].nbytes
        return Work(0, nbytes, least_bytes=nbytes)

    def fill(self, params: PadParams) -> float:
        return params.value

    def movement(self, params: PadParams) -> Movement:
        row, shape = dtype_of(params.dtype), self._shape(params)
        if 0 in shape:
            return Movement(row.nbytes, ())
        factors: list[Factor] = []
        ragged: list[Ragged] = []
        start = 0
        for low, extent, length, x, y in zip(
            params.before, params.x, shape, row_strides(params.x), row_strides(params.slice_of or shape)
        ):
            start -= low * x
            axis = -1
            if low > 0 or low + extent < length:
                axis = len(ragged)
                ragged.append(Ragged(max(low + extent, 0), length, first=max(low, 0)))
            factors.append(Factor(length, x, y, axis))
        box = Box.of("x", factors, x_start=start, ragged=ragged)
        return Movement(row.nbytes, (box,), _bits(params.value, params.dtype))

    def sources(self, params: PadParams, flat_indices: Array) -> tuple[Array, Array]:
        import numpy as np

        index = np.unravel_index(flat_indices, self._shape(params))
        at = [place - low for place, low in zip(index, params.before)]
        inside = np.all([(place >= 0) & (place < extent) for place, extent in zip(at, params.x)], axis=0)
        clipped = [np.clip(place, 0, extent - 1) for place, extent in zip(at, params.x)]
        return np.where(inside, 0, -1), np.ravel_multi_index(clipped, params.x)

    def label(self, params: PadParams) -> str:
        around = ",".join(f"{low}+{high}" for low, high in zip(params.before, params.after))
        value = f" with {params.value:g}" if params.value else ""
        words = [f"pad {shown(params.x)} by {around}{value} {dtype_of(params.dtype).short}", *slice_words(params)]
        return " ".join(words)


PAD = Pad()


def _padding(params: PadParams) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements before and after x along every dimension."""
    rank = len(params.x)
    axes = [axis % rank for axis in params.axes] or range(rank)
    before, after = (dict(zip(axes, params[name])) for name in ("before", "after"))
    return tuple(before.get(axis, 0) for axis in range(rank)), tuple(after.get(axis, 0) for axis in range(rank))


def _value_problems(params: PadParams) -> list[Problem]:
    row, value = dtype_of(params.dtype), params.value
    if not row.lowest <= value <= row.largest:
        return [Problem("value", f"value is {value}, {params.dtype} holds {row.lowest} to {row.largest}; give one of these")]
    if not row.is_float and value != int(value):
        return [Problem("value", f"value is {value}, but {params.dtype} holds integers; give {round(value)}")]
    return []


def _bits(value: float, dtype: str) -> int:
    """The bits of a number in a format, as an unsigned integer."""
    import numpy as np

    stored = encode(np.array([value]), dtype)
    return int(stored.view(f"u{stored.dtype.itemsize}")[0])
