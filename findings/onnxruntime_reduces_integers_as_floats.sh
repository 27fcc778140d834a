#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# ONNX Runtime sums, multiplies and raises int64 to powers in float64 where a node is a reduction or a Pow: results that fit into
# int64 are rounded, from 2**53 on to even numbers. ReduceSum of a single number is rounded as well, although nothing is added.
# Its Add, Mul, CumSum and MatMul of int64 are exact, and so is onnx's reference evaluator. Identifiers and hashes are such
# numbers: two that differ by 1 become one.
# Seen on 2026-11-29:
#     ReduceSum of [9007199254740993]: ONNX Runtime 9007199254740992, evaluator 9007199254740993
#     ReduceSum of [9007199254740993, 1, 1]: ONNX Runtime 9007199254740994, evaluator 9007199254740995
#     ReduceL1 of [9007199254740993, 1, 1]: ONNX Runtime 9007199254740994, evaluator 9007199254740995
#     ReduceProd of [9007199254740993, 1, 1]: ONNX Runtime 9007199254740992, evaluator 9007199254740993
#     ReduceSumSquare of [2147483648, 3]: ONNX Runtime 4611686018427387904, evaluator 4611686018427387913
#     Pow of [3] and [39]: ONNX Runtime 4052555153018976256, evaluator 4052555153018976267
#     CumSum of [9007199254740993, 1, 1]: ONNX Runtime 9007199254740995, evaluator 9007199254740995
#     MatMul of [9007199254740993, 1, 1] and [1, 1, 1]: ONNX Runtime 9007199254740995, evaluator 9007199254740995
# Exits 0 while they behave like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator


def last(op, x, second, shape, **attributes):
    """The last number of the result: by ONNX Runtime, and by the evaluator."""
    constant = numpy_helper.from_array(np.array(second, np.int64), "second")
    info = helper.make_tensor_value_info
    found = [info("y", TensorProto.INT64, shape)]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "second"], ["y"], **attributes)], "g", [info("x", TensorProto.INT64, [len(x)])], found, [constant]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": np.array(x, np.int64)}
    return [int(np.ravel(each.run(None, feeds)[0])[-1]) for each in (session, ReferenceEvaluator(model))]


odd = 2**53 + 1
apart, alike = [], []
for op, x, right in (
    ("ReduceSum", [odd], odd),
    ("ReduceSum", [odd, 1, 1], odd + 2),
    ("ReduceL1", [odd, 1, 1], odd + 2),
    ("ReduceProd", [odd, 1, 1], odd),
    ("ReduceSumSquare", [2**31, 3], 2**62 + 9),
    ("Pow", [3], 3**39),
):
    second, shape, attributes = ([0], [], {"keepdims": 0}) if op != "Pow" else ([39], [1], {})
    runtime, evaluated = last(op, x, second, shape, **attributes)
    print(f"{op} of {x}{' and [39]' if op == 'Pow' else ''}: ONNX Runtime {runtime}, evaluator {evaluated}")
    apart.append(runtime != evaluated == right)
for op, second, shape in (("CumSum", 0, [3]), ("MatMul", [1, 1, 1], [])):
    runtime, evaluated = last(op, [odd, 1, 1], second, shape)
    print(f"{op} of {[odd, 1, 1]}{' and [1, 1, 1]' if op == 'MatMul' else ''}: ONNX Runtime {runtime}, evaluator {evaluated}")
    alike.append(runtime == evaluated == odd + 2)
sys.exit(not (all(apart) and all(alike)))
PYTHON
