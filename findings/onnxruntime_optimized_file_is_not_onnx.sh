#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# With SessionOptions.optimized_model_filepath ONNX Runtime writes the optimised model. At ORT_ENABLE_EXTENDED it fuses the nodes
# of a root-mean-square normalisation into one SimplifiedLayerNormalization, an operator of its own that it puts into the domain of
# ONNX. ONNX has no such operator: onnx's checker refuses the file, and so does every other reader. The operators that it adds to
# the domain com.microsoft say at least whose they are.
# Seen on 2026-11-28:
#     before: Pow, ReduceMean, Add, Sqrt, Div, Mul, valid True
#     after: SimplifiedLayerNormalization of the domain '', valid False
# Exits 0 while they behave like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder/optimized.onnx" <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

steps = [
    ("Pow", ["x", "two"], "square", {}),
    ("ReduceMean", ["square"], "mean", {"axes": [-1], "keepdims": 1}),
    ("Add", ["mean", "epsilon"], "sum", {}),
    ("Sqrt", ["sum"], "root", {}),
    ("Div", ["x", "root"], "normal", {}),
    ("Mul", ["normal", "scale"], "y", {}),
]
nodes = [helper.make_node(op, reads, [y], **attributes) for op, reads, y, attributes in steps]
constants = {"two": np.float32(2), "epsilon": np.float32(1e-5), "scale": np.ones(8, np.float32)}
held = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
info = helper.make_tensor_value_info
graph = helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, [2, 8])], [info("y", TensorProto.FLOAT, [2, 8])], held)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def valid(model):
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


before = valid(model)
print("before:", ", ".join(node.op_type for node in model.graph.node) + ",", "valid", before)
options = onnxruntime.SessionOptions()
options.optimized_model_filepath = sys.argv[1]
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
options.log_severity_level = 3
onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
written = onnx.load(sys.argv[1])
(node,) = written.graph.node
after = valid(written)
print("after:", node.op_type, "of the domain", repr(node.domain) + ",", "valid", after)
sys.exit(not (before and not after and (node.domain, node.op_type) == ("", "SimplifiedLayerNormalization")))
PYTHON
