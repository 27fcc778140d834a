"""ONNX's own node cases of every operator that lowering takes: what the lowered network computes, by the references.

A case agrees with ONNX's result, or is refused for a reason that its operator has here or for its format.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ml_dtypes = pytest.importorskip("ml_dtypes")

import onnx_ir  # noqa: E402

from schedsearch.network.elementwise import ELEMENTWISE  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import TAKEN, lower  # noqa: E402
from schedsearch.network.model import ModelError, simplified  # noqa: E402
from schedsearch.network.reductions import REDUCTIONS  # noqa: E402

LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
COMPUTED = {*ELEMENTWISE, *LOSSES, "Concat", "MatMul", "Einsum", "Attention", "RotaryEmbedding"} - {
    "BatchNormalization",
    "QuantizeLinear",
    "DequantizeLinear",
    "Expand",
}
"""Operators of which all inputs are inputs of the network; of others it is the first, and the rest are constants."""
DTYPE = r"(reads|makes|is) (an unknown dtype|\w+); allowed: "
REFUSED: Mapping[str, str] = {
    "ConvTranspose": "more pixels than there are",
    **dict.fromkeys(("Tile", "Trilu", "ReduceProd"), "an array without elements"),
    "Dropout": "in training mode or gives its mask|ConstantOfShape",
    "Identity": "is a (sequence|value that may be missing); allowed: arrays",
    "MaxUnpool": "has an output_shape",
    **dict.fromkeys(REDUCTIONS, "array without elements|axes that are computed"),
    "ReduceMean": "axes that are computed",
    "DFT": "is computed",
    "GridSample": "is cubic, of 3 spatial dimensions",
    "Resize": "has align_corners and scales",
    "ScatterElements": "reduction 'mul' is not possible",
    "ScatterND": "reduction 'mul' is not possible",
    "Split": "an integer of at least 1, got",  # of nothing
    "TopK": "dtype .u?int64. is not possible",
}


ALSO_IN = {"Identity": "clip"}  # a clip without bounds, as its function
NEVER_TAKEN = ("GlobalLpPool",)  # there are no cases


def cases(op: str) -> list[Any]:
    """The cases of one node of an operator. To build those of all operators takes ten seconds."""
    from onnx.backend.test import loader

    def some(package: Any) -> None:
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.replace("_", "") in {op.lower(), ALSO_IN.get(op)}:
                importlib.import_module(f"{package.__name__}.{module.name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "import_recursive", some)
        with np.errstate(over="ignore", divide="ignore"):  # of casts to shorter formats, and of 1 / 0
            every = loader.load_model_tests(kind="node")  # with those of earlier calls
    found = []
    for case in every:
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type == op and not nodes[0].domain:
            found.append(case)
    return found


def array_of(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def model_of(case: Any) -> tuple[Any, dict[str, Any]]:
    """The model with constants where operators want them, and its inputs."""
    op = case.model.graph.node[0].op_type
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    ((given, _),) = case.data_sets
    named = {each.name: value for each, value in zip(case.model.graph.input, given)}
    count = len(named) if op in COMPUTED else 1
    inputs = dict(list(named.items())[:count])
    for name, value in list(named.items())[count:]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(array_of(value), name))
    kept = [each for each in model.graph.input if each.name in inputs]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model, inputs


def agreeing(every: Sequence[Any]) -> Iterator[str]:
    """The names of cases that are not refused; asserts that they agree, and why others are refused."""
    for case in every:
        op = case.model.graph.node[0].op_type
        model, inputs = model_of(case)
        try:
            network = lower(simplified(onnx_ir.from_proto(model), case.name))
        except ModelError as error:
            assert re.search(f"{DTYPE}|{REFUSED.get(op, '^$')}", str(error)), f"{case.name}: {error}"
            continue
        values = evaluate(network, {name: array_of(value) for name, value in inputs.items()})
        ((_, outputs),) = case.data_sets
        for name, output in zip(network.outputs, outputs, strict=True):
            wanted = array_of(output)
            found = values[name].reshape(wanted.shape).astype(np.float64)
            short = wanted.dtype.itemsize == 2 and wanted.dtype.kind not in "iu"
            half = 4 * float(ml_dtypes.finfo(wanted.dtype).eps) if short else 0.0  # other roundings
            np.testing.assert_allclose(
                found, wanted.astype(np.float64), rtol=max(case.rtol, half), atol=max(case.atol, 1e-6), err_msg=case.name
            )
        yield case.name


@pytest.mark.parametrize("op", sorted(TAKEN))
@pytest.mark.mostly_long(5)
def test_the_cases_of_onnx_agree_or_are_refused_with_a_reason(op: str) -> None:
    every = cases(op)
    assert bool(list(agreeing(every))) == (op not in NEVER_TAKEN), f"all {len(every)} cases are refused"


@pytest.mark.parametrize(
    ("op", "shape", "operands", "result"),
    [
        ("Reshape", [2, 3, 4], [[2]], [6, 4]),
        ("Squeeze", [2, 1, 4], [[1]], [2, 4]),
        ("Unsqueeze", [2, 4], [[1]], [2, 1, 4]),
        ("Resize", [1, 2, 4, 4], [None, None, [4]], [1, 2, 8, 8]),
    ],
)
def test_a_shape_that_an_input_gives_is_refused_though_the_model_declares_it(
    op: str, shape: list[int], operands: list[list[int] | None], result: list[int]
) -> None:
    """The declared shape holds for one value of that input; any other would get wrong numbers."""
    info, names = onnx.helper.make_tensor_value_info, ["" if each is None else "sizes" for each in operands]
    inputs = [info("x", 1, shape), *(info("sizes", 7, each) for each in operands if each is not None)]
    graph = onnx.helper.make_graph([onnx.helper.make_node(op, ["x", *names], ["y"])], op, inputs, [info("y", 1, result)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    with pytest.raises(ModelError, match=r"the input 'sizes'.* Give sizes a value: --input sizes=VALUE"):
        lower(simplified(onnx_ir.from_proto(model), "sized.onnx"))
