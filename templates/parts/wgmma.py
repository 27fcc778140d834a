"""One kind of warpgroup matrix multiplication: its instruction, accumulators and operands.

Both operands are in shared memory, K-major and swizzled over the width of their rows; the result is in registers. For every
dtype, an instruction takes 32 bytes of k.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import types

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts import hopper, ptx
from schedsearch.templates.parts.casts import u64

K_BYTES = 32  # of one instruction


@dataclass(frozen=True)
class Wgmma:
    """wgmma with both operands of one dtype.

        >>> Wgmma("int8").k, Wgmma("int8").accumulator, Wgmma("float16").accumulators(64)
        (32, 'int32', 32)

    Attributes:
        dtype: of both operands: float16, bfloat16, float32 (computed as TF32), float8_e4m3, float8_e5m2, int8 or uint8.
        dtype_b: of the second operand, if it differs: int8 and uint8 mix.
    """

    dtype: str
    dtype_b: str = ""

    @property
    def element_bytes(self) -> int:
        return dtype_of(self.dtype).nbytes

    @property
    def k(self) -> int:
        """Elements along k of one instruction."""
        return K_BYTES // self.element_bytes

    @property
    def column_unit(self) -> int:
        """Numbers of columns are multiples of this. Integers may also have 8 or 24, which no template uses."""
        return 8 if self.accumulator == "float32" else 16

    @property
    def accumulator(self) -> str:
        """The dtype of sums: int32 for integers, otherwise float32."""
        return "float32" if dtype_of(self.dtype).kind == "float" else "int32"

    @property
    def accumulator_type(self) -> Any:
        """Numba's type of an accumulator, for the local array that holds them."""
        return getattr(types, self.accumulator)

    @staticmethod
    def accumulators(columns: int) -> int:
        """Number of accumulators of a thread for 64 rows x `columns`."""
        return columns // 2

    def steps(self, columns: int, count: int) -> Callable[..., Any]:
        """`multiply(acc, a, b, accumulate)`: `count` instructions along k; see `ptx.wgmma_steps`."""
        return ptx.wgmma_steps(columns, count, self.dtype, self.dtype_b)

    def wait(self, pending: int, columns: int) -> Callable[..., Any]:
        """`wait(acc)` waits until at most `pending` of the youngest `multiply` are in flight."""
        return ptx.wgmma_wait(pending, columns, self.accumulator)

    @staticmethod
    def matrix(row_bytes: int) -> Callable[[Any], Any]:
        """`matrix(address)`: the descriptor of a matrix in shared memory whose rows have 32, 64 or 128 bytes."""
        descriptor = hopper.matrix_descriptor(row_bytes)

        def matrix(address: Any) -> Any:
            return u64(descriptor) | u64(address >> 4)

        return matrix
