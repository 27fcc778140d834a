"""Runs a warp-specialised Hopper kernel without a GPU: TMA, mbarriers and wgmma on top of `emulator.Emulator`.

Asynchronous operations take place either at once or as late as the kernel's waits allow: a wgmma when a thread waits for it,
a copy when no thread can go on without one, in random order. A barrier that is missing, or that arrives too early,
therefore shows in one of the two cases.

The model follows the PTX ISA: an mbarrier's phase completes when all its arrivals and bytes have come; a wgmma is done for
the whole warpgroup when one of its threads has waited for it; matrices are swizzled by address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import decode
from schedsearch.testing.emulator import Block, Emulator
from schedsearch.testing.kernel_threads import Threads
from schedsearch.typed import Array, DeviceFunction

WARPGROUP = 128


def swizzled(addresses: Array, width_bytes: int = 128) -> Array:
    """16-byte chunk ^= 128-byte line, modulo the chunks of the width."""
    result: Array = addresses ^ (((addresses >> 7) & (width_bytes // 16 - 1)) << 4)
    return result


def multiplied(raw: Array, dtype: str) -> Array:
    """The numbers that tensor cores read from bytes, as float64; of float32 they ignore the low 13 bits (TF32)."""
    if dtype == "float32":
        raw = (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return decode(raw, dtype).astype(np.float64)


class Mbarrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.pending, self.bytes, self.phase = arrivals, arrivals, 0, 0

    def update(self, arrivals: int, nbytes: int) -> None:
        self.pending -= arrivals
        self.bytes += nbytes
        # Bytes from another block may arrive before this block has said how many it expects.
        assert self.pending >= 0 and (self.bytes >= 0 or self.pending), "more arrivals or bytes than the phase expects"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.arrivals


class Warpgroup:
    """The accumulators of a warpgroup, and the wgmma groups that it has issued."""

    def __init__(self, positions: int) -> None:
        self.sums = np.zeros((64, positions), np.float64)  # which holds every sum of these tests exactly
        self.operations: list[Callable[[], None]] = []
        self.issued: list[int] = []  # by how many threads, for each operation
        self.finished = 0  # operations

    def finish(self, number: int) -> None:
        while self.finished <= number:
            self.operations[self.finished]()
            self.finished += 1


class Store:
    """A bulk store that a thread has started."""

    done = False


class HopperBlock(Block):
    def __init__(self, threads: Threads, size: int, shared_bytes: int, index: int) -> None:
        super().__init__(threads, size, shared_bytes, index)
        self.barriers: dict[int, Mbarrier] = {}
        self.groups: dict[int, Warpgroup] = {}

    def chunks(self) -> Array:
        """Shared memory as 16-byte chunks."""
        return self.shared[: self.shared.nbytes // 16 * 16].reshape(-1, 16)


class HopperEmulator(Emulator):
    def __init__(self, memory: Any, epilogue: DeviceFunction, late: bool) -> None:
        super().__init__(memory, epilogue, late)
        self.late = late

    def new_block(self, size: int, shared_bytes: int, index: int) -> HopperBlock:
        return HopperBlock(self.threads, size, shared_bytes, index)

    # --- waiting ----------------------------------------------------------------------------------------------------
    def mbarrier_init(self, shared: int, arrivals: int) -> None:
        assert shared % 8 == 0 and shared + 8 <= self.block.shared.nbytes and shared not in self.block.barriers
        self.block.barriers[shared] = Mbarrier(arrivals)

    def mbarrier_init_fence(self) -> None:
        pass

    def mbarrier_expect_bytes(self, shared: int, nbytes: int) -> None:
        self.block.barriers[int(shared)].update(1, nbytes)

    def mbarrier_arrive(self, shared: int) -> None:
        self.block.barriers[int(shared)].update(1, 0)

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        barrier = self.block.barriers[int(shared)]
        assert parity in (0, 1)
        self.threads.wait_until(lambda: barrier.phase != parity, f"mbarrier at {shared}, parity {parity}")

    def group_barrier(self, groups: int, threads: int) -> Callable[[int], None]:
        def wait(group: int) -> None:
            assert 0 <= group < groups
            self.block.meet(f"the barrier of group {group}", threads)

        return wait

    def warp_barrier(self) -> None:
        warp = self.thread.number // 32
        self.block.meet(f"the barrier of warp {warp}", 32)

    # --- tensor copies ----------------------------------------------------------------------------------------------
    def prefetch_map(self, tensor: object) -> None:
        pass

    def _start(self, copy: Callable[[], None]) -> None:
        if self.late:
            self.threads.start_late(copy)
        else:
            copy()

    @staticmethod
    def _edges(param: Any) -> tuple[int, ...]:
        """Elements of a box along each axis, including those that the stride skips."""
        return tuple(-(-edge // stride) for edge, stride in zip(param.box, param.element_strides))

    def _box(self, param: Any, array: Array, coordinates: tuple[int, ...]) -> tuple[Any, Any]:
        """The clipped indices of a box in the tensor (axes reversed, slowest first), and their positions in the box."""
        self.check_order(param.buffer)
        inside, at = [], []
        assert coordinates[0] * array.itemsize % 16 == 0  # otherwise it is an illegal instruction, which no manual mentions
        assert all(stride % 16 == 0 for stride in param.strides_bytes), "the driver refuses the map"
        inner_bytes = param.box[0] * array.itemsize
        assert inner_bytes % 16 == 0 and inner_bytes <= (param.swizzle_bytes or inner_bytes), "the driver refuses the map"
        axes = zip(coordinates, self._edges(param), param.dims, param.element_strides, strict=True)
        for start, edge, size, stride in reversed(list(axes)):
            first = min(max(-(start // stride), 0), edge)
            last = max(first, min(edge, -(-(size - start) // stride)))
            inside.append(slice(start + first * stride, start + last * stride, stride))
            at.append(slice(first, last))
        assert array.shape == param.dims[::-1], "the map's dims are the array's shape"
        return tuple(inside), tuple(at)

    def _stored_box(self, param: Any, array: Array, coordinates: tuple[int, ...]) -> tuple[Any, Any]:
        """As `_box`, for a store. It may end outside of the tensor, but it starts at no negative coordinate: a kernel whose
        stores did stopped an H200 with an illegal instruction."""
        assert min(coordinates) >= 0, f"a store starts before the tensor, at {coordinates}"
        return self._box(param, array, coordinates)

    def _load(self, shared: int, tensor: Any, coordinates: tuple[int, ...], barrier: int) -> None:
        param, array = tensor
        assert param.box[0] * array.itemsize == param.swizzle_bytes == 128 and shared % 128 == 0
        box = np.zeros(self._edges(param)[::-1], array.dtype)
        inside, at = self._box(param, array, coordinates)
        box[at] = array[inside]
        block = self.block

        def copy() -> None:
            data = box.view(np.uint8).reshape(-1, 16)
            assert shared >= 0 and shared + data.size <= block.shared.nbytes
            assert block.running, "sends to a block that has left"
            chunks = swizzled(np.arange(len(data)) * 16 + shared) // 16
            block.chunks()[chunks] = data
            block.barriers[int(barrier)].update(0, -data.size)

        self._start(copy)

    def tma_load_3d(self, shared: int, tensor: object, c0: int, c1: int, c2: int, barrier: int) -> None:
        self._load(int(shared), tensor, (c0, c1, c2), barrier)

    def tma_load_4d(self, shared: int, tensor: object, c0: int, c1: int, c2: int, c3: int, barrier: int) -> None:
        self._load(int(shared), tensor, (c0, c1, c2, c3), barrier)

    def tma_load_5d(self, shared: int, tensor: object, *coordinates_and_barrier: int) -> None:
        self._load(int(shared), tensor, coordinates_and_barrier[:5], *coordinates_and_barrier[5:])

    def tma_store_4d(self, tensor: Any, shared: int, *coordinates: int) -> None:
        param, array = tensor
        assert param.box[0] * array.itemsize == param.swizzle_bytes in (32, 64, 128) and shared % 128 == 0
        size = int(np.prod(param.box)) * array.itemsize
        chunks = swizzled(np.arange(size // 16) * 16 + int(shared), param.swizzle_bytes) // 16
        self._store(array, self._stored_box(param, array, coordinates), chunks, param.box[::-1])

    def _store(self, array: Array, indices: tuple[Any, Any], chunks: Array, box: tuple[int, ...]) -> None:
        """Copies a box of elements from `chunks` of shared memory to the place that `_box` gives."""
        block, inside, at = self.block, *indices
        assert chunks.min() >= 0 and chunks.max() * 16 + 16 <= block.shared.nbytes
        store = Store()
        self.thread.stores.append(store)

        def copy() -> None:
            assert block.running, "reads from a block that has left"
            assert array.dtype.kind != "f" or np.isnan(array[inside]).all(), "an output is stored twice"
            array[inside] = block.chunks()[chunks].reshape(-1).view(array.dtype).reshape(box)[at]
            store.done = True

        self._start(copy)

    tma_store_5d = tma_store_4d

    def bulk_commit(self) -> None:
        pass

    def bulk_wait_read_all(self) -> None:
        stores = self.thread.stores
        self.threads.wait_until(lambda: all(store.done for store in stores), "a store")
        stores.clear()

    def bulk_wait_read_but_one(self) -> None:
        """Each store is a group of its own."""
        earlier = self.thread.stores[:-1]
        self.threads.wait_until(lambda: all(store.done for store in earlier), "a store")
        del self.thread.stores[:-1]

    def store_shared_pair(self, accumulator: str) -> Callable[..., None]:
        dtype = np.float32 if accumulator == "float32" else np.int32

        def store(shared: int, a: Any, b: Any) -> None:
            self._shared(int(shared), 8).view(dtype)[:] = np.array([a, b]).astype(dtype)

        return store

    def fence_async_shared(self) -> None:
        pass

    # --- wgmma ------------------------------------------------------------------------------------------------------
    def _operand(self, block: HopperBlock, descriptor: int, rows: int, dtype: str) -> Array:
        """`rows` x 32 bytes of values, K-major, from a matrix descriptor."""
        assert descriptor >> 62 == 1 and (descriptor >> 49) & 7 == 0
        start, stride = (descriptor & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        row = np.arange(rows)
        lines = start + (row // 8) * stride + (row % 8) * 128
        chunks = swizzled(lines[:, None] + np.array([0, 16])) // 16
        assert chunks.max() * 16 < block.shared.nbytes
        return multiplied(block.chunks()[chunks].reshape(rows, -1), dtype)

    def wgmma_steps(self, positions: int, k_steps: int, dtype: str, dtype_b: str = "") -> Callable[..., None]:
        dtype_b = dtype_b or dtype

        def operation(block: HopperBlock, group: Warpgroup, a: int, b: int, accumulate: int) -> None:
            with np.errstate(invalid="ignore", over="ignore"):
                for step in range(k_steps):
                    rows_a = self._operand(block, a + 2 * step, 64, dtype)
                    product = rows_a @ self._operand(block, b + 2 * step, positions, dtype_b).T
                    group.sums = product if step == 0 and not accumulate else group.sums + product

        def multiply(acc: list[Any], a: int, b: int, accumulate: int) -> None:
            thread = self.thread
            block, number = thread.block, thread.issued
            thread.issued += 1
            group = block.groups.get(thread.number // WARPGROUP)
            if group is None:
                group = block.groups[thread.number // WARPGROUP] = Warpgroup(positions)
            if number == len(group.issued):
                group.issued.append(0)
                group.operations.append(functools.partial(operation, block, group, a, b, accumulate))
            group.issued[number] += 1
            if group.issued[number] == WARPGROUP and not self.late:
                group.finish(number)

        return multiply

    def wgmma_wait(self, pending: int, positions: int, accumulator: str = "float32") -> Callable[[list[Any]], None]:
        def wait(acc: list[Any]) -> None:
            number = self.thread.issued - 1 - pending
            if number < 0:
                return
            group = self.block.groups[self.thread.number // WARPGROUP]
            self.threads.wait_until(lambda: group.issued[number] == WARPGROUP, "a wgmma that not all threads issue")
            group.finish(number)
            if pending == 0:
                warp, lane = divmod(self.thread.number % WARPGROUP, 32)
                rows = group.sums[warp * 16 + lane // 4 :: 8][:2]  # PTX ISA, wgmma's D fragment
                columns = rows.reshape(2, -1, 8)[:, :, lane % 4 * 2 : lane % 4 * 2 + 2]
                number_type = np.int64 if accumulator == "int32" else np.float64
                acc[:] = columns.transpose(1, 0, 2).reshape(-1).astype(number_type).tolist()

        return wait

    # --- between lanes ----------------------------------------------------------------------------------------------
    def _stmatrix_trans(self, shared: int, *registers: int) -> None:
        lanes = self.block.exchange((shared, registers))
        matrix, row = divmod(self.thread.number % 32, 8)
        if matrix < len(registers):
            words = [lanes[4 * j + row // 2][1][matrix] for j in range(8)]
            values = [(word >> (16 * (row % 2))) & 0xFFFF for word in words]
            self._shared(int(shared), 16).view(np.uint16)[:] = values

    stmatrix_x4_trans = _stmatrix_trans
    stmatrix_x2_trans = _stmatrix_trans
    stmatrix_x1_trans = _stmatrix_trans

    def ldmatrix_trans(self, shared: int, matrices: int) -> list[int]:
        """The inverse of `_stmatrix_trans`: words of two neighbouring rows' values in column lane / 4."""
        addresses = self.block.exchange(int(shared))
        row, column = self.thread.number % 4 * 2, self.thread.number % 32 // 4
        return [
            sum(int(self._shared(addresses[8 * m + row + i], 16).view(np.uint16)[column]) << (16 * i) for i in range(2))
            for m in range(matrices)
        ]
