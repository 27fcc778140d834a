"""Normalisations: what is normalised together becomes a row of a layer norm, and factors and summands are element-wise.

Means come first and squares of differences from them later, so that no digits are lost where the mean is large. Where a sum
of squares is a value of its own, it is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.compositions.steps import Steps, extents
from schedsearch.network.facts import FLOATS, constant_input, dtype_of, optional_input

if TYPE_CHECKING:
    import onnx_ir as ir

_SPATIAL_OPSET = 9  # before it, a BatchNormalization could have a mean for each pixel
SOFTMAX_OPSET = 13  # before it, a softmax was over an axis and all behind it
_BY_CHANNEL_OPSET = 21  # before it, a GroupNormalization had a factor for each group
_LEAST = float(np.finfo(np.float32).tiny)


def _floats(node: ir.Node) -> tuple[ir.Value, list[int]] | None:
    """The first input of a node and its shape, if it holds numbers that kernels compute with."""
    x = optional_input(node, 0)
    shape = extents(x)
    if x is None or shape is None or dtype_of(x) not in FLOATS or extents(node.outputs[0]) is None or not math.prod(shape):
        return None
    return x, shape


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _rows_normalised(steps: Steps, x: ir.Value, rows: Sequence[int], epsilon: float) -> ir.Value:
    """x viewed as [..., numbers of a row], each row normalised."""
    row = steps.reshape(x, rows)
    ones = np.ones(rows[-1], np.float32)
    return steps.add("LayerNormalization", [row, ones], rows, like=x, axis=len(rows) - 1, epsilon=epsilon)


def _of_channels(steps: Steps, node: ir.Node, place: int, shape: Sequence[int]) -> ir.Value | None:
    """A factor or summand for each channel, in a shape that is repeated to that of x."""
    value = optional_input(node, place)
    return None if value is None else steps.shaped(value, shape)


def _scaled(steps: Steps, x: ir.Value, scale: ir.Value | None, bias: ir.Value | None, shape: Sequence[int]) -> None:
    if scale is not None:
        x = steps.add("Mul", [x, scale], shape)
    if bias is not None:
        steps.add("Add", [x, bias], shape)


# --- Rows of a channel or group -----------------------------------------------------------------------------------------
def _instance_norm(model: ir.Model, node: ir.Node) -> None:
    found = _floats(node)
    if found is None or len(found[1]) < 3:
        return
    x, shape = found
    steps = Steps(model, node)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    rows = _rows_normalised(steps, x, [*shape[:2], math.prod(shape[2:])], epsilon)
    along = [shape[1], *(1,) * (len(shape) - 2)]
    scale, bias = (_of_channels(steps, node, place, along) for place in (1, 2))
    _scaled(steps, steps.reshape(rows, shape), scale, bias, shape)
    steps.replace()


def _group_norm(model: ir.Model, node: ir.Node) -> None:
    found, groups = _floats(node), node.attributes.get_int("num_groups", 0)
    if found is None or groups < 1 or found[1][1] % groups:
        return
    x, shape = found
    channels = shape[1]
    steps = Steps(model, node)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    rows = _rows_normalised(steps, x, [shape[0], groups, math.prod(shape[1:]) // groups], epsilon)
    if model.opset_imports.get("", _BY_CHANNEL_OPSET) >= _BY_CHANNEL_OPSET:
        rows, along, of = steps.reshape(rows, shape), [channels, *(1,) * (len(shape) - 2)], shape
        scale, bias = (_of_channels(steps, node, place, along) for place in (1, 2))
        _scaled(steps, rows, scale, bias, of)
    else:
        of = extents(rows) or []
        scale, bias = (_of_channels(steps, node, place, [groups, 1]) for place in (1, 2))
        _scaled(steps, rows, scale, bias, of)
        assert steps.last is not None
        steps.reshape(steps.last, shape)
    steps.replace()


# --- Softmax ------------------------------------------------------------------------------------------------------------
def _softmax(model: ir.Model, node: ir.Node) -> None:
    """Over one axis and all behind it, as before opset 13: over the rows of a matrix."""
    found, axis = _floats(node), node.attributes.get_int("axis", 1)
    if found is None or model.opset_imports.get("", SOFTMAX_OPSET) >= SOFTMAX_OPSET or not found[1]:
        return
    x, shape = found
    axis %= len(shape)
    if all(extent == 1 for extent in shape[axis + 1 :]):
        return
    steps = Steps(model, node)
    matrix = [math.prod(shape[:axis]), math.prod(shape[axis:])]
    steps.reshape(steps.add(node.op_type, [steps.reshape(x, matrix)], matrix, axis=1), shape)
    steps.replace()


# --- Layer norms --------------------------------------------------------------------------------------------------------
def _layer_norm(model: ir.Model, node: ir.Node) -> None:
    """With a computed scale or bias, in another dtype than its input, or with the mean and deviation of each row."""
    found = _floats(node)
    if found is None:
        return
    x, shape = found
    given = [optional_input(node, place) for place in (1, 2)]
    mixed = node.outputs[0].dtype != x.dtype
    if any(_is_read(value) for value in node.outputs[1:]):
        _moments(model, node, x, shape)
    elif mixed or any(value is not None and constant_input(node, place) is None for place, value in enumerate(given, 1)):
        steps = Steps(model, node)
        y = node.outputs[0]
        x = steps.cast(x, y.dtype) if mixed and dtype_of(y) == "float32" else x
        axis = node.attributes.get_int("axis", -1) % len(shape)
        ones = np.ones(shape[axis:], np.float32)
        options: dict[str, Any] = {"axis": axis, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
        rows = steps.add(node.op_type, [x, ones], shape, like=x, **options)
        _scaled(steps, steps.cast(rows, y.dtype), given[0], given[1], shape)
        steps.replace()


def _spread(steps: Steps, whole: ir.Value, axes: Sequence[int]) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The mean of float32 over some axes, which stay with extent 1, the differences from it, and their mean square."""
    shape = extents(whole) or []
    of_rows = [1 if axis in axes else extent for axis, extent in enumerate(shape)]
    mean = steps.add("ReduceMean", [whole], of_rows, like=whole, axes=axes)
    centred = steps.add("Sub", [whole, mean], shape, like=whole)
    squares = steps.add("Mul", [centred, centred], shape, like=whole)
    return mean, centred, steps.add("ReduceMean", [squares], of_rows, like=whole, axes=axes)


