"""What the operators for convolutions share: windows, shapes of outputs, checks of arguments, PyTorch's convolution."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from schedsearch.errors import ArgumentError
from schedsearch.ops.stages import Stage
from schedsearch.torch.operators import epilogues
from schedsearch.torch.operators.formats import convolved

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WINDOW = {"stride": "1,1", "padding": "0,0,0,0", "dilation": "1,1"}


@dataclass(frozen=True)
class Window:
    """Stride and dilation are (vertical, horizontal); padding is (top, left, bottom, right)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def output_hw(self, image: Sequence[object], kernel: Sequence[object]) -> tuple[Any, Any]:
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
class Parameters:
    """What the text of a convolution's operator says.

    Attributes:
        epilogue: see `epilogues`.
        precision: fp32 or tf32, of products of float32.
        zero_points: which of x and weight have one, e.g. "x,weight".
    """

    window: Window
    groups: int = 1
    epilogue: str = ""
    precision: str = "fp32"
    zero_points: str = ""


def text(
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    epilogue: str = "",
    precision: str = "fp32",
    zero_points: str = "",
) -> str:
    """The parameters of a convolution as one text, which PyTorch hands over sooner than lists.

    Examples:
        >>> text((1, 1), (1, 1, 1, 1), (1, 1), epilogue="bias,relu")
        'stride=1,1 padding=1,1,1,1 dilation=1,1 epilogue=bias,relu'
    """
    words = f"stride={_numbers(stride)} padding={_numbers(padding)} dilation={_numbers(dilation)}"
    words += f" groups={groups}" if groups != 1 else ""
    words += f" epilogue={epilogue}" if epilogue else ""
    words += f" precision={precision}" if precision != "fp32" else ""
    return words + (f" zero_points={zero_points}" if zero_points else "")


def _numbers(values: Sequence[int]) -> str:
    return ",".join([str(value) for value in values])


@functools.cache
def parameters(given: str) -> Parameters:
    """The parameters that `text` wrote.

    Raises:
        ArgumentError: it is another text.
    """
    try:
        found: dict[str, str] = dict(word.split("=", 1) for word in given.split())
        numbers = [tuple(map(int, found.pop(name, default).split(","))) for name, default in _WINDOW.items()]
        groups, epilogue = int(found.pop("groups", "1")), found.pop("epilogue", "")
        return Parameters(Window(*numbers), groups, epilogue, **found)
    except (ValueError, TypeError):
        raise ArgumentError(
            f"the parameters are {given!r}; allowed: 'stride=1,1 padding=0,0,0,0 dilation=1,1 groups=1 epilogue=bias,relu "
            "precision=fp32', or a part of it"
        ) from None


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
    """Raises ArgumentError if image and weight do not fit each other, or are not floating-point numbers."""
    x, weight = given["x"], given["weight"]
    if x.dtype not in FLOATS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ArgumentError(f"x of {name} has dtype {x.dtype}; allowed: {allowed}; quantized_conv2d takes 8-bit numbers")
    if weight.dtype != x.dtype:
        raise ArgumentError(f"weight of {name} has dtype {weight.dtype}, x has {x.dtype}; convert one of them")
    check_window(name, x, weight, window, groups)


def check_window(name: str, x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int) -> None:
    """Raises ArgumentError if the shapes of image and weight do not fit each other, the window or the groups."""
    for label, tensor, axes in (("x", x, "(n, c, h, w)"), ("weight", weight, "(k, c / groups, r, s)")):
        if tensor.dim() != 4:
            raise ArgumentError(f"{label} of {name} has shape {tuple(tensor.shape)}; allowed: four axes {axes}")
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


def check_operands(name: str, epilogue: str, given: Mapping[str, torch.Tensor], shape: tuple[object, ...]) -> None:
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
