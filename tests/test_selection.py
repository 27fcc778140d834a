"""topk and nonzero: the operators, their references and templates, against NumPy and ONNX's node cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, default, node_cases, verdict
from dynamic_support import assert_equal, emulated, expected, on_device

from schedsearch import Workload, nonzero, topk
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.nonzero import NONZERO
from schedsearch.ops.topk import TOPK
from schedsearch.template import load_template
from schedsearch.templates.selection import block, keys, nonzero_kernels, topk_kernels
from schedsearch.testing.emulator import replace_casts
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

TEMPLATES = {op: (load_template(f"{op}_cuda"), load_template(f"{op}_cpu")) for op in ("topk", "nonzero")}
MODULES = block, keys, nonzero_kernels, topk_kernels


class TestTopK(OpContract):
    op = TOPK
    examples = (
        {"x": [3, 7], "k": 2},
        {"x": [5, 4, 3], "k": 3, "axis": 0, "largest": False, "dtype": "float16", "dynamic": True},
        {"x": [5, 4, 3], "k": 3, "axis": 1, "dtype": "uint8", "dynamic": True},
    )
    wrong = (
        ({"x": [3, 7], "k": 8}, "k"),
        ({"x": [3, 7], "k": 2, "axis": 2}, "axis"),
        ({"x": [3, 7], "k": 2, "dtype": "int64"}, "dtype"),
    )


class TestNonZero(OpContract):
    op = NONZERO
    examples = ({"x": [3, 7]}, {"x": [2, 3, 4], "dtype": "uint8"})
    wrong = (({"x": [2**20, 2**12]}, "x"), ({"x": [2], "dtype": "float8_e4m3"}, "dtype"))


TOPKS: list[dict[str, Any]] = [
    dict(x=(3, 700), k=9),
    dict(x=(2, 40, 3), k=40, axis=1, largest=False, dtype="float16"),
    dict(x=(300,), k=5, dtype="uint8"),
    dict(x=(4, 260), k=20, axis=1, dtype="bfloat16", largest=False),
    dict(x=(90, 2), k=4, axis=0, dtype="int32"),
]
NONZEROS: list[dict[str, Any]] = [
    dict(x=(7, 130, 3)),
    dict(x=(2500,), dtype="uint8"),
    dict(x=(40, 30), dtype="bfloat16"),
    dict(x=(5, 31), dtype="int64"),
]


def example(workload: Workload, seed: int = 0, extent: float = 0.7) -> dict[str, Any]:
    """Integers, of which many are equal, and zeros of both signs and infinities where the format has them."""
    rng = np.random.default_rng(seed)
    (x, *others) = workload.signature
    values = rng.integers(0 if x.dtype == "uint8" else -9, 10, x.shape)
    if "int" not in x.dtype:
        values = values.astype(np.float64)
        values.reshape(-1)[::11], values.reshape(-1)[1::29], values.reshape(-1)[2::31] = -0.0, np.inf, -np.inf
    found = {"x": decode(encode(values, x.dtype), x.dtype)}
    return found | {spec.name: np.array([round(extent * n) for n in x.shape]) for spec in others}


@pytest.mark.parametrize("shape", TOPKS, ids=str)
@pytest.mark.mostly_long(6)
def test_emulated_topk_is_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    template, workload = TEMPLATES["topk"][0], topk(**shape)
    for each, loads in ((workload, 1), (workload.replace(dynamic=True), 2)):
        arrays = example(each)
        config = Config(splits=1, threads=256, each=loads)
        assert_equal(each, emulated(monkeypatch, template, each, arrays, config, *MODULES), expected(each, arrays))


SHARED_ROWS: list[tuple[dict[str, Any], int, float]] = [
    (dict(x=(2, 700), k=9, largest=False), 2, 1),
    (dict(x=(1100,), k=300, dtype="float16"), 4, 1),
    (dict(x=(1, 1030), k=1030, dtype="int16"), 4, 1),  # all numbers, more than the blocks' parts have
    (dict(x=(2, 520, 2), k=40, axis=1, dtype="bfloat16", dynamic=True), 2, 0.5),  # the second row is not in use
    (dict(x=(1100,), k=30, dtype="uint8", dynamic=True), 4, 0.3),  # nor are the last parts
    (dict(x=(1100,), k=600, dtype="int16", dynamic=True), 4, 0.4),  # fewer than k are
    (dict(x=(600,), k=3, dynamic=True), 2, 0),
]


@pytest.mark.parametrize("shape, splits, extent", SHARED_ROWS, ids=str)
@pytest.mark.mostly_long(9)
def test_blocks_that_share_a_row(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], splits: int, extent: float) -> None:
    """Equal numbers lie in the parts of all blocks."""
    workload = topk(**shape)
    arrays, config = example(workload, extent=extent), Config(splits=splits, threads=256, each=2)
    found = emulated(monkeypatch, TEMPLATES["topk"][0], workload, arrays, config, *MODULES)
    assert_equal(workload, found, expected(workload, arrays))


def test_equal_numbers_of_a_shared_row_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, config = topk(x=(1100,), k=700), Config(splits=4, threads=256, each=2)
    x = np.zeros(1100, np.float32)
    x[1099] = 1
    found = emulated(monkeypatch, TEMPLATES["topk"][0], workload, {"x": x}, config, *MODULES)
    assert found["indices"].tolist() == [1099, *range(699)]


@pytest.mark.parametrize("shape", NONZEROS, ids=str)
@pytest.mark.mostly_long(6)
def test_emulated_nonzero_is_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    template, workload = TEMPLATES["nonzero"][0], nonzero(**shape)
    for arrays in (example(workload), {"x": np.zeros(workload.x, np.float32)}):
        config = Config(parts=256, each=2, threads=256)
        found = emulated(monkeypatch, template, workload, arrays, config, *MODULES)
        assert_equal(workload, found, expected(workload, arrays))


@pytest.mark.long
def test_no_number_is_in_use(monkeypatch: pytest.MonkeyPatch, device: CpuDevice) -> None:
    workload = topk(x=(50,), k=3, dynamic=True)
    arrays = example(workload, extent=0.0)
    for found in (
        on_device(device, TEMPLATES["topk"][1], workload, arrays),
        emulated(monkeypatch, TEMPLATES["topk"][0], workload, arrays, None, *MODULES),
    ):
        assert found["y"].shape == found["indices"].shape == (0,) and found["y_extents"].tolist() == [0]


@pytest.mark.long
def test_cpu_kernels_are_the_definition(device: CpuDevice) -> None:
    workloads = [topk(**TOPKS[0]), topk(**TOPKS[1]), topk(**TOPKS[4], dynamic=True), nonzero(**NONZEROS[0])]
    for workload in workloads:
        arrays = example(workload)
        assert_equal(workload, on_device(device, TEMPLATES[workload.op][1], workload, arrays), expected(workload, arrays))


@pytest.mark.long
def test_verification_accepts_cpu_kernels(device: CpuDevice) -> None:
    for workload in (topk(x=(30, 6), k=7, axis=0, dynamic=True), nonzero(x=(9, 50))):
        assert verdict(device, TEMPLATES[workload.op][1], workload) is None, workload.label


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_nan_of_either_sign_is_larger_than_infinity(device: CpuDevice, dtype: str) -> None:
    """x86 gives NaNs with a sign. All NaNs are equal, so the one with the lower index comes first."""
    x = np.array([1, np.inf, np.nan, -np.inf, np.nan, -np.nan, 2], np.float32)
    x.view(np.uint32)[[2, 4, 5]] = 0xFFC00000, 0x7FFF0000, 0x7FC00000
    x = x.astype(dtype)
    assert np.signbit(x[2]) and np.isnan(x[[2, 4, 5]]).all()
    for largest, indices in ((True, [2, 4, 5, 1, 6, 0, 3]), (False, [3, 0, 6, 1, 2, 4, 5])):
        workload = topk(x=(7,), k=7, largest=largest, dtype=dtype)
        found = [on_device(device, TEMPLATES["topk"][1], workload, {"x": x})]
        with pytest.MonkeyPatch.context() as patch:
            found.append(emulated(patch, TEMPLATES["topk"][0], workload, {"x": x}, None, *MODULES))
        assert [each["indices"].tolist() for each in found] == [indices] * 2


def test_keys_have_the_order_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 is the upper half of float32."""
    replace_casts(monkeypatch, keys)
    words = [0xFF80, 0xFF7F, 0x8001, 0x8000, 0x0001, 0x7F7F, 0x7F80, 0x7FC0]
    for descending in (False, True):
        key = keys.key_of("bfloat16", descending)
        found = [int(key(word)) for word in words]
        assert sorted(set(found), reverse=descending) == found
        assert key(0) == key(0x8000) and key(0xFFC0) == key(0xFF81) == key(0x7FFF) == key(0x7FC0)


