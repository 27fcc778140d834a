"""dyn_strided_slice: slices whose positions are arrays on the device. Expected values are NumPy's own slices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conv2d_support import run_on_cpu as run  # it takes any device
from dyn_strided_slice_support import CPU, CUDA, FAR, H200, Slice, any_bits, check, emulate, small_blocks, tvm_slices
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch import Workload, dyn_strided_slice
from schedsearch.backend import compile_source
from schedsearch.device import Device, open_device
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dependence import SizeError, evaluate
from schedsearch.ops.dyn_strided_slice import DYN_STRIDED_SLICE
from schedsearch.template import Template
from schedsearch.templates.dyn_strided_slice import kernel
from schedsearch.testing.emulator import replace_casts
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract
from schedsearch.verification.verify import verify_once

# ---- what it is


class TestOperator(OpContract):
    op = DYN_STRIDED_SLICE
    examples = (
        {"x": (3, 4, 5)},
        {
            "x": (6, 8),
            "entries": 1,
            "axes": (-1,),
            "dynamic": True,
            "bound": (6, 4),
            "dtype": "int64",
            "index_dtype": "int32",
        },
        {"x": (7,), "mode": "size", "strided": False},
    )
    wrong = (
        ({"x": (3, 4), "axes": (0, 2)}, "axes"),
        ({"x": (3, 4), "axes": (0, 0)}, "axes"),
        ({"x": (3, 4), "entries": 3}, "entries"),
        ({"x": (3, 4), "entries": 2, "axes": (1,)}, "entries"),
        ({"x": (3, 4), "bound": (3,)}, "bound"),
        ({"x": (3, 4), "mode": "size", "strided": True}, "strided"),
        ({"x": (3, 0)}, "x"),
    )
    ids: ClassVar = {
        "fa43f2b5e4a7702e02fbc80e2a96a3764ec34127a4879f87e44186febcc89d81": {"x": (3, 4, 5)},
    }


class TestCudaTemplate(TemplateContract):
    template = CUDA
    target = H200
    accepted = (dyn_strided_slice(x=(3, 40)),)
    refused = ((dyn_strided_slice(x=(2**31 - 1, 2, 2), dtype="int8"), "rows"),)
    compiled = 1


class TestCpuTemplate(TemplateContract):
    template = CPU
    target = detect("cpu")
    accepted = (dyn_strided_slice(x=(3, 40)),)
    compiled = 1


def test_it_needs_the_values_of_positions_and_only_the_shape_of_x() -> None:
    """What TVM's declaration [False, True, True, True] said, and that nothing else is read."""
    function = dyn_strided_slice(x=(64, 1024)).shape_functions["y"]
    assert {name: str(need) for name, need in function.needs.items()} == {
        "x": "shape", "begin": "value", "end": "value", "strides": "value",
    }  # fmt: skip


# ---- the shape function

numbers = st.integers(-12, 12) | st.sampled_from([-(2**63), -FAR, FAR, 2**63 - 1])


@given(st.integers(0, 9), numbers, numbers, (st.integers(-5, 5) | numbers).filter(bool))
def test_extents_are_those_of_numpys_slices(extent: int, begin: int, end: int, stride: int) -> None:
    function = dyn_strided_slice(x=(16,)).shape_functions["y"]
    inputs = {"x": (extent,), "begin": (begin,), "end": (end,), "strides": (stride,)}
    assert evaluate(function, 1, inputs) == (len(range(extent)[begin:end:stride]),)


def test_a_stride_of_zero_and_a_size_below_minus_one_are_errors() -> None:
    by_stride = dyn_strided_slice(x=(4, 4)).shape_functions["y"]
    with pytest.raises(SizeError, match="y of slice: strides has 0; allowed: positive numbers"):
        evaluate(by_stride, 2, {"x": (4, 4), "begin": (0, 0), "end": (2, 2), "strides": (1, 0)}, "y of slice")
    by_size = dyn_strided_slice(x=(4,), mode="size").shape_functions["y"]
    with pytest.raises(SizeError, match="end has a size below -1"):
        evaluate(by_size, 1, {"x": (4,), "begin": (0,), "end": (-2,)})


def test_the_slices_of_tvm_have_numpys_extents(shared: Path) -> None:
    slices = tvm_slices(shared)
    assert len(slices) >= 35
    for each in slices:
        workload = each.workload()
        inputs = {"x": each.shape, **{name: array.tolist() for name, array in each.operands().items()}}
        wanted = each.expected(np.empty(each.shape)).shape
        assert evaluate(workload.shape_functions["y"], len(each.shape), inputs) == wanted, each


