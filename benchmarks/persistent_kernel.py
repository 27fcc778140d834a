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

from schedsearch.backend.ops import device_op, shared_base
from schedsearch.launch import Grid, Int32, Pointer
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts import cluster, ptx
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64

SIDE, PIXELS, WIDE, NARROW = 7, 49, 2048, 512
TAPS, RANKS, THREADS = 9, 8, 256  # of a 3x3 layer; blocks of a cluster; threads of a block
ROW_BYTES, CHUNK_BYTES = 128, 16  # 64 channels of a pixel or of a filter; what a thread loads at once
FRAMED = SIDE + 2  # pixels of a row in shared memory for the 3x3 layer, with a frame of zeros
EMPTY = 0xFFFFFFFF
TURNS = 20_000  # loads after which a block gives up waiting
LAYERS = (WIDE, NARROW, NARROW), (NARROW, NARROW, WIDE)  # input and output channels of each
FLOATS, HALVES = 4, 2  # bytes
MARKS = 8  # cycles noted in a layer: its begin, pixels there, weights there, multiplied, sent, received, stored, unused
TRACED_BLOCKS = 8  # bottleneck blocks, at most, of which they are noted
MARKS_AT = 64  # bytes of `errors` in front of them

load_fresh = device_op(  # from L2, where other blocks write; EMPTY if not `wanted`
    "load_fresh",
    "{ .reg .pred p; setp.ne.u32 p, $wanted, 0; mov.b32 $a, -1; mov.b32 $b, -1; mov.b32 $c, -1; mov.b32 $d, -1;\n"
    "@p ld.relaxed.gpu.global.v4.b32 {$a, $b, $c, $d}, [$address]; }",
    ins={"address": "u64", "wanted": "u32"},
    outs=dict.fromkeys("abcd", "u32"),
)
load_fresh_pair = device_op(
    "load_fresh_pair",
    "ld.relaxed.gpu.global.v2.b32 {$a, $b}, [$address];",
    ins={"address": "u64"},
    outs={"a": "u32", "b": "u32"},
)
store_fresh_pair = device_op(
    "store_fresh_pair", "st.relaxed.gpu.global.v2.b32 [$address], {$a, $b};", ins={"address": "u64", "a": "u32", "b": "u32"}
)
load_constants = device_op(
    "load_constants",
    "ld.global.v4.f32 {$a, $b, $c, $d}, [$address];",
    ins={"address": "u64"},
    outs=dict.fromkeys("abcd", "f32"),
)
load_sums = device_op(
    "load_sums",
    "ld.shared.v4.f32 {$a, $b, $c, $d}, [$shared];",
    ins={"shared": "u32"},
    outs=dict.fromkeys("abcd", "f32"),
)
send_sums = device_op(  # to an address of `map_shared`, where `barrier` counts the bytes
    "send_sums",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$shared], {$a, $b, $c, $d}, [$barrier];",
    ins={"shared": "u32", "a": "f32", "b": "f32", "c": "f32", "d": "f32", "barrier": "u32"},
)
copy_bulk = device_op(
    "copy_bulk",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$shared], [$address], $bytes, [$barrier];",
    ins={"shared": "u32", "address": "u64", "bytes": "u32", "barrier": "u32"},
)
pack_relu = device_op(  # two float32 as float16, of which negative ones become 0
    "pack_relu",
    "cvt.rn.relu.f16x2.f32 $packed, $high, $low;",
    ins={"low": "f32", "high": "f32"},
    outs={"packed": "u32"},
    pure=True,
)
unpack_pair = device_op(
    "unpack_pair",
    "{ .reg .b16 l, h; mov.b32 {l, h}, $word; cvt.f32.f16 $low, l; cvt.f32.f16 $high, h; }",
    ins={"word": "u32"},
    outs={"low": "f32", "high": "f32"},
    pure=True,
)


cycles = device_op("cycles", "mov.u32 $now, %clock;", outs={"now": "u32"})


def _multiply_text() -> str:
    """32 pixels x 32 filters x 16 channels: two tiles of pixels at `a0` and `a1`, filters at `b` and 16 rows behind it."""
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    lines = [
        "{ .reg .b32 a<8>, b<8>;",
        *(f"{load} {{a{4 * m}, a{4 * m + 1}, a{4 * m + 2}, a{4 * m + 3}}}, [$a{m}];" for m in range(2)),
        *(f"{load} {{b{4 * n}, b{4 * n + 1}, b{4 * n + 2}, b{4 * n + 3}}}, [$b+{16 * ROW_BYTES * n}];" for n in range(2)),
    ]
    for m in range(2):
        for n in range(4):
            c = ", ".join(f"$acc[{4 * (4 * m + n) + q}]" for q in range(4))
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{c}}}, "
                f"{{a{4 * m}, a{4 * m + 1}, a{4 * m + 2}, a{4 * m + 3}}}, {{b{2 * n}, b{2 * n + 1}}}, {{{c}}};"
            )
    return "\n".join([*lines, "}"])


