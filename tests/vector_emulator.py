"""The emulator of kernels that compute on vectors: stand-ins for `schedsearch.templates.parts.vectors` and what it uses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from moves_emulator import MovesEmulator

from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.testing.emulator import Memory

_OPERATIONS = ("float_of", "bits_of", "halves", "nearest_integer", "larger", "power_of_two", "reciprocal", "from_lane")


class VectorEmulator(MovesEmulator):
    """Emulates conversions between words and float32, exchanges in a warp, and one static array in shared memory."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        emulator = self

        def shared_array(count: int, _type: Any) -> Any:
            block = emulator.block
            if not hasattr(block, "static_array"):
                block.static_array = np.full(count, np.nan, np.float32)
            return block.static_array

        self.cuda.shared = SimpleNamespace(array=shared_array)

    def stand_in(self, monkeypatch: Any, *modules: Any) -> None:
        super().stand_in(monkeypatch, *modules)
        for module in modules:
            for name in _OPERATIONS:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))

    @staticmethod
    def float_of(word: int) -> Any:
        return np.uint32(word).view(np.float32)

    @staticmethod
    def bits_of(value: Any) -> int:
        return int(np.float32(value).view(np.uint32))

    @staticmethod
    def halves(dtype: str) -> Callable[[int], tuple[Any, Any]]:
        def both(word: int) -> tuple[Any, Any]:
            stored = np.array([word], np.uint32).view(dtype_of(dtype).storage)
            low, high = decode(stored, dtype).astype(np.float32)
            return low, high

        return both

    @staticmethod
    def nearest_integer(value: Any) -> int:
        return 0 if np.isnan(value) else int(np.clip(np.rint(np.float64(value)), -(2.0**31), 2.0**31 - 1))

    @staticmethod
    def larger(a: Any, b: Any) -> Any:
        return np.maximum(np.float32(a), np.float32(b))

    @staticmethod
    def power_of_two(x: Any) -> Any:
        return np.exp2(np.float32(x))

    @staticmethod
    def reciprocal(x: Any) -> Any:
        return np.float32(1) / np.float32(x)

    def from_lane(self, value: Any, distance: int) -> Any:
        lane = self.thread.number % 32
        return self.block.exchange(value)[lane ^ int(distance)]

    def pack_pair(self, dtype: str, accumulator: str = "float32") -> Callable[..., int]:
        def pack(low: Any, high: Any) -> int:
            return int(encode(np.array([low, high], np.float32), dtype).view(np.uint32)[0])

        return pack