def test_the_kernel_for_gpus_computes_the_slices_of_tvm(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    for number, each in enumerate(tvm_slices(shared)):
        if math.prod(each.shape) > 10**4:
            continue
        dtype, config = (
            ("float16", "int64")[number % 2],
            small_blocks((1, 2)[number % 2]),
        )
        x = any_bits(each.shape, dtype)
        y, extents = emulate(monkeypatch, each.workload(dtype=dtype), {"x": x, **each.operands()}, config)
        check(y, extents, each.expected(x), each)


extents_of_x = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def any_slice(draw: Any) -> Slice:
    shape = draw(extents_of_x)
    if draw(st.booleans()):
        shape = (*shape, draw(st.sampled_from([8, 16, 48, 70])))
    axes = tuple(draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))])
    near = st.integers(-20, 20) | st.sampled_from([0, -1, FAR, -FAR])
    some = st.lists(near, min_size=len(axes), max_size=len(axes))
    steps = st.lists(st.sampled_from([1, 1, 1, 2, 3, -1, -2, 50]), min_size=len(axes), max_size=len(axes))
    return Slice(shape, draw(some), draw(some), draw(steps), axes)


@settings(max_examples=60)
@given(any_slice(), st.sampled_from(["int8", "float16", "float32", "int64"]), st.sampled_from(["int64", "int32"]))
def test_the_kernel_for_gpus_computes_any_slice(each: Slice, dtype: str, index_dtype: str) -> None:
    x, config = any_bits(each.shape, dtype), small_blocks(2)
    with pytest.MonkeyPatch.context() as patch:
        workload = each.workload(dtype=dtype, index_dtype=index_dtype)
        y, extents = emulate(patch, workload, {"x": x, **each.operands(index_dtype)}, config)
    check(y, extents, each.expected(x), each)


def test_extents_of_x_on_the_device_and_strides_of_exact_arrays_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """x has room for 6 x 32 elements. First it holds 5 x 20 of them with the strides of the bound, then in a row."""
    each, config = (
        Slice((5, 20), [1, -1], [FAR, -FAR], [2, -3]),
        small_blocks(1),
    )
    workload = dyn_strided_slice(x=(6, 32), dynamic=True)
    x, own = any_bits((6, 32)), np.array([5, 20], np.int64)
    wanted = each.expected(x[:5, :20])
    y, extents = emulate(monkeypatch, workload, {"x": x, "x_extents": own, **each.operands()}, config)
    check(y, extents, wanted, "at the bound")
    dense = np.ascontiguousarray(x[:5, :20])
    strides = {"x_stride_0": 20, "x_stride_1": 1, "y_stride_0": wanted.shape[1], "y_stride_1": 1}
    y, extents = emulate(monkeypatch, workload, {"x": dense, "x_extents": own, **each.operands()}, config, **strides)
    np.testing.assert_array_equal(y.reshape(-1)[: wanted.size].reshape(wanted.shape), wanted)


@pytest.mark.parametrize(
    ("each", "bound"),
    [(Slice((4, 4), [0, 0], [4, 4], [1, 0]), None), (Slice((4, 4), [0, 0], [4, 4], [1, 1]), (4, 3))],
    ids=["a stride of zero", "more than the bound"],
)
def test_an_impossible_slice_writes_nothing_and_has_extents_of_zero(
    monkeypatch: pytest.MonkeyPatch, each: Slice, bound: Any
) -> None:
    config = small_blocks(1)
    y, extents = emulate(monkeypatch, each.workload(bound=bound), {"x": any_bits((4, 4)), **each.operands()}, config)
    check(y, extents, np.empty((0, 0), y.dtype), each)


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1) | st.integers(1, 20))
def test_division_by_multiplication_is_exact(number: int, extent: int) -> None:
    factor = (2**63 - 1) // extent + 1
    with pytest.MonkeyPatch.context() as patch:
        replace_casts(patch, kernel)
        assert kernel._quotient(number, extent, factor) == number // extent


