"""`schedsearch build` and `run`: from an ONNX file to an executable, on a CPU with default kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import network_support as support
import numpy as np
import pytest
from cli_support import schedsearch as command

import schedsearch
from schedsearch.cli.run import read_inputs
from schedsearch.errors import ArgumentError, DatabaseError, NoRecordError, UsageError
from schedsearch.executable.compare import layer_errors
from schedsearch.executable.ports import Port

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from test_network import Net as Model  # noqa: E402


def save(folder: Path) -> Path:
    """relu(conv(x) + x) twice, the layers of `support.two_convolutions`."""
    model = Model(1, 8, 6, 6)
    x = "x"
    for number in "12":
        convolution = model.conv(x, 8, 8, name=f"conv{number}", bias=True)
        x = model.node("Relu", model.node("Add", convolution, x, name=f"add{number}"), name=f"relu{number}")
    return model.save(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with net.onnx and the net.ssx that `schedsearch build` makes of it."""
    folder = tmp_path_factory.mktemp("net")
    model = save(folder)
    done = command("build", model, "--target", "cpu", "-o", folder / "net.ssx", "--db", folder / "none.db", "--explain")
    assert done.exit_code == 0, done.stderr
    assert "4 kernel calls, 2 of them convert layouts" in done.stdout
    assert "4 of 4 kernels have no record and use their default configuration; to measure: --tune 10m" in done.stderr
    assert "takes x float32 [1, 8, 6, 6]" in done.stdout
    return folder


