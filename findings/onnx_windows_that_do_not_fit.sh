#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# By ONNX the size behind a window is floor((size - window) / stride) + 1: 0 for a window of 7 over 6 pixels with stride 3. onnx's shape
# inference truncates -1/3 to 0 and infers 1, and check_model with full_check accepts that. ONNX Runtime refuses the Conv, and gives one
# pixel for the MaxPool, as if 6 pixels were 7. With stride 1 the shape inference says 0. onnx's reference evaluator gives 0 in both.
# So an image that is too small for a network gets a shape, and a result, that looks right.
# Seen on 2026-11-29 (height and width):
#     Conv stride 3: inferred 1, evaluator 0, ONNX Runtime: Invalid input shape
#     MaxPool stride 3: inferred 1, evaluator 0, ONNX Runtime 1
#     Conv stride 1: inferred 0, evaluator 0, ONNX Runtime: Invalid input shape
# Exits 0 while they behave like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

onnxruntime.set_default_logger_severity(4)
found = []
for op, stride in (("Conv", 3), ("MaxPool", 3), ("Conv", 1)):
    values = {"x": np.zeros((1, 1, 6, 6), np.float32), "w": np.ones((1, 1, 7, 7), np.float32)}
    values = dict(list(values.items())[: 1 + (op == "Conv")])
    node = helper.make_node(op, list(values), ["y"], kernel_shape=[7, 7], strides=[stride, stride])
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in values.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    onnx.checker.check_model(model, full_check=True)
    inferred = model.graph.output[0].type.tensor_type.shape.dim[2].dim_value
    evaluated = ReferenceEvaluator(model).run(None, values)[0].shape[2]
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        computed = f" {session.run(None, values)[0].shape[2]}"
    except Exception as error:
        computed = ": Invalid input shape" if "Invalid input shape" in str(error) else str(error)
    found.append((inferred, evaluated, computed))
    print(f"{op} stride {stride}: inferred {inferred}, evaluator {evaluated}, ONNX Runtime{computed}")
refused = ": Invalid input shape"
sys.exit(found != [(1, 0, refused), (1, 0, " 1"), (0, 0, refused)])
PYTHON
