"""Deployment: a kernel is found, takes arrays of any library, refuses wrong ones, and needs no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import numpy_conv2d

import schedsearch
from schedsearch.errors import ArgumentError, DatabaseError, NoRecordError, UsageError, WrongResultError
from schedsearch.launch import Grid, LaunchPlan, Step
from schedsearch.measurement import COLD_GRAPH, COLD_GRAPH_PREPARED
from schedsearch.runtime import arrays
from schedsearch.target import PRESETS

CPU_WORKLOAD = schedsearch.Workload.conv2d(
    n=2, h=9, w=8, c=8, k=16, r=3, s=3, padding=1, dtype="float32", epilogue=("bias", "leaky_relu")
)
GPU_WORKLOAD = schedsearch.Workload.conv2d(n=2, h=9, w=8, c=16, k=24, r=3, s=3, padding=1, epilogue=("bias", "relu"))


@pytest.fixture(scope="module")
def cpu_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    db = tmp_path_factory.mktemp("deploy") / "records.db"
    schedsearch.tune([schedsearch.Task(CPU_WORKLOAD, restrict={"threads": [1]})], db, target="cpu", trials=2, tuner="random")
    return db


@pytest.fixture(scope="module")
def kernel(cpu_db: Path) -> schedsearch.Kernel:
    return schedsearch.compile(CPU_WORKLOAD, cpu_db, target="cpu")


def operands(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [arg.shape for arg in CPU_WORKLOAD.signature]
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, weight, bias


def expected(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, slope: float = 0.01) -> np.ndarray:
    arguments = {"x": x, "weight": weight, "bias": bias}
    return numpy_conv2d(CPU_WORKLOAD, arguments, {"leaky_relu_slope": slope})


def test_an_exact_record_is_served_and_says_so(kernel: schedsearch.Kernel) -> None:
    assert (kernel.rung, kernel.verified, kernel.provenance.template) == ("exact", True, "conv2d_cpu")
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


@pytest.mark.gpu
def test_gpu_steps_on_constants_alone_run_once() -> None:
    """A pointwise kernel that reads the weight from a workspace, to which another step has copied it."""
    torch = pytest.importorskip("torch")
    from faulty_templates import PointwiseCuda
    from numba import cuda, types

    from schedsearch.backend import compile_source
    from schedsearch.backend.ops import device_op
    from schedsearch.config import Config
    from schedsearch.device import open_device
    from schedsearch.device.detect import detect
    from schedsearch.launch import Pointer
    from schedsearch.template import KernelStep

    workload = schedsearch.Workload.conv2d(n=1, h=4, w=8, c=8, k=16, r=1, s=1, dtype="float32")
    target = detect("cuda")
    plain = PointwiseCuda().kernel(workload, target, Config())
    copy = device_op(
        "copy", "{ .reg .f32 v; ld.global.f32 v, [$source]; st.global.f32 [$to], v; }", ins={"source": "u64", "to": "u64"}
    )

    def pack(weight: Any, packed: Any) -> None:
        offset = types.uint64(4 * cuda.threadIdx.x)
        copy(types.uint64(weight + offset), types.uint64(packed + offset))

    (step,) = plain.steps
    multiply = replace(step, params=(Pointer("x"), Pointer("packed"), *step.params[2:]))
    packing = KernelStep(pack, (Pointer("weight"), Pointer("packed")), Grid(1), 8 * 16, constant=True)
    source = replace(plain, steps=(packing, multiply), workspaces={"packed": 4 * 8 * 16})
    kernel = open_device(target).load(compile_source(source, target).artifact)
    x, weight = torch.randn(32, 8, device="cuda"), torch.randn(16, 8, device="cuda")
    other, y = torch.randn(16, 8, device="cuda"), torch.empty(32, 16, device="cuda")
    torch.cuda.synchronize()
    prepared = kernel.prepare({"weight": weight.data_ptr()})
    buffers = {"x": x.data_ptr(), "weight": other.data_ptr(), "y": y.data_ptr()}
    for given, used in ((prepared, weight), (None, other), (prepared, weight)):
        kernel.bind(buffers, {}, given).launch()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, x @ used.T)


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


def test_deployment_on_the_cpu_imports_no_tuner_store_or_template(cpu_db: Path) -> None:
    body = f"""
