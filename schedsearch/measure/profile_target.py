"""The process that is profiled: `python -m schedsearch.measure.profile_target FILE`, started by `ncu`.

It launches one kernel, warmed up, between the driver's calls that switch a profiler on and off; fills and warm-up stay
outside. What is to run is a `Request`, pickled into FILE by `schedsearch.measure.ncu`.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedsearch.device import Device
from schedsearch.errors import SchedsearchError
from schedsearch.launch import Artifact
from schedsearch.measure.inputs import normal_sigma
from schedsearch.measure.timing import Arena
from schedsearch.measurement import HOT_GRAPH
from schedsearch.target import Target
from schedsearch.workload import Workload

_WARM_UPS = 3

Watched = Callable[[], AbstractContextManager[None]]
"""Makes a context inside which the profiler reads counters."""


@dataclass(frozen=True)
class Request:
    """What to run: an artifact, or with None the same convolution by PyTorch."""

    target: Target
    workload: Workload
    artifact: Artifact | None


def launch_kernel(device: Device, workload: Workload, artifact: Artifact, watched: Watched) -> None:
    """Launches every step of an artifact once inside `watched()`, on normal random data as the timing has it.

    Raises:
        DeviceError: it cannot be loaded or launched.
    """
    arena = Arena(device, workload, HOT_GRAPH)  # one set of operands: the profiler itself flushes the caches, or not
    bound = device.load(artifact).bind(arena.buffers[0], arena.scalars)
    for _ in range(_WARM_UPS):
        bound.launch()
    device.synchronize()
    with watched():
        bound.launch()
        device.synchronize()


def launch_torch(target: Target, workload: Workload) -> None:
    """Runs the convolution, without its epilogue, by torch.nn.functional.conv2d, which asks cuDNN for its fastest way."""
    import torch

    p = workload.params
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

    def convolve() -> None:
        torch.nn.functional.conv2d(x, weight, None, p["stride"], padding, p["dilation"], p["groups"])

    with torch.no_grad():
        for _ in range(_WARM_UPS):
            convolve()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        convolve()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def main() -> None:
    request: Request = pickle.loads(Path(sys.argv[1]).read_bytes())
    try:
        if request.artifact is None:
            launch_torch(request.target, request.workload)
            return
        from schedsearch.device.cuda import CudaDevice

        device = CudaDevice(request.target)

        @contextlib.contextmanager
        def watched() -> Any:
            device.start_profiler()
            yield
            device.stop_profiler()

        launch_kernel(device, request.workload, request.artifact, watched)
    except SchedsearchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
