#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# The input sequence_lens of RNN, GRU and LSTM says how many steps each sequence of a batch has; results behind its end are 0, and
# the last state is that of its last step. The attribute clip bounds what the gates of an LSTM get. onnx's reference evaluator takes
# both without a word and computes as if they were not there. ONNX Runtime follows them.
# Seen on 2026-11-28:
#     RNN behind the end of a sequence: evaluator 0.980, ONNX Runtime 0.000
#     GRU behind the end of a sequence: evaluator 0.716, ONNX Runtime 0.000
#     LSTM behind the end of a sequence: evaluator 0.228, ONNX Runtime 0.000
#     LSTM with clip 0.5 and without: evaluator apart by 0.000, ONNX Runtime by 0.198
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
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

HIDDEN, STEPS, LENGTHS = 2, 4, np.array([2, 4], np.int32)
rng = np.random.default_rng(0)
x = rng.standard_normal((STEPS, 2, 3)).astype(np.float32)


def results(op, gates, lengths=None, **attributes):
    """Y of the evaluator and of ONNX Runtime."""
    weights = np.random.default_rng(1)
    arrays = {
        "W": weights.standard_normal((1, gates * HIDDEN, 3)).astype(np.float32),
        "R": weights.standard_normal((1, gates * HIDDEN, HIDDEN)).astype(np.float32),
    }
    inputs = ["x", "W", "R"]
    if lengths is not None:
        arrays["lengths"], inputs = lengths, [*inputs, "", "lengths"]
    node = helper.make_node(op, inputs, ["y"], hidden_size=HIDDEN, **attributes)
    info = helper.make_tensor_value_info
    held = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph([node], "g", [info("x", TensorProto.FLOAT, x.shape)], [info("y", TensorProto.FLOAT, None)], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return ReferenceEvaluator(model).run(None, {"x": x})[0], session.run(None, {"x": x})[0]


as_seen = True
for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
    behind = [float(np.abs(y[LENGTHS[0] :, :, 0]).max()) for y in results(op, gates, LENGTHS)]
    print(f"{op} behind the end of a sequence: evaluator {behind[0]:.3f}, ONNX Runtime {behind[1]:.3f}")
    as_seen &= behind[0] > 0.01 and behind[1] == 0
pairs = zip(results("LSTM", 4, clip=0.5), results("LSTM", 4))
apart = [float(np.abs(one - other).max()) for one, other in pairs]
print(f"LSTM with clip 0.5 and without: evaluator apart by {apart[0]:.3f}, ONNX Runtime by {apart[1]:.3f}")
sys.exit(not (as_seen and apart[0] == 0 and apart[1] > 0.01))
PYTHON
