"""A program in words."""

from __future__ import annotations

from collections.abc import Iterator

from schedsearch.executable.program import Call, Program
from schedsearch.text import counted, duration

PREDICTION = (
    "the sum of the calls' recorded times; arrays that stay in the L2 cache make a network faster than cold times say"
)


def explain_lines(program: Program) -> list[str]:
    """Lines for people: what runs, by which kernels, in which layouts, and the memory that it needs."""
    conversions = [call for call in program.calls if call.is_conversion]
    lines = [
        f"{program.model or 'network'} on {program.target}: {counted(len(program.calls), 'kernel call')}, "
        f"{len(conversions)} of them {'converts a layout' if len(conversions) == 1 else 'convert layouts'}",
        _memory(program),
    ]
    if program.predicted_ns:
        lines.append(f"predicted time: {duration(program.predicted_ns)}, {PREDICTION}")
    lines += _by_rung(program)
    for call in program.calls:
        lines += _call(program, call)
    return [*lines, *program.reasons]


def _memory(program: Program) -> str:
    arena, least = program.arena_bytes / 2**20, program.least_arena_bytes / 2**20
    bound = "which is the least possible" if arena == least else f"the lower bound is {least:.2f} MiB"
    return f"memory: {arena:.2f} MiB for values and workspaces, {bound}; {program.constant_bytes / 2**20:.2f} MiB of weights"


def _by_rung(program: Program) -> Iterator[str]:
    rungs = [call.origin.rung for call in program.calls]
    found = {rung: rungs.count(rung) for rung in dict.fromkeys(rungs)}
    yield "kernels: " + ", ".join(f"{count} {rung}" for rung, count in found.items())


def _call(program: Program, call: Call) -> Iterator[str]:
    origin = call.origin
    source = f"record {origin.record_id}" if origin.record_id is not None else origin.rung
    time = f", {duration(origin.time_ns)}" if origin.time_ns else ""
    yield f"  {call.name}: {call.label} by {origin.template} ({source}{time})"
    layouts = []
    for name, index in call.buffers.items():
        array = program.arrays[index]
        if array.place.space not in ("constant", "once"):
            layouts.append(f"{name}={array.name} {array.layout}")
    yield f"      {', '.join(layouts)}"
