"""A depthwise convolution as conv2d with groups of one channel: the same arrays in the same memory."""

from __future__ import annotations

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.workload import Workload


def as_convolution(workload: Workload[DepthwiseConv2dParams]) -> Workload[Conv2dParams]:
    """The conv2d workload that computes `forward`; its weight is OHWI or OIHW."""
    p = workload.params
    same = ("n", "c", "h", "w", "r", "s", "stride", "padding", "dilation", "dtype", "weight_dtype", "zero_points", "layout")
    params = {name: p[name] for name in same}
    channels = {"k": p.c * p.multiplier, "groups": p.c}
    return Workload("conv2d", {**params, **channels, "weight_layout": p.weight_layout, "epilogue": p.epilogue})
