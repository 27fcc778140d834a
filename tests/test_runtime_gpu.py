"""Kernels on a GPU: streams, graphs, contexts, threads and several devices."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_support import GPU_WORKLOAD

import schedsearch
from schedsearch.errors import ArgumentError
from schedsearch.launch import Grid


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
