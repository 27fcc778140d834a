"""ONNX models that are not valid are refused with one message, and valid ones are taken, however odd they look."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import invalid_models as models
import odd_models
import onnx.inliner
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from schedsearch.cli.main import main
from schedsearch.dynamic.model import read_graph
from schedsearch.network.calls import check_calls
from schedsearch.network.evaluate import evaluate
from schedsearch.network.lower import lower
from schedsearch.network.model import ModelError, read_model

X = np.linspace(-1, 2, 8, dtype=np.float32)[None]
HAVE_NO_KERNEL = ("bodies that use one name", "a body that hides a name")


def saved(model: Any, folder: Path) -> Path:
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("name", models.INVALID)
def test_an_invalid_model_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    model, message = models.INVALID[name]
    path = saved(model, tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        read_model(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=message):
        read_graph(model)


@pytest.mark.integrations
@pytest.mark.parametrize("name", sorted({*models.INVALID} - models.NOT_REFUSED_BY_ONNX_RUNTIME))
def test_onnx_runtime_refuses_it_too(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "itself" in name or "one another" in name:
        pytest.skip("functions without an end are not for other software")
    model, _ = models.INVALID[name]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match=r"ONNXRuntimeError|onnxruntime|No graph"):
        onnxruntime.InferenceSession(str(saved(model, tmp_path)), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", odd_models.ODD)
def test_an_odd_but_valid_model_computes_what_it_says(name: str, tmp_path: Path) -> None:
    model = read_model(saved(odd_models.ODD[name], tmp_path))
    if name in HAVE_NO_KERNEL:
        return
    (wanted,) = ReferenceEvaluator(plain(odd_models.ODD[name])).run(None, {"x": X})
    network = lower(model)
    found = evaluate(network, {"x": X})[network.outputs[0]]
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-6)


def plain(model: Any) -> Any:
    """onnx's evaluator wants nodes in order, one name for ONNX's domain, and no functions in functions."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for each in (*copy.opset_import, *copy.graph.node):
        each.domain = each.domain.replace("ai.onnx", "")
    if copy.graph.node[0].input[0] == "t":
        nodes = list(copy.graph.node)[::-1]
        del copy.graph.node[:]
        copy.graph.node.extend(nodes)
    return onnx.inliner.inline_local_functions(copy)


