"""Device operations on the tile of a warp: products of fragments that ldmatrix reads, and the sums on their way through
shared memory.

Source: PTX ISA, "Warp Level Matrix Instructions" (sm_80).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.templates.parts.ptx import REGISTER

_MMA = {  # dtype -> shape, type of the sums, type of the operands
    "float16": ("m16n8k16", "f32", "f16"),
    "bfloat16": ("m16n8k16", "f32", "bf16"),
    "float32": ("m16n8k8", "f32", "tf32"),
    "float8_e4m3": ("m16n8k32", "f32", "e4m3"),
    "float8_e5m2": ("m16n8k32", "f32", "e5m2"),
    "int8": ("m16n8k32", "s32", "s8"),
    "uint8": ("m16n8k32", "s32", "u8"),
}


@functools.cache
def mma_warp_tile(
    wm: int, wn: int, row_bytes: int, dtype: str, dtype_b: str = "", products: int = 1, scattered: bool = False
) -> Callable[..., Any]:
    """One warp's tile step of 32 bytes in k: `wm` x `wn` accumulators += A x B, both operands K-major in shared memory.

    It takes (accumulators[wm * wn // 32], a, b). Accumulator 4 (i wn/8 + j) + q is c_q of the 16x8 tile (i, j). `a` and `b`
    are each lane's ldmatrix addresses of the first 16 rows, `row_bytes` apart: for A row `lane % 16` and 16-byte chunk
    `lane / 16`, for B row `lane % 8 + lane / 16 * 8` and chunk `lane / 8 % 2`. The rows' swizzle must repeat every 16 rows.
    If the rows of A are `scattered`, `a` is a local array of u32 with the addresses of all 16s of rows.

    B has the dtype of A unless `dtype_b` names another (int8 and uint8 mix, and so do the float8 formats, which need sm_89).
    Accumulators are int32 for integers, which wrap around. Elements of float32 are rounded to TF32, half away from zero.
    With 3 `products`, each is split into its TF32 part and the TF32 part of the rest, and only the product of the rests is
    left out.
    """
    (shape, sums, kind), kind_b = _MMA[dtype], _MMA[dtype_b or dtype][2]
    tiles_m, tiles_n, split = wm // 16, wn // 8, products == 3
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    rests = f", ar<4>, br<{2 * tiles_n}>; .reg .f32 whole, part" if split else ""

    def rounded(register: str, rest: str) -> list[str]:
        """Rounds a register of float32 to TF32, and writes the rest of a split product."""
        if kind != "tf32":
            return []
        if not split:
            return [f"cvt.rna.tf32.f32 {register}, {register};"]
        return [
            f"mov.b32 whole, {register}; cvt.rna.tf32.f32 {register}, whole; mov.b32 part, {register};",
            f"sub.f32 part, whole, part; cvt.rna.tf32.f32 {rest}, part;",
        ]

    def multiply(a: str, b: str, i: int, j: int) -> str:
        c = ", ".join(f"$acc[{4 * (i * tiles_n + j) + q}]" for q in range(4))
        return (
            f"mma.sync.aligned.{shape}.row.col.{sums}.{kind}.{kind_b}.{sums} "
            f"{{{c}}}, {{{a}0, {a}1, {a}2, {a}3}}, {{{b}{2 * j}, {b}{2 * j + 1}}}, {{{c}}};"
        )

    lines = [f"{{ .reg .b32 a<4>, b<{2 * tiles_n}>{rests};"]
    for j in range(0, tiles_n, 2):
        lines.append(f"{load} {{b{2 * j}, b{2 * j + 1}, b{2 * j + 2}, b{2 * j + 3}}}, [$b+{j * 8 * row_bytes}];")
        for q in range(2 * j, 2 * j + 4):
            lines += rounded(f"b{q}", f"br{q}")
    for i in range(tiles_m):
        address = f"$a[{i}]" if scattered else f"$a+{i * 16 * row_bytes}"
        lines.append(f"{load} {{a0, a1, a2, a3}}, [{address}];")
        for q in range(4):
            lines += rounded(f"a{q}", f"ar{q}")
        for j in range(tiles_n):
            lines += [multiply("ar", "b", i, j), multiply("a", "br", i, j)] if split else []
            lines.append(multiply("a", "b", i, j))
    return device_op(
        "mma_warp_tile",
        "\n".join([*lines, "}"]),
        inout={
            "acc": ("f32" if sums == "f32" else "i32", wm * wn // 32),
            **({"a": ("u32", tiles_m)} if scattered else {}),
        },
        ins={"b": "u32"} if scattered else {"a": "u32", "b": "u32"},
    )


@functools.cache
def store_warp_tile(wm: int, wn: int, row_bytes: int, accumulator: str = "float32") -> Callable[..., Any]:
    """Writes the accumulators of `mma_warp_tile` to shared memory, in rows `row_bytes` apart.

    It takes (accumulators, shared): the lane's address of row `lane / 4` and column `lane % 4 * 2` of the tile.
    """
    tiles_n, kind = wn // 8, REGISTER[accumulator]
    lines = []
    for i in range(wm // 16):
        for j in range(tiles_n):
            for half in range(2):
                first = 4 * (i * tiles_n + j) + 2 * half
                offset = (i * 16 + half * 8) * row_bytes + j * 32
                values = f"{{$acc[{first}], $acc[{first + 1}]}}"
                lines.append(f"st.shared.v2.{'f32' if kind == 'f32' else 'b32'} [$shared+{offset}], {values};")
    return device_op("store_warp_tile", "\n".join(lines), inout={"acc": (kind, wm * wn // 32)}, ins={"shared": "u32"})


@functools.cache
def load_eight(accumulator: str) -> Callable[..., Any]:
    """`load(shared)`: eight neighbouring sums; the address is a multiple of 32.

    In every other 128 bytes the second half is read first. The eight lanes that read at once then meet in no bank.
    """
    swapped = [f"selp.b32 ${a}, {y}{i}, {x}{i}, odd;" for a, x, y, i in zip("abcdefgh", "xxxxyyyy", "yyyyxxxx", "01230123")]
    text = (
        "{ .reg .pred odd; .reg .b32 at, x<4>, y<4>; and.b32 at, $shared, 128; setp.ne.u32 odd, at, 0; shr.u32 at, at, 3; "
        "add.u32 at, at, $shared; ld.shared.v4.b32 {x0, x1, x2, x3}, [at]; xor.b32 at, at, 16; "
        f"ld.shared.v4.b32 {{y0, y1, y2, y3}}, [at]; {' '.join(swapped)} }}"
    )
    return device_op("load_eight", text, ins={"shared": "u32"}, outs=dict.fromkeys("abcdefgh", REGISTER[accumulator]))
