"""Where a run builds and measures: on this machine, on the workers of a fleet, or builds there and measures here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedsearch.deadline import Deadline
from schedsearch.device.detect import detect_all
from schedsearch.errors import UsageError
from schedsearch.target import Target

if TYPE_CHECKING:
    from schedsearch.fleet.builder import FleetBuilder
    from schedsearch.fleet.client import Fleet
    from schedsearch.fleet.connection import Connection
    from schedsearch.fleet.runner import FleetRunner
    from schedsearch.measure.runner import Runner
    from schedsearch.processes.builder import Builder


@dataclass(frozen=True)
class Place:
    """The devices of a run, and who builds for them.

    Attributes:
        fleet: whose workers build; None: this machine does.
        far: whether the devices are the fleet's, too.
    """

    devices: Sequence[Target]  # of one kind, or GPUs of several
    fleet: Fleet | None = None
    far: bool = False

    @property
    def problems(self) -> list[str]:
        """What is wrong with workers of the fleet, a line each."""
        return [] if self.fleet is None else self.fleet.roster.problems

    def toolchain(self) -> dict[str, str]:
        """Versions of everything that shapes the machine code. Raises DeviceError, see `Roster.builders`."""
        from schedsearch.backend import toolchain

        kind = self.devices[0].kind
        if self.fleet is None:
            return toolchain(kind)
        # Code for a CPU is for its very model, so whoever measures says for which.
        return self.fleet.toolchain(kind, None if self.far else toolchain(kind))

    @property
    def kinds(self) -> list[Target]:
        """A device of each kind; devices of a kind share tasks."""
        return list({device.key: device for device in reversed(self.devices)}.values())[::-1]

    def builders(
        self, workers: int | None, timeout_s: float, mode: str, toolchain: dict[str, str]
    ) -> dict[str, Builder | FleetBuilder]:
        """Who builds, by the key of a kind of devices. The caller closes them."""
        kinds = self.kinds
        if self.fleet is None:
            from schedsearch.processes.builder import Builder, available_cores

            if len(kinds) > 1:  # they share the cores
                workers = max(1, (workers or available_cores() - 1) // len(kinds))
            return {kind.key: Builder(kind, workers=workers, timeout_s=timeout_s, mode=mode) for kind in kinds}
        from schedsearch.fleet.builder import FleetBuilder

        return {kind.key: FleetBuilder(self.fleet, kind, toolchain, timeout_s, mode) for kind in kinds}

    def runners(
        self,
        stack: contextlib.ExitStack,
        *,
        wait: bool,
        on_wait: Callable[[str], None] | None,
        deadline: Deadline,
        meanwhile: Callable[[], None],
        mode: str,
        timeout_s: float,
        reference_timeout_s: float,
    ) -> tuple[list[tuple[Target, Runner | FleetRunner]], float]:
        """Opens all devices at once; `stack` closes them. Returns their runners, and the seconds that others were waited
        for."""
        options = {"mode": mode, "timeout_s": timeout_s, "reference_timeout_s": reference_timeout_s}
        if not self.far:
            return _open_here(self.devices, stack, wait, on_wait, deadline, meanwhile, options)
        return self._open_there(stack, on_wait, options)

    def _open_there(
        self, stack: contextlib.ExitStack, on_wait: Callable[[str], None] | None, options: dict[str, Any]
    ) -> tuple[list[tuple[Target, Runner | FleetRunner]], float]:
        from schedsearch.fleet.runner import FleetRunner

        fleet = self.fleet
        assert fleet is not None

        def open_one(device: Target) -> FleetRunner:
            return FleetRunner(fleet, device, on_wait=on_wait, **options)

        with ThreadPoolExecutor(len(self.devices)) as pool:
            opened = list(pool.map(open_one, self.devices))
        runners = [(device, stack.enter_context(runner)) for device, runner in zip(self.devices, opened)]
        return [*runners], max(runner.waited_s for runner in opened)


@contextlib.contextmanager
def place_of(
    target: str | Target | Sequence[Target],
    scheduler: str | Connection | Fleet | None,
    build_on: str | Connection | Fleet | None,
    *,
    presets: bool = False,
) -> Iterator[Place]:
    """Where a run takes place, from the arguments of `tune`. A fleet that is opened here is left at the end.

    Args:
        presets: whether a device may be absent; see `detect`.

    Raises:
        UsageError, DeviceError: the scheduler or the devices are not there, or both arguments are given.
    """
    if scheduler is not None and build_on is not None:
        raise UsageError("scheduler and build_on are two places to build; give scheduler to build and measure there")
    where = build_on if scheduler is None else scheduler
    if where is None:
        yield Place(_devices_here(target, presets))
        return
    from schedsearch.fleet.client import Fleet
    from schedsearch.fleet.connection import Connection

    with contextlib.ExitStack() as stack:
        if isinstance(where, Fleet):
            fleet = where
        else:
            fleet = stack.enter_context(Fleet(Connection(where) if isinstance(where, str) else where))
            fleet.wait_for_members()
        far = scheduler is not None
        devices = fleet.roster.chosen(target) if far and isinstance(target, str) else _devices_here(target, presets)
        yield Place(devices, fleet, far)


def _devices_here(target: str | Target | Sequence[Target], presets: bool) -> list[Target]:
    if isinstance(target, str):
        return detect_all(target, presets=presets)
    return [target] if isinstance(target, Target) else list(target)


def _open_here(
    devices: Sequence[Target],
    stack: contextlib.ExitStack,
    wait: bool,
    on_wait: Callable[[str], None] | None,
    deadline: Deadline,
    meanwhile: Callable[[], None],
    options: dict[str, Any],
) -> tuple[list[tuple[Target, Runner | FleetRunner]], float]:
    """Locks are acquired one after another in the same order by every run, so that two runs never wait for each other."""
    from schedsearch.measure.lock import DeviceLock
    from schedsearch.measure.runner import Runner

    locks = {}
    for device in sorted(devices, key=lambda device: device.uuid):
        locks[device] = stack.enter_context(
            contextlib.closing(DeviceLock(device, wait=wait, on_wait=on_wait, deadline=deadline))
        )

    def open_one(device: Target) -> Runner:
        return Runner(device, lock=locks[device], meanwhile=meanwhile if device is devices[0] else _nothing, **options)

    with ThreadPoolExecutor(len(devices)) as pool:
        opening = [pool.submit(open_one, device) for device in devices[1:]]
        try:
            first = stack.enter_context(open_one(devices[0]))  # in this thread, which owns the builder
        finally:
            wait_for(opening)
    opened: list[tuple[Target, Runner | FleetRunner]] = [(devices[0], first)]
    for device, each in zip(devices[1:], opening):
        opened.append((device, stack.enter_context(each.result())))
    return opened, math.fsum(lock.waited_s for lock in locks.values())


def _nothing() -> None:
    pass
