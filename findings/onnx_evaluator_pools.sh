#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# onnx's reference evaluator gives pools the wrong size where onnx's shape inference, and ONNX Runtime, give the right one:
#     - GlobalMaxPool takes an image to have two axes: of one axis it also reduces the channels, of three it leaves the first one
#     - MaxPool with auto_pad SAME_LOWER rounds down what is ceil(size / stride) by definition; SAME_UPPER is right
#     - AveragePool and LpPool with auto_pad VALID forget the dilations
# And the second output of a MaxPool whose strides and dilations are all 1 counts from the start of each channel, not of the array.
# Seen on 2026-11-29:
#     GlobalMaxPool of (2, 3, 5): inferred (2, 3, 1), ONNX Runtime (2, 3, 1), evaluator (2, 1)
#     GlobalMaxPool of (2, 3, 5, 4, 3): inferred (2, 3, 1, 1, 1), ONNX Runtime (2, 3, 1, 1, 1), evaluator (2, 3, 5, 1, 1, 1)
#     MaxPool of (1, 1, 7, 7): inferred (1, 1, 4, 4), ONNX Runtime (1, 1, 4, 4), evaluator (1, 1, 3, 3)
#     AveragePool of (1, 1, 6, 6): inferred (1, 1, 2, 2), ONNX Runtime (1, 1, 2, 2), evaluator (1, 1, 4, 4)
#     LpPool of (1, 1, 6, 6): inferred (1, 1, 2, 2), ONNX Runtime (1, 1, 2, 2), evaluator (1, 1, 4, 4)
#     indices of MaxPool over two channels of 3 x 3: ONNX Runtime [4, 5, 7, 8, 13, 14, 16, 17], evaluator [4, 5, 7, 8, 4, 5, 7, 8]
# Exits 0 while onnx behaves like that.
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


def results(op, shape, outputs=1, **attributes):
    """What is inferred, what ONNX Runtime computes, and what the evaluator computes; of the last output."""
    node = helper.make_node(op, ["x"], ["y", "indices"][:outputs], **attributes)
    info = helper.make_tensor_value_info
    found = [info("y", TensorProto.FLOAT, None), info("indices", TensorProto.INT64, None)][:outputs]
    graph = helper.make_graph([node], "g", [info("x", TensorProto.FLOAT, shape)], found)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output[-1].type.tensor_type.shape.dim
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = {"x": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)}
    computed, evaluated = (each.run(None, x)[-1] for each in (session, ReferenceEvaluator(model)))
    return tuple(each.dim_value for each in inferred), computed, evaluated


apart = []
for op, shape, attributes in (
    ("GlobalMaxPool", (2, 3, 5), {}),
    ("GlobalMaxPool", (2, 3, 5, 4, 3), {}),
    ("MaxPool", (1, 1, 7, 7), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("AveragePool", (1, 1, 6, 6), {"kernel_shape": [3, 3], "dilations": [2, 2], "auto_pad": "VALID"}),
    ("LpPool", (1, 1, 6, 6), {"kernel_shape": [3, 3], "dilations": [2, 2], "auto_pad": "VALID"}),
):
    inferred, computed, evaluated = results(op, shape, **attributes)
    print(f"{op} of {shape}: inferred {inferred}, ONNX Runtime {computed.shape}, evaluator {evaluated.shape}")
    apart.append(inferred == computed.shape != evaluated.shape)
indices = [each.ravel().tolist() for each in results("MaxPool", (1, 2, 3, 3), 2, kernel_shape=[2, 2])[1:]]
print("indices of MaxPool over two channels of 3 x 3: ONNX Runtime {}, evaluator {}".format(*indices))
sys.exit(not (all(apart) and indices == [[4, 5, 7, 8, 13, 14, 16, 17], [4, 5, 7, 8] * 2]))
PYTHON
