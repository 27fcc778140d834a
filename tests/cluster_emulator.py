"""`HopperEmulator` with im2col copies, every swizzle, and blocks that run as a cluster."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from emulator import TYPES, Block
from hopper_emulator import WAIT_S, HopperEmulator

Array = np.ndarray[Any, Any]
MAPPED = 1 << 24  # addresses in other blocks' memory are multiples of this further on
SWIZZLE_BYTES = {1: 128, 2: 64, 3: 32}  # by the code in a matrix descriptor (PTX ISA, "Matrix Descriptor Format")


def swizzled(addresses: Array, width_bytes: int) -> Array:
    """16-byte chunk ^= 128-byte line, modulo the chunks of the width."""
    return addresses ^ (((addresses >> 7) & (width_bytes // 16 - 1)) << 4)


class ClusterBlock(Block):
    """A block among others that run at the same time."""

    def __init__(self, threads: int, shared_bytes: int, index: int, cluster: Cluster) -> None:
        super().__init__(threads, shared_bytes)
        self.index, self.cluster, self.running = index, cluster, threads
        self.barriers: dict[int, Any] = {}
        self.groups: dict[int, Any] = {}
        self.named: dict[int, threading.Barrier] = {}
        self.sent: dict[int, list[Any]] = {}  # sums, by the block of the tile that adds them up


class Cluster:
    def __init__(self, threads: int) -> None:
        self.threads, self.arrived, self.phase = threads, 0, 0
        self.blocks: list[ClusterBlock] = []


class ClusterEmulator(HopperEmulator):
    """Every thread of the blocks of one cluster at a time is a Python thread; `block` is the calling thread's."""

    def __init__(self, memory: Any, epilogue: Callable[..., Any], late: bool, seed: int = 0) -> None:
        self.here = threading.local()
        super().__init__(memory, epilogue, late, seed)
        self.met = threading.Condition(self.lock)  # at a cluster's barrier, where most threads wait most of the time
        emulator = self

        class Cuda(type(self.cuda)):  # type: ignore[misc]
            @property
            def blockIdx(self) -> Any:
                return SimpleNamespace(x=emulator.block.index)

        self.cuda = Cuda()
        self.types = SimpleNamespace(**{**vars(TYPES), "uint16": lambda value: int(value) % 2**16})

    @property
    def block(self) -> Any:
        return self.here.block

    @property
    def barriers(self) -> Any:
        return self.block.barriers

    @property
    def groups(self) -> Any:
        return self.block.groups

    def _start(self, copy: Callable[[], None]) -> None:
        self._start_in(self.block, copy)

    def _start_in(self, block: ClusterBlock, copy: Callable[[], None]) -> None:
        """A copy to or from the memory of any block of the cluster."""

        def within() -> None:
            caller, self.here.block = getattr(self.here, "block", None), block
            try:
                copy()
            finally:
                self.here.block = caller

        super()._start(within)

    def _fail(self, failure: BaseException | None) -> None:
        super()._fail(failure)
        with self.met:
            self.met.notify_all()

    def group_barrier(self, groups: int, threads: int) -> Callable[[int], None]:
        def wait(group: int) -> None:
            assert 0 <= group < groups
            with self.changed:
                barrier = self.block.named.setdefault(group + 1, threading.Barrier(threads))
            barrier.wait(WAIT_S)

        return wait

    @staticmethod
    def divide_u32(a: int, b: int) -> int:
        return a // b

    # --- tensor copies ----------------------------------------------------------------------------------------------
    def _chunks(self, shared: int, size: int, width_bytes: int) -> Array:
        width_bytes = width_bytes or 16  # of a row that is not swizzled
        assert shared % (8 * width_bytes) == 0 and shared >= 0 and shared + size <= self.block.shared.nbytes
        return swizzled(np.arange(size // 16) * 16 + shared, width_bytes) // 16

    def _land(self, shared: int, box: Array, width_bytes: int, barrier: int, blocks: list[ClusterBlock]) -> None:
        def copy() -> None:
            data = np.ascontiguousarray(box).view(np.uint8).reshape(-1, 16)
            assert self.block.running, "sends to a block that has left"
            self._shared_chunks()[self._chunks(shared, data.size, width_bytes)] = data
            self._update(barrier, 0, -data.size)

        for block in blocks:
            self._start_in(block, copy)

    def _receivers(self, multicast: bool, mask: int) -> list[ClusterBlock]:
        blocks = self.block.cluster.blocks
        if not multicast:
            return [self.block]
        assert mask < 1 << len(blocks) and mask >> blocks.index(self.block) & 1, "sends to no such block, or not to itself"
        return [block for rank, block in enumerate(blocks) if mask >> rank & 1]

    def tma_load_tiled(self, multicast: bool) -> Callable[..., None]:
        def load(shared: int, tensor: Any, c0: int, c1: int, c2: int, barrier: int, mask: int) -> None:
            param, array = tensor
            box = np.zeros(param.box[::-1], np.float16)
            inside, at = self._box(param, array, (c0, c1, c2))
            box[at] = array[inside]
            self._land(int(shared), box, param.swizzle_bytes, barrier, self._receivers(multicast, mask))

        return load

    def tma_load_im2col(self, multicast: bool) -> Callable[..., None]:
        def load(
            shared: int, tensor: Any, c: int, w: int, h: int, n: int, barrier: int, offset_w: int, offset_h: int, mask: int
        ) -> None:
            columns = self._im2col(*tensor, c, w, h, n, offset_w, offset_h)
            self._land(int(shared), columns, tensor[0].swizzle_bytes, barrier, self._receivers(multicast, mask))

        return load

    @staticmethod
    def _im2col(param: Any, array: Array, c: int, w: int, h: int, n: int, offset_w: int, offset_h: int) -> Array:
        """PTX ISA, "im2col mode": walks the base pixels between the corners, with the strides, from (n, h, w) on."""
        channels, width, height, images = param.dims
        _, stride_w, stride_h, _ = param.element_strides
        first_w, first_h = param.lower
        stop_w, stop_h = width + param.upper[0], height + param.upper[1]
        assert first_w <= w < stop_w and first_h <= h < stop_h and c < channels
        columns = np.zeros((param.pixels_per_column, param.channels_per_pixel), np.float16)
        depth = min(channels - c, param.channels_per_pixel)
        for column in columns:
            at_w, at_h = w + offset_w, h + offset_h
            if n < images and 0 <= at_w < width and 0 <= at_h < height:
                column[:depth] = array[n, at_h, at_w, c : c + depth]
            w += stride_w
            if w >= stop_w:
                w, h = first_w, h + stride_h
            if h >= stop_h:
                h, n = first_h, n + 1
        return columns

    def tma_store_2d(self, tensor: Any, shared: int, c0: int, c1: int) -> None:
        param, array = tensor
        array = array.reshape(-1, array.shape[-1])
        done = threading.Event()
        self.stores().append(done)

        def copy() -> None:
            columns, rows = param.box
            chunks = self._chunks(int(shared), columns * rows * 2, param.swizzle_bytes)
            box = self._shared_chunks()[chunks].reshape(-1).view(np.float16).reshape(rows, columns)
            inside, at = self._box(param, array, (c0, c1))
            assert np.isnan(array[inside]).all(), "an output is stored twice"
            array[inside] = box[at]
            done.set()

        self._start(copy)

    def stmatrix_x4(self, shared: int, *registers: int) -> None:
        lanes = self.block.exchange((shared, registers))
        matrix, row = divmod(self.block.local.thread % 32, 8)
        if matrix < len(registers):
            words = [lanes[4 * row + quarter][1][matrix] for quarter in range(4)]
            self._shared(int(shared), 16).view(np.uint32)[:] = words

    stmatrix_x2 = stmatrix_x4

    # --- wgmma ------------------------------------------------------------------------------------------------------
    def _operand(self, descriptor: int, rows: int) -> Array:
        width = SWIZZLE_BYTES[descriptor >> 62]
        start, stride = (descriptor & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        row = np.arange(rows)
        lines = start + (row // 8) * stride + (row % 8) * width
        chunks = swizzled(lines[:, None] + np.array([0, 16]), width) // 16
        return self._shared_chunks()[chunks].reshape(rows, -1).view(np.float16).astype(np.float32)

    # --- cluster ----------------------------------------------------------------------------------------------------
    def map_shared(self, shared: int, rank: int) -> int:
        assert 0 <= shared < MAPPED and rank < len(self.block.cluster.blocks)
        return (int(rank) + 1) * MAPPED + int(shared)

    def mbarrier_arrive_at_peer(self, address: int) -> None:
        rank, shared = divmod(int(address), MAPPED)
        peer = self.block.cluster.blocks[rank - 1]
        with self.changed:
            assert peer.running, "arrives at a barrier of a block that has left"
            peer.barriers[shared].update(1, 0)
            self.changed.notify_all()

    def cluster_arrive(self) -> None:
        cluster, local = self.block.cluster, self.block.local
        with self.changed:
            assert getattr(local, "phase", None) is None, "a thread arrives twice without waiting"
            local.phase = cluster.phase
            cluster.arrived += 1
            if cluster.arrived == cluster.threads:
                cluster.phase, cluster.arrived = cluster.phase + 1, 0
                self.met.notify_all()

    def cluster_wait(self) -> None:
        cluster, phase = self.block.cluster, self.block.local.phase
        self._wait_until(lambda: cluster.phase > phase, "a cluster's barrier", self.met)
        self.block.local.phase = None

    def exchange_fragments(self, blocks: int, octets: int, own_octets: int, stride_bytes: int) -> Callable[..., None]:
        """What a block sends to another leaves as one, when its last thread has brought its part."""

        def exchange(acc: list[Any], own: list[Any], shared: int, barrier: int, rank: int, first: int) -> None:
            sender, cluster = self.block, self.block.cluster
            assert cluster.blocks.index(sender) == first + rank < first + blocks <= len(cluster.blocks)
            assert cluster.phase > 0, "another block may still read what is written over"
            for owner in range(blocks):
                sums = np.array(acc[4 * own_octets * owner : min(4 * own_octets * (owner + 1), 4 * octets)], np.float32)
                if owner == rank:
                    own[: len(sums)] = sums.tolist()
                    continue
                slot = int(shared) + (rank - (rank > owner)) * own_octets * stride_bytes
                with self.changed:
                    parts = sender.sent.setdefault(owner, [])
                    parts.append((slot, sums))
                    complete = len(parts) == stride_bytes // 16
                if complete and len(sums):
                    self._start_in(
                        cluster.blocks[first + owner], functools.partial(self._receive, parts, barrier, stride_bytes)
                    )

        return exchange

    def _receive(self, parts: list[tuple[int, Array]], barrier: int, stride_bytes: int) -> None:
        assert self.block.running, "sends to a block that has left"
        for slot, sums in parts:
            for octet, values in enumerate(sums.reshape(-1, 4)):
                at = slot + octet * stride_bytes
                assert at % 16 == 0 and at + 16 <= self.block.shared.nbytes
                self.block.shared[at : at + 16] = values.view(np.uint8)
        self._update(barrier, 0, -sum(sums.nbytes for _, sums in parts))

    def add_fragments(self, slots: int, octets: int, stride_bytes: int) -> Callable[..., None]:
        def add(sums: list[Any], shared: int) -> None:
            for octet in range(octets):
                for slot in range(slots):
                    part = self._shared(int(shared) + (slot * octets + octet) * stride_bytes, 16).view(np.float32)
                    sums[4 * octet : 4 * octet + 4] += part

        return add

    # --- running ----------------------------------------------------------------------------------------------------
    def run(self, step: Any, buffers: Mapping[str, int], sms: int, tensors: Mapping[str, Array] | None = None) -> None:
        """Executes every block of a kernel step, cluster by cluster; tensor maps are over `tensors` by buffer name."""
        arguments = [
            (param, (tensors or {})[param.buffer])
            if param.kind == "tensor_map"
            else buffers[param.buffer]
            if param.kind == "pointer"
            else getattr(param, "value", 0.0)
            for param in step.params
        ]
        self.grid = step.grid.blocks(sms, step.cluster)
        self.stopped = False
        engine = threading.Thread(target=self._engine)
        engine.start()
        try:
            for first in range(0, self.grid, step.cluster):
                cluster = Cluster(step.cluster * step.block_threads)
                cluster.blocks = [
                    ClusterBlock(step.block_threads, step.dynamic_shared_bytes, index, cluster)
                    for index in range(first, first + step.cluster)
                ]
                self._run_cluster(step, arguments, cluster)
        finally:
            self.stopped = True
            engine.join()

    def _run_cluster(self, step: Any, arguments: list[Any], cluster: Cluster) -> None:
        failures: list[BaseException] = []
        workers = [
            threading.Thread(target=self._run_thread, args=(block, step.function, arguments, number, failures))
            for block in cluster.blocks
            for number in range(step.block_threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if self.failure or failures:
            raise self.failure or failures[0]

    def _run_thread(self, block: Any, function: Any, arguments: list[Any], number: int, failures: list[Any]) -> None:
        self.here.block = block
        block.local.thread = number
        try:
            function(*arguments)
        except BaseException as failure:
            failures.append(failure)
            self._fail(None if isinstance(failure, threading.BrokenBarrierError) else failure)
            for other in block.cluster.blocks:
                for barrier in (other.barrier, *other.warps, *other.named.values()):
                    barrier.abort()
        with self.changed:
            block.running -= 1
