"""What arange, expand, reshape, where and dyn_concat compute, for GPUs and CPUs.

Every thread computes the extents of y by the operator's shape function from extents and values in memory. Then threads share
the elements of y in use: from the number of an element follow its place in y, and where it comes from. Numbers of elements
are below 2^31, so that divisions are those of 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from schedsearch.launch import NumbaArray, Param
from schedsearch.ops.arange import ArangeParams
from schedsearch.ops.bounded import extents_of
from schedsearch.ops.dependence import Dependence
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.dyn_concat import DynConcatParams
from schedsearch.ops.movement import row_strides
from schedsearch.ops.reshape import ReshapeParams
from schedsearch.templates.parts.casts import f32, f64, i32, i64, u32
from schedsearch.templates.parts.sizes import spread, spread_with_axis
from schedsearch.workload import Workload

_BITS = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}
Run = Callable[[Any, Any, Any], None]


def parameters(p: Workload) -> tuple[Param, ...]:
    """Arguments and outputs in order, as flat arrays; what is only moved as its bits."""
    params: list[Param] = []
    for spec in (*p.signature, *p.outputs):
        nbytes = dtype_of(spec.dtype).nbytes
        word = dtype_of(spec.dtype).storage if p.op == "arange" else _BITS[nbytes]
        params.append(NumbaArray(spec.name, word, (spec.size,), (nbytes,)))
    return tuple(params)


def arranging(p: Workload, share: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Run:
    """`run(operands, start, stop)`: the extents of y, and the elements of y of one thread.

    Args:
        share: `share(elements, start, stop)` gives the range of a thread: first, end, step.
    """
    slots = {spec.name: slot for slot, spec in enumerate((*p.signature, *p.outputs))}
    y, y_extents, rank = slots["y"], slots[extents_of("y")], len(p.outputs[0].shape)
    bound, y_steps, fetch = p.outputs[0].shape, row_strides(p.outputs[0].shape), _FETCH[p.op](p, slots)
    measure = _counting(p, slots) if p.shape_functions["y"].counted else measuring(p, slots)

    def run(operands: Any, start: Any, stop: Any) -> None:
        possible, extents = measure(operands)
        elements = i64(1)
        for axis in range(rank):
            elements = elements * min(extents[axis], i64(bound[axis]))
        if not possible:
            elements = i64(0)
        if start == 0:
            for axis in range(rank):
                operands[y_extents][axis] = extents[axis] if possible else i64(0)
        first, end, step = share(elements, start, stop)
        for item in range(first, end, step):
            rest, at = u32(item), i64(0)
            for back in range(rank):
                axis = rank - 1 - back
                extent = u32(extents[axis])
                above = u32(rest // extent)
                at += i64(u32(rest - u32(above * extent))) * y_steps[axis]
                rest = above
            operands[y][at] = fetch(operands, extents, item)

    return run


def measuring(p: Workload, slots: dict[str, int]) -> Callable[[Any], Any]:
    """`measure(operands) -> (whether the inputs are possible, extents of y)` by the shape function."""
    function, bound = p.shape_functions["y"], p.outputs[0].shape
    rank, count = len(bound), len(function.inputs)
    shapes = {spec.name: spec.shape for spec in p.signature}
    collect: Callable[[Any], Any] = _nothing
    for name in function.inputs:
        of_extents = function.needs[name] is Dependence.SHAPE
        slot = slots.get(extents_of(name) if of_extents else name)
        collect = _and_known(collect, shapes[name]) if slot is None else _and_array(collect, slot)
    extent = spread_with_axis(function.extent, count)
    problem = spread(function.problem, count) if function.problem else _no_problem
    extents_by: Callable[[Any], Any] = _nothing
    for axis in range(rank):
        extents_by = _and_extent(extents_by, extent, axis)

    def measure(operands: Any) -> Any:
        inputs = collect(operands)
        possible = problem(inputs) == 0
        if not possible:
            return False, nothing_of
        found = extents_by(inputs)
        for axis in range(rank):
            if found[axis] < 0 or found[axis] > bound[axis]:
                possible = False
        return possible, found

    nothing_of = (0,) * rank
    return measure


def _counting(p: Workload, slots: dict[str, int]) -> Callable[[Any], Any]:
    """The count of an arange of floats: the least number of steps that reach the limit, in float64."""
    start, limit, delta = (slots[name] for name in ("start", "limit", "delta"))

    def measure(operands: Any) -> Any:
        step = f64(operands[delta][0])
        distance = f64(operands[limit][0]) - f64(operands[start][0])
        steps = distance / step if step != 0.0 else f64(0.0)
        whole = i64(steps) if 0.0 < steps < 2.0**62 else i64(0)
        if whole < steps and whole < 2**62:
            whole += 1
        return step != 0.0, (max(whole, i64(0)),)

    return measure


# ---- where an element comes from: fetch(operands, extents of y, number of the element)


def _of_arange(p: Workload, slots: dict[str, int]) -> Callable[..., Any]:
    start, delta = slots["start"], slots["delta"]
    number = {"int64": i64, "int32": i32, "float32": f32}[ArangeParams.of(p.params).dtype]

    def fetch(operands: Any, extents: Any, item: Any) -> Any:
        return number(operands[start][0] + number(number(item) * operands[delta][0]))

    return fetch


def _of_broadcast(p: Workload, slots: dict[str, int], name: str) -> Callable[..., Any]:
    """The place in an array that is repeated along axes of extent 1."""
    shape = next(spec.shape for spec in p.signature if spec.name == name)
    own, steps, rank = len(shape), row_strides(shape), len(p.outputs[0].shape)
    extents_of_it = _extents(p, slots, name)

    def place(operands: Any, extents: Any, item: Any) -> Any:
        mine = extents_of_it(operands)
        rest, at = u32(item), i64(0)
        for back in range(own):
            extent = u32(extents[rank - 1 - back])
            above = u32(rest // extent)
            if mine[own - 1 - back] != 1:
                at += i64(u32(rest - u32(above * extent))) * steps[own - 1 - back]
            rest = above
        return at

    return place


def _of_expand(p: Workload, slots: dict[str, int]) -> Callable[..., Any]:
    place, x = _of_broadcast(p, slots, "x"), slots["x"]

    def fetch(operands: Any, extents: Any, item: Any) -> Any:
        return operands[x][place(operands, extents, item)]

    return fetch


def _of_where(p: Workload, slots: dict[str, int]) -> Callable[..., Any]:
    in_c, in_a, in_b = (_of_broadcast(p, slots, name) for name in "cab")
    c, a, b = (slots[name] for name in "cab")

    def fetch(operands: Any, extents: Any, item: Any) -> Any:
        if operands[c][in_c(operands, extents, item)] != 0:
            return operands[a][in_a(operands, extents, item)]
        return operands[b][in_b(operands, extents, item)]

    return fetch


def _of_reshape(p: Workload, slots: dict[str, int]) -> Callable[..., Any]:
    shape = ReshapeParams.of(p.params).x
    x, rank, steps, extents_of_x = slots["x"], len(shape), row_strides(shape), _extents(p, slots, "x")

    def fetch(operands: Any, extents: Any, item: Any) -> Any:
        mine = extents_of_x(operands)
        rest, at = u32(item), i64(0)
        for back in range(rank):
            axis = rank - 1 - back
            extent = u32(mine[axis])
            above = u32(rest // extent)
            at += i64(u32(rest - u32(above * extent))) * steps[axis]
            rest = above
        return operands[x][at]

    return fetch


def _of_concat(p: Workload, slots: dict[str, int]) -> Callable[..., Any]:
    """Parts from the last one on: each passes on what comes before it."""
    shapes = DynConcatParams.of(p.params).x
    rank = len(shapes[0])
    along = DynConcatParams.of(p.params).axis % rank

    def place_in(steps: Sequence[int]) -> Callable[..., Any]:
        def place(extents: Any, item: Any, before: Any) -> Any:
            rest, at = u32(item), i64(0)
            for back in range(rank):
                axis = rank - 1 - back
                extent = u32(extents[axis])
                above = u32(rest // extent)
                digit = i64(u32(rest - u32(above * extent)))
                at += (digit - before if axis == along else digit) * steps[axis]
                rest = above
            return at

        return place

    def part(number: int) -> Callable[..., Any]:
        slot, place, own = slots[f"x{number}"], place_in(row_strides(shapes[number])), _extents(p, slots, f"x{number}")
        if number == len(shapes) - 1:

            def last(operands: Any, extents: Any, item: Any, digit: Any, before: Any) -> Any:
                return operands[slot][place(extents, item, before)]

            return last
        following = part(number + 1)

        def fetch(operands: Any, extents: Any, item: Any, digit: Any, before: Any) -> Any:
            length = i64(own(operands)[along])
            if digit < before + length:
                return operands[slot][place(extents, item, before)]
            return following(operands, extents, item, digit, before + length)

        return fetch

    first = part(0)

    def fetch(operands: Any, extents: Any, item: Any) -> Any:
        below = i64(1)
        for axis in range(along + 1, rank):
            below *= extents[axis]
        digit = i64(item) // below % extents[along]
        return first(operands, extents, item, digit, i64(0))

    return fetch


_FETCH = {
    "arange": _of_arange, "expand": _of_expand, "reshape": _of_reshape, "where": _of_where, "dyn_concat": _of_concat,
}  # fmt: skip


def _extents(p: Workload, slots: dict[str, int], name: str) -> Callable[[Any], Any]:
    """`extents(operands)` of an argument."""
    slot, shape = slots.get(extents_of(name)), next(spec.shape for spec in p.signature if spec.name == name)

    def read(operands: Any) -> Any:
        return operands[slot]

    def known(operands: Any) -> Any:
        return shape

    return known if slot is None else read


def _nothing(operands: Any) -> Any:
    return ()


def _no_problem(inputs: Any) -> int:
    return 0


def _and_array(collect: Callable[[Any], Any], slot: int) -> Callable[[Any], Any]:
    def more(operands: Any) -> Any:
        return (*collect(operands), operands[slot])

    return more


def _and_known(collect: Callable[[Any], Any], shape: Sequence[int]) -> Callable[[Any], Any]:
    known = tuple(shape)

    def more(operands: Any) -> Any:
        return (*collect(operands), known)

    return more


def _and_extent(before: Callable[[Any], Any], extent: Callable[..., Any], axis: int) -> Callable[[Any], Any]:
    def more(inputs: Any) -> Any:
        return (*before(inputs), i64(extent(axis, inputs)))

    return more


def elements_of(p: Workload) -> int:
    """Of y at most."""
    return math.prod(p.outputs[0].shape)
