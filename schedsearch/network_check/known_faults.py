"""What ONNX Runtime and onnx's evaluator compute wrong by themselves, each with version and source.

A model is compared with its right numbers: such nodes are replaced by nodes that mean the same and are computed right, or
what is wrong there is left out of the comparison.

| evaluator | versions | what is wrong | what is done |
|---|---|---|---|
| ONNX Runtime | 1.31, 1.32 | Sigmoid is 2e-4 off at -10, half of the right value at -16 and 0 from -18 (seen on x86-64, in MLAS; `findings/onnxruntime_sigmoid_is_0_below_minus_18.sh`); Swish as well | 1 / (1 + exp(-x)) |
| ONNX Runtime | 1.31, 1.32 | with optimisation, a MatMul of a weight after DequantizeLinear of opset 21 is half a percent off | optimisation is off |
| ONNX Runtime | 1.31, 1.32 | a NaN in a window of MaxPool survives only as its last element | NaN is not compared after MaxPool |
| ONNX Runtime | 1.31, 1.32 | a NaN under ReduceMax or ReduceMin survives only as the first number | the result is made NaN where there is one, also in bodies of loops and branches, from opset 15 |
| ONNX Runtime | 1.31, 1.32 | QLinearSoftmax rounds 1 / scale of its result down to an integer: with a scale of 0.0173 results are 1.4 % too small | a Softmax between DequantizeLinear and QuantizeLinear |
| onnx | 1.23 | BatchNormalization of opsets 7 to 13 mixes the input's own mean and variance into those that are given (`BatchNormalization_6` and `_9` of onnx.reference take it for one in training) | `own_operators` has one after ONNX's definition |
| onnx | 1.23 | a Loop without a condition takes no turn | it gets a condition that is true |
| onnx | 1.23 | LSTM, GRU and RNN ignore sequence_lens, activations, clip, input_forget | `own_recurrences` has them after ONNX's definition |
| onnx | 1.23 | LRN normalises as many channels as there are images (its loop over channels ends at the batch) | `own_operators` has one after ONNX's definition |
| onnx | 1.23 | Softmax, LogSoftmax and Hardmax of opsets 1 to 12 are taken along one axis in place of all from there on (`findings/onnx_evaluator_softmax.sh`) | `own_old_softmaxes` has them after ONNX's definition |
| onnx | 1.23 | LogSoftmax is minus infinity from a distance of 104 on (as above) | `own_softmaxes` subtracts the logarithm of the sum |
| onnx | 1.23 | GlobalMaxPool of images of one or three axes, MaxPool with SAME_LOWER, AveragePool and LpPool with VALID and dilations have the wrong size, indices of MaxPool count from the start of a plane, and a NaN in its window survives only as the first element (`findings/onnx_evaluator_pools.sh`) | `own_pools` has them after ONNX's definition |
| onnx | 1.23 | ConvTranspose gives each group the whole bias, and fails if a group has several output channels (`findings/onnx_evaluator_grouped_convtranspose.sh`) | `own_operators` has it group by group |
| onnx | 1.23 | LayerNormalization and RMSNormalization of float16 square in float16 (`findings/onnx_evaluator_normalisations_of_float16.sh`) | `own_operators` has them in float64 |
| onnx | 1.23 | LpNormalization with p = 1 sums values with their signs (`findings/onnx_evaluator_lp_normalization.sh`) | `own_operators` has one after ONNX's definition |
| onnx | 1.23 | ReduceLogSumExp of minus infinity throughout is NaN (`findings/onnx_evaluator_log_sum_exp.sh`) | `own_operators` has one that gives minus infinity |
| onnx | 1.23 | the products that Attention gives with qk_matmul_output_mode 0 are those behind the softcap (`findings/onnx_evaluator_attention_products.sh`) | `own_operators` computes them without it |
| onnx | 1.23 | NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss without weights count ignored items in the mean if ignore_index is -1 | `own_operators` gives them weights of 1 |
| onnx | 1.23 | a cubic GridSample moves places outside of the image to its border, where ONNX Runtime and PyTorch move the pixels around them | `own_operators` moves the pixels |
| onnx | 1.23 | a cubic Resize by pytorch_half_pixel to one pixel takes that at -0.5 in place of 0 (`findings/onnx_evaluator_resize_to_one_pixel.sh`) | `own_operators` takes the first pixel |
"""  # noqa: E501  (a table)

from __future__ import annotations

import math

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

_EXTREMES = ("ReduceMax", "ReduceMin")
_WHOLE = frozenset(
    {TensorProto.INT8, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.UINT32, TensorProto.UINT64}
)
_CAST_LIKE = 15  # the opset that has it
_ONE_AXIS = 13  # the opset from which the axis of a softmax is one

LOSES_NAN = frozenset({"MaxPool", "GlobalMaxPool", "LpPool"})


