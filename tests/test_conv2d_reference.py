"""The reference of conv2d: its kernel and its NumPy points are compared with an independent convolution."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conv2d_numpy import CURVES, FLOAT_STAGES, numpy_conv2d
from conv2d_support import as_dtype, integer_arguments, run_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch.backend import compile_source
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS
from schedsearch.template import load_reference
from schedsearch.workload import Workload

REFERENCE = load_reference("conv2d")
SCALARS = {"leaky_relu_slope": 0.25, "clip_min": -5.0, "clip_max": 20.0}

SHAPES = {
    "plain": {"n": 2, "h": 9, "w": 8, "c": 5, "k": 6, "r": 3, "s": 3, "padding": 1},
    "asymmetric padding, strides, dilation": {
        "n": 1,
        "h": 11,
        "w": 13,
        "c": 4,
        "k": 7,
        "r": 3,
        "s": 2,
        "padding": (2, 0, 1, 3),
        "stride": (2, 3),
        "dilation": (2, 1),
    },
    "groups": {"n": 2, "h": 6, "w": 7, "c": 8, "k": 12, "r": 1, "s": 3, "groups": 4, "padding": (0, 1)},
    "depthwise": {"n": 1, "h": 7, "w": 7, "c": 9, "k": 9, "r": 3, "s": 3, "groups": 9, "padding": 1},
    "channel multiplier": {"n": 1, "h": 5, "w": 5, "c": 3, "k": 6, "r": 3, "s": 3, "groups": 3},
    "one pixel": {"n": 1, "h": 3, "w": 3, "c": 2, "k": 1, "r": 3, "s": 3},
}


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(detect("cpu"))
    yield device
    device.close()


def computed(device: CpuDevice, workload: Workload, arrays, scalars=None):  # type: ignore[no-untyped-def]
    given = {scalar.name: scalar.default for scalar in workload.scalars} | (scalars or {})
    shape = workload.output.shape
    results = run_on_cpu(
        device,
        REFERENCE.kernel(workload, device.target),
        arrays,
        {"y": (shape, np.float64), "magnitude_of_y": (shape, np.float64)},
        given,
    )
    return results["y"], results["magnitude_of_y"]


@pytest.mark.parametrize(
    "shape, layouts",
    [
        *((shape, ("NHWC", "OHWI")) for shape in SHAPES.values()),
        *((shape, ("NCHW", "OIHW")) for shape in SHAPES.values()),
        (SHAPES["groups"], ("NCHW", "OHWI")),
    ],
)
@pytest.mark.mostly_long(8)
def test_the_cpu_kernel_and_the_points_agree_with_numpy(device, shape, layouts):
    workload = Workload.conv2d(**shape, dtype="float32", layout=layouts[0], weight_layout=layouts[1])
    arrays = integer_arguments(workload)
    expected = numpy_conv2d(workload, arrays)
    y, magnitude = computed(device, workload, arrays)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(magnitude, numpy_conv2d(workload, arrays, absolute=True))
    everywhere = np.arange(expected.size)
    np.testing.assert_array_equal(REFERENCE.points(workload, arrays, {}, everywhere), expected.reshape(-1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.mostly_long(3)
def test_every_dtype_is_read_exactly(device, dtype):
    workload = Workload.conv2d(n=1, h=6, w=5, c=4, k=5, r=3, s=3, padding=1, dtype=dtype, epilogue=("bias", "residual"))
    arrays = integer_arguments(workload)
    expected = numpy_conv2d(workload, arrays)
    np.testing.assert_array_equal(computed(device, workload, arrays)[0], expected)
    np.testing.assert_array_equal(REFERENCE.points(workload, arrays, {}, [0, 7, 3]), expected.reshape(-1)[[0, 7, 3]])


@pytest.mark.parametrize(
    "epilogue, layout",
    [
        *(((stage,), "NHWC") for stage in FLOAT_STAGES),
        (("bias", "relu", "residual", "relu"), "NCHW"),
        (("residual", "leaky_relu", "scale_shift", "bias", "clip"), "NCHW"),
        (("clip", "scale_shift", "leaky_relu"), "NHWC"),
    ],
)
@pytest.mark.mostly_long(8)
def test_epilogue_stages_apply_in_order(device, epilogue, layout):
    workload = Workload.conv2d(n=2, h=5, w=6, c=3, k=6, r=3, s=3, dtype="float32", layout=layout, epilogue=epilogue)
    arrays = integer_arguments(workload)
    given = {scalar.name: SCALARS[scalar.name] for scalar in workload.scalars}
    expected = numpy_conv2d(workload, arrays, given)
    y, magnitude = computed(device, workload, arrays, given)
    # Without a curve everything is exact.
    rounding = 1e-14 * max(1.0, np.abs(expected).max()) if CURVES & set(epilogue) else 0.0
    np.testing.assert_allclose(y, expected, rtol=0, atol=rounding)
    assert (magnitude >= np.abs(np.where(np.isin(expected, [SCALARS["clip_min"], SCALARS["clip_max"]]), 0, expected))).all()
    points = REFERENCE.points(workload, arrays, given, np.arange(expected.size))
    np.testing.assert_allclose(points, expected.reshape(-1), rtol=0, atol=rounding)


def test_the_magnitude_adds_and_multiplies_absolute_values(device):
    # One product, by hand: |2 * -3| = 6; then bias -4: 10; scale -2, shift 1: 21; residual -5: 26; slope -3: 78.
    workload = Workload.conv2d(
        n=1, h=1, w=1, c=1, k=1, r=1, s=1, dtype="float32", epilogue=("bias", "scale_shift", "residual", "leaky_relu")
    )
    values = {"x": 2, "weight": -3, "bias": -4, "scale": -2, "shift": 1, "residual": -5}
    arrays = {arg.name: as_dtype(np.full(arg.shape, values[arg.name]), "float32") for arg in workload.signature}
    y, magnitude = computed(device, workload, arrays, {"leaky_relu_slope": -3.0})
    assert (y.item(), magnitude.item()) == (16.0, 78.0)  # (-10 * -2 + 1) - 5


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_points_of_random_real_numbers(seed):
    workload = Workload.conv2d(n=2, h=8, w=8, c=6, k=4, r=3, s=3, padding=1, groups=2, dtype="float16", epilogue=("bias",))
    rng = np.random.default_rng(seed)
    arrays = {arg.name: rng.standard_normal(arg.shape).astype(np.float16) for arg in workload.signature}
    indices = rng.integers(0, workload.output.size, 50)
    np.testing.assert_allclose(
        REFERENCE.points(workload, arrays, {}, indices), numpy_conv2d(workload, arrays).reshape(-1)[indices], rtol=1e-12
    )


def test_points_of_arrays_that_fill_the_memory():
    """2 TB of pixels, all with the same two in memory."""
    workload = Workload.conv2d(n=1_000_000, h=512, w=512, c=4, k=1, r=1, s=1, dtype="bfloat16")
    two = np.array(0x4000, dtype=np.uint16)
    arrays = {"x": np.broadcast_to(two, (1_000_000, 512, 512, 4)), "weight": np.broadcast_to(two, (1, 1, 1, 4))}
    assert REFERENCE.points(workload, arrays, {}, [0, 512**2 * 999_999]).tolist() == [16.0, 16.0]


def test_points_are_computed_in_bounded_pieces():
    """512 channels at every pixel at once would need 1.8 GB."""
    workload = Workload.conv2d(n=1, h=14, w=14, c=512, k=64, r=3, s=3, padding=1, dtype="float32")
    arrays = integer_arguments(workload)
    indices = np.arange(0, workload.output.size, 13)
    expected = numpy_conv2d(workload, arrays).reshape(-1)[indices]
    np.testing.assert_array_equal(REFERENCE.points(workload, arrays, {}, indices), expected)
    assert REFERENCE.points(workload, arrays, {}, []).shape == (0,)


@pytest.mark.parametrize("preset", ["a100", "h200"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.mostly_long(10)
def test_the_cuda_kernel_compiles_without_a_gpu(preset, dtype):
    pytest.importorskip("numba.cuda.extending", reason="needs the extra cu12 or cu13")
    workload = Workload.conv2d(**SHAPES["groups"], dtype=dtype, epilogue=("bias", "residual", "clip"))
    target = PRESETS[preset]
    result = compile_source(REFERENCE.kernel(workload, target), target)
    assert result.artifact.plan.kind == "cuda"
    assert result.resources.spill_bytes == 0


def test_the_cuda_grid_never_overflows():
    workload = Workload.conv2d(n=100_000, h=14, w=14, c=64, k=512, r=1, s=1)
    (step,) = REFERENCE.kernel(workload, PRESETS["h200"]).steps
    assert step.grid.blocks(sms=132) * step.block_threads < workload.output.size
    assert step.params[-1].value == workload.output.size // 4  # the threads loop over items
