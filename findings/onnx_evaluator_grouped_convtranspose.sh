#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# A ConvTranspose with several groups has a bias for each output channel of all groups. onnx's reference evaluator computes each group
# as a ConvTranspose with the whole bias, so every group gets the first numbers of it: with two groups of one channel both get the
# same one. With two channels a group it raises ValueError, also without a bias.
# Seen on 2026-11-29:
#     1 channel a group: evaluator [11.0, 11.0], ONNX Runtime [11.0, 21.0]
#     2 channels a group: evaluator ValueError, ONNX Runtime [11.0, 21.0, 31.0, 41.0]
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

info, found = helper.make_tensor_value_info, []
for channels in (1, 2):
    bias = 10 * np.arange(1, 1 + 2 * channels, dtype=np.float32)
    values = {"x": np.ones((1, 2, 1, 1), np.float32), "w": np.ones((2, channels, 1, 1), np.float32), "b": bias}
    node = helper.make_node("ConvTranspose", list(values), ["y"], group=2)
    inputs = [info(name, TensorProto.FLOAT, value.shape) for name, value in values.items()]
    graph = helper.make_graph([node], "g", inputs, [info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    try:
        evaluated = ReferenceEvaluator(model).run(None, values)[0].ravel().tolist()
    except ValueError as error:
        evaluated = type(error).__name__
    found.append((evaluated, session.run(None, values)[0].ravel().tolist()))
    print(f"{channels} channel{'s' * (channels > 1)} a group: evaluator {evaluated}, ONNX Runtime {found[-1][1]}")
sys.exit(found != [([11.0, 11.0], [11.0, 21.0]), ("ValueError", [11.0, 21.0, 31.0, 41.0])])
PYTHON
