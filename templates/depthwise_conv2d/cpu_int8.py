"""Depthwise convolution of int8 and uint8 on the CPU, by the kernels of conv2d_cpu_int8 for groups of one channel."""

from __future__ import annotations

from schedsearch.config import Config
from schedsearch.ops.conv2d_formats import INTEGERS
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.conv2d.cpu_int8 import Conv2dCpuInt8
from schedsearch.templates.depthwise_conv2d.convolution import as_convolution
from schedsearch.workload import Workload

_INNER = Conv2dCpuInt8()


class DepthwiseConv2dCpuInt8(Template[DepthwiseConv2dParams]):
    """depthwise_conv2d of int8 and uint8 on a CPU, in every layout: vectors of channels, or of pixels in NCHW."""

    name = "depthwise_conv2d_cpu_int8"
    version = 1 + Conv2dCpuInt8.version  # if either version changes, a configuration means another kernel
    op = "depthwise_conv2d"
    kind = "cpu"

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        if workload.params.dtype not in INTEGERS:
            return f"dtype is {workload.params.dtype}; allowed: {', '.join(INTEGERS)}"
        return _INNER.validate(as_convolution(workload), target)

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        return _INNER.space(as_convolution(workload), target)

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        return _INNER.default(as_convolution(workload), target, space)

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        return _INNER.plain(as_convolution(workload), target, space)

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        return _INNER.kernel(as_convolution(workload), target, config)
