"""causal_conv1d_update of one step on NVIDIA GPUs, by vectors of channels: see docs/kernels/depthwise_conv1d.md.

The states of neighbouring channels are neighbours, and so are their weights. A thread reads those of its channels by whole
vectors, all of them before it computes, and writes the states back as they move along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import Grid, Int32, Param, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.causal_conv1d_update import CausalConv1dUpdateParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv1d.parts import divided, gate
from schedsearch.templates.depthwise_conv1d.update import copy_of_states
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.workload import Workload

MOST_TAPS = 8
_WIDEST = 8  # channels of a thread


class CausalConv1dToken(Template[CausalConv1dUpdateParams]):
    """One step: a thread has neighbouring channels of some rows."""

    name = "causal_conv1d_token_cuda"
    version = 1
    op: ClassVar[str] = "causal_conv1d_update"
    kind = "cuda"

    def validate(self, workload: Workload[CausalConv1dUpdateParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        p = workload.params
        if p.t != 1:
            return f"there are {p.t} steps; allowed: 1"
        if p.positions:
            return "states are rings; allowed: states that move along"
        if p.length > MOST_TAPS:
            return f"states have {p.length} inputs; allowed: up to {MOST_TAPS}"
        if not list(_vectors(p)):
            return f"no vector of {p.c} channels has states and weights in whole accesses"
        return None if p.n * p.c < MAX_GRID_X else f"there are {p.n * p.c} channels of rows; allowed: less than 2**31"

    def reuse(self, workload: Workload[CausalConv1dUpdateParams]) -> Literal["never", "verified", "trusted"]:
        """Rows, states and channels reach the kernel at run time."""
        return "trusted"

    def representative(self, workload: Workload[CausalConv1dUpdateParams]) -> Workload[CausalConv1dUpdateParams]:
        """Few rows and channels: vectors as wide, and no whole block."""
        p = workload.params
        return workload.replace(n=3, c=37 * math.gcd(p.c, _WIDEST), rows=5 if p.indices else 3)

    def space(self, workload: Workload[CausalConv1dUpdateParams], target: Target) -> ConfigSpace:
        return ConfigSpace(
            (
                Knob("vector", tuple(_vectors(workload.params)), "neighbouring channels of a thread"),
                Knob("rows", (1, 2, 4), "rows of a thread, which share its weights"),
                Knob("threads", (32, 64, 128, 256), "threads of a block"),
            )
        )

    def default(self, workload: Workload[CausalConv1dUpdateParams], target: Target, space: ConfigSpace) -> Config:
        """A whole access of states a thread, and two rows if all multiprocessors still have threads enough."""
        p, element = workload.params, dtype_of(workload.params.dtype).nbytes
        wide = list(_vectors(p))
        vector = next((n for n in wide if n * p.length * element >= MOST_BYTES), wide[-1])
        busy = p.n * p.c // vector >= 2 * 1024 * target.sms
        return Config(vector=vector, rows=2 if busy else 1, threads=128)

    def kernel(self, workload: Workload[CausalConv1dUpdateParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        vector, rows, threads = (config[name] for name in ("vector", "rows", "threads"))
        pointers = [Pointer(name, optional=True) for name in ("x", "weight", "bias", "indices", "y", "state")]
        params: tuple[Param, ...] = (*pointers, *map(Int32, (p.n, p.c, p.rows)))
        items = p.c // vector * -(-p.n // rows)
        step = KernelStep(token_kernel(p, vector, rows, threads), params, Grid(-(-items // threads)), threads)
        element, weight = dtype_of(p.dtype).nbytes, dtype_of(p.weight_dtype).nbytes
        widths = {"x": element, "y": element, "state": element * p.length, "weight": weight * p.taps, "bias": weight}
        names = {spec.name for spec in (*workload.signature, *workload.outputs)}
        alignments = {name: min(vector * width, MOST_BYTES) for name, width in widths.items() if name in names}
        return KernelSource("cuda", "native", (copy_of_states(p), step), alignments=alignments)


def _vectors(p: CausalConv1dUpdateParams) -> Iterator[int]:
    """The channels that a thread may have, such that all that it reads are whole accesses."""
    element, weight = dtype_of(p.dtype).nbytes, dtype_of(p.weight_dtype).nbytes
    for vector in (1, 2, 4, 8):
        if p.c % vector == 0 and all(_is_whole(vector * n) for n in (element, weight, element * p.length, weight * p.taps)):
            yield vector


def _is_whole(nbytes: int) -> bool:
    return nbytes % MOST_BYTES == 0 or nbytes in (1, 2, 4, 8)


def token_kernel(p: CausalConv1dUpdateParams, vector: int, of_thread: int, threads: int) -> Callable[..., None]:
    """The kernel (x, weight, bias, indices, y, state, batch, channels, rows)."""
    taps, length, silu, has_bias, has_indices = p.taps, p.length, p.silu, p.bias, p.indices
    element, weight_bytes, sigmoid = dtype_of(p.dtype).nbytes, dtype_of(p.weight_dtype).nbytes, gate()
    states, weights_size = vector * length, vector * taps
    load_x, load_state = vectors.load(p.dtype, vector), vectors.load(p.dtype, states, written=True)
    unpack_x, unpack_state = vectors.unpack(p.dtype, vector), vectors.unpack(p.dtype, states)
    pack_x, pack_state = vectors.pack(p.dtype, vector), vectors.pack(p.dtype, states)
    store_y, store_state = vectors.store(p.dtype, vector), vectors.store(p.dtype, states)
    load_weight, unpack_weight = vectors.load(p.weight_dtype, weights_size), vectors.unpack(p.weight_dtype, weights_size)
    load_bias, unpack_bias = vectors.load(p.weight_dtype, vector), vectors.unpack(p.weight_dtype, vector)
    x_words, state_words = vectors.words_of(p.dtype, vector), vectors.words_of(p.dtype, states)
    load_index, split = vectors.load("float32", 1), divided()
    all_x, all_states = x_words * of_thread, state_words * of_thread
    weight_words, bias_words = vectors.words_of(p.weight_dtype, weights_size), vectors.words_of(p.weight_dtype, vector)

    def token(x, weight, bias, indices, y, state, batch, channels, rows) -> None:  # type: ignore[no-untyped-def]
        words = cuda.local.array(all_x, u32)
        held = cuda.local.array(all_states, u32)
        factor_words = cuda.local.array(weight_words, u32)
        start_words = cuda.local.array(bias_words, u32)
        index = cuda.local.array(1, u32)
        factors = cuda.local.array(weights_size, f32)
        start = cuda.local.array(vector, f32)
        new = cuda.local.array(vector, f32)
        old = cuda.local.array(states, f32)
        moved = cuda.local.array(states, f32)
        row_of = cuda.local.array(of_thread, i32)
        item = i32(cuda.blockIdx.x * threads + cuda.threadIdx.x)
        across, _ = split(channels, vector)
        row_group, group = split(item, across)
        channel, first = i32(group * vector), i32(row_group * of_thread)
        if first < batch:
            for r in range(of_thread):
                n = i32(first + r)
                row_of[r] = n
                if has_indices:
                    load_index(index, 0, u64(indices + u64(i64(n) * 4)), n < batch)
                    row_of[r] = i32(index[0])
                load_x(words, r * x_words, u64(x + u64((i64(n) * channels + channel) * element)), n < batch)
            load_weight(factor_words, 0, u64(weight + u64(i64(channel) * (taps * weight_bytes))), 1)
            if has_bias:
                load_bias(start_words, 0, u64(bias + u64(i64(channel) * weight_bytes)), 1)
            for r in range(of_thread):
                row = row_of[r]
                exists = (row >= 0) & (row < rows) & (first + r < batch)
                at = u64(state + u64((i64(row) * channels + channel) * (length * element)))
                load_state(held, r * state_words, at, exists)
            unpack_weight(factor_words, 0, factors, 0)
            for e in range(vector):
                start[e] = f32(0)
            if has_bias:
                unpack_bias(start_words, 0, start, 0)
            for r in range(of_thread):
                n, row = i32(first + r), row_of[r]
                exists = (row >= 0) & (row < rows)
                unpack_x(words, r * x_words, new, 0)
                unpack_state(held, r * state_words, old, 0)
                if n < batch and exists:
                    for e in range(vector):
                        for i in range(length - 1):
                            moved[e * length + i] = old[e * length + i + 1]
                        moved[e * length + length - 1] = new[e]
                    pack_state(moved, 0, held, r * state_words)
                    at = u64(state + u64((i64(row) * channels + channel) * (length * element)))
                    store_state(held, r * state_words, at)
                for e in range(vector):
                    total = start[e]
                    for k in range(taps - 1):
                        total = f32(total + f32(old[e * length + length - taps + 1 + k] * factors[e * taps + k]))
                    total = f32(total + f32(new[e] * factors[e * taps + taps - 1]))
                    total = f32(total * sigmoid(total)) if silu else total
                    new[e] = total if exists else f32(0)
                if n < batch:
                    pack_x(new, 0, words, r * x_words)
                    store_y(words, r * x_words, u64(y + u64((i64(n) * channels + channel) * element)))

    return token
