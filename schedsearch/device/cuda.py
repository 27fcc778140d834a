"""A CUDA device through the driver API: memory, modules, launches, graphs, events.

It works in the device's primary context, which PyTorch and CuPy use as well. The caller's current context does not change:
calls that need our context push it and pop it again.

A launch is one `cuLaunchKernelEx` per step on an argument block that was packed when the kernel was bound. ctypes makes that
call, which costs less host time than the bindings' own conversion of eleven arguments. It tries the thread's current context
first and pushes ours when the driver refuses that one, e.g. in a thread that never used the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from schedsearch.device import Workspaces, check_alignment, needed_steps, place_buffers, split_steps
from schedsearch.device.objects import check_elf
from schedsearch.errors import ArgumentError, DeviceError
from schedsearch.launch import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, Artifact, Step, TensorMap, number_bits
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.target import Target

_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2  # the handles CU_STREAM_LEGACY and CU_STREAM_PER_THREAD
OLDEST_DRIVER = 12040  # CUDA 12.4: the oldest version that runs the code of the supported toolkits


class DriverError(DeviceError):
    """A call of the driver failed."""


_NO_DRIVER = "this machine has no NVIDIA driver; to use its CPU, give --target cpu"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@functools.cache
def _driver() -> Any:
    """The driver bindings, initialised.

    Raises:
        DeviceError: the bindings or the driver are missing or too old, or there is no device.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        if not _has_driver():
            raise DeviceError(_NO_DRIVER) from error
        raise DeviceError("CUDA's Python bindings are not installed; install schedsearch[cu13] (or [cu12])") from error
    try:
        code = driver.cuInit(0)[0]
    except RuntimeError as error:  # the bindings raise this if there is no libcuda
        raise DeviceError(_NO_DRIVER) from error
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the NVIDIA driver cannot be used: {_text(driver, code)}; see `schedsearch doctor`")
    version = driver.cuDriverGetVersion()[1]
    if version < OLDEST_DRIVER:
        raise DeviceError(
            f"the NVIDIA driver is for CUDA {version // 1000}.{version % 1000 // 10}; needed is CUDA "
            f"{OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10} or newer; update the driver"
        )
    return driver


def require_driver() -> None:
    """Loads the driver and its bindings. Raises DeviceError if they cannot be used."""
    _driver()


def _text(driver: Any, code: Any) -> str:
    name, text = driver.cuGetErrorName(code)[1], driver.cuGetErrorString(code)[1]
    return f"{(name or b'?').decode()} ({(text or b'?').decode()})"


def _call(function: str, *args: Any) -> Any:
    """Calls the driver; returns its one result, a tuple of several, or None.

    Raises:
        DriverError: the call failed.
    """
    driver = _driver()
    code, *results = getattr(driver, function)(*args)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{function} failed: {_text(driver, code)}")
    return results[0] if len(results) == 1 else tuple(results) or None


