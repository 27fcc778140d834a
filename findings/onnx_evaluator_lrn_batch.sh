#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# An LRN normalises every channel of every image. onnx's reference evaluator goes over as many channels as there are images, and
# only divides the others by the power of the bias: with one image of four channels the first channel alone is normalised. With as
# many images as channels it agrees with ONNX Runtime.
# Seen on 2026-11-28:
#     1 images: channels that differ from ONNX Runtime's [1, 2, 3]
#     4 images: channels that differ from ONNX Runtime's []
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

info = helper.make_tensor_value_info
apart = {}
for images in (1, 4):
    x = np.arange(1, 1 + images * 4, dtype=np.float32).reshape(images, 4, 1, 1)
    node = helper.make_node("LRN", ["x"], ["y"], size=3, alpha=0.5, beta=0.75, bias=1.0)
    graph = helper.make_graph(
        [node], "normalised", [info("x", TensorProto.FLOAT, x.shape)], [info("y", TensorProto.FLOAT, x.shape)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (evaluated,) = ReferenceEvaluator(model).run(None, {"x": x})
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (computed,) = session.run(None, {"x": x})
    apart[images] = [channel for channel in range(4) if np.abs(evaluated - computed)[:, channel].max() > 1e-4]
    print(images, "images: channels that differ from ONNX Runtime's", apart[images])
sys.exit(not (apart[1] == [1, 2, 3] and not apart[4]))
PYTHON
