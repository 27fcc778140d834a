"""Convolutions with the nodes behind them that their epilogues compute, in floating point and quantised.

The scales and the bias of a quantised convolution become operands of its epilogue. With x = (qx - zx) sx,
weight = (qw - zw) sw[k] and y = (qy - zy) sy, the sums of products of integers are y / (sx sw[k]). Therefore the bias
is rounded to integers of sx sw[k], and the sums are multiplied by sx sw[k] / sy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from schedsearch.network.chain import Chain, Operand, Read
from schedsearch.network.compositions.composition import noted
from schedsearch.network.epilogue import append_bias, append_requantise, float_stages, integer_stages
from schedsearch.network.facts import FLOATS, INTEGERS, dtype_of, extents_of, folded, inputs_of, name_of
from schedsearch.network.graph import Constant
from schedsearch.network.invalid import ModelError
from schedsearch.network.quantised import Quantised, converted_from
from schedsearch.network.transposed import transposed_problem
from schedsearch.network.windows import Window
from schedsearch.typed import Array, ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir


def _conv(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    x, weight = inputs_of(node, 2)
    quantised = converted_from(x), converted_from(weight)
    if quantised[0] is not None and quantised[1] is not None:
        chain = _quantised_conv(node, quantised[0], quantised[1], taken)
        if isinstance(chain, Chain):
            return chain  # otherwise it is computed in floating point, as it is defined
    if (dtype := dtype_of(x)) not in FLOATS:
        return f"{name_of(node)} is {dtype}; allowed: {', '.join((*FLOATS, *INTEGERS))}"
    params = _window(node, x, weight)
    if isinstance(params, str):
        return params
    chain = _begin(node, {**params, "dtype": dtype}, x, weight, folded(weight))
    if isinstance(chain, str):
        return chain
    chain.make_depthwise()
    if problem := append_bias(chain, node, 2):
        return problem
    float_stages(chain, taken)
    follower = chain.next(taken)
    if chain.op == "conv2d" and follower is not None and follower.op_type == "DepthToSpace":
        chain.append(follower)
        float_stages(chain, taken, everywhere=True)  # they may as well come before the pixels move
        chain.stages.append({"depth_to_space": block_of(follower)})
    return chain


def _quantised_conv(node: ir.Node, x: Quantised, weight: Quantised, taken: set[ir.Node]) -> Chain | str:
    """A convolution between DequantizeLinear and QuantizeLinear: integers in, and mostly integers out."""
    chain = _integer_chain(node, x, weight)
    if isinstance(chain, str):
        return chain
    if x.scale is None or weight.scale is None:
        return f"{name_of(node)} has a scale that is computed; allowed: a constant"
    scale = x.scale * weight.scale
    if problem := append_bias(chain, node, 2, scale):
        return problem
    integer_stages(chain, scale, taken)
    return chain


def _qlinear_conv(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    values = inputs_of(node, 8)
    x, weight = Quantised.of(node, values[0], 1, 2), Quantised.of(node, values[3], 4, 5)
    y = Quantised.of(node, node.outputs[0], 6, 7)
    if y.dtype not in INTEGERS:
        return f"{name_of(node)} makes {y.dtype or 'an unknown dtype'}; allowed: {', '.join(INTEGERS)}"
    chain = _integer_chain(node, x, weight)
    if isinstance(chain, str):
        return chain
    if x.scale is None or weight.scale is None or y.scale is None or y.zero_point is None:
        return f"{name_of(node)} has a scale or zero point that is computed; allowed: constants"
    if problem := append_bias(chain, node, 8):
        return problem
    append_requantise(chain, x.scale * weight.scale, y, taken)
    return chain


def _conv_integer(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    x, weight = inputs_of(node, 2)
    return _integer_chain(node, Quantised.of(node, x, None, 2), Quantised.of(node, weight, None, 3))


def _transposed(node: ir.Node, taken: set[ir.Node]) -> str:
    """Transposed convolutions are convolutions here, but for those that cannot be; see `network.transposed`."""
    return f"{name_of(node)} {noted(node) or transposed_problem(node) or 'has a bias that is computed; allowed: a constant'}"


CONVOLUTIONS: Mapping[str, Read] = {
    "Conv": _conv,
    "QLinearConv": _qlinear_conv,
    "ConvInteger": _conv_integer,
    "ConvTranspose": _transposed,
}


def block_of(node: ir.Node) -> ParamsByName:
    """Block and mode of a DepthToSpace or SpaceToDepth."""
    return {"block": node.attributes.get_int("blocksize", 1), "mode": node.attributes.get_string("mode", "DCR")}


# --- Parts of a convolution ---------------------------------------------------------------------------------------------
def _begin(node: ir.Node, params: ParamsByName, x: ir.Value, weight: ir.Value, filters: Array | None) -> Chain | str:
    if filters is None:
        return f"{name_of(node)} has a weight that is computed; allowed: a constant"
    arguments: dict[str, Operand] = {"x": x, "weight": Constant(str(weight.name), "OIHW", filters)}
    return Chain("conv2d", params, [node], node.outputs[0], arguments, channels=filters.shape[0])


def _integer_chain(node: ir.Node, x: Quantised, weight: Quantised) -> Chain | str:
    """A convolution of integers without its epilogue."""
    if x.dtype not in INTEGERS or weight.dtype not in INTEGERS:
        return f"{name_of(node)} is of {x.dtype} and {weight.dtype}; allowed: {', '.join(INTEGERS)}"
    params = _window(node, x.value, weight.value)
    if isinstance(params, str):
        return params
    if x.zero_point is None or weight.zero_point is None:
        return f"{name_of(node)} has a zero point that is computed or differs between channels; allowed: one constant"
    if x.scale is not None and x.scale.size > 1:
        return f"{name_of(node)} has {x.scale.size} scales of its input; allowed: one"
    zero_points = {"x": x.zero_point, "weight": weight.zero_point}
    params |= {"dtype": x.dtype, "weight_dtype": weight.dtype}
    params["zero_points"] = [name for name, zero_point in zero_points.items() if zero_point]
    chain = _begin(node, params, x.value, weight.value, folded(weight.value))
    if not isinstance(chain, str):
        chain.scalars |= {f"{name}_zero_point": zero_points[name] for name in params["zero_points"]}
        chain.make_depthwise()
    return chain


def _window(node: ir.Node, x: ir.Value, weight: ir.Value) -> ParamsByName | str:
    """Sizes and window of a two-dimensional convolution; why not if it has another number of dimensions."""
    image, kernel = extents_of(node, x), extents_of(node, weight)
    if len(image) != 4:
        allowed = "1 or 2, and 3 of floats with a constant weight, whose filters fit into the padded input"
        return f"{name_of(node)} has {len(image) - 2} spatial dimensions; allowed: {allowed}"
    if len(kernel) != 4:
        raise ModelError(
            f"node {name_of(node)}: the weight has {len(kernel)} dimensions, but {x.name!r} has 4; correct the model"
        )
    (n, c, h, w), (k, each, r, s) = image, kernel
    if c != each * (groups := node.attributes.get_int("group", 1)):
        raise ModelError(
            f"node {name_of(node)}: the weight takes {groups} x {each} input channels (groups x channels of each), but "
            f"{x.name!r} has {c}; correct the model"
        )
    window = Window.of(node, (r, s)).params((h, w))
    return {"n": n, "c": c, "h": h, "w": w, "k": k, "r": r, "s": s, **window, "groups": groups}
