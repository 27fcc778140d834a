"""pool2d on NVIDIA GPUs in NCHW: a block stages whole planes in shared memory. See docs/kernels/bandwidth.md.

A plane is contiguous, and so are several, so a block copies them in vectors of 16 bytes whatever their height and width. A
thread computes strips: a few neighbouring rows of one column of y. It loads the pixels of x that their windows share once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import MAX_GRID_X, Grid, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.pool2d import Pool2dParams
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts import moves, ptx, vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.planes import VECTOR_BYTES, copy_in_of, least_planes
from schedsearch.templates.parts.slices import place_of
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY
from schedsearch.templates.pool2d.cuda_kernel import Pool, combination, finishing, neutral
from schedsearch.workload import Workload

PLANES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8)
THREADS = (64, 128, 192, 224, 256, 384, 512)
_MOST_BYTES = 64 << 10  # of the planes of a block, so that several blocks share a multiprocessor
_DEFAULT_BYTES = 8 << 10  # of several planes
_MOST_TAPS = 64  # one thread walks over them
_MOST_PIXELS = 64  # of x of a strip with several rows, which the compiler unrolls
_STRIP_COST = 8  # of what a strip takes besides its pixels of x, in pixels


class Pool2dPlanesCuda(Template[Pool2dParams]):
    """Planes of pixels with one channel in shared memory; a thread has strips of a column of y."""

    name = "pool2d_planes_cuda"
    version = 1
    op = "pool2d"
    kind = "cuda"

    def validate(self, workload: Workload[Pool2dParams], target: Target) -> str | None:
        p = workload.params
        if target.compute_capability < LEAST_CAPABILITY:
            got, least = (".".join(map(str, each)) for each in (target.compute_capability, LEAST_CAPABILITY))
            return f"compute capability is {got}; allowed: {least} and later"
        pool = Pool.of(workload, 1)
        if pool.channels != 1:
            return f"layout is {p.layout}; allowed: NCHW, whose planes are contiguous"
        if (taps := p.r * p.s) > _MOST_TAPS:
            return f"windows have {taps} pixels; allowed: up to {_MOST_TAPS}"
        if (nbytes := _least(pool) * _plane_bytes(pool)) > min(_MOST_BYTES, target.shared_bytes_per_block - VECTOR_BYTES):
            return f"planes that fill whole vectors of {VECTOR_BYTES} bytes have {nbytes} bytes; allowed: {_MOST_BYTES}"
        items = max(pool.items(1), pool.planes)
        return None if items <= MAX_GRID_X else f"y has {items} elements; allowed: less than 2**31"

    def space(self, workload: Workload[Pool2dParams], target: Target) -> ConfigSpace:
        pool = Pool.of(workload, 1)
        most = min(_MOST_BYTES, target.shared_bytes_per_block - VECTOR_BYTES)
        least, nbytes = _least(pool), _plane_bytes(pool)
        planes = tuple(n for n in PLANES if n == least or (n % least == 0 and n * nbytes <= most and n < 2 * pool.planes))
        rows = tuple(n for n in ROWS if n == 1 or (n <= pool.rows.outputs and _pixels(pool, n) <= _MOST_PIXELS))
        knobs = (
            Knob("planes", planes, "planes of a block"),
            Knob("rows", rows, "neighbouring rows of a column of y that a thread computes together"),
            Knob("threads", THREADS, "threads of a block"),
        )
        strips = pool.columns.outputs
        rules = (
            Constraint(
                "less than twice as many threads as strips, or the fewest",
                lambda k: (
                    (k["threads"] == THREADS[0])
                    | (k["threads"] < 2 * k["planes"] * strips * -(-pool.rows.outputs // k["rows"]))
                ),
            ),
        )
        return ConfigSpace(knobs, rules)

    def default(self, workload: Workload[Pool2dParams], target: Target, space: ConfigSpace) -> Config:
        """Planes of up to 8 KiB while every multiprocessor has two blocks; the rows and threads that load the fewest pixels
        of x, also for strips that do not exist.
        """
        pool = Pool.of(workload, 1)
        values: dict[str, Any] = {knob.name: knob.values for knob in space.knobs}
        least, nbytes = values["planes"][0], _plane_bytes(pool)
        planes = max(
            n for n in values["planes"]
            if n == least or (n * nbytes <= _DEFAULT_BYTES and pool.planes >= 2 * target.sms * n)
        )  # fmt: skip
        choices = [Config(planes=planes, rows=rows, threads=threads) for rows in values["rows"] for threads in THREADS[:5]]
        return min((each for each in choices if not space.check(each)), key=lambda each: _loaded(pool, each))

    def plain(self, workload: Workload[Pool2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """The fewest planes, one element of y at a time."""
        return Config(planes=space.knobs[0].values[0], rows=1, threads=THREADS[0])

    def kernel(self, workload: Workload[Pool2dParams], target: Target, config: Config) -> KernelSource:
        pool, planes, threads = Pool.of(workload, 1), config["planes"], config["threads"]
        step = KernelStep(
            planes_kernel(pool, planes, config["rows"], threads),
            (Pointer("x"), Pointer("y")),
            Grid(-(-pool.planes // planes)),
            threads,
            -(-planes * _plane_bytes(pool) // VECTOR_BYTES) * VECTOR_BYTES,
        )
        return KernelSource("cuda", "native", (step,), alignments={"x": VECTOR_BYTES, "y": pool.element_bytes})


def planes_kernel(pool: Pool, planes: int, tile: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) whose blocks have `planes` planes, and whose threads have strips of `tile` rows."""
    element, count, plane_bytes = pool.element_bytes, pool.planes, _plane_bytes(pool)
    rows, columns = pool.rows, pool.columns
    height, width, down, across = rows.size, columns.size, rows.outputs, columns.outputs
    stride_h, stride_w, step_h, step_w = rows.stride, columns.stride, rows.dilation, columns.dilation
    extent_h, taps_w, top, left = (rows.taps - 1) * step_h + 1, columns.taps, rows.before, columns.before
    span_h = (tile - 1) * stride_h + extent_h
    safe_h = height - ((-(-down // tile) * tile - tile) * stride_h - top)  # rows of a strip that are in the image
    safe_w = width - ((across - 1) * stride_w - left)
    strips = -(-down // tile)
    copy_in, wait_all = copy_in_of(threads), ptx.cp_async_wait(0)
    load, unpack = moves.load_shared(element), vectors.unpack(pool.dtype, 1)
    combine, first, finish, stored = combination(pool), neutral(pool), finishing(pool), place_of(pool.y)
    row_step = step_h if tile == 1 else math.gcd(stride_h, step_h)
    loaded_rows, taps_h = (span_h - 1) // row_step + 1, rows.taps

    def pool_planes(x, y) -> None:  # type: ignore[no-untyped-def]
        shared, thread = shared_base(), u32(cuda.threadIdx.x)
        first_plane = i64(cuda.blockIdx.x) * planes
        inside_planes = i32(min(i64(planes), i64(count - first_plane)))
        copy_in(shared, u64(x + u64(first_plane * plane_bytes)), inside_planes, thread, plane_bytes)
        ptx.cp_async_commit()
        found = cuda.local.array(tile, f32)
        of_row = cuda.local.array(loaded_rows, f32)  # pixels of a row of x that belong to a window, combined
        word = cuda.local.array(1, u32)
        value = cuda.local.array(1, f32)
        wait_all()
        cuda.syncthreads()
        for item in range(i32(thread), i32(inside_planes * (strips * across)), threads):
            place = u32(item) // u32(across)
            column = i32(u32(item) - place * u32(across))
            plane = i32(place // u32(strips))
            row = i32((place - u32(plane) * u32(strips)) * u32(tile))
            h, w = i32(row * stride_h - top), i32(column * stride_w - left)
            source = i32(shared + plane * plane_bytes + (h * width + w) * element)
            for number in range(loaded_rows):
                i = number * row_step
                inside_h = True
                if i < top:
                    inside_h = h + i >= 0
                if i >= safe_h:
                    inside_h = inside_h & (h + i < height)
                for j in range(taps_w):
                    inside = inside_h
                    if j * step_w < left:
                        inside = inside & (w + j * step_w >= 0)
                    if j * step_w >= safe_w:
                        inside = inside & (w + j * step_w < width)
                    at = i32(source + (i * width + j * step_w) * element)
                    load(word, 0, u32(at if inside else shared))
                    unpack(word, 0, value, 0)
                    pixel = value[0] if inside else first
                    of_row[number] = combine(of_row[number], pixel) if j > 0 else pixel
            for u in range(tile):
                found[u] = of_row[u * stride_h // row_step]
                for tap in range(1, taps_h):
                    found[u] = combine(found[u], of_row[(u * stride_h + tap * step_h) // row_step])
            for u in range(tile):
                if row + u < down:
                    to = stored(((first_plane + plane) * down + row + u) * across + column) * element
                    finish(found, u, y + u64(to), i32(h + u * stride_h), w)

    return pool_planes


def _plane_bytes(pool: Pool) -> int:
    return pool.rows.size * pool.columns.size * pool.element_bytes


def _least(pool: Pool) -> int:
    return least_planes(pool.rows.size * pool.columns.size, dtype_of(pool.dtype).nbytes)


def _pixels(pool: Pool, rows: int) -> int:
    """Pixels of x that a strip loads."""
    return ((rows - 1) * pool.rows.stride + (pool.rows.taps - 1) * pool.rows.dilation + 1) * pool.columns.taps


def _loaded(pool: Pool, config: Config) -> tuple[int, int]:
    """What a default should have little of: pixels that a block loads, also for strips that do not exist; then threads."""
    strips = config["planes"] * -(-pool.rows.outputs // config["rows"]) * pool.columns.outputs
    rounds = -(-strips // config["threads"])
    return rounds * config["threads"] * (_pixels(pool, config["rows"]) + _STRIP_COST), -config["threads"]
