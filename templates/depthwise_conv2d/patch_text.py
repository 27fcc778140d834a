"""Device operations on a patch (`patches.Patch`), generated as PTX: correlate, add up products for dw, finish and store.

All loops over the pixels and taps of a patch are unrolled in the text. NVVM would not unroll them: they exceed its budget.
Loads are those of the non-coherent path, so that ptxas may move them up.

Source: PTX ISA, "Data Movement: ld.global.nc", "Data Conversion: cvt", "Floating Point Instructions: fma".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv2d.held import filter_loads, filter_words, held_operands
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES, Axis, Patch, Piece
from schedsearch.templates.depthwise_conv2d.ptx_text import VECTOR, WORD_BYTES, Text
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.stages import BYTES

ROWS_AHEAD = 2  # rows of sources whose loads come before the products of a row


def _guards(text: Text, row_exists: str, first_row: int, column_exists: str, first_column: int) -> Callable[[int, int], str]:
    """(row, column) -> the guard of its products: a product with a zero instead would be NaN for an infinite factor.

    Args:
        row_exists: predicate: the rows from `first_row` on exist; "" if all rows always do. The same for columns.
    """
    both = ""
    if row_exists and column_exists:
        both = text.one("pred")
        text.add(f"and.pred {both}, {row_exists}, {column_exists};")

    def guard(row: int, column: int) -> str:
        of_row, of_column = bool(row_exists) and row >= first_row, bool(column_exists) and column >= first_column
        name = both if of_row and of_column else row_exists if of_row else column_exists if of_column else ""
        return f"@{name} " if name else ""

    return guard


# ---- y and dx


def correlate(
    patch: Patch, weight_pitch: int, branch: bool, filter_steps: tuple[int, int, int] | None = None
) -> Callable[..., None]:
    """sums += sources * weights, one round of taps.

    It takes (sums[patch.sums], source, weights, row, column, inside, rows_follow, columns_follow). `source` is the address
    of the plane, or of the image's first pixel, at the thread's channel. (row, column) is the source of the patch's first
    target and the round's first tap, without the axis's shift; both may be outside of the image. `weights` is the shared
    address of the round's first tap: float32, channels side by side, taps `weight_pitch` bytes apart in rows of
    `patch.tap_w`. With `branch`, patches with `inside` != 0 lie inside of the image as a whole, and their loads need no
    test; a warp with other patches too tests them all, because it would otherwise run both codes.

    A round of taps has missing ones at the filter's end, where `rows_follow` or `columns_follow`, the taps that follow along
    an axis, is 0. They are left out.

    With `filter_steps`, the elements from a filter, row and column of the weight to the next, the thread has its filters in
    registers, where `load_filters` has put them, and the round has all taps. The operation then takes these registers after
    the sums, and no `weights`.

    The sums are those of (row, column, channel) in this order.
    """
    text = Text()
    names = zero_point_operands(patch)
    text.zero_point(*_source_zero(patch))
    if filter_steps:
        text.zero_point(*_weight_zero(patch))
    base = _source_address(text, patch)
    if filter_steps:
        weights = held_filters(text, patch, filter_steps)
    else:
        weights = shared_filters(text, patch, weight_pitch)
    guard = _missing_taps(text, patch)
    if branch:
        inside, active = text.one("pred"), text.one("b32")
        text.add(f"setp.ne.s32 {inside}, $inside, 0; activemask.b32 {active};")
        text.add(f"vote.sync.all.pred {inside}, {inside}, {active}; @{inside} bra whole;")
    correlate_rows(text, patch, Rows(text, patch, base, tested=True), weights, guard)
    if branch:
        text.add("bra done; whole:")
        correlate_rows(text, patch, Rows(text, patch, base, tested=False), weights, guard)
        text.add("done:")
    held = {"filters": ("u32", filter_words(patch, filter_steps))} if filter_steps else {}
    return device_op(
        "correlate", text.block(), inout={"sums": ("f32", patch.sums), **held},
        ins={
            "source": "u64", **({} if filter_steps else {"weights": "u32"}),
            **dict.fromkeys(("row", "column", "inside", "rows_follow", "columns_follow"), "i32"),
            **dict.fromkeys(names, "f32"),
        },
        unused=("inside", "rows_follow", "columns_follow", *names),
    )  # fmt: skip


def zero_point_operands(patch: Patch) -> tuple[str, ...]:
    """The last operands of operations that read integers, one for each zero point."""
    return tuple(f"{name}_zero_point" for name in patch.zero_points)


def _source_zero(patch: Patch) -> tuple[str, str]:
    """The operand that has the zero point of the sources, or "", and their format."""
    return "x_zero_point" if "x" in patch.zero_points else "", patch.dtype


def _weight_zero(patch: Patch) -> tuple[str, str]:
    return "weight_zero_point" if "weight" in patch.zero_points else "", patch.weight_dtype


def _missing_taps(text: Text, patch: Patch) -> Callable[[int, int], str]:
    """(tap row, tap column) -> the guard of its products."""
    exist = []
    for name, taps, unrolled in (("rows", patch.rows.taps, patch.tap_h), ("columns", patch.columns.taps, patch.tap_w)):
        exist.append(text.one("pred") if taps % unrolled else "")
        if exist[-1]:
            text.add(f"setp.ne.s32 {exist[-1]}, ${name}_follow, 0;")
    return _guards(text, exist[0], patch.rows.taps % patch.tap_h, exist[1], patch.columns.taps % patch.tap_w)


def shared_filters(text: Text, patch: Patch, pitch: int) -> dict[int, list[str]]:
    """tap -> registers of its weights, one for each channel."""
    weights = {}
    for tap in range(patch.tap_h * patch.tap_w):
        weights[tap] = text.new("f32", patch.vector)
        for i in range(0, patch.vector, 4):
            group = weights[tap][i : i + 4]
            names = f"{{{', '.join(group)}}}" if len(group) > 1 else group[0]
            text.add(f"ld.shared{VECTOR[len(group)]}.f32 {names}, [$weights+{tap * pitch + WORD_BYTES * i}];")
    return weights


def held_filters(text: Text, patch: Patch, steps: tuple[int, int, int]) -> dict[int, list[str]]:
    """tap -> registers of its weights, one for each channel, from those that `load_filters` has filled."""
    (zero, dtype), found = _weight_zero(patch), list[list[str]]()
    for load in filter_loads(patch, steps):
        words = [f"$filters[{load.word + i}]" for i in range(load.words)]
        if dtype not in BYTES and load.length * patch.nbytes < WORD_BYTES:
            half, upper = text.new("b16", 2)
            text.add(f"mov.b32 {{{half}, {upper}}}, {words[0]};")
            words = [half]
        found.append(text.widen(words, dtype, load.length, zero))
    if steps[0] == 1:
        return dict(enumerate(found))
    elements, taps = [each for some in found for each in some], patch.tap_h * patch.tap_w
    return {tap: elements[tap::taps] for tap in range(taps)}


def correlate_rows(
    text: Text, patch: Patch, rows: RowsAhead, weights: dict[int, list[str]], guard: Callable[[int, int], str]
) -> None:
    """sums += sources * weights, where `weights` are those of `shared_filters` or `held_filters`."""
    for values, (target_row, target_column), tap in rows.products():
        first = (target_row * patch.tile_w + target_column) * patch.vector
        taps, only = weights[tap[0] * patch.tap_w + tap[1]], guard(*tap)
        for i in range(patch.vector):
            text.add(f"{only}fma.rn.f32 $sums[{first + i}], {values[i]}, {taps[i]}, $sums[{first + i}];")


Row = Iterable[tuple[Piece, list[str]]]  # its accesses, and the registers that they load
Place = tuple[int, int]  # row and column


class RowsAhead(ABC):
    """The rows of sources that a patch needs: loaded a few ahead, then widened.

    Args:
        ahead: rows whose loads come before the products of a row; 0: each access is widened before the next.
        zero: operand with the zero point of the sources.
    """

    def __init__(self, text: Text, patch: Patch, ahead: int, zero: str = "") -> None:
        self.text, self.patch, self._ahead, self._zero = text, patch, ahead, zero
        self._waiting = list(patch.row_meetings)
        self._loaded: dict[int, Row] = {}

    @abstractmethod
    def load(self, row: int) -> Row:
        """Adds the loads of a row, one after the other."""

    def take(self, row: int) -> dict[int, list[str]]:
        """column -> float32 registers of its channels, in one row; rows are taken in order."""
        while self._waiting and (row not in self._loaded or len(self._loaded) <= self._ahead):
            ahead = self._waiting.pop(0)
            self._loaded[ahead] = list(self.load(ahead)) if self._ahead else self.load(ahead)
        patch, found = self.patch, dict[int, list[str]]()
        for piece, registers in self._loaded.pop(row):
            values = self.text.widen(registers, patch.dtype, patch.vector * piece.length, self._zero)
            for i in range(piece.length):
                found.setdefault(piece.first + i, values[i * patch.vector : (i + 1) * patch.vector])
        return found

    def products(self) -> Iterator[tuple[list[str], Place, Place]]:
        """(registers of a source, target, tap) of each product, row by row, after the loads and numbers of the row."""
        for row, meetings in self.patch.row_meetings.items():
            values = self.take(row)
            for target_row, tap_row in meetings:
                for column, across in self.patch.column_meetings.items():
                    for target_column, tap_column in across:
                        yield values[column], (target_row, target_column), (tap_row, tap_column)


class Rows(RowsAhead):
    """Rows in global memory.

    Args:
        base: register with the address of the source at (row, column).
        tested: loads test whether they lie inside of the image.
    """

    def __init__(self, text: Text, patch: Patch, base: str, tested: bool) -> None:
        super().__init__(text, patch, ROWS_AHEAD, _source_zero(patch)[0])
        self._base, self._tested = base, tested
        wanted = patch.column_meetings
        if patch.channels_last:
            self._pieces: Sequence[Piece] = [Piece(column, 1) for column in wanted]
        else:
            self._pieces = patch.source_pieces
        rows, columns = patch.rows, patch.columns
        one_round = patch.tap_h == rows.taps, patch.tap_w == columns.taps

        def tests(axis: Axis, tile: int, source: int, known: bool) -> tuple[int, int] | None:
            """None if the source is inside in every patch; sources with equal tests need one of them."""
            found = axis.outside(tile, source) if known else (source, source)
            return found if any(found) or not known else None

        self._row_tests = {row: tests(rows, patch.tile_h, row, one_round[0]) for row in patch.row_meetings}
        self._piece_tests = [tests(columns, patch.tile_w, piece.first, one_round[1]) for piece in self._pieces]
        self._columns: dict[tuple[int, int] | None, str] = {None: ""}  # test -> register with a column to be tested
        for test, piece in zip(self._piece_tests if tested else (), self._pieces):
            if test not in self._columns:
                self._columns[test] = text.one("b32")
                text.add(f"add.s32 {self._columns[test]}, $column, {piece.first};")

    def load(self, row: int) -> Row:
        text, patch = self.text, self.patch
        row_inside = ""
        if self._tested and self._row_tests[row]:
            row_inside = inside_of(text, "$row", row, patch.rows.sources)
        insides: dict[tuple[int, int] | None, str] = {None: row_inside}
        for test, piece in zip(self._piece_tests, self._pieces):
            if self._tested and test not in insides:
                insides[test] = inside_of(text, self._columns[test], 0, patch.columns.sources, row_inside)
            inside = insides[test] if self._tested else ""
            offset = (row * patch.source[0] + piece.first * patch.source[1]) * patch.nbytes
            at, count = f"{self._base}+{offset}", patch.vector * piece.length
            yield piece, text.load(at, patch.dtype, count, inside, zero_point=self._zero)


# ---- dw


def add_products(patch: Patch) -> Callable[..., None]:
    """sums += sources * targets: the part of one patch in the gradient of the filters.

    It takes (sums[taps * vector], source, target, row, column, target_row, target_column): `source`, `row` and `column` are
    those of `correlate`, `target` is the same address in dy, whose patch starts at (target_row, target_column).

    Only targets inside of the image count. The sums are those of (tap row, tap column, channel) in this order.
    """
    text = Text()
    base = _source_address(text, patch)
    guard = targets_outside(text, patch)
    to = _address(text, "$target", "$target_row", "$target_column", patch.target, patch.nbytes)
    moved, loaded = moved_pieces(patch), []
    for row in range(patch.target_rows):
        row_inside = target_inside(text, "$target_row", row, patch.rows, patch.tile_h)
        for piece in moved:
            inside = target_inside(text, "$target_column", piece.first, patch.columns, patch.tile_w, row_inside)
            offset = (row * patch.target[0] + piece.first * patch.target[1]) * patch.nbytes
            loaded.append((row, piece, text.load(f"{to}+{offset}", patch.dtype, patch.vector * piece.length, inside)))
    sum_products(text, patch, Rows(text, patch, base, tested=True), loaded, guard)
    return device_op(
        "add_products", text.block(), inout={"sums": ("f32", patch.tap_h * patch.tap_w * patch.vector)},
        ins={"source": "u64", "target": "u64", **dict.fromkeys(("row", "column", "target_row", "target_column"), "i32")},
    )  # fmt: skip


def sum_products(
    text: Text,
    patch: Patch,
    rows: RowsAhead,
    loaded: Sequence[tuple[int, Piece, list[str]]],
    guard: Callable[[int, int], str],
) -> None:
    """sums += sources * targets, with (row, access, registers) of the targets, which are widened when they are needed."""
    factors: dict[tuple[int, int], list[str]] = {}
    for values, target, (tap_row, tap_column) in rows.products():
        for target_row, piece, registers in loaded if not factors else ():
            found = text.widen(registers, patch.dtype, patch.vector * piece.length)
            for i in range(piece.length):
                factors[target_row, piece.first + i] = found[i * patch.vector : (i + 1) * patch.vector]
        first, only = (tap_row * patch.tap_w + tap_column) * patch.vector, guard(*target)
        for i, factor in enumerate(factors[target]):
            text.add(f"{only}fma.rn.f32 $sums[{first + i}], {values[i]}, {factor}, $sums[{first + i}];")


def targets_outside(text: Text, patch: Patch) -> Callable[[int, int], str]:
    """(row, column) of a target -> the guard of its products. Only the last patch of an axis reaches beyond the image."""
    exist, axes = [], (("row", patch.rows, patch.tile_h), ("column", patch.columns, patch.tile_w))
    for name, axis, tile in axes:
        exist.append(text.one("pred") if axis.targets % tile and axis.patches(tile) > 1 else "")
        if exist[-1]:
            text.add(f"setp.le.s32 {exist[-1]}, $target_{name}, {axis.targets - tile};")
    return _guards(text, exist[0], patch.rows.targets % patch.tile_h, exist[1], patch.columns.targets % patch.tile_w)


# ---- the results of a patch


def finish(
    patch: Patch, epilogue: Epilogue | None, out_dtype: str, accumulate: bool, staged_row: int = 0
) -> Callable[..., None]:
    """Applies the epilogue to the sums of a patch, or adds the gradient before, and stores what is inside of the image.

    It takes (sums[patch.sums], target, before, row, column, k, offset, *operands): `target` and `before` are addresses of
    the plane, or of the image's first pixel, at the thread's channel, (row, column) the patch's first target, k its channel
    and offset (i64) the element offset of the plane or pixel in y. `before` is read if `accumulate`. If there are
    `held_operands`, these registers follow the sums.

    With `staged_row`, the results of one channel go to shared memory instead: `target` (u32) is the address of the first
    one, columns lie side by side and rows so many bytes apart. Those outside of the image are any numbers.
    """
    text = Text()
    size = dtype_of(out_dtype).nbytes
    to = "" if staged_row else _address(text, "$target", "$row", "$column", patch.target, size)
    old = _address(text, "$before", "$row", "$column", patch.target, size) if accumulate else ""
    ins: dict[str, str] = {
        "target": "u32" if staged_row else "u64", "before": "u64", "row": "i32", "column": "i32", "k": "i32",
        "offset": "i64",
    }  # fmt: skip
    words = held_operands(patch, epilogue)
    stages = epilogue.stages_of_patch(patch.vector, patch.target, words > 0) if epilogue else None
    if stages:
        ins |= dict(stages.ins)
        text.add(*stages.begin)
    values = {
        (row, column): [f"$sums[{(row * patch.tile_w + column) * patch.vector + i}]" for i in range(patch.vector)]
        for row in range(patch.target_rows)
        for column in range(patch.target_columns)
    }
    if patch.dtype in BYTES:
        values = {place: _whole(text, sums) for place, sums in values.items()}
    most = VECTOR_BYTES // size  # elements of a store; y may have wider ones than x
    moved = moved_pieces(patch)
    for row in range(patch.target_rows):
        row_inside = target_inside(text, "$row", row, patch.rows, patch.tile_h)
        for piece in moved:
            inside = target_inside(text, "$column", piece.first, patch.columns, patch.tile_w, row_inside)
            results = []
            for column in range(piece.first, piece.first + piece.length):
                results += values[row, column]
                if stages:
                    text.add(*stages.of_pixel(values[row, column], row, column, inside or "always"))
            offset = (row * patch.target[0] + piece.first * patch.target[1]) * size
            if accumulate:
                loaded = text.load(f"{old}+{offset}", out_dtype, len(results), inside)
                for result, addend in zip(results, text.widen(loaded, out_dtype, len(results))):
                    text.add(f"add.f32 {result}, {result}, {addend};")
            for first in range(0, 0 if staged_row else len(results), most):
                text.store(f"{to}+{offset + first * size}", results[first : first + most], out_dtype, inside)
        if staged_row:
            results = [value for column in range(patch.target_columns) for value in values[row, column]]
            text.store(f"$target+{row * staged_row}", results, out_dtype, "", space="shared")
    body, inout = text.block(), {"sums": ("f32", patch.sums), **({"words": ("u32", words)} if words else {})}
    return device_op("finish", body, inout=inout, ins=ins, unused=ins)


def moved_pieces(patch: Patch) -> Sequence[Piece]:
    """Accesses that move a row of targets of a patch."""
    return [Piece(i, 1) for i in range(patch.target_columns)] if patch.channels_last else patch.target_pieces


def target_inside(text: Text, first: str, more: int, axis: Axis, tile: int, also: str = "") -> str:
    """As `inside_of` for a target of a patch, or `also` if all patches of `tile` targets that start in the image have it."""
    if axis.patches(tile) == 1 or axis.targets % tile == 0 or more < axis.targets % tile:
        return also
    return inside_of(text, first, more, axis.targets, also)


def _whole(text: Text, sums: Sequence[str]) -> list[str]:
    """Sums of products of integers, which are exact in float32, as int32."""
    numbers = text.new("b32", len(sums))
    text.add(*(f"cvt.rni.s32.f32 {number}, {total};" for number, total in zip(numbers, sums)))
    return numbers


def _source_address(text: Text, patch: Patch) -> str:
    return _address(text, "$source", "$row", "$column", patch.source, patch.nbytes)


def _address(text: Text, base: str, row: str, column: str, strides: tuple[int, int], nbytes: int) -> str:
    """A register with the address of a place, whose coordinates may be negative."""
    address = text.one("b64")
    text.add(
        f"mad.wide.s32 {address}, {row}, {strides[0] * nbytes}, {base};",
        f"mad.wide.s32 {address}, {column}, {strides[1] * nbytes}, {address};",
    )
    return address


def inside_of(text: Text, first: str, more: int, extent: int, also: str = "") -> str:
    """A predicate: 0 <= first + more < extent, and `also`."""
    at, inside = first, text.one("pred")
    if more:
        at = text.one("b32")
        text.add(f"add.s32 {at}, {first}, {more};")
    both = f"setp.lt.and.u32 {inside}, {at}, {extent}, {also};" if also else f"setp.lt.u32 {inside}, {at}, {extent};"
    text.add(both)
    return inside


def load_weight(patch: Patch) -> Callable[..., Any]:
    """An element of the weight as float32: (address, inside), and of integers the zero points; zero if `inside` is 0."""
    text, (zero, dtype), names = Text(), _weight_zero(patch), zero_point_operands(patch)
    inside = text.one("pred")
    text.zero_point(zero, dtype)
    text.add(f"setp.ne.s32 {inside}, $inside, 0;")
    value = text.widen(text.load("$address", dtype, 1, inside, zero_point=zero), dtype, 1, zero)[0]
    text.add(f"mov.b32 $value, {value};")
    ins = {"address": "u64", "inside": "i32", **dict.fromkeys(names, "f32")}
    return device_op("load_weight", text.block(), ins=ins, outs={"value": "f32"}, unused=names)


def store_sums(count: int, pitch: int) -> Callable[..., None]:
    """Writes `count` sums to shared memory, `pitch` bytes apart: (sums[count], shared)."""
    lines = [f"st.shared.f32 [$shared+{i * pitch}], $sums[{i}];" for i in range(count)]
    return device_op("store_sums", "\n".join(lines), inout={"sums": ("f32", count)}, ins={"shared": "u32"})


def write_gradient(dtype: str, accumulate: bool) -> Callable[..., None]:
    """Stores one element of dw, with the gradient before added if `accumulate`: (address, before, value)."""
    text = Text()
    value, always = text.one("f32"), text.one("pred")
    text.add(f"mov.f32 {value}, $value; setp.eq.u64 {always}, $address, $address;")
    if accumulate:
        (old,) = text.widen(text.load("$before", dtype, 1), dtype, 1)
        text.add(f"add.f32 {value}, {value}, {old};")
    text.store("$address", [value], dtype, always)
    return device_op(
        "write_gradient", text.block(), ins={"address": "u64", "before": "u64", "value": "f32"}, unused=("before",)
    )


SUMMED_AT_ONCE = 8


def add_strided(stride_bytes: int) -> Callable[..., Any]:
    """The sum of the first `count` of 8 float32 that are `stride_bytes` apart, in order, and `total`: (address, count,
    total)."""
    text = Text()
    values = text.new("f32", SUMMED_AT_ONCE)
    for i, value in enumerate(values):
        inside = text.one("pred")
        text.add(f"setp.gt.s32 {inside}, $count, {i}; mov.f32 {value}, 0f00000000;")
        text.add(f"@{inside} ld.global.nc.f32 {value}, [$address+{i * stride_bytes}];")
    total = text.one("f32")
    text.add(f"mov.f32 {total}, $total;", *(f"add.f32 {total}, {total}, {value};" for value in values))
    text.add(f"mov.f32 $sum, {total};")
    return device_op(
        "add_strided", text.block(), ins={"address": "u64", "count": "i32", "total": "f32"}, outs={"sum": "f32"}
    )


def add_shared(count: int, stride_bytes: int) -> Callable[..., Any]:
    """The sum of `total` and `count` float32 in shared memory that are `stride_bytes` apart, in order: (shared, total)."""
    text = Text()
    values, total = text.new("f32", count) if count else [], text.one("f32")
    text.add(*(f"ld.shared.f32 {value}, [$shared+{i * stride_bytes}];" for i, value in enumerate(values)))
    text.add(f"mov.f32 {total}, $total;", *(f"add.f32 {total}, {total}, {value};" for value in values))
    text.add(f"mov.f32 $sum, {total};")
    ins = {"shared": "u32", "total": "f32"}
    return device_op("add_shared", text.block(), ins=ins, outs={"sum": "f32"}, unused=("shared",))


def add_to_global() -> Callable[..., None]:
    """Adds to a float32 in global memory, in no order: (address, value). PTX ISA, "red"."""
    return device_op("add_to_global", "red.global.add.f32 [$address], $value;", ins={"address": "u64", "value": "f32"})
