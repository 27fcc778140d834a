#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# The axes of a Resize may count from the end: -2, -1 are 2, 3 of an image, and ONNX Runtime resizes so. With keep_aspect_ratio_policy
# not_larger or not_smaller it gives the image back as it is. With 2, 3 it is right. onnx's reference evaluator refuses negative axes.
# Seen on 2026-11-29 (an image of 8 x 4 that is to have 4 x 8):
#     stretch: axes 2, 3: (1, 1, 4, 8), axes -2, -1: (1, 1, 4, 8)
#     not_larger: axes 2, 3: (1, 1, 4, 2), axes -2, -1: (1, 1, 8, 4)
#     not_smaller: axes 2, 3: (1, 1, 16, 8), axes -2, -1: (1, 1, 8, 4)
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
from onnx import TensorProto, checker, helper

info = helper.make_tensor_value_info
found = []
for policy in ("stretch", "not_larger", "not_smaller"):
    shapes = []
    for axes in ([2, 3], [-2, -1]):
        attributes = {"mode": "nearest", "keep_aspect_ratio_policy": policy, "axes": axes}
        node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **attributes)
        sizes = helper.make_tensor("sizes", TensorProto.INT64, [2], [4, 8])
        graph = helper.make_graph([node], "g", [info("x", 1, [1, 1, 8, 4])], [info("y", 1, [1, 1, "h", "w"])], [sizes])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        checker.check_model(model)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        shapes.append(session.run(None, {"x": np.zeros((1, 1, 8, 4), np.float32)})[0].shape)
    print(f"{policy}: axes 2, 3: {shapes[0]}, axes -2, -1: {shapes[1]}")
    found += [shape[2:] for shape in shapes]
sys.exit(found != [(4, 8), (4, 8), (4, 2), (8, 4), (16, 8), (8, 4)])
PYTHON
