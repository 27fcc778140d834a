"""`HopperEmulator` with im2col copies, every swizzle, and blocks that run as a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from hopper_emulator import HopperBlock, HopperEmulator, multiplied, swizzled

from schedsearch.typed import Array

MAPPED = 1 << 24  # addresses in other blocks' memory are multiples of this further on
SWIZZLE_BYTES = {1: 128, 2: 64, 3: 32}  # by the code in a matrix descriptor (PTX ISA, "Matrix Descriptor Format")


class ClusterEmulator(HopperEmulator):
    @staticmethod
    def divide_u32(a: int, b: int) -> int:
        return a // b

    # --- tensor copies ----------------------------------------------------------------------------------------------
    def _chunks(self, shared: int, size: int, width_bytes: int) -> Array:
        """The positions in shared memory of the 16-byte chunks of rows of `width_bytes`, swizzled; 0: not swizzled."""
        assert shared % (8 * (width_bytes or 16)) == 0 and shared >= 0 and shared + size <= self.block.shared.nbytes
        return swizzled(np.arange(size // 16) * 16 + shared, width_bytes or 16) // 16

    def _land(self, shared: int, box: Array, width_bytes: int, barrier: int, blocks: list[HopperBlock]) -> None:
        data = np.ascontiguousarray(box).view(np.uint8).reshape(-1, 16)
        chunks = self._chunks(shared, data.size, width_bytes)

        def copy_to(block: HopperBlock) -> None:
            assert block.running, "sends to a block that has left"
            block.chunks()[chunks] = data
            block.barriers[int(barrier)].update(0, -data.size)

        for block in blocks:
            self._start(functools.partial(copy_to, block))

    def _receivers(self, multicast: bool, mask: int) -> list[HopperBlock]:
        blocks = self.block.cluster.blocks
        if not multicast:
            return [self.block]
        assert mask < 1 << len(blocks) and mask >> blocks.index(self.block) & 1, "sends to no such block, or not to itself"
        return [block for rank, block in enumerate(blocks) if mask >> rank & 1]

    def tma_load_tiled(self, multicast: bool) -> Callable[..., None]:
        def load(shared: int, tensor: Any, c0: int, c1: int, c2: int, barrier: int, mask: int) -> None:
            param, array = tensor
            box = np.zeros(param.box[::-1], array.dtype)
            inside, at = self._box(param, array, (c0, c1, c2))
            box[at] = array[inside]
            self._land(int(shared), box, param.swizzle_bytes, barrier, self._receivers(multicast, mask))

        return load

    def tma_load_interleaved(self, multicast: bool) -> Callable[..., None]:
        def load(shared: int, tensor: Any, c0: int, c1: int, c4: int, barrier: int, mask: int) -> None:
            param, array = tensor
            row_bytes = param.strides_bytes[0]
            assert param.strides_bytes[2] == array.shape[1] * row_bytes and array.flags.c_contiguous
            strides = (*param.strides_bytes[::-1], array.itemsize)
            view = np.lib.stride_tricks.as_strided(array, param.dims[::-1], strides)
            box = np.zeros(param.box[::-1], array.dtype)
            inside, at = self._box(param, view, (c0, c1, 0, 0, c4))
            box[at] = view[inside]
            self._land(int(shared), box, param.swizzle_bytes, barrier, self._receivers(multicast, mask))

        return load

    def tma_load_boxes(self, rank: int, multicast: bool) -> Callable[..., None]:
        """The array of the tensor is flat; it lies in memory as the map's strides say."""

        def load(shared: int, tensor: Any, *arguments: int) -> None:
            param, array = tensor
            coordinates, (barrier, mask) = arguments[:rank], arguments[rank:]
            assert array.ndim == 1 and len(coordinates) == rank
            view = np.lib.stride_tricks.as_strided(
                array, param.dims[::-1], (*param.strides_bytes[::-1], array.itemsize), writeable=False
            )
            reach = sum((size - 1) * step for size, step in zip(view.shape, view.strides)) + array.itemsize
            assert reach <= array.nbytes, "the map reaches beyond its buffer"
            box = np.zeros(param.box[::-1], array.dtype)
            inside, at = self._box(param, view, coordinates)
            box[at] = view[inside]
            self._land(int(shared), box, param.swizzle_bytes, barrier, self._receivers(multicast, mask))

        return load

    def tma_load_im2col(self, multicast: bool) -> Callable[..., None]:
        def load(
            shared: int, tensor: Any, c: int, w: int, h: int, n: int, barrier: int, offset_w: int, offset_h: int, mask: int
        ) -> None:
            param, array = tensor
            self.check_order(param.buffer)
            columns = self._im2col(param, array, c, w, h, n, offset_w, offset_h)
            self._land(int(shared), columns, tensor[0].swizzle_bytes, barrier, self._receivers(multicast, mask))

        return load

    @staticmethod
    def _im2col(param: Any, array: Array, c: int, w: int, h: int, n: int, offset_w: int, offset_h: int) -> Array:
        """PTX ISA, "im2col mode": walks the base pixels between the corners, with the strides, from (n, h, w) on."""
        channels, width, height, images = param.dims
        array = array.reshape(param.dims[::-1])
        _, stride_w, stride_h, _ = param.element_strides
        first_w, first_h = param.lower
        stop_w, stop_h = width + param.upper[0], height + param.upper[1]
        assert first_w <= w < stop_w and first_h <= h < stop_h and c < channels
        columns = np.zeros((param.pixels_per_column, param.channels_per_pixel), array.dtype)
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

    def tma_store_2d(self, tensor: object, shared: int, c0: int, c1: int) -> None:
        self._store_box(tensor, shared, (c0, c1))

    def tma_store_3d(self, tensor: object, shared: int, c0: int, c1: int, c2: int) -> None:
        self._store_box(tensor, shared, (c0, c1, c2))

    def tma_store_4d(self, tensor: object, shared: int, *coordinates: int) -> None:
        self._store_box(tensor, shared, coordinates)

    def _store_box(self, tensor: Any, shared: int, coordinates: tuple[int, ...]) -> None:
        param, array = tensor
        array, box = _seen_through(param, array), param.box[::-1]
        chunks = self._chunks(int(shared), int(np.prod(box)) * array.itemsize, param.swizzle_bytes)
        self._store(array, self._stored_box(param, array, coordinates), chunks, box)

    def stmatrix_x4(self, shared: int, *registers: int) -> None:
        lanes = self.block.exchange((shared, registers))
        matrix, row = divmod(self.thread.number % 32, 8)
        if matrix < len(registers):
            words = [lanes[4 * row + quarter][1][matrix] for quarter in range(4)]
            self._shared(int(shared), 16).view(np.uint32)[:] = words

    stmatrix_x2 = stmatrix_x4

    # --- wgmma ------------------------------------------------------------------------------------------------------
    def _operand(self, block: HopperBlock, descriptor: int, rows: int, dtype: str) -> Array:
        width = SWIZZLE_BYTES[descriptor >> 62]
        start, stride = (descriptor & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        row = np.arange(rows)
        lines = start + (row // 8) * stride + (row % 8) * width
        chunks = swizzled(lines[:, None] + np.array([0, 16]), width) // 16
        return multiplied(block.chunks()[chunks].reshape(rows, -1), dtype)

    # --- cluster ----------------------------------------------------------------------------------------------------
    def map_shared(self, shared: int, rank: int) -> int:
        assert 0 <= shared < MAPPED and rank < len(self.block.cluster.blocks)
        return (int(rank) + 1) * MAPPED + int(shared)

    def mbarrier_arrive_at_peer(self, address: int) -> None:
        rank, shared = divmod(int(address), MAPPED)
        peer = self.block.cluster.blocks[rank - 1]
        assert peer.running, "arrives at a barrier of a block that has left"
        peer.barriers[shared].update(1, 0)

    def cluster_arrive(self) -> None:
        cluster = self.block.cluster
        assert self.thread.cluster_phase is None, "a thread arrives twice without waiting"
        self.thread.cluster_phase = cluster.phase
        cluster.arrived += 1
        if cluster.arrived == cluster.threads:
            cluster.phase, cluster.arrived = cluster.phase + 1, 0

    def cluster_wait(self) -> None:
        cluster, phase = self.block.cluster, self.thread.cluster_phase
        assert phase is not None, "a thread waits without having arrived"
        self.threads.wait_until(lambda: cluster.phase > phase, "a cluster's barrier")
        self.thread.cluster_phase = None

    def exchange_fragments(
        self, blocks: int, octets: int, own_octets: int, stride_bytes: int, accumulator: str = "float32"
    ) -> Callable[..., None]:
        def exchange(acc: list[Any], own: list[Any], shared: int, barrier: int, rank: int, first: int) -> None:
            cluster = self.block.cluster
            assert cluster.blocks.index(self.block) == first + rank < first + blocks <= len(cluster.blocks)
            assert cluster.phase > 0, "another block may still read what is written over"
            for owner in range(blocks):
                sums = np.array(acc[4 * own_octets * owner : min(4 * own_octets * (owner + 1), 4 * octets)], accumulator)
                if owner == rank:
                    own[: len(sums)] = sums.tolist()
                elif len(sums):
                    slot = int(shared) + (rank - (rank > owner)) * own_octets * stride_bytes
                    to = cluster.blocks[first + owner], slot, int(barrier)
                    self._start(functools.partial(self._receive, *to, sums.reshape(-1, 4), stride_bytes))

        return exchange

    @staticmethod
    def _receive(block: HopperBlock, slot: int, barrier: int, sums: Array, stride_bytes: int) -> None:
        assert block.running, "sends to a block that has left"
        for octet, values in enumerate(sums):
            at = slot + octet * stride_bytes
            assert at % 16 == 0 and at + 16 <= block.shared.nbytes
            block.shared[at : at + 16] = values.view(np.uint8)
        block.barriers[barrier].update(0, -sums.nbytes)

    def add_fragments(self, slots: int, octets: int, stride_bytes: int, accumulator: str = "float32") -> Callable[..., None]:
        def add(sums: list[Any], shared: int) -> None:
            for octet in range(octets):
                for slot in range(slots):
                    part = self._shared(int(shared) + (slot * octets + octet) * stride_bytes, 16).view(accumulator)
                    sums[4 * octet : 4 * octet + 4] += part

        return add


def _seen_through(param: Any, array: Any) -> Any:
    """The array in memory as the axes of a tensor map, the fastest one last."""
    steps = (array.itemsize, *param.strides_bytes)
    reach = array.itemsize + sum((extent - 1) * step for extent, step in zip(param.dims, steps))
    assert array.flags.c_contiguous and reach <= array.nbytes, "the map reaches beyond the array"
    return np.lib.stride_tricks.as_strided(array.reshape(-1), param.dims[::-1], steps[::-1])
