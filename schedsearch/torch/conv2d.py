"""conv2d as an operator of PyTorch: its workload, its output, and what PyTorch computes where there is no kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from schedsearch.errors import ArgumentError, UnsupportedError
from schedsearch.ops.stages import Stage
from schedsearch.torch import epilogues
from schedsearch.torch.dispatch import Operation, description, run
from schedsearch.torch.formats import convolved, dtype_name, empty, in_layout, layout_of
from schedsearch.workload import Workload

SCHEMA = (
    "conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? residual, int[2] stride, int[4] padding, "
    "int[2] dilation, int groups, str epilogue, float low, float high, str precision) -> Tensor"
)


@dataclass(frozen=True)
class Window:
    """Stride and dilation are (vertical, horizontal); padding is (top, left, bottom, right)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def output_hw(self, image: Sequence[Any], kernel: Sequence[Any]) -> tuple[Any, Any]:
        """Output height and width; sizes may be symbolic.

        Args:
            image, kernel: height and width.
        """
        top, left, bottom, right = self.padding
        return (
            convolved(image[0], kernel[0], top, bottom, self.stride[0], self.dilation[0]),
            convolved(image[1], kernel[1], left, right, self.stride[1], self.dilation[1]),
        )

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
        return convolve(x, weight, self.stride, self.padding, self.dilation, groups)


@dataclass(frozen=True)
class Conv2d(Operation):
    """A call of conv2d; see `schedsearch.torch.conv2d`.

    Attributes:
        epilogue: see `epilogues`.
        precision: fp32 or tf32, of products of float32.
        layout: of x and of the output.
    """

    name: ClassVar[str] = "conv2d"
    tensors: ClassVar[tuple[str, ...]] = ("x", "weight", "bias", "scale", "residual")
    scalars: ClassVar[tuple[str, ...]] = ("low", "high")
    window: Window
    groups: int
    epilogue: str
    precision: str
    layout: str

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        check_convolution(self.name, given, self.window, self.groups)
        check_operands(self.name, self.epilogue, given, self.shape(given))

    def shape(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        return output_shape(given["x"], given["weight"], self.window, self.epilogue)

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        x, weight = given["x"], given["weight"]
        if not x.numel():
            raise UnsupportedError("there are no kernels for images without elements")
        n, c, h, w = x.shape
        k, _, r, s = weight.shape
        dtype = dtype_name(x.dtype)
        return Workload.conv2d(
            n=n, h=h, w=w, c=c, k=k, r=r, s=s, stride=self.window.stride, padding=self.window.padding,
            dilation=self.window.dilation, groups=self.groups, dtype=dtype, layout=self.layout,
            precision=self.precision if dtype == "float32" else "fp32", epilogue=epilogues.stages(self.epilogue),
        )  # fmt: skip

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
        y = self.window.convolve(given["x"], given["weight"], self.groups)
        operands = (given.get(name) for name in ("bias", "scale", "residual"))
        return in_layout(epilogues.computed(y, self.epilogue, *operands, scalars["low"], scalars["high"]), self.layout)

    def tensor_of(self, argument: str) -> str:
        return epilogues.TENSORS.get(argument, argument)

    def scalar_of(self, scalar: str) -> str:
        return epilogues.SCALARS[scalar]


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    epilogue: str,
    low: float,
    high: float,
    precision: str,
) -> torch.Tensor:
    """The operator on a device."""
    tensors = (x, weight, bias, scale, residual)
    key = ("conv2d", *map(description, tensors), *stride, *padding, *dilation, groups, epilogue, precision)

    def operation() -> Conv2d:
        window = Window(tuple(stride), tuple(padding), tuple(dilation))
        return Conv2d(window, groups, epilogue, precision, layout_of(x, weight))

    y: torch.Tensor = run(key, operation, tensors, (low, high))
    return y