class TestTopKCuda(TemplateContract):
    template, target = TEMPLATES["topk"][0], H200
    accepted = (topk(x=(1, 200000), k=1000), topk(x=(5, 1000, 80), k=100, axis=1, dtype="float16", dynamic=True))
    refused = ((topk(x=(1, 200000), k=20000), "20000"),)


class TestTopKCpu(TemplateContract):
    template, target, compiled = TEMPLATES["topk"][1], detect("cpu"), 1
    accepted = (topk(x=(8, 1000), k=10),)


class TestNonZeroCuda(TemplateContract):
    template, target = TEMPLATES["nonzero"][0], H200
    accepted = (nonzero(x=(4096, 4096), dtype="uint8"), nonzero(x=(30, 40, 50)))


class TestNonZeroCpu(TemplateContract):
    template, target, compiled = TEMPLATES["nonzero"][1], detect("cpu"), 1
    accepted = (nonzero(x=(300, 24)),)


def test_few_long_rows_are_shared_by_blocks() -> None:
    def config(**shape: Any) -> dict[str, Any]:
        return dict(default(TEMPLATES["topk"][0], topk(**shape), H200))

    assert config(x=(1, 200000), k=1000) == {"splits": 32, "threads": 1024, "each": 8}
    assert config(x=(64, 50257), k=50) == {"splits": 4, "threads": 512, "each": 8}
    assert config(x=(500, 1000), k=10) == {"splits": 1, "threads": 256, "each": 4}