import numpy
workload = schedsearch.Workload({CPU_WORKLOAD.op!r}, {dict(CPU_WORKLOAD.params)!r})
kernel = schedsearch.compile(workload, {str(cpu_db)!r}, target="cpu", allow=("exact",))
y = kernel(*(numpy.ones(arg.shape, numpy.float32) for arg in workload.signature))
assert y.max() == 8 * 9 + 1, y.max()
"""
    run_with_ban(("xgboost", "sqlalchemy", "schedsearch.templates", "schedsearch.tuner"), body)


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


@pytest.mark.gpu
def test_gpu_calls_take_new_pointers_streams_and_graphs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kernel = schedsearch.compile(GPU_WORKLOAD, tmp_path / "none.db", target="cuda", allow=("default",))
    stream = torch.cuda.Stream()
    for seed in range(4):
        torch.manual_seed(seed)
        x, weight, bias = (torch.randint(-2, 3, arg.shape, device="cuda").half() for arg in GPU_WORKLOAD.signature)
        logical = torch.nn.functional.conv2d(
            x.permute(0, 3, 1, 2).float(), weight.permute(0, 3, 1, 2).float(), bias.float(), padding=1
        )
        truth = logical.relu().permute(0, 2, 3, 1).half()
        assert torch.equal(kernel(x, weight, bias), truth)
        assert torch.equal(kernel(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), bias).permute(0, 2, 3, 1), truth)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = kernel(x, weight, bias)
        stream.synchronize()
        assert torch.equal(y, truth)
        step = kernel.bind(x, weight, bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step.y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(step.y, truth)


@pytest.mark.gpu
def test_gpu_kernels_leave_the_current_context_alone_and_run_in_any_thread(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from cuda.bindings import driver

    before = int(driver.cuCtxGetCurrent()[1])
    kernel = schedsearch.compile(GPU_WORKLOAD, tmp_path / "none.db", target="cuda", allow=("default",))
    assert int(driver.cuCtxGetCurrent()[1]) == before
    x, weight, bias = (torch.randint(-2, 3, arg.shape, device="cuda").half() for arg in GPU_WORKLOAD.signature)
    truth = kernel(x, weight, bias)

    class Forward(torch.autograd.Function):
        """Calls the kernel in the thread that runs the backward pass."""

        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            results.append(kernel(x, weight, bias))
            return gradient

    results: list[Any] = []
    Forward.apply(torch.ones(1, device="cuda", requires_grad=True)).sum().backward()
    step = kernel.bind(x, weight, bias)
    thread = threading.Thread(target=lambda: results.append(step(0)))  # this thread has never used the device
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(results) == 2 and all(torch.equal(result, truth) for result in results)


@pytest.mark.gpu
def test_a_kernel_of_another_gpu_leaves_torchs_device_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    here = torch.ones(4, device="cuda")
    kernel = schedsearch.compile(GPU_WORKLOAD, tmp_path / "none.db", target="cuda:1", allow=("default",))
    x, weight, bias = (torch.ones(arg.shape, device="cuda:1", dtype=torch.float16) for arg in GPU_WORKLOAD.signature)
    for _ in range(2):
        y = kernel(x, weight, bias)
        assert torch.cuda.current_device() == 0 and torch.equal(here + torch.ones(4, device="cuda"), here * 2)
    assert y.device.index == 1 and float(y.max()) == 16 * 9 + 1


@pytest.mark.gpu
def test_a_cache_of_gpu_kernels_closes_what_it_opened(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x, weight, bias = (torch.ones(arg.shape, device="cuda", dtype=torch.float16) for arg in GPU_WORKLOAD.signature)
    with schedsearch.KernelCache(tmp_path / "none.db", "cuda", allow=("default",)) as kernels:
        kernel = kernels.kernel(GPU_WORKLOAD)
        assert kernels.kernel(GPU_WORKLOAD) is kernel
        y = kernel(x, **kernel.prepare(weight=weight, bias=bias))
        assert float(y.max()) == 16 * 9 + 1
    assert float((y + 1).max()) == 16 * 9 + 2  # torch's memory and context are still there


@pytest.mark.gpu
def test_a_misaligned_gpu_pointer_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kernel = schedsearch.compile(GPU_WORKLOAD, tmp_path / "none.db", target="cuda", allow=("default",))
    x, weight, bias = (torch.zeros(arg.shape, device="cuda", dtype=torch.float16) for arg in GPU_WORKLOAD.signature)
    shifted = torch.zeros(x.numel() + 1, device="cuda", dtype=torch.float16)[1:].view(x.shape)
    with pytest.raises(ArgumentError, match="not a multiple of 16 bytes"):
        kernel(shifted, weight, bias)
    with pytest.raises(ArgumentError, match="cuda:0"):
        kernel(x.cpu(), weight, bias)


# --- The ladder -------------------------------------------------------------------------------------------------------


def test_without_a_record_the_nearest_workload_lends_its_configuration(cpu_db: Path) -> None:
    larger = CPU_WORKLOAD.replace(n=3, h=12)
    kernel = schedsearch.compile(larger, cpu_db, target="cpu")
    assert (kernel.rung, kernel.verified) == ("nearest", True)
    assert kernel.provenance.why[0].startswith("exact: no record")
    y = kernel(*(np.ones(arg.shape, np.float32) for arg in larger.signature))
    assert y.max() == 8 * 9 + 1


def test_without_a_database_the_rule_based_default_is_built_and_verified(tmp_path: Path) -> None:
    kernel = schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu", allow=("exact", "default"))
    assert (kernel.rung, kernel.verified, kernel.provenance.time_ns) == ("default", True, None)


def test_without_an_allowed_rung_there_is_no_record(cpu_db: Path, tmp_path: Path) -> None:
    with pytest.raises(NoRecordError, match=r"no kernel for .*exact: no record.*[Tt]une") as caught:
        schedsearch.compile(CPU_WORKLOAD.replace(n=5), cpu_db, target="cpu", allow=("exact", "same_architecture"))
    assert caught.value.exit_code == 4
    with pytest.raises(DatabaseError, match="tune first"):
        schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu", allow=("exact",))
    with pytest.raises(UsageError, match="did you mean 'exact'"):
        schedsearch.compile(CPU_WORKLOAD, cpu_db, target="cpu", allow=("exakt",))


def test_explain_names_every_rung_and_builds_nothing(cpu_db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsearch.backend.compile_source", None)
    explanation = schedsearch.explain(CPU_WORKLOAD, cpu_db, target="cpu")
    lines = explanation.lines
    assert str(explanation).splitlines()[0].startswith(CPU_WORKLOAD.label)
    assert [line.removeprefix("  ") for line in str(explanation).splitlines()[1:]] == lines
    assert lines[0].startswith("-> exact: record") and lines[0].endswith("stored machine code")
    assert [(rung.rung, rung.verdict) for rung in explanation.rungs] == [
        ("exact", "serves"), ("same_architecture", "no"), ("nearest", "no"), ("default", "fallback"),
    ]  # fmt: skip
    assert lines[2].startswith("   nearest: no record of another conv2d on a cpu device")
    assert lines[3].endswith("(a fallback)")
    assert [rung["serves"] for rung in json.loads(explanation.to_json())["rungs"]] == [True, False, False, False]


def agree(workload: schedsearch.Workload, db: Path, **options: Any) -> str:
    """The rung on which `compile` and `explain` agree."""
    kernel = schedsearch.compile(workload, db, target="cpu", **options)
    serving = schedsearch.explain(workload, db, target="cpu", **options).serving
    assert serving is not None and kernel.provenance.why[-1] == f"{serving.rung}: {serving.reason}"
    return kernel.rung


def test_explain_and_compile_agree_on_every_rung(cpu_db: Path, tmp_path: Path) -> None:
    other = CPU_WORKLOAD.replace(n=1)
    assert agree(CPU_WORKLOAD, cpu_db) == "exact"
    assert agree(other, cpu_db) == "nearest"
    assert agree(other, cpu_db, allow=("default", "exact")) == "default"
    assert agree(CPU_WORKLOAD, tmp_path / "none.db") == "default"
    assert schedsearch.explain(other, cpu_db, target="cpu", allow="exact").serving is None


def test_code_that_is_not_trusted_is_served_by_neither(
    cpu_db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path))  # another machine
    assert agree(CPU_WORKLOAD, cpu_db) == "exact"
    explanation = schedsearch.explain(CPU_WORKLOAD, cpu_db, target="cpu")
    assert [rung.verdict for rung in explanation.rungs[:2]] == ["no", "serves"]
    assert "this machine did not sign the machine code" in explanation.rungs[0].reason
    assert explanation.rungs[1].reason.endswith("built again from its configuration")


def test_without_a_compiler_neither_builds(cpu_db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsearch.runtime.ladder._COMPILERS", {"cpu": ("numba", "no_such_compiler.driver")})
    other = CPU_WORKLOAD.replace(n=1)
    explanation = schedsearch.explain(other, cpu_db, target="cpu")
    assert explanation.serving is None
    assert "building needs a compiler (there is no module no_such_compiler.driver)" in explanation.rungs[-1].reason
    with pytest.raises(NoRecordError, match=r"nearest: building needs a compiler .*default: building needs a compiler"):
        schedsearch.compile(other, cpu_db, target="cpu")
    assert agree(CPU_WORKLOAD, cpu_db) == "exact"


def test_kernels_that_compute_wrong_values_do_not_count_as_a_missing_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedsearch.measure.verify.verify_once", lambda *_: "3 of 9 elements are wrong")
    with pytest.raises(WrongResultError, match="default: the kernel computes wrong values here: 3 of 9") as caught:
        schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu")
    assert caught.value.exit_code == 1


# --- KernelCache ------------------------------------------------------------------------------------------------------
def promote_copy(db: Path, of: schedsearch.Kernel, time_ns: float, mode: str = COLD_GRAPH) -> int:
    """Records the kernel's configuration and code again with a shorter time, as a tuning run would. Returns the record."""
    from schedsearch.records.store import Store

    with Store.open(db) as store:
        best = store.best(CPU_WORKLOAD, schedsearch.detect("cpu").key)
        assert best is not None
        faster = replace(
            best, measurement=replace(best.measurement, times_ns=(time_ns,), mode=mode), started_at=best.started_at + 1
        )
        record = store.append(faster)
        assert store.promote(record, of._loaded.artifact)
    return record