def test_a_built_model_computes_what_onnx_computes(folder: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    x = np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(onnx.load(folder / "net.onnx")).run(None, {"x": x})
    with schedsearch.load(folder / "net.ssx") as net:
        np.testing.assert_allclose(net(x), wanted, rtol=1e-5, atol=1e-4)


def channels_last(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same numbers as an NHWC array."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1))


def test_a_caller_with_images_in_nhwc_needs_no_conversions(tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    model = save(tmp_path)
    x = np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(onnx.load(model)).run(None, {"x": x})
    done = command(
        "build", model, "--target", "cpu", "--layout", "NHWC", "--io-layout", "NHWC", "--db", tmp_path / "none.db", "-o",
        tmp_path / "net.ssx",
    )  # fmt: skip
    assert "net.ssx: 2 kernel calls" in done.stdout and "takes x float32 [1, 6, 6, 8] NHWC" in done.stdout
    with schedsearch.load(tmp_path / "net.ssx") as net:
        assert not any(call.is_conversion for call in net.steps)
        (port,) = net.outputs
        assert (port.shape, port.layout) == ((1, 6, 6, 8), "NHWC")
        y = net(channels_last(x))
        np.testing.assert_allclose(y, channels_last(wanted), rtol=1e-5, atol=1e-4)
        with pytest.raises(ArgumentError, match="make it contiguous in channels_last"):
            net(x)
    np.save(tmp_path / "x.npy", channels_last(x))
    done = command(
        "run", tmp_path / "net.ssx", "--input", tmp_path / "x.npy", "--compare", "onnx", "--repeat", "0", "--json"
    )
    errors = {each["value"]: each["relative"] for each in json.loads(done.stdout)["errors"]}
    assert set(errors) == {"relu1.out", "relu2.out"} and max(errors.values()) < 1e-5


def test_an_image_in_nhwc_may_come_in_the_models_order_with_strides_of_channels_last(tmp_path: Path) -> None:
    network = support.two_convolutions().with_io_layout("NHWC")
    x = np.random.default_rng(0).integers(-2, 3, (1, 8, 6, 6)).astype(np.float32)
    wanted = support.truth(network, {"x": x})["y"]
    with schedsearch.build(network, db=tmp_path / "none.db", target="cpu") as net:
        y = net(channels_last(x).transpose(0, 3, 1, 2))
        assert y.shape == (1, 8, 6, 6) and channels_last(y).strides == y.transpose(0, 2, 3, 1).strides
        np.testing.assert_array_equal(y, wanted)
        np.testing.assert_array_equal(net(channels_last(x)), channels_last(wanted))


@pytest.mark.long(of="networks")
def test_an_output_keeps_its_shape_where_a_kernel_made_another_layout_of_the_same_bytes(tmp_path: Path) -> None:
    model = Model(1, 8, 6, 6)
    model.conv("x", 1, 8, name="only")
    path = model.save(tmp_path)
    x = np.ones((1, 8, 6, 6), np.float32)
    for io_layout, shape in (("NCHW", (1, 1, 6, 6)), ("NHWC", (1, 6, 6, 1))):
        with schedsearch.build(path, db=tmp_path / "none.db", target="cpu", io_layout=io_layout) as net:
            assert net.outputs[0].shape == net(channels_last(x) if io_layout == "NHWC" else x).shape == shape
            assert sum(call.is_conversion for call in net.steps) <= 1


@pytest.mark.long(of="networks")
def test_convolutions_write_into_slices_of_what_they_are_concatenated_to(tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    model = Model(2, 16, 5, 6)
    model.node("Concat", *(model.conv("x", 32, 16, 1, name=name, bias=True) for name in "abc"), axis=1, name="all")
    path = model.save(tmp_path)
    x = np.random.default_rng(0).standard_normal((2, 16, 5, 6)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})
    with schedsearch.build(path, db=tmp_path / "none.db", target="cpu", layout="NCHW") as net:
        assert [call.sources for call in net.program.calls] == [("a",), ("b",), ("c", "all")]
        kept = [net(x) for _ in range(2)]  # the second call writes to other memory
        for y in kept:
            np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4)


def test_run_prints_times_and_the_error_of_every_layer(folder: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype(np.float32)
    np.save(folder / "x.npy", x)
    done = command(
        "run", folder / "net.ssx", "--input", folder / "x.npy", "--output", folder / "y.npy", "--compare", "onnx",
        "--repeat", "2",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "relu1.out" in done.stdout and "largest relative error" in done.stdout and "as a whole" in done.stdout
    with schedsearch.load(folder / "net.ssx") as net:
        np.testing.assert_array_equal(np.load(folder / "y.npy"), net(x))


def test_run_as_json_has_a_time_and_an_error_of_each_call(folder: Path) -> None:
    done = command("run", folder / "net.ssx", "--compare", folder / "net.onnx", "--repeat", "2", "--json")
    found = json.loads(done.stdout)
    assert [call["name"] for call in found["calls"]] == ["x: NCHW to NHWC", "conv1", "conv2", "relu2.out: NHWC to NCHW"]
    assert all(call["time_ns"] > 0 for call in found["calls"])
    assert {each["value"] for each in found["errors"]} == {"relu1.out", "relu2.out"}
    assert all(each["relative"] < 1e-5 for each in found["errors"])


def test_run_shows_the_time_of_onnx_runtime_beside_its_own(folder: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = folder / "net.ssx"
    peer = json.loads(command("run", path, "--compare", "onnx", "--repeat", "2", "--json").stdout)["peer"]
    assert peer["name"] == f"ONNX Runtime {onnxruntime.__version__} on the CPU" and peer["time_ns"] > 0
    assert re.search(r"ONNX Runtime .* needs .*s: .* times ours", command("run", path, "--compare", "onnx").stdout)
    assert json.loads(command("run", path, "--repeat", "2", "--json").stdout)["peer"] is None  # nobody asked


def test_a_number_without_axes_is_compared(tmp_path: Path) -> None:
    model = Model(1, 1, 6, 6)
    model.node("Relu", model.node("Squeeze", model.node("GlobalAveragePool", "x")), name="number")
    path, x = model.save(tmp_path), np.ones((1, 1, 6, 6), np.float32)
    with schedsearch.build(path, db=tmp_path / "none.db", target="cpu") as net:
        errors = {each.value: each.largest for each in layer_errors(net, path, {"x": x})}
    assert errors["number.out"] == 0


def test_the_same_nan_and_infinity_are_no_difference(tmp_path: Path) -> None:
    """Square roots and logarithms of 0 and -1, and of 4."""
    model = Model(1, 1, 1, 3)
    model.node("Mul", model.node("Sqrt", "x"), model.node("Log", "x"), name="product")
    path, x = model.save(tmp_path), np.array([0, -1, 4], np.float32).reshape(1, 1, 1, 3)
    with schedsearch.build(path, db=tmp_path / "none.db", target="cpu") as net:
        found = {each.value: each for each in layer_errors(net, path, {"x": x})}
    assert found["product.out"].largest < 1e-5 and found["product.out"].relative < 1e-5


def test_run_refuses_inputs_of_another_kind(folder: Path) -> None:
    np.save(folder / "complex.npy", np.zeros((1, 8, 6, 6), np.complex64))
    done = command("run", folder / "net.ssx", "--input", folder / "complex.npy")
    assert (
        done.exit_code == 2
        and "complex.npy has numbers of complex64, but x is float32; allowed: real numbers" in done.stderr
    )
    np.save(folder / "wide.npy", np.ones((1, 8, 6, 6)))
    assert command("run", folder / "net.ssx", "--input", folder / "wide.npy", "--repeat", "1").exit_code == 0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (np.array([0.5, 2]), "idx.npy has numbers of float64, but idx is int32; allowed: whole numbers"),
        (
            np.array([0, 2**31]),
            "idx.npy has numbers from 0 to 2147483648, but idx is int32; allowed: -2147483648 to 2147483647",
        ),
    ],
    ids=["halves", "too large"],
)
def test_whole_numbers_are_not_rounded_or_cut(tmp_path: Path, monkeypatch: Any, numbers: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("idx.npy", numbers)
    port = Port("idx", (2,), "int32", "A", "A")
    with pytest.raises(UsageError, match=re.escape(message)):
        read_inputs([port], ("idx.npy",))


def test_run_names_what_is_wrong_with_inputs_and_models(folder: Path) -> None:
    np.save(folder / "wrong.npy", np.zeros((1, 8, 5, 5), np.float32))
    (folder / "text.npy").write_text("no array")
    other = Model(1, 8, 6, 6)
    other.node("Relu", "x")
    other.save(folder / "..").rename(folder / "other.onnx")
    smaller = Model(1, 8, 5, 5)
    smaller.node("Relu", "x")
    smaller.save(folder / "..").rename(folder / "smaller.onnx")
    for arguments, message in (
        (("--input", folder / "wrong.npy"), "x has shape (1, 8, 5, 5); allowed: shape (1, 8, 6, 6) (NCHW)"),
        (("--input", folder / "text.npy"), "cannot be read as an array; allowed: numbers in NumPy's format, complete"),
        (("--input", folder / "missing.npy"), "missing.npy is not a file"),
        (("--input", f"z={folder / 'text.npy'}"), "the network has no input 'z'; it takes x float32"),
        (("--compare", folder / "missing.onnx"), "missing.onnx is not a file"),
        (("--compare", folder / "text.npy"), "is not an ONNX model"),
        (("--compare", folder / "smaller.onnx"), "x is [1, 8, 6, 6] in the network and [1, 8, 5, 5] in"),
        (("--compare", folder / "other.onnx"), "has none of the network's values"),
    ):
        done = command("run", folder / "net.ssx", "--repeat", "0", *arguments)
        assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_a_model_is_not_run_before_it_is_built(folder: Path) -> None:
    done = command("run", folder / "net.onnx")
    assert done.exit_code == 2 and "net.onnx is an ONNX model" in done.stderr and "schedsearch build" in done.stderr


@pytest.mark.long(of="networks")
def test_a_cpu_moves_depth_to_space_after_the_convolution(tmp_path: Path) -> None:
    model = Model(1, 8, 6, 6)
    model.node("DepthToSpace", model.conv("x", 8, 8, name="conv"), blocksize=2, mode="CRD")
    path = model.save(tmp_path)
    x = np.random.default_rng(3).standard_normal((1, 8, 6, 6)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})
    with schedsearch.build(path, db=tmp_path / "none.db", target="cpu") as net:
        np.testing.assert_allclose(net(x), wanted, rtol=1e-4, atol=1e-4)
        assert any(call.label.startswith("depth_to_space") for call in net.steps)


def test_strict_names_every_kernel_without_a_record(folder: Path) -> None:
    from schedsearch.records.store import Store

    with Store.open(folder / "empty.db"):
        pass
    done = command(
        "build", folder / "net.onnx", "--target", "cpu", "--db", folder / "empty.db", "--strict", "-o", folder / "no.ssx"
    )
    assert done.exit_code == NoRecordError.exit_code == 4
    assert "no record on" in done.stderr and "for 3 kernels: conv2d" in done.stderr
    assert not (folder / "no.ssx").exists()
    done = command("build", folder / "net.onnx", "--target", "cpu", "--db", folder / "none.db", "--strict")
    assert done.stderr.startswith("schedsearch: there is no database"), done.stderr


def test_a_network_can_be_built_without_a_file() -> None:
    network = support.two_convolutions()
    x = np.ones((1, 8, 6, 6), np.float32)
    with schedsearch.build(network, db="none.db", target="cpu") as net:
        np.testing.assert_array_equal(net(x), support.truth(network, {"x": x})["y"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model is an int; allowed: the path of an ONNX file"),
        ({"model": "net.onnx", "layout": "NC"}, "layout 'NC' is not possible; allowed: auto, NHWC, NCHW"),
        ({"model": "net.onnx", "io_layout": "CHWN"}, "io_layout 'CHWN' is not possible; allowed: NCHW, NHWC"),
        ({"model": support.two_convolutions(), "io_layout": "NHWC"}, r"use network.with_io_layout"),
        ({"model": "net.onnx", "weights": "outside"}, "weights 'outside' is not possible; allowed: inside, reference"),
        ({"model": "net.onnx", "weights": "reference"}, "weights='reference' needs an ONNX file for `model`, and `out`"),
        (
            {"model": support.two_convolutions(), "weights": "reference", "out": "no.ssx"},
            "weights='reference' needs an ONNX file for `model`, and `out`",
        ),
        ({"model": "net.onnx", "dtype": "int8"}, "dtype 'int8' is not possible; allowed: float16, bfloat16, float32"),
        ({"model": "net.onnx", "mode": "warm"}, "mode 'warm' is not possible; allowed: cold-graph-v1"),
        ({"model": "net.onnx", "tune_s": "5m"}, "tune_s is '5m'; allowed: a number of seconds above 0, or None"),
        ({"model": "net.onnx", "tune_s": 0}, "tune_s is 0; allowed: a number of seconds above 0, or None"),
        ({"model": "net.onnx", "tune_s": float("nan")}, "tune_s is nan; allowed: a number of seconds above 0, or None"),
        ({"model": "missing.onnx"}, "missing.onnx is not a file"),
        ({"model": "net.onnx", "example": 1}, "example is for a torch module"),
        ({"model": support.two_convolutions(), "dtype": "float16"}, "a Network has its dtypes, shapes and subgraphs"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedsearch.build(**arguments, target="cpu")


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"the folder .*nowhere does not exist"):
        schedsearch.build("net.onnx", out=tmp_path / "nowhere" / "net.ssx", target="cpu")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt exists and is not an executable"):
        schedsearch.build("net.onnx", out=tmp_path / "notes.txt", target="cpu")


def test_one_kernel_without_a_record_is_said_in_the_singular(tmp_path: Path) -> None:
    model = Model(1, 8, 4, 4)
    model.node("Relu", "x", name="relu")
    options = ("--target", "cpu", "-o", tmp_path / "net.ssx", "--db", tmp_path / "none.db")
    said = command("build", model.save(tmp_path), *options).stderr
    assert "1 of 1 kernel has no record and uses its default configuration; to measure: --tune 10m" in said


def test_an_input_of_text_is_named(tmp_path: Path) -> None:
    info = onnx.helper.make_tensor_value_info
    nodes = [onnx.helper.make_node("Identity", ["words"], ["same"]), onnx.helper.make_node("Relu", ["x"], ["y"])]
    inputs = [info("words", onnx.TensorProto.STRING, [3]), info("x", onnx.TensorProto.FLOAT, [2])]
    outputs = [info("same", onnx.TensorProto.STRING, [3]), info("y", onnx.TensorProto.FLOAT, [2])]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "net", inputs, outputs)), tmp_path / "text.onnx")
    result = command("build", tmp_path / "text.onnx", "--target", "cpu", "--db", tmp_path / "none.db")
    assert result.exit_code == 2
    assert "'words', an input or output of the model, is string; allowed: float16" in result.stderr


def test_names_of_a_model_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    info = onnx.helper.make_tensor_value_info
    name = "x\n\x1b[31m"
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [name], ["y"])],
        "net",
        [info(name, onnx.TensorProto.FLOAT, [2])],
        [info("y", onnx.TensorProto.FLOAT, [2])],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "net.onnx")
    options = ("--target", "cpu", "-o", tmp_path / "net.ssx", "--db", tmp_path / "none.db")
    done = command("build", tmp_path / "net.onnx", *options)
    assert done.exit_code == 0 and "\x1b" not in done.output
    assert r"takes x\n\x1b[31m float32 [2]" in done.stdout
