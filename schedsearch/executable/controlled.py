"""Calls that run programs inside of them, as numbers say that the host reads when it comes to them: `If` and `Loop`.

See docs/decisions/231-branches-that-are-taken.md.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from schedsearch.device.memory import bytes_at
from schedsearch.errors import BranchError
from schedsearch.executable.program import CARRIED, CONDITION, LOOP, STATE, Call, Control, Impossible
from schedsearch.executable.turns import check_turn

if TYPE_CHECKING:
    from schedsearch.device.contract import BoundKernel, Device
    from schedsearch.executable.program import Program

WORDS = {True: "then_branch", False: "else_branch"}
_PINNED_BYTES = 64  # of the host, where numbers of 1 and 8 bytes come to


class Runs(Protocol):
    """A program on fixed memory, with ports that may move; see `run.Calls`."""

    @property
    def bound(self) -> Sequence[BoundKernel]: ...

    def launch(self, stream: int = 0) -> None: ...

    def set_pointer(self, port: str, address: int) -> None: ...

    def close(self) -> None: ...


class BoundControl(abc.ABC):
    """Such a call on fixed addresses; see `schedsearch.device.BoundKernel`. On a GPU a launch waits for all work of the
    stream when it reads a number, and returns when the kernels that follow are enqueued.

    Args:
        addresses: of the call's arguments, outputs and workspaces.
        runs: the bodies that can run, as `placed` has them.

    Attributes:
        taken: the conditions that launches have met.
    """

    def __init__(self, device: Device, call: Call, addresses: Mapping[str, int], runs: Sequence[Runs]) -> None:
        assert call.control is not None
        self._device, self._call, self._control, self._addresses = device, call, call.control, dict(addresses)
        self.runs = tuple(runs)
        self.taken: set[bool] = set()
        self._pinned = device.pinned(_PINNED_BYTES) if device.target.kind == "cuda" else 0

    @abc.abstractmethod
    def launch(self, stream: int = 0) -> None: ...

    @abc.abstractmethod
    def run_of(self, truth: bool) -> Runs | None:
        """What runs for a condition, if anything can."""

    def set_pointer(self, buffer: str, address: int) -> None:
        self._addresses[buffer] = address
        port = port_inside(self._call, buffer)
        for each in self.runs if port is not None else ():
            each.set_pointer(str(port), address)

    def set_scalar(self, name: str, value: float) -> None:  # noqa: B027
        """A call of a program has no scalars."""

    def close(self) -> None:
        """Frees what the bodies have. Does nothing the second time."""
        for each in self.runs:
            each.close()
        if self._pinned:
            self._device.free_pinned(self._pinned)
            self._pinned = 0

    def _read(self, address: int, nbytes: int, stream: int) -> int:
        """An integer on the device."""
        if self._pinned:
            self._device.copy_to_host(self._pinned, address, nbytes, stream)
            self._device.wait(stream)
            address = self._pinned
        return int.from_bytes(bytes_at(address, nbytes), "little", signed=True)


class BoundIf(BoundControl):
    """Runs one of two programs."""

    def launch(self, stream: int = 0) -> None:
        """Raises BranchError if the branch that is taken cannot be computed."""
        truth = self._read(self._addresses[CONDITION], 1, stream) != 0
        run = self.run_of(truth)
        if run is None:
            body = self._control.bodies[0 if truth else 1]
            assert isinstance(body, Impossible)
            raise BranchError(
                f"the inputs take the {WORDS[truth]} of {self._call.name} (If), which cannot be computed for arrays of "
                f"these shapes: {body.reason}. Give inputs that take the other branch, or build the model for other shapes"
            )
        self.taken.add(truth)
        run.launch(stream)

    def run_of(self, truth: bool) -> Runs | None:
        place = 0 if truth else 1
        if isinstance(self._control.bodies[place], Impossible):
            return None
        return self.runs[sum(not isinstance(each, Impossible) for each in self._control.bodies[:place])]


class BoundLoop(BoundControl):
    """Runs a program again and again. What it carries from turn to turn is in two places: a turn reads one and writes the
    other."""

    def launch(self, stream: int = 0) -> None:
        """Raises TurnsError inside of `limited_turns`."""
        turn_at, true_at, condition_at, *carried = self._control.addresses(self._addresses[STATE])
        most = self._read(self._addresses["x0"], 8, stream)
        goes_on = self._read(self._addresses["x1"], 1, stream) != 0
        sizes = self._control.carried_bytes
        places = carried[: len(sizes)], carried[len(sizes) :]
        for number, nbytes in enumerate(sizes):
            self._device.copy(places[0][number], self._addresses[f"x{CARRIED + number}"], nbytes, stream)
        self._device.copy_from_host(true_at, np.ones(1, np.uint8).ctypes.data, 1, stream)
        turn = 0
        while turn < most and goes_on:
            check_turn(turn, self._call.name)
            count = np.array(turn, np.int64)
            self._device.copy_from_host(turn_at, count.ctypes.data, count.nbytes, stream)
            self.taken.add(True)
            self.runs[turn % 2].launch(stream)
            goes_on = self._read(condition_at, 1, stream) != 0
            turn += 1
        for number, nbytes in enumerate(sizes):
            self._device.copy(self._addresses[f"y{number}"], places[turn % 2][number], nbytes, stream)

    def run_of(self, truth: bool) -> Runs | None:
        return self.runs[0] if truth else None


def placed(call: Call, addresses: Mapping[str, int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Number of a body of those that can run, and the addresses of its inputs and outputs, each time that it is bound."""
    assert call.control is not None
    reads = [addresses[name] for name in call.buffers if name not in call.outputs]
    writes = [addresses[name] for name in call.outputs]
    if call.control.kind != LOOP:
        yield from ((number, reads[1:], writes) for number in range(len(call.control.programs)))
        return
    turn_at, true_at, condition_at, *carried = call.control.addresses(addresses[STATE])
    one, other = carried[: len(writes)], carried[len(writes) :]
    around = reads[CARRIED + len(writes) :]
    yield 0, [turn_at, true_at, *one, *around], [condition_at, *other]
    yield 0, [turn_at, true_at, *other, *around], [condition_at, *one]


def port_inside(call: Call, buffer: str) -> str | None:
    """The port of the bodies that an argument or output of the call is; None if the host reads or writes it."""
    assert call.control is not None
    number, is_read = int(buffer[1:]), buffer.startswith("x")
    if call.control.kind == LOOP:
        return f"input{number}" if is_read and number >= CARRIED + len(call.outputs) else None
    if is_read:
        return f"input{number - 1}" if number else None
    return f"output{number}"


def bound_control(device: Device, call: Call, addresses: Mapping[str, int], runs: Sequence[Runs]) -> BoundControl:
    """As of `BoundControl`."""
    control: Control | None = call.control
    assert control is not None
    return (BoundLoop if control.kind == LOOP else BoundIf)(device, call, addresses, runs)


def untaken(program: Program, bound: Sequence[BoundKernel]) -> Iterator[str]:
    """The bodies of a program, and of those inside of it, that no launch has run, for people.

    Args:
        bound: its calls, or nothing if it never ran.
    """
    for number, call in enumerate(program.calls):
        if call.control is None:
            continue
        made = bound[number] if bound else None
        for truth, body in zip((True, False), call.control.bodies):
            if isinstance(body, Impossible):
                continue
            run = made.run_of(truth) if isinstance(made, BoundControl) and truth in made.taken else None
            if run is None:
                yield f"the {'body' if call.control.kind == LOOP else WORDS[truth]} of {call.name}"
            else:
                yield from untaken(body, run.bound)
