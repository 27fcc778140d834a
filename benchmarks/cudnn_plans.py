"""cuDNN's int8 convolution through its frontend: every plan, so that the best one can be picked by measurement.

The graph is convolution (int32 sums), bias, relu, scale, conversion to int8, all in one fused operation graph: what our
`epilogue: [bias, relu, requantise]` computes. Images are NHWC, filters OHWI, which is what cuDNN calls KRSC.

Needs `nvidia-cudnn-frontend`, whose module is `cudnn`, a CUDA device and PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cudnn
import torch

import schedsearch

ORDERS = ("bias first", "scale first")  # scale * (sum + bias), or scale * sum + scaled bias
Operands = Sequence[torch.Tensor]  # x, weight, bias in float32, scale in float32, y
Launch = Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """One execution plan that builds and runs.

    Attributes:
        name: cuDNN's.
        launch: makes a launch of operands; see `Operands`.
    """

    name: str
    launch: Callable[[Operands], Launch]


def output(workload: schedsearch.Workload) -> torch.Tensor:
    return torch.empty(workload.output.shape, device="cuda", dtype=torch.int8)


def plans(workload: schedsearch.Workload, operands: Operands, limit_s: float) -> Iterator[Plan]:
    """The plans that cuDNN's heuristics propose and that work, until `limit_s` seconds are over.

    Args:
        operands: a plan must run on them before it is given.

    Raises:
        ValueError: cuDNN has no plan for this layer; the message has its reasons.
    """
    end, found, reasons = time.monotonic() + limit_s, 0, []
    for order in ORDERS:
        try:
            graph = _Graph(workload, order)
        except cudnn.cudnnGraphNotSupportedError as error:
            reasons.append(f"{order}: {error}")
            continue
        for index in range(graph.plans):
            if time.monotonic() > end:
                return
            try:
                plan = graph.plan(index)
                plan.launch(operands)()
                torch.cuda.synchronize()
            except RuntimeError as error:  # this plan cannot run here; others can
                reasons.append(f"plan {index}: {error}")
                continue
            found += 1
            yield plan
        if found:
            return
    if not found:
        raise ValueError(f"cuDNN has no plan: {'; '.join(reasons)[:500]}")


class _Graph:
    """The operation graph of a layer. `plans` is the number of plans that cuDNN's heuristics propose."""

    def __init__(self, workload: schedsearch.Workload, order: str) -> None:
        w, kinds = workload, cudnn.data_type
        (top, left, bottom, right), (_, _, _, k) = w.padding, w.output.shape
        self._order = order
        self._handle = cudnn.create_handle()
        self._graph = graph = cudnn.pygraph(
            handle=self._handle,
            io_data_type=kinds.INT8,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.INT32,
        )

        def image(name: str, n: int, c: int, height: int, width: int) -> Any:
            strides = [height * width * c, 1, width * c, c]
            return graph.tensor(name=name, dim=[n, c, height, width], stride=strides, data_type=kinds.INT8)

        def vector(name: str) -> Any:
            return graph.tensor(name=name, dim=[1, k, 1, 1], stride=[k, 1, k, k], data_type=kinds.FLOAT)

        x, weight = image("x", w.n, w.c, w.h, w.w), image("weight", k, w.c // w.groups, w.r, w.s)
        bias, scale = vector("bias"), vector("scale")
        value = graph.conv_fprop(
            image=x, weight=weight, pre_padding=[top, left], post_padding=[bottom, right], stride=list(w.stride),
            dilation=list(w.dilation), compute_data_type=kinds.INT32, name="sum",
        )  # fmt: skip
        value.set_data_type(kinds.INT32)

        def scaled(value: Any) -> Any:
            return graph.mul(a=value, b=scale, compute_data_type=kinds.FLOAT, name="scaled")

        def biased(value: Any) -> Any:
            value = graph.add(a=value, b=bias, compute_data_type=kinds.FLOAT, name="biased")
            value.set_data_type(kinds.FLOAT)
            value = graph.relu(input=value, compute_data_type=kinds.FLOAT, name="relu")
            value.set_data_type(kinds.FLOAT)
            return value

        if order == "bias first":
            value = scaled(biased(value))
        else:
            value = scaled(value)
            value.set_data_type(kinds.FLOAT)
            value = biased(value)
        value.set_output(True)
        value.set_data_type(kinds.INT8)
        self._tensors = (x, weight, bias, scale, value)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        self.plans = graph.get_execution_plan_count()

    def plan(self, index: int) -> Plan:
        """Raises RuntimeError if the plan cannot be built."""
        self._graph.build_plan_at_index(index)
        workspace = torch.empty(
            max(1, self._graph.get_workspace_size_plan_at_index(index)), device="cuda", dtype=torch.uint8
        )
        return Plan(
            f"{self._graph.get_plan_name_at_index(index)} ({self._order})",
            lambda operands: self._launch(index, workspace, operands),
        )

    def _launch(self, index: int, workspace: torch.Tensor, operands: Operands) -> Launch:
        x, weight, bias, scale, y = operands
        if self._order == "scale first":
            bias = bias * scale
        arrays = (x, weight, bias, scale, y)
        addresses = {tensor.get_uid(): array.data_ptr() for tensor, array in zip(self._tensors, arrays)}

        def launch() -> torch.Tensor:
            cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
            self._graph.execute_plan_at_index(addresses, workspace.data_ptr(), index, handle=self._handle)
            return arrays[-1]  # the closure keeps all of them

        return launch
