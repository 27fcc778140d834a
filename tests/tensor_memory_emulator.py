"""`ClusterEmulator` with tensor memory and the products of tcgen05.

Products are described by the bits of their descriptors, as the PTX ISA has them: "Instruction descriptor", "Shared memory
descriptor", "Tensor memory addressing". They run in the order in which a thread starts them, at once or as late as the
kernel's waits allow, and read shared memory when they run. A block finds old numbers in its columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from cluster_emulator import ClusterEmulator
from hopper_emulator import HopperBlock, multiplied, swizzled

from schedsearch.testing.kernel_threads import Threads

LANES, COLUMNS = 128, 512
SWIZZLE_BYTES = {2: 128, 4: 64, 6: 32}  # by the mode in bits 61 to 63 of a shared memory descriptor
FORMATS = {  # of an operand, by the kind of the instruction and the bits of its descriptor
    "f16": {0: "float16", 1: "bfloat16"},
    "tf32": {2: "float32"},
    "f8f6f4": {0: "float8_e4m3", 1: "float8_e5m2"},
    "i8": {0: "uint8", 1: "int8"},
}
SUMS = {1: "float32", 2: "int32"}
FIRST_COLUMN = 96  # that a block gets: addresses of sums are not 0


class TensorBlock(HopperBlock):
    def __init__(self, threads: Threads, size: int, shared_bytes: int, index: int) -> None:
        super().__init__(threads, size, shared_bytes, index)
        self.tensor = np.full((LANES, COLUMNS), np.nan)  # float64, which holds every sum of these tests exactly
        self.sums = ""  # their dtype
        self.columns = range(0)  # those that the block has
        self.products: list[Callable[[], None]] = []  # that were started
        self.finished = 0  # of them


class TensorEmulator(ClusterEmulator):
    def stand_in(self, monkeypatch: Any, *modules: object) -> None:
        super().stand_in(monkeypatch, *modules)
        for module in modules:
            if hasattr(module, "tensor_memory"):
                monkeypatch.setattr(module, "tensor_memory", self)
            if hasattr(module, "multiply_steps"):
                monkeypatch.setattr(module, "multiply_steps", self.multiply_steps)

    def new_block(self, size: int, shared_bytes: int, index: int) -> TensorBlock:
        return TensorBlock(self.threads, size, shared_bytes, index)

    # --- a block's part of tensor memory ------------------------------------------------------------------------------
    def allocate(self, shared: int, columns: int) -> None:
        """The whole warp must come, and a power of two of columns is asked for."""
        assert columns in (32, 64, 128, 256, 512)
        self.warp_barrier()
        if self.thread.number % 32 == 0:
            assert not self.block.columns, "a block allocates twice"
            self.block.columns = range(FIRST_COLUMN, FIRST_COLUMN + columns)
            self._shared(int(shared), 4).view(np.uint32)[0] = FIRST_COLUMN

    def release(self, tensor: int, columns: int) -> None:
        self.warp_barrier()
        if self.thread.number % 32 == 0:
            assert self.block.columns == range(tensor, tensor + columns), "a block releases what it does not have"
            self.block.columns = range(0)

    def _run_thread(self, function: Callable[..., None], arguments: Any) -> None:
        super()._run_thread(function, arguments)
        assert self.block.running or not self.block.columns, "a block ends with columns of tensor memory"

    def fence_before(self) -> None:
        pass

    fence_after = fence_before

    # --- products -------------------------------------------------------------------------------------------------------
    def multiply_steps(self, k_steps: int, kind: str) -> Callable[..., None]:
        def multiply(tensor: int, a: int, b: int, instruction: int, accumulate: int) -> None:
            for step in range(k_steps):
                more = bool(step or accumulate)
                at = tensor, a + 2 * step, b + 2 * step
                self.block.products.append(functools.partial(self._product, self.block, kind, *at, instruction, more))

        return multiply

    def commit(self, shared: int) -> None:
        block, started = self.block, len(self.block.products)

        def complete() -> None:
            while block.finished < started:
                block.products[block.finished]()
                block.finished += 1
            block.barriers[int(shared)].update(1, 0)

        self._start(complete)

    @staticmethod
    def _product(block: Any, kind: str, tensor: int, a: int, b: int, instruction: int, accumulate: bool) -> None:
        """D = A x B transposed (+ D): 128 rows x N in float32 or int32, 32 bytes of k."""
        assert instruction & 0xF == 0, "the product is sparse, or its sums saturate"
        block.sums = SUMS[instruction >> 4 & 3]
        assert block.sums == ("int32" if kind == "i8" else "float32")
        assert instruction >> 13 & 0xF == 0, "an operand is negated, or not K-major"
        rows, columns = (instruction >> 24 & 0x1F) * 16, (instruction >> 17 & 0x3F) * 8
        assert rows == LANES and columns in range(16, 257, 16)
        assert tensor >> 16 == 0 and set(range(tensor, tensor + columns)) <= set(block.columns)
        left, right = (
            _operand(block, descriptor, count, FORMATS[kind][instruction >> place & 7])
            for descriptor, count, place in ((a, rows, 7), (b, columns, 10))
        )
        sums = block.tensor[:, tensor : tensor + columns]
        with np.errstate(invalid="ignore", over="ignore"):
            sums[:] = left @ right.T + (sums if accumulate else 0)
        if block.sums == "int32":
            sums[:] = sums.astype(np.int64).astype(np.int32)  # wrapped around

    # --- lanes and registers --------------------------------------------------------------------------------------------
    def load_lane(self, columns: int, accumulator: str) -> Callable[..., None]:
        def load(values: list[Any], tensor: int) -> None:
            self.warp_barrier()
            lane, column = tensor >> 16, tensor & 0xFFFF
            assert lane == self.thread.number // 32 % 4 * 32, "a warp reads lanes of another one"
            assert set(range(column, column + columns)) <= set(self.block.columns)
            assert accumulator == self.block.sums
            found = self.block.tensor[lane + self.thread.number % 32, column : column + columns]
            values[:] = found.astype(accumulator).tolist()

        return load

    def store_shared_row(self, columns: int, accumulator: str) -> Callable[..., None]:
        def store(values: list[Any], shared: int) -> None:
            for first in range(0, columns, 4):
                self._shared(int(shared) + 4 * first, 16).view(accumulator)[:] = values[first : first + 4]

        return store


def _operand(block: Any, descriptor: int, rows: int, dtype: str) -> Any:
    """`rows` x 32 bytes of numbers, K-major, swizzled over the width of their rows."""
    width, version = SWIZZLE_BYTES[descriptor >> 61], descriptor >> 46 & 7
    assert version == 1 and descriptor >> 49 & 0xFFF == 0
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    row = np.arange(rows)
    lines = start + row // 8 * stride + row % 8 * width
    chunks = swizzled(lines[:, None] + np.array([0, 16]), width) // 16
    assert chunks.max() * 16 < block.shared.nbytes
    return multiplied(block.chunks()[chunks].reshape(rows, -1), dtype)
