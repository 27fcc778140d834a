"""depthwise_conv2d_cpu: right for every direction, layout and format, and every configuration of its space."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conv2d_support import NUMPY_DTYPES, run_on_cpu
from depthwise_support import case_workloads, numpy_depthwise, random_workload, small_integers

from schedsearch import Workload, depthwise_conv2d
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dtypes import decode, encode
from schedsearch.templates.depthwise_conv2d.cpu import DepthwiseConv2dCpu
from schedsearch.testing.template_contract import TemplateContract
from schedsearch.verification.verify import verify_once

TEMPLATE = DepthwiseConv2dCpu()
HOST = detect("cpu")
LAYER = {"n": 2, "c": 20, "h": 9, "w": 10, "r": 3, "s": 3, "padding": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    opened = CpuDevice(HOST)
    yield opened
    opened.close()


class TestContract(TemplateContract):
    template = TEMPLATE
    target = HOST
    accepted = (
        depthwise_conv2d(**LAYER, epilogue=["bias", "relu"]),
        depthwise_conv2d(**LAYER, direction="grad_weight", layout="NCHW", deterministic=True),
        depthwise_conv2d(**{**LAYER, "dtype": "bfloat16", "r": 2}, direction="grad_both", accumulate=True, multiplier=2),
    )
    refused = ((depthwise_conv2d(n=1, c=1, h=3, w=1 << 20, r=3, s=3, dtype="float32"), "fast memory"),)
    compiled = 1


def check(device: CpuDevice, workload: Workload, config: Config, seed: int = 0) -> None:
    """Every output is NumPy's, rounded once."""
    assert TEMPLATE.space(workload, HOST).check(config) == []
    arrays, scalars = small_integers(workload, seed), workload.definition.check_scalars(workload.params, 4.0)
    buffers = {spec.name: (spec.shape, NUMPY_DTYPES[spec.dtype]) for spec in workload.outputs}
    found = run_on_cpu(device, TEMPLATE.kernel(workload, HOST, config), arrays, buffers, scalars)
    for name, truth in numpy_depthwise(workload, arrays, scalars).items():
        expected = decode(encode(truth.astype(np.float32), workload.dtype), workload.dtype)
        np.testing.assert_array_equal(decode(found[name], workload.dtype), expected, err_msg=f"{workload.label} {config}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("direction", "layout", "dtype", "seed"),
    [
        ("forward", "NHWC", "float32", 0),
        ("forward", "NCHW", "float16", 1),
        ("grad_input", "NHWC", "float16", 2),
        ("grad_input", "NCHW", "float32", 3),
        ("grad_weight", "NHWC", "bfloat16", 4),
        ("grad_weight", "NCHW", "float32", 5),
    ],
)
def test_random_layers_and_configurations(device: CpuDevice, direction: str, layout: str, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    workload = random_workload(rng, direction=direction, layout=layout, dtype=dtype, r=2 + seed % 2, s=3 - seed % 3)
    check(device, workload, TEMPLATE.space(workload, HOST).sample(1, rng)[0], seed)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.mostly_long(2)
def test_kernels_with_more_taps_than_registers_take_several_passes(device: CpuDevice, layout: str) -> None:
    workload = depthwise_conv2d(n=1, c=5, h=8, w=9, r=7, s=5, padding=3, dtype="float32", layout=layout)
    check(device, workload, TEMPLATE.default(workload, HOST, TEMPLATE.space(workload, HOST)))


@pytest.mark.parametrize("direction", ["grad_input", "grad_weight"])
@pytest.mark.mostly_long(2)
def test_a_gradient_is_added_in_place(device: CpuDevice, direction: str) -> None:
    workload = depthwise_conv2d(**LAYER, direction=direction, accumulate=True, layout="NCHW")
    arrays, name = small_integers(workload), workload.output.name
    expected = numpy_depthwise(workload, arrays)[name]
    config = TEMPLATE.default(workload, HOST, TEMPLATE.space(workload, HOST))
    kernel = device.load(compile_source(TEMPLATE.kernel(workload, HOST, config), HOST).artifact)
    buffers = {each: device.allocate(array.nbytes) for each, array in arrays.items()}
    for each, array in arrays.items():
        device.copy_in(buffers[each], memoryview(array))
    kernel.bind({**buffers, name: buffers[f"{name}_before"]}, {}).launch()
    device.synchronize()
    found = np.empty(workload.output.shape, np.float32)
    device.copy_out(memoryview(found), buffers[f"{name}_before"])
    kernel.close()
    for address in buffers.values():
        device.free(address)
    np.testing.assert_array_equal(found, expected)


def test_dw_has_the_same_bits_however_many_threads_there_are(device: CpuDevice) -> None:
    workload = depthwise_conv2d(**{**LAYER, "r": 1}, direction="grad_weight", deterministic=True)
    space, rng = TEMPLATE.space(workload, HOST), np.random.default_rng(0)
    default = TEMPLATE.default(workload, HOST, space)
    arrays = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in workload.signature}
    found = [
        run_on_cpu(
            device,
            TEMPLATE.kernel(workload, HOST, Config({**default, "splits": 2, "threads": threads})),
            arrays,
            {"dw": (workload.output.shape, np.float32)},
        )["dw"]
        for threads in (1, default["threads"])
    ]
    np.testing.assert_array_equal(found[0], found[1])


def test_an_infinite_number_reaches_only_the_taps_that_read_it(device: CpuDevice) -> None:
    """The last pixel of a row is not read by the first column of taps, nor by results of the next row."""
    workload = depthwise_conv2d(
        n=1, c=1, h=3, w=5, r=1, s=3, padding=(0, 1), direction="grad_weight", layout="NCHW", dtype="float32"
    )
    x, dy = np.ones((1, 1, 3, 5), np.float32), np.ones((1, 1, 3, 5), np.float32)
    x[0, 0, 1, 4] = np.inf
    config = TEMPLATE.default(workload, HOST, TEMPLATE.space(workload, HOST))
    dw = run_on_cpu(device, TEMPLATE.kernel(workload, HOST, config), {"x": x, "dy": dy}, {"dw": ((1, 1, 1, 3), np.float32)})
    assert dw["dw"].reshape(-1).tolist() == [12.0, np.inf, np.inf]


@pytest.mark.long
def test_a_share_of_the_operator_cases(device: CpuDevice, shared: Path) -> None:
    """The smallest case of each direction, with one image of 40 channels; y as verification judges kernels."""
    smallest: dict[str, Any] = {}
    for workload in sorted(case_workloads(shared), key=lambda each: each.min_bytes):
        smallest.setdefault(workload.direction, workload.replace(n=1, c=40))
    assert set(smallest) == {"forward", "grad_input", "grad_weight"}
    for workload in smallest.values():
        config = TEMPLATE.default(workload, HOST, TEMPLATE.space(workload, HOST))
        if workload.direction != "forward":
            check(device, workload, config)
            continue
        kernel = device.load(compile_source(TEMPLATE.kernel(workload, HOST, config), HOST).artifact)
        assert verify_once(device, workload, kernel) is None, workload.label
        kernel.close()
