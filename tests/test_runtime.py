"""Deployment: a kernel takes arrays of any library, refuses wrong ones, and needs no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_support import CPU_WORKLOAD, GPU_WORKLOAD, expected, operands, tuned_database

import schedsearch
from schedsearch.errors import ArgumentError, UsageError
from schedsearch.launch import Grid, LaunchPlan, Step
from schedsearch.runtime import arrays
from schedsearch.target import PRESETS


@pytest.fixture(scope="module")
def cpu_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned_database(tmp_path_factory.mktemp("deploy"))


@pytest.fixture(scope="module")
def kernel(cpu_db: Path) -> schedsearch.Kernel:
    return schedsearch.compile(CPU_WORKLOAD, cpu_db, target="cpu")


def test_an_exact_record_is_served_and_says_so(kernel: schedsearch.Kernel) -> None:
    assert (kernel.level, kernel.verified, kernel.provenance.template) == ("exact", True, "conv2d_cpu")
    x, weight, bias = operands()
    np.testing.assert_allclose(kernel(x, weight, bias), expected(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_arguments_go_by_position_or_name_and_scalars_at_call_time(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(1)
    y = kernel(x, bias=bias, weight=weight, leaky_relu_slope=0.5)
    np.testing.assert_allclose(y, expected(x, weight, bias, slope=0.5), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(kernel(x, weight, bias), expected(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_the_output_can_be_given(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(2)
    out = np.full(CPU_WORKLOAD.output.shape, np.nan, np.float32)
    assert kernel(x, weight, bias, out=out) is out
    np.testing.assert_allclose(out, expected(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_a_logical_nchw_view_of_nhwc_memory_comes_back_as_one(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(3)
    y = kernel(x.transpose(0, 3, 1, 2), weight.transpose(0, 3, 1, 2), bias)
    assert y.shape == (2, 16, 9, 8)
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1), expected(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_a_bound_step_computes_from_the_memory_it_was_bound_to(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(4)
    step = kernel.bind(x, weight, bias)
    step()
    x[...] = operands(5)[0]
    np.testing.assert_allclose(step(), expected(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert step() is step.y


def test_torch_tensors_in_both_forms(kernel: schedsearch.Kernel, torch: Any) -> None:
    for seed in range(3):  # the second call takes the short path
        x, weight, bias = operands(seed)
        y = kernel(*(torch.from_numpy(array) for array in (x, weight, bias)))
        assert isinstance(y, torch.Tensor) and y.shape == CPU_WORKLOAD.output.shape
        np.testing.assert_allclose(y.numpy(), expected(x, weight, bias), rtol=1e-5, atol=1e-4)
        logical = [torch.from_numpy(array).permute(0, 3, 1, 2) for array in (x, weight)]
        y = kernel(*logical, torch.from_numpy(bias))
        assert y.is_contiguous(memory_format=torch.channels_last)
        np.testing.assert_allclose(y.permute(0, 2, 3, 1).numpy(), expected(x, weight, bias), rtol=1e-5, atol=1e-4)


# --- Prepared constants ------------------------------------------------------------------------------------------------
def test_a_prepared_weight_takes_the_weights_place(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(7)
    prepared = kernel.prepare(weight=weight)
    assert kernel.constants == ("weight",) and prepared.nbytes >= weight.nbytes
    truth, packed = expected(x, weight, bias), prepared["weight"]
    step = kernel.bind(x, packed, bias)
    for y in (kernel(x, packed, bias), kernel(x, bias=bias, **prepared), step(), kernel(x, weight, bias), step()):
        np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-4)


def test_constants_that_the_kernel_reads_as_they_are_may_be_prepared_with_the_others(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(7)
    prepared = kernel.prepare(bias=bias, weight=weight)
    assert list(prepared) == ["bias", "weight"]
    for y in (kernel(x, **prepared), kernel(x, prepared["weight"], bias), kernel(x, weight, bias)):
        np.testing.assert_allclose(y, expected(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_two_prepared_weights_and_a_plain_one_do_not_meet(kernel: schedsearch.Kernel) -> None:
    """Each has its own workspace, although a kernel that repacks in every call shares one among all calls."""
    arguments = [operands(seed) for seed in (8, 9, 10)]
    prepared = [kernel.prepare(weight=weight)["weight"] for _, weight, _ in arguments[:2]]
    for _ in range(2):
        for (x, weight, bias), made in zip(arguments, (*prepared, None)):
            y = kernel(x, made or weight, bias)
            np.testing.assert_allclose(y, expected(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_a_prepared_weight_is_the_weight_as_it_was(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(11)
    truth = expected(x, weight, bias)
    prepared = kernel.prepare(weight=weight)
    weight[...] = np.nan  # it is no longer read
    np.testing.assert_allclose(kernel(x, bias=bias, **prepared), truth, rtol=1e-5, atol=1e-4)


def test_a_prepared_weight_of_torch_comes_with_a_torch_output(kernel: schedsearch.Kernel) -> None:
    torch = pytest.importorskip("torch")
    x, weight, bias = (torch.from_numpy(array) for array in operands(12))
    prepared = kernel.prepare(weight=weight)["weight"]
    for _ in range(3):
        for given in (prepared, prepared, weight, weight):  # the second call of each takes the short path
            y = kernel(x, given, bias)
            np.testing.assert_allclose(y.numpy(), expected(*operands(12)), rtol=1e-5, atol=1e-4)


def test_arguments_that_cannot_be_prepared_are_refused(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(13)
    with pytest.raises(ArgumentError, match="'x' is not a constant argument of the kernel; allowed: weight, bias"):
        kernel.prepare(weight=weight, x=x)
    with pytest.raises(ArgumentError, match=r"weight has shape \(2, 9, 8, 8\)"):
        kernel.prepare(weight=x)
    with pytest.raises(ArgumentError, match="repacks weight together; missing: weight"):
        kernel.prepare(bias=bias)


def test_an_array_prepared_for_another_argument_is_refused(kernel: schedsearch.Kernel, cpu_db: Path) -> None:
    x, weight, bias = operands(13)
    other = schedsearch.compile(CPU_WORKLOAD, cpu_db, target="cpu")
    with pytest.raises(ArgumentError, match="weight was prepared by another kernel"):
        kernel(x, bias=bias, **other.prepare(weight=weight))
    prepared = kernel.prepare(weight=weight, bias=bias)
    with pytest.raises(ArgumentError, match=r"weight got the argument that was prepared as bias; pass prepared\['weight'\]"):
        kernel(x, prepared["bias"], prepared["weight"])
    with pytest.raises(ArgumentError, match="bias is prepared and weight is not, but the kernel repacks weight together"):
        kernel(x, weight, prepared["bias"])


def test_the_memory_of_a_prepared_weight_goes_with_it_and_with_what_is_bound_to_it(kernel: schedsearch.Kernel) -> None:
    device = kernel._loaded.device
    x, weight, bias = operands(14)
    kernel(x, weight, bias)  # allocates the kernel's own workspace
    before = set(device._memory)
    step = kernel.bind(x, kernel.prepare(weight=weight)["weight"], bias)
    assert len(set(device._memory) - before) == 1
    np.testing.assert_allclose(step(), expected(x, weight, bias), rtol=1e-5, atol=1e-4)
    del step
    assert set(device._memory) == before


class DLPackOnly:
    """An array that offers only DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_dlpack_arrays_are_taken_with_an_output(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands(6)
    out = np.empty(CPU_WORKLOAD.output.shape, np.float32)
    kernel(DLPackOnly(x), DLPackOnly(weight), DLPackOnly(bias), out=out)
    np.testing.assert_allclose(out, expected(x, weight, bias), rtol=1e-5, atol=1e-4)
    with pytest.raises(ArgumentError, match="out="):
        kernel(DLPackOnly(x), DLPackOnly(weight), DLPackOnly(bias))


def packed(array: np.ndarray) -> Any:
    """The same numbers as a field of records of five bytes."""
    records = np.zeros(len(array), dtype=[("value", "f4"), ("flag", "u1")])
    records["value"] = array
    return records["value"]


def readonly(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def overlapping(arguments: dict[str, Any], rows: int) -> dict[str, Any]:
    """x and out in one piece of memory. out begins `rows` rows of x after x."""
    memory = np.zeros(8192, np.float32)
    x, out = arguments["x"], np.empty((2, 9, 8, 16), np.float32)
    at = 4096
    inside = memory[at : at + x.size].reshape(x.shape)
    inside[:] = x
    at += rows * x.shape[2] * x.shape[3]
    return {**arguments, "x": inside, "out": memory[at : at + out.size].reshape(out.shape)}


def test_a_residual_may_be_updated_in_place(tmp_path: Path) -> None:
    workload = schedsearch.Workload.conv2d(
        n=1, h=5, w=5, c=4, k=4, r=3, s=3, padding=1, dtype="float32", epilogue=("residual",)
    )
    kernel = schedsearch.compile(workload, tmp_path / "none.db", target="cpu")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(spec.shape).astype(np.float32) for spec in workload.signature]
    apart = kernel(*arrays)
    assert kernel(*arrays, out=arrays[-1]) is arrays[-1]
    np.testing.assert_array_equal(arrays[-1], apart)


def test_a_torch_tensor_without_memory_is_refused_also_on_the_short_path(kernel: schedsearch.Kernel, torch: Any) -> None:
    tensors = [torch.from_numpy(array) for array in operands()]
    for _ in range(2):
        kernel(*tensors)
    with pytest.raises(ArgumentError, match="x is on device meta"):
        kernel(tensors[0].to("meta"), *tensors[1:])


def test_a_sparse_tensor_is_refused(kernel: schedsearch.Kernel, torch: Any) -> None:
    x, weight, bias = (torch.from_numpy(array) for array in operands())
    with pytest.raises(ArgumentError, match=r"x has layout torch.sparse_coo; allowed: torch.strided; give x.to_dense\(\)"):
        kernel.bind(x.to_sparse(), weight, bias)


@pytest.mark.parametrize("ask", [schedsearch.compile, schedsearch.explain])
def test_a_workload_is_asked_for_and_no_file(ask: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"workload is 'layers.yaml'; give a schedsearch.Workload"):
        ask("layers.yaml", tmp_path / "none.db", target="cpu")
    with pytest.raises(UsageError, match=r"a list of Workload, got 'layers.yaml'; a file is for `schedsearch tune FILE`"):
        schedsearch.tune("layers.yaml", tmp_path / "none.db", target="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {**a, "x": a["x"].astype(np.float64)}, "x has dtype float64, the kernel takes float32"),
        (lambda a: {**a, "x": a["x"][:1]}, r"x has shape \(1, 9, 8, 8\); allowed: shape \(2, 9, 8, 8\)"),
        (lambda a: {**a, "x": np.repeat(a["x"], 2, axis=2)[:, :, ::2]}, "x has strides"),
        (
            lambda a: {**a, "x": a["x"].astype(">f4" if sys.byteorder == "little" else "<f4")},
            "float32 of the other byte order",
        ),
        (lambda a: {**a, "bias": packed(a["bias"])}, r"bias has strides of \(5,\) bytes, not whole elements of 4"),
        (lambda a: {**a, "weight": [1.0]}, "weight is a list; allowed"),
        (lambda a: {"x": a["x"], "weight": a["weight"]}, "missing bias"),
        (lambda a: {**a, "biass": a["bias"]}, "did you mean 'bias'"),
        (lambda a: {**a, "out": np.empty((2, 9, 8, 8), np.float32)}, "out has shape"),
        (lambda a: {**a, "leaky_relu_slope": "steep"}, "leaky_relu_slope is 'steep'; allowed: one number"),
        (lambda a: {**a, "leaky_relu_slope": None}, "leaky_relu_slope is None; allowed: one number"),
        (lambda a: {**a, "out": readonly(np.empty((2, 9, 8, 16), np.float32))}, "out is read-only"),
        (lambda a: overlapping(a, 0), "out overlaps x"),
        (lambda a: overlapping(a, 1), "out overlaps x"),
        (lambda a: overlapping(a, -1), "out overlaps x"),
        (lambda a: {**a, "stream": "fast"}, "stream is a str"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_allowed(kernel: schedsearch.Kernel, change: Any, message: str) -> None:
    arguments = dict(zip(("x", "weight", "bias"), operands()))
    with pytest.raises(ArgumentError, match=message):
        kernel(**change(arguments))


def test_too_many_or_doubled_arguments_are_refused(kernel: schedsearch.Kernel) -> None:
    x, weight, bias = operands()
    with pytest.raises(ArgumentError, match="4 arrays by position"):
        kernel(x, weight, bias, bias)
    with pytest.raises(ArgumentError, match="by position and by name"):
        kernel(x, weight, bias, x=x)


BANNED_PROGRAM = """
import importlib.abc, sys

class Ban(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == banned or name.startswith(banned + ".") for banned in {banned!r}):
            raise ImportError(f"{{name}} is banned in this test")

sys.meta_path.insert(0, Ban())
import schedsearch
{body}
"""


def run_with_ban(banned: tuple[str, ...], body: str) -> None:
    program = BANNED_PROGRAM.format(banned=banned, body=body)
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_deployment_on_the_cpu_imports_no_tuner_store_template_or_display(cpu_db: Path) -> None:
    body = f"""
import numpy
workload = schedsearch.Workload({CPU_WORKLOAD.op!r}, {dict(CPU_WORKLOAD.params)!r})
kernel = schedsearch.compile(workload, {str(cpu_db)!r}, target="cpu", allow=("exact",))
y = kernel(*(numpy.ones(arg.shape, numpy.float32) for arg in workload.signature))
assert y.max() == 8 * 9 + 1, y.max()
"""
    run_with_ban(("xgboost", "sqlalchemy", "rich", "schedsearch.templates", "schedsearch.tuner"), body)


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
def test_deployment_on_the_gpu_imports_no_compiler_tuner_store_or_template(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    db = tmp_path / "records.db"
    schedsearch.tune([GPU_WORKLOAD], db, target="cuda", trials=2, workers=2)
    body = f"""
import torch
workload = schedsearch.Workload({GPU_WORKLOAD.op!r}, {dict(GPU_WORKLOAD.params)!r})
kernel = schedsearch.compile(workload, {str(db)!r}, target="cuda", allow=("exact",))
y = kernel(*(torch.ones(arg.shape, dtype=torch.float16, device="cuda") for arg in workload.signature))
assert kernel.verified and float(y.max()) == 16 * 9 + 1, y.max()
"""
    run_with_ban(("numba", "llvmlite", "xgboost", "sqlalchemy", "schedsearch.templates"), body)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 6), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("sm_100", (10, 3), True),
    ],
)
def test_machine_code_runs_where_the_programming_guide_says(arch: str, capability: tuple[int, int], runs: bool) -> None:
    import dataclasses

    assert dataclasses.replace(PRESETS["h200"], compute_capability=capability).runs(arch) is runs


def test_a_persistent_grid_follows_the_card() -> None:
    plan = LaunchPlan("cuda", "sm_90a", (Step("k", (), Grid(1000, blocks_per_sm=2), 128),))
    assert LaunchPlan.from_json(plan.to_json()).steps[0].grid.blocks(sms=132) == 264
    assert plan.steps[0].grid.blocks(sms=78) == 156


def test_strides_along_axes_of_one_element_say_nothing() -> None:
    plain, logical = arrays.forms(schedsearch.Workload.conv2d(n=1, h=1, w=1, c=8, k=8, r=1, s=1).signature[0])
    assert plain.matches((1, 1, 1, 8), (99, 7, 5, 1)) and logical.matches((1, 8, 1, 1), (8, 1, 1, 1))


class Pretender:
    """An object with an array interface, or with DLPack, of its own."""

    def __init__(self, interface: object = None, dlpack_device: object = None) -> None:
        if interface is not None:
            self.__array_interface__ = interface
        else:
            self.__dlpack_device__ = lambda: dlpack_device
            self.__dlpack__ = object


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": None}, {"shape": (-1,)}, {"shape": ("x",)}, {"strides": ()}, {"strides": (4,)}, {"strides": 5},
        {"typestr": "x"}, {"typestr": None}, {"data": None}, {"data": (2**70, False)}, {"data": ("x", False)}, {"data": 5},
        {"data": (0, False)}, {"data": (None, False)},
    ],
    ids=str,
)  # fmt: skip
def test_an_array_interface_that_makes_no_sense_is_refused(kernel: schedsearch.Kernel, changes: dict[str, Any]) -> None:
    """Strides of () once passed for any array, because no stride of it is wrong."""
    x, weight, bias = operands(5)
    with pytest.raises(ArgumentError, match="x"):
        kernel(Pretender({**x.__array_interface__, **changes}), weight, bias, out=np.empty((2, 9, 8, 16), np.float32))
    for missing in ("shape", "typestr", "data"):
        interface = {key: value for key, value in x.__array_interface__.items() if key != missing}
        with pytest.raises(ArgumentError, match=f"no '{missing}'"):
            kernel(Pretender(interface), weight, bias)


@pytest.mark.parametrize("device", [None, (1,), (1, 0), ("x", "y"), 5, (99, 0)])
def test_dlpack_that_makes_no_sense_is_refused(kernel: schedsearch.Kernel, device: object) -> None:
    x, weight, _ = operands(5)
    with pytest.raises(ArgumentError, match="bias"):
        kernel(x, weight, Pretender(dlpack_device=device))


@pytest.mark.parametrize("value", [10**400, 10**5000, 1e300, "1", "x", None, [], 1j], ids=range(8))
def test_a_scalar_that_is_no_float32_is_refused(kernel: schedsearch.Kernel, value: object) -> None:
    with pytest.raises(ArgumentError, match=r"leaky_relu_slope is .*; allowed: "):
        kernel(*operands(5), leaky_relu_slope=value)
