"""Kernels of recurrent_cpu: pack r, and run the steps of some rows.

A step multiplies the states of all rows of a work item by r in register tiles, then computes gates and states in loops over
the numbers of a state, which LLVM turns into vectors. In memory of the kernel each gate has `width` numbers, a multiple of
the lanes of a vector; those beyond the state are never read as such.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from schedsearch.backend.cpu_ops import as_array, note_index, tile_ops
from schedsearch.config import Config
from schedsearch.ops.recurrent import RecurrentParams
from schedsearch.templates.parts import cpu_functions
from schedsearch.templates.parts.casts import f32, i32, i64
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.recurrent.functions import Primitives, function_of
from schedsearch.workload import Workload


def _log1p(x: Any) -> Any:
    return f32(math.log1p(x))


CPU = Primitives(cpu_functions.exp, cpu_functions.tanh, _log1p)


class Places(NamedTuple):
    """Where a work item has, for each of its rows, h, c, h after the reset of gru, and the sums of gates.

    Attributes:
        row_sums: of a row.
        size: of all.
    """

    h: int
    c: int
    reset: int
    sums: int
    row_sums: int
    size: int


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from parameters and configuration; in numbers unless their names say otherwise.

    Attributes:
        rows: of the batch, in a work item.
        columns: of a register tile; sums of gates.
        unroll: numbers of a state that the innermost loop multiplies.
    """

    p: RecurrentParams
    rows: int
    vectors: int
    lanes: int
    unroll: int

    @classmethod
    def of(cls, workload: Workload[RecurrentParams], config: Config) -> Plan:
        return cls(workload.params, config["rows"], config["vectors"], config["lanes"], config["unroll"])

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def width(self) -> int:
        """Of a gate."""
        return math.ceil(self.p.hidden / self.lanes) * self.lanes

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(first gate, gates) of each product of a step: the reset of gru comes between two."""
        late = self.p.cell == "gru" and not self.p.linear_before_reset
        return ((0, 2), (2, 1)) if late else ((0, self.p.gates),)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Of each product."""
        return tuple(math.ceil(count * self.width / self.columns) for _, count in self.products)

    @property
    def tile(self) -> int:
        return self.p.hidden * self.columns

    @property
    def packed(self) -> int:
        """Of r in all directions."""
        return self.p.directions * sum(self.tiles) * self.tile

    @property
    def groups(self) -> int:
        return math.ceil(self.p.n / self.rows)

    @property
    def sums(self) -> int:
        """Of a row, with those of the last tile that belong to no gate."""
        return max(first * self.width + tiles * self.columns for (first, _), tiles in zip(self.products, self.tiles))

    @property
    def places(self) -> Places:
        """In the memory of a work item."""
        state = self.rows * self.width
        return Places(0, state, 2 * state, 3 * state, self.sums, 3 * state + self.rows * self.sums)


def pack_kernel(workload: Workload[RecurrentParams], plan: Plan) -> Callable[..., None]:
    """The kernel (r, packed, start, stop): tiles of (number of a state, column), one work item for each."""
    p = plan.p
    hidden, width, columns, gates, tile = p.hidden, plan.width, plan.columns, p.gates, plan.tile
    size, packed_size = p.directions * gates * hidden * hidden, plan.packed
    all_tiles, first_tiles = sum(plan.tiles), plan.tiles[0]
    second = plan.products[-1][0] * width  # the column that the second product begins with
    element, widen = element_type(p.dtype), widened(p.dtype)

    def pack(r: Any, packed: Any, start: Any, stop: Any) -> None:
        source, target = as_array(r, (size,), element), as_array(packed, (packed_size,), f32)
        for item in range(start, stop):
            direction, place = item // all_tiles, item % all_tiles
            first = place * columns if place < first_tiles else second + (place - first_tiles) * columns
            for j in range(columns):
                gate, number = (first + j) // width, (first + j) % width
                exists = (gate < gates) & (number < hidden)
                at = ((direction * gates + gate) * hidden + number) * hidden
                for k in range(hidden):
                    target[item * tile + k * columns + j] = widen(source[at + k]) if exists else f32(0)

    return pack


