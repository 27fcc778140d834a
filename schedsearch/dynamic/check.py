"""What every program of a dynamic graph obeys: checked when it comes from a file, before anything is loaded.

A program tells machine code which addresses to use, and which words of the block of sizes. So arrays are as large as the
workloads that use them say, extents have a word for each dimension, and every word is in the block.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from schedsearch.dynamic.program import DynamicCall, DynamicProgram, DynamicValue, Formula
from schedsearch.executable.check import LARGEST_BYTES, require
from schedsearch.launch import LaunchPlan
from schedsearch.ops import ArgSpec
from schedsearch.ops.declared_shapes import is_extents
from schedsearch.ops.dtypes import DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.size_steps import Values, Words
from schedsearch.text import quoted
from schedsearch.workload import Workload


def check(program: DynamicProgram, plans: Mapping[Workload, LaunchPlan], sizes: Collection[tuple[int, bool]]) -> None:
    """Checks a program whose fields have their types.

    Args:
        plans: the launch plan of each workload.
        sizes: (number of a segment, whether the run is bounded) of each kernel of sizes.

    Raises:
        ProgramError: it breaks a rule.
        PlanError: a launch plan does not fit its workload.
    """
    require(0 < program.words <= LARGEST_BYTES, f"there are {quoted(program.words)} words")
    chosen = {size.name for name in program.inputs if name in program.values for size in program.values[name].sizes.values()}
    for name, value in program.values.items():
        _check_value(program, name, value)
        for extent in value.known or ():
            require(_is_possible(extent, chosen), f"value {quoted(name)} has a known extent that is not possible")
    named = (*program.inputs, *program.outputs, *program.constants, *(each.name for each in program.shows.values()))
    for name in named:
        require(name in program.values, f"there is no value {quoted(name)}")
    require(len(program.called) == len(program.outputs), "outputs and their names differ in number")
    for name, array in program.constants.items():
        value = program.values[name]
        nbytes = dtype_of(value.dtype).nbytes
        require((array.shape, array.dtype.itemsize) == (value.shape, nbytes), f"constant {quoted(name)} has another shape")
    for words, extents in program.fixed:
        require(_inside(program, words, len(extents)), "fixed extents are outside of the words")
    for fetched in (program.last, *(segment.fetched for segment in program.segments)):
        require(
            fetched is None or (fetched.count > 0 and _inside(program, fetched, fetched.count)),
            "fetched extents are outside of the words",
        )
    for workload, plan in plans.items():
        plan.check(workload)
    made = {*program.inputs, *program.constants}
    for call in (call for segment in program.segments for call in segment.calls):
        require(call.workload in plans, f"{quoted(call.name)} has no kernel")
        _check_call(program, call)
        for name in call.inputs.values():
            value = program.values[name]
            there = value.numbers or not made.isdisjoint((name, value.view_of))
            require(there, f"{quoted(call.name)} reads {quoted(name)}, which nothing has written before")
        for name in (each for each in call.outputs.values() if each in program.values):
            made |= {name, program.values[name].view_of or name}
    for name in program.outputs:
        require(not made.isdisjoint((name, program.values[name].view_of)), f"nothing makes the output {quoted(name)}")
    for segment in program.segments:
        require(len(segment.steps) == len(segment.values), "a segment has not one value for each step")
        for name, step in zip(segment.values, segment.steps):
            require(name in program.values, f"there is no value {quoted(name)}")
            value = program.values[name]
            require(_inside(program, step.to, _rank(value)), f"a step of {quoted(name)} has other words")
            require(step.bound == (None if value.numbers else value.shape), f"{quoted(name)} has another bound")
            for each in step.inputs:
                require(_is_there(program, each), f"a step of {quoted(name)} reads what is not there")
    wanted = {(n, way) for n, segment in enumerate(program.segments) if segment.steps for way in (False, True)}
    require({*sizes} == wanted, "its kernels of sizes are not those of its segments")


def _check_value(program: DynamicProgram, name: str, value: DynamicValue) -> None:
    where = f"value {quoted(name)}"
    require(value.name == name and value.dtype in DTYPES, f"{where} is {quoted(value.name)} of {quoted(value.dtype)}")
    require(all(0 <= n <= LARGEST_BYTES for n in value.shape), f"{where} has the shape {quoted(value.shape)}")
    require(value.nbytes <= LARGEST_BYTES, f"{where} has the shape {quoted(value.shape)}")
    for words in (value.words, value.fixed):
        require(words is None or _inside(program, words, _rank(value)), f"{where} has extents outside of the words")
    require(not value.numbers or value.words is not None, f"{where} has no words")
    known = value.known
    require(known is None or len(known) == len(value.shape), f"{where} has other known extents than dimensions")
    for axis, size in value.sizes.items():
        require(axis < len(value.shape) and size.most == value.shape[axis], f"{where} has other sizes than dimensions")
    if value.view_of:
        owner = program.values.get(value.view_of)
        require(owner is not None and not owner.view_of, f"{where} is a view of {quoted(value.view_of)}")
        assert owner is not None
        require(math.prod(owner.shape) == math.prod(value.shape), f"{where} has another size than what it is a view of")
        require(owner.dtype == value.dtype, f"{where} has another dtype than what it is a view of")


def _check_call(program: DynamicProgram, call: DynamicCall) -> None:
    arguments = {each.name: each for each in call.workload.signature}
    outputs = {each.name: each for each in call.workload.outputs}
    wanted = {name for name in arguments if not is_extents(name, arguments)}
    where = f"call {quoted(call.name)}"
    require(call.inputs.keys() == wanted, f"{where} gets {quoted(sorted(call.inputs))}; {sorted(wanted)} are wanted")
    require(call.outputs.keys() == outputs.keys(), f"{where} has the outputs {quoted(sorted(call.outputs))}")
    require(call.scalars.keys() <= {each.name for each in call.workload.scalars}, f"{where} has other scalars")
    require(call.shape_functions.keys() <= outputs.keys(), f"{where} has shape functions of other outputs")
    for mine, name in call.inputs.items():
        require(name in program.values, f"{where} reads {quoted(name)}, which nothing makes")
        _fit(program.values[name], arguments[mine], where)
    for mine, name in call.outputs.items():
        if name in program.values:
            _fit(program.values[name], outputs[mine], where)
        else:
            require(is_extents(mine, outputs), f"{where} writes {quoted(name)}, which is not a value")


def _fit(value: DynamicValue, spec: ArgSpec, where: str) -> None:
    require(
        (value.shape, value.dtype) == (spec.shape, spec.dtype),
        f"{spec.name} of {where} is {spec.dtype} {list(spec.shape)}; {quoted(value.name)} is {value.dtype} "
        f"{quoted(value.shape)}",
    )


def _is_possible(extent: int | Formula, chosen: Collection[str]) -> bool:
    """Whether an extent can be computed from the sizes that callers choose."""
    if isinstance(extent, int):
        return abs(extent) <= LARGEST_BYTES
    if extent.over < 1 or max(abs(extent.times), abs(extent.plus), extent.over) > LARGEST_BYTES:
        return False
    return extent.base in chosen if isinstance(extent.base, str) else _is_possible(extent.base, chosen)


def _rank(value: DynamicValue) -> int:
    """How many words its extents have, or its numbers."""
    return value.shape[0] if value.numbers and value.shape else len(value.shape)


def _inside(program: DynamicProgram, words: Words, count: int) -> bool:
    """Whether words are in the block, as many as wanted."""
    return words.count == count and words.first >= 0 and words.first + count <= program.words


def _is_there(program: DynamicProgram, read: Words | Values) -> bool:
    if isinstance(read, Words):
        return _inside(program, read, read.count)
    value = program.values.get(read.buffer)
    return value is not None and (value.dtype, math.prod(value.shape)) == (read.dtype, read.count)
