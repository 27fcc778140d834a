"""Device operations of kernels on CUDA cores (`templates.parts.simt`) for the emulator; sums of integers are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import encode
from schedsearch.testing.emulator import Emulator

ONES = 0x01010101
WORD_BYTES = 4


class SimtEmulator(Emulator):
    """Stand-ins for `simt`, and for the parts of `ptx` that kernels on CUDA cores use besides those of `Emulator`."""

    ONES = ONES
    WORD_BYTES = WORD_BYTES

    def stand_in(self, monkeypatch: Any, *modules: Any) -> None:
        super().stand_in(monkeypatch, *modules)
        for module in modules:
            if hasattr(module, "simt"):
                monkeypatch.setattr(module, "simt", self)

    @staticmethod
    def divide_u32(a: int, b: int) -> int:
        return int(a) // int(b)

    # --- multiply ---------------------------------------------------------------------------------------------------
    def multiply_chunk(
        self, product: Any, rows: int, columns: int, row_distance: int, column_distance: int, row_sums: bool = False
    ) -> Callable[..., None]:
        a_type, b_type = _formats(product)

        def chunk(address: int, dtype: Any) -> np.ndarray[Any, Any]:
            return self._shared(int(address), 16).view(dtype)

        def multiply(sums: list[Any], *arguments: Any) -> None:
            *summed, a, b = arguments
            for row in range(rows):
                x = chunk(a + row * row_distance, a_type)
                for column in range(columns):
                    y = chunk(b + column * column_distance, b_type)
                    sums[row * columns + column] += _dot(x, y)
                if row_sums:
                    summed[0][row] += int(x.astype(np.int64).sum())

        return multiply

    @staticmethod
    def subtract_zero_points(rows: int, columns: int) -> Callable[..., None]:
        def subtract(
            sums: list[int], row_sums: list[int], column_sums: list[int], x_zero: int, weight_zero: int, count: int
        ) -> None:
            for row in range(rows):
                for column in range(columns):
                    correction = count * x_zero * weight_zero - x_zero * column_sums[column] - weight_zero * row_sums[row]
                    sums[row * columns + column] += correction

        return subtract

    @property
    def sum_of_elements(self) -> dict[str, Callable[..., int]]:
        def adder(dtype: str) -> Callable[..., int]:
            return lambda a, b, c, d, total: (
                total + int(np.array([a, b, c, d], np.uint32).view(dtype).astype(np.int64).sum())
            )

        return {dtype: adder(dtype) for dtype in ("int8", "uint8")}

    # --- load -------------------------------------------------------------------------------------------------------
    def load_words(self, words: int) -> Callable[..., Any]:
        def load(address: int, inside: Any, fill: int) -> Any:
            values = [fill] * words
            if inside:
                values = [int(word) for word in self.memory.at(address, 4 * words).view(np.uint32)]
            return values[0] if words == 1 else tuple(values)

        return load

    def load_bytes(self, *arguments: int) -> int:
        *addresses, count, inside, fill = arguments
        word = 0
        for number, address in enumerate(addresses):
            if number < count:
                byte = int(self.memory.at(address, 1)[0]) if inside else fill >> 8 * number & 255
                word |= byte << 8 * number
        return word

    # --- store ------------------------------------------------------------------------------------------------------
    def store_rows(
        self, product: Any, rows: int, columns: int, part_rows: int, row_bytes: int, column_bytes: int
    ) -> Callable[..., None]:
        def store(sums: list[Any], shared: int, part: int) -> None:
            for row in range(part_rows):
                for column in range(columns):
                    to = self._shared(shared + row * row_bytes + column * column_bytes, 4)
                    value = sums[(part * part_rows + row) * columns + column]
                    to[:] = _register(value, product.accumulator)

        return store

    def load_shared(self, words: int, accumulator: str) -> Callable[..., Any]:
        def load(shared: int) -> Any:
            values = self._shared(shared, 4 * words).view(accumulator)
            made = tuple(int(value) if accumulator == "int32" else value for value in values)
            return made[0] if words == 1 else made

        return load

    def store_global(
        self, words: int, dtype: str, accumulator: str, capability: tuple[int, int]
    ) -> Callable[..., None]:  # fmt: skip
        """Values are numbers, also where registers would hold the bits of floats."""

        def store(address: int, *values: Any) -> None:
            assert len(values) == words
            if dtype in ("int32", "uint32"):
                stored = np.array([int(value) % 2**32 for value in values], np.uint32)
            else:
                stored = encode(np.array(values, np.float64 if dtype in ("int8", "uint8") else np.float32), dtype)
            self.memory.at(address, stored.nbytes)[:] = stored.view(np.uint8)

        return store


def _formats(product: Any) -> tuple[str, str]:
    """NumPy dtypes of the elements of x and of the weight."""
    if product.elements == 1:
        return "float32", "float32"
    _, x, weight = product.instruction.split(".")
    return tuple({"s32": "int8", "u32": "uint8"}[each] for each in (x, weight))  # type: ignore[return-value]


def _dot(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Any:
    if x.dtype == np.float32:
        return np.float32(x.astype(np.float64) @ y.astype(np.float64))
    return int(x.astype(np.int64) @ y.astype(np.int64))


def _register(value: Any, accumulator: str) -> np.ndarray[Any, Any]:
    if accumulator == "float32":
        return np.array([value], np.float32).view(np.uint8)
    return np.array([int(value) % 2**32], np.uint32).view(np.uint8)
