"""Dynamic graphs as files: built and run by the command line, loaded without a compiler. Expected values are NumPy's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli_support import isolate
from cli_support import schedsearch as command
from onnx import TensorProto, helper, numpy_helper

import schedsearch
from schedsearch.dynamic.executable import DynamicExecutable
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.errors import ArgumentError, UntrustedDatabaseError, UsageError
from schedsearch.ops.dependence import SizeError
from schedsearch.records import executables

pytestmark = pytest.mark.long  # builds networks

ROWS, COLUMNS = 6, 5


def model() -> Any:
    """relu(x + bias), and a window of it whose positions are computed."""
    bias = numpy_helper.from_array(np.arange(COLUMNS, dtype=np.float32) - 2, "bias")
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["sum"], name="add"),
        helper.make_node("Relu", ["sum"], ["positive"], name="relu"),
        helper.make_node("Slice", ["positive", "begin", "end"], ["window"], name="slice"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", COLUMNS])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT64, [2]) for name in ("begin", "end")]
    output = helper.make_tensor_value_info("window", TensorProto.FLOAT, [None, None])
    graph = helper.make_graph(nodes, "window", inputs, [output], [bias])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def arrays(n: int, begin: Any = (1, 1), end: Any = (5, 4)) -> tuple[Any, ...]:
    x = np.random.default_rng(n).standard_normal((n, COLUMNS)).astype(np.float32)
    return x, np.array(begin), np.array(end)


def expected(x: Any, begin: Any, end: Any) -> Any:
    positive = np.maximum(x + np.arange(COLUMNS, dtype=np.float32) - 2, 0)
    return positive[begin[0] : end[0], begin[1] : end[1]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with model.onnx, and model.ssx that the command line made of it."""
    folder = tmp_path_factory.mktemp("dynamic")
    onnx.save(model(), folder / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        isolate(folder, patch)
        patch.chdir(folder)
        options = ("--dynamic", f"n=1..{ROWS}", "--db", "none.db", "--target", "cpu", "--explain")
        result = command("build", "model.onnx", *options)
        assert result.exit_code == 0, result.output
        yield folder, result


@pytest.fixture(scope="module")
def net(built: Any) -> Any:
    with schedsearch.load(built[0] / "model.ssx") as loaded:
        yield loaded


def test_build_says_what_it_made_and_what_runs_cost(built: Any) -> None:
    out = built[1].stdout
    assert "model.onnx on cpu" in out and "runs exact" in out
    assert "segment 0: exact runs copy 16 bytes to the host and wait once" in out
    assert "; the values of begin, end" in out and "allocates y" in out
    assert "bounded runs: 0 bytes to the host, 0 waits, 0 allocations" in out
    assert f"takes x float32 [n=1..{ROWS}, {COLUMNS}], begin int64 [2], end int64 [2]" in out
    assert "kernels have no record and use their default configuration" in built[1].stderr
    assert "no table of kernels for each size: " in built[1].stderr


def test_a_loaded_graph_runs_in_both_ways(net: DynamicExecutable) -> None:
    for n in (1, 4, ROWS):
        given = arrays(n)
        np.testing.assert_allclose(net(*given), expected(*given), rtol=1e-6)
    x, begin, end = arrays(4)
    np.testing.assert_allclose(net(end=end, x=x, begin=begin), expected(x, begin, end), rtol=1e-6)
    bound = net.bind(x, begin, end)
    bound.step()
    np.testing.assert_allclose(bound.sliced()[0], expected(x, begin, end), rtol=1e-6)
    bound.close()
    assert str(net.outputs[0]) == f"window float32 up to [{ROWS}, {COLUMNS}]" and "0 waits" in net.explain()


def test_loading_and_running_need_neither_compiler_nor_templates(built: Any) -> None:
    code = (
        "import sys, numpy as np, schedsearch\n"
        "net = schedsearch.load('model.ssx')\n"
        f"assert net(np.ones((4, {COLUMNS}), np.float32), np.array([1, 1]), np.array([3, 3])).shape == (2, 2)\n"
        "names = ('numba', 'onnx', 'onnx_ir', 'torch', 'xgboost', 'sqlalchemy', 'schedsearch.templates',\n"
        "    'schedsearch.dynamic.graph', 'schedsearch.dynamic.dims')\n"
        "print([name for name in names if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=built[0], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr


def test_a_bounded_executable_keeps_its_sizes_on_the_device(built: Any) -> None:
    path = built[0] / "bounded.ssx"
    sizes = {"n": (1, ROWS)}
    with schedsearch.build_dynamic(
        built[0] / "model.onnx", sizes, run_mode="bounded", db="none.db", target="cpu", out=path
    ) as one:
        first = path.read_bytes()
        one.save(path)
        assert path.read_bytes() == first, "the same contents give the same bytes"
    with schedsearch.load(path) as net:
        given = arrays(5)
        for end in ((5, 4), (2, 3)):
            given[2][:] = end
            y, extents = net(*given)
            wanted = expected(*given)
            assert tuple(extents) == wanted.shape and y.shape == (ROWS, COLUMNS)
            np.testing.assert_allclose(y[: extents[0], : extents[1]], wanted, rtol=1e-6)
        other = arrays(2, (0, 0))
        y, extents = net(*other)
        np.testing.assert_allclose(y[: extents[0], : extents[1]], expected(*other), rtol=1e-6)
        net.check()


def test_run_draws_inputs_and_prints_times(built: Any) -> None:
    x, begin, end = arrays(3)
    for name, array in (("x", x), ("begin", begin), ("end", end)):
        np.save(built[0] / f"{name}.npy", array)
    inputs = [word for name in ("x", "begin", "end") for word in ("--input", f"{name}={name}.npy")]
    shown = command("run", "model.ssx", *inputs, "--repeat", 2, "--output", "y.npy")
    assert shown.exit_code == 0, shown.output
    assert "\nwindow: [2, 3]" in shown.stdout and "each with its wait" in shown.stdout
    np.testing.assert_allclose(np.load(built[0] / "y.npy"), expected(x, begin, end), rtol=1e-6)
    data = json.loads(command("run", "model.ssx", *inputs[2:], "--size", "n=4", "--repeat", 1, "--json").stdout)
    assert data["inputs"]["x"] == [4, COLUMNS] and data["outputs"]["window"] == [3, 3] and data["bounded_ns"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dynamic", "n=6..1"], "n=6..1 is reversed; write the smaller bound first: n=1..6"),
        (["--dynamic", "n=0..0"], "n=0..0 has no size but 0"),
        (["--dynamic", "n"], "'n' is not a dimension with bounds; write NAME=LEAST..MOST, e.g. n=1..64,h=480..800"),
        (["--dynamic", "n=1.."], "'n=1..' is not a dimension with bounds"),
        (["--dynamic", "n=-1..4"], "n=-1..4 is not possible; allowed: sizes from 0 to 2147483647"),
        (["--dynamic", "n=1..2147483648"], "n=1..2147483648 is not possible; allowed: sizes from 0 to 2147483647"),
        (["--dynamic", "n=1..2147483647", "--run-mode", "exact"], "GiB; give smaller bounds"),
        (["--dynamic", "n=1..4,n=1..5"], "n is given twice"),
        (["--dynamic", "n=1..4", "--dynamic", "n=1..5"], "n is given twice"),
        (["--dynamic", "m=1..4", "--dynamic", "n=1..4"], "has no dynamic dimension 'm'; allowed: n"),
        (["--shape", "x=1,5", "--shape", "x=2,5"], "x is given twice; give the shape of each input once"),
        (["--dynamic", "m=1..4,n=1..4"], "has no dynamic dimension 'm'; allowed: n"),
        (["--way", "exact"], "dimension 0 of input 'x' is 'n', which has no bounds; give them, e.g. --dynamic n=1..64"),
        (
            ["--dynamic", "n=1..6", "--dtype", "float16"],
            "dtype, layout, io_layout and weights are for tables of kernels for each size",
        ),
        (["--dynamic", "n=1..6", "--run-mode", "exact", "--layout", "NHWC"], "give one dimension and no run_mode"),
        (["--dynamic", "n=1..6", "--fallback", "onnxruntime"], "fallback does not go with dynamic and run_mode"),
        (["--dynamic", "n=1..6", "--shape", "x=1,5"], "shapes does not go with dynamic and run_mode"),
        (["--dynamic", "n=1..6", "--strict"], "there is no database none.db"),
    ],
)
def test_mistakes_of_a_build(built: Any, options: list[str], message: str) -> None:
    result = command("build", "model.onnx", "--db", "none.db", "--target", "cpu", "-o", "never.ssx", *options)
    assert result.exit_code in (2, 6) and message in result.stderr, result.stderr
    assert not (built[0] / "never.ssx").exists()


def test_a_model_without_dynamic_dimensions_allows_none(built: Any) -> None:
    fixed = model()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(fixed, built[0] / "fixed.onnx")
    with pytest.raises(UsageError, match=r"fixed\.onnx has no dynamic dimension 'n'; allowed: none"):
        schedsearch.build_dynamic(built[0] / "fixed.onnx", {"n": (1, 4)}, db="none.db", target="cpu")
    with pytest.raises(UsageError, match=r"the sizes of 'n' are 4; give the smallest and the largest"):
        schedsearch.build_dynamic(built[0] / "fixed.onnx", {"n": 4}, db="none.db", target="cpu")  # type: ignore[dict-item]


def test_mistakes_of_calls(net: DynamicExecutable) -> None:
    x, begin, end = arrays(4)
    with pytest.raises(ArgumentError, match=rf"x has shape \[7, 5\]; allowed in dimension 0: n=1\.\.{ROWS}"):
        net(np.zeros((7, COLUMNS), np.float32), begin, end)
    with pytest.raises(ArgumentError, match=rf"missing end; the network takes x float32 \[n=1\.\.{ROWS}, {COLUMNS}\]"):
        net(x, begin)
    with pytest.raises(ArgumentError, match="unknown input 'stop'"):
        net(x, begin, stop=end)
    with pytest.raises(ArgumentError, match="x"):
        net(x.astype(np.float64), begin, end)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "m=3"], "no size 'm'; allowed: n"),
        (["--size", "n=7"], f"'7' is not possible; allowed: n=1..{ROWS}"),
        (["--size", "n"], "'' is not possible"),
        (["--input", "z=x.npy"], "the network has no input 'z'"),
    ],
)
def test_mistakes_of_a_run(built: Any, options: list[str], message: str) -> None:
    result = command("run", "model.ssx", *options)
    assert result.exit_code == 2 and message in result.stderr, result.stderr