def _inverse_deviation(steps: Steps, variance: ir.Value, shape: Sequence[int], epsilon: float) -> ir.Value:
    more = steps.add("Add", [variance, epsilon], shape, like=variance)
    return steps.add("Reciprocal", [steps.add("Sqrt", [more], shape, like=variance)], shape, like=variance)


def _finish(steps: Steps, x: ir.Value, given: Sequence[ir.Value | None]) -> None:
    """The first result of a node: x of float32 with the scale and the bias that are given, in its dtype."""
    shape = extents(x) or []
    for op, value in zip(("Mul", "Add"), given):
        x = x if value is None else steps.add(op, [x, steps.in_float32(value)], shape, like=x)
    steps.cast(x, steps.node.outputs[0].dtype)


def _moments(model: ir.Model, node: ir.Node, x: ir.Value, shape: list[int]) -> None:
    """The numbers with the mean and the inverse deviation of their rows, in float32."""
    steps = Steps(model, node)
    axis = node.attributes.get_int("axis", -1) % len(shape)
    axes, of_rows = list(range(axis, len(shape))), [*shape[:axis], *(1,) * (len(shape) - axis)]
    whole = steps.in_float32(x)
    mean, centred, variance = _spread(steps, whole, axes)
    inverse = _inverse_deviation(steps, variance, of_rows, node.attributes.get_float("epsilon", 1e-5))
    _finish(
        steps, steps.add("Mul", [centred, inverse], shape, like=whole), [optional_input(node, place) for place in (1, 2)]
    )
    steps.replace({old: new for old, new in zip(node.outputs[1:], (mean, inverse)) if _is_read(old)})


