"""`If`s of computed conditions run the branch that is taken: right by ONNX Runtime or onnx's evaluator, in memory and in a
file, and wrong inputs, files and branches are refused."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from branches_support import (  # noqa: E402
    FLOAT,
    INT64,
    LONG,
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
from click.testing import CliRunner  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import BranchError, IndexRangeError, UsageError, WrongNetworkError  # noqa: E402
from schedsearch.executable.check import ProgramError  # noqa: E402
from schedsearch.executable.check import check as check_program  # noqa: E402
from schedsearch.executable.fixed import FixedNet  # noqa: E402
from schedsearch.executable.stored import Stored  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Control  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import load as load_model  # noqa: E402
from schedsearch.network_check.check import Checker  # noqa: E402
from schedsearch.network_check.source import Source  # noqa: E402
from schedsearch.network_check.subjects import BuiltNet  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return chosen(scaled(3), scaled(-5, "other"))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branches")
    built(model, folder).close()
    return folder


@pytest.fixture
def net(folder: Path) -> Iterator[FixedNet]:
    with schedsearch.load(folder / "model.ssx") as loaded:
        assert isinstance(loaded, FixedNet)
        yield loaded


# --- What is computed ---------------------------------------------------------------------------------------------------
def test_each_branch_is_right_again_and_again(net: FixedNet, model: Any) -> None:
    for sign in (1, -1, -1, 1):
        assert_right(net, model, x=sign * X)


def test_arrays_without_the_alignment_of_kernels_are_copied(net: FixedNet, model: Any) -> None:
    memory = np.zeros(4 * 13 + 4, np.uint8)
    for start in (0, 4):
        x = memory[start : start + 48].view(np.float32).reshape(3, 4)
        for sign in (1, -1):
            x[:] = sign * X
            assert_right(net, model, x=x)


def test_bound_arrays_take_the_branch_of_their_numbers_at_the_time(net: FixedNet, model: Any) -> None:
    x = X.copy()
    bound = net.bind(x)
    for sign in (1, -1):
        x[:] = sign * X
        np.testing.assert_allclose(bound(), right(model, {"x": x})[0], rtol=1e-5)
    bound.close()


def test_two_instances_choose_apart(net: FixedNet, model: Any) -> None:
    with net.instance() as other:
        assert_right(net, model, x=X)
        assert_right(other, model, x=-X)
        assert net.untaken == ["the else_branch of either"] and other.untaken == ["the then_branch of either"]


def test_a_file_loads_without_compiler_onnx_and_torch(folder: Path) -> None:
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.split('.')[0] not in ('numba', 'onnx', 'onnxscript', 'torch'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import numpy as np, schedsearch\n"
        f"net = schedsearch.load({str(folder / 'model.ssx')!r})\n"
        "print(*[float(net(np.full((3, 4), n, np.float32))[0, 0]) for n in (1, -1)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    odd = -1 if LONG % 2 else 1
    assert done.stdout.split() == [str(2.0 * 3 * odd + 2), str(-2.0 * -5 * odd - 2)]


def test_a_network_from_a_file_is_written_as_it_was(folder: Path, net: FixedNet, tmp_path: Path) -> None:
    net.save(tmp_path / "again.ssx")
    assert (tmp_path / "again.ssx").read_bytes() == (folder / "model.ssx").read_bytes()


def test_the_kernels_of_both_branches_are_counted_and_explained(net: FixedNet) -> None:
    text = net.explain()
    assert "either: If positive, which the host reads in every run; it reads h and writes y" in text
    assert text.index("if its condition is true:") < text.index("r.n") < text.index("if its condition is false:")
    outside = sum(call.is_kernel for call in net.steps)
    assert len(net.kernels) > outside + 2 and net.summary.startswith(f"{len(net.kernels)} kernel calls and 1 branching")


def test_a_trace_has_what_the_taken_branch_gives(net: FixedNet) -> None:
    found = net.trace(X)
    np.testing.assert_allclose(found["y"], 2 * X * 3 * (-1) ** LONG, rtol=1e-6)
    assert len(net.measure(2, {"x": -X}).calls_ns) == len(net.steps)


def results_of_all_kinds() -> Any:
    """A branch that passes on what is around it, and gives a constant; the other computes all but one."""
    then = graph(
        [*steps("t", "h"), node("Identity", ["h"], ["passed"]), node("Identity", ["five"], ["fixed"])],
        ["t", "passed", "fixed"],
        {"five": np.full((3, 4), 5, np.float32)},
    )
    otherwise = graph(
        [*steps("o", "x"), node("Exp", ["h"], ["e"]), node("Identity", ["shared"], ["own"])], ["o", "e", "own"]
    )
    return chosen(then, otherwise, results=("y", "a", "b"), constants={"shared": X + 1})


def nested() -> Any:
    """Branches with branches inside, which read what is around both."""
    inner = [
        node("If", ["large"], ["i"], name="inner", then_branch=scaled(7, "deep"), else_branch=scaled(11, "deeper")),
        node("Add", ["i", "h"], ["r"]),
    ]
    model = chosen(graph(inner, ["r"]), scaled(-5, "other"), constants={"limit": np.float32(4)})
    at = [each.name for each in model.graph.node].index("above")
    model.graph.node.insert(at, node("Greater", ["sum", "limit"], ["large"]))
    return model


@pytest.mark.long(of="networks")
@pytest.mark.parametrize("make", [results_of_all_kinds, nested])
def test_other_graphs_of_branches(make: Any, tmp_path: Path) -> None:
    model = make()
    with built(model, tmp_path) as net, schedsearch.load(tmp_path / "model.ssx") as loaded:
        for scale in (1, -1, 0.25):  # their sums: 9.75, -9.75, 2.4
            assert_right(net, model, x=np.float32(scale) * X)
            assert_right(loaded, model, x=np.float32(scale) * X)
        assert not net.untaken


@pytest.mark.parametrize("make", [lambda: chosen(scaled(3), scaled(-5, "other")), nested], ids=["one", "nested"])
def test_the_references_of_operators_take_the_branch_as_well(make: Any) -> None:
    model = make()
    network = lower(load_model(model).graph())
    assert [type(each) for each in network.nodes].count(Control) == 1
    for scale in (1, -1, 0.25):
        x = np.float32(scale) * X
        (found,) = (evaluate(network, {"x": x})[name] for name in network.outputs)
        np.testing.assert_allclose(found, right(model, {"x": x})[0], rtol=1e-5)


@pytest.mark.long
def test_a_network_of_other_floats_chooses_by_these(model: Any, tmp_path: Path) -> None:
    with built(model, tmp_path, dtype="float16") as net:
        for sign in (1, -1):
            x = (sign * X).astype(np.float16)
            np.testing.assert_allclose(net(x), right(model, {"x": x.astype(np.float32)})[0], rtol=4e-3)


def test_nodes_of_branches_without_a_kernel_run_in_onnx_runtime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    foreign = [
        node("Slice", ["h", "start", "end", "axes"], ["square"]),
        node("ScatterElements", ["square", "places", "factors"], ["scattered"], reduction="mul"),
        node("ReduceSum", ["scattered"], ["d"], keepdims=0),
    ]
    then = graph([*steps("t", "h"), *foreign, node("Mul", ["t", "d"], ["r"])], ["r"])
    constants = {"start": np.array([0]), "end": np.array([3]), "axes": np.array([1])}
    constants |= {"places": np.array([[0, 2, 0]]), "factors": np.array([[2, 3, 5]], np.float32)}
    model = chosen(then, scaled(2), constants=constants)
    with pytest.raises(UsageError, match="no operator for these nodes of the model: ScatterElements"):
        built(model, tmp_path)
    with built(model, tmp_path, fallback="onnxruntime") as net, schedsearch.load(tmp_path / "model.ssx") as loaded:
        assert "ScatterElements by ONNX Runtime" in net.explain()
        for sign in (1, -1):
            x = sign * np.array([[3, 1, 0, 1], [0, 2, 1, 1], [1, 0, 1, 1]], np.float32)
            assert_right(net, model, x=x)
            assert_right(loaded, model, x=x)


# --- Comparison with the model ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("factors", [(3, -6), pytest.param((4, -5), marks=pytest.mark.long)])
def test_both_branches_are_compared_with_the_model(model: Any, tmp_path: Path, factors: tuple[float, float]) -> None:
    """A network whose branch for negative sums is wrong: no sum of positive numbers shows that."""
    onnx.save(model, tmp_path / "right.onnx")
    source = Source.of_file(tmp_path / "right.onnx")
    wrong = chosen(scaled(factors[0]), scaled(factors[1], "other"))
    with built(wrong, tmp_path, check=False) as net, pytest.raises(WrongNetworkError):
        Checker(source, lambda text: None, time.monotonic()).check(BuiltNet(net))


def test_a_branch_that_no_inputs_take_is_named(tmp_path: Path) -> None:
    model = chosen(scaled(3), scaled(-5, "other"))
    model.graph.node[1].CopyFrom(node("ReduceSumSquare", ["x"], ["sum"], keepdims=0))
    lines: list[str] = []
    with built(model, tmp_path, say=lines.append) as net:
        assert not net.untaken or any("not compared: the else_branch of either" in line for line in lines)
        assert net.checked  # zeros take it


# --- Refused ------------------------------------------------------------------------------------------------------------
def by_rate() -> Any:
    """x @ w where k is 2, for which x has a column too many, and else x @ v. No inference of shapes sees that."""
    branches = {
        word: graph([*steps(f"{name}n", "hidden"), node("MatMul", [f"{name}n", name], [f"{name}r"])], [f"{name}r"])
        for word, name in (("then_branch", "w"), ("else_branch", "v"))
    }
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Abs", ["shape"], ["same"]),
        node("Reshape", ["x", "same"], ["hidden"]),
        node("Equal", ["k", "two"], ["c"]),
        node("If", ["c"], ["y"], name="rate", **branches),
    ]
    constants = {"two": np.int64(2), "w": np.ones((3, 2), np.float32), "v": np.ones((4, 2), np.float32)}
    return model_of(nodes, [info("x", FLOAT, [3, 4]), info("k", INT64, [])], ["y"], constants)


def test_a_branch_that_fits_no_shape_fails_when_it_is_taken(tmp_path: Path) -> None:
    lines: list[str] = []
    with built(by_rate(), tmp_path, say=lines.append) as net, schedsearch.load(tmp_path / "model.ssx") as loaded:
        assert any(
            line.startswith("calls that take the then_branch of rate (If) fail with these shapes: ") for line in lines
        )
        for each in (net, loaded):
            np.testing.assert_allclose(each(X, np.array(3)), (-1) ** LONG * X @ np.ones((4, 2), np.float32), rtol=1e-6)
            with pytest.raises(BranchError, match=r"the inputs take the then_branch of rate .*MatMul.*other shapes"):
                each(X, np.array(2))
        assert net.checked and not net.untaken
    from cli_support import main

    shown = CliRunner().invoke(main, ["run", str(tmp_path / "model.ssx"), "--input", "k=3", "--repeat", "0"])
    assert shown.exit_code == 0 and "y: [3, 2]" in shown.output
    shown = CliRunner().invoke(main, ["run", str(tmp_path / "model.ssx"), "--input", "k=2"])
    assert shown.exit_code != 0 and "the inputs take the then_branch of rate" in shown.output


@pytest.mark.long(of="networks")
def test_an_index_out_of_range_in_a_branch_names_its_node(tmp_path: Path) -> None:
    then = graph([*steps("t", "h"), node("Gather", ["t", "k"], ["r"], name="rows")], ["r"])
    model = chosen(then, scaled(2), k=[info("k", INT64, [3])])
    with built(model, tmp_path) as net:
        assert net.index_limits() == {"k": 3}
        net(X, np.array([0, 1, 2]))
        with pytest.raises(IndexRangeError, match=r"node rows: .*5"):
            net(X, np.array([0, 5, 2]))
        net(-X, np.array([0, 5, 2]))  # nobody reads them


def test_a_table_of_sizes_takes_no_computed_branches(model: Any, tmp_path: Path) -> None:
    dynamic = type(model)()
    dynamic.CopyFrom(model)
    dynamic.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    with pytest.raises(UsageError, match=r"either .*condition"):
        built(dynamic, tmp_path, dynamic={"n": (1, 4)})


def test_programs_inside_obey_the_rules_of_programs(folder: Path, net: FixedNet) -> None:
    stored, program = Stored(folder / "model.ssx", net.program), net.program
    plans = stored.plans()
    check_program(program, plans)
    place, call = next((number, each) for number, each in enumerate(program.calls) if each.control is not None)
    assert call.control is not None
    then, otherwise = call.control.programs
    with pytest.raises(ProgramError, match="is not If of 2 programs"):
        check_program(with_control(program, bodies=(then,)), plans)
    with pytest.raises(ProgramError, match="which nothing has written there before"):
        check_program(with_control(program, bodies=(then, replace(otherwise, calls=otherwise.calls[1:]))), plans)
    for name, other, message in (("x1", "x0", "has a program on"), ("x0", "x1", "for what the host reads")):
        moved = replace(call, buffers={**call.buffers, name: call.buffers[other]})
        with pytest.raises(ProgramError, match=message):
            check_program(replace(program, calls=(*program.calls[:place], moved, *program.calls[place + 1 :])), plans)
    large = replace(then, arena_bytes=1 << 20)
    with pytest.raises(ProgramError, match=r"has 1048576 bytes|need at most"):
        check_program(with_control(program, bodies=(large, otherwise)), plans)


@pytest.mark.gpu
def test_a_gpu_runs_the_branch_that_is_taken(model: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    onnx.save(model, tmp_path / "model.onnx")
    with (
        schedsearch.build(
            tmp_path / "model.onnx", target="cuda", db=tmp_path / "r.db", out=tmp_path / "m.ssx", progress=False
        ) as net,
        schedsearch.load(tmp_path / "m.ssx") as loaded,
    ):
        for each in (net, loaded):
            for sign in (1, -1, -1, 1):
                x = torch.from_numpy(sign * X).cuda()
                np.testing.assert_allclose(each(x).cpu().numpy(), right(model, {"x": sign * X})[0], rtol=1e-5)
            bound = each.bind(x)
            x.neg_()
            np.testing.assert_allclose(bound().cpu().numpy(), right(model, {"x": -X})[0], rtol=1e-5)
            bound.close()
        with pytest.raises(UsageError, match="a CUDA graph cannot capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            net(x)