@pytest.fixture
def own_db(cpu_db: Path, tmp_path: Path) -> Path:
    """A copy of `cpu_db` that a test may write to."""
    return Path(shutil.copy(cpu_db, tmp_path / "records.db"))


def test_a_kernel_tuned_in_the_same_process_is_served_next(own_db: Path) -> None:
    first = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    record = promote_copy(own_db, first, 1.0)
    second = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    assert (second.provenance.record_id, second.provenance.time_ns) == (record, 1.0)


def test_a_cache_returns_one_kernel_until_there_is_a_better_one(own_db: Path) -> None:
    x, weight, bias = operands()
    other = CPU_WORKLOAD.replace(n=1)
    with schedsearch.KernelCache(own_db, "cpu") as kernels:
        first, lent = kernels.kernel(CPU_WORKLOAD), kernels.kernel(other)
        assert kernels.kernel(CPU_WORKLOAD) is first and (first.rung, lent.rung) == ("exact", "nearest")
        record = promote_copy(own_db, first, 1.0)
        second = kernels.kernel(CPU_WORKLOAD)
        assert second.provenance.record_id == record and kernels.kernel(CPU_WORKLOAD) is second
        assert kernels.kernel(other) is lent  # already built, and not recorded since
        assert kernels.explain(CPU_WORKLOAD).rungs[0].reason.startswith(f"record {record} ")
        for kernel in (first, second):
            np.testing.assert_allclose(kernel(x, weight, bias), expected(x, weight, bias), rtol=1e-5, atol=1e-4)
    with pytest.raises(UsageError, match="was closed; make a new one"):
        kernels.kernel(CPU_WORKLOAD)


