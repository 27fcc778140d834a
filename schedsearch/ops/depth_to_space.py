"""depth_to_space and space_to_depth: blocks of pixels become channels, and channels become blocks of pixels.

The b * b * c channels of a pixel are numbered in one of two ways, as in ONNX:

    DCR   depth, column, row: channel (row * b + column) * c + channel of the image
    CRD   column, row, depth: channel (channel of the image * b + row) * b + column

`DCR` is TensorFlow's order, `CRD` that of PyTorch's PixelShuffle. TVM writes `CDR` for CRD.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.data_movement import DTYPE, DataMovement, MovementParams, shown, too_large
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.movement import Movement, permuted, row_strides
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.slices import SLICE_OF, slice_words, sliced
from schedsearch.ops.specs import ArgSpec
from schedsearch.typed import Array

LAYOUTS = ("NCHW", "NHWC")
MODES = ("DCR", "CRD")


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockParams(MovementParams):
    """See `depth_to_space` and `space_to_depth`."""

    n: int = declared(Parameter.count("batch"))
    c: int = declared(Parameter.count("channels of x"))
    h: int = declared(Parameter.count("height of x"))
    w: int = declared(Parameter.count("width of x"))
    block: int = declared(Parameter.count("height and width of a block of pixels", size=False))
    mode: str = declared(
        Parameter.choice("order of the channels of a block: DCR (as TensorFlow) or CRD (as PixelShuffle)", MODES)
    )
    layout: str = declared(Parameter.choice("of x and y: NCHW or NHWC", LAYOUTS))
    dtype: str = declared(DTYPE)
    slice_of: tuple[int, ...] = declared(SLICE_OF)


class _Blocks(DataMovement[BlockParams]):
    """What both directions share: the array of few channels is `image`, that of many is `depth`.

    An index has the digits n, c (channel of the image), h and w (of the depth), i and j (row and column in a block).
    """

    params_type: ClassVar[type[Params]] = BlockParams

    def arguments(self, params: BlockParams) -> tuple[ArgSpec, ...]:
        extents = {axis: params[axis.lower()] for axis in "NCHW"}
        shape = tuple(extents[axis] for axis in params.layout)
        return (ArgSpec("x", params.layout, shape, params.dtype),)

    def _digits(self, params: BlockParams) -> dict[str, int]:
        raise NotImplementedError

    def _order(self, params: BlockParams, *, depth: bool) -> str:
        """The digits in the order of their array in memory, outermost first."""
        channels = "c"
        if depth:
            channels = "ijc" if params.mode == "DCR" else "cij"
            return f"n{channels}hw" if params.layout == "NCHW" else f"nhw{channels}"
        return "nchiwj" if params.layout == "NCHW" else "nhiwjc"

    def _moved(self, params: BlockParams, *, depth_in_x: bool) -> Movement:
        digits = self._digits(params)
        of_x, of_y = (self._order(params, depth=depth) for depth in (depth_in_x, not depth_in_x))
        (y,) = self.outputs(params)
        step = dict(zip(params.layout, row_strides(y.slice_of or y.shape)))
        # A digit steps along its axis by the extents of the digits of this axis that are inside of it.
        axes = {"n": "N", **(dict(zip("cijhw", "CCCHW")) if not depth_in_x else dict(zip("cijhw", "CHWHW")))}
        in_y = []
        for place, digit in enumerate(of_y):
            inner = [digits[each] for each in of_y[place + 1 :] if axes[each] == axes[digit]]
            in_y.append(step[axes[digit]] * math.prod(inner))
        box = permuted("x", [digits[digit] for digit in of_x], [of_x.index(digit) for digit in of_y], in_y)
        return Movement(dtype_of(params.dtype).nbytes, (box,))

    def _depth_channel(self, params: BlockParams, row: Any, column: Any, channel: Any) -> Any:
        block, channels = params.block, self._digits(params)["c"]
        return (
            (row * block + column) * channels + channel if params.mode == "DCR" else (channel * block + row) * block + column
        )

    def label(self, params: BlockParams) -> str:
        (x,) = self.arguments(params)
        how = f"b{params.block} {params.mode}"
        words = [self.name, shown(x.shape), how, dtype_of(params.dtype).short, params.layout, *slice_words(params)]
        return " ".join(words)


class DepthToSpace(_Blocks):
    """y of n x (c / block**2) x (h * block) x (w * block), as ONNX's DepthToSpace."""

    name: ClassVar[str] = "depth_to_space"
    constructor: ClassVar[str] = "schedsearch:depth_to_space"

    def problems(self, params: BlockParams) -> Iterable[Problem]:
        c, block = params.c, params.block
        if c % block**2:
            return [
                Problem("c", f"c is {c}, which block * block = {block**2} does not divide; give a multiple of {block**2}")
            ]
        return too_large("x", (params.n, c, params.h, params.w), dtype_of(params.dtype).nbytes)

    def outputs(self, params: BlockParams) -> tuple[ArgSpec, ...]:
        block = params.block
        extents = {"N": params.n, "C": params.c // block**2, "H": params.h * block, "W": params.w * block}
        shape = tuple(extents[axis] for axis in params.layout)
        return (sliced(ArgSpec("y", params.layout, shape, params.dtype), params),)

    def _digits(self, params: BlockParams) -> dict[str, int]:
        block = params.block
        return {**{axis: params[axis] for axis in "nhw"}, "c": params.c // block**2, "i": block, "j": block}

    def movement(self, params: BlockParams) -> Movement:
        return self._moved(params, depth_in_x=True)

    def sources(self, params: BlockParams, flat_indices: Array) -> tuple[Array, Array]:
        import numpy as np

        block = params.block
        index = dict(zip(params.layout, np.unravel_index(flat_indices, self.outputs(params)[0].shape)))
        channel = self._depth_channel(params, index["H"] % block, index["W"] % block, index["C"])
        at = {"N": index["N"], "C": channel, "H": index["H"] // block, "W": index["W"] // block}
        in_x = np.ravel_multi_index([at[axis] for axis in params.layout], self.arguments(params)[0].shape)
        return np.zeros_like(flat_indices), in_x


class SpaceToDepth(_Blocks):
    """y of n x (c * block**2) x (h / block) x (w / block), as ONNX's SpaceToDepth."""

    name: ClassVar[str] = "space_to_depth"
    constructor: ClassVar[str] = "schedsearch:space_to_depth"

    def problems(self, params: BlockParams) -> Iterable[Problem]:
        block = params.block
        found = [
            Problem(axis, f"{axis} is {params[axis]}, which block = {block} does not divide; give a multiple of {block}")
            for axis in "hw"
            if params[axis] % block
        ]
        return found or too_large("x", [params[axis] for axis in "nchw"], dtype_of(params.dtype).nbytes)

    def outputs(self, params: BlockParams) -> tuple[ArgSpec, ...]:
        block = params.block
        extents = {"N": params.n, "C": params.c * block**2, "H": params.h // block, "W": params.w // block}
        shape = tuple(extents[axis] for axis in params.layout)
        return (sliced(ArgSpec("y", params.layout, shape, params.dtype), params),)

    def _digits(self, params: BlockParams) -> dict[str, int]:
        block = params.block
        return {
            "n": params.n,
            "c": params.c,
            "h": params.h // block,
            "w": params.w // block,
            "i": block,
            "j": block,
        }

    def movement(self, params: BlockParams) -> Movement:
        return self._moved(params, depth_in_x=False)

    def sources(self, params: BlockParams, flat_indices: Array) -> tuple[Array, Array]:
        import numpy as np

        block, channels = params.block, params.c
        index = dict(zip(params.layout, np.unravel_index(flat_indices, self.outputs(params)[0].shape)))
        if params.mode == "DCR":
            place, channel = np.divmod(index["C"], channels)
        else:
            channel, place = np.divmod(index["C"], block**2)
        at = {
            "N": index["N"],
            "C": channel,
            "H": index["H"] * block + place // block,
            "W": index["W"] * block + place % block,
        }
        in_x = np.ravel_multi_index([at[axis] for axis in params.layout], self.arguments(params)[0].shape)
        return np.zeros_like(flat_indices), in_x


DEPTH_TO_SPACE, SPACE_TO_DEPTH = DepthToSpace(), SpaceToDepth()
