#!/usr/bin/env bash
# onnxscript 0.7.2 (onnx 1.23.2, onnx-ir 1.1.0): `onnxscript.optimizer.optimize` changes what valid models compute.
#
#   clip, relu     Clip(-2, -0.5) and then Relu is 0 everywhere; it becomes Clip(0, -0.5), which is -0.5 everywhere.
#   clip, clip     Clip(-2, -0.5) and then Clip(1, 3) is 1 everywhere; it becomes Clip(1, -0.5), which is -0.5.
#   old clips      Bounds that are attributes (opset 6 to 10) are lost: two Clips become one without bounds.
#   same, dilated  Conv with auto_pad SAME_UPPER and dilations of 2: the pads are those of a convolution without dilations.
#   batch norm     A BatchNormalization with training_mode = 1 behind a Conv takes its means from x; it is folded as if not.
#   integers       Pad with 0 in front of a ConvInteger whose zero point is 7 becomes pads of the ConvInteger, which stand for 7.
#   casts          float64 to float32 to float16 is rounded twice; it becomes one Cast.
#
# The truth is onnx's reference evaluator before and after. Output on 2026-11-28: every line below says "differs".
# Exits with 1 if one of them is right, or the versions cannot be installed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnx==1.23.2 onnx-ir==1.1.0 onnxscript==0.7.2
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
from onnx import TensorProto as T, checker, helper as h, numpy_helper as n, shape_inference
from onnx.reference import ReferenceEvaluator

right = []


def case(name, nodes, x, opset, result=T.FLOAT, outputs=("y",), **weights):
    info = h.make_tensor_value_info
    kind = h.np_dtype_to_tensor_dtype(x.dtype)
    tensors = [n.from_array(np.asarray(array), key) for key, array in weights.items()]
    graph = h.make_graph(nodes, "net", [info("x", kind, x.shape)], [info(y, result, None) for y in outputs], tensors)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8)
    model = shape_inference.infer_shapes(model)
    checker.check_model(model)
    before = ReferenceEvaluator(model).run(None, {"x": x})
    made = ir.from_proto(model)
    onnxscript.optimizer.optimize(made)
    try:
        after = ReferenceEvaluator(ir.to_proto(made)).run(None, {"x": x})
        same = all(a.shape == b.shape and np.allclose(a, b) for a, b in zip(before, after))
        says = "" if same else f": {before[0].ravel()[:3]} became {after[0].ravel()[:3]}"
    except Exception as error:
        same, says = False, f": the result cannot be evaluated, {error}"
    print(f"{name:15}{'is right' if same else 'differs'}{says}")
    if same:
        right.append(name)


x = np.linspace(-8, 8, 48, dtype=np.float32).reshape(1, 2, 4, 6)
f = np.float32
relu = h.make_node("Relu", ["v"], ["y"])
clip = h.make_node("Clip", ["x", "a", "b"], ["v"])
case("clip, relu", [clip, relu], x, 17, a=f(-2), b=f(-0.5))
case("clip, clip", [clip, h.make_node("Clip", ["v", "c", "d"], ["y"])], x, 17, a=f(-2), b=f(-0.5), c=f(1), d=f(3))
case("old clips", [h.make_node("Clip", ["x"], ["v"], min=-3.0, max=2.0), h.make_node("Clip", ["v"], ["y"], max=1.0)], x, 9)
w = np.ones((2, 2, 3, 3), np.float32)
case("same, dilated", [h.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", dilations=[2, 2])], x, 17, w=w)
parts = {name: np.array([0.5, 2], np.float32) for name in ("g", "s", "m", "u")}
norm = h.make_node("BatchNormalization", ["v", *parts], ["y", "mean", "variance"], training_mode=1)
case("batch norm", [h.make_node("Conv", ["x", "w"], ["v"]), norm], x, 15, w=w[:, :, :1, :1].copy(), **parts)
image = np.full((1, 2, 4, 6), 9, np.uint8)
integers = [h.make_node("Pad", ["x", "p"], ["v"]), h.make_node("ConvInteger", ["v", "w", "z"], ["y"])]
pads = np.array([0, 0, 1, 1, 0, 0, 1, 1])
case("integers", integers, image, 13, T.INT32, p=pads, w=w.astype(np.uint8), z=np.uint8(7))
casts = [h.make_node("Cast", ["x"], ["v"], to=T.FLOAT), h.make_node("Cast", ["v"], ["y"], to=T.FLOAT16)]
case("casts", casts, np.full(3, 2049.0001), 17, T.FLOAT16)
if right:
    sys.exit(f"changed: {', '.join(right)}")
PYTHON
