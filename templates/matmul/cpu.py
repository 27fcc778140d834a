"""Products of matrices on a CPU by the kernels of conv2d_cpu and conv2d_cpu_int8: packed weights and a register tile.

A tile of `ow_tile` rows x `oc_vectors` vectors of columns of y stays in registers over the whole depth. The weights are
packed in the order in which the tile reads them: once for dense, whose weights are constant, at every call for batch_matmul.
Other layouts of x and weight are other strides of the steps that pack them.
"""

from __future__ import annotations

import dataclasses

from schedsearch.config import Config
from schedsearch.ops.products import MatrixProductParams
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.conv2d import cpu, cpu_int8
from schedsearch.templates.conv2d.cpu_int8_kernels import BytePlan
from schedsearch.templates.conv2d.cpu_kernels import Plan
from schedsearch.templates.matmul.convolution import Convolution
from schedsearch.templates.parts.addressing import plain_strides
from schedsearch.templates.parts.cpu_epilogue import CpuEpilogue
from schedsearch.workload import Workload

_LEAST_PRODUCTS = 2**18  # of a thread: some 20 microseconds
_FLOATS, _INTEGERS = cpu.Conv2dCpu(), cpu_int8.Conv2dCpuInt8()


class _MatmulCpu(Template[MatrixProductParams]):
    """A base of templates; `inner` is the template of the convolution whose space and kernels it takes."""

    op = "dense"
    kind = "cpu"
    inner: Template

    @property
    def ops(self) -> tuple[str, ...]:
        return ("dense", "batch_matmul")

    def validate(self, workload: Workload[MatrixProductParams], target: Target) -> str | None:
        return self.inner.validate(Convolution.of(workload, rows=True).workload, target)

    def space(self, workload: Workload[MatrixProductParams], target: Target) -> ConfigSpace:
        product = Convolution.of(workload, rows=True)
        space = self.inner.space(product.workload, target)
        reads_in_place = product.x.axes == "NHWC" and not product.repeats_x
        return space if reads_in_place else space.restrict({"x_layout": ["packed"]})

    def default(self, workload: Workload[MatrixProductParams], target: Target, space: ConfigSpace) -> Config:
        """The default of conv2d, with no more threads than have work for longer than it takes to wake them."""
        config = self.inner.default(Convolution.of(workload, rows=True).workload, target, space)
        counts = [int(count) for knob in space.knobs if knob.name == "threads" for count in knob.values]
        busy = max(count for count in counts if count == 1 or count * _LEAST_PRODUCTS <= workload.flops // 2)
        return Config({**config, "threads": busy})

    def plain(self, workload: Workload[MatrixProductParams], target: Target, space: ConfigSpace) -> Config | None:
        return self.inner.plain(Convolution.of(workload, rows=True).workload, target, space)


class MatmulCpu(_MatmulCpu):
    """dense and batch_matmul in fp32 on a CPU, in every layout."""

    name = "matmul_cpu"
    version = cpu.Conv2dCpu.version
    inner = _FLOATS

    def kernel(self, workload: Workload[MatrixProductParams], target: Target, config: Config) -> KernelSource:
        product = Convolution.of(workload, rows=True)
        plan = dataclasses.replace(
            Plan.of(product.workload, config),
            x_strides=_x_strides(product, "NCHW"),
            w_strides=plain_strides(product.weight, "OIHW"),
            own_weights=product.own_weights,
        )
        constant = "weight" in workload.constants
        return cpu.source_of(plan, CpuEpilogue(product.workload), config["threads"], constant_weights=constant)


class MatmulCpuInt8(_MatmulCpu):
    """dense and batch_matmul of int8 and uint8 on a CPU, in every layout, with zero points."""

    name = "matmul_cpu_int8"
    version = cpu_int8.Conv2dCpuInt8.version
    inner = _INTEGERS

    def kernel(self, workload: Workload[MatrixProductParams], target: Target, config: Config) -> KernelSource:
        product = Convolution.of(workload, rows=True)
        plan = dataclasses.replace(
            BytePlan.of(product.workload, config),
            x=product.x,
            weight=product.weight,
            image_step=_x_strides(product, "N")[0],
            own_weights=product.own_weights,
        )
        constant = "weight" in workload.constants
        return cpu_int8.source_of(product.workload, plan, config["threads"], constant_weights=constant)


def _x_strides(product: Convolution, order: str) -> tuple[int, ...]:
    """Elements between neighbours of x along each axis in `order`; 0 between images that are one."""
    strides = plain_strides(product.x, order)
    return tuple(0 if axis == "N" and product.repeats_x else stride for axis, stride in zip(order, strides))
