"""NHWC convolution as an implicit GEMM through TMA's im2col mode: its sizes and limits.

y[m, k] = sum over taps (r, s) and channels c of x[pixel(m, r, s), c] * weight[k, (r, s), c], with m the output pixel
(n, oh, ow) flattened. TMA walks a bounding box of base pixels, given by its corners relative to the image, with the
convolution's strides. A tap is an offset from the base pixel. Positions outside of the image read as zero.

Source: CUDA driver API, "Tensor Map Object Management", cuTensorMapEncodeIm2col; PTX ISA, "Tensor im2col mode".
"""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.ops.conv2d import FLOAT8, INTEGERS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.target import Target
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES, DTYPES, LARGEST_SIZE
from schedsearch.templates.parts.stages import CONVERTING, epilogue_problem
from schedsearch.templates.parts.zero_points import zero_point_problem
from schedsearch.workload import Workload

CORNER_RANGE = (-128, 127)  # at rank 4
MAX_TAP_OFFSET = 255  # at rank 4
MAX_ELEMENT_STRIDE = 8
MAX_COORDINATE = 2**31 - 1


@dataclass(frozen=True)
class Im2col:
    """The GEMM of a workload.

    Attributes:
        rows: M, output pixels of all images.
        columns: output channels.
        channels: input channels, the part of the GEMM's depth that one tap has.
        out_h, out_w: output pixels of an image.
        kernel_h, kernel_w: taps.
        stride, dilation: (vertical, horizontal).
        lower, upper: corners of the bounding box of base pixels, each (horizontal, vertical): relative to the image's
            first and last pixel.
    """

    rows: int
    columns: int
    channels: int
    out_h: int
    out_w: int
    kernel_h: int
    kernel_w: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    lower: tuple[int, int]
    upper: tuple[int, int]

    @classmethod
    def of(cls, workload: Workload) -> Im2col:
        w = workload
        _, out_h, out_w, _ = w.output.shape
        top, left, bottom, right = w.padding
        upper = (right - (w.s - 1) * w.dilation[1], bottom - (w.r - 1) * w.dilation[0])
        return cls(
            w.n * out_h * out_w, w.k, w.c, out_h, out_w, w.r, w.s, w.stride, w.dilation, (-left, -top), upper
        )  # fmt: skip

    @property
    def taps(self) -> int:
        return self.kernel_h * self.kernel_w

    def fits(self, rows_past_end: int) -> bool:
        """Whether tiles that end this far past the last row have 32-bit coordinates."""
        return self.rows + rows_past_end <= MAX_COORDINATE

    def problem(self, max_tile_rows: int) -> str | None:
        """The limit of TMA that the convolution breaks (one sentence: what, got, allowed), or None."""
        for axis, number, kernel in (("horizontal", 1, self.kernel_w), ("vertical", 0, self.kernel_h)):
            stride, reach = self.stride[number], (kernel - 1) * self.dilation[number]
            if stride > MAX_ELEMENT_STRIDE:
                return f"the {axis} stride is {stride}; allowed: 1 to {MAX_ELEMENT_STRIDE}, TMA's element strides"
            if reach > MAX_TAP_OFFSET:
                return f"the {axis} kernel reaches (size - 1) * dilation = {reach}; allowed: up to {MAX_TAP_OFFSET}"
            least, most = CORNER_RANGE
            for corner, meaning in (
                (self.lower[1 - number], "-(padding before)"),
                (self.upper[1 - number], "padding after - (size - 1) * dilation"),
            ):
                if not least <= corner <= most:
                    return f"the {axis} {meaning} is {corner}; allowed: {least} to {most}, TMA's im2col corners"
        if not self.fits(max_tile_rows):
            return f"the output has {self.rows} pixels; allowed: less than 2**31 - {max_tile_rows}, TMA's 32-bit coordinates"
        return None


def problem(workload: Workload, target: Target, *, takes_groups: bool = False, every_format: bool = False) -> str | None:
    """Why no wgmma convolution can run the workload on the target (one sentence: what, got, allowed), or None."""
    w = workload
    dtypes = (*DTYPES, "float32", *INTEGERS, *FLOAT8) if every_format else DTYPES
    if target.compute_capability != (9, 0):
        got = ".".join(map(str, target.compute_capability))
        remedy = "; without it, convert x and weight to float16" if w.dtype in FLOAT8 else ""
        return f"wgmma needs compute capability 9.0, got {got}{remedy}"
    if w.dtype not in dtypes:
        return f"dtype is {w.dtype}; allowed: {', '.join(dtypes)}"
    if w.dtype == "float32" and w.precision != "tf32":
        return f"precision is {w.precision}; allowed: tf32, as wgmma cuts factors of float32 to 10 stored bits"
    if reason := zero_point_problem(w):
        return reason
    if (w.layout, w.weight_layout) != ("NHWC", "OHWI"):
        return f"layout and weight_layout are {w.layout} and {w.weight_layout}; allowed: NHWC and OHWI"
    of_bytes = {"dtypes": (*DTYPES, "float32", "int32", "uint32"), "converting": CONVERTING}
    if reason := epilogue_problem(w, **(of_bytes if w.dtype in (*INTEGERS, *FLOAT8) else {})):
        return reason
    if w.groups != 1 and not takes_groups:
        return f"groups is {w.groups}; allowed: 1"
    y_bytes = dtype_of(w.out_dtype).nbytes
    for name, multiple in (("c", ALIGNMENT_BYTES // dtype_of(w.dtype).nbytes), ("k", max(8, ALIGNMENT_BYTES // y_bytes))):
        if w.params[name] % multiple:
            return f"{name} is {w.params[name]}; allowed: multiples of {multiple}, TMA's strides are of 16 bytes"
    top, left, bottom, right = w.padding
    depth = w.r * w.s * w.c // w.groups
    sizes = {"n": w.n, "padded h": w.h + top + bottom, "padded w": w.w + left + right, "k": w.k, "c": w.c, "r*s*c": depth}
    for name, size in sizes.items():
        if size >= LARGEST_SIZE:
            return f"{name} is {size}; allowed: less than 2**30, coordinates have 32 bits"
    return None
