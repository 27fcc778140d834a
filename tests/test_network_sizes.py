"""Nodes whose shapes or axes a call gives, as inputs of the model or computed from these: a declared shape, which holds for
some calls, serves where each call is compared with it, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import DeviceError  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, simplified  # noqa: E402

_KINDS = {"i": TensorProto.INT64, "f": TensorProto.FLOAT}


@dataclass(frozen=True)
class Case:
    """A node of `x` and of settings that a call gives.

    Attributes:
        inputs: of the node; "" for none.
        shapes: input of the model -> its shape.
        result: the declared shape.
        right: settings with which the result has that shape.
        wrong: settings with which it has another; none if that is not possible.
    """

    op: str
    inputs: Sequence[str]
    shapes: Mapping[str, Sequence[int]]
    result: Sequence[int]
    right: Mapping[str, Any]
    wrong: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "i"

    def model(self, *, is_computed: bool = False, reader: str = "Neg") -> Any:
        """`reader` of the node's result is the output. All shapes are declared."""
        info = helper.make_tensor_value_info
        inputs = [info(name, _KINDS["f" if name == "x" else self.kind], shape) for name, shape in self.shapes.items()]
        nodes, names = [], list(self.inputs)
        for place, name in enumerate(names):
            if is_computed and name in self.right:
                nodes.append(helper.make_node("Abs", [name], [f"{name}.abs"], name=f"{name}.abs"))
                names[place] = f"{name}.abs"
        outputs = ["m"] if self.op not in ("Split", "TopK") else ["m", "other"]
        nodes.append(helper.make_node(self.op, names, outputs, name="sized", **self.attributes))
        nodes.append(helper.make_node(reader, ["m"], ["y"], name="reader"))
        y = info("y", 1, self.result) if reader == "Neg" else info("y", 7, [len(self.result)])
        middle = [info("m", 1, self.result)]
        graph = helper.make_graph(nodes, "net", inputs, [y], value_info=middle)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def feeds(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        x = np.random.default_rng(0).integers(0, 4, self.shapes.get("x", [1])).astype(np.float32)
        dtype = np.int64 if self.kind == "i" else np.float32
        given = {name: np.asarray(each, dtype) for name, each in settings.items()}
        return {"x": x, **given} if "x" in self.shapes else given


CASES = {
    "Expand": Case("Expand", ["x", "s"], {"x": [1, 4], "s": [2]}, [3, 4], {"s": [3, 4]}, {"s": [2, 4]}),
    "Reshape": Case("Reshape", ["x", "s"], {"x": [2, 4], "s": [2]}, [4, 2], {"s": [4, 2]}, {"s": [2, 4]}),
    "Slice": Case("Slice", ["x", "s", "e"], {"x": [6], "s": [1], "e": [1]}, [2], {"s": [3], "e": [5]}, {"s": [0], "e": [3]}),
    "Slice by axes": Case(
        "Slice", ["x", "s", "e", "a"], {"x": [6, 2], "s": [1], "e": [1], "a": [1]}, [3, 2],
        {"s": [0], "e": [3], "a": [0]}, {"s": [0], "e": [3], "a": [1]},
    ),
    "Tile": Case("Tile", ["x", "s"], {"x": [2, 4], "s": [2]}, [4, 4], {"s": [2, 1]}, {"s": [1, 2]}),
    "Pad": Case("Pad", ["x", "s"], {"x": [4], "s": [2]}, [6], {"s": [2, 0]}, {"s": [2, 1]}),
    "Resize by sizes": Case(
        "Resize", ["x", "", "", "s"], {"x": [1, 1, 2, 2], "s": [4]}, [1, 1, 4, 4],
        {"s": [1, 1, 4, 4]}, {"s": [1, 1, 2, 4]}, {"mode": "nearest"},
    ),
    "Resize by scales": Case(
        "Resize", ["x", "", "s"], {"x": [1, 1, 2, 2], "s": [4]}, [1, 1, 4, 4],
        {"s": [1, 1, 2, 2]}, {"s": [1, 1, 1, 2]}, {"mode": "nearest"}, kind="f",
    ),
    "TopK": Case("TopK", ["x", "s"], {"x": [2, 4], "s": [1]}, [2, 2], {"s": [2]}, {"s": [3]}),
    "Range": Case(
        "Range", ["s", "e", "d"], {"s": [], "e": [], "d": []}, [4],
        {"s": 1, "e": 9, "d": 2}, {"s": 0, "e": 3, "d": 1}, kind="f",
    ),
    "ConstantOfShape": Case("ConstantOfShape", ["s"], {"s": [2]}, [2, 3], {"s": [2, 3]}, {"s": [3, 2]}),
    "CumSum": Case("CumSum", ["x", "s"], {"x": [2, 4], "s": []}, [2, 4], {"s": 1}, {}),
    "OneHot": Case(
        "OneHot", ["x", "s", "v"], {"x": [3], "s": [], "v": [2]}, [3, 5],
        {"s": 5, "v": [0, 1]}, {"s": 4, "v": [0, 1]}, kind="f",
    ),
    "ReduceSum": Case("ReduceSum", ["x", "s"], {"x": [2, 4], "s": [1]}, [1, 4], {"s": [0]}, {"s": [1]}),
    "ReduceMax": Case("ReduceMax", ["x", "s"], {"x": [2, 4], "s": [1]}, [2], {"s": [1]}, {"s": [0]}, {"keepdims": 0}),
    "Squeeze": Case("Squeeze", ["x", "s"], {"x": [1, 3, 1], "s": [1]}, [3, 1], {"s": [0]}, {"s": [2]}),
    "Unsqueeze": Case("Unsqueeze", ["x", "s"], {"x": [2, 4], "s": [1]}, [2, 1, 4], {"s": [1]}, {"s": [0]}),
    "Split": Case("Split", ["x", "s"], {"x": [4], "s": [2]}, [2], {"s": [2, 2]}, {"s": [1, 3]}),
}  # fmt: skip
_EVERY = pytest.mark.parametrize("case", [pytest.param(each, id=name) for name, each in CASES.items()])


def ours(model: Any) -> Any:
    return lower(simplified(onnx_ir.from_proto(model), "sized.onnx"))


@_EVERY
def test_a_setting_from_an_input_is_refused_with_how_to_give_it_a_value(case: Case) -> None:
    name = next(iter(case.right))
    with pytest.raises(
        ModelError, match=f"sized .gets .* from the input '{name}'; allowed: a constant. .*--input {name}=VALUE"
    ):
        ours(case.model())


@_EVERY
def test_a_setting_that_is_computed_is_refused(case: Case) -> None:
    with pytest.raises(ModelError, match=r"sized \(has .* computed; allowed: "):
        ours(case.model(is_computed=True))


@_EVERY
@pytest.mark.parametrize("is_computed", [False, True])
def test_nothing_is_folded_from_a_declared_shape_that_a_call_decides(case: Case, is_computed: bool) -> None:
    """The shape of the result as an output. Only that of a CumSum follows from the inputs."""
    model = simplified(onnx_ir.from_proto(case.model(is_computed=is_computed, reader="Shape")), "sized.onnx")
    (y,) = model.graph.outputs
    assert (y.const_value is not None) == (case.op == "CumSum")


@_EVERY
@pytest.mark.parametrize("is_computed", [False, True])
def test_with_onnx_runtime_results_are_right_or_the_call_is_refused(case: Case, is_computed: bool, tmp_path: Path) -> None:
    """What a call gives is right if its shape is the declared one, by onnx's evaluator. The check draws such settings."""
    pytest.importorskip("onnxruntime")
    model, path = case.model(is_computed=is_computed), tmp_path / "sized.onnx"
    onnx.save(model, path)
    with schedsearch.build(path, target="cpu", db=tmp_path / "records.db", fallback="onnxruntime") as net:
        feeds = case.feeds(case.right)
        np.testing.assert_allclose(net.evaluate(feeds)["y"], ReferenceEvaluator(model).run(None, feeds)[0], rtol=1e-6)
        if case.wrong:
            with pytest.raises(DeviceError, match=r"has shape \[.* in this call, and \[.* in the network"):
                net.evaluate(case.feeds(case.wrong))


def expanded(tmp_path: Path, reader: str, *, opset: int = 18) -> Path:
    """Rows that are repeated as often as a call says, of which only the reader's result has a declared shape."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Expand", ["x", "s"], ["m"], name="repeat")]
    nodes.append(helper.make_node(reader, ["m"], ["y"], name="reader"))
    inputs = [info("x", TensorProto.FLOAT, [1, 4]), info("s", TensorProto.INT64, [2])]
    graph = helper.make_graph(nodes, "net", inputs, [info("y", TensorProto.FLOAT, [3, 4])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_a_declared_shape_behind_the_node_says_what_its_setting_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    with schedsearch.build(
        expanded(tmp_path, "Neg"), target="cpu", db=tmp_path / "records.db", fallback="onnxruntime"
    ) as net:
        feeds = {"x": np.array([[1, 2, 3, 4]], np.float32), "s": np.array([3, 1])}
        np.testing.assert_array_equal(net.evaluate(feeds)["y"], -np.repeat(feeds["x"], 3, 0))
    assert "unchecked" not in capsys.readouterr().err


def test_where_no_setting_is_found_the_network_is_unchecked_and_says_how_to_change_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing says what shape a Softmax reads."""
    pytest.importorskip("onnxruntime")
    path = expanded(tmp_path, "Softmax")
    with schedsearch.build(path, target="cpu", db=tmp_path / "records.db", fallback="onnxruntime"):
        said = capsys.readouterr().err
    assert "unchecked: the network was not compared with net.onnx: no value was found for 's'" in said
    assert "--input s=VALUE" in said


def test_a_setting_with_a_value_makes_the_network_ours(tmp_path: Path) -> None:
    path = expanded(tmp_path, "Neg")
    with schedsearch.build(path, target="cpu", db=tmp_path / "records.db", inputs={"s": [3, 4]}) as net:
        x = np.array([[1, 2, 3, 4]], np.float32)
        np.testing.assert_array_equal(net.evaluate({"x": x})["y"], -np.repeat(x, 3, 0))
