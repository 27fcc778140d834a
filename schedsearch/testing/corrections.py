"""Stand-ins for `templates.parts.zero_points`: what kernels of int8 subtract for the zero points of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.testing.memory import Memory
from schedsearch.typed import DeviceFunction


class Corrections:
    """The functions of the part by their names; sums come from tables in `memory`."""

    NAMES = ("correct_fragments", "correct_transposed", "correct_values")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def _zero_sums(self, table: int, entry: int, count: int) -> list[int]:
        return [int(each) for each in self.memory.at(table + 4 * entry, 4 * count).view(np.int32)]

    def correct_fragments(self, octets: int, interleaved: bool) -> Callable[..., None]:
        """Each octet, or two interleaved ones, has neighbours of two rows."""
        count, step = (4, 2) if interleaved else (2, 1)

        def correct(
            acc: list[int], columns: int, place: int, place_8: int, k: int, table: int, zero_point: float
        ) -> None:  # fmt: skip
            for octet in range(0, octets, step):
                if 8 * octet < columns:
                    for row, at in enumerate((place, place_8)):
                        zero_sums = self._zero_sums(table, at + k + 8 * octet, count)
                        for number, zero_sum in enumerate(zero_sums):
                            place_in_octets = 4 * (number % step) + number // step if interleaved else number
                            acc[4 * octet + 2 * row + place_in_octets] -= round(zero_point) * zero_sum

        return correct

    def correct_transposed(self, octets: int, tile: Any, of_rows: Any, of_columns: Any, k_all: int) -> Callable[..., None]:
        """Each octet has two neighbouring positions of two channels."""

        def correct(
            acc: list[int], channels: int, rows: int, columns: int, position: int, row: int, column: int, k: int,
            table: int, zero_point: float,
        ) -> None:  # fmt: skip
            for number in range(4 * octets):
                down, right = divmod(8 * (number // 4) + position + number % 2, tile.patch_w)
                second = number // 2 % 2 * tile.second
                if down < rows and right < columns and second < channels:
                    place = of_rows.of_position(row + down) * of_columns.count + of_columns.of_position(column + right)
                    (zero_sum,) = self._zero_sums(table, place * k_all + k + second, 1)
                    acc[number] -= round(zero_point) * zero_sum

        return correct

    def correct_values(self, count: int) -> DeviceFunction:
        def correct(*arguments: Any) -> Any:
            values, (valid, place, k, table, zero_point) = arguments[:count], arguments[count:]
            zero_sums = self._zero_sums(table, place + k, count) if valid else [0] * count
            corrected = tuple(value - round(zero_point) * each for value, each in zip(values, zero_sums))
            return corrected if count > 1 else corrected[0]

        return correct
