#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# By ONNX the attribute stash_type of LayerNormalization and RMSNormalization, 1 where it is missing, has mean and variance computed in
# float32. onnx's reference evaluator accepts no other stash_type, and then computes in the type of the input: in float16 a square over
# 65504 is infinite, and a row with a number 256 away from its mean (RMS: from 0) is 0 everywhere.
# Seen on 2026-11-29:
#     LayerNormalization of [-300, 300]: evaluator [-0.0, 0.0], ONNX Runtime [-1.0, 1.0]
#     RMSNormalization of [-300, 300]: evaluator [-0.0, 0.0], ONNX Runtime [-1.0, 1.0]
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

found = []
for op in ("LayerNormalization", "RMSNormalization"):
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in ("x", "scale", "y")]
    graph = helper.make_graph([helper.make_node(op, ["x", "scale"], ["y"], stash_type=1)], "g", ports[:2], ports[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = {"x": np.array([-300, 300], np.float16), "scale": np.ones(2, np.float16)}
    with np.errstate(over="ignore"):
        found.append([np.round(each.run(None, values)[0], 2).tolist() for each in (ReferenceEvaluator(model), session)])
    print("{} of [-300, 300]: evaluator {}, ONNX Runtime {}".format(op, *found[-1]))
sys.exit(found != [[[0.0, 0.0], [-1.0, 1.0]]] * 2)
PYTHON
