"""Device operations of `templates.parts.row_mma` for the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import decode, encode
from schedsearch.testing.emulator import Emulator


class RowEmulator(Emulator):
    """Stand-ins for `row_mma`. Fragments are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16"."""

    def stand_in(self, monkeypatch: Any, *modules: Any) -> None:
        super().stand_in(monkeypatch, *modules)
        for module in modules:
            if hasattr(module, "row_mma"):
                monkeypatch.setattr(module, "row_mma", self)

    def _words(self, address: int) -> list[int]:
        return [int(word) for word in self.memory.at(address, 8).view(np.uint32)]

    def load_row(self, tile: Any) -> Callable[..., None]:
        def load(row: list[int], address: int, mask: int) -> None:
            for tap in range(tile.taps_w):
                for part in range(tile.slices):
                    for i in range(tile.pixel_tiles):
                        first = 4 * ((tap * tile.slices + part) * tile.pixel_tiles + i)
                        for half in range(2):
                            inside = int(mask) >> (2 * (tap * tile.pixel_tiles + i) + half) & 1
                            at = int(address) + (tap + 16 * i + 8 * half) * tile.slices * 32 + 32 * part
                            row[first + half], row[first + half + 2] = self._words(at) if inside else (0, 0)

        return load

    def load_weights(self, tile: Any) -> Callable[..., None]:
        fragments = tile.taps_h * tile.taps_w * tile.slices

        def load(weights: list[int], address: int, columns: int) -> None:
            for number in range(fragments):
                for j in range(tile.column_tiles):
                    at = int(address) + (8 * j * fragments + number) * 32
                    first = 2 * (number * tile.column_tiles + j)
                    weights[first : first + 2] = self._words(at) if columns > 8 * j else [0, 0]

        return load

    def multiply_row(self, tile: Any) -> Callable[..., None]:
        def values(words: list[int]) -> Any:
            return decode(np.array(words, np.uint32).view(np.uint16), tile.dtype).astype(np.float32)

        def product(lanes: list[tuple[list[int], list[int]]]) -> Any:
            """(slots, 16 * pixel_tiles, 8 * column_tiles): what the row adds to each slot of the window."""
            found = np.zeros((tile.taps_h, 16 * tile.pixel_tiles, 8 * tile.column_tiles), np.float32)
            for slot in range(tile.taps_h):
                for number in range(tile.taps_w * tile.slices):
                    of_weights = (tile.taps_h - 1 - slot) * tile.taps_w * tile.slices + number
                    for i in range(tile.pixel_tiles):
                        for j in range(tile.column_tiles):
                            a, b = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
                            for lane, (row, weights) in enumerate(lanes):
                                g, t = divmod(lane, 4)
                                at_a = 4 * (number * tile.pixel_tiles + i)
                                at_b = 2 * (of_weights * tile.column_tiles + j)
                                for q in range(4):
                                    k = 2 * t + 8 * (q // 2)
                                    a[g + 8 * (q % 2), k : k + 2] = values(row[at_a + q : at_a + q + 1])
                                for q in range(2):
                                    b[2 * t + 8 * q : 2 * t + 8 * q + 2, g] = values(weights[at_b + q : at_b + q + 1])
                            found[slot, 16 * i : 16 * i + 16, 8 * j : 8 * j + 8] += a @ b
            return found

        def multiply(sums: list[Any], row: list[int], weights: list[int]) -> None:
            added = self.block.exchange((list(row), list(weights)), product)
            g, t = divmod(self.thread.number % 32, 4)
            moved = [*sums[tile.slot_sums : tile.sums], *[np.float32(0)] * tile.slot_sums]
            for slot in range(tile.taps_h):
                for i in range(tile.pixel_tiles):
                    for j in range(tile.column_tiles):
                        for q in range(4):
                            at = slot * tile.slot_sums + 4 * (i * tile.column_tiles + j) + q
                            value = added[slot, 16 * i + g + q // 2 * 8, 8 * j + 2 * t + q % 2]
                            sums[at] = moved[at] + value

        return multiply

    def prefetch(self, address: int, valid: int) -> None:
        if valid:
            self.memory.at(address, 2)

    def store_element(self, dtype: str) -> Callable[..., None]:
        def store(address: int, value: Any) -> None:
            stored = encode(np.array([value], np.float32), dtype)
            self.memory.at(address, stored.nbytes)[:] = stored.view(np.uint8)

        return store
