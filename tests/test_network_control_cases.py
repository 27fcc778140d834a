"""ONNX's own cases of branches, loops and sequences: lowered with their inputs as constants, or refused with a reason."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import onnx_ir  # noqa: E402
from test_onnx_nodes import array_of, cases  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, simplified  # noqa: E402

NO_ARRAY = r"is a (sequence|value that may be missing); allowed: arrays|a (sequence|value that may be missing), is an output"
AGREE: dict[str, int] = {  # operator -> how many of its cases agree; the others are refused because they have no arrays
    "ConstantOfShape": 3,
    "If": 1,
    "Loop": 1,
    "Scan": 3,
    "SequenceInsert": 0,
    "SequenceMap": 0,
    "Size": 2,
    "SplitToSequence": 0,
}
ALSO_REFUSED = {"Scan": "is a Scan of opset 8, which has a batch axis; allowed: opset 9 and later"}


def constant(case: Any) -> tuple[Any, dict[str, Any]]:
    """The model with its arrays as constants, but for those of a Scan, and the inputs that are left."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    ((given, _),) = case.data_sets
    kept = {}
    for port, value in zip(case.model.graph.input, given):
        if port.type.HasField("tensor_type") and model.graph.node[0].op_type != "Scan":
            model.graph.initializer.append(onnx.numpy_helper.from_array(array_of(value), port.name))
        else:
            kept[port.name] = value
    left = [each for each in model.graph.input if each.name in kept]
    del model.graph.input[:]
    model.graph.input.extend(left)
    return model, kept


@pytest.mark.parametrize("op", sorted(AGREE))
def test_the_cases_of_onnx_agree_or_have_no_arrays(op: str) -> None:
    agreeing, every = 0, cases(op)
    assert every
    for case in every:
        model, inputs = constant(case)
        try:
            network = lower(simplified(onnx_ir.from_proto(model), case.name))
        except ModelError as error:
            assert re.search(f"{NO_ARRAY}|{ALSO_REFUSED.get(op, '^$')}", str(error)), f"{case.name}: {error}"
            continue
        values = evaluate(network, {name: array_of(value) for name, value in inputs.items()})
        ((_, outputs),) = case.data_sets
        for name, output in zip(network.outputs, outputs, strict=True):
            np.testing.assert_allclose(values[name].reshape(np.shape(array_of(output))), array_of(output), rtol=1e-5)
        agreeing += 1
    assert agreeing == AGREE[op]
