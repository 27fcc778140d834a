"""Device operations on a patch whose sources lie in a tile in shared memory (`tiles.Tile`), generated as PTX.

Pixels outside of the image are zeros there, so no load is tested.

Source: PTX ISA, "Data Movement: ld.shared".
"""

from __future__ import annotations

from collections.abc import Callable

from schedsearch.backend.ops import device_op
from schedsearch.templates.depthwise_conv2d.held import filter_words
from schedsearch.templates.depthwise_conv2d.patch_text import (
    ROWS_AHEAD,
    Row,
    RowsAhead,
    correlate_rows,
    held_filters,
    moved_pieces,
    shared_filters,
    sum_products,
    targets_outside,
)
from schedsearch.templates.depthwise_conv2d.patches import Patch, Piece
from schedsearch.templates.depthwise_conv2d.ptx_text import Text
from schedsearch.templates.depthwise_conv2d.tiles import Tile


class StagedRows(RowsAhead):
    """Rows of a tile in shared memory, where pixels outside of the image are zeros. `$source` is the address of the first
    pixel that the thread reads."""

    def __init__(self, text: Text, patch: Patch, tile: Tile) -> None:
        super().__init__(text, patch, ROWS_AHEAD)
        self._tile = tile

    def load(self, row: int) -> Row:
        for column in self.patch.column_meetings:
            at = f"$source+{self._tile.offset(row, column)}"
            yield Piece(column, 1), self.text.load(at, self.patch.dtype, self.patch.vector, space="shared")


def add_staged_products(patch: Patch, source: Tile, target: Tile) -> Callable[..., None]:
    """As `patch_text.add_products`, of tiles in shared memory.

    It takes (sums[taps * vector], source, target, target_row, target_column): the shared addresses of what the thread reads
    of each tile first, and the first target of its patch.
    """
    text = Text()
    guard = targets_outside(text, patch)
    loaded = []
    for row in range(patch.target_rows):
        for piece in moved_pieces(patch):
            at = f"$target+{target.offset(row, piece.first)}"
            loaded.append((row, piece, text.load(at, patch.dtype, patch.vector, space="shared")))
    sum_products(text, patch, StagedRows(text, patch, source), loaded, guard)
    return device_op(
        "add_staged_products", text.block(), inout={"sums": ("f32", patch.tap_h * patch.tap_w * patch.vector)},
        ins={"source": "u32", "target": "u32", "target_row": "i32", "target_column": "i32"},
        unused=("source", "target", "target_row", "target_column"),
    )  # fmt: skip


def correlate_staged(
    patch: Patch, tile: Tile, weight_pitch: int, filter_steps: tuple[int, int, int] | None
) -> Callable[..., None]:
    """As `patch_text.correlate`, of a tile in shared memory and of filters whose taps are all unrolled.

    It takes (sums[patch.sums], source, weights), and with `filter_steps` (sums[patch.sums], filters, source), where `source`
    is the shared address of what the thread reads of the tile first.
    """
    text = Text()
    weights = held_filters(text, patch, filter_steps) if filter_steps else shared_filters(text, patch, weight_pitch)
    correlate_rows(text, patch, StagedRows(text, patch, tile), weights, lambda *_: "")
    held = {"filters": ("u32", filter_words(patch, filter_steps))} if filter_steps else {}
    return device_op(
        "correlate_staged", text.block(), inout={"sums": ("f32", patch.sums), **held},
        ins={"source": "u32", **({} if filter_steps else {"weights": "u32"})}, unused=("source",),
    )  # fmt: skip
