"""A network with an open batch as one file: a table from size to kernels. Expected values are those of ONNX's reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli_support import isolate
from cli_support import schedsearch as command
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import schedsearch
from schedsearch.deadline import Deadline
from schedsearch.device.detect import detect
from schedsearch.dynamic.executable import DynamicExecutable
from schedsearch.errors import ArgumentError, DatabaseError, NoRecordError, UntrustedDatabaseError, UsageError
from schedsearch.executable import sized_tune
from schedsearch.executable.program import unseal
from schedsearch.executable.sized import SizedNet, StoredBundle
from schedsearch.launch_sizes import SizedData, SizedPlan
from schedsearch.processes.range_build import Spaces, build_shared
from schedsearch.records import executables
from schedsearch.records.store import Store
from schedsearch.records.writes import put_size_table
from schedsearch.size_table import SizedKernel, SizeTable
from schedsearch.template import load_template
from schedsearch.workload import WorkloadRange

pytestmark = pytest.mark.long  # builds networks

LOW, HIGH, CHANNELS = 1, 4, 8
RNG = np.random.default_rng(0)


def model() -> Any:
    """relu(conv(x)), and of that a mean for each image and channel."""
    arrays = {
        "w": (RNG.standard_normal((CHANNELS, CHANNELS, 3, 3)) * 0.2).astype(np.float32),
        "b": RNG.standard_normal(CHANNELS).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4, kernel_shape=[3, 3], name="conv"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["y"], name="flat"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", CHANNELS, 5, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", CHANNELS])
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "small", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


MODEL = model()


def inputs(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, CHANNELS, 5, 4)).astype(np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    (y,) = ReferenceEvaluator(MODEL).run(None, {"x": x})
    return np.asarray(y)


def put_tuned_convolution(path: Path) -> None:
    """The kernels of the network's convolution for the whole range, as a tuning run leaves them."""
    target = detect("cpu")
    conv = schedsearch.conv2d(
        n=1, h=5, w=4, c=CHANNELS, k=CHANNELS, r=3, s=3, padding=1, dtype="float32", epilogue=("bias", "relu")
    )
    of_range = conv.with_dynamic("n", LOW, HIGH)
    template = load_template("conv2d_cpu")
    workloads = {size: of_range.at(size) for size in of_range.sizes}
    made = build_shared(template, workloads, Spaces(template, of_range.at, target), target, None, HIGH)
    plan = SizedPlan.from_json(made.plan)
    kernel = SizedKernel(
        template.name, template.version, schedsearch.Config(made.config), made.result.artifact.code, plan, {1: 7.0, 4: 9.0}
    )
    with Store.open(path) as store:
        table = SizeTable(LOW, HIGH, (kernel,), ((LOW, HIGH, 0),), {}, 2)
        put_size_table(store.database, of_range, target.key, "cold-graph-v1", table)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with model.onnx, records.db that has the convolution, and model.ssx that the command line made of both."""
    folder = tmp_path_factory.mktemp("sized")
    onnx.save(MODEL, folder / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        isolate(folder, patch)
        patch.chdir(folder)
        put_tuned_convolution(folder / "records.db")
        result = command("build", "model.onnx", "--dynamic", f"n={LOW}..{HIGH}", "--target", "cpu", "--explain")
        assert result.exit_code == 0, result.output
        yield folder, result


@pytest.fixture(scope="module")
def net(built: Any) -> Any:
    with schedsearch.load(built[0] / "model.ssx") as loaded:
        yield loaded


def test_build_says_what_serves_which_sizes(built: Any) -> None:
    out, said = built[1].stdout, built[1].stderr
    assert f"a table of kernels for n = {LOW} to {HIGH}" in out and f"n = {LOW} to {HIGH}: 3 calls" in out
    assert "conv2d_cpu (exact, 9 ns)" in out and "waits for nothing" in out
    assert "3 different kernels for n = 1 to 4, 1 of them tuned for the range" in said
    assert "2 of 3 kernels have no record and use their default configuration" in said
    assert f"takes x float32 [n={LOW}..{HIGH}, {CHANNELS}, 5, 4]" in out


def test_every_size_is_computed_and_all_share_the_weights(net: SizedNet) -> None:
    blocks = []
    for n in (HIGH, *range(LOW, HIGH + 1), 2):
        x = inputs(n)
        np.testing.assert_allclose(net(x), expected(x), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(net(x=x), expected(x), rtol=1e-4, atol=1e-5)
        blocks.append(len(net._shared._memory))
    assert len(set(blocks)) == 1, "later sizes bring no weights"
    out = np.empty((3, CHANNELS), np.float32)
    assert net(inputs(3), out=out) is out
    np.testing.assert_allclose(out, expected(inputs(3)), rtol=1e-4, atol=1e-5)
    step = net.at(2).bind(inputs(2))
    np.testing.assert_allclose(step(), expected(inputs(2)), rtol=1e-4, atol=1e-5)


def program_text(path: Path) -> str:
    with executables.ExecutableFile(path) as file:
        return json.dumps(unseal(file.program, required=True))


def test_one_machine_code_serves_all_sizes(built: Any) -> None:
    path = built[0] / "model.ssx"
    table = StoredBundle(path, program_text(path)).table
    programs = [table.at(size) for size in table.sizes]
    assert len({call.artifact for program in programs for call in program.calls if call.name == "conv"}) == 1
    assert len({call.artifact for program in programs for call in program.calls}) < 2 * len(programs[0].calls)
    assert all(json.loads(call.origin.config) for program in programs for call in program.calls), "configurations are named"
    assert len({program.weights for program in programs}) == 1, "one layout plan, so one packing of weights"
    assert path.stat().st_size < 1_000_000


def test_the_same_model_gives_the_same_bytes(built: Any) -> None:
    path = built[0] / "again.ssx"
    with schedsearch.build_dynamic(built[0] / "model.onnx", {"n": (LOW, HIGH)}, target="cpu", out=path) as again:
        np.testing.assert_allclose(again(inputs(2)), expected(inputs(2)), rtol=1e-4, atol=1e-5)
    assert path.read_bytes() == (built[0] / "model.ssx").read_bytes()


def test_run_takes_a_size_or_that_of_a_file(built: Any) -> None:
    x = inputs(3)
    np.save("x.npy", x)
    shown = command(
        "run", "model.ssx", "--input", "x.npy", "--output", "y.npy", "--repeat", 1, "--compare", "onnx", "--json"
    )
    assert shown.exit_code == 0, shown.output
    np.testing.assert_allclose(np.load("y.npy"), expected(x), rtol=1e-4, atol=1e-5)
    assert max(each["relative"] for each in json.loads(shown.stdout)["errors"]) < 1e-5
    assert command("run", "model.ssx", "--size", "n=2", "--output", "y.npy", "--repeat", 0).exit_code == 0
    assert np.load("y.npy").shape == (2, CHANNELS)
    refused = command("run", "model.ssx", "--size", "n=5")
    assert refused.exit_code == 2 and f"'5' is not possible; allowed: n={LOW}..{HIGH}" in refused.stderr


def test_mistakes_of_calls(net: SizedNet) -> None:
    with pytest.raises(
        ArgumentError, match=r"x has shape \[5, 8, 5, 4\]; allowed: \[n=1\.\.4, 8, 5, 4\]; build a wider range"
    ):
        net(inputs(5))
    with pytest.raises(ArgumentError, match="n is 5; the network was built for 1 to 4"):
        net.at(5)
    with pytest.raises(ArgumentError, match=r"missing x; the network takes x float32 \[n=1\.\.4, 8, 5, 4\]"):
        net()
    with pytest.raises(ArgumentError, match="float64"):
        net(inputs(2).astype(np.float64))
    with pytest.raises(ArgumentError, match="unknown input 'z'"):
        net(inputs(2), z=1)


def test_mistakes_of_builds(built: Any) -> None:
    path = built[0] / "model.onnx"
    with pytest.raises(NoRecordError, match=r"no kernels were tuned for the range n = 1 to 4 of .*--strict"):
        schedsearch.build_dynamic(path, {"n": (LOW, HIGH)}, target="cpu", db="none.db", strict=True)
    said: list[str] = []
    with pytest.raises(UsageError, match=r"has no dynamic dimension 'm'.*allowed: n$"):
        schedsearch.build_dynamic(path, {"m": (LOW, HIGH)}, target="cpu", db="none.db", say=said.append)
    assert not said
    with pytest.raises(UsageError, match="layout 'NCWH' is not possible; allowed: auto, NHWC, NCHW"):
        schedsearch.build_dynamic(path, {"n": (LOW, HIGH)}, layout="NCWH", target="cpu", db="none.db")
    with pytest.raises(UsageError, match=r"n=4\.\.1 is reversed; allowed: LEAST\.\.MOST"):
        schedsearch.build_dynamic(path, {"n": (HIGH, LOW)}, target="cpu", db="none.db")


def test_weights_stay_in_the_model(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = built[0]
    monkeypatch.chdir(folder)
    made = command(
        "build", "model.onnx", "--dynamic", "n=1..2", "--target", "cpu", "--weights", "reference", "-o", "outside.ssx"
    )  # fmt: skip
    assert made.exit_code == 0 and "weights (2,304 of " in made.stderr, made.output
    with schedsearch.load("outside.ssx") as net:
        for n in (1, 2):
            np.testing.assert_allclose(net(inputs(n)), expected(inputs(n)), rtol=1e-4, atol=1e-5)
    model = (folder / "model.onnx").read_bytes()
    try:
        (folder / "model.onnx").write_bytes(
            model.replace(numpy_helper.to_array(MODEL.graph.initializer[0]).tobytes()[:64], b"0" * 64)
        )
        with schedsearch.load("outside.ssx") as net, pytest.raises(DatabaseError, match="which was changed"):
            net(inputs(1))
    finally:
        (folder / "model.onnx").write_bytes(model)


def test_tuning_serves_the_range_and_is_not_done_twice(built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized_tune, "TASKS_A_SECOND", 10.0)  # so that the time is enough for ranges, not only for one size
    # A busy machine may need all of it for the defaults, which are compiled first.
    monkeypatch.setattr(sized_tune, "time_to_tune", lambda deadline, count, say: Deadline.within(20.0))
    said: list[str] = []
    options: dict[str, Any] = {"target": "cpu", "db": tmp_path / "tuned.db", "say": said.append, "tune_s": 8}
    with schedsearch.build_dynamic(built[0] / "model.onnx", {"n": (LOW, HIGH)}, **options) as tuned:
        assert any(kernel.level == "exact" for kernel in tuned.kernels), said
        for n in range(LOW, HIGH + 1):
            np.testing.assert_allclose(tuned(inputs(n)), expected(inputs(n)), rtol=1e-4, atol=1e-5)
    (first,) = [int(line.split()[1]) for line in said if "that were not tuned" in line]
    said.clear()
    with schedsearch.build_dynamic(built[0] / "model.onnx", {"n": (LOW, HIGH)}, **options):
        again = [int(line.split()[3]) for line in said if "that were not tuned" in line]
        assert not again or again[0] < first + 5, said


def test_the_networks_of_all_sizes_have_the_weights_in_memory_once(built: Any) -> None:
    from schedsearch.executable.sized_build import SizedBuild, open_shapes
    from schedsearch.network.lower import lower
    from schedsearch.network.model import load

    loaded = load(built[0] / "model.onnx")
    shapes = open_shapes(loaded, "n")
    options: dict[str, Any] = {"target": detect("cpu"), "db": "none.db", "mode": "", "strict": False, "model": ""}
    build = SizedBuild(lambda n: lower(loaded.graph(shapes(n))), "n", LOW, HIGH, say=lambda text: None, **options)
    networks = build.networks()
    assert {n: network.values[network.inputs[0]].shape[0] for n, network in networks.items()} == {1: 1, 2: 2, 3: 3, 4: 4}
    weights = [{name: id(each.array) for name, each in network.constants.items()} for network in networks.values()]
    assert weights[0] and all(each == weights[0] for each in weights)


def test_a_size_of_zero_makes_a_graph(built: Any) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"target": "cpu", "db": "none.db", "say": said.append}
    with schedsearch.build_dynamic(built[0] / "model.onnx", {"n": (0, 2)}, **options) as graph:
        assert isinstance(graph, DynamicExecutable)
        np.testing.assert_allclose(graph(inputs(2)), expected(inputs(2)), rtol=1e-4, atol=1e-5)
        assert graph(inputs(0)).shape == (0, CHANNELS)
    assert "n=0..2 is not possible for a table of kernels" in said[0]


def test_files_from_elsewhere_and_damaged_ones_are_refused(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built[0] / "model.ssx"
    text = json.loads(program_text(path))
    text["programs"][0]["rules"][0][1] = {"scale": 1, "offset": 0, "divisor": 0, "factor": 1}
    with pytest.raises(DatabaseError, match=r"a number that is not possible.*build the model again"):
        StoredBundle(path, json.dumps(text))
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "another machine"))
    with pytest.raises(UntrustedDatabaseError, match="did not sign"):
        schedsearch.load(path)


numbers = st.integers(-(2**40), 2**40) | st.text(max_size=3) | st.booleans() | st.none() | st.floats(allow_nan=False)


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=9))
def test_data_of_several_sizes_come_back_as_they_were(columns: list[list[Any]]) -> None:
    objects = {
        size: {"a": [*column], "b": {"c": column[0], "d": []}, "e": 3 * size} for size, column in enumerate(columns, 1)
    }
    sized = SizedData.from_json(SizedData.between(objects).to_json())
    assert {size: sized.data(size) for size in objects} == objects


def test_objects_with_other_parts_are_not_one() -> None:
    assert not SizedData.alike({"a": 1}, {"a": [1]})
    with pytest.raises(ValueError, match="different parts"):
        SizedData.between({1: {"a": 1}, 2: {"b": 1}})


def test_a_range_is_found_only_where_one_size_is_open() -> None:
    from schedsearch.executable.sized_build import _range_of

    conv = schedsearch.conv2d(n=1, h=5, w=5, c=8, k=8, r=3, s=3)
    column = {size: conv.replace(n=size) for size in range(2, 5)}
    assert _range_of(column) == WorkloadRange(conv, "n", 2, 4)
    assert _range_of({size: conv.replace(n=2 * size) for size in range(2, 5)}) is None
    assert _range_of({size: conv.replace(n=size, h=size + 3) for size in range(2, 5)}) is None
    assert _range_of(dict.fromkeys(range(2, 5), conv)) is None


@pytest.mark.gpu
def test_a_gpu_runs_every_size(built: Any) -> None:
    torch = pytest.importorskip("torch")
    with schedsearch.build_dynamic(built[0] / "model.onnx", {"n": (LOW, HIGH)}, target="cuda", db="none.db") as net:
        for n in range(LOW, HIGH + 1):
            x = inputs(n)
            y = net(torch.from_numpy(x).cuda())
            np.testing.assert_allclose(y.cpu().numpy(), expected(x), rtol=1e-3, atol=1e-3)
