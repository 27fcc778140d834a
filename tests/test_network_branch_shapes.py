"""`If`s whose branches give arrays of different shapes: right by onnx's evaluator where the results of the graph have fixed
shapes, refused where they have not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import parser  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, load  # noqa: E402

LONGER = """then_branch = t () => (float[3, 4] p) { p = Relu (a) },
    else_branch = e () => (float[6, 4] q) { q = Concat <axis = 0> (a, x) }"""
X = np.linspace(-1, 2, 12, dtype=np.float32).reshape(3, 4)


def model_of(body: str, results: str, inputs: str = "") -> Any:
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (bool c, float[3, 4] x{inputs}) => ({results}) {{ a = Tanh (x) {body} }}'
    )


MODELS = {
    "one result": model_of(f"v = If (c) <{LONGER}> w = Add (v, x0) y = ReduceMean <axes = [0]> (w)",
        "float[1, 4] y",
        ", float[4] x0",
   ),
    "two results, one of which is in between": model_of(
        f"""v = If (c) <{LONGER}> y = ReduceMax <axes = [0], keepdims = 0> (v)
        two = Constant <value_float = 2.0> () z = Mul (y, two)""",
        "float[4] z, float[4] y",
    ),
    "another number of dimensions": model_of(
        """row = Constant <value_ints = [-1]> () s = Constant <value_ints = [2, 6]> ()
        v = If (c) <then_branch = t () => (float[12] p) { p = Reshape (a, row) },
        else_branch = e () => (float[3, 4] q) { q = Exp (a) }> y = Reshape (v, s)""",
        "float[2, 6] y",
    ),
    "a result of the branches that is one of the graph": model_of(
        """v, z = If (c) <then_branch = t () => (float[3, 4] p, float[3, 4] p0) { p = Neg (a) p0 = Exp (a) },
        else_branch = e () => (float[6, 4] q, float[3, 4] q0) { q = Concat <axis = 0> (a, x) q0 = Abs (a) }>
        y = ReduceMin <keepdims = 0> (v)""",
        "float[3, 4] z, float y",
    ),
    "one behind another": model_of(
        f"""v = If (c) <{LONGER}> d = ReduceMax <keepdims = 0> (x) half = Constant <value_float = 0.5> ()
        c0 = Greater (d, half)
        u = If (c0) <then_branch = t0 () => (float[k, 4] p0) {{ p0 = Neg (v) }},
        else_branch = e0 () => (float[l, 8] q0) {{ q0 = Concat <axis = 1> (v, v) }}> y = ReduceSum <keepdims = 0> (u)""",
        "float y",
    ),
    "a loop behind it": model_of(
        f"""v = If (c) <{LONGER}> n = Constant <value_int = 3> () on = Constant <value = bool {{1}}> ()
        first = Constant <value_float = 0.0> () y = Loop (n, on, first)
        <body = b (int64 i, bool go, float s) => (bool go0, float s0) {{
        m = ReduceSum <keepdims = 0> (v) s0 = Add (s, m) go0 = Identity (go) }}>""",
        "float y",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_reads_such_a_result_is_computed_in_the_branches(name: str) -> None:
    model = MODELS[name]
    network = lower(load(model).graph())
    for c in (False, True):
        for x in (X, X - 3):
            feeds = {"c": np.array(c), "x": x, **({"x0": X[1]} if len(model.graph.input) == 3 else {})}
            wanted = ReferenceEvaluator(model).run(None, feeds)
            found = evaluate(network, feeds)
            for port, array in zip(network.outputs, wanted, strict=True):
                assert network.values[port].shape == np.shape(array)
                np.testing.assert_allclose(found[port].reshape(np.shape(array)), array, rtol=1e-5, atol=1e-6)


def test_it_is_built_and_compared_with_the_model(tmp_path: Path) -> None:
    onnx.save(MODELS["two results, one of which is in between"], tmp_path / "net.onnx")
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db", progress=False) as net:
        assert net.checked
        for c, rows in ((True, np.maximum(np.tanh(X), 0)), (False, np.concatenate([np.tanh(X), X]))):
            found = net.evaluate({"c": np.array(c), "x": X})
            np.testing.assert_allclose(found["y"], rows.max(0), rtol=1e-5)
            np.testing.assert_allclose(found["z"], 2 * rows.max(0), rtol=1e-5)


def test_results_of_the_graph_that_have_no_fixed_shape_are_refused() -> None:
    model = model_of(f"v = If (c) <{LONGER}> y = Exp (v)", "float[k, 4] y")
    with pytest.raises(ModelError, match=r"its branches give 'y' as float32 \[3,4\] and float32 \[6,4\]"):
        lower(load(model).graph())


def test_a_loop_of_computed_turns_carries_float64() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (int64 n, double[3] x) => (double[3] y) {
        on = Constant <value = bool {1}> ()
        y = Loop (n, on, x) <body = b (int64 i, bool go, double[3] s) => (bool go0, double[3] s0) {
        half = Constant <value = double {0.5}> () h = Mul (s, half) s0 = Add (h, x) go0 = Identity (go) }> }"""
    )
    network = lower(load(model).graph())
    for turns in (0, 1, 5):
        feeds = {"n": np.int64(turns), "x": np.array([1.0, -2.0, 0.25])}
        (wanted,) = ReferenceEvaluator(model).run(None, feeds)
        np.testing.assert_allclose(evaluate(network, feeds)["y"], wanted, rtol=1e-6)


def test_a_part_of_a_split_may_be_scanned() -> None:
    """The slices of the Split and those of the Scan need constants of different names."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[3, 4] x) => (float[2] y, float[4, 2] z) {
        parts = Constant <value_ints = [1, 2]> () first = Constant <value = float[2] {0.0, 0.0}> ()
        u, v = Split <axis = 0> (x, parts) y, z = Scan <num_scan_inputs = 1, scan_input_axes = [1],
        body = b (float[2] s, float[2] e) => (float[2] s0, float[2] o) { s0 = Add (s, e) o = Neg (s0) }> (first, v) }"""
    )
    network = lower(load(model).graph())
    found = evaluate(network, {"x": X})
    np.testing.assert_allclose(found["y"], X[1:].sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["z"], -X[1:].cumsum(1).T, rtol=1e-5, atol=1e-6)
