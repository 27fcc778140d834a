#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, openvino 2026.4.1, numpy 2.4.6; x86-64
# A NaN stays NaN in ONNX Runtime's activations, as in NumPy and PyTorch. OpenVINO turns it into an ordinary number in many of them: 0 by
# Relu, a bound by Clip, infinity by Exp, 1 by HardSigmoid; Max drops one that is its
# first argument, and keeps one that is its second. A network that went wrong looks healthy behind its next Relu.
# Seen on 2026-11-29 (of NaN):
#     Relu: ONNX Runtime nan, OpenVINO 0.0
#     Clip to -1, 1: ONNX Runtime nan, OpenVINO -1.0
#     Exp: ONNX Runtime nan, OpenVINO inf
#     HardSigmoid: ONNX Runtime nan, OpenVINO 1.0
#     Celu: ONNX Runtime nan, OpenVINO 0.0
#     Max(NaN, 1): ONNX Runtime nan, OpenVINO 1.0
#     Max(1, NaN): ONNX Runtime nan, OpenVINO nan
#     Tanh: ONNX Runtime nan, OpenVINO nan
#     Sigmoid: ONNX Runtime nan, OpenVINO nan
#     Cast to bool: ONNX Runtime True, OpenVINO False
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


nan, one = np.array([np.nan], np.float32), np.array([1], np.float32)
found = []
for label, op, names, feeds, constants in (
    ("Relu", "Relu", ["x"], {"x": nan}, []),
    ("Clip to -1, 1", "Clip", ["x", "low", "high"], {"x": nan}, [("low", np.float32(-1)), ("high", np.float32(1))]),
    ("Exp", "Exp", ["x"], {"x": nan}, []),
    ("HardSigmoid", "HardSigmoid", ["x"], {"x": nan}, []),
    ("Celu", "Celu", ["x"], {"x": nan}, []),
    ("Max(NaN, 1)", "Max", ["x", "z"], {"x": nan, "z": one}, []),
    ("Max(1, NaN)", "Max", ["x", "z"], {"x": one, "z": nan}, []),
    ("Tanh", "Tanh", ["x"], {"x": nan}, []),
    ("Sigmoid", "Sigmoid", ["x"], {"x": nan}, []),
    ("Cast to bool", "Cast", ["x"], {"x": nan}, []),
):
    attributes = {"to": TensorProto.BOOL} if op == "Cast" else {}
    (here,), (there,) = computed(helper.make_node(op, names, ["y"], **attributes), feeds, constants)
    print(f"{label}: ONNX Runtime {here}, OpenVINO {there}")
    found.append(str(there))
sys.exit(found != "0.0 -1.0 inf 1.0 0.0 1.0 nan nan nan False".split())
PYTHON
