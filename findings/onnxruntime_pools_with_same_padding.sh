#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# With auto_pad SAME_UPPER or SAME_LOWER a pool has ceil(size / stride) results along an axis: 6 of 6 pixels with stride 1, 3 with
# stride 2. ONNX Runtime computes the pads of a dilated pool as if it had no dilations, and answers fewer pixels than onnx's shape
# inference wrote into the file. It refuses a MaxPool whose window is smaller than its stride where the padding would be
# less than 0, as a 1 x 1 window with stride 2 that halves an image of even size. AveragePool (from opset 19 on) and Conv run.
# Seen on 2026-11-29:
#     MaxPool, 3 x 3 dilated by 2: inferred (1, 1, 6, 6), ONNX Runtime (1, 1, 4, 4)
#     AveragePool, 3 x 3 dilated by 2: inferred (1, 1, 6, 6), ONNX Runtime (1, 1, 4, 4)
#     MaxPool, 1 x 1 with stride 2: inferred (1, 1, 3, 3), ONNX Runtime: padding values must be non-negative
#     AveragePool, 1 x 1 with stride 2: inferred (1, 1, 3, 3), ONNX Runtime (1, 1, 3, 3)
#     Conv, 1 x 1 with stride 2: inferred (1, 1, 3, 3), ONNX Runtime (1, 1, 3, 3)
# Exits 0 while ONNX Runtime behaves like that.
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

onnxruntime.set_default_logger_severity(4)
info, found = helper.make_tensor_value_info, []
dilated, strided = {"kernel_shape": [3, 3], "dilations": [2, 2]}, {"kernel_shape": [1, 1], "strides": [2, 2]}
for op, label, options in (
    ("MaxPool", "3 x 3 dilated by 2", dilated),
    ("AveragePool", "3 x 3 dilated by 2", dilated),
    ("MaxPool", "1 x 1 with stride 2", strided),
    ("AveragePool", "1 x 1 with stride 2", strided),
    ("Conv", "1 x 1 with stride 2", strided),
):
    values = {"x": np.arange(36, dtype=np.float32).reshape(1, 1, 6, 6), "w": np.ones((1, 1, 1, 1), np.float32)}
    values = dict(list(values.items())[: 1 + (op == "Conv")])
    node = helper.make_node(op, list(values), ["y"], auto_pad="SAME_UPPER", **options)
    inputs = [info(name, TensorProto.FLOAT, value.shape) for name, value in values.items()]
    graph = helper.make_graph([node], "g", inputs, [info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    shape = tuple(each.dim_value for each in inferred.graph.output[0].type.tensor_type.shape.dim)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    try:
        computed = session.run(None, values)[0].shape
    except Exception as error:
        computed = str(error).rsplit(": ", 1)[-1].strip()
    print(f"{op}, {label}: inferred {shape}, ONNX Runtime{':' * isinstance(computed, str)} {computed}")
    found.append((shape, computed))
refused, right = ((1, 1, 3, 3), "padding values must be non-negative"), ((1, 1, 3, 3), (1, 1, 3, 3))
sys.exit(found != [((1, 1, 6, 6), (1, 1, 4, 4))] * 2 + [refused, right, right])
PYTHON