def test_a_large_array_is_read_in_several_vectors_of_a_thread() -> None:
    def config(*x: int) -> dict[str, Any]:
        return dict(default(TEMPLATES["nonzero"][0], nonzero(x=x, dtype="uint8"), H200))

    assert config(4096, 4096) == {"parts": 2048, "each": 4, "threads": 256}
    assert config(1000, 1000) == {"parts": 256, "each": 1, "threads": 256}


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    large = [topk(x=(2, 50000), k=1000), topk(x=(3, 9000), k=8000, dtype="float16"), nonzero(x=(3000, 1001), dtype="uint8")]
    small = [topk(**each, dynamic=dynamic) for each in TOPKS for dynamic in (False, True)]
    for workload in (*small, *(nonzero(**each) for each in NONZEROS), *large):
        template, arrays = TEMPLATES[workload.op][0], example(workload)
        assert_equal(workload, on_device(gpu, template, workload, arrays), expected(workload, arrays))
        assert verdict(gpu, template, workload) is None, workload.label


# ---- ONNX

pytest.importorskip("onnx", reason="needs onnx")
CASES = {name: case for name, case in node_cases("topk", "nonzero").items() if len(case.model.graph.node) == 1}


@pytest.mark.long
def test_cases_of_onnx(device: CpuDevice) -> None:
    seen = []
    for name, case in CASES.items():
        inputs, outputs = arrays_of(case)
        given, x = attributes(case.model.graph.node[0]), inputs[0]
        if name.startswith("test_nonzero"):
            workload = nonzero(x=x.shape, dtype={"bool": "uint8"}.get(str(x.dtype), str(x.dtype)))
        elif x.dtype.itemsize == 8:
            continue  # of 64 bits
        else:
            largest = bool(given.get("largest", 1))
            k = int(inputs[1].reshape(-1)[0])
            workload = topk(x=x.shape, k=k, axis=given.get("axis", -1), largest=largest, dtype=str(x.dtype))
        found = on_device(device, TEMPLATES[workload.op][1], workload, {"x": x})
        for spec, wanted in zip(workload.outputs, outputs):
            own = found[spec.name]
            if given.get("sorted", 1) == 0:  # any order is right
                own, wanted = np.sort(own, axis=workload.axis), np.sort(wanted, axis=workload.axis)
            np.testing.assert_array_equal(own, wanted, err_msg=name)
        seen.append(name)
    assert {"test_top_k", "test_top_k_smallest", "test_top_k_negative_axis", "test_nonzero_example"} <= set(seen)
