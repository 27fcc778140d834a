"""The multiplication of conv2d_stem: from words of a patch in shared memory to accumulators.

A word has two neighbouring values of 16 bits, or four of 8 bits. In each octet of k a thread has the word lane % 4 of its
two pixels, lane / 4 and 8 further on. `stem.py` explains what a run, an octet and a patch are.

Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16" and "... .m64nNk32".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.templates.conv2d.stem_sizes import OCTET_BYTES, ROW_BYTES, STEPS_OF_ROW, WORD_BYTES, Plan, Runs
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import u32
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.workload import Workload


def octet_offsets(workload: Workload[Conv2dParams], patch_w: int) -> list[int | None]:
    """For each octet of k, its distance in bytes from a pixel's first value in the patch; None for an octet of filler."""
    w, runs = workload.params, Runs.of(workload)
    row_bytes = w.dilation[0] * patch_w * runs.element_bytes
    offsets: list[int | None] = [row * row_bytes + octet * OCTET_BYTES for row in range(w.r) for octet in range(runs.octets)]
    return offsets + [None] * (2 * runs.steps - len(offsets))


def multiply_patch(workload: Workload[Conv2dParams], patch_w: int, register_steps: int) -> Callable[..., Any]:
    """A device operation: the 64 pixels of a warpgroup times all weights, over all of k, from patch to accumulators.

    It takes (accumulators[columns // 2], pixel, pixel_8, shift, shift_8, first_mask, last_mask, weights). `pixel` is the
    shared address of the thread's word in the first octet of pixel lane / 4 of its warp, `pixel_8` that of pixel
    lane / 4 + 8, both rounded down to words; `shift` counts the bits that this dropped. The masks have the bits of a word
    that are of the run in its first and last octet: the patch holds other values beside it, which may be infinite. Whole
    numbers need no masks, because the weights beside a run are zero. `weights` is the weights' matrix descriptor.
    """
    runs, wgmma = Runs.of(workload), Wgmma(workload.params.dtype, workload.params.weight_dtype)
    masks: list[tuple[str, ...]] = [()] * runs.octets
    if masked(workload) and runs.skipped:
        masks[0] += ("$first_mask",)
    if masked(workload) and runs.values % runs.octet_values:
        masks[-1] += ("$last_mask",)
    offsets = tuple(octet_offsets(workload, patch_w))
    return _multiply_patch(offsets, tuple(masks), runs.shifted, runs.columns, register_steps, wgmma)


def masked(workload: Workload[Conv2dParams]) -> bool:
    """Whether values beside a run must be cleared: an infinity among them, times a zero weight, would be NaN."""
    return Wgmma(workload.params.dtype).accumulator == "float32"


@functools.cache
def _multiply_patch(
    offsets: tuple[int | None, ...],
    masks: tuple[tuple[str, ...], ...],
    shifted: bool,
    columns: int,
    register_steps: int,
    wgmma: Wgmma,
) -> Callable[..., Any]:
    steps = len(offsets) // 2
    lines = [f"{{ .reg .pred p; .reg .b64 db; .reg .b32 low, high, a<{4 * steps}>;"]
    for first in range(0, steps, register_steps):
        stop = min(first + register_steps, steps)
        for octet in range(2 * first, 2 * stop):
            for half, pixel in enumerate(("pixel", "pixel_8")):
                lines += _load_word(f"a{2 * octet + half}", f"${pixel}", f"$shift{pixel[5:]}", offsets[octet], shifted)
                if offsets[octet] is not None:
                    for mask in masks[octet % len(masks)]:
                        lines.append(f"and.b32 a{2 * octet + half}, a{2 * octet + half}, {mask};")
        lines.append("wgmma.fence.sync.aligned;")
        for step in range(first, stop):
            a = ", ".join(f"a{4 * step + i}" for i in range(4))
            offset = step // STEPS_OF_ROW * columns * ROW_BYTES + step % STEPS_OF_ROW * (ROW_BYTES // STEPS_OF_ROW)
            lines.append(f"add.s64 db, $weights, {offset // 16}; setp.ne.b32 p, {int(step > 0)}, 0;")
            lines.append(ptx.wgmma_from_registers(columns, a, "db", wgmma.dtype, wgmma.dtype_b))
        lines.append("wgmma.commit_group.sync.aligned;")
        # The next round's operands may take the registers of the previous round.
        lines.append(f"wgmma.wait_group.sync.aligned {int(stop < steps)};")
    return device_op(
        "multiply_patch",
        "\n".join([*lines, "}"]),
        inout={"acc": (ptx.REGISTER[wgmma.accumulator], wgmma.accumulators(columns))},
        ins={
            "pixel": "u32",
            "pixel_8": "u32",
            "shift": "u32",
            "shift_8": "u32",
            "first_mask": "u32",
            "last_mask": "u32",
            "weights": "u64",
        },
        unused=("shift", "shift_8", "first_mask", "last_mask"),
    )


def _load_word(to: str, pixel: str, shift: str, offset: int | None, shifted: bool) -> list[str]:
    if offset is None:
        return [f"mov.b32 {to}, 0;"]
    if not shifted:
        return [f"ld.shared.b32 {to}, [{pixel}+{offset}];"]
    return [
        f"ld.shared.b32 low, [{pixel}+{offset}]; ld.shared.b32 high, [{pixel}+{offset + WORD_BYTES}];",
        f"shf.r.wrap.b32 {to}, low, high, {shift};",
    ]


# --- The functions that the kernel captures ----------------------------------------------------------------------------
def address_of_value(workload: Workload[Conv2dParams], runs: Runs, plan: Plan) -> Callable[..., Any]:
    """`address_of(first_patch, row, column, value)`: (address, shift) of a value of the run of a pixel of the tile.

    The address is rounded down to a word; the shift counts the bits that this dropped."""
    stride_h, patch_w, pixel_values, lead = workload.params.stride[0], plan.patch_w, runs.pixel_values, runs.lead
    element_bytes, within_word = runs.element_bytes, WORD_BYTES - runs.element_bytes

    def address_of(first_patch: Any, row: Any, column: Any, value: Any) -> Any:
        at = u32((row * stride_h * patch_w + column * pixel_values + lead + value) * element_bytes)
        return u32(first_patch + at - (at & within_word)), u32((at & within_word) << 3)

    return address_of


def masks_of_word(workload: Workload[Conv2dParams], runs: Runs) -> Callable[[Any], Any]:
    """`masks_of(value)`: the masks of `multiply_patch` for a word that starts at this value of an octet."""
    skipped, last_values = runs.skipped, runs.values - (runs.octets - 1) * runs.octet_values

    def masks_of(value: Any) -> Any:
        first, last = u32(0xFFFF0000 if value < skipped else 0xFFFFFFFF), u32(0)
        if value < last_values:
            last = u32(0xFFFF if value + 1 == last_values else 0xFFFFFFFF)
        return first, last

    def no_masks(value: Any) -> Any:
        return u32(0), u32(0)

    return masks_of if masked(workload) else no_masks
