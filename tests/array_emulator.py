"""The emulator of kernels over arrays of Numba: checked indices, atomic updates, and what lanes of a warp tell each other.

An index outside of an array raises, also below zero. Shared arrays and workspaces begin as a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent
from vector_emulator import VectorEmulator

from schedsearch.testing.emulator import Memory

WARP = 32
_EVERY_LANE = 0xFFFFFFFF


class Checked:
    """A flat array whose indices must lie inside."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.size = array, array.size

    def __len__(self) -> int:
        return self.size

    def _at(self, index: Any) -> int:
        at = int(index)
        assert 0 <= at < self.size, f"index {at} of {self.size} elements"
        return at

    def __getitem__(self, index: Any) -> Any:
        found = self.array[self._at(index)]
        return found if found.dtype.kind == "f" else int(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.array.dtype.kind in "iu":
            limits = np.iinfo(self.array.dtype)
            value = (int(value) - limits.min) % 2**limits.bits + limits.min
        self.array[self._at(index)] = value


class Type:
    """A type of Numba: a conversion in kernels, and the dtype of the arrays that they make."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, np.dtype(name)

    def __call__(self, value: Any) -> Any:
        if self.dtype.kind == "f":
            return self.dtype.type(value)
        limits = np.iinfo(self.dtype)
        return (int(value) - limits.min) % 2**limits.bits + limits.min


_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


class ArrayEmulator(VectorEmulator):
    """Stand-ins for `numba.cuda` and `numba.types`."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.types = SimpleNamespace(**{name: Type(name) for name in (*_INTEGERS, "float32", "float64")})
        stand_ins: dict[str, Any] = {
            "shared": SimpleNamespace(array=self._shared_array),
            "atomic": SimpleNamespace(
                add=self._atomic(lambda old, new: old + new), max=self._atomic(max), min=self._atomic(min)
            ),
            "grid": lambda _axes: self.block.index * self.block.size + self.thread.number,
            "syncwarp": lambda: self.block.exchange(None),
            "ballot_sync": self._ballot,
            "shfl_up_sync": lambda mask, value, step: self._lane(mask, value, lambda lane: lane - int(step)),
            "shfl_xor_sync": lambda mask, value, step: self._lane(mask, value, lambda lane: lane ^ int(step)),
            "shfl_sync": lambda mask, value, source: self._lane(mask, value, lambda lane: int(source)),
            "popc": lambda value: (int(value) % 2**64).bit_count(),
            "ffs": lambda value: (int(value) & -int(value)).bit_length(),
        }
        for name, stand_in in stand_ins.items():
            setattr(self.cuda, name, stand_in)

    def stand_in(self, monkeypatch: Any, *modules: Any) -> None:
        super().stand_in(monkeypatch, *modules)
        for module in modules:
            if hasattr(module, "note_index"):
                monkeypatch.setattr(module, "note_index", self._note_index)

    def _note_index(self, address: int, place: Any, index: Any) -> None:
        words = self.memory.at(address, 16, 8).view(np.int64)
        if not words[0]:
            words[:] = place, index

    def _shared_array(self, count: int, dtype: Type) -> Checked:
        """The n-th array that a thread asks for is the n-th of its block; one without a length is dynamic memory."""
        thread = self.thread
        place = thread.__dict__.setdefault("asked", 0)
        thread.asked += 1
        arrays = self.block.__dict__.setdefault("arrays", [])
        if place == len(arrays):
            size = count or self.block.shared.size // dtype.dtype.itemsize
            arrays.append(Checked(np.frombuffer(b"\x5a" * (size * dtype.dtype.itemsize), dtype.dtype).copy()))
        found: Checked = arrays[place]
        return found

    @staticmethod
    def _atomic(combine: Callable[[Any, Any], Any]) -> Callable[[Checked, Any, Any], Any]:
        def update(array: Checked, index: Any, value: Any) -> Any:
            old = array[index]
            array[index] = combine(old, value)
            return old

        return update

    def _ballot(self, mask: int, vote: Any) -> int:
        assert mask == _EVERY_LANE
        total: int = self.block.exchange(bool(vote), lambda votes: sum(1 << lane for lane, each in enumerate(votes) if each))
        return total

    def _lane(self, mask: int, value: Any, source: Callable[[int], int]) -> Any:
        """As `shfl.sync`: a lane without a source keeps its own value."""
        assert mask == _EVERY_LANE
        lane = getcurrent().number % WARP
        found = self.block.exchange(value)
        at = source(lane)
        return found[at] if 0 <= at < WARP else value

    def run(
        self,
        step: Any,
        buffers: Mapping[str, int],
        sms: int,
        tensors: Mapping[str, Any] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """As `Emulator.run`; arrays are of one axis without gaps."""

        def argument(param: Any) -> Any:
            if param.kind == "pointer":
                return buffers.get(param.buffer, 0) if param.optional else buffers[param.buffer]
            if param.kind != "array":
                return param.value
            (size,), dtype = param.shape, np.dtype(param.dtype)
            return Checked(self.memory.at(buffers[param.buffer], size * dtype.itemsize, dtype.itemsize).view(dtype))

        arguments = [argument(param) for param in step.params]
        self.grid = step.grid.blocks(sms, step.cluster)
        with np.errstate(all="ignore"):
            for index in range(self.grid):
                self.run_blocks(step, arguments, (index,))
