"""A float32 as two TF32 numbers, coarse and fine: x = hi + lo, both with 10 stored bits.

Source: PTX ISA, "cvt" (`.tf32`: to nearest, ties away from zero); Markidis et al., "NVIDIA Tensor Core Programmability,
Performance & Precision", 2018, for sums of products of such parts.
"""

from __future__ import annotations

from schedsearch.backend.ops import device_op

# hi is x rounded to TF32. x - hi is a float32; lo is it, rounded to TF32. |lo| <= 2^-11 |x|, and |x - hi - lo| <= 2^-22 |x|.
# If rounding would overflow, hi is cut. If x is infinite or NaN, hi is x and lo is 0.
split = device_op(
    "split_tf32",
    "{ .reg .f32 x, h, l; .reg .b32 coarse, fine; .reg .pred over, finite; "
    "mov.b32 x, $word; cvt.rna.tf32.f32 coarse, x; and.b32 coarse, coarse, 0xFFFFE000; mov.b32 h, coarse; "
    "testp.infinite.f32 over, h; @over and.b32 coarse, $word, 0xFFFFE000; mov.b32 h, coarse; sub.rn.f32 l, x, h; "
    "cvt.rna.tf32.f32 fine, l; and.b32 fine, fine, 0xFFFFE000; mov.b32 l, fine; testp.finite.f32 finite, l; "
    "selp.b32 $lo, fine, 0, finite; mov.b32 $hi, coarse; }",
    ins={"word": "u32"},
    outs={"hi": "u32", "lo": "u32"},
    pure=True,
)
load_global_v4 = device_op(  # 16 bytes that no thread writes
    "load_global_v4",
    "ld.global.nc.v4.b32 {$w0, $w1, $w2, $w3}, [$address];",
    ins={"address": "u64"},
    outs={"w0": "u32", "w1": "u32", "w2": "u32", "w3": "u32"},
)
