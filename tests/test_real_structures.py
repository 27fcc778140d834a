"""The structures of real ONNX files are built natively for a CPU and compute what ONNX Runtime computes, or onnx's evaluator
where that is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import image_structures  # noqa: E402, F401  # each fills FILES
import sound_structures  # noqa: E402, F401
import text_structures  # noqa: E402, F401
from structure_support import BELOW, FILES  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import load  # noqa: E402
from schedsearch.network_check.own_operators import of_opset  # noqa: E402

QUICK = ("alexa_v0.1",)


def inputs_of(model: Any) -> dict[str, Any]:
    """Normal numbers; integers of the range that the structure wants."""
    rng, found = np.random.default_rng(0), {}
    for port in model.graph.input:
        kind = port.type.tensor_type
        shape = [extent.dim_value for extent in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        whole = np.full(shape, 16000) if port.name == "sr" else rng.integers(0, BELOW.get(port.name, 2), shape)
        found[port.name] = (whole if np.issubdtype(dtype, np.integer) else rng.standard_normal(shape)).astype(dtype)
    return found


def with_plain_lstms(model: Any) -> Any:
    """The model with an LSTM of dequantised weights for each DynamicQuantizeLSTM. ONNX Runtime also rounds what it reads to
    8 bits, which is an error of half a percent; a network does not."""
    found, arrays = onnx.ModelProto(), {each.name: each for each in model.graph.initializer}
    found.CopyFrom(model)
    for node in found.graph.node:
        if node.op_type == "DynamicQuantizeLSTM":
            for place, scale, zero in ((1, 8, 9), (2, 10, 11)):
                q, s, z = (onnx.numpy_helper.to_array(arrays[node.input[each]]) for each in (place, scale, zero))
                plain = (q.astype(np.float32) - z.reshape(-1, 1, 1)) * s.reshape(-1, 1, 1)
                name = f"{node.input[place]}/plain"
                found.graph.initializer.append(
                    onnx.numpy_helper.from_array(plain.transpose(0, 2, 1).astype(np.float32), name)
                )
                node.input[place] = name
            del node.input[8:]
            node.op_type, node.domain = "LSTM", ""
    return found


def computed(path: Path, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs by ONNX Runtime; where that is missing by onnx's evaluator, without its operators that are wrong."""
    names = [port.name for port in model.graph.output]
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        evaluator = ReferenceEvaluator(str(path), new_ops=of_opset(opset))
        try:
            return dict(zip(names, evaluator.run(names, inputs)))
        except IndexError as error:  # also NumPy's of axes: onnx 1.23 fails in the structure of magika
            pytest.skip(f"onnx's evaluator cannot run the model: {error}")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, inputs)))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.mostly_long(3)
def test_every_node_has_an_operator(name: str) -> None:
    network = lower(load(FILES[name]()).graph(), layouts=("NHWC", "NCHW"))
    assert network.nodes


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FILES])
def test_it_computes_what_onnx_runtime_computes(name: str, tmp_path: Path) -> None:
    model = FILES[name]()
    onnx.save(model, tmp_path / "net.onnx")
    inputs = inputs_of(model)
    onnx.save(with_plain_lstms(model), tmp_path / "plain.onnx")
    wanted = computed(tmp_path / "plain.onnx", model, inputs)
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "r.db", progress=False) as net:
        assert all(step.origin.level == "default" for step in net.steps), "nothing is left to ONNX Runtime"
        found = net.evaluate(inputs)
    for output, array in wanted.items():
        assert found[output].shape == array.shape
        np.testing.assert_allclose(found[output], array, rtol=2e-4, atol=2e-4 * max(1e-3, float(np.abs(array).max())))


def test_files_of_every_kind_have_a_structure() -> None:
    assert len(FILES) >= 23
