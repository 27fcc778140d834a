#!/bin/sh
# onnxconverter-common 1.16.0, onnx 1.23.2, numpy 2.4.6
# convert_float_to_float16 makes a model of float16. Of these valid ones it makes files that onnx's checker refuses; it raises nothing:
#     an input with two readers    with keep_io_types each reader gets a Cast, named after the reader; readers without names, which
#                                  ONNX allows, get Casts whose results have one name
#     a number of a Constant       one that is given as value_float stays float32 where float16 is declared
#     a ConstantOfShape            without a value it makes float32, as ever, where float16 is declared
#     weights of a branch          in an If that has weights of its own they become float16, and what they meet stays float32
# Seen on 2026-11-29:
#     plain: valid
#     an input with two readers: refused
#     a number of a Constant: refused
#     a ConstantOfShape: refused
#     weights of a branch: refused
# Exits 0 while onnxconverter-common behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnxconverter-common==1.16.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from onnx import TensorProto, checker, helper
from onnxconverter_common.float16 import convert_float_to_float16

info, node, tensor = helper.make_tensor_value_info, helper.make_node, helper.make_tensor


def branch(name):
    weight = tensor(f"weight of {name}", TensorProto.FLOAT, [], [2.0])
    return helper.make_graph([node("Add", ["x", weight.name], [name])], name, [], [info(name, 1, [3])], [weight])


found = []
for label, nodes, weights in (
    ("plain", [node("Add", ["x", "c"], ["y"])], [tensor("c", TensorProto.FLOAT, [], [2.0])]),
    ("an input with two readers", [node("Neg", ["x"], ["z"]), node("Add", ["x", "z"], ["y"])], []),
    ("a number of a Constant", [node("Constant", [], ["c"], value_float=2.5), node("Add", ["x", "c"], ["y"])], []),
    (
        "a ConstantOfShape",
        [node("ConstantOfShape", ["shape"], ["c"]), node("Add", ["x", "c"], ["y"])],
        [tensor("shape", TensorProto.INT64, [1], [3])],
    ),
    (
        "weights of a branch",
        [node("If", ["truth"], ["y"], then_branch=branch("then"), else_branch=branch("else"))],
        [tensor("truth", TensorProto.BOOL, [], [True])],
    ),
):
    graph = helper.make_graph(nodes, "g", [info("x", 1, [3])], [info("y", 1, [3])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model, full_check=True)
    narrow = convert_float_to_float16(model, keep_io_types=True)
    try:
        checker.check_model(narrow, full_check=True)
        found.append("valid")
    except Exception:
        found.append("refused")
    print(f"{label}: {found[-1]}")
sys.exit(found != ["valid", *["refused"] * 4])
PYTHON