def _mean_variance(model: ir.Model, node: ir.Node) -> None:
    """ONNX adds 1e-9 to the deviation, not to the variance."""
    found = _floats(node)
    if found is None:
        return
    x, shape = found
    steps = Steps(model, node)
    axes = sorted({axis % len(shape) for axis in node.attributes.get_ints("axes", (0, 2, 3))})
    of_rows = [1 if axis in axes else extent for axis, extent in enumerate(shape)]
    centred = steps.add("Sub", [x, steps.add("ReduceMean", [x], of_rows, axes=axes)], shape)
    whole = steps.in_float32(centred)
    variance = steps.add(
        "ReduceMean", [steps.add("Mul", [whole, whole], shape, like=whole)], of_rows, like=whole, axes=axes
    )  # fmt: skip
    deviation = steps.add("Add", [steps.add("Sqrt", [variance], of_rows, like=whole), 1e-9], of_rows, like=whole)
    steps.cast(steps.add("Div", [whole, deviation], shape, like=whole), x.dtype)
    steps.replace()


# --- Norms --------------------------------------------------------------------------------------------------------------
def _norm(model: ir.Model, node: ir.Node) -> None:
    """x / norm; 0 where the norm is 0."""
    found, p = _floats(node), node.attributes.get_int("p", 2)
    if found is None or p not in (1, 2):
        return
    x, shape = found
    steps = Steps(model, node)
    axis = node.attributes.get_int("axis", -1) % len(shape)
    of_rows = [*shape[:axis], 1, *shape[axis + 1 :]]
    whole = steps.in_float32(x)
    if p == 2:  # squares of large numbers are infinite, and those of small ones 0
        largest = steps.add("ReduceMax", [steps.add("Abs", [whole], shape, like=whole)], of_rows, like=whole, axes=[axis])
        largest = steps.add("Max", [largest, _LEAST], of_rows, like=whole)
        whole = steps.add("Div", [whole, largest], shape, like=whole)
    norm = steps.add(f"ReduceL{p}", [whole], of_rows, like=whole, axes=[axis])
    divisor = steps.add("Max", [norm, _LEAST], of_rows, like=whole)
    steps.cast(steps.add("Div", [whole, divisor], shape, like=whole), x.dtype)
    steps.replace()


def _local_response(model: ir.Model, node: ir.Node) -> None:
    """x / (bias + alpha * mean of the squares of `size` channels) ^ beta; channels that do not exist are 0.

    The mean is an average pool along the channels, as the height of images whose channels are the pixels.
    """
    found = _floats(node)
    if found is None or len(found[1]) < 3:
        return
    x, shape = found
    read, (n, c, *pixels) = node.attributes, shape
    size, area = read.get_int("size", 1), math.prod(pixels)
    steps = Steps(model, node)
    whole = steps.in_float32(x)
    squares = steps.add("Mul", [whole, whole], shape, like=whole)
    columns = steps.transpose(steps.reshape(squares, [n, c, 1, area]), [0, 3, 1, 2])
    before = (size - 1) // 2
    window = {"kernel_shape": [size, 1], "pads": [before, 0, size - 1 - before, 0], "count_include_pad": 1}
    means = steps.add("AveragePool", [columns], [n, area, c, 1], like=whole, **window)
    means = steps.reshape(steps.transpose(means, [0, 2, 3, 1]), shape)
    scaled = steps.add("Mul", [means, read.get_float("alpha", 1e-4)], shape, like=whole)
    base = steps.add("Add", [scaled, read.get_float("bias", 1.0)], shape, like=whole)
    divisor = steps.add("Pow", [base, read.get_float("beta", 0.75)], shape, like=whole)
    steps.cast(steps.add("Div", [whole, divisor], shape, like=whole), x.dtype)
    steps.replace()


