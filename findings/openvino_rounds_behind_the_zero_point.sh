#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, openvino 2026.4.1, numpy 2.4.6
# QuantizeLinear is round(x / scale) + zero point, rounded half to even. OpenVINO adds the zero point first and rounds then. With an odd
# zero point every half goes to the other neighbour: 0.5 becomes 1 more, and -0.5 and 1.5 stay. So with an odd zero point all
# results in the middle differ by 1 from those of ONNX Runtime, and nothing with an even one.
# Seen on 2026-11-29 ([-1.5, -0.5, 0.5, 1.5, 2.5] by a scale of 1):
#     zero point 0: ONNX Runtime [-2, 0, 0, 2, 2], OpenVINO [-2, 0, 0, 2, 2]
#     zero point 1: ONNX Runtime [-1, 1, 1, 3, 3], OpenVINO [0, 0, 2, 2, 4]
#     zero point 2: ONNX Runtime [0, 2, 2, 4, 4], OpenVINO [0, 2, 2, 4, 4]
#     zero point 3: ONNX Runtime [1, 3, 3, 5, 5], OpenVINO [2, 2, 4, 4, 6]
# Exits 0 while OpenVINO behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import io
import sys

import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

info, kind = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype
OUTPUT = {"QuantizeLinear": TensorProto.INT8, "Cast": TensorProto.BOOL}


def computed(node, feeds, constants=(), opset=21):
    """The first output, by ONNX Runtime without optimisations and by OpenVINO."""
    inputs = [info(name, kind(each.dtype), each.shape) for name, each in feeds.items()]
    given = [numpy_helper.from_array(each, name) for name, each in constants]
    graph = helper.make_graph([node], "g", inputs, [info("y", OUTPUT.get(node.op_type, kind(feeds["x"].dtype)), None)], given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    text = model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(text, options, providers=["CPUExecutionProvider"])
    core = openvino.Core()
    there = core.compile_model(core.read_model(io.BytesIO(text)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return session.run(None, feeds)[0].ravel().tolist(), there(list(feeds.values()))[0].ravel().tolist()


x = np.array([-1.5, -0.5, 0.5, 1.5, 2.5], np.float32)
node = helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
found = []
for zero in range(4):
    here, there = computed(node, {"x": x}, [("scale", np.float32(1)), ("zero", np.int8(zero))])
    print(f"zero point {zero}: ONNX Runtime {here}, OpenVINO {there}")
    found.append([theirs - ours for ours, theirs in zip(here, there)])
sys.exit(found != [[0] * 5, [1, -1, 1, -1, 1]] * 2)
PYTHON
