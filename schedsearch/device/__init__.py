"""Runs artifacts. Both the Runner (while tuning) and a deployed Kernel launch through this package.

Importing it needs neither Numba nor a template; `cuda` imports the driver bindings, `cpu` imports llvmlite.
"""

from __future__ import annotations

import contextlib
import importlib

from schedsearch.device.contract import BoundKernel, Device, LoadedKernel, Memory, Workspaces
from schedsearch.errors import DeviceError
from schedsearch.target import Target

__all__ = ["BoundKernel", "Device", "LoadedKernel", "Memory", "Workspaces", "open_device", "preload"]


def open_device(target: Target) -> Device:
    """Opens the device that `target.kind` and `target.ordinal` name.

    Raises:
        DeviceError: it is not there or cannot be used.
    """
    if target.kind == "cuda":
        from schedsearch.device.cuda import CudaDevice

        return CudaDevice(target)
    from schedsearch.device.cpu import CpuDevice

    return CpuDevice(target)


def preload(kind: str) -> None:
    """Imports what `open_device` needs for a kind of device, so that the first launch need not wait for it.

    It does nothing if the device's libraries are not there; `open_device` says so.
    """
    with contextlib.suppress(ImportError, DeviceError):
        importlib.import_module(f"schedsearch.device.{kind}")
        if kind == "cuda":
            from schedsearch.device.cuda_driver import bindings

            bindings()
