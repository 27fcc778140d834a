"""pool2d: the operator, its reference, and its templates, against windows in NumPy and ONNX's node cases."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, default, emulated, node_cases, on_cpu, verdict

from schedsearch import Workload, pool2d
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.layout import Layout
from schedsearch.ops.pool2d import POOL2D
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_reference, load_template
from schedsearch.templates.parts import planes
from schedsearch.templates.pool2d import cuda_kernel, cuda_planes
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

IMAGE = {"n": 2, "c": 5, "h": 7, "w": 6, "r": 3, "s": 2}
CUDA, CPU, PLANES = (load_template(f"pool2d_{name}") for name in ("cuda", "cpu", "planes_cuda"))
GLOBAL = pool2d(n=32, c=2048, h=7, w=7, r=7, s=7, mode="average")


class TestPool2d(OpContract):
    op = POOL2D
    examples = (
        IMAGE,
        {**IMAGE, "stride": 2, "padding": [1, 0, 2, 1], "ceil_mode": True, "layout": "NCHW"},
        {**IMAGE, "mode": "average", "padding": 1, "count_include_pad": True, "dtype": "float32"},
        {**IMAGE, "mode": "average", "dilation": [1, 2], "dtype": "uint8", "layout": "NCHW4c"},
        {**IMAGE, "slice_of": [*pool2d(**IMAGE).output.shape[:3], 40]},
    )
    wrong = (
        ({**IMAGE, "r": 8}, "r"),
        ({**IMAGE, "padding": [3, 0, 0, 0]}, "padding"),
        ({**IMAGE, "h": 1, "r": 2, "dilation": 2, "padding": 1}, "padding"),
        ({**IMAGE, "mode": "sum"}, "mode"),
        ({**IMAGE, "count_include_pad": True, "padding": 1}, "count_include_pad"),
        ({**IMAGE, "layout": "NHWC4c"}, "layout"),
        ({**IMAGE, "dtype": "int32"}, "dtype"),
        ({**IMAGE, "ceil_mode": 1}, "ceil_mode"),
        ({**IMAGE, "h": 300, "w": 300, "r": 300, "s": 300, "mode": "average", "dtype": "int8"}, "r"),
    )
    ids: ClassVar = {
        "2eeedc5cf677df2ce996c9deede490bf28db14c344f2d0e6115177b20126928a": IMAGE,
        "e3da2eebbc0e0ac70725bf1507659d89a679251993c1313d754b07924fe32c25": {
            **IMAGE,
            "mode": "average",
            "padding": 1,
            "count_include_pad": True,
            "dtype": "float32",
        },
    }

    def test_options_that_change_nothing_are_not_part_of_the_identity(self) -> None:
        plain = pool2d(**IMAGE, mode="average")
        assert pool2d(**IMAGE, mode="average", ceil_mode=True, count_include_pad=True).id == plain.id
        assert pool2d(**{**IMAGE, "h": 8}, stride=2, ceil_mode=True).output.shape == (2, 4, 3, 5)

    def test_a_window_that_starts_behind_the_image_is_left_out(self) -> None:
        """PyTorch's rule: 4 pixels and 1 of padding on each side, windows of 1 pixel from -1, 2 and 5."""
        assert pool2d(n=1, c=1, h=4, w=4, r=2, s=2, stride=3, padding=1, ceil_mode=True).output.shape == (1, 2, 2, 1)


def windows(p: Workload, x: Any) -> Any:
    """y in NumPy, float64, from x in the order NCHW: slices of the padded image for one window after the other."""
    top, left, bottom, right = p.padding
    fill = -np.inf if p.mode == "max" else 0.0
    beyond = 64  # positions behind the padding, for ceil_mode
    around = ((0, 0), (0, 0), (top, bottom + beyond), (left, right + beyond))
    image = np.pad(x.astype(np.float64), around, constant_values=fill)
    ones = np.pad(np.ones(x.shape[2:]), around[2:], constant_values=0.0)
    if p.count_include_pad:
        ones[: p.h + top + bottom, : p.w + left + right] = 1
    order = Layout.parse(p.layout)
    sizes = dict(zip(order.axes, p.output.shape))
    y = np.empty((p.n, p.c, sizes["H"], sizes["W"]))
    for row, column in np.ndindex(*y.shape[2:]):
        h, w = row * p.stride[0], column * p.stride[1]
        at = np.s_[
            h : h + (p.r - 1) * p.dilation[0] + 1 : p.dilation[0], w : w + (p.s - 1) * p.dilation[1] + 1 : p.dilation[1]
        ]
        if p.mode == "max":
            y[:, :, row, column] = image[:, :, *at].max(axis=(2, 3))
        else:
            y[:, :, row, column] = image[:, :, *at].sum(axis=(2, 3)) / ones[at].sum()
    return y


