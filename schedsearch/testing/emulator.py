"""Runs a CUDA template's kernel without a GPU: every thread is a greenlet (`kernel_threads`), device operations are NumPy.

The kernels are plain Python functions over `cuda.threadIdx`, `types` casts and device operations. The emulator replaces
those names by stand-ins with the same meaning, so that index maps, masks and synchronisation are tested as written. Memory
accesses are checked: an access outside a buffer or a misaligned one raises. Asynchronous copies finish either at once or as
late as the waits allow, so that a missing wait or barrier shows in one of the two cases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts import casts
from schedsearch.testing.corrections import Corrections
from schedsearch.testing.fragments import fragment, tf32, tf32_product
from schedsearch.testing.kernel_threads import KernelThread, Threads
from schedsearch.testing.memory import Memory
from schedsearch.typed import Array, DeviceFunction

__all__ = ["FLOATS", "TYPES", "Block", "Cluster", "Emulator", "Meeting", "Memory", "replace_casts", "tf32", "tf32_product"]
FLOATS = {"float16": np.float16, "float32": np.float32}


class Meeting:
    """Threads that wait for one another, and the values that they pass."""

    def __init__(self, name: object, parties: int) -> None:
        self.name = name
        self.brought: list[Any] = [None] * parties
        self.missing = parties
        self.waiting: list[Any] = []
        self.result: Any = None

    def __str__(self) -> str:
        return f"threads that do not all come to {self.name}"


class Block:
    """A thread block: its shared memory and its meeting points."""

    def __init__(self, threads: Threads, size: int, shared_bytes: int, index: int) -> None:
        self.threads, self.size, self.index = threads, size, index
        self.running = size  # threads that have not ended
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)  # NaN, so that memory that was not written shows
        self.cluster: Cluster
        self._meetings: dict[Any, Meeting] = {}
        self._array: list[Any] | None = None

    def array(self, count: int) -> list[Any]:
        """The block's only declared array, without values at first."""
        if self._array is None:
            self._array = [None] * count
        return self._array

    def meet(
        self, name: object, parties: int, position: int = 0, value: object = None, make: Callable[[list[Any]], Any] = list
    ) -> Any:
        """Waits for `parties` threads; returns the result of `make` on their values by position, computed once for all."""
        meeting = self._meetings.get(name)
        if meeting is None:
            meeting = self._meetings[name] = Meeting(name, parties)
        meeting.brought[position] = value
        meeting.missing -= 1
        if meeting.missing:
            meeting.waiting.append(getcurrent())
            self.threads.park(meeting)
        else:
            del self._meetings[name]
            meeting.result = make(meeting.brought)
            self.threads.release(meeting.waiting)
        return meeting.result

    def exchange(self, value: object, make: Callable[[list[Any]], Any] = list) -> Any:
        """The values that all lanes of the calling warp passed, or the result of `make` on them."""
        warp, lane = divmod(getcurrent().number, 32)
        return self.meet(("warp", warp), 32, lane, value, make)


class Cluster:
    """Blocks that run at the same time, by rank, and their barrier."""

    def __init__(self, blocks: list[Any]) -> None:
        self.blocks = blocks
        self.threads = sum(block.size for block in blocks)
        self.arrived, self.phase = 0, 0
        for block in blocks:
            block.cluster = self


def _cast(dtype: Any) -> Callable[[Any], Any]:
    lowest, highest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    values = highest - lowest + 1

    def cast(value: Any) -> int:
        # Kernels cast nearly every index, and most are in range: this takes half the time of the arithmetic.
        if value.__class__ is int and lowest <= value <= highest:
            return value
        return (int(value) - lowest) % values + lowest

    return cast


TYPES = SimpleNamespace(
    **{name: _cast(name) for sign in ("", "u") for bits in (8, 16, 32, 64) for name in (f"{sign}int{bits}",)},
    float32=np.float32,
    float64=np.float64,
)


def replace_casts(monkeypatch: Any, module: Any, types: Any = TYPES) -> None:
    """Replaces `u32`, `i64` and the other names of `templates.parts.casts` in a module by the casts of `types`.

    Args:
        monkeypatch: pytest's.
        module: the module whose functions are about to run as plain Python.
        types: has the casts under Numba's names, such as uint32.
    """
    for short, name in casts.NAMES.items():
        if hasattr(module, short) and hasattr(types, name):
            monkeypatch.setattr(module, short, getattr(types, name))


