"""ONNX models that are not valid, by what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

EIGHT = np.ones(8, np.float32)
NOT_REFUSED_BY_ONNX_RUNTIME = {
    "two different weights of one name", "two opsets of one domain", "a weight without a name", "an input without a name",
    "a constant with two values", "a Constant with an input", "a weight with its numbers twice",
    "an attribute of a function, in no function", "a Cast to no format", "a weight in a segment",
    "a function with the name of an operator", "an unused weight that is too short", "a sparse weight",
    "a sparse constant",
    # found when it runs
    "no group", "three groups of four channels", "a window of other channels", "a kernel_shape of another size",
    "a bias of another length", "a window larger than the image", "transposed windows of other channels",
    "a scale of other elements", "scales of other channels", "bounds for each channel", "updates of another shape",
    "a part of negative length", "a division of integers by zero",
    "a Reshape to another number of elements",
}  # fmt: skip


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    return helper.make_node(op, inputs, outputs, **attributes)


def row(*values: int, name: str = "s") -> Any:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def array(values: Any, name: str = "w") -> Any:
    return numpy_helper.from_array(np.asarray(values), name)


def graph(
    nodes: Sequence[Any], weights: Sequence[Any] = (), x: Any = (T.FLOAT, [1, 8]), outputs: Sequence[str] = ("y",)
) -> Any:
    values = [helper.make_empty_tensor_value_info(name) for name in outputs]
    return helper.make_graph(nodes, "net", [helper.make_tensor_value_info("x", *x)], values, weights)


def model(
    nodes: Sequence[Any], weights: Sequence[Any] = (), *, opset: int = 17, functions: Sequence[Any] = (), **of_graph: Any
) -> Any:
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    made = graph(nodes, weights, **of_graph)
    return helper.make_model(made, opset_imports=opsets, functions=functions, ir_version=8)


def tensor(name: str = "w", dims: Sequence[int] = (8,), data_type: int = T.FLOAT, **fields: Any) -> Any:
    made = onnx.TensorProto(name=name, data_type=data_type, **fields)
    made.dims.extend(dims)
    return made


def added(weight: Any, **options: Any) -> Any:
    """x + w."""
    return model([node("Add", ["x", "w"], ["y"])], [weight], **options)


def constant(**value: Any) -> Any:
    return node("Constant", [], ["w"], **value)


def with_constant(**value: Any) -> Any:
    return model([constant(**value), node("Add", ["x", "w"], ["y"])])


def body(
    nodes: Sequence[Any], output: str, weights: Sequence[Any] = (), inputs: Sequence[Any] = (), kind: int = T.FLOAT
) -> Any:
    return helper.make_graph(nodes, "body", inputs, [helper.make_tensor_value_info(output, kind, None)], weights)


NEGATED = body([node("Neg", ["x"], ["negated"])], "negated")


def branch(then: Any) -> Any:
    """If(any of x > 0) then ... else -x."""
    nodes = [
        node("ReduceMax", ["x"], ["most"], keepdims=0), node("Cast", ["most"], ["positive"], to=T.BOOL),
        node("If", ["positive"], ["y"], then_branch=then, else_branch=NEGATED),
    ]  # fmt: skip
    return model(nodes)


def function(name: str, nodes: Sequence[Any], attributes: Sequence[str] = (), domain: str = "own") -> Any:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function(domain, name, ["a"], ["r"], nodes, opsets, attributes)


def call(name: str, inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("y",), **attributes: Any) -> Any:
    return node(name, inputs, outputs, domain="own", **attributes)


def softmax_of_attribute() -> Any:
    made = node("Softmax", ["a"], ["r"])
    made.attribute.add(name="axis", ref_attr_name="along", type=onnx.AttributeProto.INT)
    return made


def nested(depth: int) -> Any:
    """Functions of which each calls the next one twice."""
    inner = [
        function(f"F{level}", [call(f"F{level + 1}", ["a"], ["b"]), call(f"F{level + 1}", ["b"], ["r"])])
        for level in range(depth - 1)
    ]
    last = function(f"F{depth - 1}", [node("Relu", ["a"], ["b"]), node("Neg", ["b"], ["r"])])
    return model([call("F0")], functions=[*inner, last])


def changed(made: Any, path: str, value: Any) -> Any:
    """A model with another value at a place such as `graph.node.0.name`; None removes it."""
    *steps, last = path.split(".")
    at = made
    for step in steps:
        at = at[int(step)] if step.isdigit() else getattr(at, step)
    if value is None:
        at.ClearField(last)
    else:
        setattr(at, last, value)
    return made


def relu() -> Any:
    return model([node("Relu", ["x"], ["y"])])


def _names() -> Iterator[tuple[str, Any, str]]:
    yield "a cycle", model([node("Add", ["x", "t"], ["y"]), node("Relu", ["y"], ["t"])]), "cycle"
    yield (
        "a name that two nodes make",
        model([node("Relu", ["x"], ["t"]), node("Neg", ["x"], ["t"]), node("Relu", ["t"], ["y"])]),
        "node Neg makes 't', which is already the name of another value",
    )
    yield "a node that makes an input", model([node("Relu", ["x"], ["x"])], outputs=["x"]), "makes 'x', which is already"
    yield (
        "a node that makes a weight",
        model([node("Relu", ["x"], ["w"])], [array(EIGHT)], outputs=["w"]),
        "makes 'w', which",
    )
    yield (
        "a result that one node makes twice",
        model([node("Split", ["x"], ["y", "y"], axis=1)]),
        "makes 'y', which is already",
    )
    yield "an output that nobody makes", model([node("Relu", ["x"], ["t"])]), "nothing makes the output 'y'"
    yield "a value from nowhere", model([node("Add", ["x", "q"], ["y"])]), "node Add reads 'q', which no node makes"
    yield "two inputs of one name", _twice(), "two inputs have the name 'x'"
    yield "an input without a name", changed(relu(), "graph.input.0.name", ""), "an input has no name"
    yield "a weight without a name", model([node("Relu", ["x"], ["y"])], [array(EIGHT, "")]), "a weight has no name"
    yield "a node without a result", model([node("Relu", ["x"], ["y"]), node("Relu", ["x"], [])]), "node Relu has no result"
    yield (
        "two nodes of one name",
        model([node("Relu", ["x"], ["t"], name="a"), node("Relu", ["t"], ["y"], name="a")]),
        "two nodes have the name 'a'",
    )
    yield (
        "two different weights of one name",
        model([node("Add", ["x", "w"], ["y"])], [array(EIGHT), array(2 * EIGHT)]),
        "two different weights have the name 'w'",
    )


def _twice() -> Any:
    made = relu()
    made.graph.input.append(made.graph.input[0])
    return made


def _versions() -> Iterator[tuple[str, Any, str]]:
    yield "no version of the format", changed(relu(), "ir_version", None), "has no version of ONNX's format"
    yield "a later version of the format", changed(relu(), "ir_version", 99), "has version 99 .* allowed: up to "
    yield "no graph", changed(relu(), "graph", None), "has no graph"
    yield "no opset", changed(relu(), "opset_import", None), "has no opset of ONNX"
    yield "an opset of the future", model([node("Relu", ["x"], ["y"])], opset=99), "needs opset 99; allowed: 7 to "
    twice = relu()
    twice.opset_import.append(helper.make_opsetid("", 13))
    yield "two opsets of one domain", twice, "two opsets of the domain '', 17 and 13"
    yield (
        "an input without a dtype",
        changed(relu(), "graph.input.0.type.tensor_type.elem_type", 0),
        "'x' is an array without a dtype",
    )
    untyped = relu()
    untyped.graph.output[0].type.tensor_type.shape.dim.add()
    yield "an output without a dtype", untyped, "'y' is an array without a dtype"
    yield "an input without a type", changed(relu(), "graph.input.0.type", None), "input 'x' has no type"
    unknown = changed(relu(), "graph.input.0.type.tensor_type.elem_type", 99)
    yield "an input of an unknown dtype", unknown, "'x' has the unknown dtype 99"
    wrong = relu()
    wrong.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", T.INT64, None))
    yield "an output of another format", wrong, r"node Relu -> y \(Relu\): Inferred elem type differs"
    for name, kind, extent in (("shape", T.FLOAT, 4), ("format", T.DOUBLE, 8)):
        both = added(array(EIGHT))
        both.graph.input.append(helper.make_tensor_value_info("w", kind, [extent]))
        yield f"a weight that is an input of another {name}", both, "differ"


def _nodes() -> Iterator[tuple[str, Any, str]]:
    def one(op: str, *weights: Any, **attributes: Any) -> Any:
        return model([node(op, ["x", *(each.name for each in weights)], ["y"], **attributes)], weights)

    yield "an operator that ONNX lacks", one("Frobnicate"), "No Op registered for Frobnicate"
    yield "an operator of a later opset", one("Gelu"), "No Op registered for Gelu with domain_version of 17"
    yield "an operator of an earlier opset", one("Upsample", array(np.ones(2, np.float32))), "Upsample is deprecated"
    yield "an input too few", one("Add"), r"node Add \(Add\): Node with schema.* has input size 1"
    yield "an input too many", one("Relu", array(EIGHT)), "has input size 2"
    yield "an input that is left out", model([node("Relu", [""], ["y"])]), "empty string|Input 0 expected"
    yield "a result too many", model([node("Relu", ["x"], ["y", "z"])]), "has output size 2"
    yield "no axis", model([node("Concat", ["x", "x"], ["y"])]), "Required attribute 'axis' is missing"
    yield "an unknown attribute", one("Relu", slope=1), "Unrecognized attribute: slope"
    yield "an attribute of another type", one("Softmax", axis=1.5), "Mismatched attribute type"
    yield "an attribute twice", _attribute_twice(), "appeared multiple times"
    yield "an attribute without a type", changed(one("Softmax", axis=1), "graph.node.0.attribute.0.type", 0), "mismatch"
    yield (
        "an attribute of a function, in no function",
        changed(one("Softmax", axis=1), "graph.node.0.attribute.0.ref_attr_name", "along"),
        "that of a function",
    )
    yield "a Cast to no format", one("Cast", to=0), "Invalid tensor data type 0"
    yield "a Cast to an unknown dtype", one("Cast", to=99), r"node Cast -> y \(Cast\)"
    for axis in (7, 2, -3):
        yield f"Softmax along axis {axis}", one("Softmax", axis=axis), rf"node Softmax -> y \(Softmax\): .*axis.*{axis}"
    yield "a permutation with an axis twice", one("Transpose", perm=[0, 0]), r"\(Transpose\)"
    yield (
        "a Reshape with two open extents",
        one("Reshape", row(-1, -1)),
        r"\(Reshape\): Target shape may not have multiple -1",
    )
    yield "a Reshape to an extent of -2", one("Reshape", row(-2, 8)), r"\(Reshape\): Invalid dimension value: -2"
    yield "a shape in floating point", one("Reshape", array(EIGHT[:1])), r"\(Reshape\)"
    yield (
        "a Slice in steps of 0",
        one("Slice", row(0, name="a"), row(3, name="b"), row(1, name="c"), row(0, name="d")),
        "step",
    )
    yield "parts that are not the whole", model([node("Split", ["x", "s"], ["y", "z"], axis=1)], [row(3, 4)]), r"\(Split\)"
    yield (
        "extents that do not match",
        one("MatMul", array(np.ones((5, 8), np.float32))),
        r"\(MatMul\): Incompatible dimensions",
    )
    yield (
        "extents that do not match, in front of another node",
        model([node("MatMul", ["x", "w"], ["t"]), node("Relu", ["t"], ["y"])], [array(np.ones((5, 8), np.float32))]),
        r"\(MatMul\): Incompatible dimensions",
    )
    yield "float32 and float64", one("MatMul", array(np.eye(8))), r"\(MatMul\): B has inconsistent type tensor\(double\)"
    yield "a condition in floating point", one("Not"), r"\(Not\): X typestr: T, has unsupported type: tensor\(float\)"
    yield (
        "a scale in float64",
        one("QuantizeLinear", array(np.float64(0.1), "a"), array(np.uint8(0), "b")),
        r"\(QuantizeLinear\): y_scale typestr",
    )
    yield (
        "a zero point in float32",
        one("QuantizeLinear", array(np.float32(0.1), "a"), array(np.float32(0), "b")),
        r"\(QuantizeLinear\): y_zero_point typestr",
    )
    image = (T.FLOAT, [1, 3, 8, 8])
    for name, attributes in (("strides", [0, 1]), ("dilations", [1, -1]), ("pads", [1, 1, 1])):
        conv = node("Conv", ["x", "w"], ["y"], **{name: attributes})
        yield f"{name} {attributes}", model([conv], [array(np.ones((4, 3, 3, 3), np.float32))], x=image), f"Attribute {name}"
    pool = node("MaxPool", ["x"], ["y"], kernel_shape=[0, 2])
    yield "a window of no pixel", model([pool], x=image), r"\(MaxPool\): Attribute kernel_shape"


def _rules() -> Iterator[tuple[str, Any, str]]:
    """What onnx's checker and its inference take."""
    image = (T.FLOAT, [1, 3, 8, 8])

    def one(op: str, *weights: Any, x: Any = image, **attributes: Any) -> Any:
        return model([node(op, ["x", *(each.name for each in weights)], ["y"], **attributes)], weights, x=x)

    def ones(*shape: int, name: str = "w") -> Any:
        return array(np.ones(shape, np.float32), name)

    row_of_8, filters = (T.FLOAT, [1, 8]), ones(4, 3, 3, 3)
    yield "an unknown padding", one("Conv", filters, auto_pad="EVEN"), "has auto_pad 'EVEN'; allowed: NOTSET, SAME_UPPER"
    yield (
        "padding in two ways",
        one("Conv", filters, auto_pad="SAME_UPPER", pads=[1] * 4),
        "has auto_pad 'SAME_UPPER' and pads",
    )
    yield (
        "padding of whole windows",
        one("MaxPool", kernel_shape=[2, 2], pads=[2] * 4),
        "allowed: pads smaller than the window",
    )
    yield "an unknown order of blocks", one("DepthToSpace", blocksize=1, mode="XYZ"), "has mode 'XYZ'; allowed: DCR, CRD"
    yield (
        "an unknown mode of a Pad",
        one("Pad", row(0, 1, 0, 1), x=row_of_8, mode="none"),
        "has mode 'none'; allowed: constant",
    )
    yield "no group", one("Conv", filters, group=0), "has group 0; allowed: 1 or more"
    yield "three groups of four channels", one("Conv", ones(4, 1, 3, 3), group=3), "4 output channels in 3 groups"
    yield "a window of other channels", one("Conv", ones(4, 5, 3, 3)), "takes 5 input channels, but its input has 3"
    yield (
        "a kernel_shape of another size",
        one("Conv", filters, kernel_shape=[5, 5]),
        r"kernel_shape \[5, 5\] and a weight of",
    )
    yield "a bias of another length", one("Conv", filters, ones(5, name="b")), r"a bias of shape \[5\]; allowed: \[4\]"
    yield "a window larger than the image", one("Conv", ones(4, 3, 11, 11)), r"shape \[1, 4, -2, -2\]; allowed: extents of 0"
    yield "transposed windows of other channels", one("ConvTranspose", ones(5, 2, 2, 2)), "takes 5 input channels, but its"
    yield "a Reshape to another number of elements", one("Reshape", row(3, 5), x=row_of_8), r"makes \[3, 5\] of \[1, 8\]"
    yield "a scale of other elements", one("LayerNormalization", ones(3), x=row_of_8), r"has a scale of shape \[3\]"
    yield "a normalised axis out of range", one("LayerNormalization", ones(8), x=row_of_8, axis=4), "has axis 4, but its"
    yield (
        "scales of other channels",
        one("QuantizeLinear", ones(5), array(np.zeros(5, np.uint8), "z"), x=row_of_8),
        r"has scales of shape \[5\]; allowed: one number, or \[8\]",
    )
    yield "bounds for each channel", one("Clip", ones(8), x=row_of_8), r"a lower bound of shape \[8\]; allowed: one number"
    places = array(np.zeros((1, 1), np.int64), "places")
    yield "updates of another shape", one("ScatterND", places, ones(3, 3), x=row_of_8), r"updates of shape \[3, 3\]; allowed"
    parts = model([node("Split", ["x", "s"], ["y", "z"], axis=1)], [row(-3, 11)])
    yield "a part of negative length", parts, r"shape \[1, -3\]; allowed: extents of 0 or more"
    nothing = model([node("Div", ["x", "w"], ["y"])], [array(np.zeros(8, np.int64))], x=(T.INT64, [1, 8]))
    yield "a division of integers by zero", nothing, "has a divisor of zero"
    shape = [node("ConstantOfShape", ["s"], ["t"], value=array(EIGHT[:2], "v")), node("Add", ["x", "t"], ["y"])]
    yield "two numbers to fill an array with", model(shape, [row(8)]), r"has a value of shape \[2\]; allowed: one number"