def example(p: Workload, seed: int = 0) -> tuple[dict[str, Any], Any]:
    """Random integers in the workload's layout, and what y must be, rounded."""
    rng = np.random.default_rng(seed)
    low = 0 if p.dtype == "uint8" else -100
    x = rng.integers(low, 101, (p.n, p.c, p.h, p.w))
    layout = Layout.parse(p.layout)
    rounded = decode(encode(windows(p, x).astype(np.float32), p.dtype), p.dtype)
    return {"x": layout.pack(x, "NCHW")}, layout.pack(rounded, "NCHW")


SHAPES: list[dict[str, Any]] = [
    dict(IMAGE, padding=1),
    dict(IMAGE, mode="average", stride=2, padding=[1, 0, 2, 1], ceil_mode=True, layout="NCHW", dtype="float32"),
    dict(IMAGE, c=16, mode="average", padding=1, count_include_pad=True, stride=(2, 1), ceil_mode=True),
    dict(IMAGE, c=8, dilation=(2, 3), padding=(1, 2), stride=2, dtype="bfloat16"),
    dict(IMAGE, c=8, mode="average", padding=1, stride=2, dtype="int8", layout="NCHW4c"),
    dict(IMAGE, w=9, s=5, padding=(0, 4), stride=2, dtype="uint8", layout="NCHW"),
    dict(n=2, c=24, h=5, w=6, r=5, s=6, mode="average"),
    dict(n=1, c=6, h=9, w=7, r=9, s=7, mode="average", layout="NCHW", dtype="uint8"),
    dict(n=1, c=3, h=1, w=131, r=1, s=131, layout="NCHW", dtype="bfloat16"),
    dict(n=1, c=4, h=9, w=9, r=7, s=7, padding=3, stride=5, dtype="float32"),
]


# ---- the reference and the CPU


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.mostly_long(6)
def test_a_cpu_kernel_is_the_definition(device: CpuDevice, shape: dict[str, Any]) -> None:
    workload = pool2d(**shape)
    arrays, expected = example(workload)
    np.testing.assert_array_equal(on_cpu(device, CPU, workload, arrays), expected)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[4]], ids=str)
@pytest.mark.mostly_long(3)
def test_verification_accepts_a_cpu_kernel(device: CpuDevice, shape: dict[str, Any]) -> None:
    """So both forms of the reference agree with it, and with each other."""
    assert verdict(device, CPU, pool2d(**shape)) is None


def test_the_reference_is_the_definition() -> None:
    for shape in SHAPES:
        workload = pool2d(**shape)
        arrays, expected = example(workload)
        found = load_reference("pool2d").points(workload, arrays, {}, np.arange(workload.output.size), "y")
        np.testing.assert_array_equal(decode(encode(found, workload.dtype), workload.dtype), expected.reshape(-1))


