"""Products of matrices on a GPU by kernels of conv2d: matmul_wgmma, matmul_mma, matmul_simt and matmul_tcgen05.

Each makes the convolution of `Convolution` and asks the template of conv2d for its space, its default and its kernel. These
read x as MK and weight as NK. Other layouts are transposed first, by a step of `layout_transform.repack`; that of a constant
weight runs once.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

from schedsearch.config import Config
from schedsearch.launch import MAX_GRID_X
from schedsearch.ops import ArgSpec, Layout
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.products import MatrixProductParams
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.conv2d import mma, simt, tcgen05
from schedsearch.templates.conv2d.geometry import Im2col
from schedsearch.templates.conv2d.mma_sizes import Plan as MmaPlan
from schedsearch.templates.conv2d.simt_sizes import Plan as SimtPlan
from schedsearch.templates.conv2d.tiles import ceil_div
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.layout_transform.repack import Repack
from schedsearch.templates.matmul.convolution import Convolution
from schedsearch.templates.matmul.repeat import repeat_step
from schedsearch.templates.parts.prepared import Prepared, over_prepared
from schedsearch.workload import Workload

LEAST_TILE = 16  # rows and columns
X_ALL = "x_all"  # the workspace of a matrix of x for each product
ROWS_OF = {"x": "MK", "weight": "NK"}  # the layouts of matrices that the kernels read


class _MatmulCuda(Template[MatrixProductParams]):
    """A base of templates; `inner` is the template of the convolution whose space and kernels it takes."""

    op = "dense"
    kind = "cuda"
    inner: Template
    subtracts_own = False  # zero points of x where products have weights of their own

    @property
    def ops(self) -> tuple[str, ...]:
        return ("dense", "batch_matmul")

    @abstractmethod
    def source(self, product: Convolution, target: Target, config: Config) -> KernelSource:
        """The kernel over x in MK, one matrix for each product, and weight in NK."""

    def validate(self, workload: Workload[MatrixProductParams], target: Target) -> str | None:
        p = workload.params
        product = Convolution.of(in_rows(workload))
        if reason := self.inner.validate(product.workload, target):
            return f"as {product.workload.label}: {reason}"
        if product.own_weights and "x" in p.zero_points and not self.subtracts_own:
            return "x has a zero point, and products have weights of their own; allowed: one of the two"
        if product.workload.params.n * ceil_div(p.m, LEAST_TILE) * ceil_div(p.n, LEAST_TILE) > MAX_GRID_X:
            return f"y has {product.workload.params.n} matrices of {p.m} x {p.n}; allowed: below 2**31 tiles of 16 x 16"
        return transposed_problem(workload, target)

    def space(self, workload: Workload[MatrixProductParams], target: Target) -> ConfigSpace:
        """The configurations for one of the products; all products have the same."""
        return self.inner.space(_one_product(Convolution.of(in_rows(workload))), target)

    def default(self, workload: Workload[MatrixProductParams], target: Target, space: ConfigSpace) -> Config:
        """The default of conv2d for one product on its share of the multiprocessors."""
        product = Convolution.of(in_rows(workload))
        share = max(1, target.sms // product.workload.params.n) if product.own_weights else target.sms
        return self.inner.default(_one_product(product), dataclasses.replace(target, sms=share), space)

    def plain(self, workload: Workload[MatrixProductParams], target: Target, space: ConfigSpace) -> Config | None:
        return self.inner.plain(_one_product(Convolution.of(in_rows(workload))), target, space)

    def kernel(self, workload: Workload[MatrixProductParams], target: Target, config: Config) -> KernelSource:
        product = Convolution.of(in_rows(workload))
        source = self.source(product, target, config)
        if product.repeats_x:
            source = after_repeating(product, source)
        return after_transposing(workload, target, source)


class MatmulWgmma(_MatmulCuda):
    """dense and batch_matmul for compute capability 9.0, on tensor cores; dtypes of conv2d_wgmma."""

    name = "matmul_wgmma"
    version = Conv2dWgmma.version
    renamed = Conv2dWgmma.renamed
    inner = _WGMMA = Conv2dWgmma()

    def space(self, workload: Workload[MatrixProductParams], target: Target) -> ConfigSpace:
        """Row tiles of a cluster would share weights; those of products with their own do not."""
        product = Convolution.of(in_rows(workload))
        space = self._WGMMA.space(product.workload, target, _gemm(product))
        return space.restrict({"cluster_m": [1]}) if product.own_weights else space

    def default(self, workload: Workload[MatrixProductParams], target: Target, space: ConfigSpace) -> Config:
        return self._WGMMA.default(Convolution.of(in_rows(workload)).workload, target, space)

    def source(self, product: Convolution, target: Target, config: Config) -> KernelSource:
        return self._WGMMA.kernel(product.workload, target, config, _gemm(product))


class MatmulMma(_MatmulCuda):
    """dense and batch_matmul from compute capability 8.0 on, on tensor cores, of every size; dtypes of conv2d_mma."""

    name = "matmul_mma"
    version = mma.Conv2dMma.version
    renamed = mma.Conv2dMma.renamed
    added = mma.Conv2dMma.added
    inner = mma.Conv2dMma()

    def source(self, product: Convolution, target: Target, config: Config) -> KernelSource:
        plan = MmaPlan.of(product.workload, config)
        if product.own_weights:
            plan = dataclasses.replace(plan, bound=True, own_weights=True)
        return mma.source_of(product.workload, plan)


class MatmulSimt(_MatmulCuda):
    """dense and batch_matmul of fp32, int8 and uint8 on CUDA cores, of every size, with zero points."""

    name = "matmul_simt"
    version = simt.Conv2dSimt.version
    renamed = simt.Conv2dSimt.renamed
    inner = simt.Conv2dSimt()
    subtracts_own = True

    def source(self, product: Convolution, target: Target, config: Config) -> KernelSource:
        plan = SimtPlan.of(product.workload, config)
        if product.own_weights:
            plan = dataclasses.replace(plan, bound=True, own_weights=True)
        return simt.source_of(product.workload, target, plan)


class MatmulTcgen05(_MatmulCuda):
    """dense and batch_matmul on compute capability 10, with sums in tensor memory; dtypes of conv2d_tcgen05."""

    name = "matmul_tcgen05"
    version = tcgen05.Conv2dTcgen05.version
    inner = tcgen05.Conv2dTcgen05()

    def source(self, product: Convolution, target: Target, config: Config) -> KernelSource:
        plan: MmaPlan = tcgen05.TensorPlan.of_config(product.workload, config)
        if product.own_weights:
            plan = dataclasses.replace(plan, bound=True, own_weights=True)
        return tcgen05.source_of(product.workload, target, plan)


def _one_product(product: Convolution) -> Workload[Conv2dParams]:
    """The convolution of one product if each has weights of its own; otherwise that of all."""
    return product.workload.replace(n=1) if product.own_weights else product.workload


def _gemm(product: Convolution) -> Im2col:
    """The implicit GEMM; its tiles have pixels of one image if images have weights of their own."""
    gemm = Im2col.of(product.workload)
    if not product.own_weights:
        return gemm
    images = product.workload.params.n
    return dataclasses.replace(gemm, images=images, image_rows=gemm.rows // images, own_weights=True)


def in_rows(workload: Workload[MatrixProductParams]) -> Workload[MatrixProductParams]:
    """The same product with x in MK and weight in NK."""
    layouts = {"x_layout": "MK", "weight_layout": "NK"}
    return workload.replace(**{name: layout for name, layout in layouts.items() if name in workload.params})


def transposed(workload: Workload[MatrixProductParams]) -> list[ArgSpec]:
    """The factors that have to be transposed."""
    return [spec for spec in workload.signature[:2] if not spec.axes.endswith(ROWS_OF[spec.name])]


def transposed_problem(workload: Workload[MatrixProductParams], target: Target) -> str | None:
    """Why a factor cannot be transposed, or None."""
    for spec in transposed(workload):
        if reason := _repack(spec, target).problem():
            return f"{spec.name}: {reason}"
    return None


def after_repeating(product: Convolution, source: KernelSource) -> KernelSource:
    """The kernel of a matrix of x for each product, preceded by a step that copies the one that all products share."""
    step, alignment = repeat_step("x", X_ALL, product.x.nbytes // product.workload.params.n, product.workload.params.n)
    return over_prepared(source, [Prepared("x", X_ALL, product.x.nbytes, step, alignment)])


def after_transposing(workload: Workload[MatrixProductParams], target: Target, source: KernelSource) -> KernelSource:
    """The kernel of `in_rows(workload)`, preceded by steps that transpose factors, as the kernel of the workload."""
    prepared = []
    for spec in transposed(workload):
        repack, to = _repack(spec, target), f"{spec.name}_{ROWS_OF[spec.name].lower()}"
        config = repack.default()
        step = repack.step(config, x=spec.name, y=to, constant=spec.constant)
        prepared.append(Prepared(spec.name, to, spec.nbytes, step, repack.alignments(config)[0]))
    constant = "weight" in workload.constants
    steps = tuple(dataclasses.replace(step, constant=step.constant and constant) for step in source.steps)
    return over_prepared(dataclasses.replace(source, steps=steps), prepared)


def _repack(spec: ArgSpec, target: Target) -> Repack:
    """The transposition of a factor to the layout that kernels read."""
    wanted = spec.axes.removesuffix(spec.axes[-2:]) + ROWS_OF[spec.name]
    sizes = dict(zip(spec.axes, spec.shape))
    return Repack.of(Layout.parse(spec.axes), Layout.parse(wanted), sizes, dtype_of(spec.dtype).nbytes, target)
