"""conv2d as an operator of PyTorch: its workload, its output, and what PyTorch computes where there is no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from schedsearch.errors import UnsupportedError
from schedsearch.torch import epilogues, store
from schedsearch.torch.dispatch import Operation, description, first_call, refuse_gradients
from schedsearch.torch.formats import dtype_name, empty, in_layout, layout_of
from schedsearch.torch.window import Window, check_convolution, check_operands, output_shape, parameters
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Conv2d(Operation):
    """A call of conv2d; see `schedsearch.torch.conv2d`.

    Attributes:
        epilogue: see `epilogues`.
        precision: fp32 or tf32, of products of float32.
        layout: of x and of the output.
    """

    schema: ClassVar[str] = (
        "conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? residual, str parameters, float low, "
        "float high) -> Tensor"
    )
    name: ClassVar[str] = "conv2d"
    tensors: ClassVar[tuple[str, ...]] = ("x", "weight", "bias", "scale", "residual")
    scalars: ClassVar[tuple[str, ...]] = ("low", "high")
    window: Window
    groups: int
    epilogue: str
    precision: str
    layout: str

    @classmethod
    def of(cls, *args: Any) -> Conv2d:
        x, weight, given = args[0], args[1], parameters(args[5])
        return cls(given.window, given.groups, given.epilogue, given.precision, layout_of(x, weight))

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        check_convolution(self.name, given, self.window, self.groups)
        check_operands(self.name, self.epilogue, given, self.shape(given))

    def shape(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        return output_shape(given["x"], given["weight"], self.window, self.epilogue)

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return empty(given["x"], self.shape(given), self.layout)

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
        operands = (given.get("bias"), given.get("scale"), given.get("residual"))
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
    parameters: str,
    low: float,
    high: float,
) -> Any:
    """The operator on a device; `run` with a key that is made sooner."""
    tensors, numbers = (x, weight, bias, scale, residual), (low, high)
    if torch.is_grad_enabled():
        refuse_gradients(Conv2d, tensors)
    key = (
        "conv2d", parameters, x.dtype, x.shape, x.stride(), x.get_device(), weight.dtype, weight.shape, weight.stride(),
        weight.get_device(), bias if bias is None else description(bias), scale if scale is None else description(scale),
        residual if residual is None else description(residual),
    )  # fmt: skip
    call = store.active.ready.get(key) or first_call(key, Conv2d, tensors, (parameters,), numbers)
    return call(tensors, numbers)