@pytest.mark.parametrize("mode", ["max", "average"])
@pytest.mark.mostly_long(2)
def test_a_nan_stays(device: CpuDevice, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    workload = pool2d(n=1, c=1, h=2, w=4, r=2, s=2, stride=2, mode=mode, dtype="float32")
    x = np.array([1, 2, 3, np.nan, 5, 6, 7, 8], np.float32).reshape(1, 2, 4, 1)
    config = default(CUDA, workload, H200)
    for found in (
        on_cpu(device, CPU, workload, {"x": x}),
        emulated(monkeypatch, CUDA, workload, {"x": x}, config, cuda_kernel),
    ):
        assert found.reshape(-1).tolist()[0] == (6 if mode == "max" else 3.5)
        assert np.isnan(found.reshape(-1)[1])


@pytest.mark.parametrize("mode", ["max", "average"])
def test_a_nan_of_a_whole_plane_stays(device: CpuDevice, mode: str) -> None:
    x = np.ones((1, 40, 1, 70), np.float32)
    x[0, range(40), 0, range(30, 70)] = np.nan  # at another pixel of each plane
    workload = pool2d(n=1, c=40, h=1, w=70, r=1, s=70, mode=mode, dtype="float32", layout="NCHW")
    assert np.isnan(on_cpu(device, CPU, workload, {"x": x})).all()


class TestCpuContract(TemplateContract):
    template, target = CPU, detect("cpu")
    accepted = (pool2d(**IMAGE, padding=1), GLOBAL.replace(n=1))


# ---- GPUs


class TestCudaContract(TemplateContract):
    template, target, compiled = CUDA, H200, 3
    accepted = (pool2d(n=32, c=64, h=112, w=112, r=3, s=3, stride=2, padding=1), GLOBAL, GLOBAL.replace(n=1, layout="NCHW"))
    refused = ((pool2d(n=2**20, c=64, h=64, w=64, r=1, s=1), "elements"),)

    def test_older_devices_are_refused(self) -> None:
        turing = Target("cuda", "Tesla T4", (7, 5), 40, 65536, 65536, 65536, 1024)
        assert "8.0" in str(CUDA.validate(GLOBAL, turing))


class TestCudaPlanesContract(TemplateContract):
    template, target, compiled = PLANES, H200, 2
    accepted = (
        pool2d(n=32, c=64, h=112, w=112, r=3, s=3, stride=2, padding=1, layout="NCHW"),
        GLOBAL.replace(layout="NCHW"),
    )
    refused = (
        (GLOBAL, "NCHW"),
        (pool2d(n=1, c=64, h=9, w=9, r=9, s=9, layout="NCHW"), "81 pixels"),
        (pool2d(n=1, c=64, h=300, w=300, r=3, s=3, layout="NCHW"), "180000 bytes"),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_emulated_kernel_is_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    workload = pool2d(**shape)
    arrays, expected = example(workload)
    space = CUDA.space(workload, H200)
    values = {knob.name: knob.values for knob in space.knobs}
    most = {name: values[name][-1] for name in ("vector", "tile")}
    tiled = next(each for rows in (2, 1) if not space.check(each := Config(**most, rows=rows, splits=1, threads=64)))
    shared = Config(vector=values["vector"][0], rows=1, tile=1, splits=values["splits"][-1], threads=64)
    for config in {tiled, shared, default(CUDA, workload, H200)}:
        found = emulated(monkeypatch, CUDA, workload, arrays, config, cuda_kernel)
        rounding = 2e-7 if workload.mode == "average" and workload.dtype == "float32" else 0  # of the reciprocal
        np.testing.assert_allclose(found, expected, rtol=rounding, err_msg=str(dict(config)))


IN_PLANES: list[dict[str, Any]] = [
    dict(IMAGE, n=3, h=9, w=9, s=3, padding=1, stride=2, layout="NCHW"),
    dict(IMAGE, mode="average", stride=(1, 2), padding=[1, 0, 2, 1], ceil_mode=True, layout="NCHW", dtype="float32"),
    dict(IMAGE, c=8, h=9, dilation=(2, 3), padding=(1, 2), stride=2, dtype="bfloat16", layout="NCHW"),
    dict(IMAGE, w=9, s=5, padding=(0, 4), stride=2, dtype="uint8", layout="NCHW"),
    dict(n=3, c=11, h=5, w=5, r=5, s=5, mode="average", layout="NCHW"),
]


@pytest.mark.parametrize("shape", IN_PLANES, ids=str)
def test_planes_in_shared_memory_are_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    """The last block has fewer planes than the others, and the last strip of a column fewer rows."""
    workload = pool2d(**shape)
    arrays, expected = example(workload)
    space = PLANES.space(workload, H200)
    several = Config(planes=space.knobs[0].values[0], rows=space.knobs[1].values[-1], threads=64)
    for config in {several, default(PLANES, workload, H200)}:
        found = emulated(monkeypatch, PLANES, workload, arrays, config, cuda_kernel, cuda_planes, planes)
        np.testing.assert_allclose(found, expected, rtol=2e-7 if workload.dtype == "float32" else 0, err_msg=str(config))


def test_defaults_share_windows_where_there_are_few() -> None:
    assert default(CUDA, GLOBAL.replace(n=1), H200)["splits"] == 16
    assert default(CUDA, GLOBAL.replace(n=1024), H200)["splits"] == 1
    assert default(CUDA, pool2d(n=32, c=64, h=112, w=112, r=3, s=3, stride=2, padding=1), H200)["vector"] == 8


@pytest.mark.long
def test_default_kernels_need_no_local_memory() -> None:
    average = pool2d(n=32, c=192, h=35, w=35, r=3, s=3, padding=1, mode="average")
    assert dict(default(CUDA, average, H200)) == {"vector": 8, "rows": 2, "tile": 2, "splits": 1, "threads": 128}
    for template, workload in ((CUDA, average), (CUDA, GLOBAL), (PLANES, TestCudaPlanesContract.accepted[0])):
        for target in (H200, PRESETS["a100"]):
            source = template.kernel(workload, target, default(template, workload, target))
            resources = compile_source(source, target).resources
            assert resources.local_bytes == resources.spill_bytes == 0, workload.label


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for template, shape in [*((CUDA, each) for each in SHAPES), *((PLANES, each) for each in IN_PLANES)]:
        workload = pool2d(**shape)
        arrays, expected = example(workload)
        np.testing.assert_allclose(on_cpu(gpu, template, workload, arrays), expected, rtol=2e-7, err_msg=workload.label)


# ---- ONNX

pytest.importorskip("onnx", reason="needs onnx")
LEAST_CASES = {"MaxPool": 9, "AveragePool": 9, "GlobalMaxPool": 2, "GlobalAveragePool": 2}


def cases(op: str) -> dict[str, Any]:
    """Those of images. Making the cases takes seconds, so they are made by the tests that need them."""
    return {
        name: case
        for name, case in node_cases(op.lower()).items()
        if len(case.model.graph.node) == 1
        and len(case.model.graph.node[0].output) == 1
        and len(case.model.graph.input[0].type.tensor_type.shape.dim) == 4
    }


def workload_of(case: Any, x: Any, y: Any) -> Workload:
    """The case's only node as a workload. SAME pads so that y has ceil(size / stride) pixels."""
    node = case.model.graph.node[0]
    given = attributes(node)
    n, c, h, w = x.shape
    mode = "max" if "Max" in node.op_type else "average"
    shape: dict[str, Any] = dict(n=n, c=c, h=h, w=w, mode=mode, dtype=str(x.dtype), layout="NCHW")
    if node.op_type.startswith("Global"):
        return pool2d(**shape, r=h, s=w)
    r, s = given["kernel_shape"]
    stride, dilation, pads = given.get("strides", (1, 1)), given.get("dilations", (1, 1)), given.get("pads", (0, 0, 0, 0))
    if given.get("auto_pad", "NOTSET").startswith("SAME"):
        sides = [
            max((out - 1) * step + (kernel - 1) * apart + 1 - size, 0)
            for out, step, kernel, apart, size in zip(y.shape[2:], stride, (r, s), dilation, (h, w))
        ]
        less, more = [side // 2 for side in sides], [side - side // 2 for side in sides]
        pads = [*less, *more] if given["auto_pad"] == "SAME_UPPER" else [*more, *less]
    return pool2d(
        **shape, r=r, s=s, stride=stride, dilation=dilation, padding=pads, ceil_mode=bool(given.get("ceil_mode", 0)),
        count_include_pad=bool(given.get("count_include_pad", 0)),
    )  # fmt: skip


@pytest.mark.parametrize("op", LEAST_CASES)
def test_the_cases_of_onnx(op: str) -> None:
    every = cases(op)
    assert len(every) >= LEAST_CASES[op]
    for name, case in every.items():
        (x, *_), (y,) = arrays_of(case)
        workload = workload_of(case, x, y)
        assert workload.output.shape == y.shape, name
        found = load_reference("pool2d").points(workload, {"x": x}, {}, np.arange(y.size), "y").reshape(y.shape)
        tolerance = 1e-6 if "starts_on_pad" not in name else 5.6e-5  # 4 digits
        np.testing.assert_allclose(found, y, rtol=1e-6, atol=tolerance, err_msg=name)
