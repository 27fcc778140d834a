"""dense and batch_matmul on a CPU: right in every bit for all layouts, formats and epilogues, and all recorded cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conv2d_support import run_on_cpu
from long_cases import except_long
from matmul_support import arguments, cases, expected, scalars

from schedsearch import batch_matmul, dense
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.target import Target
from schedsearch.template import Template, load_reference, load_templates, magnitude_of
from schedsearch.templates.matmul.convolution import Convolution
from schedsearch.workload import Workload

HOST = detect("cpu")
TEMPLATES = load_templates(["matmul_cpu", "matmul_cpu_int8"])


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(HOST)
    yield device
    device.close()


def config_of(template: Template, workload: Workload, seed: int | None) -> Config:
    """The default, or a random configuration."""
    space = template.space(workload, HOST)
    if seed is None:
        config = template.default(workload, HOST, space)
        assert space.check(config) == []
        return config
    return space.sample(1, np.random.default_rng(seed))[0]


def check(device: CpuDevice, workload: Workload, seed: int | None = None) -> None:
    """A configuration gives exactly NumPy's result."""
    (template,) = TEMPLATES.matching(workload, HOST)
    arrays = arguments(workload)
    truth = expected(workload, arrays)
    config = config_of(template, workload, seed)
    source = template.kernel(workload, HOST, config)
    outputs = {"y": (truth.shape, truth.dtype)}
    y = run_on_cpu(device, source, arrays, outputs, scalars(workload))["y"]
    np.testing.assert_array_equal(y, truth, err_msg=f"{workload.label} with {config}")


FLOATS = ("residual", "leaky_relu", "scale_shift", "bias", "clip")
DENSE: list[dict[str, Any]] = [
    {"m": 1, "n": 37, "k": 50, "epilogue": ["bias", "relu"]},
    {"m": 24, "n": 20, "k": 33, "weight_layout": "KN", "epilogue": FLOATS},
    {
        "m": 16, "n": 21, "k": 30, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x", "weight"],
        "weight_layout": "KN", "epilogue": ["bias", "relu", {"requantise": {"to": "uint8"}}],
    },
    {"m": 5, "n": 18, "k": 8, "dtype": "int8", "epilogue": ["dequantise", "bias", "residual", {"quantise": {"to": "int8"}}]},
]  # fmt: skip
BATCHES: list[dict[str, Any]] = [
    {"b": 3, "m": 7, "n": 20, "k": 12, "x_layout": "KM", "weight_layout": "KN", "epilogue": ["bias", "residual"]},
    {"b": 3, "m": 16, "n": 9, "k": 5, "x_batch": 1, "epilogue": ["bias", "relu"]},
    {"b": 4, "m": 6, "n": 17, "k": 20, "weight_batch": 1, "weight_layout": "KN", "epilogue": ["residual"]},
    {"b": 3, "m": 8, "n": 19, "k": 13, "dtype": "int8", "x_layout": "KM", "weight_layout": "KN", "zero_points": ["weight"]},
    {"b": 2, "m": 5, "n": 8, "k": 16, "dtype": "uint8", "x_batch": 1, "zero_points": ["x"]},
]


@pytest.mark.parametrize("number", except_long(range(len(DENSE) + len(BATCHES)), long=(0, 5, 6)))
@pytest.mark.mostly_long(6)
def test_products_in_every_form_are_exact(device: CpuDevice, number: int) -> None:
    """Every other one with a random configuration, the others with the default."""
    params = {"dtype": "float32", **[*DENSE, *BATCHES][number]}
    check(device, batch_matmul(**params) if "b" in params else dense(**params), number if number % 2 else None)


def test_a_share_of_the_recorded_cases(device: CpuDevice, shared: Path) -> None:
    """A dense layer of floats, and a batch of int8 whose products share a weight."""
    floats, integers = (next(w for w in cases(shared) if (w.op, w.dtype) == kind) for kind in
                        (("dense", "float32"), ("batch_matmul", "int8")))  # fmt: skip
    check(device, floats)
    check(device, integers)


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.mostly_long(2)
def test_the_reference_is_the_definition(device: CpuDevice, number: int) -> None:
    """Its kernel and its points, in float64 or int64."""
    params = {"dtype": "float32", **[*DENSE, *BATCHES][number]}
    workload = batch_matmul(**params) if "b" in params else dense(**params)
    arrays, reference = arguments(workload), load_reference(workload.op)
    truth = expected(workload, arrays)
    rounded = workload.dtype == "float32"
    outputs: dict[str, Any] = {"y": (truth.shape, np.float64 if rounded else np.int64)}
    outputs |= {magnitude_of("y"): (truth.shape, np.float64)} if rounded else {}
    found = run_on_cpu(device, reference.kernel(workload, HOST), arrays, outputs, scalars(workload))
    np.testing.assert_array_equal(found["y"], truth)
    every = np.arange(truth.size)
    np.testing.assert_array_equal(reference.points(workload, arrays, scalars(workload), every), truth.reshape(-1))
    assert not rounded or (found[magnitude_of("y")] >= abs(truth)).all()


def test_a_shared_weight_makes_one_product_of_all_rows() -> None:
    shared_weight = Convolution.of(batch_matmul(b=6, m=4, n=8, k=8, weight_batch=1))
    assert (shared_weight.workload.n, shared_weight.workload.w, shared_weight.own_weights) == (1, 24, False)
    own = Convolution.of(batch_matmul(b=6, m=4, n=8, k=8))
    assert (own.workload.n, own.workload.w, own.own_weights) == (6, 4, True)


def test_small_products_keep_one_thread_by_default() -> None:
    many = Target("cpu", "sixteen cores", sms=16, simd_bits=256)
    template = TEMPLATES["matmul_cpu"]
    counts = [template.default(w, many, template.space(w, many))["threads"] for w in
              (dense(m=1, n=100, k=256, dtype="float32"), dense(m=256, n=1024, k=1024, dtype="float32"))]  # fmt: skip
    assert counts == [1, 16]


def test_only_constant_weights_are_packed_once() -> None:
    for workload, constant in ((dense(m=2, n=8, k=8, dtype="float32"), True),
                               (batch_matmul(b=2, m=2, n=8, k=8, dtype="float32"), False)):  # fmt: skip
        (template,) = TEMPLATES.matching(workload, HOST)
        source = template.kernel(workload, HOST, config_of(template, workload, None))
        assert any(step.constant for step in source.steps) == constant