def steps_kernel(workload: Workload[RecurrentParams], plan: Plan) -> Callable[..., None]:
    """The kernel over work items, each some rows in one direction. Arguments and outputs that the workload lacks are 0."""
    p = plan.p
    rows, groups, n, t, directions, batch_first = plan.rows, plan.groups, p.n, p.t, p.directions, p.batch_first
    _, _, reset_at, sums_at, _, size = plan.places
    tile_bytes, first_tiles, last_tiles, all_tiles = 4 * plan.tile, plan.tiles[0], plan.tiles[-1], sum(plan.tiles)
    twice, second_at = len(plan.products) > 1, sums_at + plan.products[-1][0] * plan.width
    both, backwards = p.direction == "bidirectional", p.direction == "reverse"
    length_of, multiply, (begin, put, end) = _length(p), _multiply(plan), _moves(workload, plan)
    reset, update = (_either(*each) for each in zip(_cell(plan, 0), _cell(plan, directions - 1)))

    def recurrent(
        gates: Any, packed: Any, bias: Any, initial_h: Any, initial_c: Any, peepholes: Any, sequence_lens: Any, y: Any,
        y_h: Any, y_c: Any, memory: Any, wrong_index: Any, start: Any, stop: Any,
    ) -> None:  # fmt: skip
        for item in range(start, stop):
            direction, first = item // groups, item % groups * rows
            count = min(rows, n - first)
            own, weights = i64(memory) + item * (4 * size), i64(packed) + direction * (all_tiles * tile_bytes)
            reverse = (direction == 1) if both else backwards
            longest = begin(own, initial_h, initial_c, sequence_lens, direction, first, count, wrong_index)
            for s in range(longest):
                multiply(own, weights, own + 4 * sums_at, first_tiles)
                if twice:
                    for i in range(count):
                        length = length_of(sequence_lens, first + i)
                        if s < length:
                            at = length - 1 - s if reverse else s
                            place = ((first + i) * t + at if batch_first else at * n + first + i) * directions + direction
                            reset(direction, gates, bias, peepholes, own, i, place)
                    multiply(own + 4 * reset_at, weights + first_tiles * tile_bytes, own + 4 * second_at, last_tiles)
                for i in range(count):
                    length = length_of(sequence_lens, first + i)
                    if s < length:
                        at = length - 1 - s if reverse else s
                        place = ((first + i) * t + at if batch_first else at * n + first + i) * directions + direction
                        update(direction, gates, bias, peepholes, own, i, place)
                        put(own, y, direction, first, i, at)
            end(own, y, y_h, y_c, sequence_lens, direction, first, count)

    return recurrent


def _length(p: RecurrentParams) -> Callable[[Any, Any], Any]:
    """length(sequence_lens, row): the steps of a row, within what is allowed."""
    n, t = p.n, p.t

    def given(sequence_lens: Any, row: Any) -> Any:
        return min(max(i64(as_array(sequence_lens, (n,), i32)[row]), i64(0)), i64(t))

    def all_steps(sequence_lens: Any, row: Any) -> Any:
        return i64(t)

    return given if "sequence_lens" in p.optional else all_steps


