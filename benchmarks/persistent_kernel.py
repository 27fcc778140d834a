"""One kernel for a run of bottleneck blocks of ResNet-50's last stage at batch 1: see `persistent.py`.

A bottleneck block has three layers with bias and relu: 1x1 from 2048 to 512 channels, 3x3 from 512 to 512, and 1x1 to
2048, to which the block's input is added. Images have 7x7 pixels, in NHWC and float16. All blocks of the grid stay on their
multiprocessors for the whole run, in clusters of eight that share the input channels of a tile:

- Weights lie in memory as each block of the grid needs them. They are constants, so a block copies those of the next
  bottleneck blocks to shared memory long before their layers begin.
- A layer's output is its own signal. The buffers between layers are filled with `EMPTY`, two float16 that relu never
  gives. A block loads its pixels until no word is `EMPTY`. There are no flags, no fences, and no barrier of the grid. Every
  layer has a buffer of its own; a launch fills those of the next launch.
- Eight warps multiply by mma.sync and add up their parts. Each block of a cluster then sends its sums to the blocks that own
  the pixels (`st.async`), whose barriers count the bytes.

Source: PTX ISA, "st.async", "cp.async.bulk", "mma.sync.m16n8k16", "ld.relaxed".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from persistent_ops import (
    ROW_BYTES,
    copy_bulk,
    load_constants,
    load_fresh,
    load_fresh_pair,
    load_sums,
    mark_of,
    multiply_warp_tile,
    pack_relu,
    send_sums,
    store_fresh_pair,
    unpack_pair,
)

from schedsearch.backend.ops import shared_base
from schedsearch.launch import Grid, Int32, Pointer
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts import cluster, ptx
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64

SIDE, PIXELS, WIDE, NARROW = 7, 49, 2048, 512
TAPS, RANKS, THREADS = 9, 8, 256  # of a 3x3 layer; blocks of a cluster; threads of a block
CHUNK_BYTES = 16  # that a thread loads at once
FRAMED = SIDE + 2  # pixels of a row in shared memory for the 3x3 layer, with a frame of zeros
EMPTY = 0xFFFFFFFF
TURNS = 20_000  # loads after which a block gives up waiting
LAYERS = (WIDE, NARROW, NARROW), (NARROW, NARROW, WIDE)  # input and output channels of each
FLOATS, HALVES = 4, 2  # bytes


@dataclass(frozen=True)
class Run:
    """How a run of bottleneck blocks is shared out.

    Attributes:
        columns: output channels of a tile: 32 for 16 clusters, which do not fit on every H200, 40 for 13, 64 for 8.
        polls: what a thread loads until it is there: all of its pixels, or one of them first and then the others.
        traced: the first thread of each block notes cycles in `errors`, `MARKS` in each layer.
    """

    columns: int = 32
    polls: str = "all"
    traced: bool = False

    @property
    def clusters(self) -> int:
        return -(-NARROW // self.columns)

    @property
    def grid(self) -> int:
        return self.clusters * RANKS

    @property
    def slots(self) -> int:
        """Bottleneck blocks whose weights fit in shared memory."""
        return 2 if self.columns == 32 else 1

    @property
    def halves(self) -> int:
        """Warps that share the columns of a tile; two share its pixels, and the others the channels."""
        return 2 if self.columns == 64 else 1

    @property
    def tiles(self) -> int:
        """Tiles of eight columns of a warp."""
        return self.columns // 8 // self.halves

    @property
    def parts(self) -> int:
        return THREADS // 32 // 2 // self.halves

    def weight_bytes(self, layer: int) -> int:
        """Of a block of the grid."""
        return self.columns * ROW_BYTES * (TAPS if layer == 1 else 4)

    @property
    def all_weight_bytes(self) -> int:
        return sum(map(self.weight_bytes, range(3)))

    @property
    def pitch(self) -> int:
        """Floats from pixel to pixel of sums: four pixels of eight columns lie in different banks."""
        return next(pitch for pitch in range(self.columns, 2 * self.columns) if pitch % 32 in (8, 24))

    @property
    def regions(self) -> dict[str, int]:
        """Where parts of shared memory begin, and its end."""
        sizes = {
            "weights": self.slots * self.all_weight_bytes,
            "pixels": 4 * PIXELS * ROW_BYTES,
            "framed": FRAMED * FRAMED * ROW_BYTES,
            "sums": self.parts * PIXELS * self.pitch * FLOATS,
            "received": 2 * self.received_bytes,
            "full": 8 * 3 * self.slots,
            "told": 8 * 2,
        }
        found, at = {}, 0
        for name, size in sizes.items():
            found[name], at = at, at + size
        return {**found, "end": at}

    @property
    def received_bytes(self) -> int:
        return max(RANKS * -(-PIXELS // RANKS), 2 * -(-PIXELS // 2)) * self.columns * FLOATS

    def source(self, blocks: int) -> KernelSource:
        """The kernel for so many bottleneck blocks."""
        names = ("x", "weights", "bias", "used", "cleared", "y", "errors")
        step = KernelStep(
            persistent_kernel(self),
            (*map(Pointer, names), Int32(blocks)),
            Grid(self.grid),
            THREADS,
            self.regions["end"],
            cluster=RANKS,
            ahead=("weights", "bias"),
        )
        return KernelSource("cuda", "sm_90a", (step,))

    def packed(self, first: Any, second: Any, third: Any) -> Any:
        """The weights of a bottleneck block, OHWI, as the blocks of the grid copy them."""
        n = np.arange(self.columns)
        swizzled = np.arange(8)[None, :] ^ (n % 8)[:, None]  # chunk c of row n holds chunk c ^ n % 8

        def rows(filters: Any, first: int, channel: int) -> Any:
            """64 channels of a tile, zeros behind the last filter."""
            found = np.zeros((self.columns, 64), filters.dtype)
            own = filters[first : first + self.columns, channel : channel + 64]
            found[: len(own)] = own
            return found.reshape(self.columns, 8, 8)[n[:, None], swizzled].reshape(-1)

        taps = second.reshape(len(second), TAPS, NARROW)
        blocks = []
        for number in range(self.clusters):
            for rank in range(RANKS):
                at, wide = number * self.columns, (number * 4 + rank // 2) * self.columns
                parts = [rows(first[:, 0, 0], at, 256 * rank + 64 * group) for group in range(4)]
                parts += [rows(taps[:, tap], at, 64 * rank) for tap in range(TAPS)]
                parts += [rows(third[:, 0, 0], wide, 256 * (rank % 2) + 64 * group) for group in range(4)]
                blocks.append(np.concatenate(parts))
        return np.stack(blocks)


def set_bytes(blocks: int) -> int:
    """Of the buffers between layers."""
    return blocks * PIXELS * (2 * NARROW + WIDE) * HALVES


def persistent_kernel(run: Run) -> Callable[..., None]:
    """The kernel (x, weights, bias, used, cleared, y, errors, blocks)."""
    regions, slots, grid, per_block = run.regions, run.slots, run.grid, run.all_weight_bytes
    full_at, framed_at, frame_chunks = regions["full"], regions["framed"], FRAMED * FRAMED * ROW_BYTES // CHUNK_BYTES
    bring = tuple(_bring(run, layer) for layer in range(3))
    bring_first, bring_second, bring_third = bring
    reduce, filter_, expand = (_layer(run, layer) for layer in range(3))
    narrow_bytes, wide_bytes = PIXELS * NARROW * HALVES, PIXELS * WIDE * HALVES
    block_bytes, biases = 2 * narrow_bytes + wide_bytes, (2 * NARROW + WIDE) * FLOATS

    def persistent(x: Any, weights: Any, bias: Any, used: Any, cleared: Any, y: Any, errors: Any, blocks: Any) -> None:
        shared = shared_base()
        thread, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        rank, number = i32(u32(block) % u32(RANKS)), i32(u32(block) // u32(RANKS))
        own_weights = u64(weights + u64(i64(block) * per_block))
        if thread == 0:
            for i in range(3 * slots + 2):
                ptx.mbarrier_init(u32(shared + full_at + 8 * i), u32(1))
            ptx.mbarrier_init_fence()
            b = i32(0)
            while b < i32(min(slots, blocks)):
                bring_first(shared, own_weights, b)
                bring_second(shared, own_weights, b)
                bring_third(shared, own_weights, b)
                b = i32(b + 1)
        chunk = i32(thread)
        while chunk < frame_chunks:
            ptx.store_shared_v4(u32(shared + framed_at + chunk * CHUNK_BYTES), u32(0), u32(0), u32(0), u32(0))
            chunk = i32(chunk + THREADS)
        cuda.syncthreads()
        cluster.cluster_arrive()
        ptx.wait_for_predecessor()
        at = i64(block * THREADS + thread) * CHUNK_BYTES
        while at < i64(blocks) * block_bytes:
            ptx.store_global_v4(u64(cleared + u64(at)), u32(EMPTY), u32(EMPTY), u32(EMPTY), u32(EMPTY))
            at = i64(at + grid * THREADS * CHUNK_BYTES)
        cluster.cluster_wait()

        b, phase, source, checked = i32(0), i32(0), u64(x), u32(0)
        while b < i32(blocks):
            middle = u64(used + u64(i64(b) * block_bytes))
            wide = u64(middle + u64(2 * narrow_bytes))
            out = u64(y) if b == blocks - 1 else wide
            biased = u64(bias + u64(i64(b) * biases))
            reduce(shared, phase, b, source, checked, biased, source, middle, number, rank, thread, errors)
            if (thread == 0) & (b + slots < blocks):
                bring_first(shared, own_weights, i32(b + slots))
            filter_(
                shared, i32(phase + 1), b, middle, u32(1), u64(biased + u64(NARROW * FLOATS)), source,
                u64(middle + u64(narrow_bytes)), number, rank, thread, errors,
            )  # fmt: skip
            if (thread == 0) & (b + slots < blocks):
                bring_second(shared, own_weights, i32(b + slots))
            expand(
                shared, i32(phase + 2), b, u64(middle + u64(narrow_bytes)), u32(1), u64(biased + u64(2 * NARROW * FLOATS)),
                source, out, number, rank, thread, errors,
            )  # fmt: skip
            if (thread == 0) & (b + slots < blocks):
                bring_third(shared, own_weights, i32(b + slots))
            source, checked = out, u32(1)
            b, phase = i32(b + 1), i32(phase + 3)

    return persistent


def _bring(run: Run, layer: int) -> Callable[..., None]:
    """bring(shared, own_weights, b): begins to copy the weights of a layer of bottleneck block b to its slot."""
    slots, nbytes, per_block, grid = run.slots, run.weight_bytes(layer), run.all_weight_bytes, run.grid
    offset, full_at = sum(run.weight_bytes(earlier) for earlier in range(layer)), run.regions["full"]

    def bring(shared: Any, own_weights: Any, b: Any) -> None:
        slot = i32(u32(b) % u32(slots))
        barrier = u32(shared + full_at + 8 * (3 * slot + layer))
        ptx.mbarrier_expect_bytes(barrier, u32(nbytes))
        source = u64(own_weights + u64(i64(b) * (grid * per_block) + offset))
        copy_bulk(u32(shared + slot * per_block + offset), source, u32(nbytes), barrier)

    return bring


def _layer(run: Run, layer: int) -> Callable[..., None]:
    """layer(shared, phase, b, source, checked, bias, shortcut, out, number, rank, thread, errors): a tile of a layer."""
    regions, columns, slots = run.regions, run.columns, run.slots
    outputs, share = LAYERS[1][layer], 2 if layer == 2 else RANKS  # blocks that share the input channels of a tile
    weights_at = sum(run.weight_bytes(earlier) for earlier in range(layer))
    per_block, full_at, told_at = run.all_weight_bytes, regions["full"], regions["told"]
    received_at, received_bytes = regions["received"], run.received_bytes
    quads, most = columns // 4, -(-PIXELS // share)  # groups of four columns; pixels that a block owns
    rounds = -(-most * quads // THREADS)
    adds, send, collect = layer == 2, _send(run, share), _collect(run, share)
    fetch, multiply, lay_down, mark = _fetch(run, layer), _multiply(run, layer), _lay_down(run), mark_of(run.traced)
    biases, words, sums = 4 * rounds, 2 * rounds, 8 * run.tiles

    def compute(
        shared: Any, phase: Any, b: Any, source: Any, checked: Any, bias: Any, shortcut: Any, out: Any, number: Any,
        rank: Any, thread: Any, errors: Any,
    ) -> None:  # fmt: skip
        mark(errors, phase, 0, thread)
        own = i32(u32(rank) % u32(share))
        tile = i32(number * (RANKS // share) + i32(u32(rank) // u32(share)))
        first, stop = i32(own * PIXELS // share), i32((own + 1) * PIXELS // share)
        buffer = i32(phase & 1)
        told = u32(shared + told_at + 8 * buffer)
        if thread == 0:
            ptx.mbarrier_expect_bytes(told, u32((stop - first) * (share * columns * FLOATS)))
        # What the epilogue needs comes while the block waits for its pixels.
        constant, word = cuda.local.array(biases, f32), cuda.local.array(words, u32)
        for r in range(rounds):
            item = i32(r * THREADS + thread)
            pixel, column = i32(first + i32(u32(item) // u32(quads))), i32(tile * columns + i32(u32(item) % u32(quads)) * 4)
            if (pixel < stop) & (column < outputs):
                constant[4 * r], constant[4 * r + 1], constant[4 * r + 2], constant[4 * r + 3] = load_constants(
                    u64(bias + u64(column * FLOATS))
                )
                if adds:
                    word[2 * r], word[2 * r + 1] = load_fresh_pair(u64(shortcut + u64((pixel * outputs + column) * HALVES)))
        fetch(shared, source, checked, rank, thread, errors)
        mark(errors, phase, 1, thread)
        slot = i32(u32(b) % u32(slots))
        ptx.mbarrier_wait(u32(shared + full_at + 8 * (3 * slot + layer)), u32(u32(b) // u32(slots)) & u32(1))
        cuda.syncthreads()
        mark(errors, phase, 2, thread)
        acc = cuda.local.array(sums, f32)
        for i in range(sums):
            acc[i] = f32(0)
        multiply(acc, shared, u32(shared + slot * per_block + weights_at), thread)
        lay_down(acc, shared, thread)
        cuda.syncthreads()
        mark(errors, phase, 3, thread)
        at = u32(shared + received_at + buffer * received_bytes)
        send(shared, at, told, rank, thread)
        mark(errors, phase, 4, thread)
        for r in range(rounds):
            item = i32(r * THREADS + thread)
            pixel, column = i32(u32(item) // u32(quads)), i32(u32(item) % u32(quads)) * i32(4)
            if pixel < stop - first:
                if r == 0:
                    ptx.mbarrier_wait(told, u32(phase >> 1) & u32(1))
                    mark(errors, phase, 5, thread)
                s0, s1, s2, s3 = collect(at, pixel, column)
                s0, s1 = f32(s0 + constant[4 * r]), f32(s1 + constant[4 * r + 1])
                s2, s3 = f32(s2 + constant[4 * r + 2]), f32(s3 + constant[4 * r + 3])
                if adds:
                    low, high = unpack_pair(word[2 * r])
                    s0, s1 = f32(s0 + low), f32(s1 + high)
                    low, high = unpack_pair(word[2 * r + 1])
                    s2, s3 = f32(s2 + low), f32(s3 + high)
                if tile * columns + column < outputs:
                    to = u64(out + u64(((first + pixel) * outputs + tile * columns + column) * HALVES))
                    store_fresh_pair(to, pack_relu(s0, s1), pack_relu(s2, s3))
        mark(errors, phase, 6, thread)

    return compute


def _fetch(run: Run, layer: int) -> Callable[..., None]:
    """fetch(shared, source, checked, rank, thread, errors): pixels to shared memory, as soon as all of them are there."""
    inputs, groups = LAYERS[0][layer], 1 if layer == 1 else 4
    share = 2 if layer == 2 else RANKS
    chunks = groups * PIXELS * (ROW_BYTES // CHUNK_BYTES)
    rounds, framed, pixels_at = -(-chunks // THREADS), layer == 1, run.regions["framed" if layer == 1 else "pixels"]
    words, one_first, of_group = 4 * rounds, run.polls == "one", PIXELS * (ROW_BYTES // CHUNK_BYTES)

    def fetch(shared: Any, source: Any, checked: Any, rank: Any, thread: Any, errors: Any) -> None:
        word, place = cuda.local.array(words, u32), cuda.local.array(rounds, u32)
        offset = cuda.local.array(rounds, u32)
        first = u32(u32(rank) % u32(share)) * u32(groups * ROW_BYTES)
        pending, turn = u32(0), i32(0)
        for r in range(rounds):
            item = u32(r * THREADS + thread)
            group, rest = u32(item // u32(of_group)), u32(item % u32(of_group))
            pixel, chunk = u32(rest // u32(8)), u32(rest % u32(8))
            offset[r] = u32(pixel * u32(inputs * HALVES) + first + group * u32(ROW_BYTES) + chunk * u32(CHUNK_BYTES))
            row = _framed(pixel) if framed else pixel
            swizzled = u32((chunk ^ (row % u32(8))) * u32(CHUNK_BYTES))
            place[r] = u32(shared + u32(pixels_at) + group * u32(PIXELS * ROW_BYTES) + row * u32(ROW_BYTES) + swizzled)
            if item < u32(chunks):
                pending = u32(pending | u32(1 << r))
        waits_for_one = one_first and checked != u32(0)
        while pending != u32(0):
            asked = u32(pending & u32(1)) if waits_for_one else pending
            for r in range(rounds):
                wanted = u32((asked >> u32(r)) & u32(1))
                word[4 * r], word[4 * r + 1], word[4 * r + 2], word[4 * r + 3] = load_fresh(
                    u64(source + u64(offset[r])), wanted
                )
            for r in range(rounds):
                if (asked >> u32(r)) & u32(1):
                    there = (word[4 * r] != u32(EMPTY)) & (word[4 * r + 1] != u32(EMPTY))
                    there = there & (word[4 * r + 2] != u32(EMPTY)) & (word[4 * r + 3] != u32(EMPTY))
                    if there | (checked == u32(0)):
                        ptx.store_shared_v4(place[r], word[4 * r], word[4 * r + 1], word[4 * r + 2], word[4 * r + 3])
                        pending = u32(pending & ~u32(1 << r))
                        waits_for_one = False
            turn = i32(turn + 1)
            if turn > i32(TURNS):
                ptx.store_global_u32(errors, u32(1))
                pending = u32(0)

    return fetch


def _multiply(run: Run, layer: int) -> Callable[..., None]:
    """multiply(acc, shared, weights, thread): the warp's 32 pixels times 32 filters, over its part of the channels."""
    halves, parts, framed, warp_columns = run.halves, run.parts, layer == 1, 8 * run.tiles
    multiply_tile = multiply_warp_tile(run.tiles)
    pixels_at, filter_bytes, group_bytes = (
        run.regions["framed" if framed else "pixels"],
        run.columns * ROW_BYTES,
        PIXELS * ROW_BYTES,
    )
    steps, own_steps = 16 // parts, 4 // parts  # of a 1x1 layer, and of a tap

    def multiply(acc: Any, shared: Any, weights: Any, thread: Any) -> None:
        lane, warp = u32(thread) % u32(32), u32(thread) // u32(32)
        half, part = u32(warp // u32(2)) % u32(halves), u32(warp // u32(2 * halves))
        # Rows behind the last pixel are multiplied as that one is, and not stored.
        pixel0 = u32(min((warp % u32(2)) * u32(32) + lane % u32(16), u32(PIXELS - 1)))
        pixel1 = u32(min((warp % u32(2)) * u32(32) + lane % u32(16) + u32(16), u32(PIXELS - 1)))
        filter_ = u32(half * u32(warp_columns) + lane % u32(8) + lane // u32(16) * u32(8))
        b = u32(weights + filter_ * u32(ROW_BYTES))
        chunk_a, chunk_b, swizzle_b = u32(lane // u32(16)), u32(lane // u32(8) % u32(2)), u32(lane % u32(8))
        x = u32(shared + u32(pixels_at))
        if framed:
            corner0, corner1 = u32(_framed(pixel0) - u32(FRAMED + 1)), u32(_framed(pixel1) - u32(FRAMED + 1))
            for down in range(3):
                for right in range(3):
                    a0, a1 = u32(corner0 + u32(down * FRAMED + right)), u32(corner1 + u32(down * FRAMED + right))
                    for s in range(own_steps):
                        step = u32(part * u32(own_steps) + u32(s))
                        chunk = u32(u32(2) * step + chunk_a)
                        multiply_tile(
                            acc,
                            u32(x + a0 * u32(ROW_BYTES) + (chunk ^ (a0 % u32(8))) * u32(CHUNK_BYTES)),
                            u32(x + a1 * u32(ROW_BYTES) + (chunk ^ (a1 % u32(8))) * u32(CHUNK_BYTES)),
                            u32(
                                b
                                + u32((3 * down + right) * filter_bytes)
                                + ((u32(2) * step + chunk_b) ^ swizzle_b) * u32(CHUNK_BYTES)
                            ),
                        )
        else:
            for s in range(steps):
                step = u32(part * u32(steps) + u32(s))
                group, step = u32(step // u32(4)), u32(step % u32(4))
                at, chunk = u32(x + group * u32(group_bytes)), u32(u32(2) * step + chunk_a)
                multiply_tile(
                    acc,
                    u32(at + pixel0 * u32(ROW_BYTES) + (chunk ^ (pixel0 % u32(8))) * u32(CHUNK_BYTES)),
                    u32(at + pixel1 * u32(ROW_BYTES) + (chunk ^ (pixel1 % u32(8))) * u32(CHUNK_BYTES)),
                    u32(b + group * u32(filter_bytes) + ((u32(2) * step + chunk_b) ^ swizzle_b) * u32(CHUNK_BYTES)),
                )

    return multiply


def _framed(pixel: Any) -> Any:
    """The row of shared memory with a pixel of the 3x3 layer."""
    return u32((pixel // u32(SIDE) + u32(1)) * u32(FRAMED) + pixel % u32(SIDE) + u32(1))


def _lay_down(run: Run) -> Callable[..., None]:
    """lay_down(acc, shared, thread): the warp's sums to shared memory, by part, pixel and column."""
    halves, pitch, sums_at, tiles = run.halves, run.pitch, run.regions["sums"], run.tiles
    store = ptx.store_shared_pair("float32")

    def lay_down(acc: Any, shared: Any, thread: Any) -> None:
        lane, warp = u32(thread) % u32(32), u32(thread) // u32(32)
        half, part = u32(warp // u32(2)) % u32(halves), u32(warp // u32(2 * halves))
        pixel = u32((warp % u32(2)) * u32(32) + lane // u32(4))
        column = u32(half * u32(8 * tiles) + lane % u32(4) * u32(2))
        at = u32(shared + u32(sums_at) + ((part * u32(PIXELS) + pixel) * u32(pitch) + column) * u32(FLOATS))
        for m in range(4):  # eight pixels each
            if pixel + u32(8 * m) < u32(PIXELS):
                for n in range(tiles):
                    i = 4 * (tiles * (m // 2) + n) + 2 * (m % 2)
                    store(u32(at + u32((8 * m * pitch + 8 * n) * FLOATS)), acc[i], acc[i + 1])

    return lay_down


def _send(run: Run, share: int) -> Callable[..., None]:
    """send(shared, received, told, rank, thread): the sums over the block's channels, to the owners of the pixels."""
    columns, parts, pitch, sums_at = run.columns, run.parts, run.pitch, run.regions["sums"]
    quads, most = columns // 4, -(-PIXELS // share)
    rounds = -(-PIXELS * quads // THREADS)

    def send(shared: Any, received: Any, told: Any, rank: Any, thread: Any) -> None:
        own = i32(u32(rank) % u32(share))
        for r in range(rounds):
            item = i32(r * THREADS + thread)
            pixel, quad = i32(u32(item) // u32(quads)), i32(u32(item) % u32(quads))
            if pixel < i32(PIXELS):
                a, b, c, d = f32(0), f32(0), f32(0), f32(0)
                for part in range(parts):
                    p, q, s, t = load_sums(u32(shared + sums_at + ((part * PIXELS + pixel) * pitch + quad * 4) * FLOATS))
                    a, b, c, d = f32(a + p), f32(b + q), f32(c + s), f32(d + t)
                owner = i32(((pixel + 1) * share - 1) // PIXELS)
                first = i32(owner * PIXELS // share)
                to = u32(rank - own + owner)
                at = u32(received + ((own * most + pixel - first) * columns + quad * 4) * FLOATS)
                send_sums(cluster.map_shared(at, to), a, b, c, d, cluster.map_shared(told, to))

    return send


def _collect(run: Run, share: int) -> Callable[..., Any]:
    """collect(received, pixel, column): the sums of four columns of an own pixel, over all blocks that share a tile."""
    columns, most = run.columns, -(-PIXELS // share)

    def collect(received: Any, pixel: Any, column: Any) -> Any:
        a, b, c, d = f32(0), f32(0), f32(0), f32(0)
        for sender in range(share):
            p, q, s, t = load_sums(u32(received + ((sender * most + pixel) * columns + column) * FLOATS))
            a, b, c, d = f32(a + p), f32(b + q), f32(c + s), f32(d + t)
        return a, b, c, d

    return collect
