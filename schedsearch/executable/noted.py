"""Indices out of range that the calls of a network noted; see `schedsearch.ops.wrong_index`.

See docs/decisions/173-notes-of-wrong-indices.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedsearch.device.index_notes import IndexNotes, notes_indices

if TYPE_CHECKING:
    from schedsearch.executable.program import Program
    from schedsearch.executable.run import Weights


def index_notes(weights: Weights) -> IndexNotes[int]:
    """Memory for the notes of a network's calls, by their numbers."""
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
    from schedsearch.workload import Workload

    found: dict[str, int] = {}
    for call in program.calls:
        for spec in Workload.from_json(call.workload).signature if call.foreign is None else ():
            place = program.arrays[call.buffers[spec.name]].place
            if spec.below is not None and place.space == "input":
                name = program.arrays[program.inputs[place.number]].name
                found[name] = min(spec.below, found.get(name, spec.below))
    return found
