#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6; x86-64
# ONNX Runtime's Sigmoid of float32 on a CPU is an approximation between -18 and 18, exact to 1e-7 of the number 1, and not of the result:
# at -16 it is half of the right value, and from -18 on 0. So a gate, or the logarithm of a probability, is minus infinity where it
# should be -18. Its Exp, Add and Div give the right numbers, and so does onnx's reference evaluator.
# Seen on 2026-11-29 (result / right result):
#     Sigmoid at -5: 1, at -10: 0.9998, at -16: 0.52965, at -18: 0, at -20: 0
#     1 / (1 + exp(-x)) at -5: 1, at -10: 1, at -16: 1, at -18: 1, at -20: 1
# Exits 0 while ONNX Runtime behaves like that.
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

AT = [-5, -10, -16, -18, -20]
node = helper.make_node
graphs = {
    "Sigmoid": [node("Sigmoid", ["x"], ["y"])],
    "1 / (1 + exp(-x))": [
        node("Constant", [], ["one"], value_float=1.0),
        node("Neg", ["x"], ["minus"]),
        node("Exp", ["minus"], ["exp"]),
        node("Add", ["exp", "one"], ["sum"]),
        node("Div", ["one", "sum"], ["y"]),
    ],
}
share = {}
for label, nodes in graphs.items():
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(AT)]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    computed = session.run(None, {"x": np.array(AT, np.float32)})[0].astype(np.float64)
    share[label] = computed * (1 + np.exp(-np.array(AT, np.float64)))
    print(label, ", ".join(f"at {at}: {float(f'{number:.6g}'):.5g}" for at, number in zip(AT, share[label])))
first, second = share.values()
sys.exit(not (first[2] < 0.9 and first[3] == first[4] == 0 and np.allclose(second, 1, rtol=1e-6)))
PYTHON
