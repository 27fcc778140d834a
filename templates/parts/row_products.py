"""Device operations of a product of a few rows with a matrix, by warps that read both along the reduction.

A chunk is 16 bytes along the reduction. A lane has every 32nd chunk of its warp's part, of `rows` rows of x and `columns`
rows of the weight, and a sum for each pair of them. In the end the sums of the lanes are added up.

Sources: PTX ISA, "Data Movement: ld.global.nc", "shfl.sync", "Integer Arithmetic Instructions: dp4a".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of

CHUNK_BYTES, LANES = 16, 32
_WORDS = CHUNK_BYTES // 4
_ONES = 0x01010101  # its product with a word of four bytes is their sum


@dataclass(frozen=True)
class RowProducts:
    """What a lane computes.

    Attributes:
        dtype, weight_dtype: of x and of the weight.
        rows, columns: rows of x and of the weight.
        adds_weights, adds_x: it also adds up the elements of the weight, and of x; for zero points of 8-bit integers.
    """

    dtype: str
    weight_dtype: str
    rows: int
    columns: int
    adds_weights: bool = False
    adds_x: bool = False

    @property
    def sum_rows(self) -> int:
        """Rows of sums; the last one has the sums of weights, if they are added up."""
        return self.rows + self.adds_weights

    @property
    def sum_columns(self) -> int:
        """Columns of sums; the last one has the sums of x, if they are added up."""
        return self.columns + self.adds_x

    @property
    def sums(self) -> int:
        """Sums of a lane, row by row."""
        return self.sum_rows * self.sum_columns

    @property
    def integer(self) -> bool:
        return not dtype_of(self.dtype).is_float

    @property
    def register(self) -> str:
        """Type of a sum in a device operation."""
        return "i32" if self.integer else "f32"

    def accumulate(self, unroll: int, distance: int, x_row_bytes: int) -> Callable[..., Any]:
        """`accumulate(sums, places, left)`: loads the lane's next `unroll` chunks, then adds their products.

        `places` are u64 addresses: of the lane's next chunk in each row of the weight, then of that in the first row of x.
        They advance. `left` (i32) counts the chunks of a row from the lane's next one on; those past the end are not read.

        Args:
            distance: from one chunk of the lane to its next, in chunks.
            x_row_bytes: from one row of x to the next.
        """
        rows, columns = self.rows, self.columns
        names = [f"w{u}_{c}_" for u in range(unroll) for c in range(columns)]
        names += [f"x{u}_{r}_" for u in range(unroll) for r in range(rows)]
        lines = [f"{{ .reg .pred in<{unroll}>; .reg .b16 low, high;"]
        lines += [f".reg .b32 {name}<{_WORDS}>;" for name in names]
        lines += [f".reg .f32 a<{2 * rows}>, b<2>;"] if not self.integer else []
        for u in range(unroll):
            lines.append(f"setp.gt.s32 in{u}, $left, {u * distance};")
            for c in range(columns):
                place = f"$places[{c}]+{u * distance * CHUNK_BYTES}"
                lines += _load(f"w{u}_{c}_", place, f"in{u}", ".L1::no_allocate")
            for r in range(rows):
                lines += _load(
                    f"x{u}_{r}_", f"$places[{columns}]+{u * distance * CHUNK_BYTES + r * x_row_bytes}", f"in{u}", ""
                )
        for u in range(unroll):
            for word in range(_WORDS):
                lines += self._multiply([f"x{u}_{r}_{word}" for r in range(rows)],
                                        [f"w{u}_{c}_{word}" for c in range(columns)])  # fmt: skip
        lines += [f"add.u64 $places[{i}], $places[{i}], {unroll * distance * CHUNK_BYTES};" for i in range(columns + 1)]
        inout = {"sums": (self.register, self.sums), "places": ("u64", columns + 1)}
        return device_op("accumulate", "\n".join([*lines, "}"]), inout=inout, ins={"left": "i32"})

    def _multiply(self, xs: list[str], weights: list[str]) -> list[str]:
        """One word of each row of x times one word of each row of the weight."""
        if self.integer:
            kinds = ["u32" if dtype == "uint8" else "s32" for dtype in (self.dtype, self.weight_dtype)]
            lines = []
            for r, x in enumerate([*xs, *[str(_ONES)] * self.adds_weights]):
                for c, w in enumerate([*weights, *[str(_ONES)] * (self.adds_x and r < self.rows)]):
                    total = f"$sums[{r * self.sum_columns + c}]"
                    signs = ["u32" if each == str(_ONES) else kind for each, kind in zip((x, w), kinds)]
                    lines.append(f"dp4a.{'.'.join(signs)} {total}, {x}, {w}, {total};")
            return lines
        count = 1 if self.dtype == "float32" else 2
        lines = [line for r, x in enumerate(xs) for line in self._floats(f"a{2 * r}", f"a{2 * r + 1}", x)]
        for c, w in enumerate(weights):
            lines += self._floats("b0", "b1", w)
            for r in range(self.rows):
                total = f"$sums[{r * self.sum_columns + c}]"
                lines += [f"fma.rn.f32 {total}, a{2 * r + half}, b{half}, {total};" for half in range(count)]
        return lines

    def _floats(self, low: str, high: str, word: str) -> list[str]:
        """The one or two numbers of a word as float32."""
        if self.dtype == "float32":
            return [f"mov.b32 {low}, {word};"]
        if self.dtype == "bfloat16":
            return [f"shl.b32 {low}, {word}, 16; and.b32 {high}, {word}, 0xffff0000;"]
        return [f"mov.b32 {{low, high}}, {word}; cvt.f32.f16 {low}, low; cvt.f32.f16 {high}, high;"]

    def add_lanes(self) -> Callable[..., Any]:
        """`add_lanes(sums)`: every lane's sums become those of the warp. The order of additions is always the same."""
        add = "add.s32" if self.integer else "add.f32"
        lines = ["{ .reg .b32 other;"]
        for distance in (16, 8, 4, 2, 1):
            for i in range(self.sums):
                lines.append(f"shfl.sync.bfly.b32 other, $sums[{i}], {distance}, 31, 0xffffffff;")
                lines.append(f"{add} $sums[{i}], $sums[{i}], other;")
        return device_op(
            "add_lanes", "\n".join([*lines, "}"]), inout={"sums": (self.register, self.sums)}, convergent=True
        )  # fmt: skip

    def keep(self) -> Callable[..., Any]:
        """`keep(sums, shared)`: writes the sums to shared memory, one word each."""
        lines = [f"st.shared.b32 [$shared+{4 * i}], $sums[{i}];" for i in range(self.sums)]
        return device_op("keep", "\n".join(lines), inout={"sums": (self.register, self.sums)}, ins={"shared": "u32"})


def _load(name: str, address: str, inside: str, hint: str) -> list[str]:
    """A chunk as four words; zeros where the predicate is false."""
    words = ", ".join(f"{name}{i}" for i in range(_WORDS))
    zeros = " ".join(f"mov.b32 {name}{i}, 0;" for i in range(_WORDS))
    return [f"{zeros} @{inside} ld.global.nc{hint}.v4.b32 {{{words}}}, [{address}];"]
