"""Parts for ONNX Runtime have nodes of the opset that the model declares, whatever rewriting made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import schedsearch as command

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import UsageError  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.fallback import lower_with_subgraphs  # noqa: E402
from schedsearch.network.graph import Subgraph  # noqa: E402
from schedsearch.network.model import load  # noqa: E402

Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
node = helper.make_node


def nowhere(workload: Any) -> str:
    """No workload has a kernel."""
    return "no kernel here"


def model_of(nodes: Sequence[Any], opset: int, **constants: Array) -> Any:
    info = helper.make_tensor_value_info
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    inputs, outputs = [info("x", TensorProto.FLOAT, X.shape)], [info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(list(nodes), "net", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


SILU = [node("Sigmoid", ["x"], ["s"], name="gate"), node("Mul", ["x", "s"], ["y"], name="silu")]
WIDE = [  # the pool becomes one of images, and the Expand behind it with it
    node("MaxPool", ["x"], ["pixels"], kernel_shape=[2], strides=[3], name="pool"),
    node("Constant", [], ["to"], value=numpy_helper.from_array(np.array([2, 3, 5]))),
    node("Expand", ["pixels", "to"], ["y"], name="wide"),
]
HARD = [node("HardSigmoid", ["x"], ["s"], name="gate", alpha=1 / 6), node("Mul", ["s", "x"], ["y"], name="hard")]


@pytest.mark.parametrize(
    ("nodes", "opset"),
    [
        *((SILU, opset) for opset in (9, 12, 17, 22)),
        *((HARD, opset) for opset in (9, 13, 17)),
        *(
            ([node(op, ["x"], ["y"], axes=[1], name="sum")], opset)
            for op in ("ReduceL2", "ReduceLogSumExp", "ReduceProd")
            for opset in (11, 13)
        ),
        (WIDE, 13),
        ([node("LpPool", ["x"], ["y"], kernel_shape=[2], dilations=[1], name="norm")], 18),
        ([node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("Softmax", ["t"], ["y"], axis=1)], 13),
    ],
)
def test_a_part_has_nodes_of_the_declared_opset_only(nodes: Sequence[Any], opset: int) -> None:
    model = model_of(nodes, opset)
    network = lower_with_subgraphs(load(model).graph(), nowhere)
    parts = [onnx.load_model_from_string(each.model) for each in network.nodes if isinstance(each, Subgraph)]
    assert parts
    for part in parts:
        assert [each.version for each in part.opset_import if not each.domain] == [opset]
        onnx.checker.check_model(part, full_check=True)
        names = [each.name for each in part.graph.node if each.name]
        assert len(names) == len(set(names))
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": X})
    np.testing.assert_allclose(evaluate(network, {"x": X})["y"].reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-6)
    onnxruntime = pytest.importorskip("onnxruntime")
    for part in parts:
        onnxruntime.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"])


def test_a_declared_shape_of_another_rank_is_that_of_the_nodes() -> None:
    """As an exporter wrote it whose result was a list of classes once: [1, n] for what is [6, 1, 4]."""
    model = model_of([node("Reshape", ["x", "to"], ["y"])], 12, to=np.array([6, 1, -1]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "n"]))
    found = load(model).graph()
    assert found.graph.outputs[0].shape == [6, 1, 4]


@pytest.mark.integrations
def test_shapes_behind_nodes_of_other_domains_are_observed_in_graphs_with_rewritten_nodes() -> None:
    """SiLU is Swish by then, which opset 12 lacks, and a ReduceL2 is several nodes of one name."""
    pytest.importorskip("onnxruntime")
    nodes = [
        *(
            node(each.op_type, each.input, [{"y": "a"}.get(name, name) for name in each.output], name=each.name)
            for each in SILU
        ),
        node("ReduceL2", ["a"], ["b"], axes=[1], name="length"),
        node("Gelu", ["b"], ["c"], domain="com.microsoft", name="gelu"),
        node("Relu", ["c"], ["y"], name="relu"),
    ]
    model = model_of(nodes, 12)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    network = lower_with_subgraphs(load(model).graph(), lambda workload: "")
    assert network.values["y"].shape == (2, 1, 4)


@pytest.mark.integrations
def test_what_onnx_runtime_lacks_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    from schedsearch.executable import build as build_module

    monkeypatch.setattr(build_module, "with_kernels", lambda *args: pytest.fail("kernels were looked for"))
    nodes = [node("Relu", ["x"], ["r"], name="relu"), node("Twirl", ["r"], ["y"], domain="nobody.example", name="odd")]
    model = model_of(nodes, 17)
    model.opset_import.append(helper.make_opsetid("nobody.example", 1))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, X.shape))
    onnx.save(model, tmp_path / "net.onnx")
    out = tmp_path / "net.ssx"
    with pytest.raises(UsageError, match=r"ONNX Runtime .* cannot run Twirl \(odd\): .*Replace these nodes in the model"):
        schedsearch.build(tmp_path / "net.onnx", db=tmp_path / "none.db", target="cpu", fallback="onnxruntime", out=out)
    assert not out.exists()
    with pytest.raises(UsageError, match=r"Nothing here computes .*: Twirl: odd \(of the domain 'nobody.example'"):
        schedsearch.build(tmp_path / "net.onnx", db=tmp_path / "none.db", target="cpu", out=out)


def test_the_command_line_gives_inputs_their_value(tmp_path: Path) -> None:
    nodes = [node("Cast", ["k"], ["f"], to=TensorProto.FLOAT), node("Mul", ["x", "f"], ["m"]), node("Relu", ["m"], ["y"])]
    model = model_of(nodes, 17)
    model.graph.input.append(helper.make_tensor_value_info("k", TensorProto.INT64, []))
    onnx.save(model, tmp_path / "net.onnx")
    wrong = command("extract", tmp_path / "net.onnx", "--input", "k=half")
    assert wrong.exit_code == 2 and "'k=half'; allowed: a number, true, false, numbers with commas" in wrong.output
    twice = command("extract", tmp_path / "net.onnx", "--input", "k=1", "--input", "k=2")
    assert twice.exit_code == 2 and "k is given twice" in twice.output
    done = command("extract", tmp_path / "net.onnx", "--input", "k=3")
    assert "elementwise" in done.output
    np.testing.assert_allclose(ReferenceEvaluator(model).run(None, {"x": X, "k": np.array(3)})[0], np.maximum(3 * X, 0))
