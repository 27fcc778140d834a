"""Products of matrices on a GPU by kernels of conv2d: matmul_wgmma, matmul_mma and matmul_simt.

Each makes the convolution of `Convolution` and asks the template of conv2d for its space, its default and its kernel. These
read x as MK and weight as NK. Other layouts are transposed first, by a step of `layout_transform.repack`; that of a constant
weight runs once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from schedsearch.config import Config
from schedsearch.ops import ArgSpec, Layout
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.mma import Conv2dMma
from schedsearch.templates.conv2d.simt import Conv2dSimt
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.conv2d.workspaces import over_workspaces
from schedsearch.templates.layout_transform.repack import Repack
from schedsearch.templates.matmul.convolution import Convolution
from schedsearch.workload import Workload

ROWS_OF = {"x": "MK", "weight": "NK"}  # the layouts of matrices that the kernels read


class _MatmulCuda(Template):
    """A base of templates; `inner` is the template of the convolution whose space and kernels it takes."""

    op = "dense"
    kind = "cuda"
    inner: Template

    @property
    def ops(self) -> tuple[str, ...]:
        return ("dense", "batch_matmul")

    def validate(self, workload: Workload, target: Target) -> str | None:
        product = Convolution.of(in_rows(workload))
        if product.own_weights or product.repeats_x:
            return (
                "the products have weights of their own, or share x; allowed: one weight, and a matrix of x for each product"
            )
        if reason := self.inner.validate(product.workload, target):
            return f"as {product.workload.label}: {reason}"
        return transposed_problem(workload, target)

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return self.inner.space(Convolution.of(in_rows(workload)).workload, target)

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return self.inner.default(Convolution.of(in_rows(workload)).workload, target, space)

    def plain(self, workload: Workload, target: Target, space: ConfigSpace) -> Config | None:
        return self.inner.plain(Convolution.of(in_rows(workload)).workload, target, space)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        product = Convolution.of(in_rows(workload))
        return after_transposing(workload, target, self.inner.kernel(product.workload, target, config))


class MatmulWgmma(_MatmulCuda):
    """dense and batch_matmul for compute capability 9.0, on tensor cores; dtypes of conv2d_wgmma."""

    name = "matmul_wgmma"
    version = Conv2dWgmma.version
    inner = Conv2dWgmma()


class MatmulMma(_MatmulCuda):
    """dense and batch_matmul from compute capability 8.0 on, on tensor cores, of every size; dtypes of conv2d_mma."""

    name = "matmul_mma"
    version = Conv2dMma.version
    inner = Conv2dMma()


class MatmulSimt(_MatmulCuda):
    """dense and batch_matmul of fp32, int8 and uint8 on CUDA cores, of every size, with zero points."""

    name = "matmul_simt"
    version = Conv2dSimt.version
    inner = Conv2dSimt()


def in_rows(workload: Workload) -> Workload:
    """The same product with x in MK and weight in NK."""
    layouts = {"x_layout": "MK", "weight_layout": "NK"}
    return workload.replace(**{name: layout for name, layout in layouts.items() if name in workload.params})


def transposed(workload: Workload) -> list[ArgSpec]:
    """The factors that have to be transposed."""
    return [spec for spec in workload.signature[:2] if not spec.axes.endswith(ROWS_OF[spec.name])]


def transposed_problem(workload: Workload, target: Target) -> str | None:
    """Why a factor cannot be transposed, or None."""
    for spec in transposed(workload):
        if reason := _repack(spec, target).problem():
            return f"{spec.name}: {reason}"
    return None


def after_transposing(workload: Workload, target: Target, source: KernelSource) -> KernelSource:
    """The kernel of `in_rows(workload)`, preceded by steps that transpose factors, as the kernel of the workload."""
    steps: list[KernelStep] = []
    alignments, workspaces = dict(source.alignments), dict(source.workspaces)
    given: dict[str, Any] = {}
    for spec in transposed(workload):
        repack, to = _repack(spec, target), f"{spec.name}_{ROWS_OF[spec.name].lower()}"
        config = repack.default()
        steps.append(repack.step(config, x=spec.name, y=to, constant=spec.constant))
        given[spec.name], workspaces[to] = to, spec.nbytes
        alignments[spec.name] = repack.alignments(config)[0]
    constant = "weight" in workload.constants
    convolve = [
        dataclasses.replace(over_workspaces(step, given), constant=step.constant and constant) for step in source.steps
    ]
    return dataclasses.replace(source, steps=(*steps, *convolve), workspaces=workspaces, alignments=alignments)


def _repack(spec: ArgSpec, target: Target) -> Repack:
    """The transposition of a factor to the layout that kernels read."""
    wanted = spec.axes.removesuffix(spec.axes[-2:]) + ROWS_OF[spec.name]
    sizes = dict(zip(spec.axes, spec.shape))
    return Repack.of(Layout.parse(spec.axes), Layout.parse(wanted), sizes, dtype_of(spec.dtype).nbytes, target)