def replacement(node: NodeProto, kind: int, opset: int) -> list[NodeProto]:
    """The nodes that compute what a node means; the last one writes its result.

    Args:
        kind: ONNX's number of the dtype of the result.
        opset: of the model.
    """
    if node.domain == "com.microsoft" and node.op_type == "QLinearSoftmax":
        return _quantised_softmax(node, opset)
    if node.domain not in ("", "ai.onnx"):
        return [node]
    if opset >= _CAST_LIKE:
        node = _with_own_bodies(node)
        if node.op_type in _EXTREMES and kind not in _WHOLE:
            return _keeping_nan(node)
    if node.op_type == "Loop" and (len(node.input) < 2 or not node.input[1]):
        return _loop(node)
    if kind != TensorProto.FLOAT:
        return [node]
    if node.op_type == "Sigmoid":
        return _sigmoid(node.input[0], node.output[0])
    if node.op_type == "Swish":
        (x,), (y,) = node.input, node.output
        alpha = next((each.f for each in node.attribute if each.name == "alpha"), 1.0)
        scaled = [_constant(alpha, f"{y}/alpha"), helper.make_node("Mul", [x, f"{y}/alpha"], [f"{y}/ax"])]
        return [*scaled, *_sigmoid(f"{y}/ax", f"{y}/gate"), helper.make_node("Mul", [x, f"{y}/gate"], [y])]
    return [node]


def _quantised_softmax(node: NodeProto, opset: int) -> list[NodeProto]:
    """As ONNX Runtime documents it; before opset 13, which an attribute says, of all axes from one on."""
    given = {each.name: each.i for each in node.attribute}
    axis, y, (x, *linear) = given.get("axis", -1), node.output[0], node.input
    is_one = given.get("opset", _ONE_AXIS) >= _ONE_AXIS or axis == -1
    if given.get("channels_last", 0) or (is_one and axis != -1 and opset < _ONE_AXIS):
        return [node]
    nodes = [helper.make_node("DequantizeLinear", [x, *linear[:2]], [f"{y}/x"])]
    if is_one:
        nodes.append(helper.make_node("Softmax", [f"{y}/x"], [f"{y}/softmax"], axis=axis))
    else:
        nodes.append(helper.make_node("Flatten", [f"{y}/x"], [f"{y}/rows"], axis=axis))
        nodes.append(helper.make_node("Softmax", [f"{y}/rows"], [f"{y}/row"], axis=1))
        nodes.append(helper.make_node("Shape", [x], [f"{y}/shape"]))
        nodes.append(helper.make_node("Reshape", [f"{y}/row", f"{y}/shape"], [f"{y}/softmax"]))
    return [*nodes, helper.make_node("QuantizeLinear", [f"{y}/softmax", *linear[2:]], [y])]


def _with_own_bodies(node: NodeProto) -> NodeProto:
    """A node whose bodies keep each NaN under ReduceMax and ReduceMin."""
    if all(each.type != AttributeProto.GRAPH for each in node.attribute):
        return node
    copy = NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        if attribute.type == AttributeProto.GRAPH:
            _keep_nan_in(attribute.g)
    return copy


def _keep_nan_in(body: GraphProto) -> None:
    nodes = []
    for each in body.node:
        own = _with_own_bodies(each)
        nodes += _keeping_nan(own) if own.op_type in _EXTREMES and own.domain in ("", "ai.onnx") else [own]
    del body.node[:]
    body.node.extend(nodes)


def _keeping_nan(node: NodeProto) -> list[NodeProto]:
    """NaN where one of the numbers is, otherwise what the node gives; of any dtype."""
    y = node.output[0]
    plain, marked = NodeProto(), NodeProto()
    plain.CopyFrom(node)
    marked.CopyFrom(node)
    plain.output[0], marked.output[0] = f"{y}/plain", f"{y}/any nan"
    marked.op_type, marked.input[0], marked.name = "ReduceMax", f"{y}/is nan", ""
    return [
        plain,
        helper.make_node("Cast", [node.input[0]], [f"{y}/float"], to=TensorProto.FLOAT),
        helper.make_node("IsNaN", [f"{y}/float"], [f"{y}/nan"]),
        helper.make_node("Cast", [f"{y}/nan"], [f"{y}/is nan"], to=TensorProto.FLOAT),
        marked,
        helper.make_node("Cast", [f"{y}/any nan"], [f"{y}/has nan"], to=TensorProto.BOOL),
        _constant(math.nan, f"{y}/NaN"),
        helper.make_node("CastLike", [f"{y}/NaN", f"{y}/plain"], [f"{y}/NaN like it"]),
        helper.make_node("Where", [f"{y}/has nan", f"{y}/NaN like it", f"{y}/plain"], [y]),
    ]


def _loop(node: NodeProto) -> list[NodeProto]:
    condition = f"{node.output[0]}/goes on"
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.input.extend([*(node.input[:1] or [""]), condition, *node.input[2:]])
    return [
        helper.make_node("Constant", [], [condition], value=helper.make_tensor("true", TensorProto.BOOL, [], [True])),
        copy,
    ]


def _sigmoid(x: str, y: str) -> list[NodeProto]:
    return [
        _constant(1.0, f"{y}/1"),
        helper.make_node("Neg", [x], [f"{y}/-x"]),
        helper.make_node("Exp", [f"{y}/-x"], [f"{y}/exp"]),
        helper.make_node("Add", [f"{y}/exp", f"{y}/1"], [f"{y}/1+exp"]),
        helper.make_node("Div", [f"{y}/1", f"{y}/1+exp"], [y]),
    ]


def _constant(number: float, name: str) -> NodeProto:
    return helper.make_node("Constant", [], [name], value_float=number)
