"""Pixel shuffles and changes of layout as operators of PyTorch. They move elements and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from schedsearch.constructors.movement import layout_transform as layout_workload
from schedsearch.errors import ArgumentError
from schedsearch.ops.layout import Layout
from schedsearch.torch.operators.dispatch import Operation, declared
from schedsearch.torch.operators.formats import dtype_name, empty, in_layout, layout_of
from schedsearch.workload import Workload


@dataclass(frozen=True)
class _Shuffle(Operation):
    """Attributes:
    block: pixels along each axis of the image that a pixel becomes, or that become one.
    layout: of x and of the output.
    """

    op: ClassVar[str]
    block: int
    layout: str

    @classmethod
    def of(cls, *args: Any) -> _Shuffle:
        x, block = args
        return cls(block, layout_of(x))

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        x = given["x"]
        if x.dim() != 4:
            raise ArgumentError(f"x of {self.name} has shape {tuple(x.shape)}; allowed: four axes (n, c, h, w)")
        if self.block < 1:
            raise ArgumentError(f"block of {self.name} is {self.block}; allowed: at least 1")
        self.shape(given)

    def shape(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Of the output; raises ArgumentError if the blocks do not fit."""
        raise NotImplementedError

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return empty(given["x"], self.shape(given), self.layout)

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        x = given["x"]
        n, c, h, w = x.shape
        params = {"n": n, "c": c, "h": h, "w": w, "block": self.block, "mode": "CRD", "layout": self.layout}
        return Workload(self.op, {**params, "dtype": dtype_name(x.dtype)})


@declared
@dataclass(frozen=True)
class PixelShuffle(_Shuffle):
    """torch.nn.PixelShuffle."""

    schema: ClassVar[str] = "pixel_shuffle(Tensor x, int block) -> Tensor"
    op: ClassVar[str] = "depth_to_space"

    def shape(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        n, c, h, w = given["x"].shape
        if c % (self.block * self.block):
            raise ArgumentError(f"pixel_shuffle got {c} channels; allowed: a multiple of block * block = {self.block**2}")
        return n, c // (self.block * self.block), h * self.block, w * self.block

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
        return in_layout(functional.pixel_shuffle(given["x"], self.block), self.layout)


@declared
@dataclass(frozen=True)
class PixelUnshuffle(_Shuffle):
    """torch.nn.PixelUnshuffle."""

    schema: ClassVar[str] = "pixel_unshuffle(Tensor x, int block) -> Tensor"
    op: ClassVar[str] = "space_to_depth"

    def shape(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        n, c, h, w = given["x"].shape
        if h % self.block or w % self.block:
            raise ArgumentError(f"pixel_unshuffle got an image of {h} x {w}; allowed: multiples of block = {self.block}")
        return n, c * (self.block * self.block), h // self.block, w // self.block

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
        return in_layout(functional.pixel_unshuffle(given["x"], self.block), self.layout)


@declared
@dataclass(frozen=True)
class LayoutTransform(Operation):
    """A change of layout; see `schedsearch.torch.layout_transform`.

    Attributes:
        sizes: logical extents of the axes of `layout`.
        layout, to: words such as NCHW or NCHW32c.
    """

    schema: ClassVar[str] = "layout_transform(Tensor x, SymInt[4] sizes, str layout, str to) -> Tensor"
    sizes: tuple[Any, ...]
    layout: str
    to: str

    @classmethod
    def of(cls, *args: Any) -> LayoutTransform:
        _, sizes, layout, to = args
        return cls(tuple(sizes), layout, to)

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        layout, to, x = Layout.parse(self.layout), Layout.parse(self.to), given["x"]
        if sorted(layout.axes) != sorted(to.axes) or len(self.sizes) != len(layout.axes):
            raise ArgumentError(
                f"layout_transform got layout {layout}, to {to} and sizes {self.sizes}; allowed: layouts of the same axes, "
                f"and a size for each axis of {layout.axes}"
            )
        if tuple(x.shape) != layout.shape(self.extents()):
            allowed = layout.shape(self.extents())
            raise ArgumentError(f"x of layout_transform has shape {tuple(x.shape)}; allowed: {allowed} ({layout})")

    def extents(self) -> dict[str, Any]:
        """Axis -> size."""
        return dict(zip(Layout.parse(self.layout).axes, self.sizes))

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return given["x"].new_empty(Layout.parse(self.to).shape(self.extents()))

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        x = given["x"]
        sizes = {axis.lower(): size for axis, size in self.extents().items()}
        return layout_workload(layout=self.layout, to=self.to, dtype=dtype_name(x.dtype), **sizes)

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
        source, to = Layout.parse(self.layout), Layout.parse(self.to)
        y: torch.Tensor = to.pack(source.unpack(given["x"], self.extents()), source.axes)
        return y.clone() if y.data_ptr() == given["x"].data_ptr() else y


class Shuffled(torch.autograd.Function):
    """A pixel shuffle, or with `back` a pixel unshuffle; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, block: int, back: bool) -> Any:
        ctx.block, ctx.back = block, back
        move = torch.ops.schedsearch.pixel_unshuffle if back else torch.ops.schedsearch.pixel_shuffle
        return move(x, block)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return Shuffled.apply(dy, ctx.block, not ctx.back), None, None
