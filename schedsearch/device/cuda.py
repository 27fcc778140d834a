"""A CUDA device through the driver API: streams, graphs, events. `cuda_context` has memory, `cuda_kernel` has kernels."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

from schedsearch.device import cuda_driver
from schedsearch.device.cuda_context import LEGACY_STREAM, PER_THREAD_STREAM, CudaContext
from schedsearch.device.cuda_driver import DriverError
from schedsearch.device.cuda_kernel import CudaKernel
from schedsearch.launch import Artifact


class _Asked(threading.local):
    """The stream of which the calling thread asked last whether a graph captures it, and where the driver writes that."""

    def __init__(self) -> None:
        self.stream, self.handle = 0, cuda_driver.argument(0)
        self.status = ctypes.c_int()
        self.place = ctypes.byref(self.status)


_asked = _Asked()


class CudaDevice(CudaContext):
    """One CUDA device. See `schedsearch.device.Device` for the contract."""

    def load(self, artifact: Artifact) -> CudaKernel:
        """Raises DeviceError for code that is damaged, or that the driver refuses."""
        return CudaKernel(self, artifact)

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph captures the stream, or a capture of it has failed and has not ended yet."""
        if stream in (0, LEGACY_STREAM):  # it cannot be captured, and asking would break a capture of another stream
            return False
        asked = _asked
        if stream != asked.stream:
            asked.stream, asked.handle = stream, cuda_driver.argument(stream)
        if stream == PER_THREAD_STREAM or cuda_driver.libcuda().cuStreamIsCapturing(asked.handle, asked.place):
            self.enqueue("cuStreamIsCapturing", stream, asked.place, last=False)  # in our context, or to say why it fails
        return bool(asked.status.value)

    def start_profiler(self) -> None:
        """Starts a profiler that was told to wait (`ncu --profile-from-start off`); it records the launches from here on."""
        with self.current():
            cuda_driver.call("cuProfilerStart")

    def stop_profiler(self) -> None:
        with self.current():
            cuda_driver.call("cuProfilerStop")

    def create_stream(self) -> int:
        """A stream that does not wait for the default stream."""
        with self.current():
            return int(cuda_driver.call("cuStreamCreate", cuda_driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        with self.current():
            cuda_driver.call("cuStreamDestroy", stream)

    def create_branch(self) -> Branch:
        """See `Branch`; the caller closes it."""
        with self.current():
            return Branch()

    def capture(self, stream: int, enqueue: Callable[[int], None]) -> Graph:
        """A graph of all launches of `enqueue(stream)`. An exception of `enqueue` ends the capture and is raised again."""
        with self.current():
            cuda_driver.call(
                "cuStreamBeginCapture",
                stream,
                cuda_driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            )
            try:
                enqueue(stream)
            except BaseException:
                with contextlib.suppress(DriverError):
                    cuda_driver.call("cuGraphDestroy", cuda_driver.call("cuStreamEndCapture", stream))
                raise
            return Graph(self, cuda_driver.call("cuStreamEndCapture", stream))

    def create_graph(self) -> Any:
        """A graph without nodes, for `Graph`. Our context must be current."""
        return cuda_driver.call("cuGraphCreate", 0)


@contextlib.contextmanager
def destroyed_on_error(graph: object) -> Iterator[None]:
    """Destroys a graph if the block raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(DriverError):
            cuda_driver.call("cuGraphDestroy", graph)
        raise


class Graph:
    """An executable graph. All methods but `launch` need the device's context to be current.

    Args:
        graph: what it is made from; `close` destroys both.

    Attributes:
        handle: of the executable graph, as an argument of ctypes.
        launch_on_default_stream: `launch` on stream 0 with the fewest steps of Python. Any thread may call it, one at a
            time.

    Raises:
        DriverError: the driver refuses the graph, which is destroyed then.
    """

    def __init__(self, device: CudaDevice, graph: object) -> None:
        self._device, self._graph = device, graph
        with destroyed_on_error(graph):
            self._executable = cuda_driver.call("cuGraphInstantiate", graph, 0)
        self.handle = cuda_driver.argument(int(self._executable))
        self._launch = cuda_driver.libcuda().cuGraphLaunch
        self._last = 0, cuda_driver.argument(0)  # a stream and its handle: most launches are on the stream of the one before
        self.launch_on_default_stream = _launcher(device, self.handle)

    def launch(self, stream: int) -> None:
        known, handle = self._last
        if stream != known:
            handle = cuda_driver.argument(stream)
            self._last = stream, handle
        in_our_context = stream > PER_THREAD_STREAM or self._device.is_current
        if not in_our_context or self._launch(self.handle, handle):
            self._device.enqueue("cuGraphLaunch", stream, self.handle)  # in our context, or to say why it fails

    def close(self) -> None:
        cuda_driver.call("cuGraphExecDestroy", self._executable)
        cuda_driver.call("cuGraphDestroy", self._graph)


def _launcher(device: CudaDevice, graph: Any) -> Callable[[int], None]:
    """See `Graph.launch_on_default_stream`. The driver writes the current context to a place of this function's own."""
    launch, get_current, enqueue = (
        cuda_driver.libcuda().cuGraphLaunch,
        cuda_driver.immediate().cuCtxGetCurrent,
        device.enqueue,
    )
    ours, current, default = device.context_handle, ctypes.c_void_p(), cuda_driver.argument(0)
    place = ctypes.byref(current)

    def launch_on_default_stream(_: int) -> None:
        if get_current(place) or current.value != ours or launch(graph, default):
            enqueue("cuGraphLaunch", 0, graph)  # in our context, or to say why it fails

    return launch_on_default_stream


class Branch:
    """A second stream, beside any other one. Its methods need the device's context to be current."""

    def __init__(self) -> None:
        driver = cuda_driver.bindings()
        self._stream = int(cuda_driver.call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        untimed = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._begun, self._done = (cuda_driver.call("cuEventCreate", untimed) for _ in range(2))

    def enqueue(self, stream: int, beside: Callable[[int], None], meanwhile: Callable[[int], None]) -> None:
        """Enqueues `beside` on the branch and `meanwhile` on `stream`. Both wait for what `stream` has, and what it gets
        later waits for both. A capture of `stream` captures the branch, too.
        """
        cuda_driver.call("cuEventRecord", self._begun, stream)
        cuda_driver.call("cuStreamWaitEvent", self._stream, self._begun, 0)
        beside(self._stream)
        cuda_driver.call("cuEventRecord", self._done, self._stream)
        meanwhile(stream)
        cuda_driver.call("cuStreamWaitEvent", stream, self._done, 0)

    def close(self) -> None:
        for event in (self._begun, self._done):
            cuda_driver.call("cuEventDestroy", event)
        cuda_driver.call("cuStreamDestroy", self._stream)


class Event:
    """A point in a stream whose time is taken. Its methods need the device's context to be current."""

    def __init__(self) -> None:
        self._event = cuda_driver.call("cuEventCreate", 0)

    def record(self, stream: int) -> None:
        cuda_driver.call("cuEventRecord", self._event, stream)

    def synchronize(self) -> None:
        cuda_driver.call("cuEventSynchronize", self._event)

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this event to a later one; both must have happened."""
        return float(cuda_driver.call("cuEventElapsedTime", self._event, later._event))

    def close(self) -> None:
        cuda_driver.call("cuEventDestroy", self._event)
