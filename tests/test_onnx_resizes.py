"""Resizes of ONNX that the operator `resize` does not compute, beside ONNX's reference evaluator and PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import lowered, normal, referred, run_by_onnxruntime  # noqa: E402
from onnx import TensorProto  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402
from schedsearch.network_check.own_operators import of_opset  # noqa: E402

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric")


def resized(shape: tuple[int, ...], *, sizes: Any = (), scales: Any = (), roi: Any = (), **attributes: Any) -> Net:
    """Sizes and scales are of all axes that `axes` names, by default of all."""
    net = Net(*shape, dtype=attributes.pop("dtype", TensorProto.FLOAT))
    region = net.weight("roi", len(roi), value=roi) if roi else ""
    by = net.weight("scales", len(scales), value=scales) if scales else ""
    net.node("Resize", "x", region, by, *([net.row(*sizes)] if sizes else []), name="resize", **attributes)
    return net


def assert_as_onnx(net: Net, x: Any, *, opset: int = 19, tolerance: float = 1e-5) -> None:
    model = net.model(opset=opset)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    (found,) = referred(model, {"x": x})
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@settings(max_examples=30)
@given(st.data())
def test_any_axes_are_resized_as_by_the_specification(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 4))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank)))
    axes = sorted(data.draw(st.sets(st.integers(0, rank - 1), min_size=1, max_size=2)))
    attributes: dict[str, Any] = {
        "mode": data.draw(st.sampled_from(["linear", "cubic"])),
        "coordinate_transformation_mode": data.draw(st.sampled_from([*COORDINATES, "align_corners"])),
        "exclude_outside": data.draw(st.integers(0, 1)),
        "cubic_coeff_a": data.draw(st.sampled_from([-0.75, -0.5])),
    }
    if attributes["mode"] == "cubic":
        attributes["antialias"] = data.draw(st.integers(0, 1))
    one_is_wrong = attributes["coordinate_transformation_mode"] == "pytorch_half_pixel"  # in onnx's evaluator
    sizes = [data.draw(st.integers(2 if one_is_wrong else 1, 9)) for _ in axes]
    assert_as_onnx(resized(shape, sizes=sizes, axes=axes, **attributes), normal(*shape), tolerance=1e-4)


@pytest.mark.parametrize("given", [{"sizes": [1, 4]}, {"scales": [0.2, 1.0]}, {"sizes": [1, 1]}], ids=str)
@pytest.mark.parametrize("exclude_outside", [0, 1])
def test_one_pixel_by_pytorch_half_pixel_is_the_first(given: dict[str, Any], exclude_outside: int) -> None:
    """ONNX: x_original = length_resized > 1 ? (x_resized + 0.5) / scale - 0.5 : 0."""
    net = resized(
        (1, 2, 5, 4), axes=[2, 3], mode="cubic", coordinate_transformation_mode="pytorch_half_pixel",
        exclude_outside=exclude_outside, **given,
    )  # fmt: skip
    model, x = net.model(opset=19), normal(1, 2, 5, 4)
    (found,) = referred(model, {"x": x})
    (by_own,) = ReferenceEvaluator(model, new_ops=of_opset(19)).run(None, {"x": x})
    columns = 1 if given.get("sizes") == [1, 1] else 4
    np.testing.assert_allclose(found, x[:, :, :1, :columns], rtol=1e-6)
    np.testing.assert_allclose(by_own, found, rtol=1e-6)


def test_one_pixel_by_pytorch_half_pixel_is_that_of_onnxruntime() -> None:
    for antialias in (0, 1):
        net = resized(
            (1, 2, 5, 4), sizes=[1, 2, 1, 3], mode="cubic", coordinate_transformation_mode="pytorch_half_pixel",
            antialias=antialias,
        )  # fmt: skip
        model, x = net.model(opset=19), normal(1, 2, 5, 4)
        np.testing.assert_allclose(referred(model, {"x": x})[0], run_by_onnxruntime(model, {"x": x})[0], atol=1e-5)


@pytest.mark.parametrize("scales", [(0.6, 0.6), (2.5, 0.4), (1.0, 1.7)], ids=str)
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_scales_may_leave_a_part_of_a_pixel(mode: str, coordinates: str, scales: tuple[float, float]) -> None:
    net = resized((1, 2, 5, 7), scales=scales, axes=[2, 3], mode=mode, coordinate_transformation_mode=coordinates)
    assert_as_onnx(net, normal(1, 2, 5, 7), tolerance=1e-4)


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("scale", [0.5, 1.5, 3.0])
def test_rows_are_resized_to_their_nearest_pixels(scale: float, rounding: str) -> None:
    net = resized((2, 3, 8), scales=[1.0, 1.0, scale], mode="nearest", nearest_mode=rounding)
    assert_as_onnx(net, normal(2, 3, 8))


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_one_scale_keeps_the_aspect_ratio(mode: str, policy: str) -> None:
    net = resized((1, 2, 4, 6), sizes=[7, 8], axes=[2, 3], mode=mode, keep_aspect_ratio_policy=policy)
    assert_as_onnx(net, normal(1, 2, 4, 6), tolerance=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_regions_beyond_the_image_hold_one_number(mode: str) -> None:
    """Also beside pixels that are not finite."""
    roi = [0.2, -0.3, 1.4, 0.6]
    options = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.0}
    net = resized((1, 2, 4, 5), sizes=[6, 7], axes=[2, 3], roi=roi, **options)
    x = normal(1, 2, 4, 5)
    assert_as_onnx(net, x, tolerance=1e-4)
    x[0, 0, 0, 0] = np.inf
    (found,) = referred(net.model(opset=19), {"x": x})
    assert found[0, 0, -1, 0] == 10.0


@pytest.mark.parametrize(("mode", "options"), [("linear", {}), ("cubic", {"cubic_coeff_a": -0.75})])
def test_half_pixels_are_those_of_pytorch(mode: str, options: dict[str, float]) -> None:
    torch = pytest.importorskip("torch")
    x = normal(1, 2, 5, 7)
    wanted = torch.nn.functional.interpolate(
        torch.from_numpy(x), (9, 4), mode={"linear": "bilinear", "cubic": "bicubic"}[mode], align_corners=False
    )
    net = resized((1, 2, 5, 7), sizes=[1, 2, 9, 4], mode=mode, **options)
    np.testing.assert_allclose(referred(net.model(opset=19), {"x": x})[0], wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_volumes_are_enlarged_along_three_axes() -> None:
    torch = pytest.importorskip("torch")
    x = normal(1, 2, 3, 4, 5)
    net = resized((1, 2, 3, 4, 5), scales=[1, 1, 2, 2, 2], mode="linear")
    wanted = torch.nn.functional.interpolate(torch.from_numpy(x), scale_factor=2, mode="trilinear")
    np.testing.assert_allclose(referred(net.model(opset=19), {"x": x})[0], wanted.numpy(), rtol=1e-5, atol=1e-5)


def test_integers_are_copied_to_their_nearest_places() -> None:
    net = resized((2, 3, 5), sizes=[2, 3, 8], mode="nearest", dtype=TensorProto.UINT8)
    assert_as_onnx(net, np.random.default_rng(0).integers(0, 256, (2, 3, 5)).astype(np.uint8))


@pytest.mark.parametrize("opset", [7, 9])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_an_upsample_of_rows_is_that_of_onnxruntime(mode: str, opset: int) -> None:
    net = Net(2, 3, 5)
    scales = [1.0, 1.0, 2.0]
    net.node("Upsample", "x", *([net.weight("s", 3, value=scales)] if opset > 7 else []), mode=mode,
             **({"scales": scales} if opset == 7 else {}))  # fmt: skip
    model, x = net.model(opset=opset), normal(2, 3, 5)
    np.testing.assert_allclose(referred(model, {"x": x})[0], run_by_onnxruntime(model, {"x": x})[0], atol=1e-6)


def test_a_cubic_resize_is_a_gather_and_a_chain_along_each_axis() -> None:
    network = lowered(resized((1, 8, 6, 6), scales=[1, 1, 2, 2], mode="cubic").model(opset=19), layouts=("NHWC", "NCHW"))
    calls = [node for node in network.nodes if isinstance(node, Node)]
    assert [node.implementations[0].op for node in calls] == ["gather", "elementwise"] * 2
    assert all(len(node.implementations) == 2 for node in calls)


@pytest.mark.long  # builds a network
def test_resizes_run_on_the_cpu(tmp_path: Path) -> None:
    net = resized((1, 3, 5, 7), scales=[1.7, 0.6], axes=[2, 3], mode="cubic", antialias=1)
    z = net.node("Resize", "x", "", "", net.row(1, 3, 5, 10), mode="linear", coordinate_transformation_mode="align_corners")
    u = net.node(
        "Resize", net.node("Reshape", z, net.row(1, 3, 50)), "", net.weight("t", 3, value=[1, 1, 1.5]), mode="linear"
    )
    net.results = ["resize.out", z, u]
    model, x = net.model(opset=19), normal(1, 3, 5, 7)
    onnx.save(model, tmp_path / "m.onnx")
    wanted = ReferenceEvaluator(model).run(None, {"x": x})
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db", check=False) as built:
        for found, want in zip(built(x), wanted, strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


# --- What is refused ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scales": [1, 1, 0.6], "coordinate_transformation_mode": "align_corners"},
            "no whole number of pixels; give sizes",
        ),
        ({"scales": [1, 1, 2], "dtype": TensorProto.UINT8}, "interpolates uint8, which runtimes round in different ways"),
    ],
)
def test_what_runtimes_compute_in_different_ways_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"resize.*{message}"):
        lowered(resized((1, 2, 5), mode="linear", **options).model(opset=19))
