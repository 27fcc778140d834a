"""Indices out of range that the calls of a network noted; see `schedsearch.ops.wrong_index`.

See docs/decisions/173-notes-of-wrong-indices.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from schedsearch.device.index_notes import IndexNotes, notes_indices
from schedsearch.executable.program import LOOP

if TYPE_CHECKING:
    from schedsearch.device.contract import Device, LoadedKernel
    from schedsearch.executable.program import Call, Program


class Loaded(Protocol):
    """Code of a program on a device; see `run.Weights`."""

    device: Device
    program: Program

    @property
    def kernels(self) -> Mapping[str, LoadedKernel]: ...

    @property
    def bodies(self) -> Mapping[int, Sequence[Loaded]]: ...


class Notes:
    """Memory for the notes of a network's calls, by their numbers, and of the programs inside of it.

    Attributes:
        bodies: number of a call -> the notes of the programs inside of it.
    """

    def __init__(self, weights: Loaded) -> None:
        self._own = _own_notes(weights)
        self.bodies = {number: [Notes(each) for each in several] for number, several in weights.bodies.items()}

    def buffers(self, number: int) -> Mapping[str, int]:
        """As of `IndexNotes`."""
        return self._own.buffers(number)

    def check(self) -> None:
        """As of `IndexNotes`. Raises IndexRangeError."""
        self._own.check()
        for each in self._inner:
            each.check()

    def close(self) -> None:
        """Does nothing the second time."""
        self._own.close()
        for each in self._inner:
            each.close()

    @property
    def _inner(self) -> Iterator[Notes]:
        return itertools.chain(*self.bodies.values())


def _own_notes(weights: Loaded) -> IndexNotes[int]:
    program = weights.program
    noting = {sha256 for sha256, kernel in weights.kernels.items() if notes_indices(kernel.artifact.plan)}

    def describe(number: int, place: int, index: int) -> str:
        from schedsearch.workload import Workload

        call = program.calls[number]
        workload = Workload.from_json(call.workload)
        names = {argument: program.arrays[array].name for argument, array in call.buffers.items()}
        text = workload.definition.wrong_index(workload.params, place, index, names)
        return f"node {call.name}: {text}. Give other inputs, or correct what computes the indices"

    return IndexNotes(
        weights.device, [number for number, call in enumerate(program.calls) if call.artifact in noting], describe
    )


def index_limits(program: Program) -> dict[str, int]:
    """Input that a call reads as indices -> what they must be less than."""
    found: dict[str, int] = {}
    for call in program.calls:
        for argument, below in _limits_of(call):
            place = program.arrays[call.buffers[argument]].place
            if place.space == "input":
                name = program.arrays[program.inputs[place.number]].name
                found[name] = min(below, found.get(name, below))
    return found


def _limits_of(call: Call) -> Iterator[tuple[str, int]]:
    """Arguments of a call that are indices, and what these must be less than."""
    from schedsearch.workload import Workload

    if call.control is not None:
        for body in call.control.programs:
            places = {body.arrays[index].name: number for number, index in enumerate(body.inputs)}
            shift = 0 if call.control.kind == LOOP else 1
            yield from ((f"x{shift + places[name]}", below) for name, below in index_limits(body).items())
    elif call.foreign is None:
        yield from (
            (each.name, each.below) for each in Workload.from_json(call.workload).signature if each.below is not None
        )
