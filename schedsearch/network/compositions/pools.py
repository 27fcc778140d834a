"""Pools by the p-norm: the p-th root of the sum of |x|^p in a window, as an average of powers and element-wise nodes.

Powers and sums are those of the dtype's range: |x|^p beyond it is infinite, as in other runtimes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from schedsearch.network.compositions.steps import Steps, extents
from schedsearch.network.facts import FLOATS, dtype_of
from schedsearch.network.shapes import pads_of_windows

if TYPE_CHECKING:
    import onnx_ir as ir


def _power(steps: Steps, x: ir.Value, shape: list[int], p: int) -> ir.Value:
    """|x|^p."""
    if p == 2:
        return steps.add("Mul", [x, x], shape)
    found = steps.add("Abs", [x], shape)
    return found if p == 1 else steps.add("Pow", [found, float(p)], shape)


def _root(steps: Steps, x: ir.Value, shape: list[int], p: int) -> None:
    if p == 2:
        steps.add("Sqrt", [x], shape)
    elif p != 1:
        steps.add("Pow", [x, 1 / p], shape)


def _norm_pool(model: ir.Model, node: ir.Node) -> None:
    x, y, read = node.inputs[0], node.outputs[0], node.attributes
    shape, made, kernel = extents(x), extents(y), list(read.get_ints("kernel_shape", ()))
    p = _exponent(node)
    if x is None or shape is None or made is None or dtype_of(x) not in FLOATS or p is None:
        return
    steps = Steps(model, node)
    powers = _power(steps, x, shape, p)
    window: dict[str, Any] = {"kernel_shape": kernel, "count_include_pad": 1}
    for name in ("strides", "dilations"):
        gaps = list(read.get_ints(name, ()))
        if any(each != 1 for each in gaps):  # averages have no dilations before opset 19, not even of 1
            window[name] = gaps
    auto_pad = read.get_string("auto_pad", "NOTSET")
    window |= {"auto_pad": auto_pad} if auto_pad.startswith("SAME") else {"pads": pads_of_windows(node)}
    sums = steps.add("AveragePool", [powers], made, **window)
    if (count := math.prod(kernel)) > 1 or p == 1:
        sums = steps.add("Mul", [sums, float(count)], made)
    _root(steps, sums, made, p)
    steps.replace()


def _exponent(node: ir.Node) -> int | None:
    """p; None for one that is not a positive integer, as opset 1 allows."""
    given = node.attributes.get("p")
    p = 2.0 if given is None else float(given.value)
    return int(p) if p == int(p) and p > 0 else None


def _global_norm_pool(model: ir.Model, node: ir.Node) -> None:
    x, y, p = node.inputs[0], node.outputs[0], _exponent(node)
    shape, made = extents(x), extents(y)
    if x is None or shape is None or made is None or dtype_of(x) not in FLOATS or p is None:
        return
    axes = list(range(2, len(shape)))
    steps = Steps(model, node)
    powers = _power(steps, x, shape, p)
    sums = steps.add("ReduceSum", [powers], made, axes=axes)
    _root(steps, sums, made, p)
    steps.replace()


REWRITTEN: Mapping[str, Callable[[Any, Any], None]] = {"LpPool": _norm_pool, "GlobalLpPool": _global_norm_pool}
