"""Tensor memory and the products that add up in it: the tensor cores of compute capability 10.

A multiprocessor has 128 lanes of 512 columns, each of 32 bits. An address has the lane in its upper half and the column in
its lower one. A product of 128 rows has row i in lane i, and column j in the j-th column from its address on. A warp reads
and writes the 32 lanes from 32 * (its number % 4) on only.

One thread starts products, which then run by themselves, one after the other. `commit` lets a barrier know when those that
the thread has started are done. All operations of a `.sync` instruction are for whole warps.

Source: PTX ISA, "TensorCore 5th Generation Family Instructions"; CUTLASS, cute/arch/mma_sm100_desc.hpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.casts import u64
from schedsearch.templates.parts.hopper import SWIZZLE_ROWS
from schedsearch.templates.parts.ptx import REGISTER

K_BYTES = 32  # of one instruction
LANES, COLUMNS = 128, 512
LEAST_COLUMNS = 32  # that a block can get; it gets powers of two
WARP_LANES = 32
_OPERANDS = {  # dtype -> the kind of its products, and its format in their instruction descriptor
    "float16": ("f16", 0),
    "bfloat16": ("f16", 1),
    "float32": ("tf32", 2),
    "float8_e4m3": ("f8f6f4", 0),
    "float8_e5m2": ("f8f6f4", 1),
    "uint8": ("i8", 0),
    "int8": ("i8", 1),
}
_SUMS = {"float32": 1, "int32": 2}  # the format of sums

# --- A block's part of tensor memory -----------------------------------------------------------------------------------
allocate = device_op(  # writes the address of columns to shared memory; waits for other blocks if there are not enough
    "tensor_allocate",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$shared], $columns; "
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    ins={"shared": "u32", "columns": "u32"},
    convergent=True,
)
release = device_op(  # every block must, before it ends
    "tensor_release",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 $tensor, $columns;",
    ins={"tensor": "u32", "columns": "u32"},
    convergent=True,
)
# Around barriers of other kinds, where one thread's operations must come after another's.
fence_before = device_op("tensor_fence_before", "tcgen05.fence::before_thread_sync;")
fence_after = device_op("tensor_fence_after", "tcgen05.fence::after_thread_sync;")
commit = device_op(
    "tensor_commit",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$shared];",
    ins={"shared": "u32"},
)


# --- Products ------------------------------------------------------------------------------------------------------------
@functools.cache
def multiply_steps(k_steps: int, kind: str) -> Callable[..., None]:
    """`multiply(tensor, a, b, instruction, accumulate)`: `k_steps` products of 32 bytes of k, operands in shared memory.

    `a` and `b` are descriptors of K-major matrices, which advance by 32 bytes; `instruction` is that of `Product`. With
    accumulate = 0 the first product overwrites the sums.
    """
    product = f"tcgen05.mma.cta_group::1.kind::{kind} [$tensor], da, db, $instruction, p; "
    advance = "add.s64 da, da, 2; add.s64 db, db, 2; setp.ne.b32 p, 1, 0; "
    return device_op(
        "tensor_multiply",
        "{ .reg .pred p; .reg .b64 da, db; setp.ne.b32 p, $accumulate, 0; mov.b64 da, $a; mov.b64 db, $b; "
        + advance.join([product] * k_steps)
        + "}",
        ins={"tensor": "u32", "a": "u64", "b": "u64", "instruction": "u32", "accumulate": "i32"},
    )


@dataclass(frozen=True)
class Product:
    """Products of 128 rows x `columns` with sums in float32, or of integers in int32, which wrap around.

        >>> Product("bfloat16", 64).k, hex(Product("bfloat16", 64).instruction)
        (16, '0x8100490')
        >>> Product("uint8", 64, "int8").kind, hex(Product("uint8", 64, "int8").instruction)
        ('i8', '0x8100420')

    Attributes:
        dtype: of both operands: float16, bfloat16, float32 (cut to TF32), float8_e4m3, float8_e5m2, int8 or uint8.
        columns: multiples of 16 up to 256.
        dtype_b: of the second operand, if it differs: int8 and uint8 mix, and so do the float8 formats.
    """

    dtype: str
    columns: int
    dtype_b: str = ""

    @property
    def kind(self) -> str:
        """Of the instruction. Compute capability 10.0 has all four; 10.3 has no `i8`."""
        return _OPERANDS[self.dtype][0]

    @property
    def accumulator(self) -> str:
        """The dtype of sums. Sums of uint8 x uint8 are the same bits as uint32."""
        return "float32" if dtype_of(self.dtype).is_float else "int32"

    @property
    def k(self) -> int:
        """Elements along k of one instruction."""
        return K_BYTES // dtype_of(self.dtype).nbytes

    @property
    def instruction(self) -> int:
        """The instruction descriptor: formats of the sums, of A and of B at bits 4, 7 and 10, columns / 8 at bit 17 and rows
        / 16 at bit 24. Zeros say that both operands are K-major, not sparse and not negated; integers wrap around."""
        (_, a), (_, b) = _OPERANDS[self.dtype], _OPERANDS[self.dtype_b or self.dtype]
        return _SUMS[self.accumulator] << 4 | a << 7 | b << 10 | self.columns // 8 << 17 | LANES // 16 << 24

    @property
    def allocated(self) -> int:
        """Columns that a block must allocate for it."""
        return max(LEAST_COLUMNS, 1 << (self.columns - 1).bit_length())

    def steps(self, count: int) -> Callable[..., None]:
        """`multiply(tensor, a, b, accumulate)`: `count` instructions along k."""
        multiply, instruction = multiply_steps(count, self.kind), self.instruction

        def steps(tensor: Any, a: Any, b: Any, accumulate: Any) -> None:
            multiply(tensor, a, b, instruction, accumulate)

        return steps

    @staticmethod
    def matrix(row_bytes: int) -> Callable[[Any], Any]:
        """`matrix(address)`: the descriptor of a matrix in shared memory whose rows have 32, 64 or 128 bytes, swizzled.

        Swizzle mode (2, 4, 6: 128, 64, 32 bytes) at bit 61, the version 1 at bit 46, the distance of 8-row groups in units
        of 16 bytes at bit 32, the (unused) leading distance at bit 16, the address in units of 16 bytes at bit 0.
        """
        mode, group_bytes = {128: 2, 64: 4, 32: 6}[row_bytes], SWIZZLE_ROWS * row_bytes
        descriptor = mode << 61 | 1 << 46 | group_bytes // 16 << 32 | 1 << 16

        def matrix(address: Any) -> Any:
            return u64(descriptor) | u64(address >> 4)

        return matrix


# --- Lanes and registers: a thread has the lane of its warp's 32 that is its own number ------------------------------------
@functools.cache
def load_lane(columns: int, accumulator: str) -> Callable[..., None]:
    """`load(values, tensor)` reads `columns` (16 or 32) neighbouring columns of the thread's lane to an array of sums."""
    return device_op(
        "tensor_load_lane",
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{$values}}, [$tensor]; tcgen05.wait::ld.sync.aligned;",
        inout={"values": (REGISTER[accumulator], columns)},
        ins={"tensor": "u32"},
        convergent=True,
    )


@functools.cache
def store_shared_row(columns: int, accumulator: str) -> Callable[..., None]:
    """`store(values, shared)` writes a local array of sums to 16-byte aligned shared memory."""
    fours = [", ".join(f"$values[{first + i}]" for i in range(4)) for first in range(0, columns, 4)]
    kind = REGISTER[accumulator]
    word = "f32" if kind == "f32" else "b32"
    return device_op(
        "store_shared_row",
        "\n".join(f"st.shared.v4.{word} [$shared+{16 * number}], {{{four}}};" for number, four in enumerate(fours)),
        inout={"values": (kind, columns)},
        ins={"shared": "u32"},
    )
