#!/bin/sh
# onnxscript 0.7.2, onnx-ir 1.1.0, onnx 1.23.2, numpy 2.4.6
# onnxscript's constant folding replaces a SplitToSequence of equal parts, and the SequenceAt that read them, by a Split with the
# attribute num_outputs. Split has that attribute from opset 18 on; in a model of opset 17, which was valid before, onnx's checker
# refuses the result.
# Seen on 2026-11-28:
#     before: valid, after: ['num_outputs'] of Split, refused
# Exits 0 while onnxscript behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnxscript==0.7.2 onnx-ir==1.1.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import logging
import sys

import onnx
import onnxscript.optimizer
from onnx import TensorProto, helper

logging.disable(logging.WARNING)
info = helper.make_tensor_value_info
nodes = [
    helper.make_node("SplitToSequence", ["x", "two"], ["parts"], axis=1, keepdims=1),
    helper.make_node("SequenceAt", ["parts", "zero"], ["a"]),
    helper.make_node("SequenceAt", ["parts", "one"], ["b"]),
    helper.make_node("Sub", ["a", "b"], ["y"]),
]
numbers = [helper.make_tensor(name, TensorProto.INT64, [], [value]) for name, value in (("two", 2), ("zero", 0), ("one", 1))]
given, made = info("x", TensorProto.FLOAT, [3, 4]), info("y", TensorProto.FLOAT, [3, 2])
graph = helper.make_graph(nodes, "parts", [given], [made], numbers)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.checker.check_model(model, full_check=True)
folded = onnxscript.optimizer.optimize(model)
attributes = [each.name for node in folded.graph.node if node.op_type == "Split" for each in node.attribute if each.name != "axis"]
try:
    onnx.checker.check_model(folded, full_check=True)
    answer = "accepted"
except onnx.checker.ValidationError:
    answer = "refused"
print("before: valid, after:", attributes, "of Split,", answer)
sys.exit(not (attributes == ["num_outputs"] and answer == "refused"))
PYTHON
