"""CPU kernels that move data: parts of y without edges, loops over their factors, and what the innermost ones do.

A box is first cut into *parts* whose elements all come from x, or are all the fill. Each part has factors whose strides are
bytes, and its work items are tiles of them:

    1. A short run of neighbours counts as one element, of up to 64 bytes.
    2. The innermost factor of y, and the innermost one of x if it is another one, are cut into tiles.
    3. A tile with few elements takes in further factors of y, innermost first.

What an item does with its tile depends on the two runs: neighbours in both arrays are copied; runs that cross are transposed
in registers, in blocks of `size` x `size`; everything else is moved element by element. If a loop has a short constant
length, it is innermost, so that LLVM makes vectors of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schedsearch.backend.cpu_moves import copy_run, fill_op, finish_streams, move_op, stream_line, transpose_op
from schedsearch.ops.movement import Box, Factor
from schedsearch.templates.layout_transform.places import divided
from schedsearch.templates.parts.casts import i64, u32

WIDEST_ELEMENT_BYTES = 64
LINE_BYTES = 64
_UNROLLED = 16  # longest loop of constant length that is put innermost
_ONE = Factor(1, 0, 0)

Body = Callable[[Any, Any, Any, Any], None]


@dataclass(frozen=True)
class Part:
    """A part of y whose elements all come from x, or are all the fill.

    Attributes:
        factors: extents, and strides in bytes, in the order of y, outermost first.
        x_start, y_start: bytes.
        element_bytes: of what is moved at once.
        fill: the bits to write; None: elements of x.
    """

    factors: tuple[Factor, ...]
    x_start: int
    y_start: int
    element_bytes: int
    fill: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(factor.extent for factor in self.factors) * self.element_bytes

    @property
    def y_run(self) -> Factor:
        """The innermost factor of y."""
        return self.factors[-1] if self.factors else _ONE

    @property
    def x_run(self) -> Factor:
        """The innermost factor of x if it is another one than y's, otherwise a single element."""
        if self.fill is not None or not self.factors:
            return _ONE
        found = min(reversed(self.factors), key=lambda factor: abs(factor.x))
        return _ONE if found is self.y_run else found

    @property
    def copies(self) -> bool:
        """Whether runs are neighbours in both arrays."""
        run = self.y_run
        return self.fill is None and run.x == run.y == self.element_bytes

    @property
    def crosses(self) -> bool:
        """Whether runs of x and runs of y are neighbours, and different ones."""
        element = self.element_bytes
        return element in (1, 2, 4, 8) and self.x_run.x == element == self.y_run.y and self.x_run.extent > 1


def parts_of(box: Box, element_bytes: int, fill: int) -> list[Part]:
    """The parts of a box: the fill around x along each ragged axis, outermost first, and what is left of x.

    Raises:
        ValueError: a ragged axis has several factors, as those of layouts with blocks have.
    """
    found = []
    factors, x_start, y_start = list(box.factors), box.x_start, box.y_start
    for axis, limits in enumerate(box.ragged):
        places = [place for place, factor in enumerate(factors) if factor.axis == axis]
        if len(places) > 1 or any(factors[place].unit != 1 for place in places):
            raise ValueError("an axis with blocks is ragged; its parts have edges")
        place = places[0] if places else len(factors)
        factor = factors[place] if places else _ONE
        first, end = min(limits.first, factor.extent), min(max(limits.read, limits.first), factor.extent)
        for begin, stop in ((0, first), (end, factor.extent)):
            if begin < stop:
                filled = [*factors[:place], replace(factor, extent=stop - begin), *factors[place + 1 :]]
                start = y_start + begin * factor.y
                found.append(_part(filled, 0, start, element_bytes, fill))
        if first == end:
            return found
        factors[place : place + 1] = [replace(factor, extent=end - first)]
        x_start, y_start = x_start + first * factor.x, y_start + first * factor.y
    return [*found, _part(factors, x_start, y_start, element_bytes, None)]


def _part(factors: Sequence[Factor], x_start: int, y_start: int, element_bytes: int, fill: int | None) -> Part:
    size = element_bytes
    inside = [Factor(f.extent, f.x * size, f.y * size) for f in factors if f.extent > 1]
    wide = size
    if fill is None and inside:
        run = inside[-1]
        if run.x == run.y == size and run.extent * size <= WIDEST_ELEMENT_BYTES:
            wide = run.extent * size
            inside.pop()
    return Part(tuple(inside), x_start * size, y_start * size, wide, fill)


