"""The process that is profiled: `python -m schedsearch.profiling.process FILE`, started by `ncu`.

It launches one kernel after a warm-up, between the driver's calls that switch a profiler on and off. Filling memory and
warming up happen outside. `schedsearch.profiling.ncu` pickles the `Request` to run into FILE.
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
from schedsearch.measure.timing import Arena
from schedsearch.measurement import HOT_GRAPH
from schedsearch.target import Target
from schedsearch.workload import Workload

_WARM_UPS = 3

Watched = Callable[[], AbstractContextManager[None]]
"""Makes a context manager; the profiler reads counters inside it."""


@dataclass(frozen=True)
class Request:
    """What to run: an artifact, or None for PyTorch's version of the operator."""

    target: Target
    workload: Workload
    artifact: Artifact | None


def launch_kernel(device: Device, workload: Workload, artifact: Artifact, watched: Watched) -> None:
    """Launches every step of an artifact once inside `watched()`, on the same random data as for timing.

    Raises:
        DeviceError: the artifact cannot be loaded or launched.
    """
    arena = Arena(device, workload, HOT_GRAPH)  # one set of operands: the profiler itself flushes the caches, or not
    bound = device.load(artifact).bind(arena.buffers[0], arena.scalars)
    for _ in range(_WARM_UPS):
        bound.launch()
    device.synchronize()
    with watched():
        bound.launch()
        device.synchronize()


def main() -> None:
    request: Request = pickle.loads(Path(sys.argv[1]).read_bytes())
    try:
        if request.artifact is None:
            from schedsearch.integrations.torch_peer import launch_torch

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
