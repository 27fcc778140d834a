"""What the refusal of a model tells to do is possible, and a model that ONNX Runtime computes is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedsearch
from schedsearch.errors import UsageError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import numpy_helper, parser  # noqa: E402

from schedsearch.network.fallback import lower_with_subgraphs  # noqa: E402
from schedsearch.network.model import read_model  # noqa: E402

BY_CALL = r"\. Let each call decide these sizes: build with --run-mode exact \(in Python run_mode='exact'\)$"
IN_ONNX_RUNTIME = r"Run it in ONNX Runtime: build with --fallback onnxruntime \(in Python fallback='onnxruntime'\)$"
PLACES = "g (float[6] x) => (int64[1,n] y) { r = Relu (x) \n y = NonZero (r) }"


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(text: str, opset: int = 18, **constants: Any) -> Path:
        graph = parser.parse_graph(text)
        graph.initializer.extend(numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items())
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
        onnx.save(model, tmp_path / "net.onnx")
        return tmp_path / "net.onnx"

    return save


def build(path: Path, **options: Any) -> Any:
    return schedsearch.build(path, target="cpu", db=path.parent / "none.db", progress=False, **options)


def test_a_result_of_as_many_elements_as_numbers_decide_is_told_to_be_built_for_each_call(saved: Any) -> None:
    """ONNX Runtime cannot help: a fixed network has results of one shape."""
    path = saved(PLACES)
    with pytest.raises(UsageError, match=f"NonZero: NonZero -> y{BY_CALL}"):
        build(path)
    with pytest.raises(UsageError, match=rf"the shape of 'y' at node NonZero -> y .*{BY_CALL}"):
        lower_with_subgraphs(read_model(path), lambda workload: "")


@pytest.mark.long
def test_such_a_result_has_the_elements_of_each_call(saved: Any) -> None:
    with build(saved(PLACES), run_mode="exact") as net:
        np.testing.assert_array_equal(net(np.array([1, 0, -2, 3, 0, 0], np.float32)), [[0, 3]])


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("y = MatMul (x, w)", "node MatMul -> y is not possible: m must be an integer of at least 1, got 0"),
        ("y = Softmax (x)", r"node Softmax -> y is not possible: x must be .* at least 1, got \(0, 4\)"),
    ],
)
def test_an_array_without_elements_is_refused_with_its_extent_and_the_remedy(saved: Any, nodes: str, why: str) -> None:
    with pytest.raises(UsageError, match=rf"{why}\. {IN_ONNX_RUNTIME}"):
        build(saved(f"g (float[0,4] x) => (float[0,4] y) {{ {nodes} }}", w=np.ones((4, 4), np.float32)))


@pytest.mark.integrations
def test_an_array_without_elements_is_possible_in_onnx_runtime(saved: Any) -> None:
    pytest.importorskip("onnxruntime")
    path = saved("g (float[0,4] x) => (float[0,2] y) { y = MatMul (x, w) }", w=np.ones((4, 2), np.float32))
    with build(path, fallback="onnxruntime") as net:
        assert net(np.zeros((0, 4), np.float32)).shape == (0, 2)


@pytest.mark.integrations
def test_places_that_onnx_runtime_refuses_are_drawn_again(saved: Any) -> None:
    """The integers that the comparison draws first are negative, too."""
    pytest.importorskip("onnxruntime", minversion="1.24")
    inputs = "float[2,3,8,4] cache, float[2,3,2,4] update, int64[2] places"
    path = saved(f"g ({inputs}) => (float[2,3,8,4] y) {{ y = TensorScatter <axis=2> (cache, update, places) }}", 24)
    with build(path, fallback="onnxruntime") as net:
        assert net.checked == "ONNX Runtime " + pytest.importorskip("onnxruntime").__version__


@pytest.mark.integrations
def test_what_onnx_runtime_refuses_for_every_place_is_built_unchecked(saved: Any) -> None:
    pytest.importorskip("onnxruntime", minversion="1.24")
    said: list[str] = []
    inputs = "float[1,8,4] cache, float[1,2,4] update, int64[1] places"
    nodes = "moved = Add (places, ten) \n y = TensorScatter <axis=1> (cache, update, moved)"
    path = saved(f"g ({inputs}) => (float[1,8,4] y) {{ {nodes} }}", 24, ten=np.int64(10))
    with build(path, fallback="onnxruntime", say=said.append) as net:
        assert not net.checked
    assert any("unchecked: " in line and "ONNX Runtime failed in" in line for line in said), said


@pytest.mark.integrations
def test_a_loop_that_only_its_condition_ends_is_observed_for_some_turns(saved: Any) -> None:
    """For numbers that nobody gave it might never end. This one takes 10,050 turns for all numbers."""
    pytest.importorskip("onnxruntime")
    body = "(int64 turn, bool on, float now) => (bool goes, float next, float kept) "
    nodes = "next = Add (now, one) \n goes = Less (next, most) \n kept = Neg (now)"
    loop = f"z = Mul (x, zero) \n y, rows = Loop (, true, z) <body = b {body} {{ {nodes} }}>"
    constants = {"zero": np.float32(0), "one": np.float32(1), "most": np.float32(10_050), "true": np.array(True)}
    path = saved(f"g (float x) => (float y, float[n] rows) {{ {loop} }}", **constants)
    with pytest.raises(UsageError, match="the shape of 'rows' at node"):
        lower_with_subgraphs(read_model(path), lambda workload: "")


def shrinking(body: str) -> str:
    """Multiplies x by `factor` as long as it is above `least`."""
    head = "b (int64 turn, bool on, float[1] now) => (bool goes, float[1] next)"
    nodes = f"{body} \n largest = ReduceMax <keepdims=0> (next) \n goes = Greater (largest, least)"
    return f"g (float[1] x) => (float[1] y) {{ [loop] y = Loop (, true, x) <body = {head} {{ {nodes} }}> }}"


@pytest.mark.parametrize(("factor", "least"), [(0.9999, 1e-4), (0.5, 1e-6)])
@pytest.mark.mostly_long(2)
def test_a_loop_is_compared_for_10_000_turns_and_called_for_all(saved: Any, factor: float, least: float) -> None:
    said: list[str] = []
    factor, least, value = np.float32(factor), np.float32(least), np.ones(1, np.float32)
    path = saved(shrinking("next = Mul (now, factor)"), factor=factor, least=least, true=np.array(True))
    turns = 0
    with build(path, say=said.append) as net:
        found = net(value)
        is_checked = bool(net.checked)
    while turns == 0 or value > least:
        value, turns = value * factor, turns + 1
    np.testing.assert_array_equal(found, value)
    reasons = [line for line in said if "unchecked: " in line and "more than 10,000 turns of loop (Loop)" in line]
    assert (is_checked, len(reasons)) == ((True, 0) if turns < 100 else (False, 1))


@pytest.mark.integrations
def test_a_comparison_does_not_wait_for_ever_for_onnx_runtime(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose loops cannot be counted."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("schedsearch.executable.onnx_runtime._PATIENCE_S", 0.0)
    said: list[str] = []
    body = "made = Mul (now, factor) \n next = CenterCropPad (made, row)"
    constants = {"factor": np.float32(0.9999), "least": np.float32(1e-4), "true": np.array(True), "row": np.array([1])}
    with build(saved(shrinking(body), **constants), fallback="onnxruntime", say=said.append) as net:
        assert not net.checked and 0 < net(np.ones(1, np.float32)).item() <= 1e-4
    assert any("unchecked: " in line and "ONNX Runtime more than 0 s" in line for line in said), said


def test_ranges_of_several_dimensions_may_be_those_of_one_and_fixed_others(saved: Any) -> None:
    path = saved("g (float[b,t,4] x) => (float[b,t,2] y) { y = MatMul (x, w) }", w=np.ones((4, 2), np.float32))
    with pytest.raises(UsageError, match=r"axis 1\)\. With a range of one dimension only, .* as in b=3\.\.3$"):
        build(path, dynamic={"b": (1, 3), "t": (1, 2)})
    x = np.ones((3, 2, 4), np.float32)
    with build(path, dynamic={"b": (3, 3), "t": (1, 2)}) as net:
        np.testing.assert_array_equal(net(x), np.full((3, 2, 2), 4, np.float32))


def test_a_graph_of_computed_sizes_is_not_told_to_become_one(saved: Any) -> None:
    path = saved("g (float[n] x, int64[1] k) => (float[m] v, int64[m] i) { v, i = TopK (x, k) }")
    with pytest.raises(UsageError, match=r"a table of kernels for each size is not possible either: .*TopK") as refused:
        build(path, dynamic={"n": (1, 4)})
    assert "--run-mode" not in str(refused.value)
