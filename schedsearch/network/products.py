"""Products of matrices: Gemm and MatMul as dense layers if a factor is a constant, else as batch_matmul."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from schedsearch.network.chain import Chain, Operand, Read
from schedsearch.network.epilogue import append_bias, float_stages, integer_stages
from schedsearch.network.facts import FLOATS, INTEGERS, Array, dtype_of, extents_of, folded, inputs_of, is_given, name_of
from schedsearch.network.graph import Constant
from schedsearch.network.quantised import Quantised, converted_from

if TYPE_CHECKING:
    import onnx_ir as ir


def _gemm(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    read = node.attributes
    weight = inputs_of(node, 2)[1]
    if read.get_int("transA", 0) or folded(weight) is None:
        return (
            f"{name_of(node)} has a first factor that is transposed, or a second that is computed; allowed: x and a constant"
        )
    alpha, beta = read.get_float("alpha", 1.0), read.get_float("beta", 1.0)
    if alpha != 1.0 or (beta != 1.0 and is_given(node, 2)):
        return f"{name_of(node)} has alpha {alpha} and beta {beta}; allowed: 1"
    return _dense(node, "NK" if read.get_int("transB", 0) else "KN", taken)


def _matmul(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    x, weight = inputs_of(node, 2)
    shape, other = extents_of(node, x), extents_of(node, weight)
    if len(other) == 2 and len(shape) > 1 and folded(weight) is not None:
        return _dense(node, "KN", taken)
    if min(len(shape), len(other)) < 2 or folded(x) is not None or folded(weight) is not None:
        return f"{name_of(node)} multiplies {shape} by {other}; allowed: two computed arrays, or one and a constant matrix"
    return _batch_matmul(node, x, weight, taken)


PRODUCTS: Mapping[str, Read] = {"Gemm": _gemm, "MatMul": _matmul}


def _dense(node: ir.Node, axes: str, taken: set[ir.Node]) -> Chain | str:
    """A dense layer with a constant weight of these axes, quantised if both factors are."""
    x, weight = inputs_of(node, 2)
    of_x, of_weight = converted_from(x), converted_from(weight)
    if of_x is not None and of_weight is not None:
        return _quantised_dense(node, axes, of_x, of_weight, taken)
    if (dtype := dtype_of(x)) not in FLOATS:
        return f"{name_of(node)} is {dtype}; allowed: {', '.join((*FLOATS, *INTEGERS))}"
    matrix = folded(weight)
    assert matrix is not None
    chain = _chain(node, axes, x, str(weight.name), matrix, {"dtype": dtype})
    if problem := append_bias(chain, node, 2):
        return problem
    float_stages(chain, taken)
    return chain


def _quantised_dense(node: ir.Node, axes: str, x: Quantised, weight: Quantised, taken: set[ir.Node]) -> Chain | str:
    matrix = folded(weight.value)
    if matrix is None or x.scale is None or weight.scale is None or x.zero_point is None or weight.zero_point is None:
        return f"{name_of(node)} has a weight, scale or zero point that is computed or differs; allowed: constants"
    if x.dtype not in INTEGERS or weight.dtype not in INTEGERS or x.scale.size > 1:
        return f"{name_of(node)} is of {x.dtype} and {weight.dtype}; allowed: {', '.join(INTEGERS)} with one scale of x"
    zero_points = {"x": x.zero_point, "weight": weight.zero_point}
    params: dict[str, Any] = {"dtype": x.dtype, "weight_dtype": weight.dtype}
    params["zero_points"] = [name for name, zero_point in zero_points.items() if zero_point]
    chain = _chain(node, axes, x.value, str(weight.value.name), matrix, params)
    chain.scalars |= {f"{name}_zero_point": zero_points[name] for name in params["zero_points"]}
    if problem := append_bias(chain, node, 2, scale := x.scale * weight.scale):
        return problem
    integer_stages(chain, scale, taken)
    return chain


def _chain(node: ir.Node, axes: str, x: ir.Value, name: str, matrix: Array, params: dict[str, Any]) -> Chain:
    sizes = dict(zip(axes, matrix.shape))
    shape = extents_of(node, x)
    arguments: dict[str, Operand] = {"x": x, "weight": Constant(name, axes, matrix)}
    params = {"m": math.prod(shape[:-1]), "n": sizes["N"], "k": sizes["K"], **params}
    return Chain("dense", params, [node], node.outputs[0], arguments, channels=sizes["N"], channel_axis=len(shape) - 1)


def _batch_matmul(node: ir.Node, x: ir.Value, weight: ir.Value, taken: set[ir.Node]) -> Chain | str:
    shape, other, y = extents_of(node, x), extents_of(node, weight), extents_of(node, node.outputs[0])
    batch = math.prod(y[:-2])
    counts = {"x_batch": math.prod(shape[:-2]), "weight_batch": math.prod(other[:-2])}
    if any(count not in (1, batch) for count in counts.values()):
        return f"{name_of(node)} multiplies {shape} by {other}; allowed: equal batches, or a batch of 1"
    if (dtype := dtype_of(x)) not in FLOATS:
        return f"{name_of(node)} is {dtype}; allowed: {', '.join(FLOATS)}"
    params = {"b": batch, "m": y[-2], "n": y[-1], "k": shape[-1], **counts, "weight_layout": "KN", "dtype": dtype}
    chain = Chain("batch_matmul", params, [node], node.outputs[0], {"x": x, "weight": weight})
    chain.channels, chain.channel_axis = y[-1], len(y) - 1
    float_stages(chain, taken)
    return chain
