"""Weights of several small groups as those of one: block-diagonal, with zeros between the groups.

    merged[k, tap, j * c + i] = weight[k, tap, i] if k belongs to the j-th group of the merged ones, else 0

with c input channels in each group. A constant step of its own writes them to a workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.launch import Grid, Pointer
from schedsearch.template import KernelStep
from schedsearch.templates.parts import ptx
from schedsearch.workload import Workload

MERGED = "merged_weight"  # the workspace
WORD = 4  # int8 or uint8 that a thread copies
THREADS = 128


def merged_bytes(workload: Workload, merged: int) -> int:
    """Bytes of the merged weights of int8 or uint8."""
    return int(workload.k * workload.r * workload.s * (workload.c // workload.groups) * merged)


def merge_step(workload: Workload, merged: int) -> KernelStep:
    """The step that merges each `merged` neighbouring groups of a workload in NHWC; a group has a multiple of 4 channels."""
    words = merged_bytes(workload, merged) // WORD
    return KernelStep(
        _build_merge(workload, merged, words),
        (Pointer("weight"), Pointer(MERGED)),
        Grid(-(-words // THREADS)),
        THREADS,
        constant=True,
        shaped_by=frozenset(),
    )


def _build_merge(workload: Workload, merged: int, words: int) -> Callable[..., None]:
    """The kernel (weight, merged): a thread for each word."""
    outputs, taps = workload.k // workload.groups, workload.r * workload.s
    group_words = workload.c // workload.groups // WORD

    def merge(weight: Any, to: Any) -> None:
        word = types.uint64(types.uint64(cuda.blockIdx.x) * types.uint64(THREADS) + types.uint64(cuda.threadIdx.x))
        if word < types.uint64(words):
            row = types.uint32(word // types.uint64(merged * group_words))  # k * taps + tap
            within = types.uint32(word - types.uint64(row) * types.uint64(merged * group_words))
            group = types.uint32(within // types.uint32(group_words))
            own_group = types.uint32(types.uint32(row // types.uint32(taps * outputs)) % types.uint32(merged))
            value = types.uint32(0)
            if group == own_group:
                at = types.uint64(types.uint64(row) * types.uint64(group_words) + types.uint64(within - group * group_words))
                value = ptx.load_global_u32(types.uint64(weight + at * types.uint64(WORD)))
            ptx.store_global_u32(types.uint64(to + word * types.uint64(WORD)), value)

    return merge