def test_a_cache_sees_a_database_that_appears_and_one_that_is_replaced(cpu_db: Path, tmp_path: Path) -> None:
    db = tmp_path / "later.db"
    with schedsearch.KernelCache(db, "cpu") as kernels:
        assert kernels.kernel(CPU_WORKLOAD).rung == "default"
        shutil.copy(cpu_db, db)
        exact = kernels.kernel(CPU_WORKLOAD)
        assert exact.rung == "exact"
        shutil.copy(cpu_db, tmp_path / "new.db")
        record = promote_copy(tmp_path / "new.db", exact, 1.0)
        (tmp_path / "new.db").replace(db)
        assert kernels.kernel(CPU_WORKLOAD).provenance.record_id == record
        db.unlink()
        assert kernels.kernel(CPU_WORKLOAD).provenance.record_id == record


def test_threads_may_share_a_cache(own_db: Path) -> None:
    """Kernels of one device take turns, so that results are whole."""
    x, weight, bias = operands()
    truth = expected(x, weight, bias)
    with schedsearch.KernelCache(own_db, "cpu") as kernels:

        def call(number: int) -> bool:
            if number == 8:
                promote_copy(own_db, kernels.kernel(CPU_WORKLOAD), 1.0)
            kernel = kernels.kernel(CPU_WORKLOAD)
            return bool(np.allclose(kernel(x, weight, bias), truth, rtol=1e-5, atol=1e-4))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(call, range(40)))
        assert kernels.kernel(CPU_WORKLOAD).provenance.time_ns == 1.0