def _attribute_twice() -> Any:
    made = model([node("Softmax", ["x"], ["y"], axis=1)])
    made.graph.node[0].attribute.append(helper.make_attribute("axis", 0))
    return made


def _tensors() -> Iterator[tuple[str, Any, str]]:
    raw = EIGHT.tobytes()
    damaged = [
        ("a negative extent", {"dims": [-8], "raw_data": raw}, "negative extent"),
        ("too few bytes", {"raw_data": raw[:-1]}, "has 31 bytes and needs 32"),
        ("too many bytes", {"raw_data": raw + b"1234"}, "has 36 bytes and needs 32"),
        ("no numbers", {}, "has 0 numbers and needs 8"),
        ("too few numbers", {"float_data": [1.0] * 7}, "has 7 numbers and needs 8"),
        ("numbers of another format", {"int32_data": [1] * 8}, "in the field int32_data"),
        ("an unknown dtype", {"raw_data": raw, "data_type": 99}, "unknown dtype 99"),
        ("no dtype", {"raw_data": raw, "data_type": 0}, "unknown dtype 0"),
        ("an extent beyond all memory", {"dims": [1 << 62, 4, 8], "raw_data": raw}, "larger than any memory"),
        ("halves of more than 16 bits", {"data_type": T.FLOAT16, "int32_data": [1 << 20] * 8}, "more than 16 bits"),
        ("four bits in a byte each", {"data_type": T.INT4, "raw_data": b"12345678"}, "has 8 bytes and needs 4"),
        ("strings as bytes", {"data_type": T.STRING, "raw_data": b"ab"}, "field raw_data; allowed: string_data"),
    ]  # fmt: skip
    for name, fields, message in damaged:
        yield f"a weight with {name}", added(tensor(**fields)), f"weight 'w'.*{message}"
        value = with_constant(value=tensor(**fields))
        yield (
            f"a constant with {name}",
            value,
            rf"node Constant \(Constant\): the tensor of its attribute 'value'.*{message}",
        )
    short = {"raw_data": raw[:-4]}
    yield (
        "a weight with its numbers twice",
        added(tensor(raw_data=raw, float_data=EIGHT)),
        "twice, as float_data and raw_data",
    )
    segment = added(tensor(raw_data=raw))
    segment.graph.initializer[0].segment.end = 4
    yield "a weight in a segment", segment, "one segment of a tensor"
    yield "an unused weight that is too short", model([node("Relu", ["x"], ["y"])], [tensor(**short)]), "has 28 bytes"
    yield "a constant without a value", with_constant(), "One and only one of the attributes"
    yield "a constant with two values", with_constant(value_float=1.0, value_floats=[1.0] * 8), "One and only one"
    yield "a constant of other extents", with_constant(value_floats=[1.0] * 5), "Incompatible dimensions"
    yield "a constant of integers beside floats", with_constant(value_ints=[1] * 8), "inconsistent type tensor"
    yield "a constant of strings", with_constant(value_string="a"), "unsupported type"
    fed = model([node("Constant", ["x"], ["w"], value=tensor(raw_data=raw)), node("Add", ["x", "w"], ["y"])])
    yield "a Constant with an input", fed, "has input size 1"
    values, places = array(EIGHT[:2]), row(1, 3, name="places")
    sparse = helper.make_sparse_tensor(values, places, [8])
    yield "a sparse constant", with_constant(sparse_value=sparse), "'sparse_value' is a sparse tensor"
    weight = model([node("Add", ["x", "w"], ["y"])])
    weight.graph.sparse_initializer.append(sparse)
    yield "a sparse weight", weight, "weight 'w' is sparse"
    bad = [constant(value=tensor(**short)), node("Add", ["x", "w"], ["t"])]
    yield "a constant in a body that is too short", branch(body(bad, "t")), "'value'.* has 28 bytes"
    yield "a weight in a body that is too short", branch(body(bad[1:], "t", [tensor(**short)])), "weight 'w'.* has 28 bytes"
    bad = [constant(value=tensor(**short)), node("Add", ["a", "w"], ["r"])]
    yield "a constant in a function that is too short", model([call("F")], functions=[function("F", bad)]), "has 28 bytes"


