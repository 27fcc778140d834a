"""Detectors' ends as dynamic graphs: suppression, gathering, alignment and a slice. Expected values are onnx.reference's."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from schedsearch import Workload, dyn_strided_slice, elementwise, gather, nms, nonzero, roi_align, topk, transpose, unique
from schedsearch.backend import compile_source
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.graph import DynamicGraph, Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import ArgumentError, UsageError
from schedsearch.launch import Artifact
from schedsearch.network.model import ModelError
from schedsearch.target import Target
from schedsearch.template import load_template

BOXES, KEPT = 40, 9


@functools.cache
def artifact(target: Target, workload: Workload) -> Artifact:
    name = "data_movement" if workload.op == "transpose" else workload.op
    template = load_template(f"{name}_{target.kind}")
    config = template.default(workload, target, template.space(workload, target))
    return compile_source(template.kernel(workload, target, config), target).artifact


@pytest.fixture(scope="module")
def device() -> Any:
    opened = open_device(detect("cpu"))
    yield opened
    opened.close()


def detector() -> DynamicGraph:
    """Regions of an image around the boxes that non-maximum suppression keeps, and a slice of them."""
    graph = DynamicGraph()
    image = graph.input("image", (1, 3, 16, 16), "float32")
    boxes, scores = graph.input("boxes", (1, BOXES, 4), "float32"), graph.input("scores", (1, 1, BOXES), "float32")
    begin, end = graph.input("begin", (2,), "int64"), graph.input("end", (2,), "int64")
    kept = graph.call(nms(n=1, classes=1, boxes=BOXES, max_output=KEPT, iou_threshold=0.3), boxes, scores, name="kept")

    def column(number: int, name: str) -> str:
        picked = gather(x=(KEPT, 3), indices=(1,), axis=1, dtype="int64")
        found = graph.call(picked, kept, graph.constant(f"{number}", np.array([number])), name=name)
        return graph.view(found, (KEPT,), name=f"{name} of each")

    all_boxes = graph.view(boxes, (BOXES, 4), name="all_boxes")
    chosen = gather(x=(BOXES, 4), indices=(KEPT,), dynamic=True, dtype="float32")
    corners = graph.call(chosen, all_boxes, column(2, "number"), name="corners")
    swapped = gather(x=(KEPT, 4), indices=(4,), axis=1, dtype="float32")
    rois = graph.call(swapped, corners, graph.constant("xyxy", np.array([1, 0, 3, 2])), name="rois")
    aligned = roi_align(
        n=1, c=3, h=16, w=16, rois=KEPT, oh=2, ow=2, sampling_ratio=2, layout="NCHW", dtype="float32", dynamic=True
    )
    regions = graph.call(aligned, image, rois, column(0, "batch"), name="regions")
    window = dyn_strided_slice(x=(KEPT, 3, 2, 2), axes=(0, 1), strided=False, dynamic=True, dtype="float32")
    graph.output(graph.call(window, regions, begin, end, name="window"), kept)
    return graph


def detector_onnx() -> Any:
    constants = {
        "most": np.array([KEPT]), "iou": np.array([0.3], np.float32), "two": np.array(2), "zero": np.array(0),
        "row": np.array([0]), "xyxy": np.array([1, 0, 3, 2]), "axes": np.array([0, 1]),
    }  # fmt: skip
    nodes = [
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou"], ["kept"]),
        helper.make_node("Gather", ["kept", "two"], ["number"], axis=1),
        helper.make_node("Gather", ["kept", "zero"], ["batch"], axis=1),
        helper.make_node("Squeeze", ["boxes", "row"], ["all_boxes"]),
        helper.make_node("Gather", ["all_boxes", "number"], ["corners"]),
        helper.make_node("Gather", ["corners", "xyxy"], ["rois"], axis=1),
        helper.make_node(
            "RoiAlign", ["image", "rois", "batch"], ["regions"], output_height=2, output_width=2, sampling_ratio=2
        ),
        helper.make_node("Slice", ["regions", "begin", "end", "axes"], ["window"]),
    ]
    shapes = {"image": [1, 3, 16, 16], "boxes": [1, BOXES, 4], "scores": [1, 1, BOXES]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT64, [2]) for name in ("begin", "end")]
    outputs = [
        helper.make_tensor_value_info("window", TensorProto.FLOAT, [None] * 4),
        helper.make_tensor_value_info("kept", TensorProto.INT64, [None, 3]),
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "detector", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def example(seed: int, begin: Any = (0, 0), end: Any = (99, 99)) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 12, (1, BOXES, 2))
    boxes = np.concatenate([corners, corners + rng.integers(2, 5, (1, BOXES, 2))], 2).astype(np.float32)
    image = rng.standard_normal((1, 3, 16, 16)).astype(np.float32)
    scores = rng.permutation(BOXES).astype(np.float32).reshape(1, 1, BOXES) / BOXES
    return image, boxes, scores, np.array(begin), np.array(end)


def expected(arrays: tuple[Any, ...]) -> Any:
    names = ("image", "boxes", "scores", "begin", "end")
    return ReferenceEvaluator(detector_onnx()).run(None, dict(zip(names, arrays)))


@pytest.fixture(scope="module")
def net(device: Device) -> Any:
    with DynamicNet(detector().program(), device, functools.partial(artifact, device.target)) as made:
        yield made


def test_the_model_to_compare_with_is_valid() -> None:
    onnx.checker.check_model(detector_onnx(), full_check=True)


@pytest.mark.long(of="detectors")
@pytest.mark.parametrize("window", [((0, 0), (99, 99)), ((1, -2), (-1, 3)), ((5, 0), (5, 3))])
def test_a_detector_runs_exact_and_bounded(net: DynamicNet, window: Any) -> None:
    arrays = example(len(window), *window)
    wanted = expected(arrays)
    for got, want in zip(net(*arrays), wanted):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    bound = net.bind(*arrays)
    for seed in (7, 8):  # other numbers in the same arrays
        for array, new in zip(arrays, example(seed, *window)):
            array[...] = new
        bound.step()
        for got, want in zip(bound.sliced(), expected(arrays)):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    bound.close()


@pytest.mark.long(of="detectors")
def test_no_kept_box_is_an_empty_result(device: Device, net: DynamicNet) -> None:
    """No score exceeds the threshold: nothing is a number that is greater."""
    image, boxes, scores, begin, end = example(3)
    scores[...] = np.nan
    window, kept = net(image, boxes, scores, begin, end)
    assert window.shape == (0, 3, 2, 2) and kept.shape == (0, 3)


def test_a_detector_waits_once_and_says_what_every_call_needs() -> None:
    assert explain(detector().program()).splitlines() == [
        "segment 0: exact runs copy nothing to the host and wait for nothing",
        "  kept  needs the shape of scores  allocates y at the bound",
        "segment 1: exact runs copy 144 bytes to the host and wait once",
        "  number   needs the shape of kept.y  allocates y at the bound",
        "  corners  needs the shape of all_boxes, number of each  allocates y at the bound",
        "  rois     needs the shape of corners.y  allocates y at the bound",
        "  batch    needs the shape of kept.y  allocates y at the bound",
        "  regions  needs the shape of image, rois.y  allocates y at the bound",
        "  window   needs the shape of regions.y; the values of begin, end  allocates y",
        "bounded runs: 0 bytes to the host, 0 waits, 0 allocations",
    ]


@pytest.mark.long(of="detectors")
def test_what_kernels_count_goes_on_to_other_operators(device: Device) -> None:
    """Kept boxes by (image, box), their largest numbers, their transpose; nonzero and unique count beside them."""
    graph = DynamicGraph()
    boxes, scores = graph.input("boxes", (1, BOXES, 4), "float32"), graph.input("scores", (1, 1, BOXES), "float32")
    kept = graph.call(nms(n=1, classes=1, boxes=BOXES, max_output=KEPT, iou_threshold=0.3), boxes, scores, name="kept")
    columns = gather(x=(KEPT, 3), indices=(2,), axis=1, dtype="int64")
    pairs = graph.call(columns, kept, graph.constant("image and box", np.array([0, 2])), name="pairs")
    chosen = gather(x=(1, BOXES, 4), indices=(KEPT, 2), by="tuples", dynamic=True, dtype="float32")
    found = graph.call(chosen, boxes, pairs, name="found")
    best = graph.call(topk(x=(KEPT, 4), k=2, dynamic=True), found, name="best")
    turned = graph.call(transpose(x=(KEPT, 4), permutation=(1, 0), dtype="float32"), found, name="turned")
    places = graph.call(nonzero(x=(1, BOXES, 4)), boxes, name="places")
    different = graph.call(unique(x=(1, BOXES, 4)), boxes, name="different")
    graph.output(best, "best.indices", turned, places, different)
    with DynamicNet(graph.program(), device, functools.partial(artifact, device.target)) as net:
        for seed in (0, 1):
            image, boxes, scores, begin, end = example(seed)
            _, rows = expected((image, boxes, scores, begin, end))
            picked = boxes[rows[:, 0], rows[:, 2]]
            order = np.argsort(-picked, axis=1, kind="stable")[:, :2]
            wanted = (np.take_along_axis(picked, order, 1), order, picked.T, np.array(np.nonzero(boxes)), np.unique(boxes))
            bound = net.bind(boxes, scores)
            bound.step()
            for results in (net(boxes, scores), bound.sliced()):
                for got, want in zip(results, wanted, strict=True):
                    np.testing.assert_array_equal(got, want)
            bound.close()


def test_extents_that_may_differ_are_refused() -> None:
    graph = detector()
    other = graph.call(nms(n=1, classes=1, boxes=BOXES, max_output=KEPT), "boxes", "scores", name="other")
    wide = graph.call(gather(x=(KEPT, 3), indices=(1,), axis=1, dtype="int64"), other, "0", name="wide")
    with pytest.raises(UsageError, match=r"wide\.y of \[other\.y:0, 1\] cannot be seen as \[3, 3\]"):
        graph.view(wide, (3, 3))
    with pytest.raises(UsageError, match=r"takes batch_indices of fixed extents; it gets \[other\.y:0\]"):
        aligned = roi_align(n=1, c=3, h=16, w=16, rois=KEPT, oh=2, ow=2, layout="NCHW", dtype="float32", dynamic=True)
        graph.call(aligned, "image", "rois.y", graph.view(wide, (KEPT,)), name="again")


@pytest.mark.long(of="detectors")
def test_sizes_of_one_name_are_one_size(device: Device) -> None:
    graph = DynamicGraph()
    one, other = (graph.input(name, (Size("n", 0, 6), 4), "float32") for name in "ab")
    graph.output(graph.call(elementwise(y=(6, 4), expression="a + b", dtype="float32"), one, other))
    with pytest.raises(UsageError, match=r"size n of c is 0\.\.7; before it was 0\.\.6"):
        graph.input("c", (Size("n", 0, 7),), "float32")
    with DynamicNet(graph.program(), device, functools.partial(artifact, device.target)) as net:
        ones = np.ones((3, 4), np.float32)
        np.testing.assert_array_equal(net(ones, ones), 2 * ones)
        with pytest.raises(ArgumentError, match="n is 3 in a and 2 in b; give arrays that agree"):
            net(ones, ones[:2])


def saved(path: Any, model: Any = None) -> Any:
    onnx.save(model or detector_onnx(), path / "detector.onnx")
    return path / "detector.onnx"


@pytest.mark.long(of="detectors")
def test_an_onnx_model_of_a_detector_becomes_the_same_graph(device: Device, tmp_path: Any) -> None:
    graph = read_graph(saved(tmp_path))
    with DynamicNet(graph.program(), device, functools.partial(artifact, device.target)) as net:
        arrays = example(5, (0, 1), (6, 3))
        wanted = expected(arrays)
        bound = net.bind(*arrays)
        bound.step()
        for results in (net(*arrays), bound.sliced()):
            for got, want in zip(results, wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        bound.close()


def rows_onnx(*operators: str) -> Any:
    """Operators one after the other on x of n rows."""
    names = ["x", *(f"t{number}" for number in range(1, len(operators))), "y"]
    nodes = [helper.make_node(op, [one], [to], name=f"the {op}") for op, one, to in zip(operators, names, names[1:])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    graph = helper.make_graph(nodes, "rows", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.long(of="detectors")
def test_a_model_with_a_dynamic_dimension_takes_every_size(device: Device, tmp_path: Any) -> None:
    path, rng = saved(tmp_path, rows_onnx("Relu", "Neg")), np.random.default_rng(0)
    graph = read_graph(path, {"n": Size("n", 0, 6)})
    with DynamicNet(graph.program(), device, functools.partial(artifact, device.target)) as net:
        for n in (0, 1, 6):
            x = rng.standard_normal((n, 4)).astype(np.float32)
            np.testing.assert_array_equal(net(x), -np.maximum(x, 0))


def test_models_that_cannot_be_read_say_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=r"nothing.onnx is not a file"):
        read_graph(tmp_path / "nothing.onnx")
    path = saved(tmp_path, rows_onnx("Relu"))
    with pytest.raises(ModelError, match=r"dimension 0 of input 'x' is 'n', which has no bounds; give them, e.g. --dynamic"):
        read_graph(path)
    with pytest.raises(ModelError, match=r"has no dynamic dimension 'm'.*; allowed: n"):
        read_graph(path, {"n": Size("n", 1, 6), "m": Size("m", 1, 6)})
    with pytest.raises(
        ModelError, match=r"no operator for these nodes of .*: LpNormalization: the LpNormalization \(takes arrays of fixed"
    ):
        read_graph(saved(tmp_path, rows_onnx("Relu", "LpNormalization")), {"n": Size("n", 1, 6)})
    (tmp_path / "detector.onnx").write_bytes(b"no protobuf")
    with pytest.raises(ModelError, match="is not an ONNX model, or it is damaged"):
        read_graph(tmp_path / "detector.onnx")
