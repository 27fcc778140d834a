"""conv2d as an operator of PyTorch: its workload, its output, and what PyTorch computes where there is no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from schedsearch.errors import ArgumentError
from schedsearch.torch.operators import epilogues
from schedsearch.torch.operators.dispatch import Operation, declared
from schedsearch.torch.operators.formats import dtype_name, empty, in_layout, layout_of
from schedsearch.torch.operators.window import Window, check_convolution, check_operands, output_shape, parameters
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Convolution(Operation):
    """What calls of convolutions with an epilogue share.

    Attributes:
        groups: the number of groups; may be symbolic.
        epilogue: see `epilogues`.
        layout: of x and of the output.
    """

    scalars: ClassVar[tuple[str, ...]] = ("low", "high")
    window: Window
    groups: Any
    epilogue: str
    layout: str

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        check_convolution(self.name, given, self.window, self.groups)
        block, channels = epilogues.block_of(self.epilogue), given["weight"].shape[0]
        if channels % (block * block):
            raise ArgumentError(
                f"{self.name} has {channels} output channels before its pixel shuffle by {block}; allowed: a multiple of "
                f"{block * block}"
            )
        check_operands(self.name, self.epilogue, given, self.shape(given))

    def shape(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Of the output."""
        return output_shape(given["x"], given["weight"], self.window, self.epilogue)

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return empty(given["x"], self.shape(given), self.layout)

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
        y = self.window.convolve(given["x"], given["weight"], self.groups)
        operands = (given.get("bias"), given.get("scale"), given.get("residual"))
        return in_layout(epilogues.computed(y, self.epilogue, *operands, scalars["low"], scalars["high"]), self.layout)

    def tensor_of(self, argument: str) -> str:
        return epilogues.TENSORS.get(argument, argument)

    def scalar_of(self, scalar: str) -> str:
        return epilogues.SCALARS.get(scalar, scalar)

    def conv2d(self, given: Mapping[str, torch.Tensor], **options: object) -> Workload:
        """The workload of a convolution over all channels of a group."""
        n, c, h, w = given["x"].shape
        k, _, r, s = given["weight"].shape
        return Workload.conv2d(
            n=n, h=h, w=w, c=c, k=k, r=r, s=s, stride=self.window.stride, padding=self.window.padding,
            dilation=self.window.dilation, groups=self.groups, dtype=dtype_name(given["x"].dtype), layout=self.layout,
            epilogue=epilogues.stages(self.epilogue), **options,
        )  # fmt: skip


@declared
@dataclass(frozen=True)
class Conv2d(Convolution):
    """A call of conv2d; see `schedsearch.torch.conv2d`.

    Attributes:
        precision: fp32 or tf32, of products of float32.
    """

    schema: ClassVar[str] = (
        "conv2d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None, Tensor? residual=None, "
        'str parameters="", float low=0.0, float high=0.0) -> Tensor'
    )
    precision: str

    @classmethod
    def of(cls, *args: Any) -> Conv2d:
        x, weight, *_, text = args
        given = parameters(text)
        return cls(given.window, given.groups, given.epilogue, layout_of(x, weight), given.precision)

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        precision = self.precision if given["x"].dtype == torch.float32 else "fp32"
        return self.conv2d(given, precision=precision)
