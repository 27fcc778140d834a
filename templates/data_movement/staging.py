"""How a block stages a tile of a movement: which runs it loads, where they lie in shared memory, and which runs it stores.

A tile is a box of the movement's factors. In x it consists of *rows*, each of which is one *run* of neighbours in memory; in
y it consists of other rows and runs. Both are found here. NCHW to NHWC of 49 pixels, for example, with a tile of 64
channels:

    x   one row; its run has all pixels of 64 channels
    y   49 rows, one for each pixel; their runs have 64 channels

A block loads the runs of x as chunks of up to 16 bytes, from the aligned address before a run to the end of the run, and
puts them into rows of shared memory as they are. A run may therefore start anywhere. An element then has a place in shared
memory that is linear in its digits, apart from the run's distance to its aligned address. To store a vector of y, a thread
collects its elements one by one; bytes, which are many, by segments (`Staging.segment`). An exclusive or permutes the
chunks of shared memory, so that threads that collect together meet different banks: `Staging.swizzle` counts the conflicts
of a few permutations, and takes the one with the fewest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from schedsearch.ops.movement import Factor
from schedsearch.templates.data_movement.move import Move

CHUNK_BYTES = 16  # that the swizzle moves together
SECTOR_BYTES = 32  # that a load reads from memory at least
_BANKS, _BANK_BYTES, _LANES = 32, 4, 32
_SWIZZLES = range(1, 12)
_SAMPLED_WARPS = 4
_LEAST_RUN_BYTES = 2 * SECTOR_BYTES  # of y: one store of a warp then fills sectors, although its rows are apart
_VECTOR_INSTRUCTIONS, _ELEMENT_INSTRUCTIONS, _ISSUED_PER_CYCLE = 30, 8, 4
_READ_INSTRUCTIONS, _TURN_INSTRUCTIONS = 4, 10  # of a read for several vectors, and of each vector after it
_SEGMENT_INSTRUCTIONS, _LINEAR_INSTRUCTIONS, _SWIZZLE_INSTRUCTIONS = 80, 6, 4  # of a vector, and of its elements
_MOST_STREAMS = 4  # of a segment

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Staging:
    """A tile of a movement and the widths of its accesses.

    Attributes:
        p: the movement.
        tile: extent of the tile along each factor, in the order of `p.factors`.
        load_bytes: of an access to x; x must be aligned to it, but its runs need not be.
        store_bytes: of an access to y, at least an element; y must be aligned to it.
        across: neighbours in a run of x that a thread reads at once. They belong to as many vectors of y, each from another
            row, and the thread transposes them in registers. Legal if `across_bytes` allows it.
    """

    p: Move
    tile: tuple[int, ...]
    load_bytes: int
    store_bytes: int
    across: int = 1

    # ---- runs and rows, as numbers of factors, innermost first

    @functools.cached_property
    def x_run(self) -> tuple[int, ...]:
        """Factors that make up a run of x. The first may have gaps of less than a sector, or run backwards."""
        gap = max(SECTOR_BYTES // self.p.element_bytes, 1)
        return _run(self.p.factors, self.tile, [factor.x for factor in self.p.factors], gap)

    @functools.cached_property
    def y_run(self) -> tuple[int, ...]:
        """Factors that make up a run of y. Neighbours of x that are read at once are in different rows."""
        run = _run(self.p.factors, self.tile, [factor.y for factor in self.p.factors], 1)
        if self.across > 1 and self.x_run and self.x_run[0] in run:
            run = run[: run.index(self.x_run[0])]
        return run

    @functools.cached_property
    def x_rows(self) -> tuple[int, ...]:
        return self._rows(self.x_run, [factor.x for factor in self.p.factors])

    @functools.cached_property
    def y_rows(self) -> tuple[int, ...]:
        return self._rows(self.y_run, [factor.y for factor in self.p.factors])

    def _rows(self, run: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
        rows = [i for i, extent in enumerate(self.tile) if extent > 1 and i not in run]
        return tuple(sorted(rows, key=lambda i: abs(strides[i])))

    def extents(self, factors: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.tile[i] for i in factors)

    @functools.cached_property
    def partial(self) -> frozenset[int]:
        """Factors that the last tile does not fill."""
        return frozenset(i for i, factor in enumerate(self.p.factors) if factor.extent % self.tile[i])

    @functools.cached_property
    def tiles(self) -> tuple[int, ...]:
        """Number of tiles along each factor."""
        return tuple(-(-factor.extent // extent) for factor, extent in zip(self.p.factors, self.tile))

    # ---- x: bytes of a run, distance of rows in shared memory

    @functools.cached_property
    def backwards(self) -> bool:
        """Whether a run of x is read backwards. Its lowest address then belongs to its last element."""
        return bool(self.x_run) and self.p.factors[self.x_run[0]].x < 0

    @functools.cached_property
    def x_span_bytes(self) -> int:
        """From the first byte of a run of x to its last, gaps included."""
        return (1 + sum((self.tile[i] - 1) * abs(self.p.factors[i].x) for i in self.x_run)) * self.p.element_bytes

    @functools.cached_property
    def x_start(self) -> int:
        """Offset in bytes of the lowest address of the first tile's first run."""
        first = self.x_run[0] if self.backwards else 0
        back = (self.tile[first] - 1) * self.p.factors[first].x if self.backwards else 0
        return (self.p.x_start + back) * self.p.element_bytes

    @functools.cached_property
    def x_unit(self) -> int:
        """Bytes, up to those of a load, of which the offsets of all runs of x are multiples."""
        return self._unit(self.load_bytes, self.x_start, self.x_rows, [factor.x for factor in self.p.factors])

    @functools.cached_property
    def y_unit(self) -> int:
        """Bytes, up to those of a store, of which the offsets of all runs of y are multiples."""
        start = self.p.y_start * self.p.element_bytes
        return self._unit(self.store_bytes, start, self.y_rows, [factor.y for factor in self.p.factors])

    def _unit(self, width: int, start: int, rows: Sequence[int], strides: Sequence[int]) -> int:
        steps = [strides[i] for i in rows]
        steps += [stride * extent for stride, extent, tiles in zip(strides, self.tile, self.tiles) if tiles > 1]
        return math.gcd(width, start, *(step * self.p.element_bytes for step in steps))

    @functools.cached_property
    def x_chunks(self) -> int:
        """Loads of a run."""
        return -(-(self.x_span_bytes + self.load_bytes - self.x_unit) // self.load_bytes)

    @functools.cached_property
    def pitch(self) -> int:
        """Bytes from row to row in shared memory."""
        return self.x_chunks * self.load_bytes

    @functools.cached_property
    def loads(self) -> int:
        """Loads of a tile."""
        return self.x_chunks * math.prod(self.extents(self.x_rows))

    @functools.cached_property
    def shared_bytes(self) -> int:
        octet, nbytes = 8 * CHUNK_BYTES, self.pitch * math.prod(self.extents(self.x_rows))
        if self.linear:
            last = sum((self.tile[i] - 1) * self.shared_strides[i] for i in self.x_rows)
            nbytes = last + self.pitch + self.load_bytes - self.x_unit
        return -(-nbytes // octet) * octet

    @functools.cached_property
    def shared_strides(self) -> tuple[int, ...]:
        """Distance in shared memory, in bytes, of neighbours along each factor."""
        strides, apart = [0] * len(self.tile), self.pitch
        for i in self.x_run:
            strides[i] = self.p.factors[i].x * self.p.element_bytes
        for i in self.x_rows:
            if self.linear:
                apart += (self.p.factors[i].x * self.p.element_bytes - apart) % self.load_bytes
            strides[i] = apart
            apart *= self.tile[i]
        return tuple(strides)

    @functools.cached_property
    def shared_start(self) -> int:
        """Offset in its row of the first element of a run."""
        return self.x_span_bytes - self.p.element_bytes if self.backwards else 0

    # ---- y

    @functools.cached_property
    def run_elements(self) -> int:
        """Elements of a run of y."""
        return math.prod(self.extents(self.y_run))

    @functools.cached_property
    def y_chunks(self) -> int:
        """Stores of a run."""
        run_bytes = self.run_elements * self.p.element_bytes
        return -(-(run_bytes + self.store_bytes - self.y_unit) // self.store_bytes)

    @functools.cached_property
    def stores(self) -> int:
        """Stores of a tile."""
        return self.y_chunks * math.prod(self.extents(self.y_rows))

    @functools.cached_property
    def partial_vectors(self) -> bool:
        """Whether some vector of y has elements that the tile does not have, so that it is stored in parts."""
        vector = self.store_bytes // self.p.element_bytes
        ragged = any(self.p.factors[i].axis >= 0 and self.ends(self.p.factors[i].axis) for i in self.y_run)
        return self.y_unit < self.store_bytes or any(end % vector for end in self.run_ends) or ragged

    @functools.cached_property
    def run_ends(self) -> tuple[int, ...]:
        """Elements of a run of y: of a full tile, and of the last one if that is not full."""
        last = self.y_run[-1] if self.y_run else None
        if last not in self.partial:
            return (self.run_elements,)
        inner = self.run_elements // self.tile[last]
        return self.run_elements, self.p.factors[last].extent % self.tile[last] * inner

    def ends(self, axis: int) -> bool:
        """Whether y ends along a ragged axis before its factors do."""
        own = [factor for factor in self.p.factors if factor.axis == axis]
        return self.p.ragged[axis].written < 1 + sum((factor.extent - 1) * factor.unit for factor in own)

    # ---- segments of a run of y

    @functools.cached_property
    def linear(self) -> bool:
        """Whether vectors of y are collected by segments (`segment`), which is for elements of one byte.

        Rows in shared memory are then as far apart as in x, apart from multiples of `load_bytes`: what the first of them is
        away from its aligned address, all are, and an element's place is linear in its digits.
        """
        return self.p.element_bytes == 1 and not self.p.ragged and self.across == 1

    @functools.cached_property
    def segment(self) -> tuple[int, int]:
        """Streams and length of a segment of a run of y: element m of it is element m // streams of stream m % streams.

        The elements of a stream are equally far apart. A short first digit of the run makes streams, such as the columns of
        blocks of pixels. The digits after them are those of segments.
        """
        extents = self.extents(self.y_run) or (1,)
        if len(extents) > 1 and extents[0] <= _MOST_STREAMS:
            return extents[0], extents[1]
        return 1, extents[0]

    @functools.cached_property
    def segment_ends(self) -> int:
        """How many ends of segments a vector of y may go beyond."""
        elements = math.prod(self.segment)
        return -(-(self.store_bytes - 1) // elements) if self.run_elements > elements else 0

    # ---- several vectors of a thread

    @functools.cached_property
    def across_bytes(self) -> int:
        """Bytes of a run of x that a thread may read at once, for vectors of as many rows of y; 0: single elements only."""
        if self.across == 1:
            return replace(self, across=2).across_bytes
        if not self.x_run or self.backwards or self.p.ragged or self.partial_vectors or self.x_unit < self.load_bytes:
            return 0
        first, element = self.x_run[0], self.p.element_bytes
        if self.p.factors[first].x != 1 or first not in self.y_rows or self.run_elements * element < _LEAST_RUN_BYTES:
            return 0
        others = [stride for i, stride in enumerate(self.shared_strides) if i != first and self.tile[i] > 1]
        return math.gcd(CHUNK_BYTES, self.tile[first] * element, self.p.factors[first].extent * element, *others)

    def row_step(self, factor: int) -> int:
        """How many rows of y along a factor a thread stores at once."""
        return self.across if self.across > 1 and factor == self.x_run[0] else 1

    @functools.cached_property
    def y_row_counts(self) -> tuple[int, ...]:
        """Extents of the rows of y, counted in those that one thread stores."""
        return tuple(self.tile[i] // self.row_step(i) for i in self.y_rows)

    @functools.cached_property
    def items(self) -> int:
        """Parts of a tile that threads share: a vector of y from each of `across` rows."""
        return self.stores // self.across

    # ---- the swizzle

    @functools.cached_property
    def swizzle(self) -> int:
        """Chunk c of shared memory lies at place c ^ (c >> swizzle & 7); 0: at place c."""
        return self._best[1]

    @functools.cached_property
    def wavefronts(self) -> float:
        """Cycles of shared memory for each part of y that the sampled warps store with one vector for each thread."""
        return self._best[0] / self.across

    def cycles(self) -> float:
        """An estimate of what the sampled warps take to collect and store: shared memory or instructions, and a part of the
        other.
        """
        vectors = CHUNK_BYTES // self.store_bytes
        elements = self.store_bytes // self.p.element_bytes
        if self.linear:
            each = _LINEAR_INSTRUCTIONS + (_SWIZZLE_INSTRUCTIONS if self.swizzle else 0)
            per_vector: float = _SEGMENT_INSTRUCTIONS + each * elements
        elif self.across == 1:
            per_vector = _VECTOR_INSTRUCTIONS + _ELEMENT_INSTRUCTIONS * elements
        else:
            per_vector = (_VECTOR_INSTRUCTIONS + _READ_INSTRUCTIONS * elements) / self.across + _TURN_INSTRUCTIONS
        issue = _SAMPLED_WARPS * vectors * per_vector / _ISSUED_PER_CYCLE
        return max(issue, self.wavefronts) + min(issue, self.wavefronts) / 4

    @functools.cached_property
    def _best(self) -> tuple[int, int]:
        places = self._sampled_places()
        nbytes = self.across * self.p.element_bytes
        found = [(_wavefronts(_swizzled(places, shift), nbytes), shift) for shift in (0, *_SWIZZLES)]
        extra = len(places) * _SWIZZLE_INSTRUCTIONS // _ISSUED_PER_CYCLE if self.linear else 0  # what a swizzle has to save
        return min(found, key=lambda each: (each[0] + (extra if each[1] else 0), each[1]))

    def _sampled_places(self) -> Ints:
        """(access, lane): the bytes of shared memory that warps collect together."""
        element = self.p.element_bytes
        warps = min(_SAMPLED_WARPS * CHUNK_BYTES // self.store_bytes, -(-self.items // _LANES))
        items = np.arange(warps * _LANES) % self.items
        rows, chunks = np.divmod(items, self.y_chunks)
        of_row = _sums(rows, self.y_row_counts, [self.shared_strides[i] * self.row_step(i) for i in self.y_rows])
        found = []
        for j in range(self.store_bytes // element):
            e = (chunks * (self.store_bytes // element) + j) % self.run_elements
            of_run = _sums(e, self.extents(self.y_run), [self.shared_strides[i] for i in self.y_run])
            found.append((self.shared_start + of_row + of_run).reshape(warps, _LANES))
        return np.concatenate(found)


def _run(factors: Sequence[Factor], tile: Sequence[int], strides: Sequence[int], gap: int) -> tuple[int, ...]:
    found: list[int] = []
    following = 0
    for i in sorted(range(len(factors)), key=lambda i: abs(strides[i])):
        if factors[i].extent == 1:
            continue
        fits = strides[i] == following if found else (abs(strides[i]) <= gap and (gap > 1 or strides[i] == 1))
        if not fits or tile[i] == 1:
            break
        found.append(i)
        following = strides[i] * factors[i].extent
        if tile[i] < factors[i].extent or strides[i] < 0:
            break
    return tuple(found)


def _sums(numbers: Ints, extents: Sequence[int], weights: Sequence[int]) -> Ints:
    """The sums of the numbers' digits times weights."""
    total = np.zeros_like(numbers)
    for extent, weight in zip(extents, weights):
        numbers, digit = np.divmod(numbers, extent)
        total += digit * weight
    return total


def _swizzled(places: Ints, shift: int) -> Ints:
    chunks, within = np.divmod(places, CHUNK_BYTES)
    turned = chunks ^ (chunks >> shift & 7) if shift else chunks
    return np.asarray(turned * CHUNK_BYTES + within)


def _wavefronts(places: Ints, nbytes: int) -> int:
    """Cycles that accesses of `nbytes` take: each serves one word of every bank. Wide ones take turns, half a warp or a
    quarter at a time.
    """
    total, wide = 0, max(nbytes // _BANK_BYTES, 1)
    for access in places.reshape(-1, _LANES // wide) // _BANK_BYTES:
        words = np.unique(access[:, None] + np.arange(wide))
        total += int(np.bincount(words % _BANKS).max())
    return total
