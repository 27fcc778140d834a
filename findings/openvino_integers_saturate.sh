#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, openvino 2026.4.1, numpy 2.4.6
# Integers of ONNX wrap around, as in ONNX Runtime and onnx's reference evaluator. On a CPU OpenVINO computes those of 8 bits wider and
# saturates the result, and those of int64 in 32 bits: 2 ** 40 + 1 is 1, without a word. Masks and hashes made of integers differ.
# Seen on 2026-11-29:
#     uint8 250 + 10: ONNX Runtime [4], OpenVINO [255]
#     uint8 0 - 1: ONNX Runtime [255], OpenVINO [0]
#     int8 100 + 100: ONNX Runtime [-56], OpenVINO [127]
#     uint8 255 << 1: ONNX Runtime [254], OpenVINO [255]
#     int64 2 ** 40 + 1: ONNX Runtime [1099511627777], OpenVINO [1]
#     int64 5 ** 20: ONNX Runtime [95367431640625], OpenVINO [-2147483648]
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


found = []
for label, op, dtype, first, second in (
    ("uint8 250 + 10", "Add", np.uint8, 250, 10),
    ("uint8 0 - 1", "Sub", np.uint8, 0, 1),
    ("int8 100 + 100", "Add", np.int8, 100, 100),
    ("uint8 255 << 1", "BitShift", np.uint8, 255, 1),
    ("int64 2 ** 40 + 1", "Add", np.int64, 2**40, 1),
    ("int64 5 ** 20", "Pow", np.int64, 5, 20),
):
    attributes = {"direction": "LEFT"} if op == "BitShift" else {}
    node = helper.make_node(op, ["x", "z"], ["y"], **attributes)
    here, there = computed(node, {"x": np.array([first], dtype), "z": np.array([second], dtype)})
    print(f"{label}: ONNX Runtime {here}, OpenVINO {there}")
    found += [*here, *there]
sys.exit(found != [4, 255, 255, 0, -56, 127, 254, 255, 2**40 + 1, 1, 5**20, -(2**31)])
PYTHON
