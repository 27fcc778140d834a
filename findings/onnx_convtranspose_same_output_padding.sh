#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# A ConvTranspose with auto_pad SAME_UPPER and strides 2 doubles the image; output_padding is part of that size by ONNX's formula
# of the pads. onnx's shape inference adds output_padding to the doubled size, infer_shapes writes it into the file, and
# check_model with full_check accepts it. ONNX Runtime and onnx's own reference evaluator compute the doubled size.
# Seen on 2026-11-28:
#     inferred [1, 1, 9, 9] evaluated (1, 1, 8, 8) onnxruntime (1, 1, 8, 8)
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

options = {"auto_pad": "SAME_UPPER", "strides": [2, 2], "output_padding": [1, 1]}
node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **options)
info = helper.make_tensor_value_info
inputs = [info("x", TensorProto.FLOAT, [1, 1, 4, 4]), info("w", TensorProto.FLOAT, [1, 1, 3, 3])]
graph = helper.make_graph([node], "transposed", inputs, [info("y", TensorProto.FLOAT, None)])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
onnx.checker.check_model(inferred, full_check=True)
shape = [each.dim_value for each in inferred.graph.output[0].type.tensor_type.shape.dim]
arrays = {"x": np.ones((1, 1, 4, 4), np.float32), "w": np.ones((1, 1, 3, 3), np.float32)}
(evaluated,) = ReferenceEvaluator(model).run(None, arrays)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(computed,) = session.run(None, arrays)
print("inferred", shape, "evaluated", evaluated.shape, "onnxruntime", computed.shape)
sys.exit(not (shape == [1, 1, 9, 9] and evaluated.shape == computed.shape == (1, 1, 8, 8)))
PYTHON
