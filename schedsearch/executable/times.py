"""How long launches of a network and of its calls take, in nanoseconds."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from schedsearch.device import Device

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice

_REPEATS = 20  # launches of one call between two events, which take half a microsecond each


def time_on_cpu_ns(run: Callable[[], None], repeat: int) -> float:
    """The median time of a run that returns when its results are there."""
    import statistics

    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return float(statistics.median(times))


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
        launch(stream)
        events[0].record(stream)
        for event in events[1:]:
            launch(stream)
            event.record(stream)
        events[-1].synchronize()
        times_ms = [before.elapsed_ms(after) for before, after in itertools.pairwise(events)]
    return statistics.median(times_ms) * 1e6


def cuda_device(device: Device) -> CudaDevice:
    """The same device, which is a GPU."""
    from schedsearch.device.cuda import CudaDevice

    assert isinstance(device, CudaDevice)
    return device
