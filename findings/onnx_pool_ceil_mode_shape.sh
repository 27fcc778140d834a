#!/bin/sh
# onnx 1.23.2, numpy 2.4.6
# A MaxPool with ceil_mode has a last window where pixels are left over, unless that window would begin in the padding behind
# the image: ONNX's definition says so since opset 19, and onnx's own reference evaluator computes it (2 x 2 here).
# onnx's shape inference counts the window all the same (3 x 3), infer_shapes writes that shape into the file, and
# check_model with full_check accepts it. A Flatten or Reshape behind the pool inherits the wrong shape.
# Seen on 2026-11-28:
#     inferred [1, 1, 3, 3] evaluated (1, 1, 2, 2)
# Exits 0 while onnx behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1)
info = helper.make_tensor_value_info
graph = helper.make_graph([node], "pool", [info("x", TensorProto.FLOAT, [1, 1, 4, 4])], [info("y", TensorProto.FLOAT, None)])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
onnx.checker.check_model(inferred, full_check=True)
shape = [each.dim_value for each in inferred.graph.output[0].type.tensor_type.shape.dim]
(y,) = ReferenceEvaluator(model).run(None, {"x": np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)})
print("inferred", shape, "evaluated", y.shape)
sys.exit(not (shape == [1, 1, 3, 3] and y.shape == (1, 1, 2, 2)))
PYTHON
