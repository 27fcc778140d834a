"""Branches and loops that stay as they are, or are refused, and inputs that get a value because of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from control_support import (  # noqa: E402
    ALWAYS,
    BELOW_BIG,
    BOOL,
    FLOAT,
    INT64,
    X,
    body_of,
    branch,
    info,
    loop,
    model_of,
    right,
    two_branches,
)
from onnx import helper, numpy_helper  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, load  # noqa: E402


def test_two_small_branches_are_both_computed() -> None:
    found = load(two_branches()).graph()
    assert sorted(node.op_type for node in found.graph if node.op_type in ("If", "Where", "Exp", "Neg")) == [
        "Exp",
        "Neg",
        "Where",
    ]


@pytest.mark.parametrize("number", [-1.0, 200.0])
def test_what_the_other_branch_computes_does_not_reach_the_result(number: float) -> None:
    """exp(200) is infinite in float32, and chosen only where the sum is positive."""
    model = onnx_ir.to_proto(load(two_branches()).graph())
    for node in model.graph.node:
        node.name = ""  # nodes that became several share one, which ONNX Runtime refuses
    feeds = {"x": np.full((2, 3), number, np.float32)}
    np.testing.assert_array_equal(right(model, feeds)[0], right(two_branches(), feeds)[0])


def test_branches_of_other_shapes_are_refused_with_these() -> None:
    model = two_branches(then="ReduceSum", keepdims=0)
    reason = r"its branches give 'y' as float32 \[\] and float32 \[2,3\]"
    with pytest.raises(
        ModelError, match=rf"If: either \(its condition 'c' is computed; allowed: a constant, or two .*{reason}"
    ):
        lower(load(model).graph())


def test_a_node_in_a_branch_that_has_no_operator_is_refused_by_its_own_name() -> None:
    model = two_branches(then="RandomNormalLike")
    next(each.g for each in model.graph.node[2].attribute if each.name == "then_branch").node[0].name = "inner"
    with pytest.raises(ModelError, match="no operator for these nodes of the model: RandomNormalLike: inner"):
        lower(load(model).graph())


def test_a_condition_that_an_input_decides_says_how_to_give_it_a_value() -> None:
    chosen = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("ReduceSum", "x", keepdims=0), else_branch=branch("Neg", "x")
    )
    equal = helper.make_node("Equal", ["sr", "rate"], ["c"])
    model = model_of([equal, chosen], [info("x", FLOAT, [2]), info("sr", INT64, [])], ["y"], {"rate": np.int64(16000)})
    with pytest.raises(ModelError, match=r"give sr a value: --input sr=VALUE, in Python inputs=\{'sr': VALUE\}"):
        lower(load(model).graph())
    both = model_of([equal, chosen], [info("x", FLOAT, [2]), info("sr", INT64, []), info("rate", INT64, [])], ["y"])
    options, pairs = "--input rate=VALUE --input sr=VALUE", r"\{'rate': VALUE, 'sr': VALUE\}"
    with pytest.raises(ModelError, match=f"give rate, sr a value: {options}, in Python inputs={pairs}"):
        lower(load(both).graph())
    for rate, shape in ((16000, ()), (8000, (2,))):
        network = lower(load(model, {"sr": rate}).graph())
        assert network.inputs == ("x",) and network.values["y"].shape == shape


@pytest.mark.parametrize(
    ("node", "inputs", "reason"),
    [
        (loop("m", "", ALWAYS), [info("m", INT64, [])], r"Loop: turns \(has a computed number of turns, 'm';"),
        (loop("", "c", ALWAYS), [info("c", BOOL, [])], r"has a computed condition, 'c'; allowed: a constant"),
        (loop("", "", ALWAYS), [], r"goes on for ever; allowed: a number of turns"),
        (
            loop("", "", BELOW_BIG),
            [], r"has a condition that depends on 'x', which is computed; allowed: what starts from constants",
        ),
        (loop("most", "", ALWAYS), [], r"takes 9,000 turns, which would be 45,000 nodes; allowed: 10,000"),
        (loop("", "", [helper.make_node("Less", ["i", "most"], ["on"])]), [], "9,001 turns, which would be"),
    ],
)  # fmt: skip
def test_loops_of_unknown_turns_are_refused_with_the_reason(node: Any, inputs: Sequence[Any], reason: str) -> None:
    constants = {"big": np.float32(9), "most": np.int64(9000)}
    model = model_of([node], [info("x", FLOAT, [2]), *inputs], ["y", "all"], constants)
    with pytest.raises(ModelError, match=reason):
        lower(load(model).graph())


def test_a_refusal_lists_every_node_also_inside_of_branches() -> None:
    outer = two_branches(then="ReduceSum", inputs=["h"], keepdims=0)
    then = next(each.g for each in outer.graph.node[2].attribute if each.name == "then_branch")
    then.node.insert(0, helper.make_node("RandomNormalLike", ["x"], ["h"], name="inner"))
    nodes = [
        helper.make_node("RandomUniformLike", [f"h{n - 1}" if n else "x"], [f"h{n}"], name=f"hard{n}") for n in range(7)
    ]
    outer.graph.node.extend(nodes)
    outer.graph.output.extend(helper.make_empty_tensor_value_info(f"h{n}") for n in range(7))
    with pytest.raises(ModelError) as caught:
        lower(load(outer).graph())
    text = str(caught.value)
    assert (
        "RandomUniformLike: hard0, hard1, hard2, hard3, hard4, hard5, hard6" in text
        and "inside of it: RandomNormalLike: inner" in text
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (body_of([helper.make_node("Neg", ["x"], ["r"])], [], [info("r", FLOAT, None), info("r", FLOAT, None)]), "output"),
        (body_of([helper.make_node("Neg", ["x"], ["r"])], [], []), "output"),
    ],
)
def test_bodies_with_another_number_of_results_are_refused(body: Any, reason: str) -> None:
    chosen = helper.make_node("If", ["c"], ["y"], name="either", then_branch=body, else_branch=branch("Neg", "x"))
    model = model_of([chosen], [info("x", FLOAT, [2])], ["y"], {"c": np.array(True)})
    with pytest.raises(ModelError, match=f"node either.*{reason}"):
        load(model).graph()


def test_a_graph_of_computed_sizes_takes_constant_branches_and_says_why_others_stay() -> None:
    from schedsearch.dynamic.graph import Size
    from schedsearch.dynamic.model import read_graph

    model = two_branches()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    with pytest.raises(
        ModelError, match=r"dynamic graphs have no .*: If: either \(its condition 'c' is computed; allowed: a const"
    ):
        read_graph(model, {"n": Size("n", 1, 4)})
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    del model.graph.node[:2]
    program = read_graph(model, {"n": Size("n", 1, 4)}).program()
    assert ["exp(a)" in call.workload.label for segment in program.segments for call in segment.calls] == [True]


# --- Inputs that become constants ---------------------------------------------------------------------------------------
def scaled() -> Any:
    nodes = [helper.make_node("Cast", ["k"], ["f"], to=FLOAT), helper.make_node("Mul", ["x", "f"], ["y"])]
    return model_of(nodes, [info("x", FLOAT, [2]), info("k", INT64, [1])], ["y"])


@pytest.mark.parametrize("given_k", [3, [3], np.array([3]), np.int64(3)])
def test_an_input_with_a_value_is_a_constant(given_k: Any) -> None:
    network = lower(load(scaled(), {"k": given_k}).graph())
    assert network.inputs == ("x",)
    np.testing.assert_array_equal(evaluate(network, {"x": X})["y"], 3 * X)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"kk": 3}, r"has no input 'kk' \(did you mean 'k'\?\); it has x, k"),
        ({"k": 3.5}, r"input 'k' is int64 and is given 3.5 \(float64\); allowed: int64"),
        ({"k": 3.0}, r"input 'k' is int64 and is given 3.0 \(float64\); allowed: int64"),
        ({"k": True}, r"input 'k' is int64 and is given True \(bool\); allowed: int64"),
        ({"k": np.array([3], np.int32)}, r"\(int32\); allowed: int64"),
        ({"k": 2**70}, r"input 'k'.*allowed: "),
        ({"k": "3"}, r"input 'k' is given '3'; allowed: numbers, or an array of int64"),
        ({"k": [[3], [4, 5]]}, r"input 'k' is given .*; allowed: numbers"),
        ({"k": [3, 4]}, r"input 'k' has shape \[1\], but its value has \[2\]; give a value of that shape"),
        ({"x": [1.0, 2.0], "k": 3}, "has no inputs, so its results are constants"),
        (3, "inputs is an int; give a dictionary from inputs to values"),
    ],
)
def test_values_that_do_not_fit_an_input_are_refused(inputs: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(scaled(), inputs)
