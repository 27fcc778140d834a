"""Device operations on a strip of a plane in shared memory, generated as PTX: correlate, finish and store, copy out.

A strip has whole rows of a small plane. So all its columns, and the taps that meet them, are known when the kernel is built:
no product with a column outside of the image is computed or tested. Rows are tested, unless a strip has all of them.

Source: PTX ISA, "Data Movement: ld.shared, st.shared".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv2d.patch_text import ROWS_AHEAD, Row, RowsAhead, inside_of
from schedsearch.templates.depthwise_conv2d.patches import Patch, Piece, pieces
from schedsearch.templates.depthwise_conv2d.ptx_text import Text
from schedsearch.templates.parts.epilogue import Epilogue


@dataclass(frozen=True)
class Strip:
    """The part of a plane that a thread computes: `patch.tile_h` rows, all columns.

    Attributes:
        patch: its `tile_w` covers the columns of the targets, and all taps are unrolled.
    """

    patch: Patch

    @property
    def alone(self) -> bool:
        """Whether it has all rows of the plane."""
        return self.patch.tile_h >= self.patch.rows.targets

    @property
    def width(self) -> int:
        """Columns of the targets."""
        return self.patch.columns.targets

    @property
    def columns(self) -> dict[int, list[tuple[int, int]]]:
        """`Patch.column_meetings`: those that exist."""
        return self.patch.column_meetings

    @property
    def rows(self) -> dict[int, list[tuple[int, int]]]:
        """`Patch.row_meetings`: of a strip that is alone, those that exist."""
        return self.patch.row_meetings

    @cached_property
    def source_pieces(self) -> tuple[Piece, ...]:
        """Accesses that load the sources of a row."""
        return pieces(self.columns, self.patch.columns.sources, self.patch.nbytes)

    @cached_property
    def target_pieces(self) -> tuple[Piece, ...]:
        """Accesses that store a row of targets."""
        return pieces(range(self.width), self.width, self.patch.nbytes)

    @property
    def products(self) -> int:
        return sum(map(len, self.rows.values())) * sum(map(len, self.columns.values()))


def load_filter(strip: Strip, steps: tuple[int, int]) -> Callable[..., None]:
    """weights = the filter at a global address: (weights[taps], address).

    Args:
        steps: elements of the weight from a row, and from a column, to the next.
    """
    text, patch = Text(), strip.patch
    for row in range(patch.tap_h):
        for column in range(patch.tap_w):
            offset = (row * steps[0] + column * steps[1]) * patch.nbytes
            (value,) = text.widen(text.load(f"$address+{offset}", patch.dtype, 1), patch.dtype, 1)
            text.add(f"mov.f32 $weights[{row * patch.tap_w + column}], {value};")
    return device_op(
        "load_filter", text.block(), inout={"weights": ("f32", patch.tap_h * patch.tap_w)}, ins={"address": "u64"}
    )


class StripRows(RowsAhead):
    """The rows of a plane in shared memory; `base` is a register with the address of the strip's first one."""

    def __init__(self, text: Text, strip: Strip, base: str, ahead: int) -> None:
        super().__init__(text, strip.patch, ahead)
        self._strip, self._base = strip, base

    def load(self, row: int) -> Row:
        text, patch = self.text, self.patch
        inside = "" if self._strip.alone else inside_of(text, "$row", row, patch.rows.sources)
        for piece in self._strip.source_pieces:
            at = f"{self._base}+{(row * patch.columns.sources + piece.first) * patch.nbytes}"
            yield piece, text.load(at, patch.dtype, piece.length, inside, space="shared")


def correlate_strip(strip: Strip) -> Callable[..., None]:
    """sums += sources * weights: (sums[tile_h * width], weights[taps], source, row).

    `source` is the shared address of the plane, `row` the source of the strip's first target and first tap, without the
    axis's shift. The sums are those of (row, column) in this order.
    """
    text, patch = Text(), strip.patch
    base = text.one("b32")
    row_bytes = patch.columns.sources * patch.nbytes
    text.add(f"mad.lo.s32 {base}, $row, {row_bytes}, $source;")
    for (value,), (target_row, target_column), (tap_row, tap_column) in StripRows(text, strip, base, ROWS_AHEAD).products():
        to, tap = target_row * strip.width + target_column, tap_row * patch.tap_w + tap_column
        text.add(f"fma.rn.f32 $sums[{to}], {value}, $weights[{tap}], $sums[{to}];")
    taps = patch.tap_h * patch.tap_w
    return device_op(
        "correlate_strip", text.block(),
        inout={"sums": ("f32", patch.tile_h * strip.width), "weights": ("f32", taps)}, ins={"source": "u32", "row": "i32"},
    )  # fmt: skip


