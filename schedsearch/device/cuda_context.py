"""The primary context of a CUDA device, which PyTorch and CuPy use as well, and its memory.

The caller's current context does not change: calls that need our context push it and pop it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from schedsearch.device import cuda_driver
from schedsearch.device.cuda_box import Memcpy3d, copies
from schedsearch.device.cuda_driver import DriverError
from schedsearch.errors import DeviceError
from schedsearch.target import Target

LEGACY_STREAM, PER_THREAD_STREAM = 1, 2  # the handles CU_STREAM_LEGACY and CU_STREAM_PER_THREAD


class _Current(threading.local):
    """Where the driver writes the calling thread's current context."""

    def __init__(self) -> None:
        self.context = ctypes.c_void_p()
        self.reference = ctypes.byref(self.context)


_current = _Current()


class CudaContext:
    """One CUDA device in its primary context. See `schedsearch.device.Memory` for the contract.

    The context is retained until `close`, or until this object is deleted.

    Attributes:
        context_handle: the driver's handle of the context.
    """

    def __init__(self, target: Target) -> None:
        """Raises DeviceError when the device cannot be opened."""
        self.target = target
        self._device = cuda_driver.call("cuDeviceGet", target.ordinal)
        self._context = cuda_driver.call("cuDevicePrimaryCtxRetain", self._device)
        self.context_handle = int(self._context)
        self._get_current = cuda_driver.immediate().cuCtxGetCurrent
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
        current = _current
        code = self._get_current(current.reference)
        if code:
            cuda_driver.fail("cuCtxGetCurrent", code)
        return current.context.value == self.context_handle

    def make_current(self) -> None:
        """Makes our context the calling thread's current one for good, for `Graph` and `Event`. Only for our own
        processes.
        """
        self._check_open()
        cuda_driver.call("cuCtxSetCurrent", self._context)

    def _check_open(self) -> None:
        if not self._release.alive:
            raise DeviceError(f"{self.target.name} was closed; open it again")

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

    def enqueue(self, function: str, stream: int, *args: object, last: bool = True) -> None:
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
        if stream > PER_THREAD_STREAM or self.is_current:
            self.call_quickly(function, *given)
        else:
            with self.current():
                self.call_quickly(function, *given)

    def call_quickly(self, function: str, *args: object) -> None:
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

    def fill_later(self, address: int, nbytes: int, stream: int) -> None:
        """Sets every byte to zero, in the order of a stream."""
        self.enqueue("cuMemsetD8Async", stream, ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))

    def synchronize(self) -> None:
        """Waits for all work. Raises DriverError if any of it failed; the text says how."""
        with self.current():
            cuda_driver.call("cuCtxSynchronize")

    def close(self) -> None:
        self._release()
