"""Loops of computed lengths take as many turns as their inputs say: right by ONNX Runtime or onnx's evaluator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from branches_support import (  # noqa: E402
    BOOL,
    FLOAT,
    INT64,
    X,
    assert_right,
    built,
    chosen,
    graph,
    info,
    model_of,
    node,
    right,
    scaled,
    steps,
    with_control,
)
from onnx import helper  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import UsageError  # noqa: E402
from schedsearch.executable.check import ProgramError  # noqa: E402
from schedsearch.executable.check import check as check_program  # noqa: E402
from schedsearch.executable.stored import Stored  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import load as load_model  # noqa: E402


def turning(*, limit: bool, most: bool = True) -> Any:
    """v = tanh(v w - x), starting from x, m times or until the sum of v reaches a limit; and the number of turns."""
    inner = [
        node("MatMul", ["v", "w"], ["p"]),
        node("Add", ["p", "bias"], ["q"]),
        node("Tanh", ["q"], ["after"]),
        node("Add", ["count", "one"], ["next"]),
    ]
    if limit:
        inner += [node("ReduceSum", ["after"], ["s"], keepdims=0), node("Less", ["s", "limit"], ["on"])]
    else:
        inner += [node("Identity", ["c"], ["on"])]
    body = graph(inner, [], {"one": np.ones(1, np.float32)})
    body.input.extend([info("i", INT64, []), info("c", BOOL, []), info("v", FLOAT, [3, 4]), info("count", FLOAT, [1])])
    body.output.extend([info("on", BOOL, []), info("after", FLOAT, [3, 4]), info("next", FLOAT, [1])])
    nodes = [node("Neg", ["x"], ["bias"]), node("Loop", ["m" if most else "", "true", "x", "zero"], ["y", "n"], body=body)]
    nodes[1].name = "turns"
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    inputs = [info("x", FLOAT, [3, 4]), *([info("m", INT64, [])] if most else [])]
    constants = {"w": weight, "zero": np.zeros(1, np.float32), "limit": np.float32(1), "true": np.array(True)}
    return model_of(nodes, inputs, ["y", "n"], constants)


@pytest.mark.parametrize("limit", [True, False])
@pytest.mark.mostly_long(2)
def test_a_loop_takes_as_many_turns_as_its_inputs_say(limit: bool, tmp_path: Path) -> None:
    model = turning(limit=limit)
    with built(model, tmp_path) as net, schedsearch.load(tmp_path / "model.ssx") as loaded:
        assert net.checked and not net.untaken
        for m in (0, 1, 2, 7, 1, 0):
            for sign in (1, -1):
                assert_right(net, model, x=sign * X, m=np.array(m))
        assert_right(loaded, model, x=X, m=np.array(5))
        assert "turns: Loop m times, while " in loaded.explain() and "in each turn:" in loaded.explain()
        assert loaded.measure(2, {"x": X, "m": np.array(3)}).total_ns > 0
        stored, program = Stored(tmp_path / "model.ssx", loaded.program), loaded.program  # type: ignore[attr-defined]
    check_program(program, stored.plans())
    (body,) = next(each.control.programs for each in program.calls if each.control is not None)
    with pytest.raises(ProgramError, match="is not Loop of 1 programs"):
        check_program(with_control(program, bodies=(body, body)), stored.plans())
    place, call = next((number, each) for number, each in enumerate(program.calls) if each.control is not None)
    for name, other, message in (("x0", "x1", "for what the host reads"), ("x2", "x3", "has a program on")):
        moved = replace(call, buffers={**call.buffers, name: call.buffers[other]})
        with pytest.raises(ProgramError, match=message):
            check_program(
                replace(program, calls=(*program.calls[:place], moved, *program.calls[place + 1 :])), stored.plans()
            )


def test_a_loop_without_a_number_of_turns_goes_on_while_its_condition_holds(tmp_path: Path) -> None:
    model = turning(limit=True, most=False)
    network = lower(load_model(model).graph())
    x = -4 * X  # its sum grows above the limit
    wanted = right(model, {"x": x})
    found = evaluate(network, {"x": x})
    for name, value in zip(network.outputs, wanted):
        np.testing.assert_allclose(found[name].reshape(value.shape), value, rtol=1e-5)


@pytest.mark.long
def test_loops_and_branches_are_inside_of_one_another(tmp_path: Path) -> None:
    """A branch with a loop whose body has a branch; the number of turns is the row with the largest first element."""
    inner = [
        node("Mod", ["i", "two_turns"], ["odd"]),
        node("Cast", ["odd"], ["is_odd"], to=BOOL),
        node("If", ["is_odd"], ["after"], name="inner", then_branch=_of_v("Sin"), else_branch=_of_v("Cos")),
        node("Identity", ["c"], ["on"]),
    ]
    body = graph(inner, [], {"two_turns": np.int64(2)})
    body.input.extend([info("i", INT64, []), info("c", BOOL, []), info("v", FLOAT, [3, 4])])
    body.output.extend([info("on", BOOL, []), info("after", FLOAT, [3, 4])])
    then = graph(
        [
            node("ArgMax", ["h"], ["rows"], axis=0, keepdims=0),
            node("Gather", ["rows", "first"], ["m"]),
            node("Loop", ["m", "true", "h"], ["r"], body=body, name="turns"),
        ],
        ["r"],
        {"first": np.int64(0), "true": np.array(True)},
    )
    model = chosen(then, scaled(2, "other"))
    with built(model, tmp_path) as net:
        for rows in ([0, 1, 2], [2, 1, 0], [0, 2, 1]):
            for sign in (1, -1):
                assert_right(net, model, x=sign * X[rows])


def _of_v(op: str) -> Any:
    """Many steps, so that not both branches are computed."""
    return graph([*steps(f"{op}.n", "v"), node(op, [f"{op}.n"], [f"{op}.r"])], [f"{op}.r"])


def test_a_loop_that_stacks_an_unknown_number_of_arrays_is_refused() -> None:
    model = turning(limit=False)
    (body,) = (each.g for each in model.graph.node[1].attribute)
    body.node.append(node("Identity", ["q"], ["seen"]))
    body.output.append(info("seen", FLOAT, [3, 4]))
    model.graph.node[1].output.append("all")
    model.graph.output.append(helper.make_empty_tensor_value_info("all"))
    with pytest.raises(UsageError, match=r"Loop: turns .*it stacks 'all', whose extent is the number of turns"):
        lower(load_model(model).graph())


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [True, False])
def test_a_gpu_takes_as_many_turns_as_its_inputs_say(limit: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = turning(limit=limit)
    onnx.save(model, tmp_path / "model.onnx")
    with schedsearch.build(tmp_path / "model.onnx", target="cuda", db=tmp_path / "r.db", progress=False) as net:
        for m in (0, 1, 2, 7, 1):
            found = net(torch.from_numpy(X).cuda(), torch.tensor(m).cuda())
            for one, other in zip(found, right(model, {"x": X, "m": np.array(m)}), strict=True):
                np.testing.assert_allclose(one.cpu().numpy(), other, rtol=1e-4, atol=1e-5)