def finish_strip(strip: Strip, epilogue: Epilogue | None, out_dtype: str, accumulate: bool) -> Callable[..., None]:
    """Applies the epilogue, or adds the gradient before, and writes the strip to its plane in shared memory.

    It takes (sums[tile_h * width], target, row, k, offset, *operands): the shared address of the plane, the strip's first
    row, its channel, and the element offset (i64) of its first element in y. With `accumulate` the plane holds the gradient
    before.
    """
    text, patch, size = Text(), strip.patch, dtype_of(out_dtype).nbytes
    row_bytes = strip.width * size
    base = text.one("b32")
    text.add(f"mad.lo.s32 {base}, $row, {row_bytes}, $target;")
    ins: dict[str, str] = {"target": "u32", "row": "i32", "k": "i32", "offset": "i64"}
    stages = epilogue.stages_of_patch(1, patch.target) if epilogue else None
    if stages:
        ins |= dict(stages.ins)
        text.add(*stages.begin)
    for row in range(min(patch.tile_h, patch.rows.targets)):
        inside = "" if strip.alone else inside_of(text, "$row", row, patch.rows.targets)
        for piece in strip.target_pieces:
            results = []
            for column in range(piece.first, piece.first + piece.length):
                results.append(f"$sums[{row * strip.width + column}]")
                if stages:
                    text.add(*stages.of_pixel(results[-1:], row, column, inside or "always"))
            at = f"{base}+{row * row_bytes + piece.first * size}"
            if accumulate:
                loaded = text.load(at, out_dtype, piece.length, inside, space="shared")
                for result, addend in zip(results, text.widen(loaded, out_dtype, piece.length)):
                    text.add(f"add.f32 {result}, {result}, {addend};")
            text.store(at, results, out_dtype, inside, space="shared")
    body = text.block()
    sums = {"sums": ("f32", patch.tile_h * strip.width)}
    return device_op("finish_strip", body, inout=sums, ins=ins, unused=ins)


def copy_vector() -> Callable[..., None]:
    """Copies 16 bytes of shared memory to global memory: (address, staged)."""
    text = Text()
    words = text.new("b32", 4)
    group = f"{{{', '.join(words)}}}"
    text.add(f"ld.shared.v4.b32 {group}, [$staged]; st.global.v4.b32 [$address], {group};")
    return device_op("copy_vector", text.block(), ins={"address": "u64", "staged": "u32"})


def copy_element(nbytes: int) -> Callable[..., None]:
    """The same for an element of 2 or 4 bytes."""
    text, kind = Text(), f"b{8 * nbytes}"
    value = text.one(kind)
    text.add(f"ld.shared.{kind} {value}, [$staged]; st.global.{kind} [$address], {value};")
    return device_op("copy_element", text.block(), ins={"address": "u64", "staged": "u32"})


def bank_cycles(strip: Strip, threads: list[int]) -> float:
    """Cycles that the loads and stores of a strip take in shared memory, for one warp.

    Args:
        threads: byte offset of each thread's first source from the first source of the first thread.
    """
    cycles = 0
    for kind in (strip.source_pieces, strip.target_pieces):
        for piece in kind:
            nbytes = piece.length * strip.patch.nbytes
            words = {(at + piece.first * strip.patch.nbytes + more) // 4 for at in threads for more in range(0, nbytes, 2)}
            banks: dict[int, int] = {}
            for word in words:
                banks[word % 32] = banks.get(word % 32, 0) + 1
            rows = len(strip.rows) if kind is strip.source_pieces else strip.patch.tile_h
            cycles += rows * max(banks.values())
    return float(cycles)


def add_products_strip(strip: Strip) -> Callable[..., None]:
    """sums += sources * targets, the part of one strip in the gradient of a filter: (sums[taps], source, target, row,
    target_row).

    `source` and `target` are the shared addresses of the planes, `row` and `target_row` the first of the strip in each,
    `row` without the axis's shift. The sums are those of (tap row, tap column) in this order.
    """
    text, patch = Text(), strip.patch
    of_source, of_target = text.one("b32"), text.one("b32")
    source_bytes, target_bytes = patch.columns.sources * patch.nbytes, strip.width * patch.nbytes
    text.add(f"mad.lo.s32 {of_source}, $row, {source_bytes}, $source;")
    text.add(f"mad.lo.s32 {of_target}, $target_row, {target_bytes}, $target;")
    factors, exists = {}, {}
    for row in range(min(patch.tile_h, patch.rows.targets)):
        exists[row] = "" if patch.rows.targets % patch.tile_h == 0 or strip.alone else inside_of(
            text, "$target_row", row, patch.rows.targets
        )  # fmt: skip
        for piece in strip.target_pieces:
            at = f"{of_target}+{row * target_bytes + piece.first * patch.nbytes}"
            loaded = text.load(at, patch.dtype, piece.length, exists[row], space="shared")
            for i, value in enumerate(text.widen(loaded, patch.dtype, piece.length)):
                factors[row, piece.first + i] = value
    for (value,), target, (tap_row, tap_column) in StripRows(text, strip, of_source, ahead=0).products():
        to, guard = tap_row * patch.tap_w + tap_column, f"@{exists[target[0]]} " if exists[target[0]] else ""
        text.add(f"{guard}fma.rn.f32 $sums[{to}], {value}, {factors[target]}, $sums[{to}];")
    return device_op(
        "add_products_strip", text.block(), inout={"sums": ("f32", patch.tap_h * patch.tap_w)},
        ins={"source": "u32", "target": "u32", "row": "i32", "target_row": "i32"},
        unused=("source", "target", "row", "target_row"),
    )  # fmt: skip
