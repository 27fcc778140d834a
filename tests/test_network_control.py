"""Branches, loops and sequences whose structure is known are plain nodes, by ONNX Runtime and onnx's evaluator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, load  # noqa: E402

Array = np.ndarray[Any, Any]
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
info = helper.make_tensor_value_info


def model_of(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[str],
    constants: dict[str, Any] | None = None,
    opset: int = 17,
) -> Any:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    ports = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(list(nodes), "net", list(inputs), ports, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def body_of(
    nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], constants: dict[str, Any] | None = None
) -> Any:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    return helper.make_graph(list(nodes), "body", list(inputs), list(outputs), weights)


def right(model: Any, feeds: dict[str, Array]) -> list[Array]:
    """What ONNX Runtime computes; without it, onnx's evaluator."""
    try:
        import onnxruntime
    except ImportError:
        return [np.asarray(each) for each in ReferenceEvaluator(model).run(None, feeds)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(each) for each in session.run(None, feeds)]


def ours(model: Any, feeds: dict[str, Array]) -> list[Array]:
    network = lower(load(model).graph())
    values = evaluate(network, feeds)
    return [values[name].reshape(network.values[name].shape) for name in network.outputs]


def assert_right(model: Any, feeds: dict[str, Array]) -> None:
    for name, found, wanted in zip([each.name for each in model.graph.output], ours(model, feeds), right(model, feeds)):
        assert found.shape == wanted.shape, name
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def is_left(model: Any) -> list[str]:
    """Operators with bodies, and of sequences, that are left after a model was simplified."""
    found = load(model).graph()
    return [node.op_type for node in found.graph.all_nodes() if re.match("If|Loop|Scan|.*Sequence|Optional", node.op_type)]


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


def branch(op: str, *inputs: str, result: str = "r", **attributes: Any) -> Any:
    return body_of([helper.make_node(op, list(inputs), [result], **attributes)], [], [info(result, FLOAT, None)])


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
def loop(turns: str, condition: str, goes_on: Sequence[Any], extra: dict[str, Any] | None = None, scans: bool = True) -> Any:
    """x -> 2 x + turn, again and again; scans what it had before."""
    nodes = [
        *goes_on,
        helper.make_node("Cast", ["i"], ["number"], to=FLOAT),
        helper.make_node("Mul", ["v", "two"], ["double"]),
        helper.make_node("Add", ["double", "number"], ["after"]),
        helper.make_node("Neg", ["v"], ["before"]),
    ]
    outputs = [info("on", BOOL, []), info("after", FLOAT, [2]), info("before", FLOAT, [2])]
    inputs = [info("i", INT64, []), info("cond", BOOL, []), info("v", FLOAT, [2])]
    body = body_of(nodes, inputs, outputs, {"two": np.float32(2), **(extra or {})})
    return helper.make_node("Loop", [turns, condition, "x"], ["y", "all"], name="turns", body=body)


ALWAYS = [helper.make_node("Identity", ["cond"], ["on"])]
BELOW_BIG = [helper.make_node("ReduceMax", ["v"], ["w"], keepdims=0), helper.make_node("Less", ["w", "big"], ["on"])]
BELOW = [helper.make_node("Less", ["i", "last"], ["on"])]
X = np.array([1, -0.5], np.float32)


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


# --- Computed conditions ------------------------------------------------------------------------------------------------
def two_branches(*, then: str = "Exp", inputs: Sequence[str] = ("x",), **attributes: Any) -> Any:
    chosen = helper.make_node(
        "If", ["c"], ["y"], name="either", then_branch=branch(then, *inputs, **attributes), else_branch=branch("Neg", "x")
    )
    total = helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0)
    above = helper.make_node("GreaterOrEqual", ["total", "limit"], ["c"], name="above")
    return model_of(
        [total, above, chosen], [info("x", FLOAT, [2, 3])], ["y"], {"limit": np.float32(0), "i": np.array([0, 1])}
    )


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
