"""The emulator of kernels that move vectors of 1 to 16 bytes: stand-ins for `schedsearch.templates.parts.moves`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.testing.emulator import Emulator, Memory


class MovesEmulator(Emulator):
    """Emulates loads, stores and byte permutations; an address that is not aligned to its access raises.

    Args:
        late_copies: whether cp.async writes shared memory as late as its waits allow, or at once.
    """

    def __init__(self, memory: Memory, late_copies: bool = False) -> None:
        super().__init__(memory, lambda value, *_: value, late_copies)

    def stand_in(self, monkeypatch: Any, *modules: Any) -> None:
        super().stand_in(monkeypatch, *modules)
        for module in modules:
            if hasattr(module, "moves"):
                monkeypatch.setattr(module, "moves", self)

    @staticmethod
    def words_of(nbytes: int) -> int:
        return max(nbytes // 4, 1)

    def load_global(self, nbytes: int, written: bool = False) -> Callable[..., None]:
        def load(words: Any, at: int, address: int, valid: int) -> None:
            _to_words(words, at, self.memory.at(address, nbytes) if valid else np.zeros(nbytes, np.uint8))

        return load

    def load_shared(self, nbytes: int) -> Callable[..., None]:
        def load(words: Any, at: int, shared: int) -> None:
            _to_words(words, at, self._shared(shared, nbytes))

        return load

    def store_global(self, nbytes: int, streaming: bool = False) -> Callable[..., None]:
        def store(words: Any, at: int, address: int) -> None:
            self.memory.at(address, nbytes)[:] = _from_words(words, at, nbytes)

        return store

    def store_shared(self, nbytes: int) -> Callable[..., None]:
        def store(words: Any, at: int, shared: int) -> None:
            self._shared(shared, nbytes)[:] = _from_words(words, at, nbytes)

        return store

    def permute_bytes(self, selector: int) -> Callable[[int, int], int]:
        def permute(a: int, b: int) -> int:
            choice = (int(a) | int(b) << 32).to_bytes(8, "little")
            return int.from_bytes(bytes(choice[selector >> 4 * i & 7] for i in range(4)), "little")

        return permute


def _to_words(words: Any, at: int, data: np.ndarray[Any, Any]) -> None:
    whole = np.zeros(-(-data.size // 4) * 4, np.uint8)
    whole[: data.size] = data
    for number, word in enumerate(whole.view(np.uint32)):
        words[at + number] = int(word)


def _from_words(words: Any, at: int, nbytes: int) -> np.ndarray[Any, Any]:
    taken = np.array([int(word) for word in words[at : at + -(-nbytes // 4)]], np.uint32)
    return taken.view(np.uint8)[:nbytes]
