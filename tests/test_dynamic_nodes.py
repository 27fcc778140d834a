"""ONNX's own node cases of operators with dynamic sizes: what exact and bounded runs compute on a CPU.

Inputs that must be constant are, all others are the caller's. A case agrees with ONNX's result, or is refused for a reason
that its operator has here.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import schedsearch  # noqa: E402
from schedsearch.device import open_device  # noqa: E402
from schedsearch.device.detect import detect  # noqa: E402
from schedsearch.dynamic.model import read_graph  # noqa: E402
from schedsearch.dynamic.net import DynamicNet  # noqa: E402
from schedsearch.errors import UsageError  # noqa: E402

OPERATORS = (
    "NonMaxSuppression", "RoiAlign", "NonZero", "TopK", "Slice", "Unique", "Gather", "GatherElements", "GatherND",
    "ScatterElements", "ScatterND", "Expand", "Range", "Reshape", "Where", "Concat", "ConstantOfShape", "Shape", "Size",
)  # fmt: skip
CONSTANT: Mapping[str, tuple[int, ...]] = {"NonMaxSuppression": (2, 3, 4), "TopK": (1,), "Slice": (3,)}
"""Places of inputs that must be constant."""
REFUSED: Mapping[str, str] = {
    "Range": "dtype '(b?float16)' is not possible",
    "Reshape": "an integer of at least 1, got",  # an empty one
    "ScatterElements": "reduction 'mul' is not possible",
    "ScatterND": "reduction 'mul' is not possible",
    "Shape": "an integer of at least 1, got",  # an empty one
    "TopK": "dtype .u?int64. is not possible",
    "Unique": "dtype 'float64' is not possible",
}


def cases() -> dict[str, list[Any]]:
    """The cases of one node, by operator."""
    from onnx.backend.test.case import node as package
    from onnx.backend.test.case.node import collect_testcases

    wanted = {name.lower() for name in OPERATORS}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.replace("_", "") in wanted | {"nonmaxsuppression", "scatterelements", "scatternd", "gathernd"}:
            importlib.import_module(f"{package.__name__}.{module.name}")
    found: dict[str, list[Any]] = {}
    for case in collect_testcases(None):
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in OPERATORS:
            found.setdefault(nodes[0].op_type, []).append(case)
    return found


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    opened = open_device(detect("cpu"))
    yield opened
    opened.close()


@functools.cache
def artifact(workload: Any) -> Any:
    return schedsearch.compile(workload, target="cpu", allow=("default",)).artifact


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # ONNX's own, while it makes its cases
@pytest.mark.parametrize("operator", OPERATORS)
def test_node_cases_run_exact_and_bounded(device: Any, operator: str) -> None:
    every, agreed = _of_operator()[operator], 0
    for case in every:
        ((inputs, outputs),) = case.data_sets
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        given = _fixed(model, inputs, CONSTANT.get(operator, ()))
        try:
            program = read_graph(model).program()
        except UsageError as error:
            reason = REFUSED.get(operator)
            assert reason is not None and re.search(reason, str(error)), f"{case.name}: {error}"
            continue
        with DynamicNet(program, device, artifact) as net:
            exact, bound = net(*given), net.bind(*given)
            bound.step()
            for results in (exact if isinstance(exact, tuple) else (exact,), bound.sliced()):
                for found, wanted in zip(results, outputs, strict=True):
                    assert found.shape == wanted.shape, case.name
                    np.testing.assert_allclose(
                        np.asarray(found, wanted.dtype),
                        wanted,
                        rtol=1e-4,
                        atol=1e-4,
                        err_msg=case.name,
                    )
            bound.close()
        agreed += 1
    assert agreed, f"no case of {operator} runs"


@functools.cache
def _of_operator() -> dict[str, list[Any]]:
    return cases()


def _fixed(model: Any, inputs: Any, constant: tuple[int, ...]) -> list[Any]:
    """The inputs that stay; those at places of constants become initializers."""
    node, values = model.graph.node[0], {value.name: array for value, array in zip(model.graph.input, inputs)}
    fixed = {node.input[place] for place in constant if place < len(node.input) and node.input[place]}
    for name in fixed:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values[name]), name))
    kept = [value for value in model.graph.input if value.name not in fixed]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    arrays = [np.asarray(values[value.name]) for value in kept]
    return [np.array(array, np.uint8 if array.dtype == np.bool_ else array.dtype, order="C") for array in arrays]
