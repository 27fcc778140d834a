"""Quantised nodes whose zero points or scales no kernel takes: computed ones, or several.

The sums of products of integers follow from those without zero points, exactly, in arithmetic that wraps at 32 bits:

    sum (a - za) (b - zb)  =  sum a b  -  za sum b  -  zb sum a  +  k za zb

Zero points that a kernel takes, constants that are one number, stay with the product. Sums of rows are products with ones,
those of constants are constants. In a convolution za counts for taps inside of the image, so that the sum of b differs at
borders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import INTEGERS, constant_of, dtype_of, folded, number_of
from schedsearch.network.windows import Window

if TYPE_CHECKING:
    import onnx_ir as ir

_SHORT = ("int16", "uint16")
_SAME_SIGN = (
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Slice",
)
_MOST_AT_ONCE = 256  # numbers of which the largest is sought by one thread


def _type(name: str) -> ir.DataType:
    import onnx_ir as ir

    return ir.DataType[name]


# --- Sums of products ---------------------------------------------------------------------------------------------------
def _matmul_integer(c: Composition) -> str | None:
    a, b = c.needed(0), c.needed(1)
    shape, other = shape_of(a), shape_of(b)
    if min(len(shape), len(other)) == 1:
        return _of_vectors(c, a, b)
    za, zb = (_ZeroPoint.of(c, place, zero) for place, zero in enumerate((c.input(2), c.input(3))))
    if za.stays and zb.stays:
        return None
    inputs = [a, b, *(each.value if each.stays else None for each in (za, zb))]
    while inputs[-1] is None:
        inputs.pop()
    batch = np.broadcast_shapes(tuple(shape[:-2]), tuple(other[:-2]))
    y = c.add("MatMulInteger", inputs, [*batch, shape[-2], other[-1]], _type("INT32"))
    if not za.stays:  # less za times the sums of b - zb, with zb where the product has it
        sums = _sums(c, b, over_rows=True)
        if zb.stays and zb.number:
            sums = c.add("Sub", [sums, c.constant(np.int32(zb.number * shape[-1]))])
        y = c.add("Sub", [y, c.add("Mul", [za.whole(c, -1), sums])], shape_of(y))
    if not zb.stays:
        sums = _sums(c, a, over_rows=False)
        if za.stays and za.number:
            sums = c.add("Sub", [sums, c.constant(np.int32(za.number * shape[-1]))])
        y = c.add("Sub", [y, c.add("Mul", [sums, zb.whole(c, -2)])], shape_of(y))
    if not (za.stays or zb.stays):
        both = c.add("Mul", [za.whole(c, -1), zb.whole(c, -2)])
        y = c.add("Add", [y, c.add("Mul", [both, c.constant(np.int32(shape[-1]))])], shape_of(y))
    c.finish(y)
    return None


class _ZeroPoint:
    """A zero point of a factor.

    Attributes:
        value: None if it is 0.
        stays: kernels take it: one constant number.
        number: it, then.
    """

    def __init__(self, value: ir.Value | None, number: float | None) -> None:
        self.value, self.number = value, number
        self.stays = number is not None

    @classmethod
    def of(cls, c: Composition, place: int, value: ir.Value | None) -> _ZeroPoint:
        return cls(value, 0.0 if value is None else number_of(constant_of(value)))

    def whole(self, c: Composition, axis: int) -> ir.Value:
        """As int32 that is repeated to the sums: one for each row (axis -1 is missing) or column (-2)."""
        assert self.value is not None
        found = c.cast(self.value, _type("INT32"))
        shape = shape_of(found)
        return c.reshape(found, [*shape, 1] if len(shape) == 1 and axis == -1 and shape != [1] else shape)


def _sums(c: Composition, x: ir.Value, *, over_rows: bool) -> ir.Value:
    """The sums of each column, or of each row, as int32."""
    array = constant_of(x)
    if array is not None:
        return c.constant(array.astype(np.int32).sum(axis=-2 if over_rows else -1, keepdims=True, dtype=np.int32))
    shape = shape_of(x)
    if over_rows:
        ones = c.constant(np.ones((1, shape[-2]), np.int8))
        return c.add("MatMulInteger", [ones, x], [*shape[:-2], 1, shape[-1]], _type("INT32"))
    ones = c.constant(np.ones((shape[-1], 1), np.int8))
    return c.add("MatMulInteger", [x, ones], [*shape[:-1], 1], _type("INT32"))


def _of_vectors(c: Composition, a: ir.Value, b: ir.Value) -> str | None:
    """A vector is a matrix of one row or column."""
    shape, other = shape_of(a), shape_of(b)
    first = c.reshape(a, [1, *shape]) if len(shape) == 1 else a
    second = c.reshape(b, [*other, 1]) if len(other) == 1 else b
    batch = np.broadcast_shapes(tuple(shape_of(first)[:-2]), tuple(shape_of(second)[:-2]))
    inputs = [first, second, *list(c.node.inputs[2:])]
    y = c.add("MatMulInteger", inputs, [*batch, shape_of(first)[-2], shape_of(second)[-1]], _type("INT32"))
    kept = [*batch, *shape_of(first)[-2:-1] * (len(shape) > 1), *shape_of(second)[-1:] * (len(other) > 1)]
    c.finish(c.reshape(y, kept))
    return None


def _conv_integer(c: Composition) -> str | None:
    x, filters = c.needed(0), constant_of(c.needed(1))
    zx, zw = _ZeroPoint.of(c, 0, c.input(2)), _ZeroPoint.of(c, 1, c.input(3))
    zero = np.zeros(1, np.int64) if zw.value is None else constant_of(zw.value)
    if (zx.stays and zw.stays) or filters is None or zero is None or len(shape_of(x)) != 4:
        return None
    if not zx.stays and math.prod(shape_of(zx.value or x)) > 1:
        return "has several zero points of its input; allowed: one"
    whole = filters.astype(np.int64) - zero.astype(np.int64).reshape(-1, 1, 1, 1)
    weight, of_weight, apart = c.needed(1), zw.value, None
    if not zw.stays:
        kinds = [kind for kind in (np.int8, np.uint8) if _holds(kind, whole)]
        weight, of_weight = (c.constant(whole.astype(kinds[0])) if kinds else weight), None
        apart = None if kinds else zero.astype(np.int32).reshape(1, -1, 1, 1)
    if apart is not None and c.node.attributes.get_int("group", 1) > 1:
        return "has several zero points of filters in groups; allowed: one, or filters less their zero points of 8 bits"
    y = _convolved(c, weight, zx, of_weight)
    if apart is not None:  # less the zero point times the sums of x
        ones = c.constant(np.ones((1, *filters.shape[1:]), np.int8))
        y = c.add("Sub", [y, c.add("Mul", [_convolved(c, ones, zx, None), c.constant(apart)])], shape_of(y))
    if not zx.stays and zx.value is not None:
        by = c.cast(zx.value, _type("INT32"))
        sums = c.constant(_sums_of_taps(c.node, whole, shape_of(x), shape_of(y)))
        y = c.add("Sub", [y, c.add("Mul", [by, sums])], shape_of(y))
    c.finish(y)
    return None


def _convolved(c: Composition, weight: ir.Value, zx: _ZeroPoint, zw: ir.Value | None) -> ir.Value:
    """The node with other filters, and without a zero point of x that no kernel takes."""
    inputs = [c.needed(0), weight, zx.value if zx.stays else None, zw]
    while inputs[-1] is None:
        inputs.pop()
    n, _, *pixels = shape_of(c.node.outputs[0])
    attributes = {name: each.value for name, each in c.node.attributes.items()}
    return c.add("ConvInteger", inputs, [n, shape_of(weight)[0], *pixels], _type("INT32"), **attributes)


def _holds(kind: Any, numbers: Any) -> bool:
    limits = np.iinfo(kind)
    return bool(limits.min <= numbers.min() and numbers.max() <= limits.max)


def _sums_of_taps(node: ir.Node, filters: Any, image: list[int], out: list[int]) -> Any:
    """The sums of the weights whose taps lie inside of the image: [1, k, oh, ow], or [1, k, 1, 1] if that is all of them."""
    taps = filters.shape[2:]
    window = Window.of(node, (taps[0], taps[1])).params((image[2], image[3]))
    pads, strides, dilations = window["padding"], window["stride"], window["dilation"]
    inside = []
    for axis in range(2):
        at = np.arange(out[2 + axis])[:, None] * strides[axis] - pads[axis] + np.arange(taps[axis]) * dilations[axis]
        inside.append(((at >= 0) & (at < image[2 + axis])).astype(np.int64))
    sums = np.einsum("pr,qs,krs->kpq", *inside, filters.sum(axis=1))[None]
    if all(each.all() for each in inside):
        sums = sums[:, :, :1, :1]
    return sums.astype(np.int32)


# --- Numbers ------------------------------------------------------------------------------------------------------------
def _dynamic(c: Composition) -> str | None:
    """DynamicQuantizeLinear. The scale of zeros only is 1, as in ONNX Runtime: ONNX's formula divides by zero. The smallest
    number is the negative of the largest negative."""
    x = c.needed(0)
    if dtype_of(x) != "float32":
        return f"reads {dtype_of(x)}; allowed: float32"
    zero = c.constant(np.float32(0))
    positive = _is_positive(x)
    high = c.add("Max", [_largest(c, x), zero])
    low = zero if positive else c.add("Min", [c.add("Neg", [_largest(c, c.add("Neg", [x]))]), zero])
    range_ = high if positive else c.add("Sub", [high, low])
    alike = c.add("Equal", [range_, zero], [], _type("BOOL"))
    step = c.add("Div", [range_, c.constant(np.float32(255))])
    scale = c.add("Where", [alike, c.constant(np.float32(1)), step], [], x.dtype)
    if positive:
        zero_point = c.constant(np.uint8(0))
    else:
        bounds = [c.constant(np.float32(bound)) for bound in (0, 255)]
        middle = c.add("Sub", [zero, c.add("Div", [low, scale])], [])
        zero_point = c.cast(c.add("Round", [c.add("Clip", [middle, *bounds], [])], []), _type("UINT8"))
    y = c.add("QuantizeLinear", [x, scale, zero_point], shape_of(x), _type("UINT8"))
    c.finish(y, scale, zero_point)
    return None


def _is_positive(x: ir.Value) -> bool:
    """Whether no number can be negative, because of the node that makes it: the zero point is then 0."""
    node = x.producer()
    while node is not None and node.op_type in _SAME_SIGN and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type in ("Relu", "Sigmoid", "Softmax")


def _largest(c: Composition, x: ir.Value) -> ir.Value:
    """The largest number of an array, of many in two stages."""
    size = math.prod(shape_of(x))
    parts = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0) if size > _MOST_AT_ONCE else 1
    found = c.reshape(x, [parts, size // parts])
    if parts > 1:
        found = c.reshape(c.last_axis("ReduceMax", found), [1, parts])
    return c.reshape(c.last_axis("ReduceMax", found), [])


def _dequantise(c: Composition) -> str | None:
    """Integers of more than 8 bits, scales of blocks, and several that are computed."""
    q, scale = c.needed(0), c.needed(1)
    if constant_of(q) is not None or not (_has_many(c) or dtype_of(q) in ("int32", *_SHORT)):
        return None
    by, zero = (_by_element(c, each, q) for each in (scale, c.input(2)))
    assert by is not None
    whole = c.cast(q, _type("INT32"))
    if zero is not None:
        whole = c.add("Sub", [whole, c.cast(zero, _type("INT32"))], shape_of(q))
    kind, single = c.node.outputs[0].dtype or scale.dtype, _type("FLOAT")  # float16 has neither 70000 nor 2049
    assert kind is not None
    c.finish(c.cast(c.add("Mul", [c.cast(whole, single), c.cast(by, single)], shape_of(q)), kind))
    return None


def _quantise(c: Composition) -> str | None:
    """Integers of 16 bits, scales of blocks, and several that are computed."""
    x, y = c.needed(0), c.node.outputs[0]
    if not (_has_many(c) or dtype_of(y) in _SHORT):
        return None
    if dtype_of(y) not in (*INTEGERS, *_SHORT) or y.dtype is None:
        return f"makes {dtype_of(y)}; allowed: {', '.join((*INTEGERS, *_SHORT))}"
    by, zero = (_by_element(c, each, x) for each in (c.needed(1), c.input(2)))
    assert by is not None
    single = _type("FLOAT")  # float16 lacks integers from 2049 on
    x = c.cast(x, single)
    rounded = c.add("Round", [c.add("Div", [x, c.cast(by, single)], shape_of(x))])
    if zero is not None:
        rounded = c.add("Add", [rounded, c.cast(zero, single)], shape_of(x))
    limits = np.iinfo(y.dtype.numpy())
    c.finish(
        c.cast(c.add("Clip", [rounded, *(c.constant(bound, x) for bound in (limits.min, limits.max))], shape_of(x)), y.dtype)
    )
    return None


def _has_many(c: Composition) -> bool:
    """Whether a node has scales of blocks, or several scales or zero points that are computed."""
    linear = [value for value in (c.input(1), c.input(2)) if value is not None and value.const_value is None]
    return bool(c.node.attributes.get_int("block_size", 0)) or any(math.prod(shape_of(value)) > 1 for value in linear)


def _by_element(c: Composition, numbers: ir.Value | None, of: ir.Value) -> ir.Value | None:
    """Scales or zero points as an array that is repeated to that which they belong to."""
    if numbers is None:
        return None
    shape, own, read = shape_of(of), shape_of(numbers), c.node.attributes
    axis, blocks = read.get_int("axis", 1), read.get_int("block_size", 0)
    if blocks:
        axis %= len(shape)
        places = c.constant(np.arange(shape[axis], dtype=np.int64) // blocks)
        return c.add("Gather", [numbers, places], shape, axis=axis)
    if math.prod(own) == 1:
        return c.reshape(numbers, [])
    return c.reshape(numbers, [own[0] if place == axis % len(shape) else 1 for place in range(len(shape))])


# --- Products between conversions ---------------------------------------------------------------------------------------
def _qlinear_conv(c: Composition) -> str | None:
    """What it is defined as, in floating point, if filters, a scale or a zero point are computed or zero points of filters
    differ."""
    numbers = [constant_of(c.needed(place)) for place in (1, 2, 4, 5, 6, 7)]
    alike = [number_of(array) is not None for array in numbers]
    x, filters, y = c.needed(0), c.needed(3), c.node.outputs[0]
    if all(alike[:2]) and numbers[2] is not None and all(alike[3:]) and folded(filters) is not None:
        return None
    if any(math.prod(shape_of(c.needed(place))) > 1 for place in (1, 2, 6, 7)):
        return "has several scales or zero points of its input or output; allowed: one"
    x_scale, y_scale = (c.reshape(c.needed(place), []) for place in (1, 6))
    w_scale, w_zero = (_for_filters(c, c.needed(place)) for place in (4, 5))
    kind = x_scale.dtype
    assert kind is not None
    factors = [
        c.add("DequantizeLinear", [x, x_scale, c.reshape(c.needed(2), [])], shape_of(x), kind),
        c.add("DequantizeLinear", [filters, w_scale, w_zero], shape_of(filters), kind, axis=0),
    ]
    attributes = {name: each.value for name, each in c.node.attributes.items()}
    found = c.add("Conv", factors, shape_of(y), kind, **attributes)
    if (bias := c.input(8)) is not None:
        addend = c.add("Mul", [c.cast(bias, kind), c.add("Mul", [w_scale, x_scale])])
        found = c.add("Add", [found, c.reshape(addend, [*shape_of(bias), *[1] * (len(shape_of(y)) - 2)])])
    c.finish(c.add("QuantizeLinear", [found, y_scale, c.reshape(c.needed(7), [])], shape_of(y), y.dtype))
    return None


def _for_filters(c: Composition, numbers: ir.Value) -> ir.Value:
    """One for each filter, of which there may be one for all."""
    count = shape_of(c.needed(3))[0]
    if shape_of(numbers) == [count]:
        return numbers
    zeros = c.constant(np.zeros(count, np.int64))
    return c.add("Gather", [c.reshape(numbers, [1]), zeros], [count])


def _qlinear_matmul(c: Composition) -> str | None:
    """What it is defined as, in floating point, if a scale or zero point is computed or one of several."""
    numbers = [constant_of(c.input(place)) for place in (1, 2, 4, 5, 6, 7)]
    alike = [number_of(array) is not None for array in numbers]
    a, b, y = c.needed(0), c.needed(3), c.node.outputs[0]
    if all(alike[:2]) and all(alike[3:]) and (alike[2] or (numbers[2] is not None and folded(b) is not None)):
        return None
    if y.dtype is None or dtype_of(a) not in INTEGERS or dtype_of(b) not in INTEGERS:
        return f"is of {dtype_of(a)} and {dtype_of(b)}; allowed: {', '.join(INTEGERS)}"
    kind = c.needed(1).dtype
    product = c.matmul(_float(c, a, 1, -1), _float(c, b, 4, -2), kind)
    scale, zero = (_rows_or_columns(c, c.needed(place), -1) for place in (6, 7))
    rounded = c.add("Round", [c.add("Div", [product, scale], shape_of(product))])
    assert kind is not None
    shifted = c.add("Add", [rounded, c.cast(zero, kind)], shape_of(product))
    limits = np.iinfo(y.dtype.numpy())
    bounds = [c.constant(bound, shifted) for bound in (limits.min, limits.max)]
    c.finish(c.cast(c.add("Clip", [shifted, *bounds], shape_of(product)), y.dtype))
    return None


def _float(c: Composition, q: ir.Value, place: int, axis: int) -> ir.Value:
    """The numbers that a factor of a QLinearMatMul stands for."""
    scale, zero = (_rows_or_columns(c, c.needed(at), axis) for at in (place, place + 1))
    assert scale.dtype is not None
    shifted = c.add("Sub", [c.cast(q, scale.dtype), c.cast(zero, scale.dtype)], shape_of(q))
    return c.add("Mul", [shifted, scale], shape_of(q))


def _rows_or_columns(c: Composition, numbers: ir.Value, axis: int) -> ir.Value:
    shape = shape_of(numbers)
    return c.reshape(numbers, [*shape, 1] if len(shape) == 1 and axis == -1 and shape != [1] else shape)


REWRITTEN: Mapping[str, Rewrite] = {
    "MatMulInteger": rewrite(_matmul_integer),
    "ConvInteger": rewrite(_conv_integer),
    "DynamicQuantizeLinear": rewrite(_dynamic),
    "DequantizeLinear": rewrite(_dequantise),
    "QLinearMatMul": rewrite(_qlinear_matmul),
    "QLinearConv": rewrite(_qlinear_conv),
}
QUANTISED_BY_MANY: Rewrite = rewrite(_quantise)
