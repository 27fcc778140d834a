"""Where a position of y lies in x, for kernels that learn the sizes of both when they run: `axes` at run time.

A thread computes the line of each axis once. Each position then takes one division. All arithmetic is exact, in
integers without a sign: a line gives one more than the pixel, because a pixel may be -1 before it is limited to the image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.launch import NumbaArray, Param, Pointer
from schedsearch.ops.bounded import extents_of
from schedsearch.ops.dyn_resize import DynResizeParams, given_scale, height_and_width, largest_numerator
from schedsearch.templates.arrange.kernels import measuring
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.workload import Workload

# rounding -> (times, plus, minus): the nearest pixel is the floor of (times * numerator + plus * d - minus) / (times * d)
_ROUNDED = {"floor": (1, 0, 0), "ceil": (1, 1, 1), "round_prefer_floor": (2, 1, 1), "round_prefer_ceil": (2, 1, 0)}


def parameters(p: Workload[DynResizeParams]) -> tuple[Param, ...]:
    """x and y as addresses, extents and sizes as arrays; arguments and outputs in order."""
    return tuple(
        Pointer(spec.name) if spec.name in "xy" else NumbaArray(spec.name, "int64", spec.shape, (8,))
        for spec in (*p.signature, *p.outputs)
    )


def images_in_use(p: Workload[DynResizeParams]) -> Callable[[Any, Any], Any]:
    """`images(operands, first) -> (planes, height, width, rows, columns)`, int64: those of x and y that count, and rows and
    columns of y. All are 0 where sizes are impossible. The thread that is the `first` one writes y_extents.
    """
    slots = {spec.name: slot for slot, spec in enumerate((*p.signature, *p.outputs))}
    measure, rank = measuring(p, slots), len(p.outputs[0].shape)
    x_extents, y_extents = slots[extents_of("x")], slots[extents_of("y")]
    vertical, horizontal = height_and_width(p.params)
    height, width, planes = p.params.h, p.params.w, 1
    for extent in p.outputs[0].shape[1:vertical]:
        planes *= extent

    def images(operands: Any, first: Any) -> Any:
        possible, extents = measure(operands)
        if first:
            for axis in range(rank):
                operands[y_extents][axis] = extents[axis] if possible else i64(0)
        if not possible:
            return i64(0), i64(0), i64(0), i64(0), i64(0)
        return (
            i64(extents[0] * planes),
            i64(min(operands[x_extents][vertical], height)),
            i64(min(operands[x_extents][horizontal], width)),
            i64(extents[vertical]),
            i64(extents[horizontal]),
        )

    return images


def line_of_run(p: Workload[DynResizeParams], axis: int) -> Callable[[Any, Any], Any]:
    """`line(size, out) -> (factor, shift, divisor)`, without a sign: of x's size and y's along an axis."""
    number = u32 if largest_numerator(p.params, axis) < 2**32 else u64
    times, plus, minus = _ROUNDED[p.params.rounding] if p.params.mode == "nearest" else (1, 0, 0)
    coordinate = _coordinate(p, axis)

    def line(size: Any, out: Any) -> Any:
        factor, shift, divisor = coordinate(i64(size), i64(out))
        shift = (shift + divisor) * times + divisor * plus - minus
        return number(factor * times), number(shift), number(divisor * times)

    return line


def _coordinate(p: Workload[DynResizeParams], axis: int) -> Callable[[Any, Any], Any]:
    """`coordinate(size, out) -> (factor, shift, divisor)`, as `ops.resize.coordinate`."""
    scale = given_scale(p.params, axis)
    above, below = (0, 0) if scale is None else (scale.numerator, scale.denominator)
    whole = i64

    def of_sizes(size: Any, out: Any) -> Any:
        return out, size

    def of_scale(size: Any, out: Any) -> Any:
        return whole(above), whole(below)

    fraction = of_sizes if scale is None else of_scale

    def align_corners(size: Any, out: Any) -> Any:
        if out == 1:
            return whole(0), whole(0), whole(1)
        return whole(size - 1), whole(0), whole(out - 1)

    def asymmetric(size: Any, out: Any) -> Any:
        over, under = fraction(size, out)
        return whole(under), whole(0), whole(over)

    def half_pixel(size: Any, out: Any) -> Any:
        over, under = fraction(size, out)
        return whole(2 * under), whole(under - over), whole(2 * over)

    def pytorch_half_pixel(size: Any, out: Any) -> Any:
        if out == 1:
            return whole(0), whole(0), whole(1)
        return half_pixel(size, out)

    every = (align_corners, asymmetric, half_pixel, pytorch_half_pixel)
    return {each.__name__: each for each in every}[p.params.coordinates]


def floor_at(position: Any, line: Any, number: Any) -> Any:
    """The floor of a line, int32, and what is left of the division; `number` is the type of the line's numbers."""
    factor, shift, divisor = line
    above = number(number(position) * factor + shift)
    whole = number(above // divisor)
    return i32(i64(whole) - 1), number(above - number(whole * divisor))


def pixel_of_run(p: Workload[DynResizeParams], axis: int) -> Callable[[Any, Any, Any], Any]:
    """`pixel(position, line, size)`: the nearest pixel of x, int32."""
    number = u32 if largest_numerator(p.params, axis) < 2**32 else u64

    def pixel(position: Any, line: Any, size: Any) -> Any:
        whole, _ = floor_at(position, line, number)
        return i32(min(max(whole, 0), i32(size - 1)))

    return pixel


def pixels_of_run(p: Workload[DynResizeParams], axis: int) -> Callable[[Any, Any, Any], Any]:
    """`around(position, line, size)`: the two pixels beside the coordinate, int32, and the weight of the second, float32."""
    number = u32 if largest_numerator(p.params, axis) < 2**32 else u64

    def around(position: Any, line: Any, size: Any) -> Any:
        whole, rest = floor_at(position, line, number)
        last, weight = i32(size - 1), f32(f32(rest) / f32(line[2]))
        return i32(min(max(whole, 0), last)), i32(min(max(whole + 1, 0), last)), weight

    return around
