"""Products of matrices: Gemm and MatMul as dense layers if a factor is a constant, else as batch_matmul."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from schedsearch.network.chain import Chain, Operand, Read
from schedsearch.network.epilogue import append_bias, append_requantise, float_stages, integer_stages
from schedsearch.network.facts import FLOATS, INTEGERS, dtype_of, extents_of, folded, inputs_of, name_of
from schedsearch.network.graph import Constant, axes_of
from schedsearch.network.quantised import Quantised, converted_from
from schedsearch.typed import Array, ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir


def _gemm(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    """One whose second factor is a constant; others have become products and additions (`compositions.products`)."""
    read = node.attributes
    x, weight = inputs_of(node, 2)
    if folded(weight) is None or read.get_int("transA", 0):
        return f"{name_of(node)} is {dtype_of(x) or 'of an unknown dtype'}; allowed: {', '.join(FLOATS)}"
    factors = read.get_float("alpha", 1.0), read.get_float("beta", 1.0)
    return _dense(node, "NK" if read.get_int("transB", 0) else "KN", taken, factors)


def _matmul(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    x, weight = inputs_of(node, 2)
    if folded(x) is None and is_matrix(weight):
        return _dense(node, "KN", taken)
    factors = Factor.of(x, "MK"), Factor.of(weight, "KN")
    of_x, of_weight = (converted_from(each.value) for each in factors)
    if of_x is not None and of_weight is not None and of_x.scale is not None and of_weight.scale is not None:
        chain = _integer_batch(node, of_x, of_weight, [each.axes for each in factors])
        if isinstance(chain, Chain) and of_weight.scale.size == 1:
            integer_stages(chain, of_x.scale * of_weight.scale, taken)
            return chain
    if (dtype := dtype_of(x)) not in FLOATS:
        return f"{name_of(node)} is {dtype}; allowed: {', '.join(FLOATS)}"
    chain = _batch(node, *factors, {"dtype": dtype})
    if isinstance(chain, Chain):
        float_stages(chain, taken)
    return chain


def _qlinear_matmul(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    values = inputs_of(node, 8)
    x, weight = Quantised.of(node, values[0], 1, 2), Quantised.of(node, values[3], 4, 5)
    y = Quantised.of(node, node.outputs[0], 6, 7)
    chain = _integer_product(node, x, weight)
    if isinstance(chain, str):
        return chain
    if x.scale is None or weight.scale is None or y.scale is None or y.zero_point is None or y.dtype not in INTEGERS:
        return f"{name_of(node)} has a scale or zero point that is computed or differs; allowed: constants"
    append_requantise(chain, x.scale * weight.scale, y, taken)
    return chain


def _matmul_integer(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    x, weight = inputs_of(node, 2)
    return _integer_product(node, Quantised.of(node, x, None, 2), Quantised.of(node, weight, None, 3))


PRODUCTS: Mapping[str, Read] = {
    "Gemm": _gemm,
    "MatMul": _matmul,
    "QLinearMatMul": _qlinear_matmul,
    "MatMulInteger": _matmul_integer,
}


def _dense(node: ir.Node, axes: str, taken: set[ir.Node], factors: tuple[float, float] = (1.0, 1.0)) -> Chain | str:
    """A dense layer with a constant weight of these axes, of integers if both factors are dequantised ones.

    Args:
        factors: of the product, and of the bias; they become part of the constants.
    """
    x, weight = inputs_of(node, 2)
    of_x, of_weight = converted_from(x), converted_from(weight)
    if of_x is not None and of_weight is not None and factors == (1.0, 1.0):
        chain = _quantised_dense(node, axes, of_x, of_weight, taken)
        if isinstance(chain, Chain):
            return chain  # otherwise it is computed in floating point, as it is defined
    if (dtype := dtype_of(x)) not in FLOATS:
        return f"{name_of(node)} is {dtype}; allowed: {', '.join((*FLOATS, *INTEGERS))}"
    matrix = folded(weight)
    assert matrix is not None
    chain = _chain(node, axes, x, *_scaled(str(weight.name), matrix, factors[0]), {"dtype": dtype})
    if problem := append_bias(chain, node, 2):
        return problem
    if isinstance(bias := chain.arguments.get("bias"), Constant):
        name, array = _scaled(bias.name, bias.array, factors[1])
        chain.arguments["bias"] = replace(bias, name=name, array=array)
    float_stages(chain, taken)
    return chain


def _scaled(name: str, array: Array, factor: float) -> tuple[str, Array]:
    """A constant times a factor, with a name that says so."""
    return (name, array) if factor == 1.0 else (f"{name} * {factor:g}", array * np.float32(factor))


def _quantised_dense(node: ir.Node, axes: str, x: Quantised, weight: Quantised, taken: set[ir.Node]) -> Chain | str:
    chain = _integer_chain(node, axes, x, weight)
    if isinstance(chain, str):
        return chain
    if x.scale is None or weight.scale is None:
        return f"{name_of(node)} has a scale that is computed; allowed: constants"
    if problem := append_bias(chain, node, 2, scale := x.scale * weight.scale):
        return problem
    integer_stages(chain, scale, taken)
    return chain


def _integer_chain(node: ir.Node, axes: str, x: Quantised, weight: Quantised) -> Chain | str:
    """A dense layer of integers without its epilogue."""
    matrix = folded(weight.value)
    if matrix is None or not is_matrix(weight.value) or len(extents_of(node, x.value)) < 2:
        return f"{name_of(node)} multiplies by a weight that is computed, or not a matrix; allowed: a constant matrix"
    params = _integers(node, x, weight)
    if isinstance(params, str):
        return params
    chain = _chain(node, axes, x.value, str(weight.value.name), matrix, params)
    chain.scalars |= _zero_points(x, weight)
    return chain


def _chain(node: ir.Node, axes: str, x: ir.Value, name: str, matrix: Array, params: ParamsByName) -> Chain:
    matrix = matrix.reshape(matrix.shape[-2:])
    sizes: dict[str, int] = dict(zip(axes, matrix.shape))
    shape = extents_of(node, x)
    arguments: dict[str, Operand] = {"x": x, "weight": Constant(name, axes, matrix)}
    params = {"m": math.prod(shape[:-1]), "n": sizes["N"], "k": sizes["K"], **params}
    return Chain(
        "dense",
        params,
        [node],
        node.outputs[0],
        arguments,
        channels=sizes["N"],
        channel_axis=len(extents_of(node, node.outputs[0])) - 1,
    )


def is_matrix(value: ir.Value) -> bool:
    """Whether a value is one constant matrix."""
    array = folded(value)
    return array is not None and array.ndim > 1 and math.prod(array.shape[:-2]) == 1


# --- Batches ------------------------------------------------------------------------------------------------------------
class Factor(NamedTuple):
    """A factor of a product of batches as it lies in memory.

    Attributes:
        axes: of a matrix, in memory.
    """

    value: ir.Value
    axes: str

    @classmethod
    def of(cls, value: ir.Value, axes: str) -> Factor:
        """A factor whose matrices have these axes; if a Transpose makes it, as it is before."""
        maker = value.producer()
        before = None if maker is None or maker.op_type != "Transpose" else maker.inputs[0]
        if maker is not None and before is not None and value.shape is not None:
            rank = len(value.shape)
            if list(maker.attributes.get_ints("perm", range(rank)[::-1])) == [*range(rank - 2), rank - 1, rank - 2]:
                return cls(before, axes[::-1])
        return cls(value, axes)

    @property
    def operand(self) -> Operand:
        array = folded(self.value)
        return self.value if array is None else Constant(str(self.value.name), axes_of(array.ndim), array)


def _batch(node: ir.Node, x: Factor, weight: Factor, params: ParamsByName) -> Chain | str:
    """A product of batches without its epilogue."""
    shape, other, y = extents_of(node, x.value), extents_of(node, weight.value), extents_of(node, node.outputs[0])
    batch = math.prod(y[:-2])
    counts = {"x_batch": math.prod(shape[:-2]), "weight_batch": math.prod(other[:-2])}
    if min(len(shape), len(other)) < 2 or any(count not in (1, batch) for count in counts.values()):
        return f"{name_of(node)} multiplies {shape} by {other}; allowed: equal batches, or a batch of 1"
    sizes = {"b": batch, "m": y[-2], "n": y[-1], "k": shape[x.axes.index("K") - 2]}
    if not all(sizes.values()):
        return f"{name_of(node)} multiplies {shape} by {other}; allowed: extents of at least 1"
    params = {**sizes, **counts, "x_layout": x.axes, "weight_layout": weight.axes, **params}
    chain = Chain("batch_matmul", params, [node], node.outputs[0], {"x": x.operand, "weight": weight.operand})
    chain.channels, chain.channel_axis = y[-1], len(y) - 1
    return chain


def _integer_product(node: ir.Node, x: Quantised, weight: Quantised) -> Chain | str:
    """A product of integers without its epilogue, by one constant matrix or of batches."""
    if folded(x.value) is None and is_matrix(weight.value):
        return _integer_chain(node, "KN", x, weight)
    return _integer_batch(node, x, weight)


def _integer_batch(node: ir.Node, x: Quantised, weight: Quantised, axes: Sequence[str] = ("MK", "KN")) -> Chain | str:
    """A product of batches of integers without its epilogue."""
    params = _integers(node, x, weight)
    if isinstance(params, str):
        return params
    chain = _batch(node, Factor(x.value, axes[0]), Factor(weight.value, axes[1]), params)
    if not isinstance(chain, str):
        chain.scalars |= _zero_points(x, weight)
    return chain


def _integers(node: ir.Node, x: Quantised, weight: Quantised) -> ParamsByName | str:
    """Formats and zero points of a product of integers; why not if it has no kernel."""
    if x.zero_point is None or weight.zero_point is None:
        return f"{name_of(node)} has a zero point that is computed or differs; allowed: one constant"
    if x.dtype not in INTEGERS or weight.dtype not in INTEGERS or (x.scale is not None and x.scale.size > 1):
        return f"{name_of(node)} is of {x.dtype} and {weight.dtype}; allowed: {', '.join(INTEGERS)} with one scale of x"
    return {"dtype": x.dtype, "weight_dtype": weight.dtype, "zero_points": [name[:-11] for name in _zero_points(x, weight)]}


def _zero_points(x: Quantised, weight: Quantised) -> dict[str, float]:
    """Scalar -> zero point, of those that are not 0."""
    found = {"x_zero_point": x.zero_point, "weight_zero_point": weight.zero_point}
    return {name: zero_point for name, zero_point in found.items() if zero_point}
