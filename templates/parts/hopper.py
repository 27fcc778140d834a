"""Shared by the wgmma kernels: the sizes of a Hopper multiprocessor, and rules about them.

Quantities have the same names in all kernels: `threads` of a block, `shared_bytes` of a block, `blocks_per_sm`, `registers`
(the most of a thread), `predicted_cycles`.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"; CUDA programming guide, "Compute Capabilities".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedsearch.space import Columns, Constraint
from schedsearch.target import Target
from schedsearch.templates.parts.machine import machine

DTYPES = ("float16", "bfloat16")
ELEMENT_BYTES = 2  # of x and weight
WARPGROUP = 128  # threads
WGMMA_M = 64  # rows of a wgmma
BARRIER_BYTES = 8
ALIGNMENT_BYTES = 16  # of the addresses and strides that TMA takes
SWIZZLE_ROWS = 8  # a swizzle repeats after these
REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor
BLOCK_RESERVED_BYTES = 1024  # of shared memory, taken by the system from each resident block


def block_constraints(target: Target, columns: str, overhead_registers: int) -> tuple[Constraint, ...]:
    """Constraints: `blocks_per_sm` blocks fit on a multiprocessor. `columns` names the knob or quantity of wgmma's N."""
    limit, per_sm, threads_per_sm = target.shared_bytes_per_block, target.shared_bytes_per_sm, target.threads_per_sm
    return (
        Constraint(f"shared memory of a block <= {limit} bytes", lambda q: q["shared_bytes"] <= limit),
        Constraint(
            f"shared memory of the resident blocks <= {per_sm} bytes",
            lambda q: (q["shared_bytes"] + BLOCK_RESERVED_BYTES) * q["blocks_per_sm"] <= per_sm,
        ),
        Constraint(
            f"threads of the resident blocks <= {threads_per_sm}",
            lambda q: q["threads"] * q["blocks_per_sm"] <= threads_per_sm,
        ),
        Constraint(
            f"{columns} / 2 accumulators and {overhead_registers} more registers <= a thread's share of the register file",
            lambda q: q[columns] // 2 + overhead_registers <= q["registers"],
        ),
    )


def registers(q: Columns) -> Any:
    """The most registers of a thread: an even share of the register file in units of 8, at most 255."""
    return np.minimum(255, REGISTER_FILE // (q["threads"] * q["blocks_per_sm"]) // 8 * 8)


def blocks_at_once(target: Target, cluster: Any, blocks_per_sm: Any) -> Any:
    """Number of blocks that run at a time on all multiprocessors: whole clusters, each within a group of multiprocessors."""
    sms = np.where(cluster <= 2, target.sms, max(target.sms - machine(target).idle_sms, 1))
    return np.maximum(1, sms * blocks_per_sm // cluster) * cluster


def matrix_descriptor(row_bytes: int) -> int:
    """A shared-memory matrix descriptor without its address, for K-major rows that are swizzled over their width.

    Swizzle mode (1, 2, 3: 128, 64, 32 bytes) at bit 62, the distance of 8-row groups in units of 16 bytes at bit 32, the
    (unused) leading distance at bit 16. The caller adds the address in units of 16 bytes, at bit 0.
    """
    return ({128: 1, 64: 2, 32: 3}[row_bytes] << 62) | ((SWIZZLE_ROWS * row_bytes // 16) << 32) | (1 << 16)
