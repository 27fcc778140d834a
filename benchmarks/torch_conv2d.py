"""PyTorch's convolutions, to compare ours with: operands, the ways to compute one, and a limit on their time."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import schedsearch

MEMORY = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
WAY_LIMIT_S = 90.0  # limit for one way to compute one convolution, including torch.compile

Way = Callable[..., torch.Tensor]  # called with x, weight and the bias, if the workload has one


def operands(workload: schedsearch.Workload, layout: str) -> tuple[torch.Tensor, ...]:
    """x and weight as logical NCHW and OIHW tensors, with `layout` in memory, and the bias if there is one.

    y has about the magnitude of x, so values along a chain neither grow nor fade.
    """
    w, stages = workload, [stage.name for stage in workload.epilogue]
    random = functools.partial(torch.randn, device="cuda", dtype=getattr(torch, workload.dtype))
    gain = 2.0 if "relu" in stages else 1.0
    scale = (gain / (w.c // w.groups * w.r * w.s)) ** 0.5
    x = random(w.n, w.c, w.h, w.w).contiguous(memory_format=MEMORY[layout])
    weight = (random(w.k, w.c // w.groups, w.r, w.s) * scale).contiguous(memory_format=MEMORY[layout])
    return (x, weight, random(w.k) * 0.1) if "bias" in stages else (x, weight)


def geometry(workload: schedsearch.Workload) -> tuple[Any, ...]:
    """Stride, padding, dilation and groups as PyTorch takes them.

    Raises:
        ValueError: padding differs between opposite sides.
    """
    w, (top, left, bottom, right) = workload, workload.padding
    if (top, left) != (bottom, right):
        raise ValueError(f"padding {w.padding} differs between opposite sides; PyTorch pads them alike")
    return w.stride, (top, left), w.dilation, w.groups


def convolve(workload: schedsearch.Workload, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    """One operator after the other: the convolution, its bias, relu in place."""
    y = torch.nn.functional.conv2d(x, weight, *(bias or (None,)), *geometry(workload))
    return y.relu_() if any(stage.name == "relu" for stage in workload.epilogue) else y


def fused(workload: schedsearch.Workload) -> Way:
    """cuDNN's fused convolution, bias and relu."""
    arguments = geometry(workload)
    return lambda x, weight, bias: torch.cudnn_convolution_relu(x, weight, bias, *arguments)


def compiled(workload: schedsearch.Workload) -> Way:
    """Convolution, bias and relu by torch.compile in its default mode."""
    torch._dynamo.reset()  # earlier compilations count: after 8 shapes of one function it gives up
    arguments = geometry(workload)
    return torch.compile(
        lambda x, weight, bias: torch.nn.functional.conv2d(x, weight, bias, *arguments).relu(), fullgraph=True, dynamic=False
    )


def ways(workload: schedsearch.Workload, layout: str) -> Iterator[tuple[str, Way]]:
    """Every way of PyTorch, by name. Use one before you ask for the next.

    Raises:
        ValueError: the epilogue is neither empty nor bias with relu.
    """
    layout = layout.lower()
    separate = functools.partial(convolve, workload)
    if not workload.epilogue:
        yield f"cudnn_{layout}", separate
    elif [stage.name for stage in workload.epilogue] == ["bias", "relu"]:
        yield f"separate_{layout}", separate
        yield f"fused_{layout}", fused(workload)
        yield f"compiled_{layout}", compiled(workload)
    else:
        raise ValueError(f"epilogue {workload.epilogue} has no peer; allowed: none, and bias with relu")


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of all elements together, in the Euclidean norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in its block when the time is up. It works only in the main thread, and not inside a call to C."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
