"""nms and roi_align: the operators, their references and templates, against NumPy, ONNX's node cases and torchvision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, default, node_cases, verdict
from dynamic_support import assert_equal, emulated, expected, on_device

from schedsearch import Workload, nms, roi_align
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.device.index_notes import IndexNotes
from schedsearch.errors import IndexRangeError
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.nms import NMS
from schedsearch.ops.roi_align import ROI_ALIGN
from schedsearch.ops.wrong_index import WRONG_INDEX
from schedsearch.template import load_template
from schedsearch.templates.detection import nms_kernels, roi_kernels
from schedsearch.templates.parts import vectors
from schedsearch.templates.selection import block, keys
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

TEMPLATES = {op: (load_template(f"{op}_cuda"), load_template(f"{op}_cpu")) for op in ("nms", "roi_align")}
MODULES = block, keys, nms_kernels, roi_kernels, vectors
REGIONS = {"n": 2, "c": 5, "h": 11, "w": 14, "rois": 6, "oh": 3, "ow": 2}


class TestNms(OpContract):
    op = NMS
    examples = (
        {"n": 1, "classes": 2, "boxes": 30, "max_output": 7},
        {"n": 2, "classes": 1, "boxes": 9, "max_output": 20, "iou_threshold": 0.5, "score_threshold": 0.25,
         "center_point_box": True},
    )  # fmt: skip
    wrong = (
        ({"n": 1, "classes": 1, "boxes": 5, "max_output": 2, "iou_threshold": 1.5}, "iou_threshold"),
        ({"n": 1, "classes": 1, "boxes": 5, "max_output": 2, "score_threshold": 1e300}, "score_threshold"),
        ({"n": 2**16, "classes": 2**10, "boxes": 2**10, "max_output": 2}, "boxes"),
    )

    def test_no_more_boxes_are_kept_than_there_are(self) -> None:
        assert nms(n=1, classes=2, boxes=5, max_output=50).outputs[0].shape == (10, 3)


class TestRoiAlign(OpContract):
    op = ROI_ALIGN
    examples = (
        REGIONS,
        {**REGIONS, "mode": "max", "coordinates": "output_half_pixel", "sampling_ratio": 2, "spatial_scale": 0.25},
        {**REGIONS, "dtype": "float32", "rois_dtype": "float16", "layout": "NCHW", "dynamic": True},
    )
    wrong = (
        ({**REGIONS, "mode": "sum"}, "mode"),
        ({**REGIONS, "spatial_scale": 0}, "spatial_scale"),
        ({**REGIONS, "sampling_ratio": -1}, "sampling_ratio"),
        ({**REGIONS, "layout": "NCHW4c"}, "layout"),
    )


SUPPRESSIONS: list[dict[str, Any]] = [
    dict(n=1, classes=1, boxes=150, max_output=40, iou_threshold=0.3),
    dict(n=2, classes=3, boxes=70, max_output=5, iou_threshold=0.5, score_threshold=0.5),
    dict(n=1, classes=2, boxes=65, max_output=65, iou_threshold=1.0, center_point_box=True),
    dict(n=1, classes=1, boxes=40, max_output=9, score_threshold=2.0),
]
ALIGNMENTS: list[dict[str, Any]] = [
    dict(REGIONS, c=8),
    dict(REGIONS, mode="max", dtype="float32", sampling_ratio=2),
    dict(REGIONS, c=4, layout="NCHW", coordinates="output_half_pixel", spatial_scale=0.5),
    dict(REGIONS, layout="NCHW", mode="max", dtype="bfloat16", rois_dtype="float16"),
]


def example(workload: Workload, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for spec in workload.signature:
        if spec.name == "scores":
            found[spec.name] = rng.integers(0, 64, spec.shape) / 64
        elif spec.name == "boxes":
            found[spec.name] = rng.integers(0, 24, spec.shape)
        elif spec.name == "rois":  # some lie outside of the images, and some are swapped
            found[spec.name] = rng.uniform(-6, 30, spec.shape)
        elif spec.below is not None:
            found[spec.name] = rng.integers(0, spec.below, spec.shape)
        else:
            found[spec.name] = rng.uniform(-3, 3, spec.shape)
    if "rois_extents" in found:
        found["rois_extents"][0] = workload.rois - 2
    return {spec.name: decode(encode(found[spec.name], spec.dtype), spec.dtype) for spec in workload.signature}


def tolerance(workload: Workload) -> float:
    return {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[workload.dtype]


@pytest.mark.parametrize("shape", SUPPRESSIONS, ids=str)
@pytest.mark.mostly_long(2)
def test_emulated_suppression_is_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    template, workload = TEMPLATES["nms"][0], nms(**shape)
    arrays = example(workload)
    config = Config(order_threads=256, threads=64)
    wanted = expected(workload, arrays)
    assert_equal(workload, emulated(monkeypatch, template, workload, arrays, config, *MODULES), wanted)
    if workload.score_threshold > 1:
        assert wanted["y"].shape == (0, 3)


@pytest.mark.parametrize("shape", ALIGNMENTS, ids=str)
@pytest.mark.mostly_long(6)
def test_emulated_alignment_is_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    template = TEMPLATES["roi_align"][0]
    for workload in (roi_align(**shape), roi_align(**shape, dynamic=True)):
        arrays, values = example(workload), template.space(workload, H200).values
        for config in (default(template, workload, H200), Config(vector=1, each=values["each"][-1], threads=64)):
            found = emulated(monkeypatch, template, workload, arrays, config, *MODULES)
            assert_equal(workload, found, expected(workload, arrays), tolerance(workload))


WRONG_IMAGES = pytest.mark.parametrize("image", [2, -1, 2**40])


@WRONG_IMAGES
@pytest.mark.mostly_long(3)
def test_emulated_alignment_notes_an_image_that_there_is_not(monkeypatch: pytest.MonkeyPatch, image: int) -> None:
    """Its region is zeros, and nothing outside of x is read: the emulator would say so."""
    for shape in ALIGNMENTS[:2]:
        workload, words = roi_align(**shape), np.zeros(2, np.int64)
        arrays = example(workload)
        wanted = expected(workload, arrays)["y"]
        wanted[4], arrays["batch_indices"][4] = 0, image
        template, also = TEMPLATES["roi_align"][0], {WRONG_INDEX: words}
        found = emulated(monkeypatch, template, workload, arrays, None, *MODULES, also=also)
        assert_equal(workload, found, {"y": wanted}, tolerance(workload))
        assert words.tolist() == [5, image]


@WRONG_IMAGES
@pytest.mark.mostly_long(3)
def test_an_image_that_there_is_not_is_an_error_on_a_cpu(device: CpuDevice, image: int) -> None:
    workload = roi_align(**ALIGNMENTS[1])
    arrays = example(workload)
    wanted = expected(workload, arrays)["y"]
    wanted[4], arrays["batch_indices"][4] = 0, image
    notes = IndexNotes(device, [workload], describe)
    found = on_device(device, TEMPLATES["roi_align"][1], workload, arrays, also=notes.buffers(workload))
    assert_equal(workload, found, {"y": wanted}, tolerance(workload))
    said = rf"the number of an image at \[4\] of 'batch_indices' is {image}, but 'x' has 2 images; allowed: 0 to 1"
    with pytest.raises(IndexRangeError, match=said):
        notes.check()
    notes.close()


@pytest.mark.gpu
@WRONG_IMAGES
def test_an_image_that_there_is_not_is_noted_on_a_gpu(gpu: Any, image: int) -> None:
    for shape in ALIGNMENTS[:2]:
        workload = roi_align(**shape)
        arrays = example(workload)
        wanted = expected(workload, arrays)["y"]
        wanted[4], arrays["batch_indices"][4] = 0, image
        notes = IndexNotes(gpu, [workload], describe)
        found = on_device(gpu, TEMPLATES["roi_align"][0], workload, arrays, also=notes.buffers(workload))
        assert_equal(workload, found, {"y": wanted}, tolerance(workload))
        with pytest.raises(IndexRangeError, match=rf"at \[4\] of 'batch_indices' is {image}, but 'x' has 2 images"):
            notes.check()
        notes.close()


def describe(workload: Workload, place: int, index: int) -> str:
    names = {spec.name: spec.name for spec in workload.signature}
    return workload.definition.wrong_index(workload.params, place, index, names)


@pytest.mark.parametrize(
    "workload",
    [
        nms(**SUPPRESSIONS[0]),
        nms(**SUPPRESSIONS[2]),
        roi_align(**ALIGNMENTS[1]),
        roi_align(**ALIGNMENTS[2]),
        roi_align(**ALIGNMENTS[0], dynamic=True),
    ],
    ids=lambda workload: workload.label,
)
@pytest.mark.mostly_long(3)
def test_cpu_kernels_are_the_definition(device: CpuDevice, workload: Workload) -> None:
    arrays = example(workload)
    found = on_device(device, TEMPLATES[workload.op][1], workload, arrays)
    assert_equal(workload, found, expected(workload, arrays), 0 if workload.op == "nms" else tolerance(workload))


@pytest.mark.long
def test_verification_accepts_cpu_kernels(device: CpuDevice) -> None:
    for workload in (nms(**SUPPRESSIONS[1]), roi_align(**ALIGNMENTS[1], dynamic=True), roi_align(**ALIGNMENTS[2])):
        assert verdict(device, TEMPLATES[workload.op][1], workload) is None, workload.label


def test_verification_finds_a_kernel_with_other_samples(device: CpuDevice) -> None:
    workload = roi_align(**ALIGNMENTS[1])
    found = verdict(device, TEMPLATES["roi_align"][1], workload, workload.replace(sampling_ratio=3))
    assert found is not None and "elements are wrong" in found


class TestNmsCuda(TemplateContract):
    template, target = TEMPLATES["nms"][0], H200
    accepted = (
        nms(n=1, classes=80, boxes=1000, max_output=100, iou_threshold=0.5),
        nms(n=2, classes=1, boxes=6000, max_output=1000, iou_threshold=0.7, center_point_box=True),
    )
    refused = (
        (nms(n=1, classes=1, boxes=20000, max_output=10), "20000 boxes"),
        (nms(n=2, classes=400, boxes=16000, max_output=10), "bytes"),
    )


class TestNmsCpu(TemplateContract):
    template, target, compiled = TEMPLATES["nms"][1], detect("cpu"), 1
    accepted = (nms(n=1, classes=3, boxes=100, max_output=10),)


class TestRoiAlignCuda(TemplateContract):
    template, target = TEMPLATES["roi_align"][0], H200
    accepted = (
        roi_align(n=1, c=256, h=200, w=304, rois=1000, oh=7, ow=7, spatial_scale=0.25),
        roi_align(n=1, c=256, h=50, w=76, rois=100, oh=14, ow=14, dtype="float32", layout="NCHW", dynamic=True),
    )
    refused = ((roi_align(n=1, c=2**16, h=8, w=8, rois=2**16, oh=7, ow=7), "elements"),)


class TestRoiAlignCpu(TemplateContract):
    template, target, compiled = TEMPLATES["roi_align"][1], detect("cpu"), 1
    accepted = (roi_align(**REGIONS),)


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    large = [
        nms(n=1, classes=8, boxes=1000, max_output=100, iou_threshold=0.5),
        nms(n=1, classes=1, boxes=6000, max_output=1000, iou_threshold=0.7),
    ]
    for workload in (*(nms(**each) for each in SUPPRESSIONS), *large):
        template, arrays = TEMPLATES["nms"][0], example(workload)
        assert_equal(workload, on_device(gpu, template, workload, arrays), expected(workload, arrays))
        assert verdict(gpu, template, workload) is None, workload.label
    for shape in ALIGNMENTS:
        for workload in (roi_align(**shape), roi_align(**shape, dynamic=True)):
            template, arrays = TEMPLATES["roi_align"][0], example(workload)
            found = on_device(gpu, template, workload, arrays)
            assert_equal(workload, found, expected(workload, arrays), tolerance(workload))
            assert verdict(gpu, template, workload) is None, workload.label


@pytest.mark.gpu
def test_results_are_those_of_torchvision(gpu: Any) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    ops = pytest.importorskip("torchvision", reason="needs torchvision").ops
    rng = np.random.default_rng(3)
    low = rng.integers(0, 200, (2000, 2))
    boxes = np.concatenate([low, low + rng.integers(1, 60, (2000, 2))], axis=1).astype(np.float32)
    scores = rng.permutation(2000).astype(np.float32) / 2000
    workload = nms(n=1, classes=1, boxes=2000, max_output=2000, iou_threshold=0.5)
    found = on_device(
        gpu, TEMPLATES["nms"][0], workload, {"boxes": boxes[None, :, [1, 0, 3, 2]], "scores": scores[None, None]}
    )
    wanted = ops.nms(torch.from_numpy(boxes).cuda(), torch.from_numpy(scores).cuda(), 0.5)
    np.testing.assert_array_equal(found["y"][:, 2], wanted.cpu().numpy())
    for shape in (
        dict(REGIONS, c=16, layout="NCHW"),
        dict(REGIONS, c=16, sampling_ratio=2, layout="NCHW", spatial_scale=0.5),
    ):
        region = roi_align(**shape, dtype="float32")
        arrays = example(region)
        rows = np.concatenate([arrays["batch_indices"][:, None], arrays["rois"]], axis=1).astype(np.float32)
        wanted = ops.roi_align(
            torch.from_numpy(arrays["x"].astype(np.float32)).cuda(), torch.from_numpy(rows).cuda(), (region.oh, region.ow),
            region.spatial_scale, region.sampling_ratio or -1, aligned=True,
        )  # fmt: skip
        found = on_device(gpu, TEMPLATES["roi_align"][0], region, arrays)["y"]
        np.testing.assert_allclose(found, wanted.cpu().numpy(), rtol=2e-5, atol=2e-5)


# ---- ONNX

pytest.importorskip("onnx", reason="needs onnx")
CASES = node_cases("nonmaxsuppression", "roialign")


@pytest.mark.long
def test_cases_of_onnx(device: CpuDevice) -> None:
    seen = []
    for name, case in CASES.items():
        inputs, (y,) = arrays_of(case)
        given = attributes(case.model.graph.node[0])
        if "roialign" in name:
            x, rois, batch = inputs
            n, c, h, w = x.shape
            workload = roi_align(
                n=n, c=c, h=h, w=w, rois=len(rois), oh=given["output_height"], ow=given["output_width"],
                mode={"avg": "average"}.get(given.get("mode", "avg"), "max"), sampling_ratio=given.get("sampling_ratio", 0),
                spatial_scale=given.get("spatial_scale", 1.0), dtype="float32", layout="NCHW",
                coordinates=given.get("coordinate_transformation_mode", "half_pixel"),
            )  # fmt: skip
            found = on_device(device, TEMPLATES["roi_align"][1], workload, {"x": x, "rois": rois, "batch_indices": batch})
            np.testing.assert_allclose(found["y"], y, rtol=1e-4, atol=1e-4, err_msg=name)
        else:
            boxes, scores, *numbers = inputs
            most, iou, score = ([each.reshape(-1)[0].item() for each in numbers] + [0, 0.0, None])[:3]
            options = {} if score is None else {"score_threshold": score}
            n, classes, count = scores.shape
            workload = nms(
                n=n, classes=classes, boxes=count, max_output=most, iou_threshold=iou,
                center_point_box=bool(given.get("center_point_box", 0)), **options,
            )  # fmt: skip
            found = on_device(device, TEMPLATES["nms"][1], workload, {"boxes": boxes, "scores": scores})
            np.testing.assert_array_equal(found["y"], y, err_msg=name)
            np.testing.assert_array_equal(expected(workload, {"boxes": boxes, "scores": scores})["y"], y, err_msg=name)
        seen.append(name)
    assert sum("nonmax" in name for name in seen) >= 9 and sum("roialign" in name for name in seen) == 3, seen
