"""The kernel that computes the sizes of a whole segment of a network on the device: its shape functions, compiled.

Sizes are int64 words of one block of memory. One is the status: 0, or what the first mistake was. The other words are
extents of arrays: of those that come into the segment, and of those that its operators make. One thread block goes
through the operators in order, with a thread for each axis; an operator reads the extents that earlier ones wrote.

What is impossible has the extents 0, so that kernels which read them write nothing, and is named by the status. For a host
that reads the sizes anyway there is no status: then the extents of what is impossible are minus the status.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import cuda

from schedsearch.launch import Grid, NumbaArray, Param
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.size_steps import EXCEEDS, FIRST_PROBLEM, KINDS, NEGATIVE, SIZES, SizeStep, Values, Words
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts.casts import i64

_WARP = 32


def sizes_source(steps: Sequence[SizeStep], words: int, target: Target, status: int | None = 0) -> KernelSource:
    """The kernel over the buffer `SIZES` and those of all `Values`.

    Args:
        words: of the block.
        status: the word of the status; None: the extents of what is impossible are minus the status.
    """
    buffers = {each.buffer: each for step in steps for each in step.inputs if isinstance(each, Values)}
    params: list[Param] = [NumbaArray(SIZES, "int64", (words,), (8,))]
    for name, each in buffers.items():
        params.append(NumbaArray(name, each.dtype, (max(each.count, 1),), (dtype(each.dtype).nbytes,)))
    slots = {name: slot for slot, name in enumerate(buffers, start=1)}
    on_cuda = target.kind == "cuda"
    run: Callable[..., None] = _nothing
    for number, step in enumerate(steps, start=1):
        run = _then(run, _step_function(step, number, slots, on_cuda, status))
    reset = _nothing if status is None else _resetting(status)

    def on_gpu(*operands: Any) -> None:
        first = cuda.threadIdx.x
        reset(operands, first, _WARP)
        cuda.syncthreads()
        run(operands, first, _WARP)

    def on_cpu(*operands: Any, start: Any, stop: Any) -> None:
        reset(operands, 0, 1)
        run(operands, 0, 1)

    function = on_gpu if on_cuda else on_cpu
    launch = KernelStep(function, tuple(params), Grid(1), _WARP if on_cuda else 1, contract=False)
    return KernelSource(target.kind, "native", (launch,))


def _step_function(
    step: SizeStep, number: int, slots: dict[str, int], on_cuda: bool, status: int | None
) -> Callable[..., None]:
    """`run(operands, first, stride)`: the axes first, first + stride ... of one output."""
    collect: Callable[[Any], Any] = _no_inputs
    for each in step.inputs:
        collect = (
            _and_words(collect, each.first, each.count)
            if isinstance(each, Words)
            else _and_values(collect, slots[each.buffer], each.count)
        )
    extent = spread_with_axis(step.function.extent, len(step.inputs))
    problem = spread(step.function.problem, len(step.inputs)) if step.function.problem else _no_problem
    to, rank, bound = step.to.first, step.to.count, step.bound or (0,)
    meet, limited = _meet if on_cuda else _go_on, step.bound is not None
    base = number * KINDS
    fail = _failing_by_extents(to, rank) if status is None else _failing_by_status(to, rank, status)

    def compute(operands: Any, first: Any, stride: Any) -> None:
        sizes = operands[0]
        inputs = collect(operands)
        wrong = i64(problem(inputs))
        if wrong:
            wrong += FIRST_PROBLEM - 1
        else:
            for axis in range(first, rank, stride):
                sizes[to + axis] = extent(axis, inputs)
        meet()
        if limited and not wrong:
            for axis in range(rank):
                if sizes[to + axis] < 0:
                    wrong = i64(NEGATIVE)
            for axis in range(rank):
                if wrong == 0 and sizes[to + axis] > bound[axis]:
                    wrong = i64(EXCEEDS)
        meet()
        if wrong:
            fail(sizes, first, stride, base + wrong)
        meet()

    return compute


def _nothing(operands: Any, first: Any, stride: Any) -> None:
    pass


def _resetting(status: int) -> Callable[..., None]:
    def reset(operands: Any, first: Any, stride: Any) -> None:
        if first == 0:
            operands[0][status] = 0

    return reset


def _failing_by_status(to: int, rank: int, status: int) -> Callable[..., None]:
    def fail(sizes: Any, first: Any, stride: Any, code: Any) -> None:
        for axis in range(first, rank, stride):
            sizes[to + axis] = 0
        if first == 0 and sizes[status] == 0:
            sizes[status] = code

    return fail


def _failing_by_extents(to: int, rank: int) -> Callable[..., None]:
    def fail(sizes: Any, first: Any, stride: Any, code: Any) -> None:
        for axis in range(first, rank, stride):
            sizes[to + axis] = -code

    return fail


def mistake(steps: Sequence[SizeStep], code: int) -> tuple[int, str]:
    """The number of the step that a status is about, counted from 0, and what is wrong."""
    number, kind = divmod(code, KINDS)
    function, bound = steps[number - 1].function, steps[number - 1].bound
    if kind == NEGATIVE:
        return number - 1, "the shape function gives a negative size; correct it"
    if kind == EXCEEDS:
        shown = "x".join(map(str, bound or ()))
        return number - 1, f"the extents exceed their declared bound {shown}; declare larger bounds"
    return number - 1, function.messages[kind - FIRST_PROBLEM]


def _then(before: Callable[..., None], after: Callable[..., None]) -> Callable[..., None]:
    def both(operands: Any, first: Any, stride: Any) -> None:
        before(operands, first, stride)
        after(operands, first, stride)

    return both


def _no_inputs(operands: Any) -> Any:
    return ()


def _and_words(collect: Callable[[Any], Any], first: int, count: int) -> Callable[[Any], Any]:
    stop = first + count

    def more(operands: Any) -> Any:
        return (*collect(operands), operands[0][first:stop])

    return more


def _and_values(collect: Callable[[Any], Any], slot: int, count: int) -> Callable[[Any], Any]:
    def more(operands: Any) -> Any:
        return (*collect(operands), operands[slot][0:count])

    return more


def _no_problem(inputs: Any) -> int:
    return 0


def spread(f: Callable[..., Any], count: int) -> Callable[[Any], Any]:
    """The function of a tuple of `count` inputs: kernels have no calls with stars."""
    return (
        lambda i: f(),
        lambda i: f(i[0]),
        lambda i: f(i[0], i[1]),
        lambda i: f(i[0], i[1], i[2]),
        lambda i: f(i[0], i[1], i[2], i[3]),
        lambda i: f(i[0], i[1], i[2], i[3], i[4]),
        lambda i: f(i[0], i[1], i[2], i[3], i[4], i[5]),
    )[count]


def spread_with_axis(f: Callable[..., Any], count: int) -> Callable[[Any, Any], Any]:
    """The function of an axis and a tuple of `count` inputs."""
    return (
        lambda axis, i: f(axis),
        lambda axis, i: f(axis, i[0]),
        lambda axis, i: f(axis, i[0], i[1]),
        lambda axis, i: f(axis, i[0], i[1], i[2]),
        lambda axis, i: f(axis, i[0], i[1], i[2], i[3]),
        lambda axis, i: f(axis, i[0], i[1], i[2], i[3], i[4]),
        lambda axis, i: f(axis, i[0], i[1], i[2], i[3], i[4], i[5]),
    )[count]


def _meet() -> None:
    cuda.syncthreads()


def _go_on() -> None:
    pass