def test_more_than_2_to_31_elements_are_divided_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slice is small, but the bound does not rule out large ones."""
    monkeypatch.setattr(kernel, "EXACT_BELOW", 1)
    each = Slice((5, 4, 70), [1, 0, 3], [FAR, FAR, 67], [1, 2, 1])
    x = any_bits(each.shape)
    y, extents = emulate(monkeypatch, each.workload(), {"x": x, **each.operands()}, small_blocks(2))
    check(y, extents, each.expected(x), each)


@pytest.mark.long
@pytest.mark.parametrize(
    "workload",
    [
        dyn_strided_slice(x=(256, 1024, 512)),
        dyn_strided_slice(x=(2, 3, 4, 5, 6, 7, 8, 9), dtype="int8", dynamic=True),
        dyn_strided_slice(x=(4096, 1024, 512), dtype="int64", dynamic=True),
    ],
    ids=["256 MB", "eight dimensions", "more than 2**31 bytes"],
)
def test_the_default_spills_nothing(workload: Workload) -> None:
    config = CUDA.default(workload, H200, CUDA.space(workload, H200))
    resources = compile_source(CUDA.kernel(workload, H200, config), H200).resources
    assert resources.spill_bytes == resources.local_bytes == 0


# ---- on devices


@functools.cache
def loaded(device: Device, template: Template, workload: Workload) -> Any:
    target = device.target
    source = template.kernel(workload, target, template.default(workload, target, template.space(workload, target)))
    return source, compile_source(source, target).artifact


def check_on(device: Device, template: Template, workload: Workload, each: Slice, dtype: str) -> None:
    x = any_bits(each.shape, dtype)
    source, _ = loaded(device, template, workload)
    outputs = {"y": (workload.bound, x.dtype), "y_extents": ((len(workload.bound),), np.int64)}
    scalars = {scalar.name: scalar.default for scalar in workload.scalars}
    found = run(device, source, {"x": x, **each.operands(workload.index_dtype)}, outputs, scalars)
    check(found["y"], found["y_extents"], each.expected(x), each, untouched=False)


@pytest.mark.long
def test_a_cpu_computes_the_slices_of_tvm(device: CpuDevice, shared: Path) -> None:
    """Those of 3 x 4 x 3 with all entries, so that one kernel serves them."""
    slices = [each for each in tvm_slices(shared) if each.shape == (3, 4, 3) and each.strides and len(each.begin) == 3]
    workload = dyn_strided_slice(x=(3, 4, 3), dtype="float32")
    assert len(slices) >= 10
    for each in slices:
        check_on(device, CPU, workload, each, "float32")


@pytest.mark.long
def test_kernels_of_a_cpu_are_verified(device: CpuDevice) -> None:
    for workload in (
        dyn_strided_slice(x=(7, 9, 40), dynamic=True, axes=(2, 0), index_dtype="int32", dtype="int64"),
        dyn_strided_slice(x=(5, 33), mode="size", bound=(4, 30)),
    ):
        _, artifact = loaded(device, CPU, workload)
        assert verify_once(device, workload, device.load(artifact)) is None, workload.label


def check_ends_of_rows(device: Device, template: Template, columns: int) -> None:
    """A slice that is all of x: zeros but for both ends of its three rows."""
    workload = dyn_strided_slice(x=(3, columns), dtype="int8")
    _, artifact = loaded(device, template, workload)
    entries = {"begin": [0, 0], "end": [FAR, FAR], "strides": [1, 1]}
    operands = {name: np.array(numbers, workload.index_dtype) for name, numbers in entries.items()}
    sizes = {"x": 3 * columns, "y": 3 * columns, "y_extents": 16, **{name: each.nbytes for name, each in operands.items()}}
    places = {name: device.allocate(nbytes) for name, nbytes in sizes.items()}
    device.fill(places["x"], 0, sizes["x"])
    device.fill(places["y"], 0x5A, sizes["y"])
    ends = [row * columns + start for row in range(3) for start in (0, columns - 64)]
    written = np.random.default_rng(0).integers(-128, 128, (len(ends), 64), np.int8)
    for at, numbers in zip(ends, written):
        device.copy_in(places["x"] + at, numbers.data)
    for name, each in operands.items():
        device.copy_in(places[name], each.view(np.uint8).data)
    kernel = device.load(artifact)
    kernel.bind(places, {scalar.name: scalar.default for scalar in workload.scalars}).launch()
    device.synchronize()
    for at, numbers in zip(ends, written):
        found = np.empty(64, np.int8)
        device.copy_out(found.data, places["y"] + at)
        np.testing.assert_array_equal(found, numbers, err_msg=str(at))
    extents = np.empty(2, np.int64)
    device.copy_out(extents.view(np.uint8).data, places["y_extents"])
    assert tuple(extents) == (3, columns)
    kernel.close()
    for place in places.values():
        device.free(place)


@pytest.mark.long
def test_a_cpu_copies_the_ends_of_rows(device: CpuDevice) -> None:
    check_ends_of_rows(device, CPU, 5000)


@pytest.fixture(scope="module")
def device() -> Any:
    opened = open_device(detect("cpu"))
    yield opened
    opened.close()


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(6))
def test_a_gpu_computes_the_slices_of_tvm(shared: Path, some_of: Callable[..., Any], part: int) -> None:
    device = open_device(detect("cuda"))
    for each in some_of(tvm_slices(shared)[part::6], part):
        check_on(device, CUDA, each.workload(), each, "float16")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "workload",
    [
        dyn_strided_slice(x=(64, 33, 100), dtype="float32"),
        dyn_strided_slice(x=(1 << 20, 3), dtype="int8", dynamic=True),
        dyn_strided_slice(x=(9, 1000, 257), mode="size", dtype="int64"),
        dyn_strided_slice(x=(16, 1024, 1024)),
    ],
    ids=lambda workload: workload.label,
)
def test_kernels_of_a_gpu_are_verified(workload: Workload) -> None:
    device = open_device(detect("cuda"))
    for config in CUDA.space(workload, device.target).sample(3, np.random.default_rng(0)):
        source = CUDA.kernel(workload, device.target, config)
        loaded_ = device.load(compile_source(source, device.target).artifact)
        assert verify_once(device, workload, loaded_) is None, config


@pytest.mark.gpu
def test_a_gpu_slices_more_than_2_to_31_elements() -> None:
    check_ends_of_rows(open_device(detect("cuda")), CUDA, 2**30)
