"""causal_conv1d_update on NVIDIA GPUs and CPUs: see docs/kernels/depthwise_conv1d.md.

A thread, or an iteration on a CPU, has one channel of one row: it computes all new steps and then moves its state, whose
elements it alone reads and writes. Sizes are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from numba import cuda

from schedsearch.backend.cpu_ops import as_array
from schedsearch.config import Config
from schedsearch.launch import Grid, Int32, Int64, NumbaArray, Param, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.causal_conv1d_update import CausalConv1dUpdateParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv1d.parts import divided, gate, reader, writer
from schedsearch.templates.own_kernel.copies import copy_on_cpu, copy_on_gpu
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_functions import exp
from schedsearch.templates.parts.cpu_threads import threads_knob
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY
from schedsearch.workload import Workload

_COPY_THREADS = 256
_WORDS = {2: "uint16", 4: "float32"}  # elements of states as they are copied


class _Update(Template[CausalConv1dUpdateParams]):
    op: ClassVar[str] = "causal_conv1d_update"

    def reuse(self, workload: Workload[CausalConv1dUpdateParams]) -> Literal["never", "verified", "trusted"]:
        """All sizes but the number of taps reach the kernels at run time."""
        return "trusted"

    def representative(self, workload: Workload[CausalConv1dUpdateParams]) -> Workload[CausalConv1dUpdateParams]:
        """Few rows and channels, a state that is a little too long, and a step more than a state has."""
        p = workload.params
        length = p.taps + 1
        rows = 5 if p.indices else 3
        return workload.replace(n=3, c=37, t=2 if p.t <= p.length else length + 1, length=length, rows=rows)


class CausalConv1dUpdateCuda(_Update):
    """A thread for each channel of each row."""

    name = "causal_conv1d_update_cuda"
    version = 1
    kind = "cuda"

    def validate(self, workload: Workload[CausalConv1dUpdateParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        p = workload.params
        most = max(p.n * p.c, p.n * p.t, p.rows)
        return None if most < MAX_GRID_X else f"there are {most} rows with channels or steps; allowed: less than 2**31"

    def space(self, workload: Workload[CausalConv1dUpdateParams], target: Target) -> ConfigSpace:
        return ConfigSpace((Knob("threads", (32, 64, 128, 256, 512), "threads of a block"),))

    def default(self, workload: Workload[CausalConv1dUpdateParams], target: Target, space: ConfigSpace) -> Config:
        return Config(threads=128)

    def kernel(self, workload: Workload[CausalConv1dUpdateParams], target: Target, config: Config) -> KernelSource:
        p, copy = workload.params, copy_of_states(workload.params)
        pointers = [Pointer(name, optional=True) for name in ("x", "weight", "bias", "indices", "positions", "y")]
        params: tuple[Param, ...] = (*pointers, copy.params[1], *map(Int32, (p.n, p.c, p.t, p.length, p.rows)))
        step = KernelStep(
            cuda_kernel(p, config["threads"]), params, Grid(-(-p.n * p.c // config["threads"])), config["threads"]
        )  # fmt: skip
        return KernelSource("cuda", "native", (copy, step))


def copy_of_states(p: CausalConv1dUpdateParams) -> KernelStep:
    """Copies the states on a GPU, where the updated ones have memory of their own."""
    nbytes, size = dtype_of(p.dtype).nbytes, p.rows * p.c * p.length
    states = tuple(NumbaArray(name, _WORDS[nbytes], (size,), (nbytes,)) for name in ("state_before", "state"))
    return KernelStep(copy_on_gpu, states, Grid(-(-size // _COPY_THREADS)), _COPY_THREADS, restores=True)


class CausalConv1dUpdateCpu(_Update):
    """An item for each row and part of the channels."""

    name = "causal_conv1d_update_cpu"
    version = 1
    kind = "cpu"

    def validate(self, workload: Workload[CausalConv1dUpdateParams], target: Target) -> str | None:
        p = workload.params
        return None if p.n * p.c < MAX_GRID_X else f"there are {p.n * p.c} channels of rows; allowed: less than 2**31"

    def space(self, workload: Workload[CausalConv1dUpdateParams], target: Target) -> ConfigSpace:
        return ConfigSpace((threads_knob(target, "channels of rows"),))

    def default(self, workload: Workload[CausalConv1dUpdateParams], target: Target, space: ConfigSpace) -> Config:
        p = workload.params
        wanted = max(1, p.n * p.c * (p.t + p.length) // 16384)
        return Config(threads=max(n for n in space.values["threads"] if n == 1 or n <= wanted))

    def kernel(self, workload: Workload[CausalConv1dUpdateParams], target: Target, config: Config) -> KernelSource:
        p, row = workload.params, dtype_of(workload.params.dtype)
        size = p.rows * p.c * p.length
        states = [NumbaArray(name, _WORDS[row.nbytes], (size,), (row.nbytes,)) for name in ("state_before", "state")]
        copy = KernelStep(copy_on_cpu, tuple(states), Grid(size), config["threads"], restores=True)
        pointers = [Pointer(name, optional=True) for name in ("x", "weight", "bias", "indices", "positions", "y", "state")]
        params: tuple[Param, ...] = (*pointers, *map(Int64, (p.n, p.c, p.t, p.length, p.rows)))
        step = KernelStep(cpu_kernel(p), params, Grid(p.n * p.c), config["threads"])
        return KernelSource("cpu", "native", (copy, step))


def cuda_kernel(p: CausalConv1dUpdateParams, threads: int) -> Callable[..., None]:
    """The kernel (x, weight, bias, indices, positions, y, state, batch, channels, steps, length, rows)."""
    taps, has_indices, ring, has_bias, silu = p.taps, p.indices, p.positions, p.bias, p.silu
    read, read_weight, read_word, write = reader(p.dtype), reader(p.weight_dtype), reader("float32"), writer(p.dtype)
    unpack, last, sigmoid = vectors.unpack(p.dtype, 1), p.layout == "NTC", gate()
    wide, split = p.dtype == "float32", divided()

    def update(x, weight, bias, indices, positions, y, state, batch, channels, steps, length, rows) -> None:  # type: ignore[no-untyped-def]
        word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        item = i32(cuda.blockIdx.x * threads + cuda.threadIdx.x)
        if item < batch * channels:
            n, c = split(item, channels)
            row, position = n, i32(0)
            if has_indices:
                read_word(word, one, indices, n, 1)
                row = i32(word[0])
            if ring:
                read_word(word, one, positions, n, 1)
                position = i32(i32(word[0]) % length)
            exists = (row >= 0) & (row < rows)
            base = i64((i64(row) * channels + c) * length)
            first, of_step = i64((i64(n) * channels + c) * steps), 1
            if last:
                first, of_step = i64(i64(n) * steps * channels + c), channels
            before = read_weight(word, one, bias, c, 1) if has_bias else f32(0)
            for t in range(steps):
                total = before
                for k in range(i32(taps)):
                    s = i32(t - taps + 1 + k)
                    value = f32(0)
                    if s >= 0:
                        value = read(word, one, x, i64(first + i64(s) * of_step), 1)
                    elif exists:
                        at = i32(length + s)
                        if ring:
                            at = i32(position + s)
                            at = i32(at + length) if at < 0 else at
                        if wide:
                            value = f32(state[base + at])
                        else:
                            word[0] = u32(state[base + at])
                            unpack(word, 0, one, 0)
                            value = one[0]
                    total = f32(total + f32(value * read_weight(word, one, weight, i64(i64(c) * taps + k), 1)))
                total = f32(total * sigmoid(total)) if silu else total
                write(word, one, y, i64(first + i64(t) * of_step), total if exists else f32(0))
            if exists and ring:
                for s in range(steps):
                    value = read(word, one, x, i64(first + i64(s) * of_step), 1)
                    at = i32((position + s) % length)
                    if wide:
                        state[base + at] = value
                    else:
                        state[base + at] = word[0]
            elif exists:
                for i in range(length):
                    if i + steps < length:
                        state[base + i] = state[base + i + steps]
                    else:
                        value = read(word, one, x, i64(first + i64(i + steps - length) * of_step), 1)
                        if wide:
                            state[base + i] = value
                        else:
                            state[base + i] = word[0]

    return update


def cpu_kernel(p: CausalConv1dUpdateParams) -> Callable[..., None]:
    """The same, with the range of (row, channel) to compute."""
    taps, has_indices, ring, has_bias, silu = p.taps, p.indices, p.positions, p.bias, p.silu
    element, widen, narrow, last = element_type(p.dtype), widened(p.dtype), narrowed(p.dtype), p.layout == "NTC"
    weight_element, widen_weight = element_type(p.weight_dtype), widened(p.weight_dtype)

    def update(x, weight, bias, indices, positions, y, state, batch, channels, steps, length, rows, start, stop) -> None:  # type: ignore[no-untyped-def]
        values, results = (
            as_array(x, (batch * channels * steps,), element),
            as_array(y, (batch * channels * steps,), element),
        )
        states = as_array(state, (rows * channels * length,), element)
        factors, biases = as_array(weight, (channels * taps,), weight_element), as_array(bias, (channels,), weight_element)
        chosen, numbers = as_array(indices, (batch,), i32), as_array(positions, (batch,), i32)
        for item in range(start, stop):
            n, c = item // channels, item % channels
            row = i64(chosen[n]) if has_indices else n
            position = i64(numbers[n]) % length if ring else 0
            exists = row >= 0 and row < rows
            base = (row * channels + c) * length
            first, of_step = (n * channels + c) * steps, 1
            if last:
                first, of_step = n * steps * channels + c, channels
            for t in range(steps):
                total = widen_weight(biases[c]) if has_bias else f32(0)
                if exists:
                    for k in range(taps):
                        s = t - taps + 1 + k
                        if s >= 0:
                            value = values[first + s * of_step]
                        elif ring:
                            at = position + s
                            value = states[base + (at + length if at < 0 else at)]
                        else:
                            value = states[base + length + s]
                        total += widen(value) * widen_weight(factors[c * taps + k])
                    if silu:
                        total = f32(total / f32(f32(1) + exp(f32(-total))))
                    results[first + t * of_step] = narrow(total)
                else:
                    results[first + t * of_step] = narrow(f32(0))
            if exists and ring:
                for s in range(steps):
                    states[base + (position + s) % length] = values[first + s * of_step]
            elif exists:
                for i in range(length):
                    if i + steps < length:
                        states[base + i] = states[base + i + steps]
                    else:
                        states[base + i] = values[first + (i + steps - length) * of_step]

    return update
