"""A CUDA device through the driver API: memory, streams, graphs, events. `cuda_kernel` has its kernels.

It works in the device's primary context, which PyTorch and CuPy use as well. The caller's current context does not change:
calls that need our context push it and pop it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from schedsearch.device import cuda_driver
from schedsearch.device.cuda_box import Memcpy3d, copies
from schedsearch.device.cuda_driver import DriverError
from schedsearch.device.cuda_kernel import CudaKernel
from schedsearch.errors import DeviceError
from schedsearch.launch import Artifact
from schedsearch.target import Target

_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2  # the handles CU_STREAM_LEGACY and CU_STREAM_PER_THREAD


class CudaDevice:
    """One CUDA device in its primary context. See `schedsearch.device.Device` for the contract.

    The context is retained until `close`, or until this object is deleted.
    """

    def __init__(self, target: Target) -> None:
        """Raises DeviceError when the device cannot be opened."""
        self.target = target
        self._device = cuda_driver.call("cuDeviceGet", target.ordinal)
        self._context = cuda_driver.call("cuDevicePrimaryCtxRetain", self._device)
        self._context_handle = int(self._context)
        self._release = weakref.finalize(self, cuda_driver.call, "cuDevicePrimaryCtxRelease", self._device)
        self._release.atexit = False  # the driver may be gone by then

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes our context the calling thread's current one inside the block, and restores the former one afterwards.

        Raises:
            DeviceError: the device was closed.
        """
        self._check_open()
        cuda_driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            with contextlib.suppress(DriverError):  # it may report an earlier failure, which the body has reported already
                cuda_driver.call("cuCtxPopCurrent")

    @property
    def is_current(self) -> bool:
        """Whether our context is the calling thread's current one. By ctypes: launches on the default stream ask this."""
        current = ctypes.c_void_p()
        code = cuda_driver.libcuda().cuCtxGetCurrent(ctypes.byref(current))
        if code:
            cuda_driver.fail("cuCtxGetCurrent", code)
        return current.value == self._context_handle

    def make_current(self) -> None:
        """Makes our context the calling thread's current one for good, for `Graph` and `Event`. Only for our own
        processes.
        """
        self._check_open()
        cuda_driver.call("cuCtxSetCurrent", self._context)

    def _check_open(self) -> None:
        if not self._release.alive:
            raise DeviceError(f"{self.target.name} was closed; open it again")

    def load(self, artifact: Artifact) -> CudaKernel:
        """Raises DeviceError for code that is damaged, or that the driver refuses."""
        return CudaKernel(self, artifact)

    def allocate(self, nbytes: int) -> int:
        with self.current():
            return int(cuda_driver.call("cuMemAlloc", max(nbytes, 1)))

    def free(self, address: int) -> None:
        with self.current():
            cuda_driver.call("cuMemFree", address)

    def copy_in(self, address: int, data: memoryview) -> None:
        source = np.frombuffer(data, dtype=np.uint8)
        if source.size:
            with self.current():
                cuda_driver.call("cuMemcpyHtoD", address, source.ctypes.data, source.size)
                cuda_driver.call(
                    "cuStreamSynchronize", 0
                )  # it returns when it has read the data, and other streams do not wait

    def copy(self, destination: int, source: int, nbytes: int, stream: int = 0) -> None:
        if nbytes:
            addresses = ctypes.c_uint64(destination), ctypes.c_uint64(source)
            self.enqueue("cuMemcpyDtoDAsync_v2", stream, *addresses, ctypes.c_size_t(nbytes))

    def copy_box(
        self,
        destination: int,
        source: int,
        extents: tuple[int, ...],
        bound: tuple[int, ...],
        element_bytes: int,
        stream: int = 0,
    ) -> None:
        for to, at, nbytes, packed in copies(extents, bound, element_bytes):
            if packed is None:
                self.copy(destination + to, source + at, nbytes, stream)
            else:
                box = Memcpy3d.from_buffer_copy(packed)
                box.to_device, box.source_device = destination + to, source + at
                self.enqueue("cuMemcpy3DAsync_v2", stream, ctypes.byref(box))

    def pinned(self, nbytes: int) -> int:
        with self.current():
            return int(cuda_driver.call("cuMemAllocHost", max(nbytes, 1)))

    def free_pinned(self, address: int) -> None:
        with self.current():
            cuda_driver.call("cuMemFreeHost", address)

    def copy_from_host(self, destination: int, source: int, nbytes: int, stream: int = 0) -> None:
        places = ctypes.c_uint64(destination), ctypes.c_void_p(source)
        self.enqueue("cuMemcpyHtoDAsync_v2", stream, *places, ctypes.c_size_t(nbytes))

    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: int = 0) -> None:
        places = ctypes.c_void_p(destination), ctypes.c_uint64(source)
        self.enqueue("cuMemcpyDtoHAsync_v2", stream, *places, ctypes.c_size_t(nbytes))

    def wait(self, stream: int = 0) -> None:
        self.enqueue("cuStreamSynchronize", stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph captures the stream, or a capture of it has failed and has not ended yet."""
        if stream in (0, _LEGACY_STREAM):  # it cannot be captured, and asking would break a capture of another stream
            return False
        status = ctypes.c_int()
        self.enqueue("cuStreamIsCapturing", stream, ctypes.byref(status), last=False)
        return bool(status.value)

    def enqueue(self, function: str, stream: int, *args: Any, last: bool = True) -> None:
        """Calls a function of libcuda that takes a stream. The default streams are those of the current context, which is
        another one where another GPU is current; ours is made current for them.

        Args:
            args: the other arguments, values of ctypes.
            last: whether the stream is the last argument; otherwise the first.

        Raises:
            DriverError: the call failed.
        """
        handle = ctypes.c_void_p(stream)
        given = (*args, handle) if last else (handle, *args)
        if stream > _PER_THREAD_STREAM or self.is_current:
            self.call_quickly(function, *given)
        else:
            with self.current():
                self.call_quickly(function, *given)

    def call_quickly(self, function: str, *args: Any) -> None:
        """Calls a function of libcuda with values of ctypes: in the thread's current context, or in ours if that fails.

        Raises:
            DriverError: the call failed.
        """
        call = getattr(cuda_driver.libcuda(), function)
        code = call(*args)
        if code and not self.is_current:
            with self.current():
                code = call(*args)
        if code:
            cuda_driver.fail(function, code)

    def copy_out(self, data: memoryview, address: int) -> None:
        destination = np.frombuffer(data, dtype=np.uint8)
        if destination.size:
            with self.current():
                cuda_driver.call("cuMemcpyDtoH", destination.ctypes.data, address, destination.size)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        if nbytes:
            with self.current():
                cuda_driver.call("cuMemsetD8", address, byte, nbytes)

    def synchronize(self) -> None:
        """Waits for all work. Raises DriverError if any of it failed; the text says how."""
        with self.current():
            cuda_driver.call("cuCtxSynchronize")

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

    def close(self) -> None:
        self._release()


@contextlib.contextmanager
def destroyed_on_error(graph: Any) -> Iterator[None]:
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
        handle: of the executable graph.

    Raises:
        DriverError: the driver refuses the graph, which is destroyed then.
    """

    def __init__(self, device: CudaDevice, graph: Any) -> None:
        self._device, self._graph = device, graph
        with destroyed_on_error(graph):
            self._executable = cuda_driver.call("cuGraphInstantiate", graph, 0)
        self.handle = ctypes.c_void_p(int(self._executable))
        self._launch = cuda_driver.libcuda().cuGraphLaunch

    def launch(self, stream: int) -> None:
        in_our_context = stream > _PER_THREAD_STREAM or self._device.is_current
        if not in_our_context or self._launch(self.handle, ctypes.c_void_p(stream)):
            self._device.enqueue("cuGraphLaunch", stream, self.handle)  # in our context, or to say why it fails

    def close(self) -> None:
        cuda_driver.call("cuGraphExecDestroy", self._executable)
        cuda_driver.call("cuGraphDestroy", self._graph)


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
