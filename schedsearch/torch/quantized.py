"""Convolutions of 8-bit numbers as an operator of PyTorch, which has none of its own for them on a GPU.

Where there is no kernel, PyTorch computes the sums in float64, which holds them exactly; that is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from schedsearch.errors import ArgumentError, UnsupportedError
from schedsearch.ops.conv2d_formats import FLOAT8, INTEGERS
from schedsearch.torch import epilogues
from schedsearch.torch.dispatch import Operation, run
from schedsearch.torch.formats import dtype_name, empty, in_layout, layout_of, torch_dtype
from schedsearch.torch.window import Window, check_window, output_shape, parameters
from schedsearch.workload import Workload

_OPERANDS = ("bias", "scale", "residual", "output_scale")


@dataclass(frozen=True)
class QuantizedConv2d(Operation):
    """A call of quantized_conv2d; see `schedsearch.torch.quantized_conv2d`.

    Attributes:
        epilogue: see `epilogues`.
        zero_points: which of x and weight have one.
        layout: of x and of the output.
    """

    schema: ClassVar[str] = (
        "quantized_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? residual, Tensor? output_scale, "
        "str parameters, float low, float high, int x_zero_point, int weight_zero_point, int y_zero_point) -> Tensor"
    )
    name: ClassVar[str] = "quantized_conv2d"
    tensors: ClassVar[tuple[str, ...]] = ("x", "weight", *_OPERANDS)
    scalars: ClassVar[tuple[str, ...]] = ("low", "high", "x_zero_point", "weight_zero_point", "y_zero_point")
    window: Window
    groups: int
    epilogue: str
    zero_points: tuple[str, ...]
    layout: str

    @classmethod
    def of(cls, *args: Any) -> QuantizedConv2d:
        x, weight, given = args[0], args[1], parameters(args[6])
        zero_points = tuple(name for name in given.zero_points.split(",") if name)
        return cls(given.window, given.groups, given.epilogue, zero_points, layout_of(x, weight))

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        x, weight = given["x"], given["weight"]
        check_window(self.name, x, weight, self.window, self.groups)
        kind = next((kind for kind in (INTEGERS, FLOAT8) if dtype_name(x.dtype) in kind), ())
        if dtype_name(weight.dtype) not in kind:
            raise ArgumentError(
                f"{self.name} got x of {x.dtype} and a weight of {weight.dtype}; allowed: both of int8 or uint8, or both of "
                "float8_e4m3fn or float8_e5m2"
            )
        names = [stage.name for stage in epilogues.stages(self.epilogue)]
        if x.is_floating_point() and "dequantise" not in names:
            raise ArgumentError(f"{self.name} of {x.dtype} needs a scale; give scale=torch.ones(channels) for none")
        for name, (shape, dtype) in self._operands(given).items():
            if name not in given:
                raise ArgumentError(f"epilogue {self.epilogue!r} of {self.name} takes one {name}, got none")
            if tuple(given[name].shape) != tuple(shape) or given[name].dtype != dtype:
                raise ArgumentError(
                    f"{name} of {self.name} has shape {tuple(given[name].shape)} and dtype {given[name].dtype}; allowed: "
                    f"{tuple(shape)} of {dtype}"
                )
        unused = [name for name in _OPERANDS if name in given and name not in self._operands(given)]
        if unused:
            raise ArgumentError(f"epilogue {self.epilogue!r} of {self.name} takes no {unused[0]}, got one")

    def _operands(self, given: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, torch.dtype]]:
        """Shape and dtype of each tensor that the stages take."""
        found: dict[str, tuple[Any, torch.dtype]] = {}
        channels = (given["weight"].shape[0],)
        output = self._sums(given)
        for stage in epilogues.stages(self.epilogue):
            if "to" in stage.params:
                output = torch_dtype(stage.params["to"])
            for operand in stage.kind.operands:
                vector = torch.float32 if output.is_floating_point else output
                dtype = {"vector": vector, "output": output}.get(operand.dtype, torch.float32)
                shape = channels if operand.axes == "K" else self.shape(given)
                found[epilogues.TENSORS[operand.name]] = shape, dtype
        return found

    def _sums(self, given: Mapping[str, torch.Tensor]) -> torch.dtype:
        x, weight = given["x"], given["weight"]
        if x.is_floating_point():
            return torch.float32
        unsigned = x.dtype == weight.dtype == torch.uint8 and not self.zero_points
        return torch_dtype("uint32") if unsigned else torch.int32

    def _out(self, given: Mapping[str, torch.Tensor]) -> torch.dtype:
        made = [stage.params["to"] for stage in epilogues.stages(self.epilogue) if "to" in stage.params]
        return torch_dtype(made[-1]) if made else self._sums(given)

    def shape(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Of the output."""
        return output_shape(given["x"], given["weight"], self.window, self.epilogue)

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return empty(given["x"], self.shape(given), self.layout, self._out(given))

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        x, weight = given["x"], given["weight"]
        if not x.numel():
            raise UnsupportedError("there are no kernels for images without elements")
        n, c, h, w = x.shape
        k, _, r, s = weight.shape
        return Workload.conv2d(
            n=n, h=h, w=w, c=c, k=k, r=r, s=s, stride=self.window.stride, padding=self.window.padding,
            dilation=self.window.dilation, groups=self.groups, dtype=dtype_name(x.dtype),
            weight_dtype=dtype_name(weight.dtype), out_dtype=dtype_name(self._out(given)), zero_points=self.zero_points,
            layout=self.layout, epilogue=epilogues.stages(self.epilogue),
        )  # fmt: skip

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
        """In float64, where the sums of 8-bit numbers are exact; those of float8 are rounded less than a kernel's."""
        x, weight = (
            given[name].double() - (scalars[f"{name}_zero_point"] if name in self.zero_points else 0)
            for name in ("x", "weight")
        )
        y = self.window.convolve(x, weight, self.groups)
        for stage in epilogues.stages(self.epilogue):
            y = self._applied(stage.name, y, stage.params, given, scalars)
        return in_layout(y.to(self._out(given)), self.layout)

    def _applied(
        self,
        stage: str,
        y: torch.Tensor,
        params: Mapping[str, Any],
        given: Mapping[str, torch.Tensor],
        scalars: Mapping[str, float],
    ) -> torch.Tensor:
        """A stage, as `schedsearch.ops.STAGES` defines it."""

        def each_channel(name: str) -> torch.Tensor:
            return given[name].view(1, -1, 1, 1)

        if stage in ("requantise", "quantise"):
            limits = torch.iinfo(torch_dtype(params["to"]))
            scaled = y.float() * each_channel("scale") if stage == "requantise" else y.float() / each_channel("output_scale")
            return (torch.round(scaled) + scalars["y_zero_point"]).clamp(limits.min, limits.max).double()
        if stage == "dequantise":
            return y * each_channel("scale")
        if stage == "bias":
            return y + each_channel("bias").double()
        if stage == "residual":
            return y + given["residual"].double()
        if stage in epilogues.ACTIVATIONS:
            return epilogues.ACTIVATIONS[stage](y)
        if stage == "leaky_relu":
            return functional.leaky_relu(y, scalars["low"])
        if stage == "clip":
            return torch.clamp(y, scalars["low"], scalars["high"])
        if stage == "depth_to_space":
            return functional.pixel_shuffle(y, params["block"])
        raise ArgumentError(f"{self.name} has no stage {stage}; leave it out")

    def tensor_of(self, argument: str) -> str:
        return epilogues.TENSORS.get(argument, argument)

    def scalar_of(self, scalar: str) -> str:
        return epilogues.SCALARS.get(scalar, scalar)


def quantized_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    parameters: str,
    low: float,
    high: float,
    x_zero_point: int,
    weight_zero_point: int,
    y_zero_point: int,
) -> Any:
    """The operator on a device."""
    numbers = (low, high, float(x_zero_point), float(weight_zero_point), float(y_zero_point))
    return run(QuantizedConv2d, (x, weight, bias, scale, residual, output_scale), (parameters,), numbers)
