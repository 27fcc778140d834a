"""A network is compared with the model that it was made from before it is written or served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import network_support as support
import numpy as np
import pytest
from cli_support import schedsearch as command

import schedsearch
from schedsearch.errors import UsageError, WrongNetworkError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from test_network import Net as Model  # noqa: E402

from schedsearch.network import simplify  # noqa: E402

Spoil = Callable[[Any], None]


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], None]:
    """Makes the rules that every model passes through do something wrong."""
    right = simplify.fuse

    def set_rule(rule: Spoil) -> None:
        def wrong(model: Any) -> bool:
            found = right(model)
            for node in model.graph:
                rule(node)
            return found

        monkeypatch.setattr(simplify, "fuse", wrong)

    return set_rule


def relu_for_tanh(node: Any) -> None:
    if node.op_type == "Tanh":
        node.op_type = "Relu"


def chain(*shape: int | str) -> Model:
    """relu(tanh(conv(x)) + 1)."""
    model = Model(*shape)
    value = model.node("Tanh", model.conv("x", 4, 2, name="conv"), name="squash")
    model.node("Relu", model.node("Add", value, model.weight("one", 1, value=1.0), name="shift"), name="last")
    return model


def build(path: Path, **options: Any) -> Any:
    return schedsearch.build(path, target="cpu", db=path.parent / "none.db", **options)


def test_a_wrong_network_is_not_written_and_the_message_names_the_first_value_that_differs(
    tmp_path: Path, spoiled: Callable[[Spoil], None]
) -> None:
    path, out = chain(1, 2, 6, 6).save(tmp_path), tmp_path / "net.ssx"
    build(path, out=out).close()
    before = out.read_bytes()
    spoiled(relu_for_tanh)
    with pytest.raises(
        WrongNetworkError, match=r"first value that differs is 'squash\.out', of node squash \(Tanh\): element"
    ):
        build(path, out=out)
    assert out.read_bytes() == before
    with pytest.raises(WrongNetworkError):
        build(path, out=tmp_path / "other.ssx")
    assert not (tmp_path / "other.ssx").exists()


def test_the_command_exits_with_1_and_says_what_to_do(tmp_path: Path, spoiled: Callable[[Spoil], None]) -> None:
    path, out = chain(1, 2, 6, 6).save(tmp_path), tmp_path / "net.ssx"
    spoiled(relu_for_tanh)
    done = command("build", path, "--target", "cpu", "-o", out, "--db", tmp_path / "none.db")
    assert done.exit_code == 1
    assert "Nothing was written" in done.stderr and "--no-check" in done.stderr
    assert not out.exists()


@pytest.mark.long
def test_a_layer_that_a_later_one_hides_is_found_where_it_is(tmp_path: Path, spoiled: Callable[[Spoil], None]) -> None:
    """Two convolutions apart: each is compared on the network's own numbers, so the second is not blamed for the first."""
    model = Model(1, 4, 8, 8)
    first = model.node("Tanh", model.conv("x", 4, 4, name="first"), name="squash")
    pooled = model.node("MaxPool", first, name="pool", kernel_shape=[2, 2], strides=[2, 2])
    model.node("Relu", model.conv(pooled, 4, 4, name="second"), name="last")
    spoiled(relu_for_tanh)
    with pytest.raises(WrongNetworkError, match=r"'squash\.out', of node squash \(Tanh\)"):
        build(model.save(tmp_path))


def test_without_the_check_the_file_says_so(tmp_path: Path, spoiled: Callable[[Spoil], None]) -> None:
    path, out = chain(1, 2, 6, 6).save(tmp_path), tmp_path / "net.ssx"
    spoiled(relu_for_tanh)
    done = command("build", path, "--target", "cpu", "-o", out, "--db", tmp_path / "none.db", "--no-check", "--explain")
    assert done.exit_code == 0, done.stderr
    assert "the network is unchecked, as asked" in done.stderr
    with schedsearch.load(out) as net:
        assert net.program.checked == ""
        assert "unchecked: its results were not compared" in net.explain()
    assert "unchecked: its results were not compared" in command("run", out, "--repeat", "1").stderr
    assert json.loads(command("run", out, "--repeat", "0", "--json").stdout)["checked"] == ""


