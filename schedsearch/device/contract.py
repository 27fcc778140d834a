"""What every device offers: memory, loaded code, and launches of it. `cpu` and `cuda` implement these protocols.

Below them are rules that both follow: where buffers are, which addresses are allowed, and which steps a launch needs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from schedsearch.errors import ArgumentError, DeviceError
from schedsearch.launch import BUFFER_PARAMS, Artifact, LaunchPlan, Pointer, Step
from schedsearch.target import Target


class Memory(Protocol):
    """Memory of one device. Any thread may call its methods, one at a time."""

    target: Target

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, aligned to at least 256 bytes, uninitialised. Raises DeviceError when there is none."""

    def free(self, address: int) -> None: ...

    def copy_in(self, address: int, data: memoryview) -> None: ...

    def copy(self, destination: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copies within the device's memory, in stream order (0: the default stream). The ranges do not overlap."""

    def copy_box(
        self,
        destination: int,
        source: int,
        extents: tuple[int, ...],
        bound: tuple[int, ...],
        element_bytes: int,
        stream: int = 0,
    ) -> None:
        """Copies an array to the first places of a larger one, in stream order; other elements stay as they are.

        Args:
            destination: address of the larger array, which is contiguous and of shape `bound`.
            source: address of a contiguous array of shape `extents`. The arrays do not overlap.
            extents: one for each axis, none of them larger than that of `bound`.
            element_bytes: 1, 2, 4 or 8.
        """

    def copy_out(self, data: memoryview, address: int) -> None: ...

    def pinned(self, nbytes: int) -> int:
        """Address of new memory of the host that `copy_to_host` reaches without waiting; `free_pinned` frees it."""

    def free_pinned(self, address: int) -> None: ...

    def copy_from_host(self, destination: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copies from the host's memory to the device's, in stream order. Pinned memory must not change before it is copied,
        other memory may change at once."""

    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copies from the device's memory to pinned memory, in stream order."""

    def wait(self, stream: int = 0) -> None:
        """Waits for all work of a stream."""

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Sets every byte, in stream order on the default stream."""

    def synchronize(self) -> None: ...

    def close(self) -> None:
        """Releases the device; does nothing the second time."""


class BoundKernel(Protocol):
    """A kernel whose argument block is packed."""

    def launch(self, stream: int = 0) -> None:
        """Enqueues every step on a CUDA stream (0: the default stream). On the CPU it returns when the result is complete.

        Raises:
            DeviceError: the driver refused the launch.
        """

    def set_pointer(self, buffer: str, address: int) -> None:
        """Replaces a buffer's address in the packed block, also in tensor maps. Ignores a buffer that no step uses.

        Raises:
            ArgumentError: the address lacks the alignment that the plan requires.
        """

    def set_scalar(self, name: str, value: float) -> None:
        """Replaces a scalar's value. Ignores a scalar that no step uses."""


class LoadedKernel(Protocol):
    """Machine code in a device's memory, ready to be bound.

    It owns the workspaces that callers do not place elsewhere. They are allocated when a bound kernel first needs them, and
    all kernels bound to this one share them: two such launches must not run at the same time.
    """

    artifact: Artifact

    @property
    def device(self) -> Memory:
        """Where the code is."""

    def bind(
        self,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        prepared: Workspaces | None = None,
        *,
        early: bool = False,
    ) -> BoundKernel:
        """Packs the argument block.

        Args:
            buffers: name -> address of the workload's arguments and outputs. It may also place a workspace by its name; no
                memory is then allocated for it.
            scalars: values of the call-time scalars.
            prepared: the result of `prepare`; the constant steps are then left out.
            early: a GPU may begin with the first step while the kernel before it in the stream still runs, where its plan
                allows it (`Step.early`), as with further steps in any case. That kernel must be such a one itself, or be
                launched without `early`. None of those before it may write what is read ahead (`Step.ahead`).

        Raises:
            ArgumentError: an address or scalar is missing, or an address lacks the alignment that the plan requires.
            DeviceError: there is no memory for workspaces.
        """

    def prepare(self, addresses: Mapping[str, int], stream: int = 0) -> Workspaces:
        """Enqueues the constant steps of the plan.

        Args:
            addresses: name -> address of every argument in `LaunchPlan.constants`; other arguments are ignored. It may also
                place a workspace by its name, e.g. according to a memory plan.
            stream: the stream of the steps; launches on other streams must wait for them.

        Returns:
            The workspaces that the steps wrote, for `bind`. Without constant steps there are none.

        Raises:
            ArgumentError: an address is missing or lacks the alignment that the plan requires.
            DeviceError: the launch failed, or there is no memory.
        """

    def close(self) -> None:
        """Unloads the code and frees the workspaces. Bound kernels must not be launched afterwards."""


class Device(Memory, Protocol):
    """Memory and code of one device. Any thread may call its methods, one at a time."""

    def load(self, artifact: Artifact) -> LoadedKernel:
        """Raises DeviceError when the code does not fit the device."""


class Workspaces:
    """Scratch memory by name. Memory that was allocated here is freed by `close`, or with this object.

    Args:
        sizes: name -> bytes of all possible workspaces.
        placed: name -> address of workspaces in the caller's memory.

    Attributes:
        addresses: name -> address of the workspaces placed or allocated so far.
    """

    def __init__(self, device: Memory, sizes: Mapping[str, int], placed: Mapping[str, int] | None = None) -> None:
        self._device, self._sizes = device, sizes
        self._own: list[int] = []
        self._lock = threading.Lock()
        self.addresses = {name: address for name, address in (placed or {}).items() if name in sizes}
        self._free = weakref.finalize(self, _free_all, device, self._own)
        self._free.atexit = False  # the device may be gone by then, and the system frees everything anyway

    def take(self, names: Iterable[str]) -> dict[str, int]:
        """Addresses of the workspaces among `names`; allocates those that do not exist yet.

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
        """Bytes of the workspaces placed or allocated so far."""
        return sum(self._sizes[name] for name in self.addresses)

    def close(self) -> None:
        """Frees the memory that was allocated; does nothing the second time."""
        self._free()
        self.addresses = {}


def _free_all(device: Memory, addresses: list[int]) -> None:
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
    """Addresses for some steps of a plan: first given ones, then prepared ones, then the kernel's own workspaces.

    Raises:
        ArgumentError: a buffer that is not optional has no address.
        DeviceError: there is no memory for workspaces.
    """
    known = {**(prepared.addresses if prepared else {}), **buffers}
    params = [param for step in steps for param in step.params if isinstance(param, BUFFER_PARAMS)]
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
    """Raises ArgumentError if the address of a buffer lacks the alignment that the plan requires."""
    check_address(name, address, plan.alignments.get(name, 1))


def check_address(name: str, address: int, alignment: int) -> None:
    """Raises ArgumentError if an address is not a multiple of so many bytes."""
    if address % alignment:
        raise ArgumentError(
            f"{name} is at an address that is not a multiple of {alignment} bytes (remainder {address % alignment}); "
            "pass an array that starts at its allocation, or copy it"
        )


def needed_steps(steps: Sequence[Step], buffers: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers of the steps that have something to do: those that restore an argument do not where it is the output."""

    def in_place(step: Step) -> bool:
        source, output = step.buffers
        return source in buffers and buffers[source] == buffers.get(output)

    return tuple(number for number, step in enumerate(steps) if not (step.restores and in_place(step)))


def split_steps(plan: LaunchPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of a plan's constant steps, and those of its other steps."""
    numbers = range(len(plan.steps))
    constant = tuple(number for number in numbers if plan.steps[number].constant)
    return constant, tuple(number for number in numbers if number not in constant)
