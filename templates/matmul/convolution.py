"""A product of matrices as a convolution of one tap: rows of x are pixels, columns of x input channels.

    y[b, m, n] = sum over k of x[b, m, k] * weight[b, n, k]      image b, pixel m, output channel n, input channel k

The batch of batch_matmul is a batch of images, each of which has weights of its own. If all products share one weight, they
are one product that has the rows of all. Arguments have the same bytes in both views; only their axes have other names. So
the kernels of conv2d compute products.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.ops import ArgSpec
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.products import MatrixProductParams
from schedsearch.workload import Workload

_LONGEST_ROW = 64  # pixels; the CPU's kernels share rows among threads


@dataclass(frozen=True)
class Convolution:
    """The convolution that computes a product.

        >>> product = Workload("batch_matmul", dict(b=5, m=16, n=24, k=32, weight_layout="KN", dtype="float32"))
        >>> one = Convolution.of(product)
        >>> one.workload.label, one.own_weights, one.weight.axes
        ('conv2d 5x1x16x32 k24 1x1 f32 NHWC', True, 'IHWO')

    Attributes:
        workload: in NHWC and OHWI, for one set of weights.
        own_weights: each image has a set of weights of its own, of the size of `workload`'s.
        x, weight: the arguments as they lie in memory; of the weight one set.
        repeats_x: all images are the same one, which lies in memory once.
    """

    workload: Workload[Conv2dParams]
    own_weights: bool
    x: ArgSpec
    weight: ArgSpec
    repeats_x: bool

    @classmethod
    def of(cls, product: Workload[MatrixProductParams], *, rows: bool = False) -> Convolution:
        """The convolution of a dense or batch_matmul workload.

        Args:
            rows: pixels are cut into rows of an image, where their number has a fitting divisor; otherwise they are one row.
        """
        p, batch = product.params, product.params.get("b", 1)
        x_layout, x_batch = p.get("x_layout", "MK"), p.get("x_batch", batch)
        own_weights = batch > 1 and p.get("weight_batch", 1) == batch
        folded = not own_weights and x_layout == "MK" and x_batch == batch
        images, pixels = (1, p.m * batch) if folded else (batch, p.m)
        w = _row(pixels) if rows else pixels
        h = pixels // w
        workload: Workload[Conv2dParams] = Workload(
            "conv2d",
            {
                "n": images, "h": h, "w": w, "c": p.k, "k": p.n, "r": 1, "s": 1,
                **{key: p[key] for key in ("dtype", "weight_dtype", "out_dtype", "precision", "zero_points")},
                "epilogue": p.epilogue,
            },
        )  # fmt: skip
        x = ("NHWC", (images, h, w, p.k)) if x_layout == "MK" else ("NCHW", (images, p.k, h, w))
        weight = ("OHWI", (p.n, 1, 1, p.k)) if p.weight_layout == "NK" else ("IHWO", (p.k, 1, 1, p.n))
        return cls(
            workload,
            own_weights,
            ArgSpec("x", x[0], x[1], p.dtype, "factor"),
            ArgSpec("weight", weight[0], weight[1], p.weight_dtype, "factor"),
            x_batch < images,
        )


def _row(pixels: int) -> int:
    """The longest row of at most 64 pixels that divides them; all of them if it would be shorter than 8."""
    longest = max(width for width in range(1, _LONGEST_ROW + 1) if pixels % width == 0)
    return longest if longest >= 8 else pixels
