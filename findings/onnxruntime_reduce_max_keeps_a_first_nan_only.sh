#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# ONNX Runtime's ReduceMax and ReduceMin give NaN if the first number of a reduced group is NaN, and drop a NaN anywhere else. Its
# ReduceSum keeps each, and onnx's reference evaluator (NumPy) keeps it everywhere. So a softmax that is written with ReduceMax, Sub,
# Exp and ReduceSum still shows the NaN, but a model that looks for one by its largest number misses it.
# Seen on 2026-11-28 (places of a NaN in [1, 8] at which the result is NaN):
#     ReduceMax: ONNX Runtime [0], evaluator [0, 1, 2, 3, 4, 5, 6, 7]
#     ReduceMin: ONNX Runtime [0], evaluator [0, 1, 2, 3, 4, 5, 6, 7]
#     ReduceSum: ONNX Runtime [0, 1, 2, 3, 4, 5, 6, 7], evaluator [0, 1, 2, 3, 4, 5, 6, 7]
# Exits 0 while they behave like that.
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

COUNT = 8
every = list(range(COUNT))
found = {}
for name in ("ReduceMax", "ReduceMin", "ReduceSum"):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, COUNT])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph = helper.make_graph([helper.make_node(name, ["x", "axes"], ["y"])], "g", [x], [y], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    kept = []
    for run in (session.run, ReferenceEvaluator(model).run):
        numbers = np.zeros((COUNT, 1, COUNT), np.float32)
        numbers[every, 0, every] = np.nan
        kept.append([place for place in every if np.isnan(run(None, {"x": numbers[place]})[0]).all()])
    found[name] = kept
    print(f"{name}: ONNX Runtime {kept[0]}, evaluator {kept[1]}")
sys.exit(found != {"ReduceMax": [[0], every], "ReduceMin": [[0], every], "ReduceSum": [every, every]})
PYTHON
