"""resize: the operator, its reference and templates, against ONNX's node cases and numbers computed by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, default, emulated, node_cases, on_cpu, verdict

from schedsearch import Workload, resize
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.resize import COORDINATES, RESIZE, ROUNDINGS
from schedsearch.template import load_reference, load_template
from schedsearch.templates.resize import axes, windows
from schedsearch.templates.resize import cuda as cuda_template
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

CUDA, CPU = load_template("resize_cuda"), load_template("resize_cpu")
IMAGE = {"n": 1, "c": 8, "h": 4, "w": 5, "oh": 8, "ow": 10}


class TestResize(OpContract):
    op = RESIZE
    examples = (
        IMAGE,
        {**IMAGE, "mode": "linear", "coordinates": "align_corners", "layout": "NCHW", "dtype": "float32"},
        {**IMAGE, "oh": 3, "rounding": "ceil", "scale": [0.9, 2], "dtype": "uint8", "layout": "NCHW4c"},
        {**IMAGE, "slice_of": [*resize(**IMAGE).output.shape[:3], 40]},
    )
    wrong = (
        ({**IMAGE, "oh": 0}, "oh"),
        ({**IMAGE, "mode": "cubic"}, "mode"),
        ({**IMAGE, "mode": "linear", "dtype": "int8"}, "dtype"),
        ({**IMAGE, "scale": [1]}, "scale"),
        ({**IMAGE, "scale": [-1, 1]}, "scale"),
        ({**IMAGE, "layout": "HWC"}, "layout"),
        ({**IMAGE, "ow": 2**30, "scale": [2, 1e-4]}, "ow"),
    )
    ids: ClassVar = {
        "97f3998f0e4f351220e7265358fc63e648957efad2bc52d0e237400f25fa0200": IMAGE,
        "c25a631c55f9abaf4129cfe2639a10b481c2e7116544b2309bb5a8418deac08e": {
            **IMAGE,
            "oh": 3,
            "rounding": "ceil",
            "scale": [0.9, 2],
        },
    }

    def test_a_scale_that_says_nothing_new_is_not_part_of_the_identity(self) -> None:
        assert resize(**IMAGE, scale=(2.0, 2.0)).id == resize(**IMAGE).id == resize(**IMAGE, scale=(2, 2)).id
        assert resize(**{**IMAGE, "oh": 12}, scale=(3.1, 2)).id != resize(**{**IMAGE, "oh": 12}).id


def pixels(**changes: Any) -> list[float]:
    """y of a row whose pixels are their own places."""
    workload = resize(n=1, c=1, h=1, oh=1, dtype="float32", **{"w": 4, **changes})
    x = np.arange(workload.w, dtype=float).reshape(1, 1, -1, 1)
    return load_reference("resize").points(workload, {"x": x}, {}, np.arange(workload.ow), "y").tolist()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(ow=8), [0, 0, 1, 1, 2, 2, 3, 3]),
        (dict(ow=8, mode="linear"), [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]),
        (dict(ow=8, mode="linear", coordinates="asymmetric"), [0, 0.5, 1, 1.5, 2, 2.5, 3, 3]),
        (dict(ow=7, mode="linear", coordinates="align_corners"), [0, 0.5, 1, 1.5, 2, 2.5, 3]),
        (dict(ow=8, coordinates="asymmetric"), [0, 0, 1, 1, 2, 2, 3, 3]),
        (dict(ow=8, coordinates="asymmetric", rounding="round_prefer_ceil"), [0, 1, 1, 2, 2, 3, 3, 3]),
        (dict(ow=8, coordinates="asymmetric", rounding="ceil"), [0, 1, 1, 2, 2, 3, 3, 3]),
        (dict(ow=2, rounding="floor"), [0, 2]),
        (dict(ow=1, mode="linear"), [1.5]),
        (dict(ow=1, mode="linear", coordinates="pytorch_half_pixel"), [0]),
    ],
    ids=str,
)
def test_numbers_computed_by_hand(changes: dict[str, Any], expected: list[float]) -> None:
    assert pixels(**changes) == expected


SHAPES: list[dict[str, Any]] = [
    dict(IMAGE),
    dict(IMAGE, mode="linear", layout="NCHW", dtype="float32"),
    dict(IMAGE, n=2, c=6, oh=3, ow=12, mode="linear", coordinates="align_corners", dtype="bfloat16"),
    dict(IMAGE, oh=7, ow=3, rounding="round_prefer_ceil", dtype="uint8", layout="NCHW4c"),
    dict(IMAGE, oh=3, ow=12, scale=(0.9, 2.5), coordinates="asymmetric", dtype="int8", layout="NCHW"),
    dict(IMAGE, w=8, ow=16, mode="linear", layout="NCHW", dtype="float16"),
    dict(IMAGE, w=12, oh=5, ow=36, mode="linear", layout="NCHW", dtype="bfloat16", coordinates="asymmetric"),
    dict(IMAGE, w=8, oh=9, ow=32, mode="linear", layout="NCHW", dtype="float32"),
    dict(IMAGE, w=12, oh=5, ow=16, mode="linear", layout="NCHW", dtype="float16"),  # three pixels make four
    dict(IMAGE, oh=1, ow=11, mode="linear", coordinates="pytorch_half_pixel", scale=(0.25, 2.3)),
]


def example(workload: Workload) -> tuple[dict[str, Any], Any]:
    """Random integers, and y by the definition, which other tests compare with ONNX."""
    rng = np.random.default_rng(0)
    x = rng.integers(0 if workload.dtype == "uint8" else -100, 101, workload.signature[0].shape)
    y = load_reference("resize").points(workload, {"x": x}, {}, np.arange(workload.output.size), "y")
    return {"x": x}, decode(encode(y, workload.dtype), workload.dtype).reshape(workload.output.shape)


def assert_close(workload: Workload, found: Any, expected: Any) -> None:
    rounding = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}[workload.dtype] if workload.mode == "linear" else 0
    np.testing.assert_allclose(
        found.astype(float), expected.astype(float), rtol=rounding, atol=20 * rounding, err_msg=workload.label
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.mostly_long(3)
def test_emulated_kernels_are_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    workload = resize(**shape)
    arrays, expected = example(workload)
    space = CUDA.space(workload, H200)
    widest = {"vector": space.values["vector"][-1], "threads": 64, "reads": "each"}
    configs = {Config(widest, tile=space.values["tile"][-1]), default(CUDA, workload, H200)}
    configs |= {
        Config(widest, tile=tile, reads=reads) for tile in space.values["tile"] for reads in space.values["reads"][1:]
    }
    for config in configs:
        if not space.check(config):
            found = emulated(monkeypatch, CUDA, workload, arrays, config, cuda_template, axes, windows)
            assert_close(workload, found, expected)


@pytest.mark.parametrize(
    ("sizes", "tile", "expected"),
    [  # first, step, count, leading, vector, vectors
        (dict(w=320, ow=640), 8, (-1, 4, 6, 1, 4, 1)),  # pixels -1 to 4 of x for 0 to 7 of y, 0 to 3 as a vector
        (dict(w=320, ow=640, coordinates="asymmetric"), 8, (0, 4, 5, 0, 4, 1)),
        (dict(w=320, ow=1280), 8, (-1, 2, 4, 1, 2, 1)),
        (dict(w=300, ow=400), 8, None),  # the last tile of a row ends inside of a vector
    ],
)
def test_tiles_of_a_row_share_a_window_of_x(sizes: dict[str, Any], tile: int, expected: tuple[int, ...] | None) -> None:
    found = windows.Window.of(resize(n=1, c=1, h=4, oh=8, mode="linear", layout="NCHW", **sizes), tile)
    got = found and (found.first, found.step, found.count, found.leading, found.vector, found.vectors)
    assert expected is None or got == expected


def test_cpu_kernels_are_the_definition(device: CpuDevice) -> None:
    for shape in (SHAPES[2], SHAPES[4]):
        workload = resize(**shape)
        arrays, expected = example(workload)
        assert_close(workload, on_cpu(device, CPU, workload, arrays), expected)


def test_verification_accepts_cpu_kernels(device: CpuDevice) -> None:
    for shape in (SHAPES[0], SHAPES[1]):
        workload = resize(**shape)
        assert verdict(device, CPU, workload) is None, workload.label


class TestCpuContract(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = (resize(**IMAGE), resize(**IMAGE, mode="linear"))


class TestCudaContract(TemplateContract):
    template, target, compiled = CUDA, H200, 2
    accepted = (
        resize(n=1, c=128, h=180, w=320, oh=360, ow=640, mode="linear"),
        resize(n=1, c=128, h=180, w=320, oh=360, ow=640, layout="NCHW"),
    )
    refused = ((resize(n=1, c=128, h=8, w=8, oh=8192, ow=8192), "elements"),)


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for shape in SHAPES:
        workload = resize(**shape)
        arrays, expected = example(workload)
        assert_close(workload, on_cpu(gpu, CUDA, workload, arrays), expected)


# ---- ONNX


def workload_of(case: Any, inputs: list[Any], y: Any) -> Workload | None:
    """The case's only node as a workload; None if it has another mode, or resizes other axes."""
    (node,) = case.model.graph.node
    given, x = attributes(node), inputs[0]
    names = [name for name in node.input if name]
    scales = dict(zip(names, inputs)).get("scales")
    coordinates, mode = given.get("coordinate_transformation_mode", "half_pixel"), given.get("mode", "nearest")
    other = coordinates not in COORDINATES or mode == "cubic" or given.get("antialias") or "axes" in given
    # With align_corners and scales, ONNX's own reference divides by 4 * 0.6 - 1 where y has 2 pixels; runtimes, by 2 - 1.
    other = other or (coordinates == "align_corners" and scales is not None and bool(np.any(scales % 1)))
    if other or x.ndim != 4 or given.get("keep_aspect_ratio_policy", "stretch") != "stretch" or x.shape[:2] != y.shape[:2]:
        return None
    n, c, h, w = x.shape
    rounding = given.get("nearest_mode", "round_prefer_floor")
    return resize(
        n=n, c=c, h=h, w=w, oh=y.shape[2], ow=y.shape[3], mode=mode, coordinates=coordinates, rounding=rounding,
        scale=() if scales is None else [float(each) for each in scales[2:]], dtype="float32", layout="NCHW",
    )  # fmt: skip


def test_cases_of_onnx() -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    seen = set()
    for case in node_cases("resize").values():
        inputs, (y,) = arrays_of(case)
        workload = workload_of(case, inputs, y) if len(case.model.graph.node) == 1 else None
        if workload is not None:
            found = load_reference("resize").points(workload, {"x": inputs[0]}, {}, np.arange(y.size), "y")
            np.testing.assert_allclose(found.reshape(y.shape), y, rtol=1e-5, atol=1e-5, err_msg=case.name)
            seen |= {workload.mode, workload.coordinates, workload.rounding}
    assert seen >= {"nearest", "linear", *COORDINATES[:1], "align_corners", "asymmetric", *ROUNDINGS[:1], "floor", "ceil"}