def _multiply(plan: Plan) -> Callable[..., None]:
    """multiply(x, weights, sums, tiles), from addresses: rows of x times some tiles of r."""
    rows, columns, hidden, unroll, row_sums = plan.rows, plan.columns, plan.p.hidden, plan.unroll, plan.places.row_sums
    all_sums = rows * row_sums
    ops = tile_ops(
        rows, plan.vectors, plan.lanes, unroll, x_row_bytes=4 * plan.width, x_depth_bytes=4, broadcast=True
    )  # fmt: skip
    zero, multiply_add, multiply_add_one, spill = ops.zero, ops.multiply_add, ops.multiply_add_one, ops.spill

    def multiply(x: Any, weights: Any, sums: Any, tiles: Any) -> None:
        target = as_array(sums, (all_sums,), f32)
        at = weights
        for tile in range(tiles):
            total, source = zero(), x
            for _ in range(hidden // unroll):
                total = multiply_add(total, source, at)
                source += 4 * unroll
                at += 4 * unroll * columns
            for _ in range(hidden % unroll):
                total = multiply_add_one(total, source, at)
                source += 4
                at += 4 * columns
            found = as_array(spill(total), (rows, columns), f32)
            for i in range(rows):
                for j in range(columns):
                    target[i * row_sums + tile * columns + j] = found[i, j]

    return multiply


def _moves(workload: Workload[RecurrentParams], plan: Plan) -> tuple[Callable[..., Any], ...]:
    """begin: reads first states, and returns the steps of the longest row; put: writes a step of y; end: writes zeros for
    steps that a row does not have, and last states."""
    p = plan.p
    rows, n, t, hidden, width, directions = plan.rows, p.n, p.t, p.hidden, plan.width, p.directions
    h_at, c_at, *_, size = plan.places
    has_lens, has_h, has_c = (name in p.optional for name in ("sequence_lens", "initial_h", "initial_c"))
    gives_y, gives_h, gives_c = (name in p.results for name in ("y", "y_h", "y_c"))
    element, widen, narrow = element_type(p.dtype), widened(p.dtype), narrowed(p.dtype)
    states, steps, length_of = directions * n * hidden, t * n * directions * hidden, _length(p)
    state_row, state_direction = (directions, 1) if p.batch_first else (1, n)
    y_step, y_direction, y_row = (directions, 1, t * directions) if p.batch_first else (directions * n, n, 1)

    def begin(
        own: Any, initial_h: Any, initial_c: Any, sequence_lens: Any, direction: Any, first: Any, count: Any, wrong: Any
    ) -> Any:
        state = as_array(own, (size,), f32)
        first_h, first_c = as_array(initial_h, (states,), element), as_array(initial_c, (states,), element)
        longest = i64(0)
        for i in range(rows * 2 * width):
            state[i] = f32(0)
        for i in range(count):
            length = length_of(sequence_lens, first + i)
            if has_lens:
                given = i64(as_array(sequence_lens, (n,), i32)[first + i])
                if (given != length) & (wrong != 0):
                    note_index(wrong, i64(first + i + 1), given)
            longest = max(longest, length)
            at = ((first + i) * state_row + direction * state_direction) * hidden
            if length > 0:
                for j in range(hidden):
                    if has_h:
                        state[h_at + i * width + j] = widen(first_h[at + j])
                    if has_c:
                        state[c_at + i * width + j] = widen(first_c[at + j])
        return longest

    def put(own: Any, y: Any, direction: Any, first: Any, i: Any, at: Any) -> None:
        state, out = as_array(own, (size,), f32), as_array(y, (steps,), element)
        to = (at * y_step + direction * y_direction + (first + i) * y_row) * hidden
        if gives_y:
            for j in range(hidden):
                out[to + j] = narrow(state[h_at + i * width + j])

    def end(own: Any, y: Any, y_h: Any, y_c: Any, sequence_lens: Any, direction: Any, first: Any, count: Any) -> None:
        state, out = as_array(own, (size,), f32), as_array(y, (steps,), element)
        last_h, last_c = as_array(y_h, (states,), element), as_array(y_c, (states,), element)
        for i in range(count):
            if gives_y:
                for at in range(length_of(sequence_lens, first + i), t):
                    to = (at * y_step + direction * y_direction + (first + i) * y_row) * hidden
                    for j in range(hidden):
                        out[to + j] = narrow(f32(0))
            at = ((first + i) * state_row + direction * state_direction) * hidden
            for j in range(hidden):
                if gives_h:
                    last_h[at + j] = narrow(state[h_at + i * width + j])
                if gives_c:
                    last_c[at + j] = narrow(state[c_at + i * width + j])

    return begin, put, end


# ---- cells: (reset, update), functions of (gates, bias, peepholes, memory of the work item, row in it, place of the row and
# step in gates). `update` makes the next state of a row, and `reset` what gru multiplies in between.


def _either(first: Callable[..., None], last: Callable[..., None]) -> Callable[..., None]:
    """That of a direction."""

    def either(direction: Any, gates: Any, bias: Any, peepholes: Any, own: Any, i: Any, place: Any) -> None:
        if direction == 0:
            first(gates, bias, peepholes, own, i, place)
        else:
            last(gates, bias, peepholes, own, i, place)

    def only(direction: Any, gates: Any, bias: Any, peepholes: Any, own: Any, i: Any, place: Any) -> None:
        first(gates, bias, peepholes, own, i, place)

    return only if first is last else either


@functools.lru_cache(maxsize=16)
def _cell(plan: Plan, direction: int) -> tuple[Callable[..., None], Callable[..., None]]:
    if direction and plan.p.functions(direction) == plan.p.functions(0) and not {"bias", "peepholes"} & {*plan.p.optional}:
        return _cell(plan, 0)
    return {"lstm": _lstm, "gru": _gru, "rnn": _rnn}[plan.p.cell](plan, direction)


def _functions(plan: Plan, direction: int) -> list[Callable[[Any], Any]]:
    clips = (plan.p.clip, plan.p.clip, 0.0)  # the state of lstm is not limited
    return [function_of(each, clip, CPU) for each, clip in zip(plan.p.functions(direction), clips)]


def _add_gates(plan: Plan, first: int, stop: int) -> Callable[..., None]:
    """add(gates, own, i, place): adds some gates of the input to the sums."""
    p = plan.p
    hidden, width, all_gates, size, element, widen = (
        p.hidden,
        plan.width,
        p.gates,
        plan.places.size,
        element_type(p.dtype),
        widened(p.dtype),
    )
    sums_at, row_sums, gates_size = plan.places.sums, plan.places.row_sums, p.t * p.n * p.directions * p.gates * p.hidden

    def add(gates: Any, own: Any, i: Any, place: Any) -> None:
        source, state = as_array(gates, (gates_size,), element), as_array(own, (size,), f32)
        for gate in range(first, stop):
            at, to = (place * all_gates + gate) * hidden, sums_at + i * row_sums + gate * width
            for j in range(hidden):
                state[to + j] += widen(source[at + j])

    return add


def _nothing(gates: Any, bias: Any, peepholes: Any, own: Any, i: Any, place: Any) -> None:
    return


def _rnn(plan: Plan, direction: int) -> tuple[Callable[..., None], Callable[..., None]]:
    width, (h_at, _, _, sums_at, row_sums, size) = plan.width, plan.places
    add, (f,) = _add_gates(plan, 0, 1), _functions(plan, direction)

    def update(gates: Any, bias: Any, peepholes: Any, own: Any, i: Any, place: Any) -> None:
        add(gates, own, i, place)
        state, h, sums = as_array(own, (size,), f32), h_at + i * width, sums_at + i * row_sums
        for j in range(width):
            state[h + j] = f(state[sums + j])

    return _nothing, update


def _lstm(plan: Plan, direction: int) -> tuple[Callable[..., None], Callable[..., None]]:
    p, width, (h_at, c_at, _, sums_at, row_sums, size) = plan.p, plan.width, plan.places
    hidden, add, coupled, peeps = p.hidden, _add_gates(plan, 0, 4), p.input_forget, "peepholes" in p.optional
    f, g, last = _functions(plan, direction)
    element, widen, all_peepholes, own_peepholes = (
        element_type(p.dtype),
        widened(p.dtype),
        3 * p.hidden * p.directions,
        3 * p.hidden * direction,
    )
    length = hidden if peeps else width

    def update(gates: Any, bias: Any, peepholes: Any, own: Any, i: Any, place: Any) -> None:
        add(gates, own, i, place)
        state, from_c = as_array(own, (size,), f32), as_array(peepholes, (all_peepholes,), element)
        h, c, sums = h_at + i * width, c_at + i * width, sums_at + i * row_sums
        for j in range(length):
            before, of_i, of_o = state[c + j], state[sums + j], state[sums + width + j]
            of_f, of_c = state[sums + 2 * width + j], state[sums + 3 * width + j]
            if peeps:
                of_i = f32(of_i + f32(widen(from_c[own_peepholes + j]) * before))
                of_f = f32(of_f + f32(widen(from_c[own_peepholes + 2 * hidden + j]) * before))
            of_i = f(of_i)
            of_f = f32(f32(1) - of_i) if coupled else f(of_f)
            now = f32(f32(of_f * before) + f32(of_i * g(of_c)))
            if peeps:
                of_o = f32(of_o + f32(widen(from_c[own_peepholes + hidden + j]) * now))
            state[c + j] = now
            state[h + j] = f32(f(of_o) * last(now))

    return _nothing, update


def _gru(plan: Plan, direction: int) -> tuple[Callable[..., None], Callable[..., None]]:
    p, width, (h_at, _, reset_at, sums_at, row_sums, size) = plan.p, plan.width, plan.places
    hidden, linear, has_bias = p.hidden, p.linear_before_reset, "bias" in p.optional
    f, g = _functions(plan, direction)
    add, add_last = _add_gates(plan, 0, 2), _add_gates(plan, 2, 3)
    element, widen, all_biases, own_biases = (
        element_type(p.dtype),
        widened(p.dtype),
        hidden * p.directions,
        hidden * direction,
    )

    def reset(gates: Any, bias: Any, peepholes: Any, own: Any, i: Any, place: Any) -> None:
        add(gates, own, i, place)
        state, h, sums, to = as_array(own, (size,), f32), h_at + i * width, sums_at + i * row_sums, reset_at + i * width
        for j in range(width):
            state[sums + j] = f(state[sums + j])
            state[to + j] = f32(f(state[sums + width + j]) * state[h + j])

    def after_reset(gates: Any, bias: Any, peepholes: Any, own: Any, i: Any, place: Any) -> None:
        add_last(gates, own, i, place)
        state, h, sums = as_array(own, (size,), f32), h_at + i * width, sums_at + i * row_sums
        for j in range(width):
            z, new = state[sums + j], g(state[sums + 2 * width + j])
            state[h + j] = f32(f32(f32(f32(1) - z) * new) + f32(z * state[h + j]))

    def at_once(gates: Any, bias: Any, peepholes: Any, own: Any, i: Any, place: Any) -> None:
        add(gates, own, i, place)
        state, addends = as_array(own, (size,), f32), as_array(bias, (all_biases,), element)
        h, sums = h_at + i * width, sums_at + i * row_sums
        for j in range(hidden):
            product = state[sums + 2 * width + j]
            product = f32(product + widen(addends[own_biases + j])) if has_bias else product
            state[sums + 2 * width + j] = f32(f(state[sums + width + j]) * product)
        add_last(gates, own, i, place)
        for j in range(width):
            z, new = f(state[sums + j]), g(state[sums + 2 * width + j])
            state[h + j] = f32(f32(f32(f32(1) - z) * new) + f32(z * state[h + j]))

    return (_nothing, at_once) if linear else (reset, after_reset)
