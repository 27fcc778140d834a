"""Runs a warp-specialised Hopper kernel without a GPU: TMA, mbarriers and wgmma on top of `emulator.Emulator`.

Asynchronous operations take place either at once or as late as the kernel's waits allow (and then copies in random order),
so that a barrier which is missing, or arrives too early, shows in one of the two. A wait that never ends raises.

Model, after the PTX ISA: an mbarrier's phase completes when its arrivals and its bytes are in; a wgmma is done for the whole
warpgroup when one of its threads has waited for it; matrices are swizzled by address.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from emulator import FLOATS, Block, Emulator

Array = np.ndarray[Any, Any]
WAIT_S = 60.0
WARPGROUP = 128


def swizzled(addresses: Array) -> Array:
    """The 128-byte swizzle: 16-byte chunk ^= 128-byte line, both modulo 8."""
    return addresses ^ (((addresses >> 7) & 7) << 4)


class Mbarrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.pending, self.bytes, self.phase = arrivals, arrivals, 0, 0

    def update(self, arrivals: int, nbytes: int) -> None:
        self.pending -= arrivals
        self.bytes += nbytes
        # Bytes that another block sends may land before this block has said how many it expects.
        assert self.pending >= 0 and (self.bytes >= 0 or self.pending), "more arrivals or bytes than the phase expects"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.arrivals


class Warpgroup:
    """The accumulators of a warpgroup, and the wgmma groups that it has issued."""

    def __init__(self, positions: int) -> None:
        self.sums = np.zeros((64, positions), np.float32)
        self.issued: list[list[Any]] = []  # [threads that have issued it, operation or None when done]


class HopperEmulator(Emulator):
    late_s = 0.002  # between two copies of late mode
    wait_s = WAIT_S

    def __init__(self, memory: Any, epilogue: Callable[..., Any], late: bool, seed: int = 0) -> None:
        super().__init__(memory, epilogue, late)
        self.late = late
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.random = random.Random(seed)
        self.queue: list[Callable[[], None]] = []
        self.failed = False
        self.failure: BaseException | None = None  # the first
        self.group_barriers: list[threading.Barrier] = []

    def _fail(self, failure: BaseException | None) -> None:
        """Ends every wait, so that all threads end; None: for a failure elsewhere."""
        with self.changed:
            self.failed, self.failure = True, self.failure or failure
            self.changed.notify_all()
        for barrier in self.group_barriers:
            barrier.abort()

    # --- waiting ----------------------------------------------------------------------------------------------------
    def _wait_until(self, condition: Callable[[], bool], what: str, changed: threading.Condition | None = None) -> None:
        changed = changed or self.changed
        with changed:
            deadline = time.monotonic() + self.wait_s
            while not condition():
                if self.failed:
                    raise threading.BrokenBarrierError
                if not changed.wait(deadline - time.monotonic()):
                    raise AssertionError(f"waits for ever: {what}")

    def mbarrier_init(self, shared: int, arrivals: int) -> None:
        assert shared % 8 == 0 and shared + 8 <= self.block.shared.nbytes and shared not in self.barriers
        self.barriers[shared] = Mbarrier(arrivals)

    def mbarrier_init_fence(self) -> None:
        pass

    def _update(self, shared: int, arrivals: int, nbytes: int) -> None:
        with self.changed:
            self.barriers[int(shared)].update(arrivals, nbytes)
            self.changed.notify_all()

    def mbarrier_expect_bytes(self, shared: int, nbytes: int) -> None:
        self._update(shared, 1, nbytes)

    def mbarrier_arrive(self, shared: int) -> None:
        self._update(shared, 1, 0)

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        barrier = self.barriers[int(shared)]
        assert parity in (0, 1)
        self._wait_until(lambda: barrier.phase != parity, f"mbarrier at {shared}, parity {parity}")

    def group_barrier(self, groups: int, threads: int) -> Callable[[int], None]:
        barriers = [threading.Barrier(threads) for _ in range(groups)]
        self.group_barriers += barriers
        return lambda group: barriers[group].wait(WAIT_S) and None

    def _shared_chunks(self) -> Array:
        """Shared memory as 16-byte chunks."""
        return self.block.shared[: self.block.shared.nbytes // 16 * 16].reshape(-1, 16)

    # --- tensor copies ----------------------------------------------------------------------------------------------
    def _start(self, copy: Callable[[], None]) -> None:
        if self.late:
            with self.changed:
                self.queue.append(copy)
        else:
            copy()

    def _engine(self) -> None:
        """Carries out the copies of late mode, in random order, each after a while."""
        while not self.stopped:
            time.sleep(self.late_s)
            with self.changed:
                copy = self.queue.pop(self.random.randrange(len(self.queue))) if self.queue else None
            if copy:
                try:
                    copy()
                except BaseException as failure:
                    self._fail(failure)

    @staticmethod
    def _edges(param: Any) -> tuple[int, ...]:
        """Elements of a box along each axis: it counts those that are strided over, too."""
        return tuple(-(-edge // stride) for edge, stride in zip(param.box, param.element_strides))

    @staticmethod
    def _box(param: Any, array: Array, coordinates: tuple[int, ...]) -> tuple[Any, Any]:
        """The indices of a box in the tensor (axes reversed, slowest first), clipped, and where they lie in the box."""
        inside, at = [], []
        assert coordinates[0] * array.itemsize % 16 == 0  # else an illegal instruction; no manual says so
        axes = zip(coordinates, HopperEmulator._edges(param), param.dims, param.element_strides, strict=True)
        for start, edge, size, stride in reversed(list(axes)):
            first = min(max(-(start // stride), 0), edge)
            last = max(first, min(edge, -(-(size - start) // stride)))
            inside.append(slice(start + first * stride, start + last * stride, stride))
            at.append(slice(first, last))
        assert array.shape == param.dims[::-1], "the map's dims are the array's shape"
        return tuple(inside), tuple(at)

    def _load(self, shared: int, tensor: Any, coordinates: tuple[int, ...], barrier: int) -> None:
        param, array = tensor
        assert param.box[0] * 2 == param.swizzle_bytes == 128 and shared % 128 == 0
        box = np.zeros(self._edges(param)[::-1], np.float16)
        inside, at = self._box(param, array, coordinates)
        box[at] = array[inside]

        def copy() -> None:
            data = box.view(np.uint8).reshape(-1, 16)
            assert shared >= 0 and shared + data.size <= self.block.shared.nbytes
            chunks = swizzled(np.arange(len(data)) * 16 + shared) // 16
            self._shared_chunks()[chunks] = data
            self._update(barrier, 0, -data.size)

        self._start(copy)

    def tma_load_3d(self, shared: int, tensor: Any, c0: int, c1: int, c2: int, barrier: int) -> None:
        self._load(int(shared), tensor, (c0, c1, c2), barrier)

    def tma_load_4d(self, shared: int, tensor: Any, c0: int, c1: int, c2: int, c3: int, barrier: int) -> None:
        self._load(int(shared), tensor, (c0, c1, c2, c3), barrier)

    def tma_load_5d(self, shared: int, tensor: Any, *coordinates_and_barrier: int) -> None:
        self._load(int(shared), tensor, coordinates_and_barrier[:5], *coordinates_and_barrier[5:])

    def tma_store_4d(self, tensor: Any, shared: int, *coordinates: int) -> None:
        param, array = tensor
        assert param.box[0] * 2 == param.swizzle_bytes == 128 and shared % 128 == 0
        done = threading.Event()
        self.stores().append(done)

        def copy() -> None:
            size = int(np.prod(param.box)) * 2
            assert shared >= 0 and shared + size <= self.block.shared.nbytes
            chunks = swizzled(np.arange(size // 16) * 16 + int(shared)) // 16
            box = self._shared_chunks()[chunks].reshape(-1).view(np.float16).reshape(param.box[::-1])
            inside, at = self._box(param, array, coordinates)
            assert np.isnan(array[inside]).all(), "an output is stored twice"
            array[inside] = box[at]
            done.set()

        self._start(copy)

    tma_store_5d = tma_store_4d

    def stores(self) -> list[threading.Event]:
        return self.block.local.__dict__.setdefault("stores", [])

    def bulk_commit(self) -> None:
        pass

    def bulk_wait_read_all(self) -> None:
        for done in self.stores():
            assert done.wait(WAIT_S), "a store never ends"
        self.stores().clear()

    def fence_async_shared(self) -> None:
        pass

    # --- wgmma ------------------------------------------------------------------------------------------------------
    def _operand(self, descriptor: int, rows: int) -> Array:
        """`rows` x 16 values, K-major, from a matrix descriptor."""
        assert descriptor >> 62 == 1 and (descriptor >> 49) & 7 == 0
        start, stride = (descriptor & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        row = np.arange(rows)
        lines = start + (row // 8) * stride + (row % 8) * 128
        chunks = swizzled(lines[:, None] + np.array([0, 16])) // 16
        assert chunks.max() * 16 < self.block.shared.nbytes
        return self._shared_chunks()[chunks].reshape(rows, -1).view(np.float16).astype(np.float32)

    def wgmma_steps(self, positions: int, k_steps: int, dtype: str) -> Callable[..., None]:
        assert dtype == "float16"

        def multiply(acc: list[Any], a: int, b: int, accumulate: int) -> None:
            def operation() -> None:
                with np.errstate(invalid="ignore", over="ignore"):
                    for step in range(k_steps):
                        product = self._operand(a + 2 * step, 64) @ self._operand(b + 2 * step, positions).T
                        group.sums = product if step == 0 and not accumulate else group.sums + product

            number = self.block.local.__dict__.setdefault("issued", 0)
            self.block.local.issued = number + 1
            with self.changed:
                group = self.groups.setdefault(self.block.local.thread // WARPGROUP, Warpgroup(positions))
                if number == len(group.issued):
                    group.issued.append([0, operation])
                group.issued[number][0] += 1
                if group.issued[number][0] == WARPGROUP:
                    if not self.late:
                        self._finish(group, number)
                    self.changed.notify_all()

        return multiply

    @staticmethod
    def _finish(group: Warpgroup, number: int) -> None:
        for entry in group.issued[: number + 1]:
            if entry[1] is not None:
                entry[1]()
                entry[1] = None

    def wgmma_wait(self, pending: int, positions: int) -> Callable[[list[Any]], None]:
        def wait(acc: list[Any]) -> None:
            number = self.block.local.issued - 1 - pending
            if number < 0:
                return
            group = self.groups[self.block.local.thread // WARPGROUP]
            self._wait_until(lambda: group.issued[number][0] == WARPGROUP, "a wgmma that not all threads issue")
            with self.changed:
                self._finish(group, number)
            if pending == 0:
                warp, lane = divmod(self.block.local.thread % WARPGROUP, 32)
                rows = group.sums[warp * 16 + lane // 4 :: 8][:2]  # PTX ISA, wgmma's D fragment
                columns = rows.reshape(2, -1, 8)[:, :, lane % 4 * 2 : lane % 4 * 2 + 2]
                acc[:] = columns.transpose(1, 0, 2).reshape(-1).tolist()

        return wait

    # --- between lanes ----------------------------------------------------------------------------------------------
    def _stmatrix_trans(self, shared: int, *registers: int) -> None:
        lanes = self.block.exchange((shared, registers))
        matrix, row = divmod(self.block.local.thread % 32, 8)
        if matrix < len(registers):
            words = [lanes[4 * j + row // 2][1][matrix] for j in range(8)]
            values = [(word >> (16 * (row % 2))) & 0xFFFF for word in words]
            self._shared(int(shared), 16).view(np.uint16)[:] = values

    stmatrix_x4_trans = _stmatrix_trans
    stmatrix_x2_trans = _stmatrix_trans

    def ldmatrix_trans(self, shared: int, matrices: int) -> list[int]:
        """The inverse of `_stmatrix_trans`: words of two neighbouring rows' values in column lane / 4."""
        addresses = self.block.exchange(int(shared))
        row, column = self.block.local.thread % 4 * 2, self.block.local.thread % 32 // 4
        return [
            sum(int(self._shared(addresses[8 * m + row + i], 16).view(np.uint16)[column]) << (16 * i) for i in range(2))
            for m in range(matrices)
        ]

    # --- running ----------------------------------------------------------------------------------------------------
    def run(self, step: Any, buffers: Mapping[str, int], sms: int, tensors: Mapping[str, Array] | None = None) -> None:
        """As in `Emulator`, and tensor maps over `tensors` by buffer name."""
        params = [
            SimpleNamespace(kind="map", value=(param, (tensors or {})[param.buffer]))
            if param.kind == "tensor_map"
            else param
            for param in step.params
        ]
        emulated = SimpleNamespace(**{**step.__dict__, "params": params})
        blocks = emulated.grid.blocks(sms)
        emulated.grid = SimpleNamespace(blocks=lambda _: blocks)
        self.stopped = False
        engine = threading.Thread(target=self._engine)
        engine.start()
        try:
            super().run(emulated, buffers, sms)
        finally:
            self.stopped = True
            engine.join()
            if self.failure:
                raise self.failure

    @property
    def block(self) -> Block:
        return self._block

    @block.setter
    def block(self, block: Block) -> None:
        self._block = block
        self.barriers: dict[int, Mbarrier] = {}
        self.groups: dict[int, Warpgroup] = {}

    def _thread(self, function: Callable[..., None], arguments: list[Any], number: int, failures: list[Any]) -> None:
        super()._thread(function, arguments, number, failures)
        if failures:
            self._fail(failures[0])


__all__ = ["FLOATS", "HopperEmulator"]