def _bodies() -> Iterator[tuple[str, Any, str]]:
    then = {
        "a body without its output": (body([node("Relu", ["x"], ["t"])], "q"), "nothing makes the output 'q'"),
        "a value from nowhere in a body": (body([node("Relu", ["q"], ["t"])], "t"), "reads 'q', which no node makes"),
        "a body out of order": (
            body([node("Relu", ["s"], ["t"]), node("Neg", ["x"], ["s"])], "t"), "'s' is read before node Neg makes it",
        ),
        "a body that makes what it read before": (body([node("Relu", ["x"], ["x"])], "x"), "'x' is read before"),
        "a wrong axis in a body": (body([node("Softmax", ["x"], ["t"], axis=7)], "t"), r"\(Softmax\): 'axis'"),
        "an unknown operator in a body": (body([node("Frobnicate", ["x"], ["t"])], "t"), "No Op registered for Frobnicate"),
        "branches of two formats": (
            body([node("Cast", ["x"], ["t"], to=T.INT32)], "t", kind=T.INT32),
            "Mismatched tensor element type",
        ),
        "a branch with an input": (
            body([node("Relu", ["q"], ["t"])], "t", inputs=[helper.make_tensor_value_info("q", T.FLOAT, [1, 8])]),
            "Graph has 1 inputs but 0 were provided",
        ),
    }  # fmt: skip
    for name, (made, message) in then.items():
        yield name, branch(made), message
    without = branch(NEGATED)
    attributes = without.graph.node[2].attribute
    attributes.remove(next(each for each in attributes if each.name == "else_branch"))
    yield "an If without an else", without, "Required attribute 'else_branch' is missing"


