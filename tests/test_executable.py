"""Executables: a network runs as its plan says, in memory that is shared where it may be, and from a file as well."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import network_support as support
import numpy as np
import pytest

import schedsearch
from schedsearch.device import open_device
from schedsearch.errors import (
    ArgumentError,
    DatabaseError,
    DeviceError,
    SchemaVersionError,
    UntrustedDatabaseError,
    UsageError,
)
from schedsearch.executable.assemble import Executable, assemble
from schedsearch.executable.file import load
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.program import ChosenKernel, Origin, Program
from schedsearch.executable.schedule import schedule
from schedsearch.executable.stored import save
from schedsearch.launch import Artifact, Grid, LaunchPlan, Pointer, Step
from schedsearch.network.graph import Network, Node, Value, View
from schedsearch.network.plan import first_plan
from schedsearch.records import trust
from schedsearch.target import PRESETS

NETWORK = support.two_convolutions()


@pytest.fixture(scope="module")
def executable() -> Executable:
    return support.build(NETWORK, schedsearch.detect("cpu"))


@pytest.fixture(scope="module")
def net(executable: Executable) -> Iterator[FixedNet]:
    with FixedNet(executable, open_device(schedsearch.detect("cpu"))) as net:
        yield net


@pytest.fixture
def path(executable: Executable, tmp_path: Path) -> Path:
    save(executable, tmp_path / "model.ssx")
    return tmp_path / "model.ssx"


def image(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-2, 3, (1, 8, 6, 6)).astype(np.float32)


def expected(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return support.truth(NETWORK, {"x": x})


# ---- running


def test_a_network_computes_what_its_nodes_compute(net: FixedNet) -> None:
    for seed in range(3):  # outputs are new arrays, at other addresses
        x = image(seed)
        np.testing.assert_array_equal(net(x), expected(x)["y"])
    np.testing.assert_array_equal(net(x=image()), expected(image())["y"])


def test_outputs_go_where_the_caller_wants_them(net: FixedNet) -> None:
    x, out = image(), np.empty((1, 8, 6, 6), np.float32)
    assert net(x, out=out) is out
    np.testing.assert_array_equal(out, expected(x)["y"])


def test_a_bound_network_reads_and_writes_the_same_arrays_in_every_run(net: FixedNet) -> None:
    x = image()
    step = net.bind(x)
    y = step()
    x[:] = image(1)
    assert step() is y
    np.testing.assert_array_equal(y, expected(image(1))["y"])


@pytest.mark.integrations
def test_tensors_of_torch_take_a_short_path_at_any_address(net: FixedNet) -> None:
    torch = pytest.importorskip("torch")
    kept = [(seed, net(torch.from_numpy(image(seed)))) for seed in range(3)]
    net(image(5))  # other arrays in between
    kept.append((7, net(torch.from_numpy(image(7)))))
    for seed, y in kept:
        np.testing.assert_array_equal(y.numpy(), expected(image(seed))["y"])


def test_arrays_of_numpy_take_a_short_path_at_any_address(net: FixedNet) -> None:
    kept = []
    for seed in range(4):
        x = image(seed)
        kept.append((x, net(x)))
    for x, y in kept:  # each result has memory of its own
        np.testing.assert_array_equal(y, expected(x)["y"])
    assert net._short_call is not None
    readonly = image(5)
    readonly.flags.writeable = False
    np.testing.assert_array_equal(net(readonly), expected(readonly)["y"])
    for wrong in (image()[:, :, :5], image().astype(np.float64), image().tolist(), image()[..., ::-1], image()[0]):
        net(image())
        with pytest.raises(ArgumentError, match="x "):
            net(wrong)
    np.testing.assert_array_equal(net(image(6)), expected(image(6))["y"])


def test_a_trace_has_the_value_of_every_call_in_the_models_order_of_axes(net: FixedNet) -> None:
    x = image()
    found, wanted = net.trace(x), expected(x)
    assert set(found) == {"t", "y"}
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name])


def test_times_are_measured_of_the_whole_and_of_each_call(net: FixedNet) -> None:
    times = net.measure(repeat=3)
    assert len(times.calls_ns) == len(net.steps) == 4
    assert min(times.total_ns, *times.calls_ns) > 0


def test_instances_share_weights_and_outlive_one_another(executable: Executable) -> None:
    first = FixedNet(executable, open_device(schedsearch.detect("cpu")))
    second = first.instance()
    first.close()
    first.close()
    with pytest.raises(UsageError, match="closed; load it again"):
        first(image())
    np.testing.assert_array_equal(second(image()), expected(image())["y"])
    second.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "missing x; the network takes x float32"),
        ((np.zeros((1, 8, 6, 6), np.float16),), "x has dtype float16, the kernel takes float32"),
        ((np.zeros((1, 6, 6, 8), np.float32),), r"x has shape \(1, 6, 6, 8\); allowed: shape \(1, 8, 6, 6\)"),
        ((np.zeros((1, 8, 6, 12), np.float32)[..., ::2],), "make it contiguous"),
        ((np.zeros((1, 8, 6, 6), np.float32),) * 2, "2 arrays by position; the network takes 1"),
        (("x",), "x is a str; allowed: a torch, CuPy or NumPy array"),
    ],
)
def test_wrong_inputs_are_refused(net: FixedNet, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        net(*arguments)


def test_unknown_names_and_wrong_outputs_are_refused(net: FixedNet) -> None:
    with pytest.raises(ArgumentError, match=r"unknown input 'X' \(did you mean 'x'\?\)"):
        net(X=image())
    x = image()
    with pytest.raises(ArgumentError, match=r"out\[0\] overlaps x"):
        net(x, out=x)
    with pytest.raises(ArgumentError, match="out holds 2 arrays; the network has 1 outputs"):
        net(x, out=(x, x))


def test_explain_names_every_call_its_kernel_and_its_layouts(net: FixedNet) -> None:
    text = net.explain()
    assert "4 kernel calls, 2 of them convert layouts" in text
    assert "x: NCHW to NHWC: layout_transform" in text
    assert "by conv2d_cpu (default)" in text
    assert "which is the least possible" in text


# ---- memory


def test_conversions_run_where_their_result_is_needed_and_once() -> None:
    found = schedule(NETWORK, first_plan(NETWORK))
    assert [call.name for call in found.calls] == ["x: NCHW to NHWC", "conv1", "conv2", "y: NHWC to NCHW"]


def test_a_residual_that_nobody_reads_later_is_updated_in_place() -> None:
    """conv2 reads t as its input as well, so it may not overwrite it; a copy of t for each argument may be."""
    assert not _shared(NETWORK, "t", "y")
    assert _shared(_apart(), "t", "y")


def test_a_residual_that_leaves_the_network_is_not_updated_in_place() -> None:
    assert not _shared(replace(_apart(), outputs=("y", "t")), "t", "y")


def _apart() -> Network:
    """The network with x as the input of conv2, so that t is its residual only."""
    first, second = NETWORK.nodes
    assert isinstance(second, Node)
    return replace(NETWORK, nodes=(first, replace(second, arguments={**second.arguments, "x": "x"})))


def _shared(network: Network, one: str, other: str) -> bool:
    found = schedule(network, first_plan(network))
    memory = {held.name: held.memory for held in found.arrays if held.layout == "NHWC"}
    return memory[one] is memory[other]


def test_a_view_and_an_output_that_is_an_input_cost_no_kernel() -> None:
    values = {"x": Value("x", "NCHW", (1, 8, 1, 1), "float32"), "flat": Value("flat", "AB", (1, 8), "float32")}
    network = Network(("x",), ("flat", "x"), values, {}, (View("reshape", ("reshape",), "x", "flat", (("NCHW", "AB"),)),))
    made = assemble(network, first_plan(network), lambda workload: pytest.fail("needs no kernel"), target="cpu:none")
    assert not made.program.calls
    with FixedNet(made, open_device(schedsearch.detect("cpu"))) as net:
        x = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
        flat, same = net(x)
        assert flat.tolist() == [list(range(8))]
        assert np.array_equal(same, x) and not np.shares_memory(same, x)


def _kernel(workload: schedsearch.Workload) -> ChosenKernel:
    """A kernel in two steps: the first packs weight and bias, and the second has scratch memory of its own."""
    packed, scratch = Pointer("packed"), Pointer("scratch")
    inputs = tuple(Pointer(spec.name) for spec in workload.signature if not spec.constant)
    constants = tuple(Pointer(spec.name) for spec in workload.signature if spec.constant)
    y = Pointer("y")
    steps = [Step("run", (*inputs, packed if constants else y, scratch, y), Grid(1), 1)]
    if constants:
        steps.insert(0, Step("pack", (*constants, packed), Grid(1), 1, constant=True))
    workspaces = {"scratch": 300} | ({"packed": 5000} if constants else {})
    return ChosenKernel(
        Artifact(workload.id.encode(), LaunchPlan("cpu", "x", tuple(steps), workspaces)), Origin("exact", "t", "{}")
    )


def test_constants_that_are_packed_at_load_do_not_stay_in_memory() -> None:
    program = assemble(NETWORK, first_plan(NETWORK), _kernel, target="cpu").program
    assert {program.arrays[index].place.space for index in program.constants} == {"once"}
    assert program.constant_bytes == 2 * 5120  # what the two convolutions packed
    spaces = [{name: place.space for name, place in call.workspaces.items()} for call in program.calls]
    assert spaces[1] == {"scratch": "arena", "packed": "constant"}
    assert program.arena_bytes == program.least_arena_bytes == 2 * 1280 + 512  # two values of 1152 bytes and the scratch


def test_constants_that_the_network_computes_are_packed_in_every_run() -> None:
    """A bias that is an input of the network: everything that the packing step reads has to stay."""
    values = {**NETWORK.values, "b1": Value("b1", "K", (8,), "float32")}
    constants = {name: each for name, each in NETWORK.constants.items() if name != "b1"}
    network = replace(NETWORK, inputs=("x", "b1"), values=values, constants=constants)
    program = assemble(network, first_plan(network), _kernel, target="cpu").program
    assert program.calls[1].workspaces["packed"].space == "arena"
    places = {program.arrays[index].name: program.arrays[index].place.space for index in program.constants}
    assert places == {"w1": "constant", "w2": "once", "b2": "once"}


def test_the_same_network_gives_the_same_program(executable: Executable) -> None:
    again = support.build(support.two_convolutions(), schedsearch.detect("cpu"))
    assert again.program.json == executable.program.json
    assert Program.from_json(again.program.json) == executable.program


# ---- files


def test_a_loaded_network_computes_the_same(path: Path, net: FixedNet) -> None:
    with load(path) as loaded:
        np.testing.assert_array_equal(loaded(image()), net(image()))
        assert loaded.inputs == net.inputs and str(loaded.outputs[0]) == "y float32 [1, 8, 6, 6]"


def test_the_same_executable_gives_the_same_bytes_from_memory_and_from_a_file(path: Path, tmp_path: Path) -> None:
    with load(path) as loaded:
        loaded.save(tmp_path / "again.ssx")
    assert (tmp_path / "again.ssx").read_bytes() == path.read_bytes()


def test_loading_and_running_import_no_compiler_and_no_framework(path: Path) -> None:
    program = (
        "import sys\n"
        "blocked = ('numba', 'onnx', 'onnxscript', 'torch', 'xgboost', 'sqlalchemy', 'schedsearch.templates')\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert not any(name == each or name.startswith(each + '.') for each in blocked), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import numpy as np, schedsearch\n"
        f"net = schedsearch.load({str(path)!r})\n"
        "print(float(net(np.ones((1, 8, 6, 6), np.float32)).sum()))\n"
        "print(*[name for name in sys.modules if name.startswith('schedsearch.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ones = np.ones((1, 8, 6, 6), np.float32)
    result, modules = done.stdout.splitlines()
    assert float(result) == expected(ones)["y"].sum()
    packages = {name.split(".")[1] for name in modules.split()}
    assert "executable" in packages and not packages & {
        "backend",
        "dynamic",
        "measurement",
        "network",
        "session",
    }
    assert "schedsearch.executable.sized" not in modules.split()


def test_a_file_that_another_machine_wrote_is_refused_until_it_is_trusted(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "another-machine"))
    with pytest.raises(UntrustedDatabaseError, match="if you trust its origin: schedsearch records trust"):
        load(path)
    assert trust.trust(path) == trust.Trusted(kernels=1, marked=1)
    load(path).close()
    assert trust.distrust(path) == 1
    with pytest.raises(UntrustedDatabaseError):
        load(path)


def _change(path: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(path)
    with connection:
        assert connection.execute(statement, values).rowcount > 0
    connection.close()


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        ("UPDATE executable SET program = replace(program, 'conv1', 'conv3')", UntrustedDatabaseError, "did not sign"),
        ("UPDATE code SET code = zeroblob(length(code))", DatabaseError, "checksum"),
        ("UPDATE weight SET data = zeroblob(length(data))", DatabaseError, "does not match its checksum"),
        ("DELETE FROM weight", DatabaseError, "part 0 is missing"),
        ("DELETE FROM code", DatabaseError, "table code, .*: it is missing"),
        ("UPDATE executable SET target = 'cuda:sm_90:132:NVIDIA H200'", DatabaseError, "its program is for 'cpu"),
        ("DELETE FROM executable", DatabaseError, "0 rows; it must have one"),
        ("UPDATE executable SET version = 8", SchemaVersionError, "knows up to 7; upgrade schedsearch"),
    ],
)
def test_a_file_that_was_changed_is_refused(path: Path, statement: str, kind: type[Exception], message: str) -> None:
    _change(path, statement)
    with pytest.raises(kind, match=message):
        load(path).close()


def test_a_file_for_another_device_is_refused_with_the_command_that_builds_it_here(
    executable: Executable, tmp_path: Path
) -> None:
    other = replace(executable, program=replace(executable.program, target=PRESETS["h200"].key))
    save(other, tmp_path / "h200.ssx")
    with pytest.raises(DeviceError, match=r"is for cuda:sm_90:132:NVIDIA H200.*schedsearch build small\.onnx -o h200"):
        load(tmp_path / "h200.ssx", target="cpu")


def test_files_that_are_no_executable_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"no executable at .*schedsearch build MODEL\.onnx -o"):
        load(tmp_path / "missing.ssx")
    with pytest.raises(DatabaseError, match=rf"is a folder; give a file in it, e\.g\. {tmp_path}/model\.ssx"):
        load(tmp_path)
    (tmp_path / "text.ssx").write_text("weights" * 100)
    with pytest.raises(DatabaseError, match="not a database"):
        load(tmp_path / "text.ssx")
    (tmp_path / "short.ssx").write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DatabaseError, match=r"truncated.*build it again: schedsearch build MODEL\.onnx"):
        load(tmp_path / "short.ssx")
    sqlite3.connect(tmp_path / "other.ssx").execute("CREATE TABLE a (b)").connection.close()
    with pytest.raises(DatabaseError, match="not an executable of schedsearch"):
        load(tmp_path / "other.ssx")
    with pytest.raises(UsageError, match=r"path is of type int; give the path of a model\.ssx"):
        load(5)  # type: ignore[arg-type]


def test_saving_replaces_executables_only(executable: Executable, path: Path, tmp_path: Path) -> None:
    save(executable, path)
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(UsageError, match="exists and is not an executable"):
        save(executable, tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "keep"


# ---- kernels


def test_kernels_that_must_be_built_are_compiled_ahead_in_parallel(tmp_path: Path) -> None:
    workloads = [schedsearch.layout_transform(n=1, c=c, h=2, w=2, layout="NCHW", to="NHWC", dtype="float32") for c in (2, 3)]
    with schedsearch.KernelCache(tmp_path / "no.db", "cpu") as kernels:
        assert kernels.build_ahead(workloads) == 2
        assert kernels.build_ahead([]) == 0
        x = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2)
        np.testing.assert_array_equal(kernels.kernel(workloads[0])(x), x.transpose(0, 2, 3, 1))
        assert kernels.build_ahead(workloads[:1]) == 0  # it is there already
