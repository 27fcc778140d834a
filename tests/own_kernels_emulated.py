"""Runs the launches of a tunable thread by thread without a GPU: `numba.cuda` is replaced by NumPy and greenlets.

Indices are checked: one outside its array raises, also below zero. Shared memory and outputs begin as NaN or as a pattern.
"""

from __future__ import annotations

import math
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent

from schedsearch.ops.own_kernel import arguments_of
from schedsearch.testing.emulator import Block
from schedsearch.testing.kernel_threads import KernelThread, Threads
from schedsearch.workload import Workload


class Checked:
    """An array whose indices must lie inside."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.shape, self.size = array, array.shape, array.size

    def _at(self, index: Any) -> Any:
        places = index if isinstance(index, tuple) else (index,)
        assert len(places) == len(self.shape), f"{len(places)} indices for {len(self.shape)} axes"
        found = tuple(int(place) for place in places)
        assert all(0 <= place < extent for place, extent in zip(found, self.shape)), f"index {found} of {self.shape}"
        return found

    def __getitem__(self, index: Any) -> Any:
        return Checked(self.array[index]) if isinstance(index, slice) else self.array[self._at(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[self._at(index)] = value

    def view(self, dtype: Any) -> Checked:
        return Checked(self.array.view(dtype))


class Cuda:
    """Stands in for the module `numba.cuda`."""

    def __init__(self, seed: int) -> None:
        self.threads = Threads(seed)
        self.shared = SimpleNamespace(array=self._shared)
        self.local = SimpleNamespace(array=lambda shape, dtype: Checked(_unwritten(shape, dtype)))
        self.atomic = SimpleNamespace(add=self._add)

    @staticmethod
    def _place(index: int, extents: tuple[int, int, int]) -> Any:
        x, y, _ = extents
        return SimpleNamespace(x=index % x, y=index // x % y, z=index // (x * y))

    @property
    def threadIdx(self) -> Any:
        return self._place(getcurrent().number, self.block_extents)

    @property
    def blockIdx(self) -> Any:
        return self._place(getcurrent().block.index, self.grid_extents)

    @property
    def blockDim(self) -> Any:
        return SimpleNamespace(x=self.block_extents[0], y=self.block_extents[1], z=self.block_extents[2])

    @property
    def gridDim(self) -> Any:
        return SimpleNamespace(x=self.grid_extents[0], y=self.grid_extents[1], z=self.grid_extents[2])

    def grid(self, axes: int) -> Any:
        block, thread, extents = self.blockIdx, self.threadIdx, self.block_extents
        found = (block.x * extents[0] + thread.x, block.y * extents[1] + thread.y, block.z * extents[2] + thread.z)
        return found[0] if axes == 1 else found[:axes]

    def syncthreads(self) -> None:
        getcurrent().block.meet("syncthreads", getcurrent().block.size)

    def shfl_xor_sync(self, mask: int, value: Any, step: int) -> Any:
        assert mask == 0xFFFFFFFF
        return getcurrent().block.exchange(value)[getcurrent().number % 32 ^ step]

    def _shared(self, shape: Any, dtype: Any) -> Checked:
        """The n-th array that a thread asks for is the n-th of its block."""
        thread = getcurrent()
        count = thread.__dict__.setdefault("arrays", 0)
        thread.arrays += 1
        arrays = thread.block.__dict__.setdefault("arrays", [])
        if count == len(arrays):
            array = _unwritten(shape or (thread.block.shared.size // _numpy(dtype).itemsize,), dtype)
            arrays.append(Checked(array))
        return arrays[count]

    @staticmethod
    def _add(array: Checked, index: Any, value: Any) -> None:
        array[index] = array[index] + value

    def run(self, function: FunctionType, arguments: list[Any], extents: Any, sms: int) -> None:
        self.grid_extents, self.block_extents = extents.grid, extents.block
        blocks = math.prod(extents.grid)
        if extents.blocks_per_sm:
            blocks = min(blocks, sms * extents.blocks_per_sm)
            self.grid_extents = blocks, 1, 1
        body = _with_cuda(function, self)
        for index in range(blocks):
            block = Block(self.threads, math.prod(extents.block), extents.shared, index)
            threads = [KernelThread(lambda: body(*arguments), number, block) for number in range(block.size)]
            self.threads.run(threads)


def _numpy(dtype: Any) -> Any:
    return np.dtype(getattr(dtype, "name", dtype))


def _unwritten(shape: Any, dtype: Any) -> Any:
    kind = _numpy(dtype)
    return np.full(shape, np.nan if kind.kind == "f" else 0x55, kind)


def _with_cuda(function: FunctionType, cuda: Cuda) -> FunctionType:
    """The function, and those of its module that it calls, with stand-ins for the names of Numba."""
    names = {
        "cuda": cuda,
        "libdevice": SimpleNamespace(fmaxf=np.fmax),
        **{name: getattr(np, name) for name in ("float32", "int32", "uint32", "uint64")},
    }
    scope = dict(function.__globals__)
    for name, value in scope.items():
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            names[name] = FunctionType(value.__code__, scope, name, value.__defaults__, value.__closure__)
    scope.update({name: value for name, value in names.items() if name in scope})
    return FunctionType(function.__code__, scope, function.__name__, None, function.__closure__)


def outputs(workload: Workload, definition: Any, config: dict[str, Any], arrays: dict[str, Any], seed: int, sms: int) -> Any:
    """The outputs of one configuration, by name, from the input arrays (and in-place arrays) by name."""
    planned = definition.plan(workload, config)
    given = {name: Checked(array.copy()) for name, array in arrays.items()}
    for each in arguments_of(workload.params):
        if each.role == "out":
            given[each.name] = Checked(_unwritten(each.shape, each.dtype))
    given |= {name: Checked(_unwritten(each.shape, each.dtype)) for name, each in planned.workspaces.items()}
    for launch, extents in planned.launches:
        arguments = [given[name] for name in launch.parameters] + [config[name] for name in launch.knobs]
        with np.errstate(all="ignore"):
            Cuda(seed).run(launch.positional, arguments, extents, sms)
    return {each.name: given[each.name].array for each in arguments_of(workload.params) if each.role in ("out", "inout")}
