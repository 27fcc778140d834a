"""Running artifacts: the one piece that both the Runner (while tuning) and a deployed Kernel launch through.

Importing this package needs neither Numba nor a template; `cuda` imports the driver bindings, `cpu` imports llvmlite.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Protocol

from schedsearch.errors import DeviceError
from schedsearch.launch import Artifact
from schedsearch.target import Target


class BoundKernel(Protocol):
    """A kernel whose argument block is packed."""

    def launch(self, stream: int = 0) -> None:
        """Enqueues every step on a CUDA stream (0: the default stream). On the CPU it returns when all is computed.

        Raises:
            DeviceError: the driver refused the launch.
        """

    def set_pointer(self, buffer: str, address: int) -> None:
        """Replaces a buffer's address in the packed block, tensor maps included."""

    def set_scalar(self, name: str, value: float) -> None: ...


class LoadedKernel(Protocol):
    """Machine code in a device's memory, ready to be bound. Workspaces belong to it."""

    artifact: Artifact

    def bind(
        self, buffers: Mapping[str, int], scalars: Mapping[str, float], prepared: WeightWorkspaces | None = None
    ) -> BoundKernel:
        """Packs the argument block over addresses of the workload's buffers (arguments and y; workspaces are its own).

        Args:
            prepared: what `prepare_weight` made of the weight: the steps that it ran are left out.

        Raises:
            ArgumentError: an address is missing or not aligned as the plan wants it.
        """

    def prepare_weight(self, weight: int, stream: int = 0) -> WeightWorkspaces:
        """Enqueues the steps of the plan that depend on the weight alone.

        Raises:
            ArgumentError: the address is not aligned as the plan wants it.
        """

    def close(self) -> None: ...


class WeightWorkspaces:
    """Workspaces (name -> address) of one prepared weight. They are freed with this object."""

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        """Raises DeviceError when there is no memory."""
        self.addresses = {name: device.allocate(nbytes) for name, nbytes in sizes.items()}
        weakref.finalize(self, _free_all, device, list(self.addresses.values())).atexit = False


def _free_all(device: Device, addresses: list[int]) -> None:
    with contextlib.suppress(KeyError, DeviceError):  # the device was closed before
        for address in addresses:
            device.free(address)


class Device(Protocol):
    """Memory and code of one device. Not thread-safe."""

    target: Target

    def load(self, artifact: Artifact) -> LoadedKernel:
        """Raises DeviceError when the code does not fit the device."""

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, aligned to at least 256 bytes, uninitialised. Raises DeviceError when there is none."""

    def free(self, address: int) -> None: ...

    def copy_in(self, address: int, data: memoryview) -> None: ...

    def copy_out(self, data: memoryview, address: int) -> None: ...

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Sets every byte, in stream order on the default stream."""

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


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