def _functions() -> Iterator[tuple[str, Any, str]]:
    relu = node("Relu", ["a"], ["r"])
    of = {
        "a function that calls itself": ([call("F", ["a"], ["r"])], "a function calls itself, 'F' -> 'F'"),
        "a function without its output": ([node("Relu", ["a"], ["q"])], "nothing makes the output 'r'"),
        "a function that reads the graph": ([node("Relu", ["x"], ["r"])], "in the function 'F': node Relu reads 'x'"),
        "a function out of order": ([node("Relu", ["q"], ["r"]), node("Neg", ["a"], ["q"])], "'q' is read before node Neg"),
        "a wrong axis in a function": ([node("Softmax", ["a"], ["r"], axis=7)], r"\(Softmax\): 'axis'"),
        "an unknown operator in a function": ([node("Frobnicate", ["a"], ["r"])], "No Op registered for Frobnicate"),
    }
    for name, (nodes, message) in of.items():
        yield name, model([call("F")], functions=[function("F", nodes)]), message
    pair = [function("F", [call("G", ["a"], ["r"])]), function("G", [call("F", ["a"], ["r"])])]
    yield "functions that call one another", model([call("F")], functions=pair), "a function calls itself, '[FG]' -> '[FG]'"
    yield (
        "two functions of one name",
        model([call("F")], functions=[function("F", [relu])] * 2),
        "two functions of the name 'F'",
    )
    yield (
        "a call with too many inputs",
        model([call("F", ["x", "x"])], functions=[function("F", [relu])]),
        "calls the function 'F' with 2 inputs; allowed: 1",
    )
    yield "a call with too few inputs", model([call("F", [])], functions=[function("F", [relu])]), r"\(Relu\)"
    yield (
        "an argument of another type",
        model([call("F", along=1.5)], functions=[function("F", [softmax_of_attribute()], ["along"])]),
        "attribute 'along' of type FLOAT, where Softmax in it wants INT",
    )
    yield (
        "an argument that is a wrong axis",
        model([call("F", along=9)], functions=[function("F", [softmax_of_attribute()], ["along"])]),
        r"\(Softmax\): 'axis'",
    )
    own = helper.make_function("", "Relu", ["a"], ["r"], [node("Neg", ["a"], ["r"])], [helper.make_opsetid("", 17)])
    yield "a function with the name of an operator", model([node("Relu", ["x"], ["y"])], functions=[own]), "own operators"


INVALID = {
    name: (made, message)
    for part in (_names, _versions, _nodes, _rules, _tensors, _bodies, _functions)
    for name, made, message in part()
}  # what is wrong -> a model, and what the message says
