#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, openvino 2026.4.1, numpy 2.4.6
# OpenVINO reads these attributes and inputs of ONNX, and computes as if they were not there; nothing is said. ONNX Runtime, which has no
# layout = 1 and refuses it, and onnx's reference evaluator (but for input_forget) follow them.
# Seen on 2026-11-29 (last row: the shape of the state is batch first by ONNX, 3 1 1):
#     Resize antialias: ONNX Runtime [6.656, 10.344, 20.656, 24.344], OpenVINO [5.5, 9.5, 21.5, 25.5]
#     Resize exclude_outside: ONNX Runtime [0.371, 2.629], OpenVINO [0.406, 2.594]
#     Resize keep_aspect_ratio_policy: ONNX Runtime shape [1, 2], OpenVINO shape [4, 2]
#     ReduceL1 noop_with_empty_axes: ONNX Runtime [1.0, 2.0], OpenVINO [-1.0, 2.0]
#     ReduceLogSum noop_with_empty_axes: ONNX Runtime [0.0, 0.693], OpenVINO [1.0, 2.0]
#     LSTM input_forget: ONNX Runtime [0.71, 0.733], OpenVINO [0.901, 0.948]
#     LSTM peepholes: ONNX Runtime [0.94, 0.973], OpenVINO [0.901, 0.948]
#     LSTM without either: ONNX Runtime [0.901, 0.948], OpenVINO [0.901, 0.948]
#     LSTM layout: OpenVINO state of shape [1, 2, 1]
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
from onnx import helper, numpy_helper

info = helper.make_tensor_value_info


def computed(op, opset, x, weights, outputs=1, **attributes):
    """The last output of one node, by ONNX Runtime, or why not, and by OpenVINO; None among the weights: left out."""
    names = ["" if each is None else f"w{number}" for number, each in enumerate(weights)]
    results = [f"y{number}" for number in range(outputs)]
    node = helper.make_node(op, ["x", *names], results, **attributes)
    constants = [numpy_helper.from_array(each, name) for name, each in zip(names, weights) if name]
    x = np.array(x, np.float32)
    graph = helper.make_graph([node], "g", [info("x", 1, x.shape)], [info(results[-1], 1, None)], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    text = model.SerializeToString()
    core = openvino.Core()
    there = core.compile_model(core.read_model(io.BytesIO(text)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0]
    try:
        here = onnxruntime.InferenceSession(text, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    except Exception:
        here = None
    return here, there


def shown(label, pair):
    texts = [str([round(float(each), 3) for each in array.ravel()]) for array in pair]
    print(f"{label}: ONNX Runtime {texts[0]}, OpenVINO {texts[1]}")
    return texts[0] == texts[1]


image = np.arange(32).reshape(1, 1, 4, 8)
steps = np.arange(1, 7).reshape(3, 2, 1)
row = np.arange(4).reshape(1, 1, 1, 4)


def half(*shape):
    return np.full(shape, 0.5, np.float32)


same = [
    shown("Resize antialias", computed("Resize", 18, image, [None, None, np.array([1, 1, 2, 2])], mode="linear", antialias=1)),
    shown(
        "Resize exclude_outside",
        computed("Resize", 18, row, [None, None, np.array([1, 1, 1, 2])], mode="cubic", exclude_outside=1),
    ),
]
sizes = {"mode": "nearest", "keep_aspect_ratio_policy": "not_larger", "axes": [2, 3]}
here, there = (list(each.shape[2:]) for each in computed("Resize", 18, image, [None, None, np.array([4, 2])], **sizes))
print(f"Resize keep_aspect_ratio_policy: ONNX Runtime shape {here}, OpenVINO shape {there}")
same += [
    here == there,
    shown("ReduceL1 noop_with_empty_axes", computed("ReduceL1", 18, [-1, 2], [], noop_with_empty_axes=1)),
    shown("ReduceLogSum noop_with_empty_axes", computed("ReduceLogSum", 18, [1, 2], [], noop_with_empty_axes=1)),
]
weights = [half(1, 4, 1), half(1, 4, 1)]
peepholes = [*weights, None, None, None, None, half(1, 3)]
same += [
    shown("LSTM input_forget", computed("LSTM", 17, steps, weights, 2, hidden_size=1, input_forget=1)),
    shown("LSTM peepholes", computed("LSTM", 17, steps, peepholes, 2, hidden_size=1)),
    shown("LSTM without either", computed("LSTM", 17, steps, weights, 2, hidden_size=1)),
]
here, there = computed("LSTM", 17, steps, weights, 2, hidden_size=1, layout=1)
print(f"LSTM layout: OpenVINO state of shape {list(there.shape)}")
sys.exit(same != [False] * 7 + [True] or here is not None or list(there.shape) != [1, 2, 1])
PYTHON
