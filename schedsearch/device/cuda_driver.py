"""The CUDA driver: calls that raise its errors, its version, and the facts of its devices.

There are two ways to call it. The bindings of the package cuda.bindings convert arguments and results. ctypes takes less of
the host's time, for the few functions that every launch needs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

from schedsearch.errors import DeviceError, DeviceMemoryError
from schedsearch.typed import JsonObject

OLDEST_DRIVER = 12040  # CUDA 12.4: the oldest version that runs the code of the supported toolkits


class DriverError(DeviceError):
    """A call of the driver failed."""


class DriverMemoryError(DriverError, DeviceMemoryError):
    """A call of the driver failed for lack of memory."""


_NO_DRIVER = "this machine has no NVIDIA driver; to use its CPU, give --target cpu"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@functools.cache
def bindings() -> Any:
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


def _text(driver: Any, code: Any) -> str:
    name, text = driver.cuGetErrorName(code)[1], driver.cuGetErrorString(code)[1]
    return f"{(name or b'?').decode()} ({(text or b'?').decode()})"


def call(function: str, *args: Any) -> Any:
    """Calls the driver; returns its one result, a tuple of several, or None.

    Raises:
        DriverError: the call failed.
    """
    driver = bindings()
    code, *results = getattr(driver, function)(*args)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise _error(function, driver, code)
    return results[0] if len(results) == 1 else tuple(results) or None


def driver_version() -> str:
    """The CUDA version that the driver supports, e.g. '13.0'. Raises DeviceError if there is no driver."""
    bindings()
    version = call("cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver for calls by ctypes, with values of ctypes; they return a code. `bindings` must have been called before."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def immediate() -> ctypes.PyDLL:
    """As `libcuda`, for functions that never wait for anything: their calls keep Python's lock, which takes less time than
    to give it away and take it back."""
    return ctypes.PyDLL("libcuda.so.1")


def argument(value: int) -> Any:
    """A pointer or handle as an argument of ctypes that is made once: a value such as `c_void_p` is converted anew by every
    call, which takes a tenth of the time of a launch each."""
    return ctypes.c_void_p.from_param(value)


def fail(function: str, code: int) -> NoReturn:
    """Raises the DriverError of a function of libcuda that returned `code`."""
    driver = bindings()
    raise _error(function, driver, driver.CUresult(code))


def _error(function: str, driver: Any, code: Any) -> DriverError:
    kind = DriverMemoryError if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else DriverError
    return kind(f"{function} failed: {_text(driver, code)}")


def describe_device(ordinal: int) -> JsonObject:
    """The facts of `Target` about one device, without making a context on it.

    Raises:
        DeviceError: no driver, or no such device.
    """
    driver = bindings()
    count = call("cuDeviceGetCount")
    if ordinal >= count:
        raise DeviceError(
            f"there is no CUDA device {ordinal}; {count} found" + (f", numbered from 0 to {count - 1}" if count else "")
        )
    device = call("cuDeviceGet", ordinal)
    names = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    raw = call("cuDeviceGetUuid", device).bytes.hex()
    return {
        "name": call("cuDeviceGetName", 128, device).split(b"\0")[0].decode(),
        "compute_capability": (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        "sms": attribute("MULTIPROCESSOR_COUNT"),
        "shared_bytes_per_block": attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "shared_bytes_per_sm": attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        "registers_per_sm": attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        "threads_per_sm": attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        "l2_bytes": attribute("L2_CACHE_SIZE"),
        "clock_khz": attribute("CLOCK_RATE"),
        "memory_bytes": int(call("cuDeviceTotalMem", device)),
        "uuid": f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}",
    }


def iterate_devices() -> Iterator[JsonObject]:
    """The facts of every device. Raises DeviceError if there is no driver."""
    bindings()
    for ordinal in range(call("cuDeviceGetCount")):
        yield describe_device(ordinal)
