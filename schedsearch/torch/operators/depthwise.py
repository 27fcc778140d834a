"""Depthwise convolutions and their gradients as operators of PyTorch.

With groups = channels, output channel c * m + j belongs to input channel c, for PyTorch as for our operator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from schedsearch.constructors.convolutions import depthwise_conv2d as depthwise_workload
from schedsearch.errors import ArgumentError, NoRecordError
from schedsearch.runtime.kernel import Kernel
from schedsearch.torch.operators import epilogues, store
from schedsearch.torch.operators.bound_call import BoundCall
from schedsearch.torch.operators.convolution import Conv2d, Convolution
from schedsearch.torch.operators.dispatch import Operation, Tensors, declared, finder
from schedsearch.torch.operators.formats import dtype_name, empty, in_layout, layout_of
from schedsearch.torch.operators.library import eager
from schedsearch.torch.operators.window import Window, check_convolution, parameters, text
from schedsearch.workload import Workload


def _workload(
    image: Sequence[int], weight: Sequence[int], window: Window, dtype: torch.dtype, layout: str, **options: Any
) -> Workload:
    """The workload of a direction; `image` is the shape of x, `weight` that of the weight."""
    n, c, h, w = image
    return depthwise_workload(
        n=n, c=c, h=h, w=w, r=weight[2], s=weight[3], multiplier=weight[0] // c, stride=window.stride,
        padding=window.padding, dilation=window.dilation, dtype=dtype_name(dtype), layout=layout, **options,
    )  # fmt: skip


@declared
@dataclass(frozen=True)
class DepthwiseConv2d(Convolution):
    """A call of depthwise_conv2d, whose groups are the channels; see `schedsearch.torch.depthwise_conv2d`."""

    schema: ClassVar[str] = f"depthwise_{Conv2d.schema}"

    @classmethod
    def of(cls, *args: Any) -> DepthwiseConv2d:
        x, *_, text = args
        given = parameters(text)
        groups = x.shape[1] if x.dim() == 4 else 1  # `check` refuses other tensors
        return cls(given.window, groups, given.epilogue, layout_of(x))

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        x, weight, stages = given["x"], given["weight"], epilogues.stages(self.epilogue)
        return _workload(x.shape, weight.shape, self.window, x.dtype, self.layout, epilogue=stages)


@dataclass(frozen=True)
class _Gradient(Operation):
    """A gradient. It is deterministic if PyTorch is asked to be so (`torch.use_deterministic_algorithms`).

    Attributes:
        image: shape of x.
        kernel: shape of the weight.
        layout: of x, dy and dx.
    """

    direction: ClassVar[str]
    window: Window
    image: tuple[Any, ...]
    kernel: tuple[Any, ...]
    layout: str

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        like = given["dy"]
        for name, tensor in given.items():
            if tensor.dim() != 4:
                raise ArgumentError(f"{name} of {self.name} has shape {tuple(tensor.shape)}; allowed: four axes")
        stand_ins = {"x": like.new_empty(self.image, device="meta"), "weight": like.new_empty(self.kernel, device="meta")}
        check_convolution(self.name, stand_ins, self.window, self.image[1])
        allowed = (self.image[0], self.kernel[0], *self.window.output_hw(self.image[2:], self.kernel[2:]))
        if tuple(like.shape) != allowed:
            raise ArgumentError(f"dy of {self.name} has shape {tuple(like.shape)}; allowed: {allowed}, that of the output")
        for name, tensor in given.items():
            if tensor.dtype != like.dtype:
                raise ArgumentError(f"{name} of {self.name} has dtype {tensor.dtype}, dy has {like.dtype}; convert one")

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        options: dict[str, Any] = {"direction": self.direction}
        if self.direction != "grad_input":
            options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        return _workload(self.image, self.kernel, self.window, given["dy"].dtype, self.layout, **options)

    def by_pytorch(self, given: Mapping[str, torch.Tensor], mask: tuple[bool, bool]) -> tuple[Any, Any]:
        """dx and dw by PyTorch, as far as the mask asks for them; it takes no asymmetric padding."""
        dy = given["dy"]
        none = dy.new_empty(1)
        x, weight = given.get("x"), given.get("weight")
        x = none.expand(self.image) if x is None else x
        weight = none.expand(self.kernel) if weight is None else weight
        top, left, bottom, right = self.window.padding
        padding = [top, left]
        uneven = (top, left) != (bottom, right)
        if uneven:
            x, padding = functional.pad(x, (left, right, top, bottom)), [0, 0]
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dy, x, weight, None, self.window.stride, padding, self.window.dilation, False, [0, 0], self.image[1],
            [*mask, False],
        )  # fmt: skip
        if uneven and dx is not None:
            dx = dx[:, :, top : top + self.image[2], left : left + self.image[3]]
        return (None if dx is None else in_layout(dx, self.layout)), (None if dw is None else in_layout(dw, self.layout))

    def _dx(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return empty(given["dy"], self.image, self.layout)

    def _dw(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return empty(given["dy"], self.kernel, self.layout)


@declared
@dataclass(frozen=True)
class GradInput(_Gradient):
    """dx of dy and the weight."""

    schema: ClassVar[str] = (
        "depthwise_conv2d_grad_input(Tensor dy, Tensor weight, SymInt[4] image, str parameters, bool channels_last) "
        "-> Tensor"
    )
    direction: ClassVar[str] = "grad_input"

    @classmethod
    def of(cls, *args: Any) -> GradInput:
        _, weight, image, text, channels_last = args
        return cls(parameters(text).window, tuple(image), tuple(weight.shape), "NHWC" if channels_last else "NCHW")

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._dx(given)

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> Any:
        return self.by_pytorch(given, (True, False))[0]


@declared
@dataclass(frozen=True)
class GradWeight(_Gradient):
    """dw of x and dy."""

    schema: ClassVar[str] = "depthwise_conv2d_grad_weight(Tensor x, Tensor dy, SymInt[2] kernel, str parameters) -> Tensor"
    direction: ClassVar[str] = "grad_weight"
    settings: ClassVar[tuple[Callable[[], Hashable], ...]] = (torch.are_deterministic_algorithms_enabled,)

    @classmethod
    def of(cls, *args: Any) -> GradWeight:
        x, dy, kernel, text = args
        channels = dy.shape[1] if dy.dim() == 4 else 1  # `check` refuses other tensors
        return cls(parameters(text).window, tuple(x.shape), (channels, 1, *kernel), layout_of(x))

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._dw(given)

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> Any:
        return self.by_pytorch(given, (False, True))[1]


@declared
@dataclass(frozen=True)
class GradBoth(_Gradient):
    """dx and dw of x, the weight and dy: one kernel where that is recorded to be faster than two."""

    schema: ClassVar[str] = (
        "depthwise_conv2d_grad_both(Tensor x, Tensor weight, Tensor dy, str parameters) -> (Tensor, Tensor)"
    )
    direction: ClassVar[str] = "grad_both"
    settings: ClassVar[tuple[Callable[[], Hashable], ...]] = (torch.are_deterministic_algorithms_enabled,)

    @classmethod
    def of(cls, *args: Any) -> GradBoth:
        x, weight, _, text = args
        return cls(parameters(text).window, tuple(x.shape), tuple(weight.shape), layout_of(x))

    def empty(self, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._dx(given), self._dw(given)

    def accepted(self, kernel: Kernel, where: store.Store, device: torch.device) -> Kernel:
        both = kernel.provenance.time_ns
        if both is None:
            return kernel
        apart = 0.0
        for direction in ("grad_input", "grad_weight"):
            changes: dict[str, Any] = {"direction": direction}
            changes |= {"deterministic": False} if direction == "grad_input" else {}
            try:
                apart += where.kernel(kernel.workload.replace(**changes), device).provenance.time_ns or math.inf
            except NoRecordError:
                return kernel
        if both > apart:
            raise NoRecordError(f"two kernels take {apart / 1e3:.2f} us, one for both gradients {both / 1e3:.2f} us")
        return kernel

    def without_kernel(self, tensors: Tensors) -> store.Call:
        x, weight, dy = tensors
        dx = _found_dx(dy, weight, self.image, _text(self.window), self.layout == "NHWC")
        dw = _found_dw(x, dy, self.kernel[2:], _text(self.window))
        if not any(isinstance(each, BoundCall) for each in (dx, dw)):
            return super().without_kernel(tensors)  # PyTorch computes both at once

        def call(tensors: Tensors, addresses: tuple[int, ...], numbers: tuple[float, ...]) -> Any:
            (x, weight, dy), (of_x, of_weight, of_dy) = tensors, addresses
            return dx((dy, weight), (of_dy, of_weight), numbers), dw((x, dy), (of_x, of_dy), numbers)

        return call

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> Any:
        return self.by_pytorch(given, (True, True))


@functools.cache
def _text(window: Window) -> str:
    return text(window.stride, window.padding, window.dilation)


_found_dx, _found_dw = finder(GradInput), finder(GradWeight)
_eager_forward, _eager_dx, _eager_dw, _eager_both = map(
    eager,
    ("depthwise_conv2d", "depthwise_conv2d_grad_input", "depthwise_conv2d_grad_weight", "depthwise_conv2d_grad_both"),
)


class Depthwise(torch.autograd.Function):
    """A depthwise convolution without an epilogue, with gradients by the operators above."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, parameters: str) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.parameters = parameters
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.schedsearch.depthwise_conv2d(x, weight, None, None, None, parameters)
        return _eager_forward(x, weight, None, None, None, parameters)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        to_x, to_weight, _ = ctx.needs_input_grad
        # The node that refuses a second derivative costs as much as a launch, and only create_graph=True needs it.
        compute = _Gradients.apply if torch.is_grad_enabled() else _gradients
        return *compute(x, weight, dy, ctx.parameters, to_x, to_weight), None


class _Gradients(torch.autograd.Function):
    """The gradients, which have no gradients themselves."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return _gradients(*args)

    @staticmethod
    def backward(ctx: object, *_: object) -> Any:
        raise RuntimeError(
            "schedsearch.torch.depthwise_conv2d has no second derivative; use torch.nn.functional.conv2d(groups=channels)"
        )


def _gradients(x: Any, weight: Any, dy: Any, parameters: str, to_x: bool, to_weight: bool) -> tuple[Any, Any]:
    dx = dw = None
    if torch.compiler.is_dynamo_compiling():
        ops = torch.ops.schedsearch
        of_dx, of_dw = ops.depthwise_conv2d_grad_input, ops.depthwise_conv2d_grad_weight
        of_both = ops.depthwise_conv2d_grad_both
    else:
        of_dx, of_dw, of_both = _eager_dx, _eager_dw, _eager_both
    if to_x and to_weight:
        dx, dw = of_both(x, weight, dy, parameters)
    elif to_x:
        dx = of_dx(dy, weight, x.shape, parameters, layout_of(x) == "NHWC")
    elif to_weight:
        dw = of_dw(x, dy, weight.shape[2:], parameters)
    return dx, dw
