"""Workspaces with guards: what a kernel writes outside its scratch memory shows."""

from __future__ import annotations

import contextlib

import numpy as np

from schedsearch.device import Device
from schedsearch.errors import DeviceError
from schedsearch.launch import LaunchPlan

_GUARD_BYTES = 256
_ALIGNMENT = 256


class GuardedWorkspaces:
    """Memory for the workspaces of a plan, with guards right before and right behind each. Nothing without workspaces.

    The guard behind a workspace begins at its exact end, not at the next aligned address.

    Attributes:
        addresses: name -> address, for `LoadedKernel.bind`.

    Raises:
        DeviceError: there is no memory.
    """

    def __init__(self, device: Device, plan: LaunchPlan) -> None:
        self._device, self._plan = device, plan
        self._spans: dict[str, tuple[int, int]] = {}  # of each workspace, from the first guard on
        alignments = {name: max(_ALIGNMENT, plan.alignments.get(name, 1)) for name in plan.workspaces}
        end = 0
        for name, size in plan.workspaces.items():
            start = _round_up(end + _GUARD_BYTES, alignments[name])
            end = start + size
            self._spans[name] = (start, end)
        self._nbytes = _round_up(end + _GUARD_BYTES, _ALIGNMENT)
        self._content = 0xFF
        self._memory, self._base = 0, 0
        if self._spans:
            self._memory = device.allocate(self._nbytes + max(alignments.values()))
            self._base = _round_up(self._memory, max(alignments.values()))
        self.addresses = {name: self._base + start for name, (start, _) in self._spans.items()}

    def __bool__(self) -> bool:
        return bool(self._spans)

    def fill(self, byte: int) -> None:
        """Fills the workspaces and their guards."""
        self._content = byte
        if self._spans:
            self._device.fill(self._base, byte, self._nbytes)

    def overrun(self) -> str:
        """Describes writes to the guards since `fill`; empty if there were none."""
        if not self._spans:
            return ""
        edges = [(None, 0), *((name, end) for name, (_, end) in self._spans.items())]
        starts = [*(start for start, _ in self._spans.values()), self._nbytes]
        names = [*self._spans, None]
        for (before, end), start, after in zip(edges, starts, names):
            guard = np.empty(start - end, np.uint8)
            self._device.copy_out(guard.data, self._base + end)
            changed = np.flatnonzero(guard != self._content)
            if changed.size:
                places = [f"+{changed[0]} after the end of {before}"] if before else []
                places += [f"{guard.size - changed[0]} before the start of {after}"] if after else []
                return f"the kernel wrote outside its workspaces: {changed.size} bytes changed, at {' or '.join(places)}"
        return ""

    def close(self) -> None:
        if self._spans:
            with contextlib.suppress(DeviceError):  # nothing can be freed after a fault of the kernel
                self._device.free(self._memory)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
