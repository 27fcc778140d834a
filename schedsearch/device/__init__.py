"""Running artifacts: the one piece that both the Runner (while tuning) and a deployed Kernel launch through.

Importing this package needs neither Numba nor a template; `cuda` imports the driver bindings, `cpu` imports llvmlite.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol

from schedsearch.errors import ArgumentError, DeviceError
from schedsearch.launch import Artifact, LaunchPlan, Pointer, Step, TensorMap
from schedsearch.target import Target


class BoundKernel(Protocol):
    """A kernel whose argument block is packed."""

    def launch(self, stream: int = 0) -> None:
        """Enqueues every step on a CUDA stream (0: the default stream). On the CPU it returns when all is computed.

        Raises:
            DeviceError: the driver refused the launch.
        """

    def set_pointer(self, buffer: str, address: int) -> None:
        """Replaces a buffer's address in the packed block, tensor maps included. A buffer that no step uses is passed over.

        Raises:
            ArgumentError: the address is not aligned as the plan wants it.
        """

    def set_scalar(self, name: str, value: float) -> None:
        """Replaces a scalar's value. A scalar that no step uses is passed over."""


class LoadedKernel(Protocol):
    """Machine code in a device's memory, ready to be bound.

    It owns the workspaces that nobody places elsewhere. They are allocated when something is bound that needs them, and
    shared by everything that is bound to this kernel: two such launches must not run at the same time.
    """

    artifact: Artifact

    def bind(
        self, buffers: Mapping[str, int], scalars: Mapping[str, float], prepared: Workspaces | None = None
    ) -> BoundKernel:
        """Packs the argument block.

        Args:
            buffers: name -> address of the workload's arguments and outputs. The name of a workspace places that one: no
                memory is allocated for it.
            scalars: values of the call-time scalars.
            prepared: what `prepare` made of the constants: the constant steps are left out.

        Raises:
            ArgumentError: an address or scalar is missing, or an address is not aligned as the plan wants it.
            DeviceError: there is no memory for workspaces.
        """

    def prepare(self, addresses: Mapping[str, int], stream: int = 0) -> Workspaces:
        """Enqueues the constant steps of the plan.

        Args:
            addresses: name -> address of every argument in `LaunchPlan.constants`; other arguments are ignored. The name of
                a workspace places that one, e.g. where a memory plan wants it.
            stream: where the steps are enqueued; launches on other streams must wait for them.

        Returns:
            The workspaces that the steps wrote, for `bind`. Without constant steps there are none.

        Raises:
            ArgumentError: an address is missing or not aligned as the plan wants it.
            DeviceError: the launch failed, or there is no memory.
        """

    def close(self) -> None:
        """Unloads the code and frees the workspaces. Nothing that was bound may be launched afterwards."""


class Workspaces:
    """Scratch memory by name. What was allocated here is freed by `close`, or with this object.

    Args:
        sizes: name -> bytes of all workspaces that there may be.
        placed: name -> address of those that lie in memory of the caller.

    Attributes:
        addresses: name -> address of those that were placed or allocated so far.
    """

    def __init__(self, device: Device, sizes: Mapping[str, int], placed: Mapping[str, int] | None = None) -> None:
        self._device, self._sizes = device, sizes
        self._own: list[int] = []
        self._lock = threading.Lock()
        self.addresses = {name: address for name, address in (placed or {}).items() if name in sizes}
        self._free = weakref.finalize(self, _free_all, device, self._own)
        self._free.atexit = False  # the device may be gone by then, and the system frees everything anyway

    def take(self, names: Iterable[str]) -> dict[str, int]:
        """Addresses of the workspaces among `names`, allocated where they are not yet.

        Raises:
            DeviceError: there is no memory.
        """
        with self._lock:
            wanted = [name for name in names if name in self._sizes]
            for name in wanted:
                if name not in self.addresses:
                    self._own.append(self._device.allocate(self._sizes[name]))
                    self.addresses[name] = self._own[-1]
            return {name: self.addresses[name] for name in wanted}

    @property
    def nbytes(self) -> int:
        """Bytes of those that were placed or allocated so far."""
        return sum(self._sizes[name] for name in self.addresses)

    def close(self) -> None:
        """Frees what was allocated; does nothing the second time."""
        self._free()
        self.addresses = {}


def _free_all(device: Device, addresses: list[int]) -> None:
    with contextlib.suppress(KeyError, DeviceError):  # the device was closed before
        while addresses:
            device.free(addresses.pop())


def place_buffers(
    plan: LaunchPlan,
    steps: Iterable[Step],
    buffers: Mapping[str, int],
    workspaces: Workspaces,
    prepared: Workspaces | None,
) -> dict[str, int]:
    """Addresses for some steps of a plan: those given, then those prepared, then workspaces of the kernel's own.

    Raises:
        ArgumentError: a buffer that is not optional has no address.
        DeviceError: there is no memory for workspaces.
    """
    known = {**(prepared.addresses if prepared else {}), **buffers}
    params = [param for step in steps for param in step.params if isinstance(param, Pointer | TensorMap)]
    known |= workspaces.take(dict.fromkeys(param.buffer for param in params if param.buffer not in known))
    for param in params:
        if param.buffer not in known:
            if not (isinstance(param, Pointer) and param.optional):
                raise ArgumentError(f"no address for buffer {param.buffer!r}; given: {', '.join(buffers) or 'none'}")
            known[param.buffer] = 0
    for name, address in known.items():
        check_alignment(plan, name, address)
    return known


def check_alignment(plan: LaunchPlan, name: str, address: int) -> None:
    """Raises ArgumentError when the address of a buffer is not aligned as the plan wants it."""
    alignment = plan.alignments.get(name, 1)
    if address % alignment:
        raise ArgumentError(
            f"{name} is at an address that is not a multiple of {alignment} bytes (remainder {address % alignment}); "
            "pass an array that starts at its allocation, or copy it"
        )


def split_steps(plan: LaunchPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the constant steps of a plan, and of the others."""
    numbers = range(len(plan.steps))
    constant = tuple(number for number in numbers if plan.steps[number].constant)
    return constant, tuple(number for number in numbers if number not in constant)


class Device(Protocol):
    """Memory and code of one device. Its methods may be called from any thread, one at a time."""

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

    def close(self) -> None:
        """Gives the device back; does nothing the second time."""


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
