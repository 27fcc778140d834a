"""A depthwise convolution as conv2d with groups of one channel: the same arrays in the same memory."""

from __future__ import annotations

from schedsearch.workload import Workload


def as_convolution(workload: Workload) -> Workload:
    """The conv2d workload that computes `forward`; its weight is OHWI or OIHW."""
    p = workload
    same = ("n", "c", "h", "w", "r", "s", "stride", "padding", "dilation", "dtype", "weight_dtype", "zero_points", "layout")
    params = {name: p.params[name] for name in same}
    channels = {"k": p.c * p.multiplier, "groups": p.c}
    return Workload("conv2d", {**params, **channels, "weight_layout": p.weight_layout, "epilogue": p.epilogue})
