"""Calls that run one of the programs inside of them: the host reads the condition when it comes to them.

See docs/decisions/231-branches-that-are-taken.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from schedsearch.device.memory import bytes_at
from schedsearch.errors import BranchError
from schedsearch.executable.program import Impossible

if TYPE_CHECKING:
    from schedsearch.device.contract import BoundKernel, Device
    from schedsearch.executable.program import Call, Program

CONDITION = "x0"
WORDS = {True: "then_branch", False: "else_branch"}
_PINNED_BYTES = 64  # of the host, where the condition of one byte comes to


class Runs(Protocol):
    """A program on fixed memory, with ports that may move; see `run.Calls`."""

    @property
    def bound(self) -> Sequence[BoundKernel]: ...

    def launch(self, stream: int = 0) -> None: ...

    def set_pointer(self, port: str, address: int) -> None: ...

    def close(self) -> None: ...


class BoundControl:
    """An `If` on fixed addresses; see `schedsearch.device.BoundKernel`. On a GPU a launch waits for all work of the stream,
    because the host decides what comes next, and returns when the chosen kernels are enqueued.

    Args:
        condition: address of a truth value.
        bodies: those that can run, on the addresses of this call.

    Attributes:
        taken: the conditions that launches have met.
    """

    def __init__(self, device: Device, call: Call, condition: int, bodies: Sequence[Runs]) -> None:
        assert call.control is not None
        self._device, self._call, self._condition, self._possible = device, call, condition, bodies
        made = iter(bodies)
        self.bodies = tuple(each if isinstance(each, Impossible) else next(made) for each in call.control.bodies)
        self._pinned = device.pinned(_PINNED_BYTES) if device.target.kind == "cuda" else 0

        self.taken: set[bool] = set()

    def launch(self, stream: int = 0) -> None:
        """Raises BranchError if the branch that is taken cannot be computed."""
        truth = self._is_true(stream)
        body = self.bodies[0 if truth else 1]
        if isinstance(body, Impossible):
            raise BranchError(
                f"the inputs take the {WORDS[truth]} of {self._call.name} (If), which cannot be computed for arrays of "
                f"these shapes: {body.reason}. Give inputs that take the other branch, or build the model for other shapes"
            )
        self.taken.add(truth)
        body.launch(stream)

    def _is_true(self, stream: int) -> bool:
        if not self._pinned:
            return bytes_at(self._condition, 1)[0] != 0
        self._device.copy_to_host(self._pinned, self._condition, 1, stream)
        self._device.wait(stream)
        return bytes_at(self._pinned, 1)[0] != 0

    def set_pointer(self, buffer: str, address: int) -> None:
        if buffer == CONDITION:
            self._condition = address
            return
        for body in self._possible:
            body.set_pointer(port_of(buffer), address)

    def set_scalar(self, name: str, value: float) -> None:
        """A call of a program has no scalars."""

    def close(self) -> None:
        """Frees what the bodies have. Does nothing the second time."""
        for body in self._possible:
            body.close()
        if self._pinned:
            self._device.free_pinned(self._pinned)
            self._pinned = 0


def untaken(program: Program, bound: Sequence[BoundKernel]) -> Iterator[str]:
    """The branches of a program, and of those inside of it, that no launch has taken, for people.

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
            if not isinstance(made, BoundControl) or truth not in made.taken:
                yield f"the {WORDS[truth]} of {call.name}"
            elif not isinstance(runs := made.bodies[0 if truth else 1], Impossible):
                yield from untaken(body, runs.bound)


def port_of(buffer: str) -> str:
    """The port of the bodies that an argument behind the condition, or an output, is."""
    number = int(buffer[1:])
    return f"input{number - 1}" if buffer.startswith("x") else f"output{number}"
