"""The end of a tile in conv2d_wgmma: it adds up a split tile, corrects for zero points, applies the epilogue and stores.

The kernel captures the functions here, and they become part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.launch import Pointer
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.conv2d.geometry import Im2col, stores_by_tma, stores_rows
from schedsearch.templates.conv2d.wgmma_sizes import Plan, output_of
from schedsearch.templates.parts import sharing, store
from schedsearch.templates.parts.casts import i32, i64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.store_chunks import StagedChunks
from schedsearch.templates.parts.store_rows import StagedRows
from schedsearch.templates.parts.store_words import WORD_BYTES, WordStaging, staged_words
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.window_sums import WindowSums, no_window_correction
from schedsearch.templates.parts.zero_points import ZeroPoint, no_correction
from schedsearch.workload import Workload

# Of 16-bit operands like y: words that a thread loads ahead, and its registers besides these and the accumulators.
MOST_WORDS, REGISTERS_WITH_WORDS = 16, 48


@dataclass(frozen=True)
class FragmentCorrections:
    """The correction of sums for zero points.

    Attributes:
        zero: of x, or None.
        windows: of the weight, or None. Its workload has the groups before they are merged.
    """

    zero: ZeroPoint | None
    windows: WindowSums | None

    @classmethod
    def of_workload(cls, workload: Workload[Conv2dParams]) -> FragmentCorrections:
        """Those of a workload, whose groups are not merged yet."""
        return cls(ZeroPoint.of(workload), WindowSums.of(workload))

    @property
    def params(self) -> tuple[Pointer, ...]:
        """Further parameters of the kernel's epilogue."""
        return (*(self.zero.params if self.zero else ()), *(self.windows.params if self.windows else ()))

    def of(
        self, epilogue: Epilogue, output: store.Output, octets: int, interleaved: bool, groups: int
    ) -> Callable[..., None]:
        """`correct(values, columns, row, first_row, k, operands)`: corrects a thread's fragment of a part of a tile.

        values, columns and k are as in `Epilogue.fragments`. `row` is the part's first row among those of all tiles,
        `first_row` the fragment's first row in its slice of y. `groups` are those of the kernel, merged ones as one.
        """
        of_x = self.zero.correction(epilogue, octets, interleaved) if self.zero else no_correction
        of_weight = no_window_correction
        if self.windows:
            of_weight = self.windows.correction(epilogue, octets, interleaved, groups == self.windows.workload.params.groups)
        first_pixel, rows = output.first_pixel(), output.rows

        def correct(values: Any, columns: Any, row: Any, first_row: Any, k: Any, operands: Any) -> None:
            of_x(values, columns, first_row, k, operands)
            pixel = i32(first_pixel(row) + first_row)
            of_weight(values, columns, i32(rows - first_row), pixel, k, operands)

        return correct


def finish_of(
    workload: Workload[Conv2dParams], gemm: Im2col, plan: Plan, epilogue: Epilogue, corrections: FragmentCorrections
) -> tuple[Callable[..., Any], int, Callable[..., None], Callable[..., None]]:
    """The functions of the end of a tile: (begin_store, words_ahead, load_ahead, finish).

    `finish(values, ahead, row, column, inside_columns, y, store_place, lane, warp_row, operands)` applies the epilogue to a
    warpgroup's part of a tile, 64 rows x own_octets * 8 columns from (row, column) on, and stores it. If there are
    `words_ahead`, `load_ahead(ahead, row, column, inside_columns, lane, warp_row, operands)` must have loaded them.
    """
    p = workload.params
    if rows_of(workload, plan):
        return _finish_rows(workload, gemm, plan, epilogue)
    output, own_octets, accumulator = output_of(gemm, plan.bm), plan.own_octets, Wgmma(p.dtype).accumulator
    rows, fused, interleaved = output.rows, not epilogue.identity, store.interleaved(p.out_dtype)
    first_pair = output.fragment(4 if interleaved else 2)
    correct = corrections.of(epilogue, output, own_octets, interleaved, p.groups)
    channel_of = gemm.order.channel() if gemm.order else _same
    blocks, words_ahead = _blocks_of(gemm, output), _words_ahead(epilogue, plan, interleaved)
    fuse = epilogue.fragments(own_octets, 8 * output.block, interleaved, blocks, gemm.order, ahead=words_ahead > 0)
    load: Any = epilogue.load_ahead(own_octets, 8 * output.block, blocks, interleaved) if words_ahead else None
    staging_offset = plan.shared.offset("y") if plan.split_k == 1 else plan.sums_bytes  # y comes after the sums
    if stores_by_tma(workload) and dtype_of(p.out_dtype).nbytes == WORD_BYTES:
        words = WordStaging(own_octets, plan.segment, staging_offset, accumulator)
        begin_store, store_part = staged_words(output, words, plan.warpgroups)
    elif stores_by_tma(workload):
        staging = store.Staging(p.out_dtype, own_octets, plan.segment, staging_offset, accumulator)
        begin_store, store_part = store.staged(output, staging, plan.warpgroups)
    else:
        in_memory = output.with_pitch(p.slice_of) if output.plain else output
        begin_store, store_part = store.direct(in_memory, own_octets, accumulator)

    def load_ahead(
        ahead: Any, row: Any, column: Any, inside_columns: Any, lane: Any, warp_row: Any, operands: Any
    ) -> None:  # fmt: skip
        first_row, first_column, first_offset = first_pair(lane, warp_row, row, column)
        load(ahead, inside_columns, first_row < rows, first_row + 8 < rows, first_column, first_offset, *operands)

    def finish(
        values: Any, ahead: Any, row: Any, column: Any, inside_columns: Any, y: Any, store_place: Any, lane: Any,
        warp_row: Any, operands: Any,
    ) -> None:  # fmt: skip
        first_row, first_column, first_offset = first_pair(lane, warp_row, row, column)
        correct(values, inside_columns, row, first_row, first_column, operands)
        if words_ahead:
            fuse(
                values, ahead, inside_columns, first_row < rows, first_row + 8 < rows, first_column, first_offset, *operands
            )
        elif fused:
            fuse(
                values, inside_columns, first_row < rows, first_row + 8 < rows, channel_of(first_column), first_offset,
                *operands,
            )  # fmt: skip
        store_part(values, y, store_place, row, column, inside_columns)

    return begin_store, words_ahead, load_ahead, finish


