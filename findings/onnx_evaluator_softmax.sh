#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# Before opset 13 the attribute axis of Softmax, LogSoftmax and Hardmax says where the array is flattened into rows; from there to the
# end all numbers are one row. onnx's reference evaluator takes it for the only axis at every opset. And its LogSoftmax is the logarithm
# of a softmax that is 0 by then: minus infinity from a distance of 104 on, where the result is a plain number.
# Seen on 2026-11-29:
#     opset 11, axis 1 of (1, 2, 3): sums over the row: Softmax evaluator 3.0, ONNX Runtime 1.0
#     opset 11, axis 1 of (1, 2, 3): sums over the row: Hardmax evaluator 3.0, ONNX Runtime 1.0
#     opset 13, axis 2 of (1, 2, 3): sums over the row: Softmax evaluator 2.0, ONNX Runtime 2.0
#     opset 13, LogSoftmax of [0, 200]: evaluator [-inf, 0.0], ONNX Runtime [-200.0, 0.0]
# Exits 0 while onnx behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def both(op, opset, axis, x):
    info = helper.make_tensor_value_info
    ports = [info("x", TensorProto.FLOAT, x.shape)], [info("y", TensorProto.FLOAT, x.shape)]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], axis=axis)], "g", *ports)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with np.errstate(divide="ignore"):
        return [each.run(None, {"x": x})[0] for each in (ReferenceEvaluator(model), session)]


x, found = np.arange(6, dtype=np.float32).reshape(1, 2, 3), []
for op, opset, axis in (("Softmax", 11, 1), ("Hardmax", 11, 1), ("Softmax", 13, 2)):
    found.append([round(float(y.sum()), 3) for y in both(op, opset, axis, x)])
    evaluated, computed = found[-1]
    print(f"opset {opset}, axis {axis} of {x.shape}: sums over the row: {op} evaluator {evaluated}, ONNX Runtime {computed}")
found.append([y.tolist() for y in both("LogSoftmax", 13, 0, np.array([0, 200], np.float32))])
print("opset 13, LogSoftmax of [0, 200]: evaluator {}, ONNX Runtime {}".format(*found[-1]))
sys.exit(found != [[3.0, 1.0], [3.0, 1.0], [2.0, 2.0], [[-np.inf, 0.0], [-200.0, 0.0]]])
PYTHON
