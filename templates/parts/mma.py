"""One kind of warp matrix multiplication: its instruction, accumulators and operands.

Both operands are in shared memory, K-major, and reach registers by ldmatrix, which moves 8 rows of 16 bytes whatever their
elements are. For every dtype an instruction takes 16 rows, 8 columns and 32 bytes of k, and its fragments are the same
bytes. A new element type is therefore a new `Mma`: the instruction, the elements of 32 bytes, the type of the sums.

Source: PTX ISA, "Warp Level Matrix Instructions" (fragments of m16n8k8, m16n8k16, m16n8k32; ldmatrix).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import types

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts import warp_tiles

K_BYTES = 32  # of one instruction
CHUNK_BYTES = 16  # a row of an 8x8 matrix of ldmatrix


@dataclass(frozen=True)
class Mma:
    """mma.sync with operands of one kind.

        >>> Mma("int8").k, Mma("int8").chunk, Mma("int8").accumulator, Mma("float16").k
        (32, 16, 'int32', 16)

    Attributes:
        dtype: of both operands: float16, bfloat16, float32 (multiplied as TF32), float8_e4m3, float8_e5m2, int8 or uint8.
        dtype_b: of the second operand, if it differs: int8 and uint8 mix, and so do the float8 formats.
        products: TF32 products for one product of float32: 1, or 3 for errors close to float32's.
    """

    dtype: str
    dtype_b: str = ""
    products: int = 1

    @property
    def element_bytes(self) -> int:
        return dtype_of(self.dtype).nbytes

    @property
    def k(self) -> int:
        """Elements along k of one instruction."""
        return K_BYTES // self.element_bytes

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return CHUNK_BYTES // self.element_bytes

    @property
    def accumulator(self) -> str:
        """The dtype of sums: int32 for integers, otherwise float32. Sums of uint8 x uint8 are the same bits as uint32."""
        return "float32" if dtype_of(self.dtype).is_float else "int32"

    @property
    def accumulator_type(self) -> Any:
        """Numba's type of an accumulator, for the local array that holds them."""
        return getattr(types, self.accumulator)

    def registers_per_word(self, capability: tuple[int, int]) -> int:
        """Registers that 32 bits of a fragment take: parts and rests of split products; float8 that the compiler widens.

        Compute capability 8.9 and 12 multiply float8 by mma.sync (QMMA); others convert it to float16 first (HMMA).

            >>> Mma("float8_e4m3").registers_per_word((8, 9)), Mma("float8_e4m3").registers_per_word((9, 0))
            (1, 4)
        """
        if self.dtype.startswith("float8"):
            return 1 if capability == (8, 9) or capability[0] == 12 else 4
        return 2 if self.products == 3 else 1

    def load(self, wm: int, wn: int, row_bytes: int) -> Callable[..., Any]:
        """`load(a, b, x, w)`: the operands of 32 bytes of k of a warp's tile; see `warp_tiles.load_fragments`."""
        return warp_tiles.load_fragments(wm, wn, row_bytes)

    def multiply(self, wm: int, wn: int, row_bytes: int) -> Callable[..., Any]:
        """`multiply(acc, a, b, next_b, x, w)` adds their products and loads the next; see `warp_tiles.multiply_and_load`."""
        return warp_tiles.multiply_and_load(wm, wn, row_bytes, self.dtype, self.dtype_b, self.products)

    def stage(self, wm: int, wn: int, row_bytes: int) -> Callable[..., Any]:
        """`stage(acc, shared)` writes a warp's tile of sums to shared memory; see `warp_tiles.store_warp_tile`."""
        return warp_tiles.store_warp_tile(wm, wn, row_bytes, self.accumulator)