@dataclass(frozen=True)
class Tiling:
    """How a part is cut into work items.

    Attributes:
        columns: elements of a tile along x's run.
        rows: elements of a tile along y's run.
        inner: further factors that an item loops over, outermost first.
        span: a factor around these of which an item has `steps`; a single element if an item has no such part.
        steps: of the span in an item.
        outer: the other factors, which number the items.
        along_y: neighbouring tiles follow one another along y's run, not x's.
    """

    columns: int
    rows: int
    inner: tuple[Factor, ...]
    span: Factor
    steps: int
    outer: tuple[Factor, ...]
    along_y: bool

    @classmethod
    def of(cls, part: Part, tile_x: int, tile_y: int, item_bytes: int, along_y: bool) -> Tiling:
        """Args:
        tile_x, tile_y: elements along the runs of x and of y, or less if a run is shorter.
        item_bytes: an item takes in further factors as long as it has no more bytes.
        """
        columns, rows = min(tile_x, part.x_run.extent), min(tile_y, part.y_run.extent)
        rest = [factor for factor in part.factors if factor is not part.y_run and factor is not part.x_run]
        inner: list[Factor] = []
        nbytes = columns * rows * part.element_bytes
        whole = rows == part.y_run.extent and columns == part.x_run.extent
        while whole and rest and nbytes * rest[-1].extent <= item_bytes:
            nbytes *= rest[-1].extent
            inner.insert(0, rest.pop())
        span, steps = _ONE, 1
        if whole and rest and 2 * nbytes <= item_bytes:
            span = rest.pop()
            pieces = -(-span.extent * nbytes // item_bytes)
            steps = -(-span.extent // pieces)
        return cls(columns, rows, tuple(inner), span, steps, tuple(rest), along_y)

    def items(self, part: Part) -> int:
        tiles = -(-part.x_run.extent // self.columns) * -(-part.y_run.extent // self.rows)
        return math.prod(factor.extent for factor in self.outer) * tiles * -(-self.span.extent // self.steps)


@dataclass(frozen=True)
class Style:
    """What the innermost loops do.

    Attributes:
        block: rows and columns that are transposed in registers; 0: none.
        streams: whether copied runs go past the caches.
    """

    block: int = 0
    streams: bool = False


def move_kernel(parts: Sequence[tuple[Part, Tiling]], style: Style) -> Callable[..., None]:
    """The kernel (x, y, start, stop) over the items of all parts, one part after the other."""
    run: Callable[[Any, Any, Any], None] = _nothing
    first = 0
    for part, tiling in parts:
        run = _either(run, _part_items(part, tiling, style), first)
        first += tiling.items(part)
    streams = style.streams

    def move(x: Any, y: Any, start: Any, stop: Any) -> None:
        for item in range(start, stop):
            run(x, y, item)
        if streams:
            finish_streams()

    return move


def _nothing(x: Any, y: Any, item: Any) -> None:
    pass


def _either(before: Callable[..., None], this: Callable[..., None], first: int) -> Callable[..., None]:
    """Items below `first` are those of `before`."""

    def either(x: Any, y: Any, item: Any) -> None:
        if item < first:
            before(x, y, item)
        else:
            this(x, y, item - first)

    def only(x: Any, y: Any, item: Any) -> None:
        this(x, y, item)

    return either if first else only


def _part_items(part: Part, tiling: Tiling, style: Style) -> Callable[..., None]:
    """`run(x, y, item)`: one item of a part."""
    a, b = part.x_run, part.y_run
    columns, rows, along_y = tiling.columns, tiling.rows, tiling.along_y
    a_tiles, b_tiles = -(-a.extent // columns), -(-b.extent // rows)
    fast = b_tiles if along_y else a_tiles
    slow = a_tiles if along_y else b_tiles
    a_extent, a_x, a_y, b_extent, b_x, b_y = a.extent, a.x, a.y, b.extent, b.x, b.y
    offsets = _offsets_of(tiling.outer, part.x_start, part.y_start)
    body = _tile_body(part, tiling, style)
    for factor in reversed(tiling.inner):
        body = _counted(body, factor.x, factor.y, factor.extent)

    def of_tiles(x: Any, y: Any, item: Any) -> None:
        rest, first = divided(u32(item), fast)
        outer, second = divided(rest, slow)
        column = i64(second if along_y else first) * columns
        row = i64(first if along_y else second) * rows
        x_at, y_at = offsets(outer)
        x_at += column * a_x + row * b_x
        y_at += column * a_y + row * b_y
        body(x, y, x_at, y_at, min(columns, a_extent - column), min(rows, b_extent - row))

    if tiling.span.extent == 1:
        return of_tiles
    steps, extent, span_x, span_y = tiling.steps, tiling.span.extent, tiling.span.x, tiling.span.y
    pieces = -(-extent // steps)

    def of_spans(x: Any, y: Any, item: Any) -> None:
        outer, piece = divided(u32(item), pieces)
        first = i64(piece) * steps
        x_at, y_at = offsets(outer)
        for step in range(first, min(first + steps, extent)):
            body(x, y, x_at + step * span_x, y_at + step * span_y, columns, rows)

    return of_spans


def _offsets_of(factors: Sequence[Factor], x_start: int, y_start: int) -> Callable[[Any], Any]:
    def start(number: Any) -> Any:
        return i64(x_start), i64(y_start)

    found: Callable[[Any], Any] = start
    below = 1
    for factor in reversed(factors):
        found = _and_digit(found, below, factor.extent, factor.x, factor.y)
        below *= factor.extent
    return found


def _and_digit(before: Callable[[Any], Any], below: int, extent: int, x: int, y: int) -> Callable[[Any], Any]:
    def offsets(number: Any) -> Any:
        x_at, y_at = before(number)
        _, digit = divided(u32(number // u32(below)), extent)
        return x_at + i64(digit) * x, y_at + i64(digit) * y

    return offsets


# ---- what an item does with a tile of `columns` of x's run by `rows` of y's


def _tile_body(part: Part, tiling: Tiling, style: Style) -> Callable[..., None]:
    a, b = part.x_run, part.y_run
    if part.copies:
        return _along(_stream if style.streams else _copy, part)
    even_columns = tiling.columns if a.extent % tiling.columns == 0 else 0
    even_rows = tiling.rows if b.extent % tiling.rows == 0 else 0
    if part.crosses and style.block and min(tiling.columns, tiling.rows) >= style.block:
        return _transposed(part, style.block)
    element = _filled(part) if part.fill is not None else _moved(part)
    by_rows = _counted(element, b.x, b.y, even_rows)
    by_columns = _counted(element, a.x, a.y, even_columns, of_rows=False)
    if 0 < even_columns <= _UNROLLED and (not 0 < even_rows <= _UNROLLED or even_columns < even_rows):
        return _counted(by_columns, b.x, b.y, even_rows)
    return _counted(by_rows, a.x, a.y, even_columns, of_rows=False)


def _counted(body: Callable[..., None], x_step: int, y_step: int, even: int, *, of_rows: bool = True) -> Callable[..., None]:
    """A loop over the rows or columns of a tile, or over a whole factor; `even` steps, if that is not 0."""

    def constant(x: Any, y: Any, x_at: Any, y_at: Any, columns: Any, rows: Any) -> None:
        for i in range(even):
            body(x, y, x_at + i * x_step, y_at + i * y_step, columns, rows)

    def counted(x: Any, y: Any, x_at: Any, y_at: Any, columns: Any, rows: Any) -> None:
        for i in range(rows if of_rows else columns):
            body(x, y, x_at + i * x_step, y_at + i * y_step, columns, rows)

    return constant if even else counted


def _moved(part: Part) -> Callable[..., None]:
    move = move_op(part.element_bytes)

    def element(x: Any, y: Any, x_at: Any, y_at: Any, columns: Any, rows: Any) -> None:
        move(y, y_at, x, x_at)

    return element


def _filled(part: Part) -> Callable[..., None]:
    assert part.fill is not None
    fill = fill_op(part.element_bytes, part.fill)

    def element(x: Any, y: Any, x_at: Any, y_at: Any, columns: Any, rows: Any) -> None:
        fill(y, y_at)

    return element


def _along(copy: Callable[..., None], part: Part) -> Callable[..., None]:
    element = part.element_bytes

    def run(x: Any, y: Any, x_at: Any, y_at: Any, columns: Any, rows: Any) -> None:
        copy(x, y, x_at, y_at, rows * element)

    return run


def _copy(x: Any, y: Any, x_at: Any, y_at: Any, nbytes: Any) -> None:
    copy_run(y, y_at, x, x_at, nbytes)


def _stream(x: Any, y: Any, x_at: Any, y_at: Any, nbytes: Any) -> None:
    head = min(i64((LINE_BYTES - (i64(y) + y_at) % LINE_BYTES) % LINE_BYTES), nbytes)
    lines = (nbytes - head) // LINE_BYTES
    copy_run(y, y_at, x, x_at, head)
    for i in range(lines):
        at = head + i * LINE_BYTES
        stream_line(y, y_at + at, x, x_at + at)
    done = head + lines * LINE_BYTES
    copy_run(y, y_at + done, x, x_at + done, nbytes - done)


def _transposed(part: Part, size: int) -> Callable[..., None]:
    """Blocks of size x size in registers, and what is left of the tile element by element."""
    a_x, a_y, b_x, b_y = part.x_run.x, part.x_run.y, part.y_run.x, part.y_run.y
    transpose, move = transpose_op(part.element_bytes, size), move_op(part.element_bytes)

    def tile(x: Any, y: Any, x_at: Any, y_at: Any, columns: Any, rows: Any) -> None:
        whole_columns, whole_rows = columns // size * size, rows // size * size
        for column in range(0, whole_columns, size):
            for row in range(0, whole_rows, size):
                transpose(y, y_at + column * a_y + row * b_y, x, x_at + column * a_x + row * b_x, b_x, a_y)
        for column in range(columns):
            for row in range(whole_rows if column < whole_columns else 0, rows):
                move(y, y_at + column * a_y + row * b_y, x, x_at + column * a_x + row * b_x)

    return tile