def fake_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    epilogue: str,
    low: float,
    high: float,
    precision: str,
) -> torch.Tensor:
    """The output without memory."""
    window = Window(tuple(stride), tuple(padding), tuple(dilation))
    operation = Conv2d(window, groups, epilogue, precision, layout_of(x, weight))
    given = operation.named((x, weight, bias, scale, residual))
    operation.check(given)
    return empty(x, operation.shape(given), operation.layout)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """PyTorch's convolution, which takes no asymmetric padding itself."""
    top, left, bottom, right = padding
    if (top, left) != (bottom, right):
        x, top, left = functional.pad(x, (left, right, top, bottom)), 0, 0
    return functional.conv2d(x, weight, None, tuple(stride), (top, left), tuple(dilation), groups)


def output_shape(x: torch.Tensor, weight: torch.Tensor, window: Window, epilogue: str) -> tuple[Any, ...]:
    """N, C, H and W of the output; sizes may be symbolic."""
    block = epilogues.block_of(epilogue)
    out_h, out_w = window.output_hw(x.shape[2:], weight.shape[2:])
    return x.shape[0], weight.shape[0] // (block * block), out_h * block, out_w * block


def check_convolution(name: str, given: Mapping[str, torch.Tensor], window: Window, groups: int) -> None:
    """Raises ArgumentError if image and weight do not fit each other."""
    x, weight = given["x"], given["weight"]
    for label, tensor, axes in (("x", x, "(n, c, h, w)"), ("weight", weight, "(k, c / groups, r, s)")):
        if tensor.dim() != 4:
            raise ArgumentError(f"{label} of {name} has shape {tuple(tensor.shape)}; allowed: four axes {axes}")
        if tensor.dtype != x.dtype:
            raise ArgumentError(f"{label} of {name} has dtype {tensor.dtype}, x has {x.dtype}; convert one of them")
    lengths = (len(window.stride), len(window.padding), len(window.dilation))
    if lengths != (2, 4, 2) or min(*window.stride, *window.dilation) < 1 or min(window.padding) < 0:
        raise ArgumentError(
            f"{name} got stride {window.stride}, padding {window.padding} and dilation {window.dilation}; allowed: 2, 4 and "
            "2 numbers, padding from 0 on, the others from 1 on"
        )
    if groups < 1 or weight.shape[0] % groups or weight.shape[1] * groups != x.shape[1]:
        raise ArgumentError(
            f"weight of {name} has shape {tuple(weight.shape)}, which does not fit groups={groups} and the {x.shape[1]} "
            "channels of x; allowed: (k, c / groups, r, s), k a multiple of groups"
        )
    if any(extent < 1 for extent in window.output_hw(x.shape[2:], weight.shape[2:])):
        raise ArgumentError(
            f"the kernel of {name} is larger than the padded image: weight {tuple(weight.shape)}, x {tuple(x.shape)}, "
            f"padding {window.padding}, dilation {window.dilation}; enlarge the padding"
        )


def check_operands(name: str, epilogue: str, given: Mapping[str, torch.Tensor], shape: tuple[Any, ...]) -> None:
    """Raises ArgumentError if the epilogue's operands are not there, too many, or of another shape or dtype.

    Args:
        shape: of the output.
    """
    x, weight = given["x"], given["weight"]
    found = epilogues.stages(epilogue)
    needed = {epilogues.TENSORS[operand.name] for stage in found for operand in stage.kind.operands}
    for operand in ("bias", "scale", "residual"):
        if (operand in given) != (operand in needed):
            wants, has = ("no", "one") if operand in given else ("one", "none")
            raise ArgumentError(f"epilogue {epilogue!r} of {name} takes {wants} {operand}, got {has}")
        if operand not in given:
            continue
        tensor, allowed = given[operand], shape if operand == "residual" else (weight.shape[0],)
        if operand == "residual" and _moved_behind(found):
            raise ArgumentError(f"{name}: a residual cannot be added before depth_to_space; add it to the result")
        if tuple(tensor.shape) != tuple(allowed):
            raise ArgumentError(f"{operand} of {name} has shape {tuple(tensor.shape)}; allowed: {tuple(allowed)}")
        if tensor.dtype != x.dtype:
            raise ArgumentError(f"{operand} of {name} has dtype {tensor.dtype}; allowed: {x.dtype}, as x")


def _moved_behind(stages: Sequence[Stage]) -> bool:
    return any(stage.kind.moves for stage in stages)