def test_a_checked_file_says_with_what_and_a_file_without_the_field_is_unchecked(tmp_path: Path) -> None:
    out = tmp_path / "net.ssx"
    build(chain(1, 2, 6, 6).save(tmp_path), out=out).close()
    with schedsearch.load(out) as net:
        assert net.program.checked.startswith(("ONNX Runtime", "onnx"))
        assert f"compared with its model's, by {net.program.checked}" in net.explain()
        data = json.loads(net.program.json)
    del data["checked"]
    assert type(net.program).from_json(json.dumps(data)).checked == ""


def test_a_network_without_a_model_is_unchecked() -> None:
    said: list[str] = []
    network = support.two_convolutions()
    with schedsearch.build(network, target="cpu", db="none.db", say=said.append) as net:
        assert net.program.checked == ""
    assert "the network is unchecked, a Network has no model" in "".join(said)


def masked(model: Model, value: str) -> Model:
    """The output, relu(maxpool(value - 1000)), is 0 and shows nothing of a value."""
    moved = model.node("Add", value, model.weight("far", 1, value=-1000.0), name="moved")
    model.node("Relu", model.node("MaxPool", moved, name="pool", kernel_shape=[2, 2]), name="last")
    return model


@pytest.mark.long
def test_a_wrong_value_that_no_output_shows_is_found(tmp_path: Path, spoiled: Callable[[Spoil], None]) -> None:
    model = Model(1, 2, 6, 6)
    path = masked(model, model.node("Tanh", model.conv("x", 4, 2, name="conv"), name="squash")).save(tmp_path)
    build(path).close()
    spoiled(relu_for_tanh)
    with pytest.raises(WrongNetworkError, match=r"'squash\.out', of node squash \(Tanh\): element"):
        build(path)


