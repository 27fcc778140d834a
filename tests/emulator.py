"""Runs a CUDA template's kernel without a GPU: every thread of a block is a Python thread, device operations are NumPy.

The kernels are plain Python functions over `cuda.threadIdx`, `types` casts and device operations. Here those names are
replaced by stand-ins with the same meaning, so that index maps, masks and synchronisation are tested as written. Memory
accesses are checked: outside a buffer or misaligned raises. Asynchronous copies land either at once or as late as the
waits allow, so that a wait or a barrier that is missing shows in one of the two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

FLOATS = {"float16": np.float16, "float32": np.float32}
_GAP = 1 << 20  # unmapped bytes between buffers


class Memory:
    """A 64-bit address space of separate buffers."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, np.ndarray[Any, Any]]] = []
        self._next = 1 << 40

    def add(self, array: np.ndarray[Any, Any]) -> int:
        address, data = self._next, array.reshape(-1).view(np.uint8)
        self._buffers.append((address, data))
        self._next += (data.nbytes + _GAP) // 256 * 256 + 256
        return address

    def at(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        address = int(address) % 2**64
        for start, data in self._buffers:
            if start <= address and address + nbytes <= start + data.nbytes:
                assert (address - start) % nbytes == 0, f"misaligned access of {nbytes} bytes at {address:#x}"
                return data[address - start : address - start + nbytes]
        raise AssertionError(f"access of {nbytes} bytes outside every buffer, at {address:#x}")


class Block:
    """The shared memory, barriers and lanes of one thread block."""

    def __init__(self, threads: int, shared_bytes: int) -> None:
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)  # NaN: what was not written shows
        self.barrier = threading.Barrier(threads)
        self.warps = [threading.Barrier(32) for _ in range(threads // 32)]
        self.lanes = [[()] * 32 for _ in range(threads // 32)]
        self.local = threading.local()

    def exchange(self, value: Any) -> list[Any]:
        """What all lanes of the calling warp passed."""
        warp, lane = divmod(self.local.thread, 32)
        self.warps[warp].wait()
        self.lanes[warp][lane] = value
        self.warps[warp].wait()
        return self.lanes[warp]


def _cast(dtype: Any) -> Callable[[Any], Any]:
    bits, signed = np.dtype(dtype).itemsize * 8, np.dtype(dtype).kind == "i"

    def cast(value: Any) -> int:
        value = int(value) % 2**bits
        return value - 2**bits if signed and value >= 2 ** (bits - 1) else value

    return cast


TYPES = SimpleNamespace(
    int32=_cast(np.int32), int64=_cast(np.int64), uint32=_cast(np.uint32), uint64=_cast(np.uint64), float32=np.float32
)


class Emulator:
    """Stand-ins for what a kernel of mma.sync type uses; `run` executes a kernel step over buffers."""

    def __init__(self, memory: Memory, epilogue: Callable[..., Any], late_copies: bool) -> None:
        self.memory = memory
        self.late_copies = late_copies
        self.block: Block
        self.block_index = 0
        self.grid = 1
        emulator = self

        class Cuda:
            local = SimpleNamespace(array=lambda count, _type: [0] * count)

            @property
            def threadIdx(self) -> Any:
                return SimpleNamespace(x=emulator.block.local.thread)

            @property
            def blockIdx(self) -> Any:
                return SimpleNamespace(x=emulator.block_index)

            @property
            def gridDim(self) -> Any:
                return SimpleNamespace(x=emulator.grid)

            def syncthreads(self) -> None:
                emulator.block.barrier.wait()

        self.cuda = Cuda()
        self.types = TYPES
        self.pair = lambda v0, v1, valid, k, offset, *params: tuple(
            epilogue(v, k + i, offset + i, *params) for i, v in enumerate((v0, v1))
        )
        self.single = epilogue

    def shared_base(self) -> int:
        return 0

    # --- device operations ------------------------------------------------------------------------------------------
    def copy(self, nbytes: int) -> Callable[..., None]:
        def copy(shared: int, address: int, count: int) -> None:
            assert count in (0, nbytes)
            to = self._shared(shared, nbytes)
            data = self.memory.at(address, nbytes) if count else np.zeros(nbytes, np.uint8)
            if self.late_copies and nbytes > 2:
                self.block.local.open.append((to, data))
            else:
                to[:] = data

        return copy

    cp_async = copy

    def _shared(self, at: int, nbytes: int) -> np.ndarray[Any, Any]:
        assert at >= 0 and at + nbytes <= self.block.shared.nbytes, f"shared access at {at}"
        assert at % nbytes == 0, f"misaligned shared access of {nbytes} bytes at {at}"
        return self.block.shared[at : at + nbytes]

    def cp_async_wait(self, groups: int) -> Callable[[], None]:
        def wait() -> None:
            pending = self.block.local.groups
            while len(pending) > groups:
                for to, data in pending.pop(0):
                    to[:] = data

        return wait

    def cp_async_commit(self) -> None:
        self.block.local.groups.append(self.block.local.open)
        self.block.local.open = []

    def _ldmatrix(self, addresses: list[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Four 8x8 matrices: (4, 8, 8); matrix q's row r is at the address of lane 8 q + r."""
        return np.array([self._shared(a, 16).view(dtype) for a in addresses]).reshape(4, 8, 8).astype(np.float32)

    def mma_warp_tile(self, wm: int, wn: int, row_bytes: int, dtype: str) -> Callable[..., None]:
        def multiply(acc: list[Any], a: int, b: int) -> None:
            lanes = self.block.exchange((a, b))
            lane = self.block.local.thread % 32
            rows = []
            for i in range(wm // 16):  # PTX ISA, m16n8k16: a0 upper left, a1 lower left, a2 upper right, a3 lower right
                q = self._ldmatrix([at + i * 16 * row_bytes for at, _ in lanes], FLOATS[dtype])
                rows.append(np.block([[q[0], q[2]], [q[1], q[3]]]))
            columns = []
            for j in range(wn // 16):  # b0 is k 0-7 and b1 k 8-15 of eight columns; the next two of the next eight
                q = self._ldmatrix([at + j * 16 * row_bytes for _, at in lanes], FLOATS[dtype])
                columns.append(np.block([[q[0], q[1]], [q[2], q[3]]]))
            product = np.concatenate(rows) @ np.concatenate(columns).T
            for i in range(wm // 16):
                for j in range(wn // 8):
                    for c in range(4):
                        at = product[i * 16 + lane // 4 + c // 2 * 8, j * 8 + lane % 4 * 2 + c % 2]
                        acc[4 * (i * (wn // 8) + j) + c] += at

        return multiply

    def store_warp_tile(self, wm: int, wn: int, row_bytes: int) -> Callable[..., None]:
        def store(acc: list[Any], shared: int) -> None:
            for i in range(wm // 16):
                for j in range(wn // 8):
                    for half in range(2):
                        first = 4 * (i * (wn // 8) + j) + 2 * half
                        to = self._shared(shared + (i * 16 + half * 8) * row_bytes + j * 32, 8)
                        to.view(np.float32)[:] = acc[first : first + 2]

        return store

    def store_shared_v4(self, shared: int, *values: int) -> None:
        self._shared(int(shared), 16).view(np.uint32)[:] = values

    def load_shared_f32(self, shared: int) -> Any:
        return self._shared(shared, 4).view(np.float32)[0]

    def load_shared_f32x2(self, shared: int) -> Any:
        return tuple(self._shared(shared, 8).view(np.float32))

    def pack_pair(self, dtype: str) -> Callable[..., int]:
        return lambda low, high: int(np.array([low, high], FLOATS[dtype]).view(np.uint32)[0])

    def load_run(self, piece: int) -> Callable[..., tuple[int, ...]]:
        def load(address: int, first: int, stop: int) -> tuple[int, ...]:
            assert piece == 1 or first % 2 == stop % 2 == 0
            run = np.zeros(8, np.uint16)
            for element in range(0, 8, piece):
                if first <= element < stop:
                    piece_bytes = self.memory.at(address + 2 * element, 2 * piece)
                    run[element : element + piece] = piece_bytes.view(np.uint16)
            return tuple(int(word) for word in run.view(np.uint32))

        return load

    def store_global_f32(self, address: int, value: Any) -> None:
        self.memory.at(address, 4).view(np.float32)[0] = value

    def store_global_f32x2(self, address: int, a: Any, b: Any) -> None:
        self.memory.at(address, 8).view(np.float32)[:] = a, b

    def store_global_u16(self, address: int, value: int) -> None:
        self.memory.at(address, 2).view(np.uint16)[0] = value & 0xFFFF

    def store_global_u32(self, address: int, value: int) -> None:
        self.memory.at(address, 4).view(np.uint32)[0] = value

    def store_global_v4(self, address: int, *values: int) -> None:
        self.memory.at(address, 16).view(np.uint32)[:] = values

    # --- running ----------------------------------------------------------------------------------------------------
    def run(self, step: Any, buffers: Mapping[str, int], sms: int) -> None:
        """Executes every block of a kernel step, one after the other; pointers by buffer name, other params by value."""
        arguments = [buffers[p.buffer] if p.kind == "pointer" else getattr(p, "value", 0.0) for p in step.params]
        self.grid = step.grid.blocks(sms)
        for index in range(self.grid):
            self.block_index = index
            self.block = Block(step.block_threads, step.dynamic_shared_bytes)
            failures: list[BaseException] = []
            workers = [
                threading.Thread(target=self._thread, args=(step.function, arguments, number, failures))
                for number in range(step.block_threads)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            real = [failure for failure in failures if not isinstance(failure, threading.BrokenBarrierError)]
            if failures:
                raise (real or failures)[0]

    def _thread(self, function: Callable[..., None], arguments: list[Any], number: int, failures: list[Any]) -> None:
        self.block.local.thread, self.block.local.open, self.block.local.groups = number, [], []
        try:
            function(*arguments)
        except BaseException as failure:
            failures.append(failure)
            for barrier in (self.block.barrier, *self.block.warps):
                barrier.abort()