def _words_ahead(epilogue: Epilogue, plan: Plan, interleaved: bool) -> int:
    """Words of operands like y that a thread loads before it multiplies. Those of 16 bits need two registers for 8 columns,
    and leave the accumulators of wide tiles none."""
    words = epilogue.words_ahead(plan.own_octets, interleaved)
    needed = plan.bn // 2 + REGISTERS_WITH_WORDS + words
    return words if interleaved or (words <= MOST_WORDS and needed <= plan.registers) else 0


def rows_of(workload: Workload[Conv2dParams], plan: Plan) -> StagedRows | StagedChunks | None:
    """How a warpgroup's part of a tile is stored if its rows are 16-bit numbers that TMA cannot store, or None."""
    p = workload.params
    if not stores_rows(workload):
        return None
    offset = plan.shared.offset("y") if plan.split_k == 1 else plan.sums_bytes  # y comes after the sums
    staged = StagedChunks if plan.row_store == "chunks" else StagedRows
    return staged(plan.own_octets, p.k, p.slice_of or p.k, offset)


def _finish_rows(
    workload: Workload[Conv2dParams], gemm: Im2col, plan: Plan, epilogue: Epilogue
) -> tuple[Callable[..., Any], int, Callable[..., None], Callable[..., None]]:
    """As `finish_of`, for `rows_of`, which applies the epilogue too."""
    staged = rows_of(workload, plan)
    assert staged is not None
    output = output_of(gemm, plan.bm)
    locate, rows, image_rows = output.locate(), output.rows, output.image_step * output.rows
    begin_rows = staged.begin()

    def begin_store(group: Any, lane: Any, warp_row: Any, leader: Any) -> Any:
        return begin_rows(group, lane, warp_row)

    def pixel_of(tile: Any, row: Any) -> Any:
        first_pixel, inside = tile
        return i64(first_pixel + row), row < inside

    dtype = workload.params.out_dtype
    if isinstance(staged, StagedChunks):
        store_rows = staged.store(epilogue, dtype)
    else:
        store_rows = staged.store(epilogue, dtype, pixel_of)

    def load_ahead(ahead: Any, row: Any, column: Any, inside_columns: Any, lane: Any, warp_row: Any, operands: Any) -> None:
        pass

    def finish(
        values: Any, ahead: Any, row: Any, column: Any, inside_columns: Any, y: Any, store_place: Any, lane: Any,
        warp_row: Any, operands: Any,
    ) -> None:  # fmt: skip
        image, first_row = locate(row)
        tile = i64(i64(image) * image_rows + first_row), i32(rows - first_row)
        store_rows(values, y, store_place, tile, column, inside_columns, operands)

    return begin_store, 0, load_ahead, finish


def add_up_of(wgmma: Wgmma, plan: Plan) -> Callable[..., None]:
    """`add_up(acc, sums, shared, sums_full, thread, in_cluster, part)`: `sums` of this block's columns of a split tile."""
    return sharing.add_up(plan.split_k, plan.bn // 8, plan.own_octets, plan.bm * 32, wgmma.accumulator)


def _same(column: Any) -> Any:
    """The channel of a column if columns are channels."""
    return column


def _blocks_of(gemm: Im2col, output: store.Output) -> tuple[int, int] | None:
    """`blocks` of `Epilogue.fragments`, if columns lie in blocks of y and in the order of channels."""
    return None if gemm.order or output.block == output.columns else (output.block, output.block_elements)