multiply_32x32x16 = device_op(
    "multiply_32x32x16", _multiply_text(), inout={"acc": ("f32", 32)}, ins={"a0": "u32", "a1": "u32", "b": "u32"}
)


@dataclass(frozen=True)
class Run:
    """How a run of bottleneck blocks is shared out.

    Attributes:
        columns: output channels of a tile: 32 for sixteen clusters, 64 for eight.
        polls: what a thread loads until it is there: all of its pixels, or one of them first and then the others.
        traced: the first thread of each block notes cycles in `errors`, `MARKS` in each layer.
    """

    columns: int = 32
    polls: str = "all"
    traced: bool = False

    @property
    def clusters(self) -> int:
        return NARROW // self.columns

    @property
    def grid(self) -> int:
        return self.clusters * RANKS

    @property
    def slots(self) -> int:
        """Bottleneck blocks whose weights fit in shared memory."""
        return 64 // self.columns

    @property
    def halves(self) -> int:
        """Warps that share the columns of a tile; two share its pixels, and the others the channels."""
        return self.columns // 32

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
        """Floats from pixel to pixel of sums: conflicts of banks neither when they are written nor read."""
        return self.columns + 8

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

        def rows(filters: Any) -> Any:  # columns x 64 channels
            return filters.reshape(self.columns, 8, 8)[n[:, None], swizzled]

        found = []
        for number in range(self.clusters):
            for rank in range(RANKS):
                of = slice(number * self.columns, (number + 1) * self.columns)
                wide = (number * 4 + rank // 2) * self.columns
                parts = [rows(first[of, 0, 0, 256 * rank + 64 * g :][:, :64]) for g in range(4)]
                parts += [rows(second[of, t // 3, t % 3, 64 * rank : 64 * rank + 64]) for t in range(TAPS)]
                tile = third[wide : wide + self.columns, 0, 0]
                parts += [rows(tile[:, 256 * (rank % 2) + 64 * g :][:, :64]) for g in range(4)]
                found.append(np.stack([part.reshape(-1) for part in parts]).reshape(-1))
        return np.stack(found)


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
    fetch, multiply, lay_down, mark = _fetch(run, layer), _multiply(run, layer), _lay_down(run), _mark(run)
    biases, words = 4 * rounds, 2 * rounds

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
            if pixel < stop:
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
        acc = cuda.local.array(32, f32)
        for i in range(32):
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
                to = u64(out + u64(((first + pixel) * outputs + tile * columns + column) * HALVES))
                store_fresh_pair(to, pack_relu(s0, s1), pack_relu(s2, s3))
        mark(errors, phase, 6, thread)

    return compute


def _mark(run: Run) -> Callable[..., None]:
    """mark(errors, phase, number, thread): notes the cycle."""
    phases, traced = 3 * TRACED_BLOCKS, run.traced

    def mark(errors: Any, phase: Any, number: Any, thread: Any) -> None:
        if traced and (thread == 0) & (phase < i32(phases)):
            place = i64((i32(cuda.blockIdx.x) * phases + phase) * MARKS + number)
            ptx.store_global_u32(u64(errors + u64(place * 4 + MARKS_AT)), cycles())

    return mark


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
    halves, parts, framed = run.halves, run.parts, layer == 1
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
        filter_ = u32(half * u32(32) + lane % u32(8) + lane // u32(16) * u32(8))
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
                        multiply_32x32x16(
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
                multiply_32x32x16(
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
    halves, pitch, sums_at = run.halves, run.pitch, run.regions["sums"]
    store = ptx.store_shared_pair("float32")

    def lay_down(acc: Any, shared: Any, thread: Any) -> None:
        lane, warp = u32(thread) % u32(32), u32(thread) // u32(32)
        half, part = u32(warp // u32(2)) % u32(halves), u32(warp // u32(2 * halves))
        pixel = u32((warp % u32(2)) * u32(32) + lane // u32(4))
        column = u32(half * u32(32) + lane % u32(4) * u32(2))
        at = u32(shared + u32(sums_at) + ((part * u32(PIXELS) + pixel) * u32(pitch) + column) * u32(FLOATS))
        for m in range(4):  # eight pixels each
            if pixel + u32(8 * m) < u32(PIXELS):
                for n in range(4):
                    i = 4 * (4 * (m // 2) + n) + 2 * (m % 2)
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