def _batch_norm(model: ir.Model, node: ir.Node) -> None:
    """With the moments of x itself, with parameters that are computed, or with one for each pixel, as before opset 9."""
    found, read = _floats(node), node.attributes
    given = [optional_input(node, place) for place in range(1, 5)]
    if found is None:
        return
    if read.get_int("training_mode", 0):
        _of_batch(model, node, *found)
        return
    if any(_is_read(value) for value in node.outputs[1:]):
        return
    x, shape = found
    by_pixel = model.opset_imports.get("", _SPATIAL_OPSET) < _SPATIAL_OPSET and not read.get_int("spatial", 1)
    if not by_pixel and all(constant_input(node, place) is not None for place in range(1, 5)):
        return
    along = shape[1:] if by_pixel else [shape[1], *(1,) * (len(shape) - 2)]
    if any(value is None or math.prod(extents(value) or ()) != math.prod(along) for value in given):
        return
    steps = Steps(model, node)
    parts = [steps.in_float32(steps.shaped(value, along)) for value in given if value is not None]
    whole, (scale, bias, mean, variance) = steps.in_float32(x), parts
    more = steps.add("Add", [variance, read.get_float("epsilon", 1e-5)], along, like=whole)
    factor = steps.add("Div", [scale, steps.add("Sqrt", [more], along, like=whole)], along, like=whole)
    scaled = steps.add("Mul", [steps.add("Sub", [whole, mean], shape, like=whole), factor], shape, like=whole)
    steps.cast(steps.add("Add", [scaled, bias], shape, like=whole), x.dtype)
    steps.replace()


def _of_batch(model: ir.Model, node: ir.Node, x: ir.Value, shape: list[int]) -> None:
    """With mean and variance of each channel of x: in training mode, and in PyTorch where no statistics are tracked. The
    running ones, if they are read, are the sums that ONNX defines, with the variance of the whole population."""
    if len(shape) < 2:
        return
    running = [value if _is_read(value) else None for value in node.outputs[1:]]
    if shape[0] == 1 and len(shape) > 2 and not any(running):
        _instance_norm(model, node)
        return
    steps, read = Steps(model, node), node.attributes
    along = [1, shape[1], *(1,) * (len(shape) - 2)]
    whole, momentum = steps.in_float32(x), read.get_float("momentum", 0.9)
    mean, centred, variance = _spread(steps, whole, [0, *range(2, len(shape))])
    others = {}
    for old, place, new in zip(running, (3, 4), (mean, variance)):
        before = optional_input(node, place)
        if old is not None and before is not None:
            parts = [(steps.in_float32(before), momentum), (steps.reshape(new, [shape[1]]), 1 - momentum)]
            summands = [steps.add("Mul", [part, factor], [shape[1]], like=whole) for part, factor in parts]
            others[old] = steps.cast(steps.add("Add", summands, [shape[1]], like=whole), old.dtype)
    inverse = _inverse_deviation(steps, variance, along, read.get_float("epsilon", 1e-5))
    given = [_of_channels(steps, node, place, along) for place in (1, 2)]
    _finish(steps, steps.add("Mul", [centred, inverse], shape, like=whole), given)
    steps.replace(others)


_WITHOUT_OPERATOR: Mapping[str, Callable[[Any, Any], None]] = {
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _local_response,
    "LpNormalization": _norm,
    "MeanVarianceNormalization": _mean_variance,
}
NORMS = tuple(_WITHOUT_OPERATOR)  # those that always become others
REWRITTEN: Mapping[str, Callable[[Any, Any], None]] = {
    **_WITHOUT_OPERATOR,
    "BatchNormalization": _batch_norm,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_norm),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
}