# --- Files --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words", [["extract"], ["build", "--target", "cpu"], ["build", "--target", "cpu", "--dynamic", "n=1..4"]], ids=" ".join
)
@pytest.mark.parametrize("content", [b"", b"tasks: []\n", b"\x08", b"\x00" * 64, b"\x12\xff\xff\xff\xff\x0f", None])
def test_a_file_that_is_not_a_model_is_one_message(words: list[str], content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    result = CliRunner().invoke(main, [words[0], str(path), *words[1:], "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "net.onnx" in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_name_of_an_operator_that_is_not_utf8_is_one_message(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString().replace(b"Relu", b"R\xd0lu"))
    with pytest.raises(ModelError, match=r"net\.onnx: .*is not UTF-8 text; the file is damaged"):
        read_model(tmp_path / "net.onnx")


def test_every_shorter_file_is_read_or_refused(tmp_path: Path) -> None:
    data = models.branch(models.body([models.node("Relu", ["x"], ["t"])], "t")).SerializeToString()
    path = tmp_path / "net.onnx"
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError):
            read_model(path)


# --- External data ------------------------------------------------------------------------------------------------------
def outside(location: str, dims: tuple[int, ...] = (8,), **entries: Any) -> Any:
    made = models.tensor(dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        made.external_data.add(key=key, value=str(value))
    return made


PLACES = {
    "../secret.bin": "outside of the model's folder",
    "/etc/hostname": "outside of the model's folder",
    "link.bin": "outside of the model's folder",
    "nothing.bin": "which does not exist",
    "folder": "which is not a regular file",
    "pipe": "which is not a regular file",
    "": "which is not a name of a file",
    "w.bin\0x": "which is not a name of a file",
    "x" * 300: "which cannot be read",
}
LENGTHS: dict[str, tuple[dict[str, Any], str]] = {
    "too short": ({"length": 16}, "needs 32 bytes, but its external data has a length of 16"),
    "too long": ({"length": 64}, "needs 32 bytes, but its external data has a length of 64"),
    "beyond the end": ({"offset": 48, "length": 32}, "needs 80 bytes of 'w.bin', which has 64 bytes"),
    "a negative offset": ({"offset": -4, "length": 32}, "the offset '-4'; allowed: a number of bytes"),
    "a length in words": ({"length": "all"}, "the length 'all'; allowed: a number of bytes"),
    "four tebibytes": ({"dims": (1 << 40,)}, "needs 4,398,046,511,104 bytes of 'w.bin', which has 64 bytes"),
}
RAW = np.arange(8, dtype=np.float32)


def folder_with_weights(folder: Path) -> Path:
    inside = folder / "models"
    (inside / "folder").mkdir(parents=True)
    (inside / "w.bin").write_bytes(np.concatenate([RAW, RAW + 1]).tobytes())
    (folder / "secret.bin").write_bytes(b"1" * 64)
    (inside / "link.bin").symlink_to(folder / "secret.bin")
    os.mkfifo(inside / "pipe")
    return inside


def holders(weight: Any) -> dict[str, Any]:
    """Models that hold a tensor in each of the places where there can be one."""
    made, add = models.constant(value=weight), models.node("Add", ["x", "w"], ["t"])
    of_function = models.function("F", [made, models.node("Add", ["a", "w"], ["r"])])
    return {
        "a weight": models.added(weight),
        "a constant": models.model([made, models.node("Add", ["x", "w"], ["y"])]),
        "a constant in a body": models.branch(models.body([made, add], "t")),
        "a weight in a body": models.branch(models.body([add], "t", [weight])),
        "a constant in a function": models.model([models.call("F")], functions=[of_function]),
    }


@pytest.mark.parametrize("holder", holders(outside("w.bin")))
@pytest.mark.parametrize(
    ("options", "message"),
    [*(({"location": place}, message) for place, message in PLACES.items()), *LENGTHS.values()],
    ids=[*(repr(place)[:20] for place in PLACES), *LENGTHS],
)
def test_external_data_is_a_regular_file_in_the_folder_of_the_model(
    holder: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = folder_with_weights(tmp_path)
    weight = outside(**{"location": "w.bin", **options})
    with pytest.raises(ModelError, match=re.escape(message)):
        read_model(saved(holders(weight)[holder], folder))


@pytest.mark.parametrize("holder", ["a weight", "a constant", "a constant in a function"])
@pytest.mark.parametrize(("entries", "plus"), [({}, 0), ({"length": 32}, 0), ({"offset": 32, "length": 32}, 1)])
def test_external_data_is_read_wherever_a_model_holds_it(
    holder: str, entries: dict[str, int], plus: int, tmp_path: Path
) -> None:
    path = saved(holders(outside("w.bin", **entries))[holder], folder_with_weights(tmp_path))
    network = lower(read_model(path))
    np.testing.assert_array_equal(evaluate(network, {"x": X})[network.outputs[0]], X + (RAW + plus))


def test_a_model_in_memory_has_no_folder_for_external_data() -> None:
    with pytest.raises(ModelError, match="a model that has no folder; give the path of the file"):
        read_graph(models.added(outside("w.bin")))


def test_small_weights_in_external_data_decide_shapes(tmp_path: Path) -> None:
    """ONNX Runtime 1.32 refuses pads there."""
    arrays = [models.array(np.array([0, 1, 0, 2]), "pads")]
    model = models.model([models.node("Pad", ["x", "pads"], ["y"])], arrays)
    onnx.save(model, tmp_path / "net.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    network = lower(read_model(tmp_path / "net.onnx"))
    np.testing.assert_array_equal(evaluate(network, {"x": X})["y"], np.pad(X, [(0, 0), (1, 2)]))


def test_a_result_of_maps_is_named(tmp_path: Path) -> None:
    """As skl2onnx writes a classifier by default."""
    nodes = [models.node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=list(range(8)))]
    model = models.model(nodes)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    model.graph.output[0].CopyFrom(helper.make_value_info("y", helper.make_sequence_type_proto(kind)))
    with pytest.raises(ModelError, match=r"net.onnx: 'y', which ZipMap makes, holds maps; allowed: arrays\. .*zipmap"):
        read_model(saved(model, tmp_path))


# --- Functions ----------------------------------------------------------------------------------------------------------
def test_inlining_functions_has_a_budget(tmp_path: Path) -> None:
    """Of depth d they become 2 to the power of d nodes: the last one has two of its own."""
    check_calls(models.nested(5), "net", most_nodes=32)
    with pytest.raises(ModelError, match=r"net: its functions would become 32 nodes .*; allowed: 31 nodes"):
        check_calls(models.nested(5), "net", most_nodes=31)
    with pytest.raises(ModelError, match="would become 1,048,576 nodes"):
        check_calls(models.nested(20), "net")


def test_the_bytes_that_inlining_makes_have_a_limit() -> None:
    add = [models.constant(value=models.array(np.ones(1000, np.float32))), models.node("Add", ["a", "w"], ["r"])]
    twice = [models.call("F", ["x"], ["t"]), models.call("F", ["t"], ["y"])]
    model = models.model(twice, functions=[models.function("F", add)])
    check_calls(model, "net", most_bytes=9000)
    with pytest.raises(ModelError, match="allowed: 100,000 nodes with 7,000 bytes"):
        check_calls(model, "net", most_bytes=7000)


@pytest.mark.parametrize("op", ["Neg", "LeakyRelu"])
def test_a_function_may_be_for_another_opset_if_its_operators_are_the_same(op: str, tmp_path: Path) -> None:
    """Neg of opset 15 is that of 17; LeakyRelu is another one since 16, and what the message says converts it."""
    function = models.function("F", [models.node(op, ["a"], ["r"])])
    model = models.model([models.call("F", ["x"], ["y"])], functions=[function])
    function = model.functions[0]
    assert model.opset_import[0].version == 17 and function.opset_import[0].domain == ""
    function.opset_import[0].version = 15
    if op == "LeakyRelu":
        with pytest.raises(
            ModelError, match=r"'F' is for opset 15, the model for 17, and LeakyRelu differs .*convert_version"
        ):
            read_model(saved(model, tmp_path))
        model = onnx.inliner.inline_local_functions(model, convert_version=True)
    network = lower(read_model(saved(model, tmp_path)))
    wanted = -X if op == "Neg" else np.where(X < 0, X * np.float32(0.01), X)
    np.testing.assert_allclose(evaluate(network, {"x": X})[network.outputs[0]], wanted, rtol=1e-6)


@pytest.mark.parametrize("version", [0, -1])
def test_a_function_for_no_version_of_a_domain_is_refused(version: int, tmp_path: Path) -> None:
    model = models.model(
        [models.call("F", ["x"], ["y"])], functions=[models.function("F", [models.node("Neg", ["a"], ["r"])])]
    )
    model.functions[0].opset_import.add(domain="other", version=version)
    with pytest.raises(ModelError, match=rf"the function 'F' is for version {version} of 'other'; allowed: from 1"):
        read_model(saved(model, tmp_path))


@pytest.mark.parametrize(
    ("names", "reason"), [([""], "an attribute has no name"), (["a", "a"], "two attributes have the same name")]
)
def test_attributes_of_a_call_have_names_of_their_own(names: list[str], reason: str, tmp_path: Path) -> None:
    call = models.call("F", ["x"], ["y"])
    for name in names:
        call.attribute.add(name=name, type=onnx.AttributeProto.INT, i=1)
    model = models.model([call], functions=[models.function("F", [models.node("Neg", ["a"], ["r"])])])
    with pytest.raises(ModelError, match=rf"\(F\): {reason}; correct the model"):
        read_model(saved(model, tmp_path))


# --- Shapes -------------------------------------------------------------------------------------------------------------
def test_shapes_are_checked_for_the_extents_that_are_given(tmp_path: Path) -> None:
    made = models.model([models.node("Reshape", ["x", "s"], ["y"])], [models.row(-1, 16)], x=(TensorProto.FLOAT, ["n", 8]))
    path = saved(made, tmp_path)
    assert lower(read_model(path, {"x": [4, 8]})).values["y"].shape == (2, 16)
    with pytest.raises(ModelError, match=r"node Reshape -> y \(Reshape\)"):
        read_model(path, {"x": [3, 8]})


def test_nodes_behind_one_of_another_domain_are_taken(tmp_path: Path) -> None:
    nodes = [models.node("Something", ["x"], ["t"], domain="own"), models.node("Relu", ["t"], ["y"])]
    assert [node.op_type for node in read_model(saved(models.model(nodes), tmp_path)).graph] == ["Something", "Relu"]


@pytest.mark.parametrize("shape", [None, [1, 1, 2, 2]])
def test_shapes_behind_a_pool_whose_last_window_starts_in_the_padding(shape: list[int] | None, tmp_path: Path) -> None:
    """onnx 1.23.2 infers a window too much there, so that the four weights would be too few."""
    nodes = [
        models.node("MaxPool", ["x"], ["t"], kernel_shape=[2, 2], strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1),
        models.node("Flatten", ["t"], ["row"]), models.node("MatMul", ["row", "w"], ["y"]),
    ]  # fmt: skip
    made = models.model(nodes, [models.array(np.ones((4, 2), np.float32))], x=(TensorProto.FLOAT, [1, 1, 4, 4]))
    if shape is not None:
        made.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, shape))
    read_model(saved(made, tmp_path))


def test_a_model_without_inputs_is_refused(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["w", "w"], ["y"])], "constants", [], [result], [weight])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), tmp_path / "constants.onnx")
    with pytest.raises(ModelError, match="has no inputs, so its results are constants"):
        read_model(tmp_path / "constants.onnx")
