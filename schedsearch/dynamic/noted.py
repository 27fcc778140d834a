"""Indices out of range that the calls of a dynamic graph noted; see `schedsearch.ops.wrong_index`."""

from __future__ import annotations

from collections.abc import Mapping

from schedsearch.device import Device, LoadedKernel
from schedsearch.device.index_notes import IndexNotes, notes_indices
from schedsearch.dynamic.program import DynamicProgram
from schedsearch.workload import Workload


def index_notes(program: DynamicProgram, device: Device, kernels: Mapping[Workload, LoadedKernel]) -> IndexNotes[str]:
    """Memory for the notes of a graph's calls, by their names."""
    calls = {call.name: call for segment in program.segments for call in segment.calls}

    def describe(name: str, place: int, index: int) -> str:
        call = calls[name]
        text = call.workload.definition.wrong_index(call.workload.params, place, index, call.inputs)
        return f"{call.what}: {text}. Give other inputs, or correct what computes the indices"

    noting = [name for name, call in calls.items() if notes_indices(kernels[call.workload].artifact.plan)]
    return IndexNotes(device, noting, describe)
