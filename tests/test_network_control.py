"""Branches, loops and sequences whose structure is known are plain nodes, by ONNX Runtime and onnx's evaluator."""

from __future__ import annotations

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
    assert_right,
    body_of,
    branch,
    info,
    is_left,
    loop,
    model_of,
    ours,
)
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402


# --- If -----------------------------------------------------------------------------------------------------------------
class Nest:
    """Random nested Ifs over arrays of 2 x 3 numbers: branches read what is around them, and have weights and names that
    other branches have, too."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.count = 0
        self.constants: dict[str, Any] = {"two": np.int64(2), "zero": np.int64(0)}

    def condition(self, nodes: list[Any]) -> str:
        truth = self.draw(st.booleans())
        kind = self.draw(st.sampled_from(("weight", "row", "Not", "shape")))
        name = f"c{self.count}_{len(self.constants)}_{len(nodes)}"
        if kind in ("weight", "row"):
            self.constants[name] = np.array(truth if kind == "weight" else [truth])
        elif kind == "Not":
            self.constants[f"{name}.no"] = np.array(not truth)
            nodes.append(helper.make_node("Not", [f"{name}.no"], [name]))
        else:  # x has two rows, whichever of these it is compared with
            nodes.append(helper.make_node("Shape", ["x"], [f"{name}.shape"]))
            nodes.append(helper.make_node("Gather", [f"{name}.shape", "zero"], [f"{name}.rows"]))
            nodes.append(helper.make_node("Equal", [f"{name}.rows", "two" if truth else "zero"], [name]))
        return name

    def graph(self, known: list[str], level: int) -> tuple[list[Any], str, dict[str, Any]]:
        """Nodes, the name of the result, and weights of their own."""
        nodes: list[Any] = []
        own: dict[str, Any] = {}
        visible = [*known]
        for _ in range(self.draw(st.integers(1, 3))):
            self.count += 1
            name = f"v{level}.{self.count}"
            kind = self.draw(
                st.sampled_from(("Add", "Neg", "weight", "If", "If") if level < 3 else ("Add", "Neg", "weight"))
            )
            x = self.draw(st.sampled_from(visible))
            if kind == "Add":
                nodes.append(helper.make_node("Add", [x, self.draw(st.sampled_from(visible))], [name]))
            elif kind == "Neg":
                nodes.append(helper.make_node("Neg", [x], [name], name=f"neg{len(nodes)}" if level else ""))
            elif kind == "weight":
                weight = f"weight{level}" if level else f"weight.{self.count}"  # siblings' weights share a name
                own.setdefault(weight, np.full((2, 3), self.draw(st.integers(1, 9)), np.float32))
                nodes.append(helper.make_node("Mul", [x, weight], [name]))
            else:
                condition = self.condition(nodes)
                branches = {}
                for word in ("then_branch", "else_branch"):
                    inner, result, weights = self.graph(visible, level + 1)
                    branches[word] = body_of(inner, [], [info(result, FLOAT, None)], weights)
                nodes.append(helper.make_node("If", [condition], [name], name=f"if{self.count}", **branches))
            visible.append(name)
        return nodes, nodes[-1].output[0], own


@given(st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_nested_branches_of_constant_conditions_are_those_that_are_taken(data: st.DataObject) -> None:
    nest = Nest(data.draw)
    nodes, result, weights = nest.graph(["x"], 0)
    model = model_of(nodes, [info("x", FLOAT, [2, 3])], [result], {**nest.constants, **weights})
    assert not is_left(model)
    assert_right(model, {"x": np.arange(6, dtype=np.float32).reshape(2, 3)})


def test_the_branch_that_is_taken_decides_the_shape() -> None:
    chosen = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("ReduceSum", "x", keepdims=0), else_branch=branch("Neg", "x")
    )
    for truth, shape in ((True, ()), (False, (2, 3))):
        model = model_of([chosen], [info("x", FLOAT, [2, 3])], ["y"], {"c": np.array(truth)})
        (found,) = ours(model, {"x": np.ones((2, 3), np.float32)})
        assert found.shape == shape


def test_a_branch_that_gives_an_array_of_the_graph_around_it_becomes_that_array() -> None:
    inner = helper.make_node(
        "If", ["d"], ["s"], then_branch=branch("Identity", "x", result="t"), else_branch=branch("Neg", "x")
    )
    outer = body_of([inner], [], [info("s", FLOAT, None)])
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=outer, else_branch=branch("Neg", "x"))
    model = model_of([chosen], [info("x", FLOAT, [2])], ["y"], {"c": np.array(True), "d": np.array(True)})
    np.testing.assert_array_equal(ours(model, {"x": np.array([1, -2], np.float32)})[0], [1, -2])


# --- Loop and Scan ------------------------------------------------------------------------------------------------------
BELOW = [helper.make_node("Less", ["i", "last"], ["on"])]


def assert_turned(model: Any, turns: int) -> None:
    value, before = X, []
    for turn in range(turns):
        before.append(-value)
        value = 2 * value + np.float32(turn)
    found = ours(model, {"x": X})
    np.testing.assert_array_equal(found[0], value)
    np.testing.assert_array_equal(found[1], np.array(before, np.float32).reshape(turns, 2))


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
@pytest.mark.parametrize("opset", [11, 17])
def test_a_loop_of_a_known_number_of_turns_is_its_turns(turns: int, opset: int) -> None:
    model = model_of([loop("m", "", ALWAYS)], [info("x", FLOAT, [2])], ["y", "all"], {"m": np.int64(turns)}, opset)
    assert not is_left(model)
    assert_turned(model, turns)


@pytest.mark.parametrize("most", [None, 2, 4, 100])
@pytest.mark.parametrize("starts", [None, True, False])
def test_a_condition_that_starts_from_constants_is_counted(most: int | None, starts: bool | None) -> None:
    constants = {"m": np.int64(0 if most is None else most), "c": np.array(bool(starts))}
    node = loop("" if most is None else "m", "" if starts is None else "c", BELOW, {"last": np.int64(3)})
    model = model_of([node], [info("x", FLOAT, [2])], ["y", "all"], constants)
    assert not is_left(model)
    after = 4  # the condition behind turn 3 is false
    assert_turned(model, 0 if starts is False else after if most is None else min(after, most))


@given(st.lists(st.sampled_from([0, 1]), min_size=2, max_size=2), st.sampled_from([0, 1, -1]), st.sampled_from([9, 12, 17]))
@settings(max_examples=20, deadline=None)
def test_a_scan_is_its_turns(directions: list[int], axis: int, opset: int) -> None:
    nodes = [helper.make_node("Add", ["s", "e"], ["after"]), helper.make_node("Sub", ["after", "f"], ["out"])]
    inputs = [info("s", FLOAT, [2]), info("e", FLOAT, [2]), info("f", FLOAT, [2])]
    body = body_of(nodes, inputs, [info("after", FLOAT, [2]), info("out", FLOAT, [2])])
    scan = helper.make_node(
        "Scan", ["start", "x", "z"], ["end", "y"], body=body, num_scan_inputs=2, scan_input_axes=[0, 1],
        scan_input_directions=directions, scan_output_axes=[axis], scan_output_directions=[directions[0]],
    )  # fmt: skip
    model = model_of(
        [scan], [info("x", FLOAT, [3, 2]), info("z", FLOAT, [2, 3])], ["end", "y"], {"start": np.zeros(2, np.float32)}, opset
    )
    random = np.random.default_rng(0)
    feeds = {"x": random.random((3, 2), np.float32), "z": random.random((2, 3), np.float32)}
    state, rows = np.zeros(2, np.float32), []
    for turn in range(3):
        first, second = (2 - turn if backwards else turn for backwards in directions)
        state = state + feeds["x"][first]
        rows.append(state - feeds["z"][:, second])
    assert not is_left(model)
    end, stacked = ours(model, feeds)
    np.testing.assert_allclose(end, state, rtol=1e-6)
    np.testing.assert_allclose(stacked, np.stack(rows[::-1] if directions[0] else rows, axis), rtol=1e-5, atol=1e-6)


def test_a_branch_that_the_turn_of_a_loop_decides_is_taken_in_each_turn() -> None:
    """Even turns double, odd ones negate; the body has another condition on the shape of what is carried."""
    inner = helper.make_node(
        "If", ["pair"], ["t"], then_branch=branch("Add", "v", "v", result="d"), else_branch=branch("Exp", "v")
    )
    even = body_of([inner], [], [info("t", FLOAT, None)])
    nodes = [
        helper.make_node("Identity", ["cond"], ["on"]),
        helper.make_node("Mod", ["i", "two"], ["rest"]),
        helper.make_node("Equal", ["rest", "none"], ["is_even"]),
        helper.make_node("Size", ["v"], ["count"]),
        helper.make_node("Equal", ["count", "two"], ["pair"]),
        helper.make_node("If", ["is_even"], ["w"], then_branch=even, else_branch=branch("Neg", "v", result="n")),
    ]
    inputs = [info("i", INT64, []), info("cond", BOOL, []), info("v", FLOAT, [2])]
    body = body_of(nodes, inputs, [info("on", BOOL, []), info("w", FLOAT, [2])])
    constants = {"m": np.int64(5), "c": np.array(True), "two": np.int64(2), "none": np.int64(0)}
    model = model_of(
        [helper.make_node("Loop", ["m", "c", "x"], ["y"], body=body)], [info("x", FLOAT, [2])], ["y"], constants
    )
    assert not is_left(model)
    np.testing.assert_allclose(ours(model, {"x": X})[0], 8 * X)


def test_functions_with_branches_are_the_branches_that_are_taken() -> None:
    chosen = helper.make_node("If", ["flag"], ["z"], then_branch=branch("Neg", "a"), else_branch=branch("Exp", "a"))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "Choice", ["flag", "a"], ["z"], [chosen], opsets)
    calls = [
        helper.make_node("Choice", ["yes", "x"], ["b"], domain="own"),
        helper.make_node("Choice", ["no", "b"], ["y"], domain="own"),
    ]
    model = model_of(calls, [info("x", FLOAT, [2])], ["y"], {"yes": np.array(True), "no": np.array(False)})
    model.opset_import.append(opsets[1])
    model.functions.append(function)
    assert not is_left(model)
    np.testing.assert_allclose(ours(model, {"x": X})[0], np.exp(-X), rtol=1e-6)


# --- Sequences ----------------------------------------------------------------------------------------------------------
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_sequences_of_known_arrays_are_these_arrays(data: st.DataObject) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("SequenceConstruct", ["x", "n"], ["s0"])]
    constants: dict[str, Any] = {}
    count = 2
    for turn in range(data.draw(st.integers(0, 5))):
        before, after = f"s{turn}", f"s{turn + 1}"
        place = data.draw(st.none() | st.integers(-count, count - 1)) if count else None
        given_place = []
        if place is not None:
            constants[f"p{turn}"], given_place = np.int64(place), [f"p{turn}"]
        if count > 1 and data.draw(st.booleans()):
            nodes.append(helper.make_node("SequenceErase", [before, *given_place], [after]))
            count -= 1
        else:
            nodes.append(
                helper.make_node("SequenceInsert", [before, data.draw(st.sampled_from("xn")), *given_place], [after])
            )
            count += 1
    last = nodes[-1].output[0]
    constants["at"] = np.int64(data.draw(st.integers(-count, count - 1)))
    axis = data.draw(st.sampled_from([-1, 0, 1]))
    nodes += [
        helper.make_node("SequenceAt", [last, "at"], ["y"]),
        helper.make_node("SequenceLength", [last], ["length"]),
        helper.make_node("ConcatFromSequence", [last], ["z"], axis=axis, new_axis=data.draw(st.integers(0, 1))),
    ]
    model = model_of(nodes, [info("x", FLOAT, [2, 3])], ["y", "z", "length"], constants)
    assert not is_left(model)
    assert_right(model, {"x": np.arange(6, dtype=np.float32).reshape(2, 3)})


def test_a_loop_that_fills_a_sequence_is_a_concatenation() -> None:
    nodes = [
        helper.make_node("Identity", ["cond"], ["on"]),
        helper.make_node("Cast", ["i"], ["number"], to=FLOAT),
        helper.make_node("Add", ["x", "number"], ["sum"]),
        helper.make_node("SequenceInsert", ["s", "sum"], ["t"]),
    ]
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
    values = [helper.make_value_info(name, kind) for name in "st"]
    body = body_of(nodes, [info("i", INT64, []), info("cond", BOOL, []), values[0]], [info("on", BOOL, []), values[1]])
    model = model_of(
        [
            helper.make_node("SequenceEmpty", [], ["none"]),
            helper.make_node("Loop", ["m", "", "none"], ["filled"], body=body),
            helper.make_node("ConcatFromSequence", ["filled"], ["y"], axis=0, new_axis=1),
        ],
        [info("x", FLOAT, [2])], ["y"], {"m": np.int64(3)},
    )  # fmt: skip
    assert not is_left(model)
    np.testing.assert_array_equal(ours(model, {"x": X})[0], [X, X + 1, X + 2])


def test_a_map_of_known_arrays_is_a_copy_for_each() -> None:
    body = body_of(
        [helper.make_node("Mul", ["e", "f"], ["g"])],
        [info("e", FLOAT, None), info("f", FLOAT, None)],
        [info("g", FLOAT, None)],
    )
    model = model_of(
        [
            helper.make_node("Neg", ["x"], ["n"]),
            helper.make_node("SequenceConstruct", ["x", "n"], ["s"]),
            helper.make_node("SequenceMap", ["s", "x"], ["t"], body=body),
            helper.make_node("ConcatFromSequence", ["t"], ["y"], axis=0),
        ],
        [info("x", FLOAT, [2])], ["y"],
    )  # fmt: skip
    assert not is_left(model)
    np.testing.assert_allclose(ours(model, {"x": X})[0], [1, 0.25, -1, -0.25])


def test_the_evaluator_takes_the_turns_of_a_loop_without_a_condition_when_a_network_is_compared_with_it() -> None:
    from schedsearch.network_check.known_faults import replacement

    model = model_of([loop("m", "", ALWAYS)], [info("x", FLOAT, [2])], ["y", "all"], {"m": np.int64(2)})
    made = replacement(model.graph.node[0], FLOAT, 17)
    del model.graph.node[:]
    model.graph.node.extend(made)
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": X})[0], 4 * X + 1)


@pytest.mark.parametrize("place", [0, 1])
def test_onnx_runtime_finds_a_nan_by_the_largest_number_when_a_network_is_compared_with_it(place: int) -> None:
    """By itself it finds one in the first place only: this loop would go on."""
    from schedsearch.network_check.known_faults import replacement

    onnxruntime = pytest.importorskip("onnxruntime")
    nodes = [
        loop("m", "", BELOW_BIG, {"big": np.float32(100)}),
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("ReduceMin", ["x"], ["least"], keepdims=1),
    ]
    model = model_of(nodes, [info("x", FLOAT, [2])], ["y", "all", "most", "least"], {"m": np.int64(3)})
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.extend(replacement(node, FLOAT, 17))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for x, turns in ((X, 3), (np.where(np.arange(2) == place, np.float32(np.nan), X), 1)):
        found = session.run(["all", "most", "least"], {"x": x})
        assert len(found[0]) == turns
        np.testing.assert_array_equal(found[1], np.max(x))
        np.testing.assert_array_equal(found[2], [np.min(x)])
