"""Weights that stay in the model's file (`build --weights reference`): the same results, and plain refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import schedsearch as command

import schedsearch
from schedsearch.errors import DatabaseError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import onnx_ir  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402

from schedsearch.executable.program import Array as Held  # noqa: E402
from schedsearch.executable.program import Place, Program, Reference  # noqa: E402
from schedsearch.executable.references import find, packed, read  # noqa: E402
from schedsearch.network.graph import Constant  # noqa: E402

Array = np.ndarray[Any, np.dtype[Any]]


def network() -> Net:
    """A convolution, and one with a batch norm that is folded into its filters."""
    net = Net(1, 8, 6, 6)
    net.batch_norm(net.conv(net.conv("x", 8, 8, name="plain"), 8, 8, name="normed"), 8)
    return net


def image() -> Array:
    return np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype(np.float32)


def build(folder: Path, model: Path, weights: str = "reference") -> Path:
    path = folder / f"{weights}.ssx"
    with schedsearch.build(model, db=folder / "no.db", target="cpu", layout="NCHW", out=path, weights=weights) as net:
        assert len(net.program.weights) == 4
    return path


def program(path: Path) -> Program:
    with schedsearch.load(path) as net:
        return net.program


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with net.onnx, inside.ssx and reference.ssx."""
    folder = tmp_path_factory.mktemp("built")
    model = network().save(folder)
    build(folder, model, "inside")
    done = command(
        "build", model, "--target", "cpu", "--layout", "NCHW", "--db", folder / "no.db", "-o", folder / "reference.ssx",
        "--weights", "reference",
    )  # fmt: skip
    # Two weights of 8 x 8 x 3 x 3 and two biases, float32.
    assert f"1 of 4 weights (2,304 of 4,672 bytes) stay in {model}" in done.stderr, done.stderr
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of the same folder at another place: its executable does not know where it was made."""
    return Path(shutil.copytree(built, tmp_path / "copy"))


def test_what_the_model_has_as_it_is_stays_there_and_the_results_are_the_same(folder: Path) -> None:
    (wanted,) = ReferenceEvaluator(onnx.load(folder / "net.onnx")).run(None, {"x": image()})
    with schedsearch.load(folder / "reference.ssx") as net, schedsearch.load(folder / "inside.ssx") as other:
        np.testing.assert_array_equal(net(image()), other(image()))
        np.testing.assert_allclose(net(image()), wanted, rtol=1e-4, atol=1e-4)


def test_a_reference_names_the_bytes_of_an_initializer(folder: Path) -> None:
    held = program(folder / "reference.ssx")
    names = {sha256: held.arrays[index].name for index, sha256 in zip(held.constants, held.weights)}
    stored = {each.name: each.raw_data for each in onnx.load(folder / "net.onnx").graph.initializer}
    content = (folder / "net.onnx").read_bytes()
    assert {names[sha256] for sha256 in held.references} == {"plain.weight"}
    for sha256, each in held.references.items():
        data = stored[names[sha256]]
        assert each.path == "net.onnx" and content[each.offset : each.offset + len(data)] == data


def test_loading_needs_no_onnx(folder: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('onnx', 'onnx_ir', 'onnxscript', 'google.protobuf'), None))\n"
        "import numpy as np, schedsearch\n"
        f"print(schedsearch.load({str(folder / 'reference.ssx')!r})(np.ones((1, 8, 6, 6), np.float32)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(1, 8, 6, 6)", done.stderr


def test_external_data_is_read_where_it_lies(built: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    onnx.save(
        network().model(), tmp_path / "net.onnx", save_as_external_data=True, location="weights/all.bin", size_threshold=0
    )
    path = build(tmp_path, tmp_path / "net.onnx")
    assert [each.path for each in program(path).references.values()] == ["weights/all.bin"]
    (tmp_path / "net.onnx").unlink()  # it holds no weights
    with schedsearch.load(path) as net, schedsearch.load(built / "inside.ssx") as other:
        np.testing.assert_array_equal(net(image()), other(image()))


@pytest.mark.parametrize("change", ["missing", "changed", "truncated", "a folder"])
def test_a_model_that_is_missing_or_another_is_refused(folder: Path, change: str) -> None:
    model = folder / "net.onnx"
    content = bytearray(model.read_bytes())
    if change == "changed":
        (reference,) = program(folder / "reference.ssx").references.values()
        content[reference.offset + 100] ^= 1
        model.write_bytes(content)
        message = "net.onnx, which was changed: 'plain.weight' is not there any more; restore it there, or build again"
    elif change == "truncated":
        model.write_bytes(content[:2000])
        message = "net.onnx, which was changed"
    else:
        model.unlink()
        message = "net.onnx, which does not exist; restore it there, or build again"
        if change == "a folder":
            model.mkdir()
            message = "net.onnx, which cannot be read"
    with pytest.raises(DatabaseError) as caught:
        schedsearch.load(folder / "reference.ssx")
    assert message in str(caught.value) and "reference.ssx" in str(caught.value)
    done = command("run", folder / "reference.ssx", "--repeat", "0")
    assert done.exit_code == DatabaseError.exit_code and message in done.stderr


def test_saving_a_loaded_network_puts_its_weights_inside(folder: Path) -> None:
    with schedsearch.load(folder / "reference.ssx") as net:
        net.save(folder / "saved.ssx")
    (folder / "net.onnx").unlink()
    assert program(folder / "saved.ssx") == program(folder / "inside.ssx")


def test_a_program_of_a_file_without_references_is_read(folder: Path) -> None:
    held = program(folder / "inside.ssx")
    older = json.loads(held.json)
    assert older.pop("references") == {}
    assert Program.from_json(json.dumps(older)) == held


@pytest.mark.parametrize(("stored", "wanted"), [
    ("float32", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("int8", "int8"),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["OIHW", "OHWI", "OHWI4i"])
def test_weights_of_every_format_are_packed_from_the_file_as_they_were_built(
    tmp_path: Path, stored: str, wanted: str, layout: str
) -> None:
    kinds = {"bfloat16": "BFLOAT16", "float16": "FLOAT16", "float32": "FLOAT", "int8": "INT8"}
    numbers = np.random.default_rng(3).integers(-100, 100, (16, 10, 3, 3))
    tensor = onnx.helper.make_tensor("w", getattr(onnx.TensorProto, kinds[stored]), numbers.shape, numbers.ravel() / 1)
    raw = onnx_ir.serde.serialize_tensor(onnx_ir.tensor(onnx_ir.serde.deserialize_tensor(tensor).numpy(), name="w"))
    graph = onnx.helper.make_graph([], "net", [], [], [raw])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "net.onnx")
    constant = Constant("w", "OIHW", numbers.astype("float32" if stored == "bfloat16" else stored))
    extents = schedsearch.ops.Layout.parse(layout).shape(dict(zip("OIHW", numbers.shape)))
    held = Held("w", layout, "OIHW", numbers.shape, wanted, extents, Place("constant"))
    data = packed(constant.array, "OIHW", layout, wanted)
    sha256 = schedsearch.identity.sha256_hex(data)
    made = Program("cpu", "net.onnx", (held,), (), (), (0,), (), (), 0, 0, 0, weights=(sha256,))
    found = find(made, {"w": constant}, tmp_path / "net.onnx", tmp_path)
    assert found[sha256].dtype == stored and found[sha256].path == "net.onnx"
    assert read(found[sha256], held, sha256, tmp_path / "net.ssx") == data


def test_an_offset_behind_the_end_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(bytes(100))
    held = Held("w", "AB", "AB", (4, 4), "float32", (4, 4), Place("constant"))
    for offset in (90, 100, 5000):
        with pytest.raises(DatabaseError, match="was changed: 'w' is not there any more"):
            read(Reference("net.onnx", offset, "AB", "float32"), held, "0" * 64, tmp_path / "net.ssx")


def test_a_transposed_array_is_found_as_the_file_has_it(tmp_path: Path) -> None:
    matrix = np.random.default_rng(4).standard_normal((32, 20)).astype(np.float32)
    graph = onnx.helper.make_graph([], "net", [], [], [onnx.numpy_helper.from_array(matrix, "w")])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "net.onnx")
    held = Held("w", "KN", "KN", (20, 32), "float32", (20, 32), Place("constant"))
    sha256 = schedsearch.identity.sha256_hex(np.ascontiguousarray(matrix.T).tobytes())
    made = Program("cpu", "net.onnx", (held,), (), (), (0,), (), (), 0, 0, 0, weights=(sha256,))
    found = find(made, {"w": Constant("w", "KN", matrix.T)}, tmp_path / "net.onnx", tmp_path / "elsewhere")
    assert (found[sha256].axes, found[sha256].path) == ("NK", "../net.onnx")
    assert read(found[sha256], held, sha256, tmp_path / "elsewhere" / "net.ssx") == matrix.T.tobytes()
