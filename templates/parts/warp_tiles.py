"""Device operations on the tile of a warp: products of fragments that ldmatrix reads, and the sums on their way through
shared memory.

Source: PTX ISA, "Warp Level Matrix Instructions" (sm_80).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


def mma_text(
    dtype: str, to: Sequence[str], a: Sequence[str], b: Sequence[str], before: Sequence[str], dtype_b: str = ""
) -> str:
    """One mma.sync: the four registers `to` = A x B + `before`, with four registers of A and two of B.

    Args:
        dtype: of A, and of B unless `dtype_b` names another; a key of the table above.
    """
    (shape, sums, kind), kind_b = _MMA[dtype], _MMA[dtype_b or dtype][2]
    groups = ", ".join(f"{{{', '.join(each)}}}" for each in (to, a, b, before))
    return f"mma.sync.aligned.{shape}.row.col.{sums}.{kind}.{kind_b}.{sums} {groups};"


# Four matrices of 8 rows of 16 bytes: lane (g, t) gets word t of row g of each, and gives the address of a row
LOAD_MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LOAD_MATRICES_TRANSPOSED = LOAD_MATRICES.replace(".shared", ".trans.shared")  # it gets element g of rows 2t and 2t + 1
LOAD_TWO_MATRICES_TRANSPOSED = LOAD_MATRICES_TRANSPOSED.replace(".x4", ".x2")


@functools.cache
def load_fragments(wm: int, wn: int, row_bytes: int) -> Callable[..., Any]:
    """One warp's operands of 32 bytes in k: `wm` rows of A and `wn` of B, both K-major in shared memory.

    It takes (a[wm / 4], b[wn / 4], x, w): the registers of A and B, and each lane's addresses for ldmatrix of the first 16
    rows of A and of B, `row_bytes` apart: for A row `lane % 16` and 16-byte chunk `lane / 16`, for B row
    `lane % 8 + lane / 16 * 8` and chunk `lane / 8 % 2`. The rows' swizzle must repeat every 16 rows.
    """
    lines = [*_loads_of_b("b", wn, row_bytes), *(_load_of_a(i, row_bytes) for i in range(wm // 16))]
    arrays = {"a": ("u32", wm // 4), "b": ("u32", wn // 4)}
    return device_op("load_fragments", "\n".join(lines), inout=arrays, ins={"x": "u32", "w": "u32"})


def _four(array: str, first: int) -> str:
    return ", ".join(f"${array}[{first + q}]" for q in range(4))


def _loads_of_b(array: str, wn: int, row_bytes: int) -> list[str]:
    return [f"{LOAD_MATRICES} {{{_four(array, 4 * j)}}}, [$w+{j * 16 * row_bytes}];" for j in range(wn // 16)]


def _load_of_a(i: int, row_bytes: int) -> str:
    return f"{LOAD_MATRICES} {{{_four('a', 4 * i)}}}, [$x+{i * 16 * row_bytes}];"


@functools.cache
def multiply_and_load(
    wm: int, wn: int, row_bytes: int, dtype: str, dtype_b: str = "", products: int = 1
) -> Callable[..., Any]:
    """`wm` x `wn` accumulators += A x B, of operands that are in registers, while those of the next 32 bytes are loaded.

    It takes (accumulators[wm * wn // 32], a, b, next_b, x, w), see `load_fragments`; the addresses are those of the next
    operands. Of A they get into `a`, 16 rows when the last product with those before has begun, of B into `next_b`.
    Accumulator 4 (i wn/8 + j) + q is c_q of the 16x8 tile (i, j).

    B has the dtype of A unless `dtype_b` names another (int8 and uint8 mix, and so do the float8 formats, which need sm_89).
    Accumulators are int32 for integers, which wrap around. Elements of float32 are rounded to TF32, half away from zero.
    With 3 `products`, each is split into its TF32 part and the TF32 part of the rest, and only the product of the rests is
    left out.
    """
    _, sums, kind = _MMA[dtype]
    tiles_m, tiles_n, split, rounds = wm // 16, wn // 8, products == 3, kind == "tf32"
    b = [f"b{q}" if rounds else f"$b[{q}]" for q in range(2 * tiles_n)]
    of_a, of_b = [f"ar{q}" for q in range(4)], [f"br{q}" for q in range(2 * tiles_n)]  # rests of split products

    def rounded(register: str, rest: str, of: str) -> str:
        """A register of float32 rounded to TF32, and the rest of a split product."""
        if not split:
            return f"cvt.rna.tf32.f32 {register}, {of};"
        return (
            f"mov.b32 whole, {of}; cvt.rna.tf32.f32 {register}, whole; mov.b32 part, {register}; "
            f"sub.f32 part, whole, part; cvt.rna.tf32.f32 {rest}, part;"
        )

    def multiply(a: list[str], b: list[str], i: int, j: int) -> str:
        c = [f"$acc[{4 * (i * tiles_n + j) + q}]" for q in range(4)]
        return mma_text(dtype, c, a, b[2 * j : 2 * j + 2], c, dtype_b)

    registers = f".reg .b32 a<4>, ar<4>, b<{2 * tiles_n}>, br<{2 * tiles_n}>; .reg .f32 whole, part;"
    lines = [f"{{ {registers}" if rounds else "{", *_loads_of_b("next_b", wn, row_bytes)]
    lines += [rounded(f"b{q}", of_b[q], f"$b[{q}]") for q in range(2 * tiles_n)] if rounds else []
    for i in range(tiles_m):
        a = [f"a{q}" if rounds else f"$a[{4 * i + q}]" for q in range(4)]
        lines += [rounded(f"a{q}", of_a[q], f"$a[{4 * i + q}]") for q in range(4)] if rounds else []
        for j in range(tiles_n):
            lines += [multiply(of_a, b, i, j), multiply(a, of_b, i, j)] if split else []
            lines.append(multiply(a, b, i, j))
        lines.append(_load_of_a(i, row_bytes))
    arrays = {"acc": ("f32" if sums == "f32" else "i32", wm * wn // 32), "a": ("u32", wm // 4)}
    arrays |= dict.fromkeys(("b", "next_b"), ("u32", wn // 4))
    return device_op("multiply_and_load", "\n".join([*lines, "}"]), inout=arrays, ins={"x": "u32", "w": "u32"})


@functools.cache
def store_warp_tile(wm: int, wn: int, row_bytes: int, accumulator: str = "float32") -> Callable[..., Any]:
    """Writes the accumulators of `multiply_and_load` to shared memory, in rows `row_bytes` apart.

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
