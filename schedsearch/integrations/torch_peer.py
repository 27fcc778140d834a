"""Operators in PyTorch, to profile beside a kernel.

An operator names the function here that computes it as `Op.peers["torch"]`, "module:function". The function takes a workload
and a target, and returns a function that computes the operator once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from schedsearch.errors import UnsupportedError
from schedsearch.target import Target
from schedsearch.verification.inputs import normal_sigma
from schedsearch.workload import Workload

_WARM_UPS = 3
_CONVOLVED = ("float16", "bfloat16", "float32")


def launch_torch(target: Target, workload: Workload) -> None:
    """Runs the workload's operator in PyTorch once, after a warm-up, between the calls that switch a profiler on and off."""
    import torch

    module, _, name = workload.definition.peers["torch"].partition(":")
    compute: Callable[[], None] = getattr(importlib.import_module(module), name)(workload, target)
    with torch.no_grad():
        for _ in range(_WARM_UPS):
            compute()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        compute()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def conv2d(workload: Workload, target: Target) -> Callable[[], None]:
    """A convolution without its epilogue, by torch.nn.functional.conv2d, which asks cuDNN for its fastest algorithm.

    cuDNN may use TF32 only if the workload's `precision` says so; PyTorch's own default would let it.

    Raises:
        UnsupportedError: PyTorch has no such convolution on a GPU.
    """
    import torch

    p = workload.params
    if p["dtype"] not in _CONVOLVED:
        raise UnsupportedError(
            f"PyTorch has no convolution of {p['dtype']} on a GPU; allowed: {', '.join(_CONVOLVED)}; profile without --peer"
        )
    memory = torch.channels_last if p["layout"] == "NHWC" else torch.contiguous_format
    options: dict[str, Any] = {"device": torch.device("cuda", target.ordinal), "dtype": getattr(torch, p["dtype"])}
    top, left, bottom, right = p["padding"]
    x = torch.randn((p["n"], p["c"], p["h"], p["w"]), **options)
    padding = (top, left)
    if (top, left) != (bottom, right):  # which conv2d does not take
        x, padding = torch.nn.functional.pad(x, (left, right, top, bottom)), (0, 0)
    weight = torch.randn((p["k"], p["c"] // p["groups"], p["r"], p["s"]), **options) * normal_sigma(workload, "weight")
    x, weight = x.to(memory_format=memory), weight.to(memory_format=memory)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = p["precision"] == "tf32"

    def convolve() -> None:
        torch.nn.functional.conv2d(x, weight, None, p["stride"], padding, p["dilation"], p["groups"])

    return convolve
