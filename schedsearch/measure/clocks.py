"""Reads the device's clocks while it is measured: from NVML for a GPU, from the system's files for a CPU."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

from schedsearch.target import Target
from schedsearch.typed import JsonObject

# NVML API reference, nvmlClockType_t and nvmlClocksEventReasons.
_SM_CLOCK, _MEMORY_CLOCK, _TEMPERATURE_GPU = 1, 2, 0
_THROTTLE_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def read_clocks(target: Target) -> JsonObject:
    """E.g. {"sm_mhz": 1980, "memory_mhz": 3201, "throttle": "none", "temperature_c": 41, "power_w": 310}.

    Values that the system does not report are left out: a virtual machine may have no frequencies, a container no NVML.
    """
    return _gpu_clocks(target.uuid) if target.kind == "cuda" else _cpu_clocks()


def _cpu_clocks() -> JsonObject:
    try:
        khz = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").read_text()
        return {"cpu_mhz": int(khz) // 1000}
    except (OSError, ValueError):
        pass
    try:
        match = re.search(r"cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        return {}
    return {"cpu_mhz": round(float(match[1]))} if match else {}


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


@functools.cache
def _nvml_device(uuid: str) -> ctypes.c_void_p | None:
    library, handle = _nvml(), ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    return handle


def _gpu_clocks(uuid: str) -> JsonObject:
    library, handle = _nvml(), _nvml_device(uuid)
    if library is None or handle is None:
        return {}
    value, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
    found: JsonObject = {}
    for name, clock in (("sm_mhz", _SM_CLOCK), ("memory_mhz", _MEMORY_CLOCK)):
        if library.nvmlDeviceGetClockInfo(handle, clock, ctypes.byref(value)) == 0:
            found[name] = value.value
    if library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons)) == 0:
        active = [name for bit, name in _THROTTLE_REASONS.items() if reasons.value & bit]
        found["throttle"] = ", ".join(active) or "none"
    if library.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU, ctypes.byref(value)) == 0:
        found["temperature_c"] = value.value
    if library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(value)) == 0:
        found["power_w"] = round(value.value / 1000)
    return found
