"""A program in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from schedsearch.executable.onnx_runtime import OnnxModel
from schedsearch.executable.program import LOOP, RECORDED, Call, Control, Impossible, Program
from schedsearch.ops.elementwise import ElementwiseParams, reads_of
from schedsearch.text import counted, duration
from schedsearch.workload import Workload

BODY_TITLES = {"If": ("if its condition is true", "if its condition is false"), "Loop": ("in each turn",)}
PREDICTION = "from the times of its calls; those of branches that run side by side count less than their sum"


@dataclass(frozen=True)
class SubgraphCost:
    """What a call of ONNX Runtime costs here."""

    time_ns: float
    model: OnnxModel


def explain_lines(program: Program, subgraphs: Mapping[int, SubgraphCost] = MappingProxyType({})) -> list[str]:
    """Lines for people: what runs, by which kernels, in which layouts, and the memory that it needs.

    Args:
        subgraphs: number of each call of ONNX Runtime -> what it costs.
    """
    conversions = [call for call in program.all_calls if call.is_conversion]
    calls = list(program.all_calls)
    kernels = sum(call.is_kernel for call in calls)
    foreign, controls = (sum(getattr(call, name) is not None for call in calls) for name in ("foreign", "control"))
    others = f"; {counted(foreign, 'subgraph')} in ONNX Runtime" if foreign else ""
    others += f"; {counted(controls, 'branching')}" if controls else ""
    lines = [
        f"{program.model or 'network'} on {program.target}: {counted(kernels, 'kernel call')}, "
        f"{len(conversions)} of them {'converts a layout' if len(conversions) == 1 else 'convert layouts'}{others}",
        _memory(program),
        check_text(program.checked),
    ]
    if program.predicted_ns:
        lines.append(f"predicted time: {prediction(program)}, {PREDICTION}")
    if subgraphs:
        total = duration(sum(each.time_ns for each in subgraphs.values()))
        lines.append(f"ONNX Runtime: {total} in {counted(len(subgraphs), 'subgraph')}, which the predicted time leaves out")
    lines += _by_level(program)
    lines += _calls(program, subgraphs)
    return [*lines, *program.reasons]


def _calls(program: Program, subgraphs: Mapping[int, SubgraphCost]) -> Iterator[str]:
    for number, call in enumerate(program.calls):
        if call.control is not None:
            yield from _control(program, call, call.control)
        elif call.foreign is not None:
            yield from _subgraph(program, call, subgraphs.get(number))
        else:
            yield from _call(program, call)


def _control(program: Program, call: Call, control: Control) -> Iterator[str]:
    reads = [program.arrays[index].name for name, index in call.buffers.items() if name not in call.outputs]
    condition, reads = (f"{reads[0]} times, while {reads[1]}", reads[2:]) if control.kind == LOOP else (reads[0], reads[1:])
    writes = ", ".join(program.arrays[call.buffers[name]].name for name in call.outputs)
    given = f"it reads {', '.join(reads)} and writes {writes}" if reads else f"it writes {writes}"
    yield f"  {call.name}: {control.kind} {condition}, which the host reads in every run; {given}"
    for title, body in zip(BODY_TITLES[control.kind], control.bodies):
        if isinstance(body, Impossible):
            yield f"      {title}: calls fail, because {body.reason}"
            continue
        yield f"      {title}:"
        yield from (f"      {line}" for line in _calls(body, {}))


def prediction(program: Program) -> str:
    """The predicted time, and how many of the kernels it was reckoned from have no record of their own."""
    levels = [call.origin.level for call in program.all_calls if call.is_kernel]
    estimated = sum(level not in RECORDED for level in levels)
    is_or_are = "is" if estimated == 1 else "are"
    of = f", of which {estimated} of {counted(len(levels), 'kernel time')} {is_or_are} estimated" if estimated else ""
    return f"{duration(program.predicted_ns)}{of}"


def check_text(checked: str) -> str:
    """Whether a network was compared with its model when it was built."""
    if not checked:
        return "unchecked: its results were not compared with its model's when it was built"
    return f"checked: its results were compared with its model's, by {checked}, when it was built"


def _memory(program: Program) -> str:
    arena, least = program.arena_bytes / 2**20, program.least_arena_bytes / 2**20
    bound = "which is the least possible" if arena == least else f"the lower bound is {least:.2f} MiB"
    return f"memory: {arena:.2f} MiB for values and workspaces, {bound}; {program.constant_bytes / 2**20:.2f} MiB of weights"


def _by_level(program: Program) -> Iterator[str]:
    levels = [call.origin.level for call in program.all_calls if call.control is None]
    found = {level: levels.count(level) for level in dict.fromkeys(levels)}
    yield "kernels: " + ", ".join(f"{count} {level}" for level, count in found.items())


def _call(program: Program, call: Call) -> Iterator[str]:
    origin = call.origin
    source = f"record {origin.record_id}" if origin.record_id is not None else origin.level
    time = f", {duration(origin.time_ns)}" if origin.time_ns else ""
    yield f"  {call.name}: {call.label} by {origin.template} ({source}{time})"
    layouts = []
    for name, index in call.buffers.items():
        array = program.arrays[index]
        if array.place.space not in ("constant", "once"):
            layouts.append(f"{name}={array.name} {array.layout}")
    yield f"      {', '.join(layouts)}"
    slices = [f"{name}={program.arrays[call.buffers[name]].name}[{cut}]" for name, cut in _slices(call)]
    if slices:
        yield f"      reads in place, without a copy: {', '.join(slices)}"


def _slices(call: Call) -> Iterator[tuple[str, str]]:
    """Arguments that are slices of larger arrays, with the slices in words."""
    workload = Workload.from_json(call.workload)
    if workload.op == "elementwise":
        yield from ((each.name, each.cut) for each in reads_of(ElementwiseParams.of(workload.params)) if each.slice_of)


def _subgraph(program: Program, call: Call, cost: SubgraphCost | None) -> Iterator[str]:
    """`cost`: None of a subgraph in a branch, which need not have run."""
    assert call.foreign is not None
    measured = "" if cost is None else f" ({cost.model.provider}, {duration(cost.time_ns)} measured here)"
    yield f"  {call.name}: {call.label} by ONNX Runtime{measured}"
    for source, reason in zip(call.sources, call.foreign.reasons):
        yield f"      {source}: {reason}"
    arrays = {name: program.arrays[index] for name, index in call.buffers.items()}
    nbytes = {True: 0, False: 0}
    for name, array in arrays.items():
        nbytes[name in call.outputs] += array.nbytes
    copies = f"{nbytes[False]:,} bytes in, {nbytes[True]:,} bytes out"
    if cost is None:
        return
    if cost.model.copies_to_host:
        yield f"      it copies to the host and back in every run: {copies}; with onnxruntime-gpu it would not"
    else:
        yield f"      it reads and writes the network's arrays, without copies: {copies}"
    if cost.model.device.target.kind == "cuda":
        yield "      it waits for the stream before it begins and for its own results: 2 synchronisations, 1 graph more"
    yield f"      {', '.join(f'{name}={array.name} {array.layout}' for name, array in arrays.items())}"
