"""How long launches of a network and of its calls take, in nanoseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from schedsearch.device import Device
from schedsearch.device.clock import launches_ns, runs_ns

if TYPE_CHECKING:
    from schedsearch.device.cpu import CpuDevice
    from schedsearch.device.cuda import CudaDevice

_REPEATS = 20  # launches of one call between two events, which take half a microsecond each


def time_on_cpu_ns(run: Callable[[], None], repeat: int) -> float:
    """The median time of a run that returns when its results are there."""
    import statistics

    return statistics.median(runs_ns([run] * repeat))


def time_on_gpu_ns(device: Device, launch: Callable[[int], None], repeat: int) -> float:
    """The median time of a launch among `repeat` launches that follow one another."""
    cuda = cuda_device(device)
    stream = cuda.create_stream()
    try:
        return _between_events(cuda, stream, launch, repeat)
    finally:
        cuda.destroy_stream(stream)


def time_one_on_gpu_ns(device: Device, launch: Callable[[int], None], repeat: int) -> float:
    """The median time of one call in a graph of several."""
    cuda = cuda_device(device)
    stream = cuda.create_stream()

    def several(stream: int) -> None:
        for _ in range(_REPEATS):
            launch(stream)

    graph = cuda.capture(stream, several)
    try:
        return time_on_gpu_ns(device, graph.launch, max(repeat // _REPEATS, 3)) / _REPEATS
    finally:
        cuda.synchronize()
        with cuda.current():
            graph.close()
        cuda.destroy_stream(stream)


def _between_events(device: CudaDevice, stream: int, launch: Callable[[int], None], repeat: int) -> float:
    import statistics

    from schedsearch.device.cuda import Event

    with device.current(), contextlib.ExitStack() as stack:
        events = []
        for _ in range(repeat + 1):
            events.append(Event())
            stack.callback(events[-1].close)
        return statistics.median(launches_ns(events, stream, launch))


def cuda_device(device: Device) -> CudaDevice:
    """The same device, which is a GPU."""
    from schedsearch.device.cuda import CudaDevice

    assert isinstance(device, CudaDevice)
    return device


def cpu_device(device: Device) -> CpuDevice:
    """The same device, which is a CPU."""
    from schedsearch.device.cpu import CpuDevice

    assert isinstance(device, CpuDevice)
    return device
