"""Kernels of recurrent_cuda: pack r, and run the steps of some rows in one block.

The states of a block's rows and the sums of their gates stay in shared memory. Each thread multiplies the states by some
columns of r, of which it reads 16 bytes at once: `packed` is (direction, words of 16 bytes along the state, column, numbers
of a word), so that neighbouring threads read neighbouring words. Then every thread makes some numbers of the next states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.config import Config
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.recurrent import RecurrentParams
from schedsearch.templates.parts import ptx, vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.ptx import note_index
from schedsearch.templates.recurrent.functions import Primitives, function_of
from schedsearch.workload import Workload

WORD = 16  # bytes of r that a thread loads at once


def _exp(x: Any) -> Any:
    return f32(math.exp(x))


def _tanh(x: Any) -> Any:
    return f32(math.tanh(x))


def _log1p(x: Any) -> Any:
    return f32(math.log1p(x))


CUDA = Primitives(_exp, _tanh, _log1p)


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from parameters and configuration; in numbers unless their names say otherwise.

    Attributes:
        rows: of the batch, in a block.
        split: threads that share the sum of a column.
        unroll: words of r that a thread loads before it multiplies them.
    """

    p: RecurrentParams
    threads: int
    rows: int
    split: int
    unroll: int

    @classmethod
    def of(cls, workload: Workload[RecurrentParams], config: Config) -> Plan:
        return cls(workload.params, *(config[name] for name in ("threads", "rows", "split", "unroll")))

    @property
    def each(self) -> int:
        """Numbers of a word."""
        return WORD // dtype_of(self.p.dtype).nbytes

    @property
    def words(self) -> int:
        """Along a state, in whole turns of all threads that share a column."""
        turn = self.split * self.unroll
        return math.ceil(self.p.hidden / self.each / turn) * turn

    @property
    def width(self) -> int:
        """Of a state in shared memory: its numbers, and zeros."""
        return self.words * self.each

    @property
    def columns(self) -> int:
        return self.p.gates * self.p.hidden

    @property
    def packed(self) -> int:
        return self.p.directions * self.columns * self.width

    @property
    def late(self) -> bool:
        """Whether gru resets the state before it multiplies it by the last gate."""
        return self.p.cell == "gru" and not self.p.linear_before_reset

    @property
    def row(self) -> int:
        """Numbers that a row has in shared memory; see `shared_of`."""
        return int(shared_of(self.p, self.width, self.split))

    @property
    def groups(self) -> int:
        return math.ceil(self.p.n / self.rows)


def shared_of(p: RecurrentParams, width: Any, split: Any) -> Any:
    """Numbers of a row in shared memory: h, h after the reset, c, the gates of the input, and the parts of each sum."""
    columns = p.gates * p.hidden
    return 2 * width + p.hidden + columns + split * columns


def pack_kernel(workload: Workload[RecurrentParams], plan: Plan) -> Callable[..., None]:
    """The kernel (r, packed): a thread for each number of `packed`, in elements of r."""
    p = plan.p
    columns, hidden, each, words, size = plan.columns, p.hidden, plan.each, plan.words, plan.packed
    element, threads = dtype_of(p.dtype).nbytes, plan.threads
    load, store = vectors.load(p.dtype, 1), vectors.store(p.dtype, 1)

    def pack(r, packed) -> None:  # type: ignore[no-untyped-def]
        word = cuda.local.array(1, u32)
        place = i64(i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x)
        if place < size:
            column, number = place // each % columns, place // (each * columns) % words * each + place % each
            direction = place // (each * columns * words)
            inside = number < hidden
            at = ((direction * columns + column) * hidden + number) if inside else i64(0)
            load(word, 0, r + u64(at * element), inside)
            store(word, 0, packed + u64(place * element))

    return pack