@pytest.mark.long(of="networks")
def test_a_fault_of_arrays_that_share_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution whose tiles overlap at the end of a row adds a residual twice, if it is in the place of the result."""
    from schedsearch.templates.conv2d import cpu

    model = Model(1, 4, 2, 62)
    first = model.node("Tanh", model.conv("x", 8, 4, 1, name="first"), name="squash")
    second = model.conv(model.conv(first, 8, 8, 1, name="second"), 8, 8, 1, name="third")
    path = masked(model, model.node("Relu", model.node("Add", second, first, name="sum"), name="kept")).save(tmp_path)
    with build(path) as net:
        third = next(call for call in net.steps if "residual" in call.buffers)
        places = [net.program.arrays[third.buffers[name]].place for name in ("residual", *third.outputs)]
        assert places[0] == places[1]
    monkeypatch.setattr(cpu, "updates_in_place", lambda workload: False)
    with pytest.raises(WrongNetworkError, match=r"'kept\.out', of node kept \(Relu\): element"):
        build(path)


@pytest.mark.long
def test_every_size_of_a_table_is_of_a_network_that_was_compared(tmp_path: Path, spoiled: Callable[[Spoil], None]) -> None:
    path, out = chain("n", 2, 6, 6).save(tmp_path), tmp_path / "net.ssx"
    options: dict[str, Any] = {"target": "cpu", "db": tmp_path / "none.db", "out": out}
    with schedsearch.build_dynamic(path, {"n": (1, 3)}, **options) as net:
        assert "checked: its results were compared" in net.explain()
    with schedsearch.load(out) as net:
        assert "checked: its results were compared" in net.explain()
    out.unlink()
    spoiled(relu_for_tanh)
    with pytest.raises(WrongNetworkError, match=r"at n = 1 computes something else than net\.onnx.*'squash\.out'"):
        schedsearch.build_dynamic(path, {"n": (1, 3)}, **options)
    assert not out.exists()
    with schedsearch.build_dynamic(path, {"n": (1, 3)}, check=False, **options) as net:
        assert "unchecked" in net.explain()


@pytest.mark.long
def test_a_graph_with_computed_sizes_is_compared_in_both_ways(tmp_path: Path, spoiled: Callable[[Spoil], None]) -> None:
    path, out = chain("n", 2, 6, 6).save(tmp_path), tmp_path / "net.ssx"
    options: dict[str, Any] = {"run_mode": "bounded", "target": "cpu", "db": tmp_path / "none.db", "out": out}
    with schedsearch.build_dynamic(path, {"n": (1, 3)}, **options) as net:
        assert net.bundle.checked
    with schedsearch.load(out) as net:
        assert "checked: its results were compared" in net.explain()
    out.unlink()
    spoiled(relu_for_tanh)
    with pytest.raises(WrongNetworkError, match=r"run exact at n = 1 computes something else.*'squash\.out', of node"):
        schedsearch.build_dynamic(path, {"n": (1, 3)}, **options)
    assert not out.exists()


@pytest.mark.long
def test_a_graph_with_computed_sizes_shows_what_the_models_values_are(tmp_path: Path) -> None:
    """Also those of which the array has another order of axes, or the memory of its bound, in both ways to run."""
    from onnx.reference import ReferenceEvaluator

    from schedsearch.network_check.subjects import ComputedSizes

    path = chain("n", 2, 6, 6).save(tmp_path)
    model = onnx.load(path)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ("conv.out", "squash.out"))
    x = np.random.default_rng(3).standard_normal((2, 2, 6, 6), np.float32)
    _, *right = ReferenceEvaluator(model).run(None, {"x": x})
    with schedsearch.build_dynamic(path, {"n": (1, 3)}, run_mode="exact", target="cpu", db=tmp_path / "none.db") as net:
        for way in ("exact", "bounded"):
            subject = ComputedSizes(net, {"n": 2}, way)
            shown = subject.values({"x": x}, [name for name in ("conv.out", "squash.out") if name in subject.sizes])
            assert shown, "the graph shows none of its values"
            for name, array in shown.items():
                np.testing.assert_allclose(array, right[("conv.out", "squash.out").index(name)], rtol=1e-4, atol=1e-5)
                assert array.size == subject.sizes[name]


def test_a_model_that_no_evaluator_runs_is_refused_unless_it_need_not_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.network_check import check, evaluators

    class Neither:
        name = "neither"

        def open(self, model: Any) -> Any:
            raise evaluators.NotEvaluableError("neither has Conv")

    monkeypatch.setattr(check, "evaluators", lambda: [Neither(), Neither()])
    path = chain(1, 2, 6, 6).save(tmp_path)
    with pytest.raises(UsageError, match=r"cannot be compared with net\.onnx: neither has Conv.*--no-check"):
        build(path)
    build(path, check=False).close()


def test_onnxs_evaluator_computes_the_model_where_onnx_runtime_is_not_installed(
    tmp_path: Path, spoiled: Callable[[Spoil], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.network_check import check, evaluators

    monkeypatch.setattr(check, "evaluators", lambda: [evaluators.OnnxReference()])
    path = chain(1, 2, 6, 6).save(tmp_path)
    with build(path) as net:
        assert net.program.checked.startswith("onnx 1.")
    monkeypatch.setattr(check, "MOST_PRODUCTS", 10)
    said: list[str] = []
    with build(path, say=said.append) as net:
        assert net.program.checked == ""
    assert "unchecked: net.onnx needs 2,592 products, too many for onnx's evaluator" in "".join(said)
    monkeypatch.undo()
    spoiled(relu_for_tanh)
    monkeypatch.setattr(check, "evaluators", lambda: [evaluators.OnnxReference()])
    with pytest.raises(WrongNetworkError, match=r"'squash\.out'"):
        build(path)


def test_the_model_runs_with_noise_only_if_a_value_is_not_obviously_right(
    tmp_path: Path, spoiled: Callable[[Spoil], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.network_check import check, evaluators, source

    opened: list[int] = []  # how many values each model with noise computes; 0 for one without

    class Counting(evaluators.OnnxReference):
        def open(self, model: Any) -> Any:
            is_noisy = any(each.name == source.DIRECTION for each in model.graph.input)
            opened.append(len(model.graph.output) if is_noisy else 0)
            return super().open(model)

    monkeypatch.setattr(check, "evaluators", lambda: [Counting()])
    path = chain(1, 2, 6, 6).save(tmp_path)
    build(path).close()
    assert opened and not any(opened)
    spoiled(relu_for_tanh)
    with pytest.raises(WrongNetworkError, match=r"'squash\.out'"):
        build(path)
    assert next(filter(None, opened)) == 1  # 'squash.out' alone is in doubt


@pytest.mark.integrations
def test_a_layer_that_pytorchs_exporter_gets_wrong_is_refused(torch: Any) -> None:
    """PyTorch 2.13's exporter drops divisor_override: 3/4 of the right numbers."""
    module = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.AvgPool2d(2, divisor_override=3))
    x = torch.rand(1, 2, 6, 6)
    try:
        with schedsearch.build(module, x, target="cpu", db="none.db") as net:
            found = net(x)
    except WrongNetworkError as error:
        assert "PyTorch's exporter" in str(error) and "(AveragePool)" in str(error)
    else:  # the exporter was mended
        np.testing.assert_allclose(found, module(x), rtol=1e-5)