def test_a_cache_without_a_database_needs_the_rung_default(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"there is no database .*none.db; tune first"):
        schedsearch.KernelCache(tmp_path / "none.db", "cpu", allow=("exact", "nearest"))


def test_readers_leave_no_log_behind(own_db: Path) -> None:
    schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    schedsearch.explain(CPU_WORKLOAD, own_db, target="cpu")
    schedsearch.KernelCache(own_db, "cpu").close()
    assert [path.name for path in own_db.parent.glob("records.db*")] == ["records.db"]


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


# --- Prepared constants as a timing mode ------------------------------------------------------------------------------
def test_a_record_of_the_prepared_mode_is_served_in_that_mode(own_db: Path) -> None:
    plain = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    with pytest.raises(NoRecordError, match=f"exact: no record of this workload on .* in mode {COLD_GRAPH_PREPARED}"):
        schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu", mode=COLD_GRAPH_PREPARED, allow="exact")
    record = promote_copy(own_db, plain, 1.0, COLD_GRAPH_PREPARED)
    kernel = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu", mode=COLD_GRAPH_PREPARED, allow="exact")
    assert (kernel.provenance.record_id, kernel.provenance.mode) == (record, COLD_GRAPH_PREPARED)
    x, weight, bias = operands()
    for y in (kernel(x, weight, bias), kernel(x, **kernel.prepare(weight=weight, bias=bias))):
        np.testing.assert_allclose(y, expected(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu").provenance == plain.provenance


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
