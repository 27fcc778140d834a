"""Device operations of kernels that multiply on CUDA cores: words of 32 bits, a chunk of four words at a time.

A `Product` says what a word is and how two of them multiply: four int8 or uint8 by dp4a, or one float32 by fma. All else is
the same for both. Operands lie in shared memory in rows of chunks along the reduction.

Sources: PTX ISA, "Integer Arithmetic Instructions: dp4a", "Floating Point Instructions: fma", "Data Conversion: cvt".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.ptx import REGISTER

WORD_BYTES = 4
CHUNK = 4  # words that one load from shared memory takes, 16 bytes
ONES = 0x01010101  # its product with a word is the sum of the word's four elements


@dataclass(frozen=True)
class Product:
    """How two words multiply and add up.

    Attributes:
        elements: elements of a word, neighbours along the reduction.
        accumulator: dtype of the registers of sums, float32 or int32. Those of uint32 have the same bits.
        instruction: `{instruction} d, a, b, c` adds the product of words a and b to c.
        sum_instruction: the same with `ONES` for b, which adds up the elements of a; empty for floats.
    """

    elements: int
    accumulator: str
    instruction: str
    sum_instruction: str = ""

    @classmethod
    def of(cls, dtype: str, weight_dtype: str) -> Product:
        """The product of x and weight: both float32, or both int8 or uint8 in any mix."""
        if dtype_of(dtype).is_float:
            return cls(1, "float32", "fma.rn.f32")
        kind, weight_kind = ("u32" if each == "uint8" else "s32" for each in (dtype, weight_dtype))
        return cls(4, "int32", f"dp4a.{kind}.{weight_kind}", f"dp4a.{kind}.u32")

    @property
    def register(self) -> str:
        """Type of a sum in a device operation."""
        return REGISTER[self.accumulator]


# --- Multiply ---------------------------------------------------------------------------------------------------------
@functools.cache
def multiply_chunk(
    product: Product, rows: int, columns: int, row_distance: int, column_distance: int, row_sums: bool = False
) -> Callable[..., Any]:
    """A thread's part of one chunk: `rows` x `columns` sums += A x B, four words deep.

    It takes (sums[rows * columns], a, b), or (sums, row_sums[rows], a, b) if it also adds up the elements of the rows of A.
    `a` and `b` are shared addresses of a chunk in the thread's first row of A and of B. Its other rows of A follow at
    distances of `row_distance` bytes, those of B at `column_distance`.
    """
    load = "ld.shared.v4.b32 {{{0}0, {0}1, {0}2, {0}3}}, [${1}+{2}];"
    lines = [f"{{ .reg .b32 {', '.join(f'a{q}' for q in range(CHUNK))};"]
    for column in range(columns):
        lines.append(f".reg .b32 b{column}_<{CHUNK}>; " + load.format(f"b{column}_", "b", column * column_distance))
    for row in range(rows):
        lines.append(load.format("a", "a", row * row_distance))
        for q in range(CHUNK):
            if row_sums:
                lines.append(f"{product.sum_instruction} $row_sums[{row}], a{q}, {ONES:#x}, $row_sums[{row}];")
            for column in range(columns):
                total = f"$sums[{row * columns + column}]"
                lines.append(f"{product.instruction} {total}, a{q}, b{column}_{q}, {total};")
    inout = {"sums": (product.register, rows * columns)} | ({"row_sums": ("i32", rows)} if row_sums else {})
    return device_op("multiply_chunk", "\n".join([*lines, "}"]), inout=inout, ins={"a": "u32", "b": "u32"})


@functools.cache
def subtract_zero_points(rows: int, columns: int) -> Callable[..., Any]:
    """Turns sums of products into those of numbers less their zero points.

    It takes (sums[rows * columns], row_sums[rows], column_sums[columns], x_zero, weight_zero, count): the sums of the
    elements of x in each row and of the weight in each column, the zero points, and the number of products in a sum.

        sum (x - x0) (w - w0) = sum x w - x0 sum w - w0 sum x + count x0 w0
    """
    lines = ["{ .reg .b32 x0, w0, both, t; neg.s32 x0, $x_zero; neg.s32 w0, $weight_zero;", "mul.lo.s32 both, x0, w0;"]
    lines.append("mul.lo.s32 both, both, $count;")
    for column in range(columns):
        lines.append(f".reg .b32 c{column}; mad.lo.s32 c{column}, x0, $column_sums[{column}], both;")
    for row in range(rows):
        lines.append(f"mul.lo.s32 t, w0, $row_sums[{row}];")
        for column in range(columns):
            total = f"$sums[{row * columns + column}]"
            lines.append(f"add.s32 {total}, {total}, t; add.s32 {total}, {total}, c{column};")
    return device_op(
        "subtract_zero_points",
        "\n".join([*lines, "}"]),
        inout={"sums": ("i32", rows * columns), "row_sums": ("i32", rows), "column_sums": ("i32", columns)},
        ins={"x_zero": "i32", "weight_zero": "i32", "count": "i32"},
    )


sum_of_elements = {  # of a chunk of int8 or uint8 (four words), added to `total`
    dtype: device_op(
        "sum_of_elements",
        "{ .reg .b32 t; "
        + f"dp4a.{kind}.u32 t, $a, {ONES:#x}, $total; dp4a.{kind}.u32 t, $b, {ONES:#x}, t; "
        + f"dp4a.{kind}.u32 t, $c, {ONES:#x}, t; dp4a.{kind}.u32 $sum, $d, {ONES:#x}, t; }}",
        ins={**dict.fromkeys("abcd", "u32"), "total": "i32"},
        outs={"sum": "i32"},
        pure=True,
    )
    for dtype, kind in (("int8", "s32"), ("uint8", "u32"))
}

# --- Load -------------------------------------------------------------------------------------------------------------
_VECTOR = {1: "", 2: ".v2", 4: ".v4"}


@functools.cache
def load_words(words: int) -> Callable[..., Any]:
    """1, 2 or 4 neighbouring words of global memory: (address, inside, fill). With inside = 0 each is `fill`."""
    names = "abcd"[:words]
    registers = ", ".join(f"t{i}" for i in range(words))
    lines = [f"{{ .reg .pred p; .reg .b32 t<{words}>; setp.ne.s32 p, $inside, 0;"]
    lines += [f"mov.b32 t{i}, $fill;" for i in range(words)]
    lines.append(f"@p ld.global.nc{_VECTOR[words]}.b32 {f'{{{registers}}}' if words > 1 else registers}, [$address];")
    lines += [f"mov.b32 ${name}, t{i};" for i, name in enumerate(names)]
    return device_op(
        "load_words",
        " ".join([*lines, "}"]),
        ins={"address": "u64", "inside": "i32", "fill": "u32"},
        outs=dict.fromkeys(names, "u32"),
    )


# A word of four bytes from anywhere: (four addresses, count, inside, fill). Bytes from `count` on are 0. With inside = 0 the
# others come from `fill`.
load_bytes = device_op(
    "load_bytes",
    "{ .reg .pred in, p; .reg .b16 h; .reg .b32 t<4>, rest; setp.ne.s32 in, $inside, 0; "
    + " ".join(
        f"setp.gt.s32 p, $count, {i}; bfe.u32 t{i}, $fill, {8 * i}, 8; selp.b32 t{i}, t{i}, 0, p; "
        f"and.pred p, p, in; @p ld.global.nc.u8 t{i}, [$address{i}];"
        for i in range(4)
    )
    + " bfi.b32 t0, t1, t0, 8, 8; bfi.b32 t2, t3, t2, 8, 8; bfi.b32 $word, t2, t0, 16, 16; }",
    ins={**{f"address{i}": "u64" for i in range(4)}, "count": "i32", "inside": "i32", "fill": "u32"},
    outs={"word": "u32"},
)


# --- Store ------------------------------------------------------------------------------------------------------------
@functools.cache
def store_rows(product: Product, rows: int, columns: int, part_rows: int, row_bytes: int, column_bytes: int) -> Any:
    """Writes some of a thread's sums to shared memory: (sums[rows * columns], shared, part).

    `part` counts groups of `part_rows` rows. The sum of (row, column) goes to
    `shared` + row % part_rows * row_bytes + column * column_bytes.
    """
    lines = ["{ .reg .pred other;"]
    for part in range(rows // part_rows):
        lines.append(f"setp.ne.s32 other, $part, {part}; @other bra skip{part};")
        for row in range(part_rows):
            for column in range(columns):
                value = f"$sums[{(part * part_rows + row) * columns + column}]"
                lines.append(f"st.shared.b32 [$shared+{row * row_bytes + column * column_bytes}], {value};")
        lines.append(f"skip{part}:")
    return device_op(
        "store_rows",
        "\n".join([*lines, "}"]),
        inout={"sums": (product.register, rows * columns)},
        ins={"shared": "u32", "part": "i32"},
    )


@functools.cache
def load_shared(words: int, accumulator: str) -> Callable[..., Any]:
    """1 or 4 neighbouring sums from a shared address."""
    names = "abcd"[:words]
    registers = ", ".join(f"${name}" for name in names)
    return device_op(
        "load_shared",
        f"ld.shared{_VECTOR[words]}.b32 {f'{{{registers}}}' if words > 1 else registers}, [$shared];",
        ins={"shared": "u32"},
        outs=dict.fromkeys(names, REGISTER[accumulator]),
    )


@functools.cache
def store_global(words: int, dtype: str, accumulator: str, capability: tuple[int, int]) -> Callable[..., Any]:
    """Rounds and stores 1 or 4 neighbouring elements of y: (address, values).

    Values are float32, in float32 registers or as their bits in int32 ones, or 32-bit integers if `dtype` is one. Integers
    of 8 bits saturate, and floats round to nearest even. Uses no instruction that came after `capability`.
    """
    names = "abcd"[:words]
    size = dtype_of(dtype).nbytes
    lines = ["{ .reg .b16 h<4>; .reg .b32 t<4>, odd; .reg .b32 w<2>; .reg .pred p;"]
    if size == 4:
        values = [f"${name}" for name in names]
    elif size == 2:
        lines += [line for i, name in enumerate(names) for line in _to_half(f"h{i}", f"${name}", dtype, capability)]
        pairs = [f"mov.b32 w{i}, {{h{2 * i}, h{2 * i + 1}}};" for i in range(2)]
        lines += pairs if words == 4 else []
        values = ["w0", "w1"] if words == 4 else ["h0"]
    else:
        kind = "s8" if dtype == "int8" else "u8"
        if words == 1 or capability < (7, 2):
            lines += [f"cvt.sat.{kind}.s32 t{i}, ${name};" for i, name in enumerate(names)]
        if words == 4 and capability < (7, 2):
            lines += ["bfi.b32 t0, t1, t0, 8, 8; bfi.b32 t2, t3, t2, 8, 8; bfi.b32 t0, t2, t0, 16, 16;"]
        elif words == 4:
            lines += [f"cvt.pack.sat.{kind}.s32.b32 t1, $d, $c, 0; cvt.pack.sat.{kind}.s32.b32 t0, $b, $a, t1;"]
        values = ["t0"]
    bits = f"b{8 * size * words // len(values)}"
    text = f"{{{', '.join(values)}}}" if len(values) > 1 else values[0]
    lines.append(f"st.global{_VECTOR[len(values)]}.{bits} [$address], {text}; }}")
    return device_op("store_global", " ".join(lines), ins={"address": "u64", **dict.fromkeys(names, REGISTER[accumulator])})


def _to_half(to: str, value: str, dtype: str, capability: tuple[int, int]) -> list[str]:
    """float32 -> 16 bits. Before compute capability 8.0 bfloat16 is rounded by integers: half of the last place, less 1 if
    that place is even, is added; NaN becomes quiet.
    """
    if dtype == "float16":
        return [f"cvt.rn.f16.f32 {to}, {value};"]
    if capability >= (8, 0):
        return [f"cvt.rn.bf16.f32 {to}, {value};"]
    return [
        f"mov.b32 t0, {value}; bfe.u32 odd, t0, 16, 1; add.u32 t1, t0, 0x7fff; add.u32 t1, t1, odd;",
        "and.b32 t2, t0, 0x7fffffff; setp.gt.u32 p, t2, 0x7f800000; selp.b32 t1, 0x7fc00000, t1, p;",
        f"shr.u32 t1, t1, 16; cvt.u16.u32 {to}, t1;",
    ]
