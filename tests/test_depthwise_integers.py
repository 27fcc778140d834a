"""depthwise_conv2d of int8 and uint8 is exact: the reference, the CPU's kernel, and the GPU's, emulated with its PTX."""

from __future__ import annotations

from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_support import run_on_cpu
from depthwise_cuda_support import H200, KERNEL_MODULES
from long_cases import except_long
from ptx_emulator import PtxEmulator

from schedsearch import WorkloadError
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.constructors.convolutions import depthwise_conv2d
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.template import load_reference, load_template
from schedsearch.templates.depthwise_conv2d.convolution import as_convolution
from schedsearch.templates.parts import epilogue
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

CPU, CUDA = load_template("depthwise_conv2d_cpu_int8"), load_template("depthwise_conv2d_cuda")
SIZES: dict[str, Any] = {"n": 1, "h": 6, "w": 8, "r": 3, "s": 3, "padding": 1}
ADDED = {"requantise_add": {"to": "uint8", "relu": True}}
CASES: list[dict[str, Any]] = [
    dict(c=16, dtype="uint8", weight_dtype="int8", zero_points=["x"], epilogue=["bias", {"requantise": {"to": "uint8"}}]),
    dict(c=8, dtype="int8", zero_points=["x", "weight"], stride=2),
    dict(c=6, dtype="int8", weight_dtype="uint8", layout="NCHW", zero_points=["x"], epilogue=["bias", "relu", ADDED]),
    dict(c=3, dtype="uint8", multiplier=2, epilogue=[{"dequantise": {"to": "float16"}}, "relu"]),
]


def layer(case: dict[str, Any]) -> tuple[Workload, dict[str, Any], Any, dict[str, float]]:
    """A workload with random arguments, what they give, and the numbers of the call."""
    workload = depthwise_conv2d(**SIZES, **case)
    convolution = as_convolution(workload)
    arrays = integer_model.arguments(convolution)
    scalars = {scalar.name: integer_model.SCALARS[scalar.name] for scalar in workload.scalars}
    return workload, arrays, integer_model.expected(convolution, arrays), scalars


@pytest.mark.parametrize("case", except_long(CASES[:3], long=CASES[1:2]), ids=str)
@pytest.mark.mostly_long(2)
def test_the_reference_and_the_kernel_of_a_cpu(case: dict[str, Any]) -> None:
    workload, arrays, expected, scalars = layer(case)
    target = detect("cpu")
    device = CpuDevice(target)
    try:
        reference = load_reference("depthwise_conv2d")
        truth = {"y": (workload.output.shape, np.int64)}
        np.testing.assert_array_equal(
            run_on_cpu(device, reference.kernel(workload, target), arrays, truth, scalars)["y"], expected
        )
        points = reference.points(workload, arrays, scalars, np.arange(expected.size)).reshape(expected.shape)
        np.testing.assert_array_equal(points, expected)
        assert CPU.validate(workload, target) is None
        source = CPU.kernel(workload, target, CPU.default(workload, target, CPU.space(workload, target)))
        outputs = {"y": (workload.output.shape, workload.output.dtype)}
        np.testing.assert_array_equal(run_on_cpu(device, source, arrays, outputs, scalars)["y"], expected)
    finally:
        device.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_of_a_gpu_are_exact_when_they_are_emulated(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    workload, arrays, expected, _ = layer(case)
    assert CUDA.validate(workload, H200) is None
    space = CUDA.space(workload, H200)
    for config in [CUDA.default(workload, H200, space), *space.sample(2, np.random.default_rng(0))]:
        memory = Memory()
        emulator = PtxEmulator(memory)
        epilogue._operation.cache_clear()
        emulator.stand_in(monkeypatch, *KERNEL_MODULES)
        source = CUDA.kernel(workload, H200, Config(config))
        epilogue._operation.cache_clear()
        y = np.frombuffer(bytearray(b"\x5a" * expected.nbytes), expected.dtype).reshape(expected.shape)
        buffers = {name: memory.add(array) for name, array in {**arrays, "y": y}.items()}
        for step in source.steps:
            emulator.run(step, buffers, sms=2, scalars=integer_model.SCALARS)
        np.testing.assert_array_equal(y, expected, err_msg=str(config))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_the_default_compiles_without_spills(layout: str) -> None:
    stages = ["bias", "relu", {"requantise": {"to": "uint8"}}]
    sizes: dict[str, Any] = {"n": 32, "h": 56, "w": 56, "c": 144, "r": 3, "s": 3, "padding": 1}
    w = depthwise_conv2d(**sizes, dtype="uint8", weight_dtype="int8", zero_points=["x"], layout=layout, epilogue=stages)
    resources = compile_source(CUDA.kernel(w, H200, CUDA.default(w, H200, CUDA.space(w, H200))), H200).resources
    assert resources.local_bytes == resources.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_a_gpu_are_exact(case: dict[str, Any]) -> None:
    from schedsearch.device import open_device

    workload, arrays, expected, scalars = layer(case)
    target = detect("cuda")
    device = open_device(target)
    try:
        space = CUDA.space(workload, target)
        for config in [CUDA.default(workload, target, space), *space.sample(1, np.random.default_rng(0))]:
            source, outputs = CUDA.kernel(workload, target, config), {"y": (expected.shape, expected.dtype)}
            y = run_on_cpu(device, source, arrays, outputs, scalars)["y"]
            np.testing.assert_array_equal(y, expected, err_msg=str(config))
    finally:
        device.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8", "direction": "grad_input"}, "direction is grad_input, but dtype is int8; allowed: forward"),
        (
            {"dtype": "int8", "weight_dtype": "float16"},
            "weight_dtype float16 does not go with dtype int8; allowed: int8, uint8",
        ),
        ({"dtype": "float16", "weight_dtype": "int8"}, "weight_dtype int8 does not go with dtype float16; allowed: float16"),
        ({"dtype": "float16", "zero_points": ["x"]}, "zero_points belong to int8 and uint8, but dtype is float16"),
        ({"dtype": "int8", "weight_layout": "HWOI"}, "weight_layout is HWOI, but dtype is int8; allowed: OHWI, OIHW"),
        ({"dtype": "int8", "epilogue": ["scale_shift"]}, "stage scale_shift needs floating-point numbers, got int32"),
    ],
    ids=str,
)
def test_a_wrong_workload_is_told_what_is_allowed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        depthwise_conv2d(**SIZES, c=8, **change)


def test_filters_whose_sums_may_not_be_exact_in_float32_are_refused_on_a_gpu() -> None:
    for size, refused in ((16, False), (17, True)):
        workload = depthwise_conv2d(n=1, c=8, h=20, w=20, r=size, s=size, dtype="uint8")
        assert (CUDA.validate(workload, H200) is not None) == refused
    assert "filters of 289 taps; allowed: up to 258" in str(CUDA.validate(workload, H200))
    assert CPU.validate(workload, detect("cpu")) is None