def describe_device(ordinal: int) -> dict[str, Any]:
    """The facts of `Target` about one device, without making a context on it.

    Raises:
        DeviceError: no driver, or no such device.
    """
    driver = _driver()
    count = _call("cuDeviceGetCount")
    if ordinal >= count:
        raise DeviceError(
            f"there is no CUDA device {ordinal}; {count} found" + (f", numbered from 0 to {count - 1}" if count else "")
        )
    device = _call("cuDeviceGet", ordinal)
    names = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(_call("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    raw = _call("cuDeviceGetUuid", device).bytes.hex()
    return {
        "name": _call("cuDeviceGetName", 128, device).split(b"\0")[0].decode(),
        "compute_capability": (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        "sms": attribute("MULTIPROCESSOR_COUNT"),
        "shared_bytes_per_block": attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "shared_bytes_per_sm": attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        "registers_per_sm": attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        "threads_per_sm": attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        "l2_bytes": attribute("L2_CACHE_SIZE"),
        "clock_khz": attribute("CLOCK_RATE"),
        "memory_bytes": int(_call("cuDeviceTotalMem", device)),
        "uuid": f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}",
    }


def driver_version() -> str:
    """The CUDA version that the driver supports, e.g. '13.0'. Raises DeviceError if there is no driver."""
    _driver()
    version = _call("cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}"


class CudaDevice:
    """One CUDA device in its primary context. See `schedsearch.device.Device` for the contract.

    The context is retained until `close`, or until this object is deleted.
    """

    def __init__(self, target: Target) -> None:
        """Raises DeviceError when the device cannot be opened."""
        self.target = target
        self._device = _call("cuDeviceGet", target.ordinal)
        self._context = _call("cuDevicePrimaryCtxRetain", self._device)
        self._release = weakref.finalize(self, _call, "cuDevicePrimaryCtxRelease", self._device)
        self._release.atexit = False  # the driver may be gone by then

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes our context the calling thread's current one inside the block, and restores the former one afterwards.

        Raises:
            DeviceError: the device was closed.
        """
        self._check_open()
        _call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            with contextlib.suppress(DriverError):  # it may report an earlier failure, which the body has reported already
                _call("cuCtxPopCurrent")

    @property
    def is_current(self) -> bool:
        """Whether our context is the calling thread's current one."""
        return int(_call("cuCtxGetCurrent")) == int(self._context)

    def make_current(self) -> None:
        """Makes our context the calling thread's current one for good, for `Graph` and `Event`. Only for our own
        processes.
        """
        self._check_open()
        _call("cuCtxSetCurrent", self._context)

    def _check_open(self) -> None:
        if not self._release.alive:
            raise DeviceError(f"{self.target.name} was closed; open it again")

    def load(self, artifact: Artifact) -> CudaKernel:
        """Raises DeviceError for code that is damaged, or that the driver refuses."""
        return CudaKernel(self, artifact)

    def allocate(self, nbytes: int) -> int:
        with self.current():
            return int(_call("cuMemAlloc", max(nbytes, 1)))

    def free(self, address: int) -> None:
        with self.current():
            _call("cuMemFree", address)

    def copy_in(self, address: int, data: memoryview) -> None:
        source = np.frombuffer(data, dtype=np.uint8)
        if source.size:
            with self.current():
                _call("cuMemcpyHtoD", address, source.ctypes.data, source.size)
                _call("cuStreamSynchronize", 0)  # it returns when it has read the data, and other streams do not wait

    def copy(self, destination: int, source: int, nbytes: int, stream: int = 0) -> None:
        if nbytes:
            addresses = ctypes.c_uint64(destination), ctypes.c_uint64(source)
            self.enqueue("cuMemcpyDtoDAsync_v2", stream, *addresses, ctypes.c_size_t(nbytes))

    def pinned(self, nbytes: int) -> int:
        with self.current():
            return int(_call("cuMemAllocHost", max(nbytes, 1)))

    def free_pinned(self, address: int) -> None:
        with self.current():
            _call("cuMemFreeHost", address)

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
        call = getattr(_libcuda(), function)
        code = call(*args)
        if code and not self.is_current:
            with self.current():
                code = call(*args)
        if code:
            _raise(function, code)

    def copy_out(self, data: memoryview, address: int) -> None:
        destination = np.frombuffer(data, dtype=np.uint8)
        if destination.size:
            with self.current():
                _call("cuMemcpyDtoH", destination.ctypes.data, address, destination.size)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        if nbytes:
            with self.current():
                _call("cuMemsetD8", address, byte, nbytes)

    def synchronize(self) -> None:
        """Waits for all work. Raises DriverError if any of it failed; the text says how."""
        with self.current():
            _call("cuCtxSynchronize")

    def start_profiler(self) -> None:
        """Starts a profiler that was told to wait (`ncu --profile-from-start off`); it records the launches from here on."""
        with self.current():
            _call("cuProfilerStart")

    def stop_profiler(self) -> None:
        with self.current():
            _call("cuProfilerStop")

    def create_stream(self) -> int:
        """A stream that does not wait for the default stream."""
        with self.current():
            return int(_call("cuStreamCreate", _driver().CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        with self.current():
            _call("cuStreamDestroy", stream)

    def capture(self, stream: int, enqueue: Callable[[int], None]) -> Graph:
        """A graph of all launches of `enqueue(stream)`. An exception of `enqueue` ends the capture and is raised again."""
        with self.current():
            _call("cuStreamBeginCapture", stream, _driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            try:
                enqueue(stream)
            except BaseException:
                with contextlib.suppress(DriverError):
                    _call("cuGraphDestroy", _call("cuStreamEndCapture", stream))
                raise
            return Graph(self, _call("cuStreamEndCapture", stream))

    def create_graph(self) -> Any:
        """A graph without nodes, for `Graph`. Our context must be current."""
        return _call("cuGraphCreate", 0)

    def close(self) -> None:
        self._release()


@contextlib.contextmanager
def destroyed_on_error(graph: Any) -> Iterator[None]:
    """Destroys a graph if the block raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(DriverError):
            _call("cuGraphDestroy", graph)
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
            self._executable = _call("cuGraphInstantiate", graph, 0)
        self.handle = ctypes.c_void_p(int(self._executable))

    def launch(self, stream: int) -> None:
        self._device.enqueue("cuGraphLaunch", stream, self.handle)

    def close(self) -> None:
        _call("cuGraphExecDestroy", self._executable)
        _call("cuGraphDestroy", self._graph)


class Event:
    """A point in a stream whose time is taken. Its methods need the device's context to be current."""

    def __init__(self) -> None:
        self._event = _call("cuEventCreate", 0)

    def record(self, stream: int) -> None:
        _call("cuEventRecord", self._event, stream)

    def synchronize(self) -> None:
        _call("cuEventSynchronize", self._event)

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this event to a later one; both must have happened."""
        return float(_call("cuEventElapsedTime", self._event, later._event))

    def close(self) -> None:
        _call("cuEventDestroy", self._event)


class CudaKernel:
    """A loaded cubin. See `schedsearch.device.LoadedKernel`."""

    def __init__(self, device: CudaDevice, artifact: Artifact) -> None:
        self.artifact = artifact
        self.device = device
        plan = artifact.plan
        check_elf(artifact.code, f"the code for {plan.arch}")
        self.workspaces = Workspaces(device, plan.workspaces)
        with device.current():
            self._module = _call("cuModuleLoadData", artifact.code)
            self.functions = [_call("cuModuleGetFunction", self._module, step.entry.encode()) for step in plan.steps]
            limit = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            for function, step in zip(self.functions, plan.steps):
                _call("cuFuncSetAttribute", function, limit, step.dynamic_shared_bytes)

    def bind(
        self, buffers: Mapping[str, int], scalars: Mapping[str, float], prepared: Workspaces | None = None
    ) -> CudaBoundKernel:
        plan = self.artifact.plan
        steps = needed_steps(plan.steps, buffers) if prepared is None else split_steps(plan)[1]
        return CudaBoundKernel(self, buffers, scalars, steps, prepared)

    def prepare(self, addresses: Mapping[str, int], stream: int = 0) -> Workspaces:
        plan = self.artifact.plan
        made = Workspaces(self.device, plan.constant_workspaces, addresses)
        made.take(plan.constant_workspaces)
        steps, _ = split_steps(plan)
        CudaBoundKernel(self, addresses, {}, steps, made).launch(stream)
        return made

    def close(self) -> None:
        if self._module is not None:
            self.workspaces.close()
            with self.device.current():
                _call("cuModuleUnload", self._module)
            self._module = None


# What CUlaunchConfig and CUDA_KERNEL_NODE_PARAMS have in common.
GRID_FIELDS = tuple(
    (name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")
)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API."""

    _fields_ = (
        *GRID_FIELDS,
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


_Launch = tuple[
    _LaunchConfig, Any, ctypes.c_void_p, Any
]  # the configuration, a reference to it, the function, the parameters


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class CudaBoundKernel:
    """The packed argument blocks of some steps, given by their numbers. Not thread-safe."""

    def __init__(
        self,
        kernel: CudaKernel,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        steps: Sequence[int],
        prepared: Workspaces | None,
    ) -> None:
        plan, device = kernel.artifact.plan, kernel.device
        self._kernel, self._prepared = kernel, prepared  # keeps the module and the workspaces alive
        self._plan = plan
        self._launch = _libcuda().cuLaunchKernelEx
        self._replace_address = _libcuda().cuTensorMapReplaceAddress
        self._pointers: dict[str, list[ctypes.c_uint64]] = {}
        self._maps: dict[str, list[int]] = {}
        self._scalars: dict[str, list[tuple[ctypes.c_uint64, str]]] = {}
        self._keep: list[Any] = []
        addresses = place_buffers(plan, [plan.steps[number] for number in steps], buffers, kernel.workspaces, prepared)
        with device.current():
            self._launches = [
                self._pack(kernel.functions[number], plan.steps[number], addresses, scalars, device.target)
                for number in steps
            ]

    def _pack(
        self, function: Any, step: Step, addresses: Mapping[str, int], scalars: Mapping[str, float], target: Target
    ) -> _Launch:
        values = [value for param in step.params for value in self._pack_param(param, addresses, scalars)]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
        blocks = step.grid.blocks(target.sms, step.cluster)
        grid = step.grid.shape or (blocks, 1, 1)
        config = _LaunchConfig(*grid, *(step.block_shape or (step.block_threads, 1, 1)), step.dynamic_shared_bytes)
        if step.grid.blocks_per_sm and step.cluster > 1:
            config.grid_x = min(blocks, step.cluster * _clusters_at_once(function, config))
        self._keep += [values, pointers]
        return config, ctypes.byref(config), ctypes.c_void_p(int(function)), ctypes.byref(pointers)

    def _pack_param(self, param: Any, addresses: Mapping[str, int], scalars: Mapping[str, float]) -> list[Any]:
        """The values whose addresses the driver gets for a parameter: one, or several for an array."""
        if param.kind == "pointer":
            return [self._pack_pointer(param.buffer, addresses)]
        if param.kind == "array":
            return [
                self._pack_pointer(param.buffer, addresses) if word is None else ctypes.c_int64(word) for word in param.words
            ]
        if param.kind == "tensor_map":
            storage = _aligned_storage(TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT)
            encoded = _encode(param, addresses[param.buffer])
            ctypes.memmove(storage, encoded.getPtr(), TENSOR_MAP_BYTES)
            self._maps.setdefault(param.buffer, []).append(ctypes.addressof(storage))
            return [storage]
        if param.kind == "scalar":
            if param.name not in scalars:
                raise ArgumentError(f"no value for the scalar {param.name!r}; given: {', '.join(scalars) or 'none'}")
            scalar = ctypes.c_uint64(number_bits(scalars[param.name], param.dtype))  # the driver reads as much as it needs
            self._scalars.setdefault(param.name, []).append((scalar, param.dtype))
            return [scalar]
        if param.kind == "number":
            return [ctypes.c_uint64(number_bits(param.value, param.dtype))]
        if param.kind == "literal":
            return [ctypes.c_int64()]  # the kernel ignores it
        kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
        return [kinds[param.kind](param.value)]

    def _pack_pointer(self, buffer: str, addresses: Mapping[str, int]) -> Any:
        pointer = ctypes.c_uint64(addresses[buffer])
        self._pointers.setdefault(buffer, []).append(pointer)
        return pointer

    @property
    def launches(self) -> list[tuple[_LaunchConfig, ctypes.c_void_p, Any]]:
        """Configuration, function and array of pointers to the parameters of each launch. `set_pointer` and `set_scalar`
        change what these point to."""
        return [(config, function, parameters._obj) for config, _, function, parameters in self._launches]

    def launch(self, stream: int = 0) -> None:
        for launch in self._launches:
            config, config_reference, function, parameters = launch
            config.stream = stream
            code = self._launch(config_reference, function, parameters, None)
            if code:
                self._launch_in_context(launch, code)

    def _launch_in_context(self, launch: _Launch, code: int) -> None:
        """Launches again in our context, if another context or none was current when the driver refused with `code`."""
        if not self._kernel.device.is_current:
            _, config_reference, function, parameters = launch
            with self._kernel.device.current():
                code = self._launch(config_reference, function, parameters, None)
        if code:
            _raise("cuLaunchKernelEx", code)

    def set_pointer(self, buffer: str, address: int) -> None:
        """Raises ArgumentError if the address lacks the alignment that the plan requires."""
        if buffer in self._plan.alignments:
            check_alignment(self._plan, buffer, address)
        for pointer in self._pointers.get(buffer, ()):
            pointer.value = address
        for tensor_map in self._maps.get(buffer, ()):
            place, to = ctypes.c_void_p(tensor_map), ctypes.c_void_p(address)
            code = self._replace_address(place, to)
            if code and not self._kernel.device.is_current:  # it wants a context, like a launch
                with self._kernel.device.current():
                    code = self._replace_address(place, to)
            if code:
                _raise("cuTensorMapReplaceAddress", code)

    def set_scalar(self, name: str, value: float) -> None:
        for scalar, dtype in self._scalars.get(name, ()):
            scalar.value = number_bits(value, dtype)


def _clusters_at_once(function: Any, config: _LaunchConfig) -> int:
    """How many clusters of a kernel run at once. Each runs within one group of multiprocessors, whose size may not be a
    multiple of the cluster's.

    Raises:
        DriverError: the driver refuses the kernel.
    """
    clusters, handle = ctypes.c_int(), ctypes.c_void_p(int(function))
    code = _libcuda().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), handle, ctypes.byref(config))
    if code:
        _raise("cuOccupancyMaxActiveClusters", code)
    return max(clusters.value, 1)  # if none fits, the launch says why


def _raise(call: str, code: int) -> NoReturn:
    driver = _driver()
    raise DriverError(f"{call} failed: {_text(driver, driver.CUresult(code))}")


def _aligned_storage(nbytes: int, alignment: int) -> Any:
    """Host memory at a multiple of `alignment`; the view keeps the allocation alive."""
    raw = bytearray(nbytes + alignment)
    start = ctypes.addressof((ctypes.c_char * len(raw)).from_buffer(raw))
    return (ctypes.c_char * nbytes).from_buffer(raw, -start % alignment)


def _encode(param: TensorMap, address: int) -> Any:
    """Encodes a tensor map. Raises DriverError if a field exceeds TMA's limits."""
    driver = _driver()
    dtype = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype_of(param.dtype).tma}")
    swizzle = getattr(
        driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{param.swizzle_bytes}B' if param.swizzle_bytes else 'NONE'}"
    )
    promotion = getattr(
        driver.CUtensorMapL2promotion,
        "CU_TENSOR_MAP_L2_PROMOTION_" + (f"L2_{param.l2_promotion_bytes}B" if param.l2_promotion_bytes else "NONE"),
    )
    wide = [driver.cuuint64_t(value) for value in param.dims], [driver.cuuint64_t(value) for value in param.strides_bytes]
    element_strides = [driver.cuuint32_t(value) for value in param.element_strides]
    interleave = driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    fill = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    rank = len(param.dims)
    if param.is_im2col:
        return _call(
            "cuTensorMapEncodeIm2col", dtype, rank, address, *wide, list(param.lower), list(param.upper),
            param.channels_per_pixel, param.pixels_per_column, element_strides, interleave, swizzle, promotion, fill,
        )  # fmt: skip
    box = [driver.cuuint32_t(value) for value in param.box]
    return _call(
        "cuTensorMapEncodeTiled", dtype, rank, address, *wide, box, element_strides, interleave, swizzle, promotion, fill
    )


def iterate_devices() -> Iterator[dict[str, Any]]:
    """The facts of every device. Raises DeviceError if there is no driver."""
    _driver()
    for ordinal in range(_call("cuDeviceGetCount")):
        yield describe_device(ordinal)