class Emulator:
    """Stand-ins for everything that a kernel of mma.sync type uses; `run` executes a kernel step over buffers."""

    def __init__(self, memory: Memory, epilogue: DeviceFunction, late_copies: bool) -> None:
        self.memory, self.corrections = memory, Corrections(memory)
        self.late_copies = late_copies
        self.threads = Threads(seed=0)
        self.grid = 1
        emulator = self

        class Cuda:
            local = SimpleNamespace(array=lambda count, _type: [0] * count)
            shared = SimpleNamespace(array=lambda count, _type: emulator.block.array(count))

            @property
            def threadIdx(self) -> Any:
                return SimpleNamespace(x=emulator.thread.number)

            @property
            def blockIdx(self) -> Any:
                return SimpleNamespace(x=emulator.block.index)

            @property
            def gridDim(self) -> Any:
                return SimpleNamespace(x=emulator.grid)

            def syncthreads(self) -> None:
                emulator.block.meet("the block's barrier", emulator.block.size)

        self.cuda = Cuda()
        self.ahead: tuple[str, ...] = ()
        self.types = TYPES
        self.pair = lambda v0, v1, valid, k, offset, *params: tuple(
            epilogue(v, k + i, offset + i, *params) for i, v in enumerate((v0, v1))
        )
        self.single = epilogue

    def stand_in(self, monkeypatch: Any, *modules: object) -> None:
        """Replaces `cuda`, `types`, `u32` and other casts, `shared_base`, `ptx` and its kin in the modules of a kernel.

        Call it before the kernel is built.

        Args:
            monkeypatch: pytest's.
            modules: the kernel's module, and those of the parts whose functions it captures.
        """
        stand_ins = {"cuda": self.cuda, "types": self.types, "shared_base": self.shared_base}
        stand_ins |= dict.fromkeys(("ptx", "cluster", "warp_tiles"), self)
        stand_ins |= {name: getattr(self.corrections, name) for name in Corrections.NAMES}
        stand_ins |= {"warm_operands": self.warm_operands}
        for module in modules:
            replace_casts(monkeypatch, module, self.types)
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, stand_in)

    @staticmethod
    def multiply_f32(a: Any, b: Any) -> Any:
        return np.float32(np.float32(a) * np.float32(b))

    @property
    def thread(self) -> KernelThread:
        """The thread that is running."""
        current: KernelThread = getcurrent()
        return current

    @property
    def block(self) -> Any:
        """The block of the running thread."""
        return getcurrent().block

    def shared_base(self) -> int:
        return 0

    # --- device operations ------------------------------------------------------------------------------------------
    def wait_for_predecessor(self) -> None:
        self.thread.has_waited = True

    def prefetch_bulk(self, address: int, nbytes: int) -> None:
        assert nbytes % 16 == 0
        self.memory.at(address, nbytes, 16)

    def copy(self, nbytes: int) -> Callable[..., None]:
        def copy(shared: int, address: int, count: int) -> None:
            assert count in (0, nbytes) or 0 < count < nbytes in (4, 8, 16)
            to, data = self._shared(shared, nbytes), np.zeros(nbytes, np.uint8)
            if count:
                data[:count] = self.memory.at(address, count, nbytes)
            if self.late_copies and nbytes > 2:
                self.thread.open_copies.append((to, data))
            else:
                to[:] = data

        return copy

    cp_async = copy

    def _shared(self, at: int, nbytes: int) -> Array:
        assert at >= 0 and at + nbytes <= self.block.shared.nbytes, f"shared access at {at}"
        assert at % nbytes == 0, f"misaligned shared access of {nbytes} bytes at {at}"
        place: Array = self.block.shared[at : at + nbytes]
        return place

    def cp_async_wait(self, groups: int) -> Callable[[], None]:
        def wait() -> None:
            pending = self.thread.copy_groups
            while len(pending) > groups:
                for to, data in pending.pop(0):
                    to[:] = data

        return wait

    def cp_async_commit(self) -> None:
        self.thread.copy_groups.append(self.thread.open_copies)
        self.thread.open_copies = []

    def _matrices(self, lanes: Sequence[int]) -> Array:
        """What `ldmatrix.x4` loads from the addresses of the lanes: 4 matrices of 8 rows of 4 words."""
        return np.array([self._shared(address, 16) for address in lanes]).reshape(4, 8, 4, 4)

    def load_fragments(self, wm: int, wn: int, row_bytes: int) -> Callable[..., None]:
        """All lanes get the matrices of an operand, as they are in shared memory, in its first register."""

        def matrices(lanes: list[tuple[int, int]]) -> tuple[list[Array], list[Array]]:
            rows = [self._matrices([at + i * 16 * row_bytes for at, _ in lanes]) for i in range(wm // 16)]
            columns = []
            for j in range(wn // 16):
                # B's registers are k first, then columns: b0 and b1 of eight columns, then those of the next eight.
                loaded = [at + j * 16 * row_bytes for _, at in lanes]
                columns.append(self._matrices(loaded[:8] + loaded[16:24] + loaded[8:16] + loaded[24:]))
            return rows, columns

        def load(a: list[Any], b: list[Any], x: int, w: int) -> None:
            a[0], b[0] = self.block.exchange((x, w), matrices)

        return load

    def multiply_and_load(
        self, wm: int, wn: int, row_bytes: int, dtype: str, dtype_b: str = "", products: int = 1
    ) -> Callable[..., None]:
        load = self.load_fragments(wm, wn, row_bytes)

        def product(lanes: list[tuple[list[Array], list[Array]]]) -> Array:
            rows, columns = lanes[0]
            a = np.concatenate([fragment(each, dtype) for each in rows])
            b = np.concatenate([fragment(each, dtype_b or dtype) for each in columns])
            if dtype == "float32":
                return tf32_product(a, b, products)
            exact = np.dtype(np.float32 if dtype_of(dtype).is_float else np.int64)
            return np.asarray(a.astype(exact) @ b.astype(exact).T)

        def multiply(acc: list[Any], a: list[Any], b: list[Any], next_b: list[Any], x: int, w: int) -> None:
            sums = self.block.exchange((a[0], b[0]), product)
            lane = self.thread.number % 32
            for i in range(wm // 16):
                for j in range(wn // 8):
                    for c in range(4):
                        row, column = i * 16 + lane // 4 + c // 2 * 8, j * 8 + lane % 4 * 2 + c % 2
                        at = 4 * (i * (wn // 8) + j) + c
                        total = acc[at] + sums[row, column]
                        acc[at] = total if dtype_of(dtype).is_float else TYPES.int32(total)
            load(a, next_b, x, w)

        return multiply

    def store_warp_tile(self, wm: int, wn: int, row_bytes: int, accumulator: str = "float32") -> Callable[..., None]:
        def store(acc: list[Any], shared: int) -> None:
            for i in range(wm // 16):
                for j in range(wn // 8):
                    for half in range(2):
                        first = 4 * (i * (wn // 8) + j) + 2 * half
                        to = self._shared(shared + (i * 16 + half * 8) * row_bytes + j * 32, 8)
                        to.view(accumulator)[:] = acc[first : first + 2]

        return store

    # --- integers ----------------------------------------------------------------------------------------------
    def add_bytes(self, dtype: str, count: int) -> Callable[[int, int], int]:
        return lambda address, total: total + int(self.memory.at(address, count).view(dtype).sum(dtype=np.int64))

    def warp_sum(self, value: int) -> int:
        total: int = self.block.exchange(value, sum)
        return total

    def store_shared_i32(self, shared: int, value: int) -> None:
        self._shared(int(shared), 4).view(np.int32)[0] = value

    def load_shared_i32(self, shared: int) -> int:
        return int(self._shared(int(shared), 4).view(np.int32)[0])

    @staticmethod
    def warm_operands(workload: Any, params: object) -> Callable[..., None]:
        """See `parts.warm`: the channels are those of the workload."""

        def warm(lane: int, k: int, channels: int, operands: object) -> None:
            assert 0 <= lane < 32
            assert channels <= 0 or 0 <= k <= k + channels <= workload.k, (k, channels)

        return warm

    def store_shared_v4(self, shared: int, *values: int) -> None:
        self._shared(int(shared), 16).view(np.uint32)[:] = values

    def store_shared_f32(self, shared: int, value: Any) -> None:
        self._shared(int(shared), 4).view(np.float32)[0] = value

    def load_shared_f32(self, shared: int) -> Any:
        return self._shared(shared, 4).view(np.float32)[0]

    def load_shared_f32x2(self, shared: int) -> Any:
        return tuple(self._shared(shared, 8).view(np.float32))

    def load_shared_u16(self, shared: int) -> int:
        return int(self._shared(shared, 2).view(np.uint16)[0])

    def store_shared_packed(self, dtype: str, even: bool) -> Callable[..., None]:
        pack = self.pack_pair(dtype)

        def store(shared: int, odd: int, low: object, high: object) -> None:
            assert not (even and odd)
            word = np.array([pack(low, high)], np.uint32)
            if odd:
                for half in range(2):
                    self._shared(int(shared) + 2 * half, 2)[:] = word.view(np.uint8)[2 * half : 2 * half + 2]
            else:
                self._shared(int(shared), 4)[:] = word.view(np.uint8)

        return store

    def load_shared_i32x2(self, shared: int) -> tuple[int, ...]:
        return tuple(self._shared(shared, 8).view(np.int32).tolist())

    def load_shared_i32x4(self, shared: int) -> tuple[int, ...]:
        return tuple(self._shared(shared, 16).view(np.int32).tolist())

    def load_eight(self, accumulator: str) -> Callable[[int], tuple[Any, ...]]:
        def load(shared: int) -> tuple[Any, ...]:
            assert shared % 32 == 0
            return tuple(self._shared(shared, 32).view(accumulator).tolist())

        return load

    def pack_pair(self, dtype: str, accumulator: str = "float32") -> Callable[..., int]:
        def pack(low: object, high: object) -> int:
            values = np.array([low, high], accumulator).view(np.float32)
            return int(values.astype(FLOATS[dtype]).view(np.uint32)[0])

        return pack

    def pack_bytes(self, dtype: str) -> Callable[..., int]:
        limits = np.iinfo(dtype)
        return lambda *values: int(np.clip(values, limits.min, limits.max).astype(dtype).view(np.uint32)[0])

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

    def store_global_b32x2(self, address: int, a: int, b: int) -> None:
        self.memory.at(address, 8).view(np.int32)[:] = a, b

    def store_global_u8(self, address: int, value: int) -> None:
        self.memory.at(address, 1)[0] = value & 0xFF

    def store_global_u16(self, address: int, value: int) -> None:
        self.memory.at(address, 2).view(np.uint16)[0] = value & 0xFFFF

    def load_global_u32(self, address: int) -> int:
        return int(self.memory.at(address, 4).view(np.uint32)[0])

    def store_global_u32(self, address: int, value: int) -> None:
        self.memory.at(address, 4).view(np.uint32)[0] = int(value) % 2**32

    def copy_global(self, nbytes: int) -> Callable[..., None]:
        def copy(to: int, address: int, inside: int) -> None:
            self.memory.at(to, nbytes)[:] = self.memory.at(address, nbytes) if inside else 0

        return copy

    def store_global_v4(self, address: int, *values: int) -> None:
        self.memory.at(address, 16).view(np.uint32)[:] = values

    # --- running ----------------------------------------------------------------------------------------------------
    def run(
        self,
        step: Any,
        buffers: Mapping[str, int],
        sms: int,
        tensors: Mapping[str, Any] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """Executes every block of a kernel step, cluster by cluster.

        Args:
            buffers: name -> address; a missing optional buffer gets the address 0.
            tensors: name -> the array that a tensor map describes.
            scalars: name -> value; a missing scalar is 0.
        """

        def argument(param: Any) -> Any:
            if param.kind == "tensor_map":
                return param, (tensors or {})[param.buffer]
            if param.kind == "pointer":
                return buffers.get(param.buffer, 0) if getattr(param, "optional", False) else buffers[param.buffer]
            return (scalars or {}).get(param.name, 0.0) if param.kind == "scalar" else param.value

        arguments = [argument(param) for param in step.params]
        self.grid = step.grid.blocks(sms, step.cluster)
        self.ahead = step.ahead
        by_address = {address: name for name, address in buffers.items()}
        self.memory.check = lambda start: self.check_order(by_address.get(start, "another buffer"))
        for first in range(0, self.grid, step.cluster):
            self.run_blocks(step, arguments, range(first, first + step.cluster))
        self.memory.check = lambda start: None

    def check_order(self, buffer: str) -> None:
        """An access of the running thread. If the kernel places the wait for its predecessor itself, the thread must have
        waited, unless the buffer is one that the kernel reads ahead."""
        waited = not self.ahead or buffer in self.ahead or self.thread.has_waited
        assert waited, f"{buffer} is used before the wait for the kernel in front"

    def run_blocks(self, step: Any, arguments: Sequence[Any], indices: Sequence[int]) -> None:
        """Executes the blocks of one cluster."""
        blocks = [self.new_block(step.block_threads, step.dynamic_shared_bytes, index) for index in indices]
        Cluster(blocks)
        threads = [
            KernelThread(functools.partial(self._run_thread, step.function, arguments), number, block)
            for block in blocks
            for number in range(block.size)
        ]
        self.threads.run(threads)

    def new_block(self, size: int, shared_bytes: int, index: int) -> Block:
        return Block(self.threads, size, shared_bytes, index)

    def _run_thread(self, function: Callable[..., None], arguments: Sequence[Any]) -> None:
        function(*arguments)
        self.block.running -= 1