def test_run_draws_indices_that_rows_in_use_have(built: Any) -> None:
    """With two rows the indices are -2 to 1, though there is memory for 64."""
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, ["n", 3]), info("places", TensorProto.INT64, [50])]
    graph = helper.make_graph(
        [helper.make_node("Gather", ["x", "places"], ["y"], "pick")], "rows", inputs, [info("y", TensorProto.FLOAT, None)]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), built[0] / "rows.onnx")
    options = ("--dynamic", "n=1..64", "--run-mode", "exact", "--db", "none.db", "--target", "cpu")
    assert command("build", "rows.onnx", *options).exit_code == 0
    for n in (2, 64):
        shown = command("run", "rows.ssx", "--size", f"n={n}", "--repeat", 0, "--json")
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.stdout)["inputs"] == {"x": [n, 3], "places": [50]}


def test_impossible_sizes_name_call_and_numbers(built: Any, tmp_path: Path) -> None:
    graph = DynamicGraph()
    given = [graph.input("x", (4, 6), "float32"), *(graph.input(name, (2,), "int64") for name in ("begin", "end"))]
    narrow = schedsearch.dyn_strided_slice(x=(4, 6), bound=(4, 3), strided=False, dtype="float32")
    graph.output(graph.call(narrow, *given, name="cut"))
    from schedsearch.device import open_device
    from schedsearch.device.detect import detect
    from schedsearch.dynamic.file import DynamicBundle
    from schedsearch.executable.kernels import find_kernels

    target = detect("cpu")
    (chosen,) = find_kernels([narrow], "none.db", target).values()
    bundle = DynamicBundle.of(graph, target, lambda _: chosen)
    bundle.save(tmp_path / "cut.ssx")
    text = r"cut\.y would be 2x6, which exceeds its declared bound 4x3; declare larger bounds"
    x = np.zeros((4, 6), np.float32)
    for net in (DynamicExecutable(bundle, open_device(target)), schedsearch.load(tmp_path / "cut.ssx")):
        with net, pytest.raises(SizeError, match=text):
            net(x, np.array([0, 0]), np.array([2, 6]))


def test_files_that_were_changed_or_come_from_elsewhere_are_refused(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built[0] / "model.ssx"
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "another machine"))
    with pytest.raises(UntrustedDatabaseError, match="did not sign"):
        schedsearch.load(path)
    assert executables.is_executable(path)
