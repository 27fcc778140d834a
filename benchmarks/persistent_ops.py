"""Device operations of `persistent_kernel.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import device_op
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, i64, u64

ROW_BYTES = 128  # of 64 channels of a pixel or of a filter in shared memory
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


@functools.cache
def multiply_warp_tile(tiles: int) -> Callable[..., Any]:
    """multiply(acc[8 * tiles], a0, a1, b): 32 pixels times 8 * `tiles` filters over 16 channels. A lane gives its addresses
    for ldmatrix: `a0` and `a1` of 16 pixels each, and `b` of the first 16 filters, behind which the others lie."""
    load = "ldmatrix.sync.aligned.m8n8"
    lines = [f"{{ .reg .b32 a<8>, b<{2 * tiles}>;"]
    lines += [f"{load}.x4.shared.b16 {{a{4 * m}, a{4 * m + 1}, a{4 * m + 2}, a{4 * m + 3}}}, [$a{m}];" for m in range(2)]
    for n in range(0, tiles, 2):
        registers = range(2 * n, 2 * min(n + 2, tiles))
        names = ", ".join(f"b{register}" for register in registers)
        lines.append(f"{load}.x{len(registers)}.shared.b16 {{{names}}}, [$b+{8 * ROW_BYTES * n}];")
    for m in range(2):
        for n in range(tiles):
            c = ", ".join(f"$acc[{4 * (tiles * m + n) + q}]" for q in range(4))
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{c}}}, "
                f"{{a{4 * m}, a{4 * m + 1}, a{4 * m + 2}, a{4 * m + 3}}}, {{b{2 * n}, b{2 * n + 1}}}, {{{c}}};"
            )
    text = "\n".join([*lines, "}"])
    return device_op(
        "multiply_warp_tile", text, inout={"acc": ("f32", 8 * tiles)}, ins={"a0": "u32", "a1": "u32", "b": "u32"}
    )


def mark_of(traced: bool) -> Callable[..., None]:
    """mark(errors, phase, number, thread): the first thread of a block notes the cycle, if the run is traced."""
    phases = 3 * TRACED_BLOCKS

    def mark(errors: Any, phase: Any, number: Any, thread: Any) -> None:
        if traced and (thread == 0) & (phase < i32(phases)):
            place = i64((i32(cuda.blockIdx.x) * phases + phase) * MARKS + number)
            ptx.store_global_u32(u64(errors + u64(place * 4 + MARKS_AT)), cycles())

    return mark
