"""What ONNX leaves open, a float that becomes an integer out of range, is no difference between a network and its model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedsearch
from schedsearch.errors import WrongNetworkError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper  # noqa: E402

from schedsearch.network import simplify  # noqa: E402
from schedsearch.network_check.evaluators import evaluators  # noqa: E402
from schedsearch.network_check.rule import difference  # noqa: E402
from schedsearch.network_check.unspecified import STAND_INS, with_stand_in  # noqa: E402

FLOAT, INT32, UINT8 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT8
COUNT = 500


def saved(
    folder: Path, nodes: list[Any], inputs: dict[str, int], out: int, scale: float, shape: tuple[int, ...] = (COUNT,)
) -> Path:
    """A model of inputs name -> dtype with the result y; `scale` is a constant."""
    infos = [helper.make_tensor_value_info(name, dtype, [COUNT]) for name, dtype in inputs.items()]
    result = helper.make_tensor_value_info("y", out, shape)
    graph = helper.make_graph(nodes, "g", infos, [result], [helper.make_tensor("scale", FLOAT, [1], [scale])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8), folder / "net.onnx")
    return folder / "net.onnx"


def negated(folder: Path) -> Path:
    """-int32(x * scale), of which about half are out of range."""
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["m"]),
        helper.make_node("Cast", ["m"], ["whole"], to=INT32),
        helper.make_node("Neg", ["whole"], ["y"]),
    ]
    return saved(folder, nodes, {"x": FLOAT}, INT32, 3e9)


def build(path: Path) -> Any:
    return schedsearch.build(path, target="cpu", db=path.parent / "none.db", progress=False)


def test_integers_out_of_range_are_no_differences(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    with build(negated(tmp_path)) as net:
        assert net.program.checked
        found = net.evaluate({"x": x})["y"]
    wanted = -np.trunc((x * np.float32(3e9)).astype(np.float64))
    inside = np.abs(wanted) < 2**31
    assert 100 < inside.sum() < 400
    np.testing.assert_array_equal(found[inside], wanted[inside])


def test_a_power_of_an_integer_may_be_out_of_range_or_not_a_number(tmp_path: Path) -> None:
    path = saved(tmp_path, [helper.make_node("Pow", ["x", "e"], ["y"])], {"x": INT32, "e": FLOAT}, INT32, 1.0)
    with build(path) as net:
        assert net.program.checked


@pytest.mark.long(of="networks")
def test_bytes_of_negative_numbers_and_what_depends_on_them_are_no_differences(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["m"]),
        helper.make_node("Cast", ["m"], ["byte"], to=UINT8),
        helper.make_node("Cast", ["byte"], ["back"], to=FLOAT),
        helper.make_node("ReduceSum", ["back"], ["y"], keepdims=1),
    ]
    with build(saved(tmp_path, nodes, {"x": FLOAT}, FLOAT, 100.0, (1,))) as net:
        assert net.program.checked


def test_a_wrong_kernel_is_found_where_others_are_out_of_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = simplify.fuse

    def wrong(model: Any) -> bool:
        found = right(model)
        for node in model.graph:
            node.op_type = "Abs" if node.op_type == "Neg" else node.op_type
        return found

    monkeypatch.setattr(simplify, "fuse", wrong)
    with pytest.raises(WrongNetworkError, match="first value that differs is 'y'"):
        build(negated(tmp_path))


@pytest.mark.parametrize("number", range(STAND_INS))
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_a_stand_in_takes_the_place_of_exactly_what_is_out_of_range(dtype: str, number: int) -> None:
    limits = np.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)
    near = [np.float32(edge + off) for edge in (least, most) for off in (-1, -0.5, 0, 0.5, 1)]
    step = [np.nextafter(each, np.float32(to)) for each in near for to in (-math.inf, math.inf)]
    x = np.array([*near, *step, 0.0, math.nan, math.inf, -math.inf], np.float32)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, constants = with_stand_in(helper.make_node("Cast", ["x"], ["y"], to=kind), kind, number)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [x.size])],
        [helper.make_tensor_value_info("y", kind, [x.size])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (found,) = evaluators()[0].open(model).run({"x": x})
    stand_in = (least, most, 1)[number]
    wanted = [int(each) if math.isfinite(each) and least <= int(each) <= most else stand_in for each in x.tolist()]
    assert found.tolist() == wanted


def test_unspecified_elements_excuse_no_others() -> None:
    """Neither do they differ, nor does their noise make room for errors of others."""
    right = np.arange(100, dtype=np.int32)
    open_ = right % 4 == 0
    noisy = np.where(open_, -(2**31), right).astype(np.int32)
    saturated = np.where(open_, 2**31 - 1, right).astype(np.int32)
    assert difference(saturated, right, [right], unspecified=open_) is None
    saturated[5] += 2
    apart = difference(saturated, right, [noisy, noisy], unspecified=open_)
    assert apart is not None and apart.index == (5,) and apart.count == 1