def steps_kernel(workload: Workload[RecurrentParams], plan: Plan) -> Callable[..., None]:
    """The kernel of blocks, each some rows in one direction. Arguments and outputs that the workload lacks are 0."""
    p = plan.p
    rows, groups, n, t, hidden, directions, threads = plan.rows, plan.groups, p.n, p.t, p.hidden, p.directions, plan.threads
    width, columns, row_size, late, batch_first = plan.width, plan.columns, plan.row, plan.late, p.batch_first
    both, backwards = p.direction == "bidirectional", p.direction == "reverse"
    has_lens, gives_y = "sequence_lens" in p.optional, "y" in p.results
    begin, end, put = _states(plan)
    multiply, first_columns, last_columns = _multiply(plan), 2 * hidden, hidden
    reset, update = _cells(plan)
    element, at_once = dtype_of(p.dtype).nbytes, p.gates * p.hidden
    load, unpack, length_of = vectors.load(p.dtype, 1), vectors.unpack(p.dtype, 1), _length(p)

    def recurrent(
        gates: Any, packed: Any, bias: Any, initial_h: Any, initial_c: Any, peepholes: Any, sequence_lens: Any, y: Any,
        y_h: Any, y_c: Any, wrong_index: Any,
    ) -> None:  # fmt: skip
        shared = cuda.shared.array(0, f32)
        thread = i32(cuda.threadIdx.x)
        direction, first = i32(cuda.blockIdx.x // groups), i32(cuda.blockIdx.x % groups * rows)
        count = i32(min(rows, n - first))
        reverse = (direction == 1) if both else backwards
        longest = i32(t)
        if has_lens:
            longest = i32(0)
            for i in range(count):
                longest = i32(max(longest, length_of(sequence_lens, first + i)))
        begin(shared, initial_h, initial_c, sequence_lens, direction, first, count, wrong_index)
        weights = u64(packed + u64(i64(direction) * (columns * width * element)))
        for s in range(longest):
            word, number = cuda.local.array(1, u32), cuda.local.array(1, f32)
            for item in range(thread, count * columns, threads):  # the gates of the input, which are there by and by
                i, column = i32(item // columns), i32(item % columns)
                length = length_of(sequence_lens, first + i)
                at = i64(length - 1 - s if reverse else s)
                row = i64(first + i)
                place = ((row * t + at if batch_first else at * n + row) * directions + direction) * columns + column
                load(word, 0, gates + u64((place if s < length else i64(0)) * element), s < length)
                unpack(word, 0, number, 0)
                shared[i * row_size + 2 * width + hidden + column] = number[0]
            if late:
                multiply(shared, weights, 0, 0, first_columns)
                cuda.syncthreads()
                for item in range(thread, count * hidden, threads):
                    reset(shared, direction, i32(item // hidden), i32(item % hidden))
                cuda.syncthreads()
                multiply(shared, weights, width, first_columns, last_columns)
            else:
                multiply(shared, weights, 0, 0, at_once)
            cuda.syncthreads()
            for item in range(thread, count * hidden, threads):
                i, j = i32(item // hidden), i32(item % hidden)
                length = length_of(sequence_lens, first + i)
                if s < length:
                    update(shared, bias, peepholes, direction, i, j)
                    if gives_y:
                        at = i64(length - 1 - s if reverse else s)
                        put(y, shared[i * row_size + j], direction, first + i, at, j)
            cuda.syncthreads()
        end(shared, y, y_h, y_c, sequence_lens, direction, first, count)

    return recurrent


def _length(p: RecurrentParams) -> Callable[[Any, Any], Any]:
    """length(sequence_lens, row): the steps of a row, within what is allowed."""
    t, load = p.t, ptx.load_global_u32

    def given(sequence_lens: Any, row: Any) -> Any:
        return i32(min(max(i32(load(sequence_lens + u64(i64(row) * 4))), i32(0)), i32(t)))

    def all_steps(sequence_lens: Any, row: Any) -> Any:
        return i32(t)

    return given if "sequence_lens" in p.optional else all_steps


def _multiply(plan: Plan) -> Callable[..., None]:
    """multiply(shared, weights, x, first, count): the numbers at x of each row, times `count` columns of r from `first` on.
    Each of `split` threads makes a part of a sum."""
    rows, each, words, columns, split, unroll = plan.rows, plan.each, plan.words, plan.columns, plan.split, plan.unroll
    threads, row_size, own_words = plan.threads, plan.row, words // split
    sums = 2 * plan.width + plan.p.hidden + columns
    dtype, per_word, numbers = plan.p.dtype, WORD // 4, plan.each * plan.unroll
    load, unpack, held = vectors.load(dtype, each), vectors.unpack(dtype, each), per_word * unroll

    def multiply(shared: Any, weights: Any, x: Any, first: Any, count: Any) -> None:
        word = cuda.local.array(held, u32)
        factor = cuda.local.array(numbers, f32)
        total = cuda.local.array(rows, f32)
        for item in range(cuda.threadIdx.x, count * split, threads):
            column, part = i32(first + item % count), i32(item // count)
            for i in range(rows):
                total[i] = f32(0)
            for turn in range(part * own_words, (part + 1) * own_words, unroll):
                for u in range(unroll):
                    load(word, u * per_word, weights + u64((i64(turn + u) * columns + column) * WORD), True)
                for u in range(unroll):
                    unpack(word, u * per_word, factor, u * each)
                for i in range(rows):
                    for e in range(numbers):
                        total[i] = f32(total[i] + f32(factor[e] * shared[i * row_size + x + turn * each + e]))
            for i in range(rows):
                shared[i * row_size + sums + part * columns + column] = total[i]

    return multiply


def _states(plan: Plan) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """begin: reads first states; end: writes zeros for steps that a row does not have, and last states; put: writes a
    number of y."""
    p = plan.p
    rows, n, t, hidden, directions, width, row_size = plan.rows, p.n, p.t, p.hidden, p.directions, plan.width, plan.row
    threads, element, length_of = plan.threads, dtype_of(p.dtype).nbytes, _length(p)
    has_lens, has_h, has_c = (name in p.optional for name in ("sequence_lens", "initial_h", "initial_c"))
    gives_y, gives_h, gives_c = (name in p.results for name in ("y", "y_h", "y_c"))
    state_row, state_direction = (directions, 1) if p.batch_first else (1, n)
    y_step, y_direction, y_row = (directions, 1, t * directions) if p.batch_first else (directions * n, n, 1)
    load, unpack = vectors.load(p.dtype, 1), vectors.unpack(p.dtype, 1)
    pack, store, load_word = vectors.pack(p.dtype, 1), vectors.store(p.dtype, 1), ptx.load_global_u32

    def begin(
        shared: Any, initial_h: Any, initial_c: Any, sequence_lens: Any, direction: Any, first: Any, count: Any, wrong: Any
    ) -> None:
        word, number, thread = cuda.local.array(1, u32), cuda.local.array(1, f32), i32(cuda.threadIdx.x)
        for item in range(thread, rows * row_size, threads):
            shared[item] = f32(0)
        cuda.syncthreads()
        for item in range(thread, count * hidden, threads):
            i, j = i32(item // hidden), i32(item % hidden)
            length = length_of(sequence_lens, first + i)
            if has_lens:
                given = i32(load_word(sequence_lens + u64(i64(first + i) * 4)))
                if (given != length) & (wrong != 0) & (j == 0):
                    note_index(wrong, i64(first + i + 1), i64(given))
            at = u64((i64(first + i) * state_row + i64(direction) * state_direction) * hidden + j)
            if length > 0:
                if has_h:
                    load(word, 0, initial_h + at * u64(element), True)
                    unpack(word, 0, number, 0)
                    shared[i * row_size + j] = number[0]
                if has_c:
                    load(word, 0, initial_c + at * u64(element), True)
                    unpack(word, 0, number, 0)
                    shared[i * row_size + 2 * width + j] = number[0]
        cuda.syncthreads()

    def put(y: Any, value: Any, direction: Any, row: Any, at: Any, j: Any) -> None:
        word, number = cuda.local.array(1, u32), cuda.local.array(1, f32)
        number[0] = value
        pack(number, 0, word, 0)
        to = (i64(at) * y_step + i64(direction) * y_direction + i64(row) * y_row) * hidden + j
        store(word, 0, y + u64(to * element))

    def end(shared: Any, y: Any, y_h: Any, y_c: Any, sequence_lens: Any, direction: Any, first: Any, count: Any) -> None:
        word, thread = cuda.local.array(1, u32), i32(cuda.threadIdx.x)
        for item in range(thread, count * hidden, threads):
            i, j = i32(item // hidden), i32(item % hidden)
            if gives_y and has_lens:
                for at in range(length_of(sequence_lens, first + i), t):
                    put(y, f32(0), direction, first + i, at, j)
            to = u64((i64(first + i) * state_row + i64(direction) * state_direction) * hidden + j) * u64(element)
            if gives_h:
                pack(shared, i * row_size + j, word, 0)
                store(word, 0, y_h + to)
            if gives_c:
                pack(shared, i * row_size + 2 * width + j, word, 0)
                store(word, 0, y_c + to)

    return begin, end, put


# ---- cells: reset(shared, direction, row, number) and update(shared, bias, peepholes, direction, row, number)


def _by_direction(plan: Plan, place: int) -> Callable[[Any, Any], Any]:
    """function(x, direction): an activation of each direction."""
    p = plan.p
    clip = 0.0 if place == 2 else p.clip  # the state of lstm is not limited
    ours, theirs = p.functions(0)[place], p.functions(p.directions - 1)[place]
    first, last = function_of(ours, clip, CUDA), function_of(theirs, clip, CUDA)

    def either(x: Any, direction: Any) -> Any:
        return first(x) if direction == 0 else last(x)

    def same(x: Any, direction: Any) -> Any:
        return first(x)

    return same if ours == theirs else either


def _cells(plan: Plan) -> tuple[Callable[..., None], Callable[..., None]]:
    p = plan.p
    hidden, width, row_size, split, columns = p.hidden, plan.width, plan.row, plan.split, plan.columns
    given, sums = 2 * width + hidden, 2 * width + hidden + columns
    coupled, peeps, linear, has_bias = p.input_forget, "peepholes" in p.optional, p.linear_before_reset, "bias" in p.optional
    functions = [_by_direction(plan, place) for place in range(len(p.functions(0)))]
    f, g, last = functions[0], functions[-1] if len(functions) < 3 else functions[1], functions[-1]
    read = _reader(p)

    def product(shared: Any, base: Any, column: Any) -> Any:
        total = f32(0)
        for part in range(split):
            total = f32(total + shared[base + sums + part * columns + column])
        return total

    def gate(shared: Any, base: Any, column: Any) -> Any:
        return f32(product(shared, base, column) + shared[base + given + column])

    def rnn(shared: Any, bias: Any, peepholes: Any, direction: Any, i: Any, j: Any) -> None:
        base = i * row_size
        shared[base + j] = f(gate(shared, base, j), direction)

    def lstm(shared: Any, bias: Any, peepholes: Any, direction: Any, i: Any, j: Any) -> None:
        base = i * row_size
        before = shared[base + 2 * width + j]
        of_i, of_o = gate(shared, base, j), gate(shared, base, hidden + j)
        of_f, of_c = gate(shared, base, 2 * hidden + j), gate(shared, base, 3 * hidden + j)
        at = i64(direction) * (3 * hidden) + j
        if peeps:
            of_i = f32(of_i + f32(read(peepholes, at) * before))
            of_f = f32(of_f + f32(read(peepholes, at + 2 * hidden) * before))
        of_i = f(of_i, direction)
        of_f = f32(f32(1) - of_i) if coupled else f(of_f, direction)
        now = f32(f32(of_f * before) + f32(of_i * g(of_c, direction)))
        if peeps:
            of_o = f32(of_o + f32(read(peepholes, at + hidden) * now))
        shared[base + 2 * width + j] = now
        shared[base + j] = f32(f(of_o, direction) * last(now, direction))

    def reset(shared: Any, direction: Any, i: Any, j: Any) -> None:
        base = i * row_size
        shared[base + width + j] = f32(f(gate(shared, base, hidden + j), direction) * shared[base + j])

    def gru(shared: Any, bias: Any, peepholes: Any, direction: Any, i: Any, j: Any) -> None:
        base = i * row_size
        z = f(gate(shared, base, j), direction)
        if linear:
            of_h = product(shared, base, 2 * hidden + j)
            of_h = f32(of_h + read(bias, i64(direction) * hidden + j)) if has_bias else of_h
            of_h = f32(f(gate(shared, base, hidden + j), direction) * of_h)
            new = g(f32(shared[base + given + 2 * hidden + j] + of_h), direction)
        else:
            new = g(gate(shared, base, 2 * hidden + j), direction)
        shared[base + j] = f32(f32(f32(f32(1) - z) * new) + f32(z * shared[base + j]))

    return reset, {"rnn": rnn, "lstm": lstm, "gru": gru}[p.cell]


def _reader(p: RecurrentParams) -> Callable[[Any, Any], Any]:
    """read(array, index): a number of an array in global memory."""
    load, unpack, element = vectors.load(p.dtype, 1), vectors.unpack(p.dtype, 1), dtype_of(p.dtype).nbytes

    def read(array: Any, index: Any) -> Any:
        word, number = cuda.local.array(1, u32), cuda.local.array(1, f32)
        load(word, 0, array + u64(i64(index) * element), True)
        unpack(word, 0, number, 0)
        return number[0]

    return read