@pytest.mark.integrations
def test_a_wrong_rewrite_of_a_torch_module_is_found(torch: Any, spoiled: Callable[[Spoil], None]) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Tanh(), torch.nn.MaxPool2d(2)).eval()
    x = torch.rand(1, 2, 6, 6)
    with schedsearch.build(module, x, target="cpu", db="none.db") as net:
        assert net.program.checked
    spoiled(relu_for_tanh)
    with pytest.raises(WrongNetworkError, match=r"the network computes something else than Sequential.*\(Tanh\)"):
        schedsearch.build(module, x, target="cpu", db="none.db")


@pytest.mark.parametrize("opset", [9, 13])
def test_a_batch_norm_that_onnxs_evaluator_takes_for_one_in_training_is_right(
    tmp_path: Path, opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ONNX's definition y = s (x - m) / sqrt(v + epsilon) + b, whatever the mean of x is."""
    from onnx.reference import ReferenceEvaluator

    from schedsearch.network_check import check, evaluators

    monkeypatch.setattr(check, "evaluators", lambda: [evaluators.OnnxReference()])
    model, path = Model(1, 4, 5, 5), tmp_path / "net.onnx"
    weights = [model.weight(name, 4, value=value) for name, value in (("s", 2.0), ("b", 1.0), ("m", 3.0), ("v", 4.0))]
    model.node("BatchNormalization", "x", *weights, name="norm")
    proto = model.model(opset=opset)
    onnx.save(proto, path)
    x = np.random.default_rng(1).standard_normal((1, 4, 5, 5)).astype(np.float32)
    right = (x.astype(np.float64) - 3) / np.sqrt(4 + 1e-5) * 2 + 1
    assert abs(ReferenceEvaluator(proto).run(None, {"x": x})[0] - right).max() > 0.1, "onnx was mended: remove the row"
    with build(path) as net:
        assert net.program.checked.startswith("onnx")
        np.testing.assert_allclose(net(x), right, rtol=1e-5, atol=1e-5)
    right_rules = simplify.fuse

    def with_another_mean(model: Any) -> bool:
        import onnx_ir as ir

        model.graph.initializers["m"].const_value = ir.tensor(np.full(4, 2.9, np.float32))
        return right_rules(model)

    monkeypatch.setattr(simplify, "fuse", with_another_mean)
    with pytest.raises(WrongNetworkError):
        build(path)


def test_numbers_that_onnx_runtime_computes_wrong_are_no_differences(tmp_path: Path) -> None:
    """ONNX Runtime 1.32's Sigmoid is 0 at -20, where 2e-9 is right."""
    model = Model(1, 4, 2, 2)
    shifted = model.node("Add", "x", model.weight("shift", 1, value=-20.0), name="shifted")
    model.node("Mul", model.node("Sigmoid", shifted, name="gate"), model.weight("scale", 1, value=1e9), name="scaled")
    build(model.save(tmp_path)).close()
