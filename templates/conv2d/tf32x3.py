"""float32 convolution on Hopper's tensor cores: each factor is split into two TF32 numbers, and three products are added.

    x = x_hi + x_lo,  w = w_hi + w_lo           10 stored bits each
    x * w  is nearly  x_lo * w_hi + x_hi * w_lo + x_hi * w_hi

The parts become channels, in two workspaces, and the sum of products over 3 C channels is conv2d_wgmma's in TF32:

    x_split[n, h, w, :]      = x_lo, x_hi, x_hi      C channels each
    weight_split[k, r, s, :] = w_hi, w_lo, w_hi

In NCHW[x]c the parts are blocks of channels: x_split[n] has all blocks of x_lo, then all of x_hi, twice.

The error of a product: both parts are rounded to nearest, so |x_lo| <= 2^-11 |x|, and x_hi + x_lo is off by at most
2^-22 |x|. What is left out is x_lo * w_lo, at most 2^-22 |x w|. Together that is less than 3 * 2^-22 = 12 * 2^-24 |x w|.
The bound of float32 for a sum of K products is K 2^-24 times the sum of |x w|, so K must be at least 12.

The launches that split are memory-bound; that of the weights depends on constants alone. See docs/kernels/conv2d_tf32x3.md.

Source: Markidis et al., "NVIDIA Tensor Core Programmability, Performance & Precision", 2018; Ootomo and Yokota, "Recovering
single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops import ArgSpec
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.parts import ptx, tf32
from schedsearch.templates.parts.casts import u32, u64
from schedsearch.templates.parts.prepared import Prepared, over_prepared
from schedsearch.workload import Workload

PARTS = 3
LEAST_PRODUCTS = 12  # of a sum: fewer have no room for the error of each
CHUNK = 4  # channels that a thread splits, 16 bytes
SPLIT_THREADS = 256

_INNER = Conv2dWgmma()
_CHANNELS = {"x": "C", "weight": "I"}  # the axis that the parts are placed along
_LOW_PART = {"x": 0, "weight": 1}  # the place of the fine part; the coarse part has the other two


class Conv2dTf32x3(Template[Conv2dParams]):
    """conv2d for compute capability 9.0: float32 with errors of float32, by three TF32 products.

    Layouts are those of conv2d_wgmma: NHWC and OHWI, or NCHW[x]c and OIHW[x]o[x]i.

    A configuration is one of conv2d_wgmma for the split workload.
    """

    name = "conv2d_tf32x3"
    version = 1 + Conv2dWgmma.version  # if either version changes, a configuration means another kernel
    op = "conv2d"
    kind = "cuda"
    renamed = Conv2dWgmma.renamed

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        w = workload.params
        if w.dtype != "float32":
            return f"dtype is {w.dtype}; allowed: float32"
        if w.precision != "fp32":
            return f"precision is {w.precision}; allowed: fp32; conv2d_wgmma computes TF32 with one product"
        if w.c % CHUNK:
            return f"c is {w.c}; allowed: multiples of {CHUNK}, TMA's strides are of 16 bytes"
        products = workload.work.reduction
        if products < LEAST_PRODUCTS:
            return f"a sum has {products} products; allowed: at least {LEAST_PRODUCTS}, as each has an error of its own"
        reason = _INNER.validate(split_workload(workload), target)
        return reason and f"as {split_workload(workload).label}: {reason}"

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        return _INNER.space(split_workload(workload), target)

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """conv2d_wgmma's default for the split workload."""
        return _INNER.default(split_workload(workload), target, space)

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        inner = _INNER.kernel(split_workload(workload), target, config)
        return over_prepared(inner, [_split(spec) for spec in workload.signature[:2]])


def split_workload(workload: Workload[Conv2dParams]) -> Workload[Conv2dParams]:
    """The convolution of the parts: three times the channels, in TF32."""
    return workload.replace(c=PARTS * workload.params.c, precision="tf32")


def _split(spec: ArgSpec) -> Prepared:
    """The parts of x or of the weight."""
    name, to = spec.name, f"{spec.name}_split"
    step = KernelStep(
        build_split(spec.size, _run(spec, _CHANNELS[name]), _LOW_PART[name]),
        (Pointer(name), Pointer(to)),
        Grid(math.ceil(spec.size / (CHUNK * SPLIT_THREADS))),
        SPLIT_THREADS,
        constant=name == "weight",
    )
    return Prepared(name, to, PARTS * spec.nbytes, step)


def _run(spec: ArgSpec, axis: str) -> int:
    """Neighbours in memory that hold all channels of a pixel; of an image or a block of filters, if channels have blocks."""
    return math.prod(spec.shape[spec.axes.index(axis) :])


def build_split(elements: int, run: int, low_part: int) -> Callable[..., None]:
    """The kernel (source, destination): a thread splits 4 neighbouring channels.

    Args:
        elements: of the source.
        run: neighbours in memory that become 3 * run.
        low_part: 0 or 1, which third gets the fine part.
    """
    chunks, run_chunks = elements // CHUNK, run // CHUNK
    low_offset, high_offset = low_part * 4 * run, (1 - low_part) * 4 * run
    last_offset = 2 * 4 * run
    index = u64 if chunks + SPLIT_THREADS >= 2**32 else u32

    def split(source, destination) -> None:  # type: ignore[no-untyped-def]
        chunk = index(index(cuda.blockIdx.x) * index(SPLIT_THREADS) + index(cuda.threadIdx.x))
        if chunk < chunks:
            number = index(chunk // index(run_chunks))
            past_first = u64(index(chunk - number * index(run_chunks))) * u64(16)
            to = u64(destination + u64(number) * u64(12 * run) + past_first)
            w0, w1, w2, w3 = tf32.load_global_v4(u64(source + u64(chunk) * u64(16)))
            h0, l0 = tf32.split(w0)
            h1, l1 = tf32.split(w1)
            h2, l2 = tf32.split(w2)
            h3, l3 = tf32.split(w3)
            ptx.store_global_v4(u64(to + u64(low_offset)), l0, l1, l2, l3)
            ptx.store_global_v4(u64(to + u64(high_offset)), h0, h1, h2, h3)
            ptx.store_global_v4(u64(to + u64(last_offset)), h0, h1, h2, h3)

    return split
