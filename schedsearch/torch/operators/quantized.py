"""Convolutions of 8-bit numbers as an operator of PyTorch, which has none of its own for them on a GPU.

Where there is no kernel, PyTorch computes the sums in float64, which holds them exactly; that is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from schedsearch.errors import ArgumentError
from schedsearch.ops.conv2d_formats import FLOAT8, INTEGERS
from schedsearch.torch.operators import epilogues
from schedsearch.torch.operators.convolution import Convolution
from schedsearch.torch.operators.dispatch import declared
from schedsearch.torch.operators.formats import dtype_name, empty, in_layout, layout_of, torch_dtype
from schedsearch.torch.operators.window import check_window, parameters
from schedsearch.workload import Workload

_OPERANDS = ("bias", "scale", "residual", "output_scale")


@declared
@dataclass(frozen=True)
class QuantizedConv2d(Convolution):
    """A call of quantized_conv2d; see `schedsearch.torch.quantized_conv2d`.

    Attributes:
        zero_points: which of x and weight have one.
    """

    schema: ClassVar[str] = (
        "quantized_conv2d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None, Tensor? residual=None, "
        'Tensor? output_scale=None, str parameters="", float low=0.0, float high=0.0, int x_zero_point=0, '
        "int weight_zero_point=0, int y_zero_point=0) -> Tensor"
    )
    scalars: ClassVar[tuple[str, ...]] = ("low", "high", "x_zero_point", "weight_zero_point", "y_zero_point")
    zero_points: tuple[str, ...]

    @classmethod
    def of(cls, *args: Any) -> QuantizedConv2d:
        x, weight, *_, text = args
        given = parameters(text)
        zero_points = tuple(name for name in given.zero_points.split(",") if name)
        return cls(given.window, given.groups, given.epilogue, layout_of(x, weight), zero_points)

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

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return empty(given["x"], self.shape(given), self.layout, self._out(given))

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        return self.conv2d(
            given, weight_dtype=dtype_name(given["weight"].dtype), out_dtype=dtype_name(self._out(given)),
            zero_points=self.zero_points,
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
        params: Mapping[str, object],
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
